"""The program of a worker host: one loop, one link at a time. WORKER HOST process; its entry.

    Poller( DEALER, its monitor | worker channels, pidfds, signals, sent rows | timers )

    HostServe -> recipe -> index: in memory, on disk, or requested -> StreamOpened | StreamRefused
    a link ends -> workers, indexes, caches and streams stay -> the next link serves the same again?

A stream that the next link serves unchanged continues: workers keep their files open, and caches
their samples. Streams that it does not serve end after ``FORMER_KEPT_S``.

Single-threaded: there is nothing to lock. Invariant: however the program ends, its workers end, and
only indexes and caches on disk remain, which are kept on purpose.
"""

import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic

import structlog

from batchd.core.actions import WithdrawOrder
from batchd.core.events import HostLeaves, StreamOpened, StreamRefused
from batchd.core.state import TICK_S
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.errors import BatchdError
from batchd.pool import messages
from batchd.pool.worker_host.connection import GatewayAddress, GatewayConnection
from batchd.pool.worker_host.indexes import IndexDamaged, IndexFolder, ReceivedIndex
from batchd.pool.worker_host.streams import CacheBudget, OpenedStream, PathMap, StreamOpener, StreamUnusable
from batchd.pool.worker_host.workers import HostWorkers
from batchd.runtime import __version__
from batchd.runtime.child_log import ChildOutput
from batchd.runtime.children import Linked
from batchd.runtime.descriptors import allow_descriptors
from batchd.runtime.poller import Poller, Signals
from batchd.runtime.sandbox import joined
from batchd.runtime.sizes import round_bytes
from batchd.worker.messages import TO_WORKER, ServeStream
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.wording import counted

_log = structlog.get_logger()

LEAVE_S = 6.0
"""Time to finish and send the work in progress after a first signal."""
RELEASE_S = 1.0
"""Time for the gateway to end the link of a leaving host that has no order."""
WORKERS_END_S = 1.0
PROGRESS_EVERY_S = 5.0
FORMER_KEPT_S = 30.0
"""Time for which streams of the last link are kept for the present one."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
DIGEST = re.compile("[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options of the command line. ``name`` is for people; ``launched``: the fork server.

    ``index_folder``: None keeps no indexes. ``progress`` is called with the names of streams, the
    received bytes of their index, and its size in bytes; None logs these instead. ``serving`` is
    called with a line for people. ``output``: a pipe that children write to instead of standard
    error.
    """

    gateway: GatewayAddress
    workers: int
    name: str
    paths: PathMap
    budget: CacheBudget
    index_folder: Path | None
    launched: Linked | None
    progress: Callable[[str, int, int], None] | None
    serving: Callable[[str], None]
    output: int


def run_host(options: HostOptions) -> None:
    """Run workers for a daemon until SIGTERM or SIGINT. Raises ``BatchdError``."""
    allow_descriptors()
    with ExitStack() as stack:
        poller = Poller()
        stack.callback(poller.close)
        output = ChildOutput(poller, options.output)
        stack.callback(output.close)
        host = WorkerHost(options, poller, output)
        signals = Signals(poller, SIGNALS, host.received_signal)
        stack.callback(signals.close)  # last: a second Ctrl-C while the workers end is no error
        stack.callback(host.close)
        host.run()
    _log.info("worker host stopped")


@dataclass(slots=True)
class _Awaited:
    """A stream that waits for its index."""

    served: messages.HostServe
    serve: ServeStream


class WorkerHost:
    """Owns the connection, the workers and the streams."""

    def __init__(self, options: HostOptions, poller: Poller, output: ChildOutput) -> None:
        self._options = options
        self._poller = poller
        self._connection = GatewayConnection(options.gateway, poller, self._received, self._link_ended)
        self._workers = HostWorkers(poller, options.workers, self._connection.send, options.launched, output)
        self._opener = StreamOpener(options.paths, options.budget)
        poller.every(TICK_S, self._allow_caches)
        self._folder = IndexFolder(options.index_folder)
        self._indexes: dict[str, ReceivedIndex] = {}
        """By digest: the indexes of all streams that are open or will be."""
        self._streams: dict[int, OpenedStream] = {}
        """By the number that the gateway uses."""
        self._awaited: dict[int, _Awaited] = {}
        self._former: list[OpenedStream] = []
        """Streams of the last link that the present one has not served."""
        self._interrupted: set[str] = set()
        """Digests of indexes that the last link sent in part."""
        self._former_until_s = inf
        poller.at(lambda: self._former_until_s if self._connection.link else inf, self._end_former)
        self._imported: dict[str, tuple[str, tuple[str, ...]]] = {}
        """Digests and folders of users' modules that workers may have imported, by name."""
        self._is_announced = False
        self._next_progress_s = monotonic() + PROGRESS_EVERY_S
        self._deadline_s: float | None = None
        """Latest time to end, after a signal."""
        self._stops_at_once = False
        host = socket.gethostname()
        facts = options.name or host, host, os.getpid(), options.workers, os.uname().machine
        self._connection.introduce(messages.Register(messages.LINK_VERSION, __version__, CONTENT_VERSION, *facts))

    def run(self) -> None:
        """Run until a signal ends it. Raises ``BatchdError``."""
        try:
            while not self._is_over():
                self._connection.receive(self._poller.wait())
                self._workers.handle_events()
                self._announce()
        except BatchdError:
            if self._deadline_s is None:  # else the program is ending anyway
                raise

    def received_signal(self, number: signal.Signals) -> None:
        """The first signal finishes work in progress, the second one ends at once."""
        if self._deadline_s is not None:
            _log.info("stopping at once", signal=number.name)
            self._stops_at_once = True
            return
        _log.info("leaving", signal=number.name, within_s=LEAVE_S)
        self._deadline_s = monotonic() + LEAVE_S
        self._workers.leave()
        self._connection.send(HostLeaves(self._connection.link))

    def close(self) -> None:
        """End everything."""
        sends_rest = self._deadline_s is not None and not self._stops_at_once
        self._deadline_s = monotonic()
        self._connection.end(sends_rest=sends_rest)
        self._workers.close(WORKERS_END_S)
        for stream in self._former:
            stream.close()
        for index in self._indexes.values():
            index.close()

    def _is_over(self) -> bool:
        """Whether to end, after a signal.

        The gateway ends the link when it has all rows. A gateway that hangs does not.
        """
        if self._deadline_s is None:
            return False
        if self._workers.is_idle:
            self._deadline_s = min(self._deadline_s, monotonic() + RELEASE_S)
        return self._stops_at_once or not self._connection.link or monotonic() >= self._deadline_s

    def _allow_caches(self) -> None:
        self._opener.allow_caches(self._streams.values())

    def _announce(self) -> None:
        """Say which streams are served, once all of a link are and a worker is ready."""
        if self._streams and not self._awaited and not self._is_announced and self._workers.ready:
            self._is_announced = True
            names = ", ".join(sorted(stream.name for stream in self._streams.values()))
            workers = counted(self._options.workers, "worker")
            self._options.serving(f"serving {names} of {self._options.gateway.address.host} with {workers}")

    # --- the link ---------------------------------------------------------------------------------

    def _received(self, message: Message, frames: Sequence[memoryview]) -> None:
        """Act on a message of the present link."""
        match message:
            case messages.Admitted():
                self._begin_link(message)
            case messages.HostServe():
                self._serve(message)
            case messages.IndexPart():
                self._take_part(message, frames)
            case messages.FillRows():
                stream = self._streams.get(message.stream)
                if stream is None or not self._workers.fill(message, stream):
                    self._connection.close(f"the gateway sent an invalid order: {message}")
            case WithdrawOrder():
                self._workers.withdraw(message.worker, message.order)
            case messages.HostQuarantine():
                self._quarantine(message)
            case messages.HostStorage() | messages.HostLimits():
                self._use_limits(message)
            case messages.HostForget():
                self._forget(message.stream)

    def _begin_link(self, message: messages.Admitted) -> None:
        _log.info("connected to the gateway", link=message.link, gateway=self._connection.address)
        self._former_until_s = min(self._former_until_s, monotonic() + FORMER_KEPT_S)
        self._workers.begin_link(message.link, message.sample_timeout_s)

    def _link_ended(self, reason: str) -> None:
        """Keep everything but the orders for the next link."""
        if self._deadline_s is None:
            _log.warning("connection to the gateway ended", reason=reason, advice="this host reconnects")
        self._workers.end_link()
        self._former += self._streams.values()
        self._streams.clear()
        self._awaited.clear()
        self._is_announced = False
        self._interrupted = {index.digest for index in self._indexes.values() if not index.is_complete}
        for index in self._indexes.values():
            index.restart()

    # --- streams ----------------------------------------------------------------------------------

    def _serve(self, served: messages.HostServe) -> None:
        """Open a stream, continue one of the last link, or get its index first."""
        try:
            serve = TO_WORKER.decode(served.serve)
        except MalformedMessage as error:
            self._connection.close(f"the gateway sent an invalid stream: {error}")
            return
        if not isinstance(serve, ServeStream) or not DIGEST.fullmatch(served.digest):
            self._connection.close("the gateway sent an invalid stream")
            return
        self._forget(serve.stream)
        former = next((stream for stream in self._former if stream.is_still(served)), None)
        if former is not None:
            self._former.remove(former)
            self._streams[serve.stream] = former
            self._use_storage(serve.storage)
            known = set(former.quarantined)
            self._workers.quarantine(former, [sample for sample in served.quarantined if sample not in known])
            self._connection.send(StreamOpened(self._connection.link, serve.stream))
            return
        self._awaited[serve.stream] = _Awaited(served, serve)
        try:
            self._find_index(served)
        except OSError as error:
            self._refuse(serve, f"no memory for its index of {round_bytes(served.index_bytes)}: {error.strerror}")

    def _find_index(self, served: messages.HostServe) -> None:
        """Open the streams that wait for an index, or request the index. Raises ``OSError``."""
        index = self._indexes.get(served.digest)
        if index is None:
            index = self._folder.load(served.digest, served.index_bytes)
            if index is None:
                index = ReceivedIndex(served.digest, served.index_bytes)
            self._indexes[served.digest] = index
        if index.is_complete:
            self._open_with(index)
        else:
            self._ask(index)

    def _ask(self, index: ReceivedIndex) -> None:
        for offset in index.next_offsets():
            self._connection.send(messages.AskIndex(self._connection.link, index.digest, offset))

    def _take_part(self, message: messages.IndexPart, frames: Sequence[memoryview]) -> None:
        index = self._indexes.get(message.digest)
        if index is None or index.is_complete:
            return  # its stream was forgotten meanwhile
        expected = min(messages.INDEX_PART_BYTES, index.size - index.received)
        if message.offset != index.received or [len(frame) for frame in frames] != [expected]:
            self._connection.close("the gateway sent a part of an index that was not requested")
            return
        try:
            is_last = index.add(frames[0])
            if is_last:
                index.seal()
        except IndexDamaged as error:
            self._indexes.pop(index.digest).close()
            self._connection.close(f"the gateway sent a damaged index: {error}")
            return
        self._show_progress(index)
        if is_last:
            self._folder.keep(index)
            self._open_with(index)
        else:
            self._ask(index)

    def _show_progress(self, index: ReceivedIndex) -> None:
        names = ", ".join(
            awaited.serve.name for awaited in self._awaited.values() if awaited.served.digest == index.digest
        )
        if self._options.progress is not None:
            self._options.progress(names, index.received, index.size)
        elif monotonic() >= self._next_progress_s:
            self._next_progress_s = monotonic() + PROGRESS_EVERY_S
            _log.info("index arriving", streams=names, received_bytes=index.received, bytes=index.size)

    def _open_with(self, index: ReceivedIndex) -> None:
        """Open all streams that wait for an index."""
        for number, awaited in list(self._awaited.items()):
            if awaited.served.digest != index.digest:
                continue
            try:
                others = [*self._streams.values(), *self._former]
                stream = self._opener.open(awaited.served, awaited.serve, index.descriptor, others)
            except StreamUnusable as error:
                self._refuse(awaited.serve, str(error))
                continue
            del self._awaited[number]
            self._streams[number] = stream
            self._renew_workers(stream)
            _log.info("stream opened", stream=stream.name, samples=awaited.serve.samples, cache=stream.message.cache)
            self._connection.send(StreamOpened(self._connection.link, number))
        self._allow_caches()

    def _renew_workers(self, stream: OpenedStream) -> None:
        """Replace workers that cannot reach a stream, or may have imported other code for it."""
        recipe = stream.message.recipe
        self._workers.enclose(joined(one.message.recipe.needed for one in self._streams.values()))
        code = {name: (digest, tuple(recipe.python_path)) for name, digest in recipe.modules}
        if any(self._imported.get(name, digest) != digest for name, digest in code.items()):
            self._workers.renew("it has imported an earlier version of a user's module")
        self._imported |= code

    def _refuse(self, serve: ServeStream, reason: str) -> None:
        """Report to the gateway that a stream cannot be filled here."""
        _log.error("stream cannot be filled here", stream=serve.name, reason=reason)
        self._connection.send(StreamRefused(self._connection.link, serve.stream, reason))
        self._forget(serve.stream)

    def _quarantine(self, message: messages.HostQuarantine) -> None:
        stream, awaited = self._streams.get(message.stream), self._awaited.get(message.stream)
        if stream is not None:
            self._workers.quarantine(stream, message.samples)
        elif awaited is not None:
            awaited.served.quarantined.extend(message.samples)

    def _use_limits(self, message: messages.HostStorage | messages.HostLimits) -> None:
        if isinstance(message, messages.HostStorage):
            self._use_storage(message.storage)
        else:
            self._workers.use_limits(message.sample_timeout_s)

    def _use_storage(self, storage: tuple[int, int, int]) -> None:
        for stream in [*self._streams.values(), *self._former]:
            stream.use_storage(storage)
        for awaited in self._awaited.values():
            awaited.serve = ServeStream.filled_from(awaited.serve, storage=storage)
        self._workers.use_storage(storage)

    def _forget(self, number: int) -> None:
        """End a stream that no further order names."""
        self._awaited.pop(number, None)
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._end_stream(stream)
        self._drop_indexes()

    def _end_stream(self, stream: OpenedStream) -> None:
        self._workers.forget(stream)
        stream.close()
        self._drop_indexes()

    def _end_former(self) -> None:
        """End the streams that the present link has not served again."""
        self._former_until_s = inf
        self._interrupted.clear()
        former, self._former = self._former, []
        for stream in former:
            self._end_stream(stream)
        self._drop_indexes()

    def _drop_indexes(self) -> None:
        """Close the indexes that no stream uses or waits for."""
        opened = {stream.served.digest for stream in [*self._streams.values(), *self._former]}
        wanted = self._interrupted | opened | {awaited.served.digest for awaited in self._awaited.values()}
        for digest in self._indexes.keys() - wanted:
            self._indexes.pop(digest).close()
