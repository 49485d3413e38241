"""The workers that the loop has: those of this host, and those of worker hosts. DAEMON process."""

from collections.abc import Callable, Iterable, Iterator

from batchd.core.actions import DismissWorker, OrderChunk, SpawnWorker
from batchd.core.events import Event, WorkerObserved
from batchd.core.fleet import REMOTE_NUMBERS
from batchd.core.rows import runs_of
from batchd.core.state import DaemonState
from batchd.runtime import failpoints
from batchd.runtime.child_log import ChildOutput
from batchd.runtime.children import Linked
from batchd.runtime.numa import NO_NODES
from batchd.runtime.poller import Poller
from batchd.runtime.sandbox import NOTHING, Access, joined
from batchd.runtime.slots import SlotPool
from batchd.stream.served import ServedStream
from batchd.worker.interface import Performers, Workers
from batchd.worker.messages import CHUNKS_AT_ONCE, Chunk, FillChunks, UseSlot
from batchd.worker.supervisor import WorkerProcesses


class AllWorkers:
    """Every kind of workers there is: ``local`` ones, and ``remote`` ones if they may come."""

    def __init__(self, local: "LocalWorkers", *remote: Workers) -> None:
        self.local = local
        self._kinds: tuple[Workers, ...] = (local, *remote)

    def __iter__(self) -> Iterator[Workers]:
        return iter(self._kinds)

    def of(self, worker: int) -> Workers:
        """The kind of a worker, by its number."""
        return self._kinds[worker >= REMOTE_NUMBERS]


class LocalWorkers(WorkerProcesses):
    """Worker processes of this host that fill slots of ``memory``.

    ``streams`` has those of later reloads, too.
    """

    def __init__(  # noqa: PLR0913, PLR0917  its parts
        self,
        poller: Poller,
        enqueue: Callable[[Event], None],
        streams: dict[int, ServedStream],
        memory: SlotPool,
        launched: Linked | None,
        output: ChildOutput | None,
    ) -> None:
        super().__init__(poller, enqueue, launched, output)
        self.performers: Performers = {
            SpawnWorker: self._spawn,
            DismissWorker: lambda action: self.dismiss(action.worker),
        }
        self.is_sandbox_wanted = False
        self.roots = NOTHING
        """What streams that trainers define may read: workers do not start again for each."""
        self.nodes = NO_NODES
        self.streams = streams
        self.memory = memory
        self._fills: dict[int, FillChunks] = {}
        """Orders of this round that were not sent yet, by worker."""

    def enclose_for(self, needed: Iterable[Access | None]) -> bool:
        """As ``enclose``, for streams with these needs, if workers shall be enclosed at all."""
        return self.is_sandbox_wanted and self.enclose(joined([*needed, self.roots]), is_all=True)

    def readable(self) -> list[str] | None:
        """What enclosed workers may read, as far as it is known; None if none shall be enclosed."""
        if not self.is_sandbox_wanted:
            return None
        return [] if self._access is None else self._access.read

    def fill(self, order: OrderChunk) -> None:
        """See ``Workers``."""
        stream, worker = self.streams[order.stream], order.worker
        if self.lacks_stream(worker, order.stream):
            with stream.descriptors() as descriptors:
                self.send(worker, stream.message, *descriptors)
            self.send_quarantined(worker, order.stream, stream.quarantined)
        if self.lacks_slot(worker, order.slot):
            message = UseSlot(order.slot, self.memory.slot_bytes(order.slot))
            self.send(worker, message, self.memory.writable(order.slot))
        fill = self._fills.get(worker)
        if fill is not None and (fill.stream != order.stream or len(fill.chunks) == CHUNKS_AT_ONCE):
            self._send_orders(worker)
            fill = None
        if fill is None:
            fill = self._fills[worker] = FillChunks(order.stream, [], is_packed=False)
        runs, places = runs_of(order.rows), list(order.places)
        fill.chunks.append(Chunk(order.order, order.slot, *order.position, runs, places, order.share))

    def flush(self) -> None:
        """See ``Workers``."""
        for worker in list(self._fills):
            self._send_orders(worker)

    def tick(self, _state: DaemonState) -> None:
        """Show the core the samples that workers decode."""
        for worker in self.pids():
            self._enqueue(WorkerObserved(worker, self.note(worker)))

    def statistics(self, _state: DaemonState, _now: float) -> None:
        """There are no worker hosts."""

    def _spawn(self, action: SpawnWorker) -> None:
        self.start(action.worker)
        if action.node is not None:
            self.run_on(action.worker, self.nodes.cpus[action.node])
        failpoints.passing("daemon.worker.spawned")

    def _send_orders(self, worker: int) -> None:
        """Send the orders that a worker was given in this round."""
        self.send(worker, self._fills.pop(worker))
        failpoints.passing("daemon.order.sent")
