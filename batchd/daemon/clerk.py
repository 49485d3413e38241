"""Answers people's questions: status, bad samples, and what became of a reload. DAEMON process."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic

from batchd import __version__
from batchd.config.cpus import available_cpus
from batchd.core.admission import unknown_stream
from batchd.core.state import DaemonState
from batchd.daemon.doors import Asked, Doors
from batchd.daemon.observer import ObserverProcess
from batchd.daemon.reload import Reloader
from batchd.daemon.slot_memory import SlotMemory
from batchd.daemon.status import plain_status
from batchd.daemon.streams import ServedStream
from batchd.daemon.worker_interface import Workers
from batchd_wire.codec import ITEMS_MAX, Message
from batchd_wire.messages import AskBad, AskReload, AskStatus, BadSamples, Refused, Status

BAD_SHOWN_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Clerk:
    """See above. ``cpus``: how many this process may use."""

    state: DaemonState
    streams: Mapping[int, ServedStream]
    memory: SlotMemory
    workers: Workers
    observer: ObserverProcess
    doors: Doors
    reloader: Reloader
    started_s: float
    cpus: int = field(default_factory=available_cpus)

    def hear(self, asked: Asked) -> None:
        """Begin a reload, which is answered when it has ended; answer anything else at once, from what is known."""
        door = self.doors.of(asked.session)
        if isinstance(asked.message, AskReload):
            self.reloader.ask(asked.session, asked.message.request)
        elif door is not None:
            door.answer(asked.session, self._answer(asked.message))

    def _answer(self, question: AskStatus | AskBad) -> Message:
        if isinstance(question, AskBad):
            return self._bad(question)
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
            **{door.name: door.counts() for door in self.doors},
        }
        trainers = [one for door in self.doors for one in door.everybody()]
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
