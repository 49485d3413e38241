"""Why a trainer cannot have what it asks for: the code and text of each refusal. Pure code.

Invariant: a text is short enough to read, whatever was asked for. What a trainer sent is never sent
back whole.
"""

from collections.abc import Iterable

from batchd.core.course import Course
from batchd.core.events import StreamSpec, SubscriptionAsked
from batchd.core.subscription import ENTITLEMENT_SLOTS
from batchd.runtime.suggestions import probably_meant
from batchd_wire.codes import ErrorCode
from batchd_wire.wording import counted

WINDOW_MAX = 64
WORLD_SIZE_MAX = 1 << 20
EPOCH_MAX = 1 << 40
SUBSCRIPTIONS_MAX = 64
"""Subscriptions of one session at a time; one that has ended counts while it holds a batch."""
NAME_SHOWN_CHARACTERS_MAX = 64
"""The longest name that a stream can have."""
STREAMS_SHOWN_MAX = 32
UPGRADE_CLIENT = "upgrade the client, where the trainer runs: pip install ./client in a clone of the daemon's version"
UPGRADE_DAEMON = (
    "upgrade the daemon: `sudo make install` in the tree of the client's version, then systemctl restart batchd"
)
"""No index has batchd, so no command names it without a file."""

Refusal = tuple[ErrorCode, str]


def unknown_stream(name: str, served: Iterable[str]) -> Refusal:
    """Return the refusal of a name that no served stream has."""
    names, shown = sorted(served), name[:NAME_SHOWN_CHARACTERS_MAX]
    more = len(names) - STREAMS_SHOWN_MAX
    meant = probably_meant(shown, names) if more <= 0 else None
    listed = f"{', '.join(names[:STREAMS_SHOWN_MAX])}" + (f" and {more} more" if more > 0 else "")
    helps = f"this daemon serves: {listed}" if meant is None else f"did you mean {meant}?"
    return ErrorCode.UNKNOWN_STREAM, f"there is no stream {shown!r}; {helps}"


def too_many_subscriptions() -> Refusal:
    """Return the refusal of a session that has as many subscriptions as it may have."""
    return ErrorCode.NOT_ALLOWED, (
        f"this trainer has {SUBSCRIPTIONS_MAX} subscriptions already; close one first, or open another connection"
    )


def not_live(name: str) -> Refusal:
    """Return the refusal of a producer by a stream whose samples are stored."""
    return (
        ErrorCode.NOT_LIVE,
        f'the source of stream {name!r} is not of type "push": producers cannot push into it',
    )


def refusal(asked: SubscriptionAsked, course: Course, spec: StreamSpec) -> Refusal | None:
    """Return why a subscription is refused; None where nothing is wrong with it."""
    stream, fingerprint = spec.name, spec.fingerprint
    if spec.has_buckets and not asked.knows_buckets:
        return ErrorCode.UNSUPPORTED_VERSION, (
            f"the slots of stream {stream!r} have another room in each bucket, which this client cannot read; {UPGRADE_CLIENT}"
        )
    if not 0 < asked.world_size <= WORLD_SIZE_MAX or asked.rank >= asked.world_size:
        return ErrorCode.RANK_OUT_OF_RANGE, (
            f"rank {asked.rank} of world_size {asked.world_size}: ranks go from 0 to world_size - 1"
        )
    if asked.window > WINDOW_MAX:
        return ErrorCode.WINDOW_OUT_OF_RANGE, f"window = {asked.window}: it may be 1 to {WINDOW_MAX} batches"
    if asked.fingerprint is not None and asked.fingerprint != fingerprint:
        changes = asked.changes or "it has other files or other settings, or this batchd makes other pixels"
        return ErrorCode.FINGERPRINT_MISMATCH, (
            f"stream {stream!r} is not the one of the trainer's state: {changes} (fingerprint {asked.fingerprint[:16]}, now "
            f"{fingerprint[:16]}), so the same position would be another batch"
            + (
                "; convert=True beside the state goes on at the first sample not delivered"
                if asked.is_convertible
                else ""
            )
        )
    steps = course.plan.steps
    if asked.sample is not None and (spec.live is not None or asked.epoch > EPOCH_MAX or course.base > steps):
        return ErrorCode.POSITION_OUT_OF_RANGE, f"epoch {asked.epoch}, sample {asked.sample}: " + (
            f"stream {stream!r} is live, so its samples come once"
            if spec.live is not None
            else f"an epoch of stream {stream!r} has samples 0 to {course.plan.epoch_rows - 1}"
        )
    if asked.epoch > EPOCH_MAX or course.base > steps:
        return ErrorCode.POSITION_OUT_OF_RANGE, (
            f"epoch {asked.epoch}, step {asked.step}: an epoch of stream {stream!r} has steps 0 to {steps - 1}"
        )
    if course.rounds < 1:
        return ErrorCode.TOO_FEW_BATCHES, (
            f"an epoch of stream {stream!r} has {counted(steps, 'batch')}, fewer than the {asked.world_size} ranks, and "
            "drop_last = true leaves them out; use a smaller batch_size, fewer ranks, or drop_last = false"
        )
    return None


def ring_too_small(stream: str, slots: int, most: int, active: int, promised: int) -> Refusal | None:
    """Return the refusal of a ring without room for another subscription, else None.

    ``most``: the slots that it may have when others need less memory. ``promised``: those that
    cannot be taken back from the ``active`` subscriptions.
    """
    if ENTITLEMENT_SLOTS * (active + 1) > most:
        return ErrorCode.RING_TOO_SMALL, (
            f"stream {stream!r} has {counted(slots, 'slot')} and {counted(active, 'trainer')}, and each needs "
            f"{ENTITLEMENT_SLOTS}; give it more memory (memory = in batchd.toml, or in its table)"
        )
    if promised + ENTITLEMENT_SLOTS > slots:
        return ErrorCode.RING_BUSY, (
            f"{promised} of the {slots} slots of stream {stream!r} are held by other trainers or kept for them, and one more "
            f"trainer needs {ENTITLEMENT_SLOTS}; have them release batches, or give the stream more memory "
            "(memory = in batchd.toml, or in its table)"
        )
    return None


def ring_exhausted(stream: str, slots: int, held: int, others: int) -> Refusal:
    """Return the refusal of a trainer that itself holds the slots that it waits for."""
    return ErrorCode.RING_EXHAUSTED, (
        f"this trainer holds {held} of the {slots} slots of stream {stream!r}"
        + (f", and {others} are kept for others" if others else "")
    )
