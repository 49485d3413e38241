"""How long this thread was ready to run and had no CPU, as the kernel counts it. WORKER process.

    /proc/thread-self/schedstat:  ns on a CPU | ns ready, without a CPU | how often it got one

Time that passes without CPU time may be spent sleeping, or waiting for a file, or for a CPU; the kernel alone can tell.

Invariant: it is the thread that made it which is measured.
"""

import os
from pathlib import Path

PLACE = Path("/proc/thread-self/schedstat")
_BYTES_MAX = 128
_NOT_COUNTED = ["0", "0", "0"]
"""What a kernel writes that could count and does not."""


class RunQueue:
    """Asks again and again, at about a microsecond each. ``close`` gives the file back."""

    def __init__(self, place: Path = PLACE) -> None:
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without CONFIG_SCHED_INFO
            return
        if os.pread(self._descriptor, _BYTES_MAX, 0).decode().split() == _NOT_COUNTED:
            self.close()

    def waited_ns(self) -> int | None:
        """In total since the thread began; None where the kernel does not say."""
        if self._descriptor is None:
            return None
        return int(os.pread(self._descriptor, _BYTES_MAX, 0).split()[1])

    def close(self) -> None:
        """Nobody asks any more, or gets None."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
