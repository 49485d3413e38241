"""The daemon's interface to workers, wherever they run, and what each knows. DAEMON process.

    spawn -> send* -> gone        kill -> gone        dismiss -> gone

``worker.supervisor`` implements it for processes of this host. Events arrive through the loop's
queue: ``WorkerReady``, ``PartsNamed``, ``ChunkDone``, and ``WorkerGone`` once it is certain that
the worker writes no more.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from batchd.core.events import Note
from batchd.core.fleet import WorkerKind
from batchd_wire.codec import Message


class Workers(Protocol):
    """Workers by number, never given twice. A call about one that is gone does nothing."""

    kind: WorkerKind
    decoders: str
    """Decoders of the workers, as they report them; empty before the first is ready."""

    def spawn(self, number: int) -> None:
        """Start worker ``number``. Raises ``OSError``, and then there is none."""

    def send(self, number: int, message: Message, *descriptors: int) -> None:
        """Send a message without waiting. A worker that does not read is killed."""

    def kill(self, number: int, reason: str) -> None:
        """End a worker that hangs or breaks the protocol."""

    def dismiss(self, number: int) -> None:
        """Tell an idle worker to end."""

    def note(self, number: int) -> Note | None:
        """The note of a worker's current row; None for a worker that is gone."""

    def pids(self) -> dict[int, int]:
        """The process id of each worker, by its number; 0 before it is known."""


class WorkerBook:
    """Records which streams and slots each worker knows. It gets each once, before an order."""

    def __init__(self) -> None:
        self._streams: defaultdict[int, set[int]] = defaultdict(set)
        self._slots: defaultdict[int, set[int]] = defaultdict(set)

    def enter_stream(self, worker: int, stream: int) -> bool:
        """Record that a worker knows a stream; False if it did before."""
        return _enter(self._streams[worker], stream)

    def enter_slot(self, worker: int, slot: int) -> bool:
        """Record that a worker knows a slot; False if it did before."""
        return _enter(self._slots[worker], slot)

    def workers_of(self, stream: int) -> list[int]:
        """The workers that know a stream."""
        return [worker for worker, streams in self._streams.items() if stream in streams]

    def drop_stream(self, stream: int) -> list[int]:
        """Forget a stream that no order will name; return the workers that know it."""
        workers = self.workers_of(stream)
        for worker in workers:
            self._streams[worker].discard(stream)
        return workers

    def drop_slots(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """Forget slots that no order will name; return those that each worker knows."""
        gone = set(slots)
        known = {worker: sorted(slots & gone) for worker, slots in self._slots.items() if slots & gone}
        for worker in known:
            self._slots[worker] -= gone
        return known

    def drop_worker(self, worker: int) -> None:
        """Forget a worker that is gone."""
        self._streams.pop(worker, None)
        self._slots.pop(worker, None)


def _enter(known: set[int], number: int) -> bool:
    is_new = number not in known
    known.add(number)
    return is_new
