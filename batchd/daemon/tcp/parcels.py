"""Batches on their way to other hosts: slots that are watched until ZeroMQ has sent them. DAEMON process.

    view, cut into frames -> (ZeroMQ keeps them, in its thread, until they are sent or the connection is gone) -> BatchSent

ZeroMQ sends from the slot itself. Every frame of a batch looks into one array object; when the last
frame is freed the array goes, a weak reference to it puts a token into a queue, and a descriptor
wakes the loop. That happens in a thread of pyzmq, so nothing else is done there.

Invariant: for each batch that was asked for there is exactly one ``BatchSent``, not before ZeroMQ
has let go of the memory.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import numpy as np
import numpy.typing as npt

from batchd.core.events import BatchSent
from batchd.daemon.descriptors import Watch
from batchd.daemon.memory.slots import SlotPool

_Bytes = npt.NDArray[np.uint8]


class _Token(ref[_Bytes]):
    """What is left of a batch when ZeroMQ has let go of it."""

    __slots__ = ("sent",)
    sent: BatchSent


class Outbox:
    """Shows batches for sending. ``enqueue`` gets a ``BatchSent`` for each, some time later."""

    def __init__(self, watch: Watch, memory: SlotPool, enqueue: Callable[[BatchSent], None]) -> None:
        self._watch = watch
        self._memory = memory
        self._enqueue = enqueue
        self._under_way: dict[int, _Token] = {}
        """By identity: equality of arrays is no equality of batches."""
        self._gone: deque[_Token] = deque()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        watch.add(self._alarm, self._collect)

    def view(self, slot: int, sent: BatchSent) -> memoryview:
        """The memory of a slot, to cut frames out of; ``sent`` follows when it and the last of them are freed."""
        whole: _Bytes = np.frombuffer(self._memory.mapped(slot), dtype=np.uint8)
        token = _Token(whole, self._ring)
        token.sent = sent
        self._under_way[id(token)] = token
        return whole.data

    def close(self) -> None:
        """Stop listening. ZeroMQ must have been closed before; mappings end with the last frame that looks into them."""
        self._watch.remove(self._alarm)
        self._under_way.clear()
        self._gone.clear()
        os.close(self._alarm)

    def _ring(self, token: "ref[_Bytes]") -> None:
        """In whichever thread freed the last frame."""
        assert isinstance(token, _Token)
        self._gone.append(token)
        with suppress(OSError):  # closed already: the daemon ends, and nobody waits for the slot
            os.eventfd_write(self._alarm, 1)

    def _collect(self) -> None:
        os.eventfd_read(self._alarm)
        while self._gone:
            token = self._gone.popleft()
            del self._under_way[id(token)]
            self._enqueue(token.sent)
