"""Why the next batch of a live stream does not come, for people who wait for it. Trainers and CLI; standard library only."""

from batchd_wire.status import DaemonStatus
from batchd_wire.wording import counted

SILENCE_MAX_S = 1.0
"""How long somebody may wait before he is told why."""


def missing_samples(status: DaemonStatus, stream: str) -> str | None:
    """Say how far the next batch of ``stream`` is; None where it is not samples that are missing."""
    for one in status.streams:
        if one.name == stream and one.live is not None:
            had = one.live.queued_samples + one.live.bound_samples
            if had < one.batch_size:
                who = _producers(one.live.producers, one.live.pushed_samples)
                next_batch = f"its next batch has {had} of {counted(one.batch_size, 'sample')}"
                return f"stream {stream!r} has {who}, and {next_batch}; {_remedy(stream)}"
    return None


def _producers(count: int, pushed: int) -> str:
    if count:
        return counted(count, "producer")
    return "no producers just now" if pushed else "no producers yet"


def _remedy(stream: str) -> str:
    return (
        f"programs on the daemon's host push them with batchd_client.push({stream!r}), and `batchd status` counts them"
    )
