"""Answers people's questions: status, bad samples, and what became of a reload. DAEMON process."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from batchd import __version__
from batchd.config.cpus import available_cpus
from batchd.core.admission import unknown_stream
from batchd.core.state import DaemonState
from batchd.daemon.observer import ObserverProcess
from batchd.daemon.reload import Reloader
from batchd.daemon.remote import RemoteSessions
from batchd.daemon.sessions import Sessions
from batchd.daemon.slot_memory import SlotMemory
from batchd.daemon.streams import ServedStream
from batchd.daemon.worker_interface import Workers
from batchd_wire.codec import ITEMS_MAX, Message
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Refused, Status
from batchd_wire.status import DaemonFacts, DaemonStatus, plain_status

BAD_SHOWN_MAX = 1_000


@dataclass(slots=True)
class Clerk:
    """See above. Its sides come when they are open; nobody asks before. ``cpus``: how many this process may use."""

    state: DaemonState
    streams: Mapping[int, ServedStream]
    memory: SlotMemory
    workers: Workers
    observer: ObserverProcess
    started_s: float
    sessions: Sessions | None = None
    remote: RemoteSessions | None = None
    reloader: Reloader | None = None
    cpus: int = field(default_factory=available_cpus)

    def reload(self, session: int, request: int) -> None:
        """Somebody who may wants the configuration to be read again."""
        assert self.reloader is not None
        self.reloader.ask(session, request)

    def answer(self, question: AskStatus | AskBad, may_read: Callable[[str], bool]) -> Message:
        """Answer at once, from what is known. Streams that the asking session may not read are left out of a status."""
        if isinstance(question, AskBad):
            return self._bad(question)
        status = self._status(monotonic())
        shown = tuple(stream for stream in status.streams if may_read(stream.name))
        return Status(question.request, plain_status(replace(status, streams=shown)))

    def _status(self, now: float) -> DaemonStatus:
        """Join what the core counts and what the daemon knows of its processes and connections."""
        assert self.sessions is not None
        assert self.reloader is not None
        counts, pids = self.state.statistics(now), self.workers.pids()
        caches = {number: one.cache.statistics() for number, one in self.streams.items() if one.cache is not None}
        remote = self.remote
        return DaemonStatus(
            daemon=DaemonFacts(
                version=__version__,
                pid=os.getpid(),
                uptime_s=now - self.started_s,
                memory_bytes=self.memory.total_bytes,
                cpus=self.cpus,
                decoders=self.workers.decoders,
                reloading=self.reloader.is_reading,
                reload=self.reloader.outcome,
                http=self.observer.address,
                local=self.sessions.counts(),
                tcp=remote.counts() if remote is not None else None,
                worker_deaths=counts.worker_deaths,
                draining=counts.draining,
                ending_slots=counts.ending_slots,
            ),
            workers=tuple(replace(worker, pid=pids.get(worker.number)) for worker in counts.workers),
            trainers=(
                *(one.statistics() for one in self.sessions.everybody()),
                *(one.statistics(now) for one in (remote.everybody() if remote is not None else [])),
            ),
            streams=tuple(replace(stream, cache=caches.get(stream.number)) for stream in counts.streams),
        )

    def _bad(self, question: AskBad) -> Message:
        number = self.state.numbers.get(question.stream)
        if number is None:
            return Refused(question.request, 0, *unknown_stream(question.stream, self.state.numbers))
        listed = self.state.streams[number].bad.listed
        shown = sorted(listed.items())[: min(BAD_SHOWN_MAX, ITEMS_MAX)]
        rows = [(sample, bad.path, bad.reason, bad.times) for sample, bad in shown]
        return BadSamples(question.request, len(listed), rows)
