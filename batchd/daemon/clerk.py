"""Answers people's questions: status, bad samples, and what became of a reload. DAEMON process."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
from batchd.daemon.status import plain_status
from batchd.daemon.streams import ServedStream
from batchd.daemon.worker_interface import Workers
from batchd_wire.codec import ITEMS_MAX, Message
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Refused, Status

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

    def answer(self, question: AskStatus | AskBad) -> Message:
        """Answer at once, from what is known."""
        if isinstance(question, AskBad):
            return self._bad(question)
        assert self.sessions is not None
        assert self.reloader is not None
        outcome = self.reloader.outcome
        now = monotonic()
        daemon: dict[str, object] = {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": now - self.started_s,
            "memory_bytes": self.memory.total_bytes,
            "cpus": self.cpus,
            "decoders": self.workers.decoders,
            "reloading": self.reloader.is_reading,
            "reload": asdict(outcome) if outcome is not None else None,
            "http": self.observer.address,
            "local": self.sessions.counts(),
        }
        if self.remote is not None:
            daemon["tcp"] = self.remote.counts()
        trainers = self.sessions.everybody() + (self.remote.everybody() if self.remote is not None else [])
        caches = {
            number: asdict(one.cache.statistics()) for number, one in self.streams.items() if one.cache is not None
        }
        status = plain_status(self.state.statistics(now), daemon, trainers, self.workers.pids(), caches)
        return Status(question.request, status)

    def _bad(self, question: AskBad) -> Message:
        number = self.state.numbers.get(question.stream)
        if number is None:
            return Refused(question.request, 0, *unknown_stream(question.stream, self.state.numbers))
        listed = self.state.streams[number].bad.listed
        shown = sorted(listed.items())[: min(BAD_SHOWN_MAX, ITEMS_MAX)]
        rows = [(sample, bad.path, bad.reason, bad.times) for sample, bad in shown]
        return BadSamples(question.request, len(listed), rows)
