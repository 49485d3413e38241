"""From a configuration to a running daemon, and back. DAEMON process; its entry.

    hold the directory -> start the workers (they import during the scan)
    -> divide the memory, or wait for it -> scan the sources
    -> bind -> ready -> loop -> close everything, in the opposite order

With ``reserve = "start"`` the memory of all rings is taken before a service manager is told that
the daemon is ready:

    end of a round -> SlotWanted -> the next round makes one slot -> ... -> all slots -> ready

One slot per round, so that in between the loop reads every message and feeds the watchdog; trainers
that connect meanwhile are served.

Invariant: whatever fails, nothing is left behind: the parts are closed in the opposite order,
processes end with their channels, memory with its descriptors, and sockets are removed while the
lock is held.
"""

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeAlias

import structlog

from batchd import failpoints
from batchd.children import Linked
from batchd.config.addresses import tcp_endpoint
from batchd.config.directories import default_cache_dir
from batchd.config.schema import meaning_of
from batchd.config.tree import Config
from batchd.core.events import Event, SlotWanted
from batchd.core.state import DaemonState
from batchd.daemon.descriptors import Selector
from batchd.daemon.doors import DaemonSide, Door, Doors, Enqueue, Queue
from batchd.daemon.limits import SessionLimits
from batchd.daemon.local.sessions import LocalDoor
from batchd.daemon.loop import Loop, Signals
from batchd.daemon.memory.available import wait_for_memory
from batchd.daemon.memory.cache_file import CacheOnDisk, CacheUnusable, tell_unwanted
from batchd.daemon.memory.cache_memory import memory_problem, needed_bytes
from batchd.daemon.memory.held_descriptors import ADVICE, BlankSlots, plan_descriptors
from batchd.daemon.memory.rings import RingSize, plan_rings
from batchd.daemon.memory.slots import SlotPool
from batchd.daemon.queries import Queries
from batchd.daemon.reload.apply import ReloadApplier, code_in
from batchd.daemon.reload.requests import Origin, Reloader, ReloadListener
from batchd.daemon.runtime import hold
from batchd.daemon.service.manager import Notifier, Service
from batchd.daemon.service.observer import ObserverProcess, open_http
from batchd.daemon.streams import ServedStream, open_stream
from batchd.daemon.tcp.keys import check_tcp_keys, open_keys
from batchd.daemon.tcp.router import check_context_threads
from batchd.daemon.tcp.sessions import TcpDoor
from batchd.daemon.workers.interface import Workers
from batchd.daemon.workers.local import WorkerProcesses
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, Problem
from batchd.orders.worker import CHUNK_ROWS_MAX
from batchd.sources.scan import scan_source
from batchd.storage.access import Storage
from batchd.storage.index_cache import IndexCache
from batchd_wire.runtime import RuntimeDirectory
from batchd_wire.status import ReloadOutcome

_log = structlog.get_logger()

WORKERS_END_S = 1.0
"""How long workers have to notice that their channel is closed, before they are killed."""

OnProgress: TypeAlias = Callable[[str, int], None]
"""Called now and then with a stream's name and its number of samples found so far."""


class Reservation:
    """Makes all slots before the daemon is ready. ``is_wanted`` False: on demand instead."""

    def __init__(self, state: DaemonState, enqueue: Callable[[Event], None], *, is_wanted: bool) -> None:
        self.is_complete = not is_wanted
        self._state = state
        self._enqueue = enqueue

    def round_ended(self, lack: str | None, memory_bytes: int) -> None:
        """Ask for the next slot. Raises ``MemoryTooSmall`` if a slot found no memory (``lack``)."""
        if self.is_complete or self._state.draining:
            return
        if lack is not None:
            raise MemoryTooSmall([Problem("daemon.memory", lack, meaning_of(("daemon", "memory"), {}))])
        self.is_complete = self._state.has_all_slots
        if self.is_complete:
            _log.info("memory reserved", bytes=memory_bytes)
        else:
            self._enqueue(SlotWanted())


class Assembly:
    """See above. Each method is called once."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self._config = config
        self._storage = stack.enter_context(Storage(config.daemon.storage_limits()))
        self._daemon = config.daemon
        self._stack = stack
        _allow_descriptors()
        self.selector = Selector()
        stack.callback(self.selector.close)

    def service(self, *, is_embedded: bool) -> Service:
        """Connect to the service manager. An embedded daemon leaves that of its script alone."""
        notifier = Notifier.from_environment(os.environ)
        self._stack.callback(notifier.close)
        if is_embedded:
            notifier.close()
        return Service(notifier, self._daemon.worker_count())

    def workers(self, enqueue: Enqueue, launched: Linked | None) -> WorkerProcesses:
        """Start the workers, while sources are scanned. ``launched``: their fork server, if any."""
        workers = WorkerProcesses(self.selector, enqueue, launched)
        self._stack.callback(lambda: workers.close(WORKERS_END_S))
        with suppress(OSError):  # it is tried again, and said, when the loop wants the first worker
            for number in range(1, self._daemon.worker_count() + 1):
                workers.spawn(number)
        return workers

    def observer(self, names: RuntimeDirectory, *, is_embedded: bool) -> ObserverProcess:
        """Bind the address for HTTP. Connections wait until the observer is started."""
        door = open_http(self._daemon, is_embedded=is_embedded)
        return self._stack.enter_context(ObserverProcess(self.selector, door, names))

    def rings(self, tell: Callable[[str], None]) -> dict[str, RingSize]:
        """Divide the memory; wait for memory that other processes are about to free.

        ``tell`` gets a status line meanwhile. Raises ``MemoryTooSmall`` if it stays short.
        """
        rings = plan_rings(self._config, self._storage)
        problem = memory_problem(self._config, wait_for_memory(needed_bytes(self._config, rings), tell))
        if problem is not None:
            raise MemoryTooSmall([problem])
        return rings

    def memory(self, rings: dict[str, RingSize]) -> SlotPool:
        """Hold the descriptors that slots will need.

        Raises ``ConfigInvalid`` if they are too few to begin with; a possible shortage is logged.
        """
        plan = plan_descriptors(self._config, rings)
        refusal, shortage_text = plan.refusal(len(rings)), plan.shortage()
        if refusal is not None:
            raise ConfigInvalid([refusal])
        if shortage_text is not None:
            _log.warning("descriptors may run out", reason=shortage_text)
        mapped_bytes = max(ring.slot_bytes for ring in rings.values()) if self._daemon.tcp is not None else 0
        memory = SlotPool(BlankSlots(plan.reserved, mapped_bytes))
        self._stack.callback(memory.close)
        return memory

    def streams(self, rings: dict[str, RingSize], progress: OnProgress) -> dict[int, ServedStream]:
        """Scan all sources. Streams of later reloads are in the same dictionary."""
        streams: dict[int, ServedStream] = {}
        self._stack.callback(_close_all, streams)
        cache = IndexCache(self._daemon.cache_dir or default_cache_dir())
        python_path = self._daemon.python_path or ()
        for number, (name, stream) in enumerate(self._config.streams.items(), 1):
            found = partial(progress, name)
            scan = partial(scan_source, progress=found, cache=cache, storage=self._storage, python_path=python_path)
            limits = self._storage.limits
            streams[number] = open_stream(number, name, stream, rings[name], scan, limits, python_path=python_path)
            self._provide_cache(streams, number)
        tell_unwanted({one.cache.path for one in streams.values() if isinstance(one.cache, CacheOnDisk)})
        return streams

    def _provide_cache(self, streams: dict[int, ServedStream], number: int) -> None:
        try:
            streams[number].provide_cache(list(streams.values()))
        except CacheUnusable as error:
            path, _colon, text = str(error).partition(": ")
            raise ConfigInvalid([Problem(path, text)]) from None

    def state(self, streams: dict[int, ServedStream], workers: Workers) -> DaemonState:
        """Build the pure state from the streams and the limits of ``[daemon]``."""
        rows = self._daemon.chunk_rows
        return DaemonState(
            [stream.spec for stream in streams.values()],
            self._daemon.worker_count(),
            workers.kind,
            sample_timeout_s=self._daemon.sample_timeout_s,
            chunk_rows_max=CHUNK_ROWS_MAX if rows == "auto" else rows,
        )

    def local_door(self, side: DaemonSide) -> LocalDoor:
        """The door for trainers of this host, not bound yet."""
        door = LocalDoor(side, self._session_limits, writable_slots=self._daemon.writable_slots)
        self._stack.callback(door.close)
        return door

    def tcp_doors(self, side: DaemonSide, names: RuntimeDirectory) -> list[Door]:
        """The door for trainers of other hosts, bound, where there is to be one.

        Where there are keys they are asked for, on loopback too; without any, loopback alone is
        served.
        """
        if self._daemon.tcp is None:
            return []
        keys = open_keys(self._daemon.keys_dir)
        problem = check_tcp_keys(self._daemon, keys)
        if problem is not None:
            raise ConfigInvalid([problem])
        check_context_threads()
        has_keys = keys.daemon_key() is not None
        door = TcpDoor(side, self._session_limits, keys if has_keys else None)
        self._stack.callback(door.close)
        door.bind(tcp_endpoint(self._daemon.tcp), names.address)
        return [door]

    @property
    def _session_limits(self) -> SessionLimits:
        return SessionLimits(self._daemon.sessions_max, self._daemon.sessions_per_peer)


def _allow_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard one.

    Two for each slot soon reach the usual soft limit of 1024, which is for select().
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _close_all(streams: dict[int, ServedStream]) -> None:
    for stream in streams.values():
        stream.close()


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options that are not in the configuration.

    ``lifeline``: a descriptor whose end of file ends the daemon, for embedding; then the directory
    is its own and is removed at the end.
    """

    lifeline: int | None = None
    progress: OnProgress = field(default=lambda _stream, _found: None)
    """Called now and then with a stream's name and its number of samples found so far."""
    ready: Callable[[str], None] = field(default=lambda _address: None)
    """Called with the address when trainers can connect."""
    origin: Origin | None = None
    """Origin of the configuration, to read it again; None if the daemon cannot be reloaded."""
    launched: Linked | None = None
    """The workers' fork server, if it was started already."""


_LACKING = {
    errno.EMFILE: f"file descriptors: {ADVICE}",
    errno.ENFILE: "file descriptors on this machine: raise fs.file-max",
    errno.ENOMEM: "memory: give the machine or the cgroup more, or set memory = to less",
    errno.ENOBUFS: "memory of the kernel: give the machine or the cgroup more",
    errno.ENOSPC: "space: see df, df -i, /dev/shm and fs.epoll.max_user_watches",
}


def serve(config: Config, options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline. Raises ``BatchdError``."""
    try:
        _serve(config, options)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _log.debug("out of a resource", exc_info=True)
        raise BatchdError(f"{error.strerror}; there is no more of {_LACKING[error.errno]}") from None


def _serve(config: Config, options: ServeOptions) -> None:
    started_s = monotonic()
    is_embedded = options.lifeline is not None
    with ExitStack() as stack:
        hangups = stack.enter_context(_remembered_hangups())
        queue = Queue()
        assembly = Assembly(config, stack)
        service = assembly.service(is_embedded=is_embedded)
        held = stack.enter_context(hold(config.daemon.runtime_dir, is_private=is_embedded))
        workers = assembly.workers(queue.append, options.launched)
        failpoints.passing("daemon.starting")
        observer = assembly.observer(held.names, is_embedded=is_embedded)
        rings = assembly.rings(service.waiting)
        memory = assembly.memory(rings)
        streams = assembly.streams(rings, _both(options.progress, service.scanned))
        state = assembly.state(streams, workers)
        side = DaemonSide(assembly.selector, queue.append, memory)
        local = assembly.local_door(side)
        doors = Doors([local, *assembly.tcp_doors(side, held.names)])
        local.bind(held.names.lifeline_path, held.names.zmq_path)
        failpoints.passing("daemon.bound")
        applier = ReloadApplier(
            state=state,
            streams=streams,
            memory=memory,
            workers=workers,
            doors=doors,
            enqueue=queue.append,
            daemon=config.daemon.model_dump(mode="json"),
            workers_wanted=config.daemon.worker_count(),
            last_number=len(streams),
            imported=code_in(streams.values()),
        )
        listener = ReloadListener(service.reloading, service.rescanned, partial(_reload_ended, service, applier))
        origin = None if is_embedded else options.origin
        reloader = Reloader(assembly.selector, applier, origin, doors.send, listener)
        stack.callback(reloader.close)
        queries = Queries(state, streams, memory, workers, observer, doors, reloader, started_s)
        loop = Loop(queue, state, streams, memory, assembly.selector, workers, doors, observer, queries)
        stack.callback(Signals(assembly.selector, _signal_handler(loop, reloader)).close)
        if options.lifeline is not None:
            assembly.selector.add(options.lifeline, loop.stop)
        _log.info(
            "serving",
            address=held.names.address,
            streams=", ".join(config.streams),
            workers=config.daemon.worker_count(),
        )
        options.ready(held.names.address)
        observer.start(local.adopt)
        reservation = Reservation(state, queue.append, is_wanted=config.daemon.reserve == "start")
        if hangups:
            reloader.ask()
        loop.run(partial(_round_ended, loop, service, reservation, reloader))
        service.stopping()
        drained = state.is_drained
    _log.info("stopped", drained=drained)


@contextmanager
def _remembered_hangups() -> Iterator[list[int]]:
    """Record SIGHUP before ``Signals`` exists and after its end, instead of being ended by it.

    A function and not SIG_IGN, which child processes would inherit. nohup wants that, so an ignored
    SIGHUP stays ignored.
    """
    hangups: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, _frame: hangups.append(number))
    try:
        yield hangups
    finally:
        signal.signal(signal.SIGHUP, before)


def _round_ended(loop: Loop, service: Service, reservation: Reservation, reloader: Reloader) -> None:
    reloader.round_ended()
    memory_bytes = loop.memory.total_bytes
    reservation.round_ended(loop.lack, memory_bytes)
    if not reservation.is_complete:
        service.reserved(memory_bytes)
    service.round_ended(loop.state, has_memory=reservation.is_complete)


def _reload_ended(service: Service, applier: ReloadApplier, outcome: ReloadOutcome) -> None:
    service.reloaded(applier.workers_wanted, outcome.text.partition("\n")[0])


def _both(first: OnProgress, second: OnProgress) -> OnProgress:
    """Tell two of the progress of a scan."""

    def tell(stream: str, found: int) -> None:
        first(stream, found)
        second(stream, found)

    return tell


def _signal_handler(loop: Loop, reloader: Reloader) -> Callable[[int], None]:
    """SIGHUP reloads the configuration. The first other signal drains, the second stops at once."""
    received: list[int] = []

    def handle(number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            reloader.ask()
            return
        received.append(number)
        reloader.abandon()
        if len(received) > 1:
            _log.info("stopping at once", signal=name)
            loop.stop()
        else:
            within_s = reloader.applier.daemon["drain_timeout_s"]
            _log.info("draining", signal=name, within_s=within_s)
            loop.drain(within_s)

    return handle
