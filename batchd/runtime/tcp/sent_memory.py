"""Memory that ZeroMQ sends from, without a copy. DAEMON process, and worker hosts.

    view, cut into frames -> (ZeroMQ's thread, until sent or disconnected) -> released()

Every frame is a view of one array object. When the last frame is freed the array is freed, a weak
reference to it puts a token into a queue, and a descriptor wakes the loop. That happens in a thread
of pyzmq, so nothing else is done there.

Invariant: ``released`` is called once for each view, and not before ZeroMQ has let go of the
memory.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import numpy as np
import numpy.typing as npt

from batchd.runtime.poller import Poller

_Bytes = npt.NDArray[np.uint8]


class _Token(ref[_Bytes]):
    """Remains of a view after ZeroMQ has released its memory."""

    __slots__ = ("released",)
    released: Callable[[], None]


class SentMemory:
    """Shows memory for sending, and tells when it is not used any more."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._under_way: dict[int, _Token] = {}
        """By identity: equal arrays are not the same memory."""
        self._gone: deque[_Token] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        poller.watch(self._alarm, self._collect)

    def __len__(self) -> int:
        return len(self._under_way)

    def view(self, memory: memoryview, released: Callable[[], None]) -> memoryview:
        """Return ``memory`` to cut frames from, as uint8 of one dimension.

        ``released`` is called by the loop when this view and the last frame are freed.
        """
        whole: _Bytes = np.frombuffer(memory, dtype=np.uint8)
        token = _Token(whole, self._ring)
        token.released = released
        self._under_way[id(token)] = token
        return whole.data

    def close(self) -> None:
        """Stop watching, after ZeroMQ is closed. Mappings end with the last frame."""
        self._poller.unwatch(self._alarm)
        self._under_way.clear()
        self._gone.clear()
        os.close(self._alarm)

    def _ring(self, token: "ref[_Bytes]") -> None:
        """Wake the loop. Runs in the thread that freed the last frame."""
        assert isinstance(token, _Token)
        self._gone.append(token)
        with suppress(OSError):  # closed already: the process ends
            os.eventfd_write(self._alarm, 1)

    def _collect(self) -> None:
        os.eventfd_read(self._alarm)
        while self._gone:
            token = self._gone.popleft()
            del self._under_way[id(token)]
            token.released()
