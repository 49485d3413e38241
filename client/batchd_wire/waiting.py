"""Why the next batch of a live stream does not come, for people who wait for it. Trainers and CLI; standard library only.

It is read out of a ``Status``, which is another process's word: what is not as expected there says nothing.
"""

from collections.abc import Mapping

from batchd_wire.wording import counted

SILENCE_MAX_S = 1.0
"""How long somebody may wait before he is told why."""


def missing_samples(status: Mapping[str, object], stream: str) -> str | None:
    """Say how far the next batch of ``stream`` is; None where it is not samples that are missing."""
    streams = status.get("streams")
    for one in streams if isinstance(streams, list) else []:
        match one:
            case {
                "name": str(name),
                "batch_size": int(batch_size),
                "live": {
                    "producers": int(producers),
                    "pushed_samples": int(pushed),
                    "queued_samples": int(queued),
                    "bound_samples": int(bound),
                },
            } if name == stream and queued + bound < batch_size:
                had = f"{queued + bound} of {counted(batch_size, 'sample')}"
                who = _producers(producers, pushed)
                return f"stream {stream!r} has {who}, and its next batch has {had}; {_remedy(stream)}"
    return None


def _producers(count: int, pushed: int) -> str:
    if count:
        return counted(count, "producer")
    return "no producers just now" if pushed else "no producers yet"


def _remedy(stream: str) -> str:
    return (
        f"programs on the daemon's host push them with batchd_client.push({stream!r}), and `batchd status` counts them"
    )
