"""Lines in the user's log, each once per program, or once per event. Runs in the trainer."""

import logging
import os
import time
from functools import cache

from batchd_wire.runtime import RuntimeDirectory, parse_address
from batchd_wire.status import DaemonStatus
from batchd_wire.wording import counted

ABSENCE_S = 2.0
"""A daemon that is away for less is not mentioned."""

_log = logging.getLogger("batchd_client")
_away: dict[str, float] = {}
"""Since when daemons are away whose absence has been logged, by address; ``time.monotonic``.

All connections of the program share it, and any thread may use it: each line is written by the one
that changes it, by one call.
"""


@cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """Log a text, unless this program has logged it before."""
    _log.log(level, text)


def log_absence(address: str, since_s: float, reconnect_timeout_s: float) -> None:
    """Log that a daemon is away, once it has been for 2 s. Paired with ``log_return``."""
    away_s = time.monotonic() - since_s
    if away_s >= ABSENCE_S and address not in _away and _away.setdefault(address, since_s) is since_s:
        text = "the daemon at %s has been away for %.0f s; waiting up to %g s for it"
        _log.info(text, address, away_s, reconnect_timeout_s)


def log_return(address: str) -> None:
    """Log that a daemon is back, if its absence was logged."""
    since_s = _away.pop(address, None)
    if since_s is not None:
        _log.info("the daemon at %s is back after %.1f s", address, time.monotonic() - since_s)


def shared_batches_hint(stream: str, ranks: int, batches: int, samples: int) -> str | None:
    """Hint that ranks share every batch of an epoch; None if they do not."""
    if ranks <= batches:
        return None
    twice = ", and some of them the same samples" if ranks > samples else ""
    return (
        f"an epoch of stream {stream!r} has {counted(batches, 'batch')} for {ranks} ranks: they share batches, so each gets "
        f"fewer samples than batch_size{twice}; use a smaller batch_size or fewer ranks"
    )


def missing_samples_hint(status: DaemonStatus, stream: str) -> str | None:
    """Hint which samples the next batch of ``stream`` lacks; None if it lacks none."""
    one = status.stream(stream)
    if one is None or one.live is None or one.live.queued_samples + one.live.bound_samples >= one.batch_size:
        return None
    none = "no producers just now" if one.live.pushed_samples else "no producers yet"
    who = counted(one.live.producers, "producer") if one.live.producers else none
    had = f"{one.live.queued_samples + one.live.bound_samples} of {counted(one.batch_size, 'sample')}"
    return (
        f"stream {stream!r} has {who}, and its next batch has {had}; programs on the daemon's host push them with "
        f"batchd_client.push({stream!r}), and `batchd status` counts them"
    )


def shared_memory_hint(address: str, ipc_address: str) -> str:
    """Hint that the daemon at ``address`` is also at ``ipc_address``, with shared memory."""
    if _is_here(ipc_address):
        return f"the daemon at {address} runs on this host: {ipc_address} is faster, as it shares memory"
    path = ipc_address.removeprefix("ipc://")
    return (
        f"the daemon at {address} runs on this machine, but its runtime directory {path} is not seen from here: share it with "
        f"this container (docker run -v {path}:{path}) and connect to {ipc_address}, which is faster, as it shares memory"
    )


def _is_here(ipc_address: str) -> bool:
    """True if the daemon's lifeline is visible at that path, even in a closed directory."""
    try:
        directory = parse_address(ipc_address)
        if not isinstance(directory, RuntimeDirectory):
            return False
        os.stat(directory.lifeline_path)  # noqa: PTH116  Path.exists() takes a closed directory for none on some versions
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True
