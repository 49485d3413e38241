"""Answers queries: status, bad samples, and the outcome of a reload. DAEMON process."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from batchd import __version__
from batchd.config.cpus import available_cpus
from batchd.core.admission import unknown_stream
from batchd.core.state import DaemonState
from batchd.daemon.doors import Doors, Query
from batchd.daemon.memory.slots import SlotPool
from batchd.daemon.reload.requests import Reloader
from batchd.daemon.service.observer import ObserverProcess
from batchd.daemon.streams import ServedStream
from batchd.daemon.workers.interface import Workers
from batchd_wire.codec import ITEMS_MAX, Message
from batchd_wire.messages import AskBad, AskReload, AskStatus, BadSamples, Refused, Status
from batchd_wire.status import DaemonFacts, DaemonStatus, LocalCounts, TcpCounts, plain_status

BAD_SHOWN_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Queries:
    """See above. ``cpus``: how many this process may use."""

    state: DaemonState
    streams: Mapping[int, ServedStream]
    memory: SlotPool
    workers: Workers
    observer: ObserverProcess
    doors: Doors
    reloader: Reloader
    started_s: float
    cpus: int = field(default_factory=available_cpus)

    def answer(self, query: Query) -> None:
        """Begin a reload, which is answered at its end; answer any other query at once."""
        door = self.doors.of(query.session)
        if isinstance(query.message, AskReload):
            self.reloader.ask(query.session, query.message.request)
        elif door is not None:
            may_read = partial(door.may_read, query.session)
            door.answer(query.session, self._reply(query.message, may_read))

    def _reply(self, question: AskStatus | AskBad, may_read: Callable[[str], bool]) -> Message:
        """Answer a query. Streams that the session may not read are left out of a status."""
        if isinstance(question, AskBad):
            return self._bad(question)
        status = self._status(monotonic())
        shown = tuple(stream for stream in status.streams if may_read(stream.name))
        return Status(question.request, plain_status(replace(status, streams=shown)))

    def _status(self, now: float) -> DaemonStatus:
        """Join what the core counts and what the daemon knows of its processes and connections."""
        counts, pids = self.state.statistics(now), self.workers.pids()
        caches = {number: one.cache.statistics() for number, one in self.streams.items() if one.cache is not None}
        doors = [door.counts() for door in self.doors]
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
                local=next(counts for counts in doors if isinstance(counts, LocalCounts)),
                tcp=next((counts for counts in doors if isinstance(counts, TcpCounts)), None),
                worker_deaths=counts.worker_deaths,
                draining=counts.draining,
                ending_slots=counts.ending_slots,
            ),
            workers=tuple(replace(worker, pid=pids.get(worker.number)) for worker in counts.workers),
            trainers=tuple(trainer for door in self.doors for trainer in door.statistics(now)),
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
