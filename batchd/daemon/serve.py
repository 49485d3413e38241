"""From a configuration to a daemon that runs, and back to nothing. DAEMON process; its entry.

    hold the directory -> start the workers (they import while we scan) -> divide the memory, or wait for it -> scan the sources
    -> bind -> ready -> loop -> close everything, in the opposite order

Invariant: whatever goes wrong, nothing is left behind: processes end with their channels, memory
with its descriptors, and sockets are removed while the lock is held.
"""

import errno
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import structlog

from batchd import failpoints
from batchd.children import Linked
from batchd.config.tree import Config
from batchd.daemon.assembly import OnProgress, Opening
from batchd.daemon.doors import DaemonSide, Doors, Queue
from batchd.daemon.loop import Loop, Signals
from batchd.daemon.memory.held_descriptors import ADVICE
from batchd.daemon.memory.reservation import Reservation
from batchd.daemon.queries import Clerk
from batchd.daemon.reload.apply import Switch, code_in
from batchd.daemon.reload.requests import Origin, Reloader, Watcher
from batchd.daemon.runtime import hold
from batchd.daemon.service.manager import Service
from batchd.errors import BatchdError
from batchd_wire.status import ReloadOutcome

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is not in the configuration.

    ``lifeline``: a descriptor whose end of file ends the daemon, for embedding; then its directory
    is its own and goes with it.
    """

    lifeline: int | None = None
    progress: OnProgress = field(default=lambda _stream, _found: None)
    """Told now and then how many samples of which stream were found."""
    ready: Callable[[str], None] = field(default=lambda _address: None)
    """Told the address when trainers may come."""
    origin: Origin | None = None
    """Where the configuration came from, so that it can be read again; None where nobody may ask for that."""
    launched: Linked | None = None
    """What workers are forked from, where it was started already."""


_LACKING = {
    errno.EMFILE: f"file descriptors: {ADVICE}",
    errno.ENFILE: "file descriptors on this machine: raise fs.file-max",
    errno.ENOMEM: "memory: give the machine or the cgroup more, or set memory = to less",
    errno.ENOBUFS: "memory of the kernel: give the machine or the cgroup more",
    errno.ENOSPC: "space: see df, df -i, /dev/shm and fs.epoll.max_user_watches",
}


def serve(config: Config, options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT or the end of the lifeline. Raises ``BatchdError`` where that cannot begin or go on."""
    try:
        _serve(config, options)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _log.debug("something is lacking", exc_info=True)
        raise BatchdError(f"{error.strerror}; there is no more of {_LACKING[error.errno]}") from None


def _serve(config: Config, options: ServeOptions) -> None:
    started_s = monotonic()
    is_embedded = options.lifeline is not None
    with ExitStack() as stack:
        hangups = stack.enter_context(_remembered_hangups())
        queue = Queue()
        opening = Opening(config, stack)
        service = opening.service(is_embedded=is_embedded)
        held = stack.enter_context(hold(config.daemon.runtime_dir, is_private=is_embedded))
        workers = opening.workers(queue.append, options.launched)
        failpoints.passing("daemon.starting")
        observer = opening.observer(held.names, is_embedded=is_embedded)
        rings = opening.rings(service.waiting)
        memory = opening.memory(rings)
        streams = opening.streams(rings, _both(options.progress, service.scanned))
        state = opening.state(streams, workers)
        side = DaemonSide(opening.watch, queue.append, memory)
        local = opening.local_door(side)
        doors = Doors([local, *opening.tcp_doors(side, held.names)])
        local.bind(held.names.lifeline_path, held.names.zmq_path)
        failpoints.passing("daemon.bound")
        switch = Switch(
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
        watcher = Watcher(service.reloading, service.rescanned, partial(_reload_ended, service, switch))
        origin = None if is_embedded else options.origin
        reloader = Reloader(opening.watch, switch, origin, doors.send, watcher)
        stack.callback(reloader.close)
        clerk = Clerk(state, streams, memory, workers, observer, doors, reloader, started_s)
        loop = Loop(queue, state, streams, memory, opening.watch, workers, doors, observer, clerk)
        stack.callback(Signals(opening.watch, _signal_handler(loop, reloader)).close)
        if options.lifeline is not None:
            opening.watch.add(options.lifeline, loop.stop)
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
    """SIGHUP does not end us while ``Signals`` is not there yet, or not any more; those that came are remembered.

    A function, and not SIG_IGN: what is ignored, the processes that we start would ignore, too.
    That is what nohup wants, so where SIGHUP is ignored already it stays so.
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


def _reload_ended(service: Service, switch: Switch, outcome: ReloadOutcome) -> None:
    service.reloaded(switch.workers_wanted, outcome.text.partition("\n")[0])


def _both(first: OnProgress, second: OnProgress) -> OnProgress:
    """Tell two of the progress of a scan."""

    def tell(stream: str, found: int) -> None:
        first(stream, found)
        second(stream, found)

    return tell


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
