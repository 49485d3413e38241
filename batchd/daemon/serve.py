"""From a configuration to a daemon that runs, and back to nothing. DAEMON process; its entry.

    hold the directory -> start the workers (they import while we scan) -> divide the memory -> scan the sources
    -> bind -> ready -> loop -> close everything, in the opposite order

Invariant: whatever goes wrong, nothing is left behind: processes end with their channels, memory with its descriptors, and
sockets are removed while the lock is held.
"""

import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeAlias

import structlog

from batchd import __version__, failpoints
from batchd.config.runtime import default_cache_dir
from batchd.config.tcp import tcp_endpoint
from batchd.config.tree import Config
from batchd.core.admission import unknown_stream
from batchd.core.state import DaemonState
from batchd.daemon.authenticator import Authenticator
from batchd.daemon.credentials import open_keys
from batchd.daemon.descriptors import Watch
from batchd.daemon.keys import check_tcp_keys
from batchd.daemon.limits import RemoteLimits
from batchd.daemon.loop import Loop, Signals
from batchd.daemon.memory import available_bytes, shortage
from batchd.daemon.network import Network
from batchd.daemon.notify import Notifier
from batchd.daemon.observer import ObserverProcess, open_door
from batchd.daemon.outbox import Outbox
from batchd.daemon.reload import Origin, Outcome, Reloader
from batchd.daemon.remote import RemoteSessions
from batchd.daemon.reserve import BlankSlots, plan_descriptors
from batchd.daemon.rings import RingSize, plan_rings
from batchd.daemon.runtime import hold
from batchd.daemon.service import Service
from batchd.daemon.sessions import Sessions
from batchd.daemon.slot_memory import SlotMemory
from batchd.daemon.speech import Desk, Numbers
from batchd.daemon.status import plain_status
from batchd.daemon.streams import Scan, ServedStream, open_stream
from batchd.daemon.switch import Switch, code_in
from batchd.daemon.workers import WorkerProcesses
from batchd.errors import ConfigInvalid, MemoryTooSmall, Problem
from batchd.sources import storage
from batchd.sources.cache import IndexCache
from batchd.sources.scan import scan_source
from batchd.sources.storage import StorageLimits
from batchd_wire.codec import ITEMS_MAX, Message
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Refused, Status
from batchd_wire.orders import CHUNK_ROWS_MAX

_log = structlog.get_logger()

WORKERS_END_S = 1.0
"""How long workers have to notice that their channel is closed, before they are killed."""
BAD_SHOWN_MAX = 1_000

Progress: TypeAlias = Callable[[str, int], None]
"""Told now and then how many samples of which stream were found."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is not in the configuration.

    ``lifeline``: a descriptor whose end of file ends the daemon, for embedding; then its directory is its own and goes with it.
    """

    lifeline: int | None = None
    progress: Progress = field(default=lambda _stream, _found: None)
    """Told now and then how many samples of which stream were found."""
    ready: Callable[[str], None] = field(default=lambda _address: None)
    """Told the address when trainers may come."""
    origin: Origin | None = None
    """Where the configuration came from, so that it can be read again; None where nobody may ask for that."""


def serve(config: Config, options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline. Raises ``BatchdError`` where that cannot begin."""
    started_s = monotonic()
    _allow_descriptors()
    storage.use(StorageLimits(*config.daemon.storage_limits()))
    with ExitStack() as stack:
        service = _open_service(config, options, stack)
        held = stack.enter_context(hold(config.daemon.runtime_dir, is_private=options.lifeline is not None))
        watch = Watch()
        stack.callback(watch.close)
        workers = WorkerProcesses(watch)
        stack.callback(lambda: workers.close(WORKERS_END_S))
        for number in range(1, config.daemon.worker_count() + 1):
            workers.spawn(number)
        failpoints.passing("daemon.starting")
        door = open_door(config.daemon, is_embedded=options.lifeline is not None)
        observer = stack.enter_context(ObserverProcess(watch, door, held.names))

        stack.callback(storage.close)
        rings = plan_rings(config)
        _check_memory(rings)
        blanks = _check_descriptors(config, rings)
        cache = IndexCache(config.daemon.cache_dir or default_cache_dir())
        python_path = config.daemon.python_path or ()
        progress = _both(options.progress, service.scanned)
        streams = {
            number: open_stream(
                number, name, stream, rings[name], _scan(progress, cache, name, python_path), python_path=python_path
            )
            for number, (name, stream) in enumerate(config.streams.items(), 1)
        }
        stack.callback(_close_all, streams)
        state = DaemonState(
            [stream.spec for stream in streams.values()],
            config.daemon.worker_count(),
            sample_timeout_s=config.daemon.sample_timeout_s,
            chunk_rows_max=CHUNK_ROWS_MAX if config.daemon.chunk_rows == "auto" else config.daemon.chunk_rows,
        )
        mapped_bytes = max(ring.slot_bytes for ring in rings.values()) if config.daemon.tcp is not None else 0
        memory = SlotMemory(BlankSlots(blanks, mapped_bytes))
        stack.callback(memory.close)
        loop = Loop(state, streams, memory, watch)
        workers.enqueue = loop.enqueue
        clerk = _Clerk(state, streams, memory, workers, observer, started_s)
        desk = Desk(loop.enqueue, clerk.answer, Numbers(), clerk.reload)
        sessions = clerk.sessions = Sessions(
            watch, desk, config.daemon.sessions_max, writable_slots=config.daemon.writable_slots
        )
        stack.callback(sessions.close)
        network = None
        if config.daemon.tcp is not None:
            network = _open_network(config, watch, desk, memory)
            stack.callback(network.close)
            clerk.remote = network.remote
            network.remote.bind(tcp_endpoint(config.daemon.tcp), held.names.address)
        sessions.bind(held.names.lifeline_path, held.names.zmq_path)
        failpoints.passing("daemon.bound")
        loop.attach(sessions, workers, network, observer)
        switch = Switch(
            state=state,
            streams=streams,
            memory=memory,
            workers=workers,
            sessions=sessions,
            remote=clerk.remote,
            enqueue=loop.enqueue,
            daemon=config.daemon.model_dump(mode="json"),
            workers_wanted=config.daemon.worker_count(),
            last_number=len(streams),
            imported=code_in(streams.values()),
        )
        origin = options.origin if options.lifeline is None else None
        reloader = clerk.reloader = Reloader(
            watch, switch, origin, sessions.send, service.reloading, partial(_reload_ended, service, switch)
        )
        stack.callback(reloader.abandon)
        stack.callback(Signals(watch, _signal_handler(loop, reloader)).close)
        if options.lifeline is not None:
            watch.add(options.lifeline, loop.stop)
        _log.info(
            "serving",
            address=held.names.address,
            streams=", ".join(config.streams),
            workers=config.daemon.worker_count(),
        )
        options.ready(held.names.address)
        observer.start(sessions.adopt)
        loop.after_round = partial(service.round_ended, state)
        loop.run()
        service.stopping()
        drained = state.is_drained
    _log.info("stopped", drained=drained)


def _open_service(config: Config, options: ServeOptions, stack: ExitStack) -> Service:
    """What speaks to the service manager. The one of the script that embeds the daemon is not ours."""
    notifier = Notifier.from_environment(os.environ)
    stack.callback(notifier.close)
    if options.lifeline is not None:
        notifier.close()
    return Service(notifier, config.daemon.worker_count())


def _reload_ended(service: Service, switch: Switch, outcome: Outcome) -> None:
    service.reloaded(switch.workers_wanted, outcome.text.partition("\n")[0])


def _close_all(streams: dict[int, ServedStream]) -> None:
    for stream in streams.values():
        stream.close()


def _scan(progress: Progress, cache: IndexCache, stream: str, python_path: Sequence[Path]) -> Scan:
    """How the source of a stream is scanned."""
    return partial(scan_source, progress=partial(progress, stream), cache=cache, python_path=python_path)


def _both(first: Progress, second: Progress) -> Progress:
    """Tell two of the progress of a scan."""

    def tell(stream: str, found: int) -> None:
        first(stream, found)
        second(stream, found)

    return tell


def _open_network(config: Config, watch: Watch, desk: Desk, memory: SlotMemory) -> Network:
    """Make the TCP side. Where there are keys they are asked for, on loopback too; without any, loopback alone is served."""
    keys = open_keys(config.daemon.keys_dir)
    problem = check_tcp_keys(config.daemon, keys)
    if problem is not None:
        raise ConfigInvalid([problem])
    outbox = Outbox(watch, memory, desk.enqueue)
    limits = RemoteLimits(config.daemon.sessions_max, config.daemon.sessions_per_peer)
    if keys.daemon_key() is None:
        return Network(RemoteSessions(desk, outbox, limits, None), outbox, None)
    remote = RemoteSessions(desk, outbox, limits, keys)
    return Network(remote, outbox, Authenticator(remote.context, keys))


def _allow_descriptors() -> None:
    """Take as many descriptors as we may: two for each slot soon reach the usual soft limit of 1024, which is for select()."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_memory(rings: dict[str, RingSize]) -> None:
    need = sum(ring.ring_bytes for ring in rings.values())
    problem = shortage(need, available_bytes())
    if problem is not None:
        raise MemoryTooSmall([Problem("daemon.memory", problem)])


def _check_descriptors(config: Config, rings: dict[str, RingSize]) -> int:
    """For how many slots to keep descriptors. What is too little to begin with is refused; what may be too little is said."""
    plan = plan_descriptors(config, rings)
    refusal, shortage_text = plan.refusal(len(rings)), plan.shortage()
    if refusal is not None:
        raise ConfigInvalid([refusal])
    if shortage_text is not None:
        _log.warning("descriptors may run out", reason=shortage_text)
    return plan.reserved


def _signal_handler(loop: Loop, reloader: Reloader) -> Callable[[int], None]:
    """SIGHUP reads the configuration again. Of the others the first one drains, the second stops at once."""
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
            within_s = reloader.switch.daemon["drain_timeout_s"]
            _log.info("draining", signal=name, within_s=within_s)
            loop.drain(within_s)

    return handle


@dataclass(slots=True)
class _Clerk:
    """Answers people's questions."""

    state: DaemonState
    streams: dict[int, ServedStream]
    memory: SlotMemory
    workers: WorkerProcesses
    observer: ObserverProcess
    started_s: float
    sessions: Sessions | None = None
    remote: RemoteSessions | None = None
    reloader: Reloader | None = None

    def reload(self, session: int, request: int) -> None:
        """Somebody who may wants the configuration to be read again."""
        assert self.reloader is not None
        self.reloader.ask(session, request)

    def answer(self, question: AskStatus | AskBad) -> Message:
        """Answer at once, from what is known."""
        if isinstance(question, AskBad):
            return self._bad(question)
        assert self.sessions is not None
        assert self.reloader is not None
        outcome = self.reloader.outcome
        daemon: dict[str, object] = {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": monotonic() - self.started_s,
            "memory_bytes": self.memory.total_bytes,
            "decoders": self.workers.decoders,
            "reloading": self.reloader.is_reading,
            "reload": asdict(outcome) if outcome is not None else None,
            "http": self.observer.address,
        }
        if self.remote is not None:
            daemon["tcp"] = self.remote.counts()
        trainers = self.sessions.everybody() + (self.remote.everybody() if self.remote is not None else [])
        status = plain_status(self.state.statistics(), daemon, trainers, self.workers.pids())
        return Status(question.request, status)

    def _bad(self, question: AskBad) -> Message:
        number = self.state.numbers.get(question.stream)
        if number is None:
            return Refused(question.request, 0, *unknown_stream(question.stream, self.state.numbers))
        listed = self.state.streams[number].bad.listed
        shown = sorted(listed.items())[: min(BAD_SHOWN_MAX, ITEMS_MAX)]
        rows = [(sample, bad.path, bad.reason, bad.times) for sample, bad in shown]
        return BadSamples(question.request, len(listed), rows)
