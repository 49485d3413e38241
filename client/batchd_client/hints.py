"""Lines in the user's log, each once per program, or once per event. Runs in the trainer.

A program that has not set up logging gets what is a warning on standard error.
"""

import logging
import os
import time
from functools import cache
from typing import Self

from batchd_wire.runtime import RuntimeDirectory, parse_address
from batchd_wire.status import DaemonStatus
from batchd_wire.wording import counted

ABSENCE_S = 2.0
"""A daemon that is away for less is not mentioned."""
ABSENCE_AGAIN_S = 60.0

_log = logging.getLogger("batchd_client")
_away: dict[str, "Absence"] = {}
"""Who logs each absence that has been logged, by the daemon's address: one for all connections."""
_back_s: dict[str, float] = {}
"""When daemons were back, by address; ``time.monotonic``."""


@cache
def log_once(text: str, level: int = logging.INFO) -> None:
    """Log a text, unless this program has logged it before."""
    _log.log(level, text)


class Absence:
    """The wait for a daemon: logged after 2 s, then each minute, and when the daemon is back.

    Connections that wait for the same daemon share the lines. A context manager for the wait.
    """

    def __init__(self, address: str, since_s: float, until_s: float, limit: str) -> None:
        """Times are of ``time.monotonic``. ``limit``: the option that sets ``until_s``."""
        self._address = address
        self.since_s = since_s
        self._until_s = until_s
        self._limit = limit
        self.due_s = since_s + ABSENCE_S
        self.is_over = False
        """True once this connection has stopped waiting."""
        self.reason = "no answer yet"
        """Result of the last try."""

    def look(self) -> None:
        """Log the absence if that is due; call it at least twice a second."""
        now_s = time.monotonic()
        speaker = _away.get(self._address, self)
        if speaker is not self and not speaker.is_over:
            return
        self.since_s, self.due_s = speaker.since_s, speaker.due_s
        # another connection may have found the daemon meanwhile
        if self.since_s < (back_s := _back_s.get(self._address, 0.0)):
            self.since_s, self.due_s = back_s, back_s + ABSENCE_S
        if now_s < self.due_s:
            return
        _away[self._address] = self
        self.due_s = now_s + ABSENCE_AGAIN_S
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._until_s - now_s))
        _log.warning(
            "no daemon at %s for %.0f s: %s; waiting for it until %s (%s)",
            self._address,
            now_s - self.since_s,
            self.reason,
            until,
            self._limit,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the lines to other connections, and to the next wait."""
        self.is_over = True

    @staticmethod
    def returned(address: str) -> None:
        """Log that a daemon is back, if its absence was logged."""
        absence = _away.pop(address, None)
        if absence is not None:
            _back_s[address] = now_s = time.monotonic()
            _log.warning("the daemon at %s is back after %.0f s", address, now_s - absence.since_s)


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
