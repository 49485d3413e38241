"""The memory of all rings, taken before a service manager is told that the daemon is ready. DAEMON process; the loop calls it.

    end of a round -> SlotWanted -> the next round makes one slot -> ... -> every ring has all of its slots -> ready

One slot a round, so the loop hears everybody and feeds the watchdog in between; who comes meanwhile
is served.

Invariant: once ``is_complete``, no trainer waits for memory that the configuration promises.
"""

from collections.abc import Callable

import structlog

from batchd.config.schema import meaning_of
from batchd.core.events import Event, SlotWanted
from batchd.core.state import DaemonState
from batchd.errors import MemoryTooSmall, Problem

_log = structlog.get_logger()


class Reservation:
    """Has slots made until there are all. ``is_wanted`` false: they are made on demand, and nothing is to be done."""

    def __init__(self, state: DaemonState, enqueue: Callable[[Event], None], *, is_wanted: bool) -> None:
        self.is_complete = not is_wanted
        self._state = state
        self._enqueue = enqueue

    def round_ended(self, lack: str | None, memory_bytes: int) -> None:
        """Ask for the next slot. Raises ``MemoryTooSmall`` where there was a ``lack`` of memory for one."""
        if self.is_complete or self._state.draining:
            return
        if lack is not None:
            raise MemoryTooSmall([Problem("daemon.memory", lack, meaning_of(("daemon", "memory"), {}))])
        self.is_complete = self._state.has_all_slots
        if self.is_complete:
            _log.info("memory reserved", bytes=memory_bytes)
        else:
            self._enqueue(SlotWanted())
