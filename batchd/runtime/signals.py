"""Signals through a descriptor, which the loop reads. DAEMON process, and worker hosts."""

import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence

from batchd.runtime.poller import Poller

READ_BYTES = 64
"""Signals read at once; more stay in the socket."""


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still there (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in {errno.ENXIO, errno.EIO, errno.ENOENT}
    return True


class Signals:
    """Calls ``received`` from the loop for each of some signals, until it is closed."""

    def __init__(
        self, poller: Poller, numbers: Sequence[signal.Signals], received: Callable[[signal.Signals], None]
    ) -> None:
        self._poller = poller
        self._received = received
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        # The descriptor is set before the handlers: a signal between the two would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        # The handlers do nothing: the interpreter writes the signal's number to the descriptor.
        self._before = {number: signal.signal(number, lambda _number, _frame: None) for number in numbers}
        poller.watch(self._ours.fileno(), self._read)

    def close(self) -> None:
        """Put everything back as it was."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._poller.unwatch(self._ours.fileno())
        self._ours.close()
        self._theirs.close()

    def _read(self) -> None:
        for number in os.read(self._ours.fileno(), READ_BYTES):
            self._received(signal.Signals(number))
