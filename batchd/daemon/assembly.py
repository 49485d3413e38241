"""Opens what a daemon consists of, one thing after the other, as the configuration wants it. DAEMON process.

Invariant: what has been opened is closed at the end of the stack, in the opposite order, whatever
goes wrong in between.
"""

import os
import resource
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeAlias

import structlog

from batchd.children import Linked
from batchd.config.addresses import tcp_endpoint
from batchd.config.directories import default_cache_dir
from batchd.config.tree import Config
from batchd.core.state import DaemonState
from batchd.daemon.descriptors import Watch
from batchd.daemon.doors import DaemonSide, Door, Enqueue
from batchd.daemon.limits import SessionLimits
from batchd.daemon.local.sessions import LocalDoor
from batchd.daemon.memory.cache_file import CacheOnDisk, CacheUnusable, tell_unwanted
from batchd.daemon.memory.cache_memory import memory_problem, needed_bytes
from batchd.daemon.memory.held_descriptors import BlankSlots, plan_descriptors
from batchd.daemon.memory.rings import RingSize, plan_rings
from batchd.daemon.memory.slots import SlotPool
from batchd.daemon.memory.wait import wait_for_memory
from batchd.daemon.service.manager import Service
from batchd.daemon.service.notify import Notifier
from batchd.daemon.service.observer import ObserverProcess, open_http
from batchd.daemon.streams import ServedStream, open_stream
from batchd.daemon.tcp.credentials import open_keys
from batchd.daemon.tcp.keys import check_tcp_keys
from batchd.daemon.tcp.sessions import TcpDoor, check_context_threads
from batchd.daemon.workers.interface import Workers
from batchd.daemon.workers.local import WorkerProcesses
from batchd.errors import ConfigInvalid, MemoryTooSmall, Problem
from batchd.orders.worker import CHUNK_ROWS_MAX
from batchd.sources.scan import scan_source
from batchd.storage.access import Storage
from batchd.storage.index_cache import IndexCache
from batchd_wire.runtime import RuntimeDirectory

_log = structlog.get_logger()

WORKERS_END_S = 1.0
"""How long workers have to notice that their channel is closed, before they are killed."""

OnProgress: TypeAlias = Callable[[str, int], None]
"""Told now and then how many samples of which stream were found."""


class Opening:
    """See above. Each method is called once."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self._config = config
        self._storage = stack.enter_context(Storage(config.daemon.storage_limits()))
        self._daemon = config.daemon
        self._stack = stack
        _allow_descriptors()
        self.watch = Watch()
        stack.callback(self.watch.close)

    def service(self, *, is_embedded: bool) -> Service:
        """What speaks to the service manager. The one of the script that embeds the daemon is not ours."""
        notifier = Notifier.from_environment(os.environ)
        self._stack.callback(notifier.close)
        if is_embedded:
            notifier.close()
        return Service(notifier, self._daemon.worker_count())

    def workers(self, enqueue: Enqueue, launched: Linked | None) -> WorkerProcesses:
        """Have the workers started, while sources are scanned. ``launched``: what they are forked from, where it was started."""
        workers = WorkerProcesses(self.watch, enqueue, launched)
        self._stack.callback(lambda: workers.close(WORKERS_END_S))
        with suppress(OSError):  # it is tried again, and said, when the loop wants the first worker
            for number in range(1, self._daemon.worker_count() + 1):
                workers.spawn(number)
        return workers

    def observer(self, names: RuntimeDirectory, *, is_embedded: bool) -> ObserverProcess:
        """Take the address where HTTP is answered. Nobody answers before the observer is started."""
        door = open_http(self._daemon, is_embedded=is_embedded)
        return self._stack.enter_context(ObserverProcess(self.watch, door, names))

    def rings(self, tell: Callable[[str], None]) -> dict[str, RingSize]:
        """Divide the memory; wait for what others are about to give back, as ``tell`` is told. Raises where it stays short."""
        rings = plan_rings(self._config, self._storage)
        problem = memory_problem(self._config, wait_for_memory(needed_bytes(self._config, rings), tell))
        if problem is not None:
            raise MemoryTooSmall([problem])
        return rings

    def memory(self, rings: dict[str, RingSize]) -> SlotPool:
        """Hold the descriptors that slots will need. What is too little to begin with is refused; what may be is said."""
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
        """Scan all sources. Those that come and go later belong to the same dictionary."""
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
        """What decides."""
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
    """Take as many descriptors as we may: two for each slot soon reach the usual soft limit of 1024, which is for select()."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _close_all(streams: dict[int, ServedStream]) -> None:
    for stream in streams.values():
        stream.close()
