"""Is what a trainer asks for possible at all? Nobody's process; a pure check of one request against one stream."""

from batchd.core.course import Course
from batchd.core.events import SubscriptionAsked
from batchd_wire.codes import ErrorCode

WINDOW_MAX = 64
WORLD_SIZE_MAX = 1 << 20
EPOCH_MAX = 1 << 40


def refusal(asked: SubscriptionAsked, course: Course, stream: str, fingerprint: str) -> tuple[ErrorCode, str] | None:
    """The reason to refuse, with its code; None where nothing stands against it."""
    if not 0 < asked.world_size <= WORLD_SIZE_MAX or asked.rank >= asked.world_size:
        return ErrorCode.RANK_OUT_OF_RANGE, (
            f"rank {asked.rank} of world_size {asked.world_size}: ranks go from 0 to world_size - 1"
        )
    if asked.window > WINDOW_MAX:
        return ErrorCode.WINDOW_OUT_OF_RANGE, f"window = {asked.window}: it may be 1 to {WINDOW_MAX} batches"
    if asked.fingerprint is not None and asked.fingerprint != fingerprint:
        return ErrorCode.FINGERPRINT_MISMATCH, (
            f"the saved state is of a stream {stream!r} with other files or other settings (fingerprint "
            f"{asked.fingerprint[:16]}, now {fingerprint[:16]}), so the same position would be another batch"
        )
    steps = course.plan.steps
    if asked.epoch > EPOCH_MAX or asked.step > steps:
        return ErrorCode.POSITION_OUT_OF_RANGE, (
            f"epoch {asked.epoch}, step {asked.step}: an epoch of stream {stream!r} has steps 0 to {steps - 1}"
        )
    if course.rounds < 1:
        return ErrorCode.TOO_FEW_BATCHES, (
            f"an epoch of stream {stream!r} has {steps} batches, fewer than the {asked.world_size} ranks; use a smaller "
            "batch_size, fewer ranks, or drop_last = false"
        )
    return None
