"""From a configuration to a running daemon, and back. DAEMON process; its entry.

    hold the directory -> start the workers (they import during the scan)
    -> divide the memory, or wait for it -> scan the sources
    -> bind -> ready -> loop -> close everything, in the opposite order

With ``reserve = "start"`` the memory of all rings is reserved before the daemon reports readiness
to a service manager:

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
from dataclasses import field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

import structlog

from batchd.config.schema import problem_at
from batchd.config.tree import Config, DaemonConfig
from batchd.core.events import Event, SlotWanted
from batchd.core.links import LinkRules
from batchd.core.state import DaemonState
from batchd.daemon.bad_lists import BadLists
from batchd.daemon.derive.requests import Deriver
from batchd.daemon.doors import DaemonSide, Door, Doors, Queue
from batchd.daemon.identity import Tenancy, look_up, named_in, weights_of
from batchd.daemon.kept_log import KeptLog
from batchd.daemon.local.sessions import LocalDoor
from batchd.daemon.loop import Loop
from batchd.daemon.manager import Notifier, Service
from batchd.daemon.observer import ObserverProcess, open_http
from batchd.daemon.reload.apply import ReloadApplier, code_in
from batchd.daemon.reload.requests import Origin, Reloader
from batchd.daemon.runtime import hold
from batchd.daemon.workers import AllWorkers, LocalWorkers
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, Problem, ProblemKind, scarcity
from batchd.runtime import failpoints
from batchd.runtime.addresses import parse_tcp, tcp_endpoint
from batchd.runtime.available import wait_for_memory
from batchd.runtime.child_log import ChildOutput
from batchd.runtime.children import Linked
from batchd.runtime.descriptors import allow_descriptors
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.limits import SessionLimits
from batchd.runtime.numa import NO_NODES, Nodes
from batchd.runtime.poller import Poller, Signals
from batchd.runtime.slots import BlankSlots, SlotPool
from batchd.stream.access import access_of, access_of_roots, sandbox_problems
from batchd.stream.cache_file import CacheOnDisk, CacheUnusable, tell_unwanted
from batchd.stream.rings import (
    RingSize,
    file_size_refusal,
    memory_problem,
    needed_bytes,
    plan_descriptors,
    plan_rings,
)
from batchd.stream.served import ServedStream, differing_classes, open_stream
from batchd.worker.messages import CHUNK_ROWS_MAX
from batchd_wire.record import frozen
from batchd_wire.runtime import RuntimeDirectory

if TYPE_CHECKING:
    from batchd.pool.remote import RemoteWorkers

_log = structlog.get_logger()

WORKERS_END_S = 1.0
"""How long workers have to notice that their channel is closed, before they are killed."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

OnProgress: TypeAlias = Callable[[str, int], None]
"""Called now and then with a stream's name and its number of samples found so far."""


@frozen
class ServeOptions:
    """Options that are not in the configuration.

    ``lifeline``: a descriptor whose end of file ends the daemon, for embedding; then the directory
    is its own and is removed at the end.
    """

    lifeline: int | None = None
    progress: OnProgress = field(default=lambda _stream, _found: None)
    ready: Callable[[str], None] = field(default=lambda _address: None)
    """Called with the address when trainers can connect."""
    origin: Origin | None = None
    """The configuration, to read it again; None if the daemon cannot be reloaded."""
    log: KeptLog = field(default_factory=KeptLog)
    """The last lines of the log."""
    launched: Linked | None = None
    """The workers' fork server, if it was started already."""
    output: int | None = None
    """A pipe that children write to instead of standard error; None: they write to the daemon's."""


def serve(config: Config, options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline. Raises ``BatchdError``."""
    try:
        _serve(config, options)
    except OSError as error:
        text = scarcity(error)
        if text is None:
            raise
        _log.debug("out of a resource", exc_info=True)
        raise BatchdError(text) from None


def _serve(config: Config, options: ServeOptions) -> None:  # noqa: PLR0915  a sequence: each part needs earlier ones
    started_s, daemon, had_terminal = monotonic(), config.daemon, _has_terminal()
    is_embedded = options.lifeline is not None
    with ExitStack() as stack:
        hangups = stack.enter_context(_remembered_hangups())
        storage = stack.enter_context(Storage(daemon.storage_limits(), encloses=daemon.encloses))
        storage.forks_scans = True
        allow_descriptors()
        queue, poller = Queue(), Poller()
        stack.callback(poller.close)
        output = None if options.output is None else ChildOutput(poller, options.output)
        if output is not None:
            stack.callback(output.close)
        notifier = Notifier.from_environment(os.environ, is_embedded=is_embedded)
        stack.callback(notifier.close)
        service = Service(notifier, daemon.worker_count())
        names = stack.enter_context(hold(daemon.runtime_dir, is_private=is_embedded, log=options.log.place))
        streams: dict[int, ServedStream] = {}  # with those of later reloads
        nodes = Nodes.found() if daemon.numa == "auto" else NO_NODES
        memory = SlotPool(nodes=nodes)
        processes = LocalWorkers(poller, queue.append, streams, memory, options.launched, output)
        processes.nodes = nodes
        stack.callback(processes.close, WORKERS_END_S)
        _enclose(processes, config)
        # it is tried again, and logged, when the loop wants the first worker
        with suppress(OSError):
            for number in range(1, daemon.worker_count() + 1):
                processes.spawn(number)
        failpoints.passing("daemon.starting")
        http = open_http(daemon, is_embedded=is_embedded)
        observer = stack.enter_context(ObserverProcess(poller, http, names, processes.readable))
        rings = _divide_memory(config, storage, service.waiting)
        memory.blanks = _hold_descriptors(config, rings)
        stack.callback(memory.close)
        stack.callback(_close_all, streams)

        def scanned(stream: str, found: int) -> None:
            options.progress(stream, found)
            service.scanned(stream, found)

        _open_streams(streams, config, rings, storage, scanned)
        remote = _remote_workers(daemon, poller, queue, processes)
        workers = AllWorkers(processes, *remote)
        state = DaemonState(
            [stream.spec for stream in streams.values()],
            daemon.worker_count(),
            processes.kind,
            sample_timeout_s=daemon.sample_timeout_s,
            chunk_rows_max=CHUNK_ROWS_MAX if daemon.chunk_rows == "auto" else daemon.chunk_rows,
            rules=LinkRules(daemon.pool_audit, daemon.pool_accept == "any", daemon.pool_withdraw_after_s),
            remote_kind=remote[0].kind if remote else None,
            weights=weights_of(daemon),
            nodes=nodes.places(),
        )
        side = DaemonSide(poller, queue.append, memory, nodes)
        limits = SessionLimits(daemon.sessions_max, daemon.sessions_per_peer)
        local = LocalDoor(side, limits, writable_slots=daemon.writable_slots)
        stack.callback(local.close)
        doors = Doors([local, *_tcp_doors(daemon, side, limits, names, stack)])
        local.bind(names.lifeline_path, names.zmq_path)
        named = [name for _key, name in named_in(daemon)]
        numbers = look_up(named)
        for name in named:
            if name not in numbers and not name.startswith("key:"):
                _log.warning("unknown user or group", name=name, advice="once there is one, `batchd reload`")
        for door in doors:
            door.limit(limits, Tenancy(daemon.shares, numbers))
        for pool in remote:
            stack.callback(pool.close)
            pool.start()
        failpoints.passing("daemon.bound")
        applier = ReloadApplier(
            state=state,
            streams=streams,
            memory=memory,
            workers=workers,
            doors=doors,
            enqueue=queue.append,
            daemon=daemon,
            workers_wanted=daemon.worker_count(),
            last_number=len(streams),
            imported=code_in(streams.values()),
            numbers=numbers,
        )
        reloader = Reloader(poller, applier, None if is_embedded else options.origin, doors.send, service)
        stack.callback(reloader.close)
        deriver = Deriver(poller, applier, doors)
        stack.callback(deriver.close)
        loop = Loop(queue, state, streams, memory, poller, workers, doors, observer, reloader, deriver, started_s)
        actions = SignalActions(loop, had_terminal=had_terminal)
        loop.address, loop.log = names.address, options.log
        loop.bad_lists = BadLists(daemon.cache_dir or default_cache_dir())
        stack.callback(loop.bad_lists.close)
        stack.callback(Signals(poller, SIGNALS, actions.received).close)
        if options.lifeline is not None:
            poller.watch(options.lifeline, loop.stop)
        _log.info("serving", address=names.address, streams=", ".join(config.streams), workers=daemon.worker_count())
        options.ready(names.address)
        observer.start(local.adopt)
        reservation = Reservation(state, queue.append, is_wanted=daemon.reserve == "start")
        if hangups:
            actions.received(signal.SIGHUP)
        loop.run(partial(_round_ended, loop, service, reservation))
        service.stopping()
        drained = state.is_drained
    _log.info("stopped", drained=drained)


@contextmanager
def _remembered_hangups() -> Iterator[list[int]]:
    """Record SIGHUP before ``Signals`` exists and after its end, instead of being ended by it.

    Child processes would inherit SIG_IGN. nohup wants that, so an ignored SIGHUP stays ignored.
    """
    hangups: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, _frame: hangups.append(number))
    try:
        yield hangups
    finally:
        signal.signal(signal.SIGHUP, before)


def _enclose(processes: LocalWorkers, config: Config) -> None:
    """Have workers give up what no stream needs. Raises ``ConfigInvalid`` if they cannot."""
    processes.is_sandbox_wanted = config.daemon.encloses
    problems = sandbox_problems(config) if config.daemon.encloses else []
    if problems and config.daemon.sandbox == "on":
        raise ConfigInvalid(problems)
    for problem in problems:
        _log.info("workers may reach what this user may", key=problem.path, reason=problem.message)
    python_path = config.daemon.python_path or ()
    processes.roots = access_of_roots(config.daemon)
    processes.enclose_for(access_of(stream, python_path) for stream in config.streams.values())


def _divide_memory(config: Config, storage: Storage, tell: Callable[[str], None]) -> dict[str, RingSize]:
    """Divide the memory; wait for what others are about to free. Raises ``MemoryTooSmall``."""
    rings = plan_rings(config, storage)
    problem = memory_problem(config, wait_for_memory(needed_bytes(config, rings), tell))
    if problem is not None:
        raise MemoryTooSmall([problem])
    return rings


def _hold_descriptors(config: Config, rings: dict[str, RingSize]) -> BlankSlots:
    """Hold the descriptors of slots. Raises ``ConfigInvalid`` if they are too few to begin with."""
    plan = plan_descriptors(config, rings)
    refusal, shortage = plan.refusal(len(rings)), plan.shortage()
    too_small = file_size_refusal(rings, resource.getrlimit(resource.RLIMIT_FSIZE)[0])
    if refusal is not None or too_small is not None:
        raise ConfigInvalid([one for one in (refusal, too_small) if one is not None])
    if shortage is not None:
        _log.warning("descriptors may run out", reason=shortage)
    mapped_bytes = max(ring.layout.slot_bytes for ring in rings.values()) if config.daemon.tcp is not None else 0
    return BlankSlots(plan.reserved, mapped_bytes)


def _open_streams(
    streams: dict[int, ServedStream], config: Config, rings: dict[str, RingSize], storage: Storage, progress: OnProgress
) -> None:
    """Scan all sources, and add each stream to ``streams``."""
    index_cache = IndexCache(config.daemon.cache_dir or default_cache_dir())
    for number, name in enumerate(config.streams, 1):
        found = partial(progress, name)
        streams[number] = open_stream(number, name, config, rings[name], storage, index_cache, found, keeps=True)
        try:
            streams[number].provide_cache(list(streams.values()))
            streams[number].provide_journal(())
        except CacheUnusable as error:
            path, _colon, text = str(error).partition(": ")
            raise ConfigInvalid([Problem(path, ProblemKind.UNUSABLE_CACHE, text)]) from None
    for name, note in differing_classes({stream.name: stream.facts.classes for stream in streams.values()}):
        _log.warning("note on a source", stream=name, note=note)
    tell_unwanted({one.cache.path for one in streams.values() if isinstance(one.cache, CacheOnDisk)})


def _close_all(streams: dict[int, ServedStream]) -> None:
    for stream in streams.values():
        stream.close()


def _tcp_doors(
    daemon: DaemonConfig, side: DaemonSide, limits: SessionLimits, names: RuntimeDirectory, stack: ExitStack
) -> list[Door]:
    """Bind the door for other hosts, if any. With keys, each trainer needs one, on loopback too."""
    if daemon.tcp is None:
        return []
    from batchd.daemon.tcp import TcpDoor  # noqa: PLC0415  the same
    from batchd.runtime.keys import missing_keys, open_keys  # noqa: PLC0415  most configurations need no TCP
    from batchd.runtime.tcp.router import check_context_threads  # noqa: PLC0415  the same

    keys = open_keys(daemon.keys_dir)
    missing = missing_keys(daemon.tcp, keys.trainers)
    if missing is not None:
        raise ConfigInvalid([problem_at(("daemon", "tcp"), ProblemKind.MISSING_KEYS, missing)])
    check_context_threads()
    door = TcpDoor(side, limits, keys.trainers if keys.daemon_key() is not None else None)
    stack.callback(door.close)
    door.bind(tcp_endpoint(daemon.tcp), names.address)
    return [door]


def _remote_workers(daemon: DaemonConfig, poller: Poller, queue: Queue, local: LocalWorkers) -> "list[RemoteWorkers]":
    """The workers of worker hosts, if these may come. Beyond loopback each host needs a key."""
    if daemon.worker_address is None:
        return []
    from batchd.pool.messages import PoolRules  # noqa: PLC0415  the same
    from batchd.pool.remote import RemoteWorkers  # noqa: PLC0415  the same
    from batchd.pool.wanted import WantedCount, interface_of  # noqa: PLC0415  the same
    from batchd.runtime.keys import missing_keys, open_keys  # noqa: PLC0415  most configurations need no TCP

    missing = missing_keys(daemon.worker_address, open_keys(daemon.keys_dir).workers)
    if missing is not None:
        raise ConfigInvalid([problem_at(("daemon", "worker_address"), ProblemKind.MISSING_KEYS, missing)])
    rules = PoolRules(daemon.sample_timeout_s, daemon.pool_hosts_max, daemon.pool_hosts_per_key)
    endpoints = [tcp_endpoint(daemon.worker_address, number) for number in range(daemon.pool_gateways)]
    wanted = WantedCount(daemon.pool_max, interface_of(parse_tcp(daemon.worker_address)[0]))
    served = local.streams, local.memory, lambda: local.decoders
    return [RemoteWorkers(poller, queue.append, endpoints, daemon.keys_dir, rules, wanted, *served)]


class Reservation:
    """Makes all slots before the daemon is ready. ``is_wanted`` False: on demand instead."""

    def __init__(self, state: DaemonState, enqueue: Callable[[Event], None], *, is_wanted: bool) -> None:
        self.is_complete = not is_wanted
        self._state = state
        self._enqueue = enqueue

    def round_ended(self, slot_error: str | None, memory_bytes: int) -> None:
        """Ask for the next slot. Raises ``MemoryTooSmall`` if there was no memory for one."""
        if self.is_complete or self._state.draining:
            return
        if slot_error is not None:
            raise MemoryTooSmall([problem_at(("daemon", "memory"), ProblemKind.MEMORY_TOO_SMALL, slot_error)])
        self.is_complete = self._state.has_all_slots
        if self.is_complete:
            _log.info("memory reserved", bytes=memory_bytes)
        else:
            self._enqueue(SlotWanted())


def _round_ended(loop: Loop, service: Service, reservation: Reservation) -> None:
    loop.reloader.round_ended()
    memory_bytes = loop.memory.total_bytes
    reservation.round_ended(loop.slot_error, memory_bytes)
    if not reservation.is_complete:
        service.reserved(memory_bytes)
    service.round_ended(loop.state, has_memory=reservation.is_complete)


class SignalActions:
    """SIGHUP reloads the configuration. The first other signal drains, the second stops at once.

    SIGHUP is such a signal, too, once the terminal is gone that the daemon had.
    """

    def __init__(self, loop: Loop, *, had_terminal: bool) -> None:
        self._loop = loop
        self._had_terminal = had_terminal
        self._is_ending = False

    def received(self, number: signal.Signals) -> None:
        """Act on a signal."""
        loop, reloader = self._loop, self._loop.reloader
        if number == signal.SIGHUP and (_has_terminal() or not self._had_terminal):
            reloader.ask()
            return
        reloader.abandon()
        if self._is_ending:
            _log.info("stopping at once", signal=number.name)
            loop.stop()
        else:
            self._is_ending = True
            within_s = reloader.applier.daemon.drain_timeout_s
            _log.info("draining", signal=number.name, within_s=within_s)
            loop.drain(within_s)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still there (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in {errno.ENXIO, errno.EIO, errno.ENOENT}
    return True
