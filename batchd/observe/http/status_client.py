"""Asks the daemon for its status; keeps its answers of 15 minutes. OBSERVER process.

    every INTERVAL_S, or for a scrape that wants a new one --> AskStatus --> Answer
    for a request about bad samples                        --> AskBad    --> BadSamples
    for a request about reported losses                    --> AskStatus --> their page
    after a question without an answer in DEADLINE_S       --> AskStatus, brief --> the loop answers

    answers --> StatusRecorder --> StatusWindow: the present
                     +-----------> History: the past, a number of each series every STEP_S,
                                   and of the last minute every FINE_STEP_S

Invariant: one question at a time, each with a deadline, and two are at least ``SPACING_S`` apart;
one answer serves every thread that asked before its question was sent. Whether the loop answers
does not depend on whether a status can be had. Invariant: memory is bounded: there are at most
``STREAMS_MAX`` streams with ``PARTS_MAX`` parts each and ``TRAINERS_MAX`` trainers at a time;
further ones count as ``OTHER``. A series without a remaining point is dropped.
"""

import os
import socket
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from math import ceil, inf, isnan, nan
from threading import Condition, Lock
from time import monotonic
from typing import NamedTuple

from batchd.observe.diagnosis.overview import Overview, StatusWindow
from batchd.runtime.poller import Poller
from batchd_client.asking import asking_parent
from batchd_client.errors import BatchdClientError, ProtocolError
from batchd_client.lifeline import SessionLost
from batchd_client.session import Session
from batchd_wire.codec import Message
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Status
from batchd_wire.runtime import RuntimeDirectory
from batchd_wire.status import DaemonStatus, ReportPage, read_status

INTERVAL_S = 1.0
SPACING_S = 0.1
OPENING_S = 3600.0
"""Timeout of the session. It may be long: the lifeline reports the daemon's end."""
SIDE_ANSWER_S = 5.0
SIDE_ANSWERS_KEPT_MAX = 8
REPORTS_SHOWN = 1_000
"""The last reports of a stream that are shown."""
DEADLINE_S = 3.0
"""Of a question: after it, the loop is asked for the shortest answer that it has."""
LOST_S = 60.0
"""Without any answer for so long the session is given up: the daemon starts another observer."""
STALL_S = 5.0
"""Time without an answer after which the loop counts as hung; usual are milliseconds."""
STEP_S, POINTS = 5.0, 180
FINE_STEP_S, FINE_POINTS = 2.0, 30
SHOWN_POINTS_MIN = 10
"""So that a plot of the first seconds has room beside them."""
STATUS_SPACING_S = 0.9
"""Between two statuses that are kept; closer ones add nothing."""
STREAMS_MAX, PARTS_MAX, TRAINERS_MAX = 32, 12, 64
OTHER = "other"
STREAM_KINDS = ("decoded_per_s", "delivered_per_s", "leased_slots", "ready_slots", "filling_slots")
PART_KIND, WAIT_KIND = "part_ms", "wait_share"
DIGITS = 4

Key = tuple[str, ...]
"""Kind, then the stream; or the stream and the part; or the stream, the trainer and its rank."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and the ``plain`` data of ``batchd status --json``. Times: monotonic clock."""

    status: DaemonStatus
    plain: Mapping[str, object]
    asked_s: float
    received_s: float


class SideQuery(NamedTuple):
    """A question beside the status: for bad samples, or for reports if ``of_reports``."""

    stream: str
    of_reports: bool = False

    def ask(self, request: int) -> Message:
        """The message that asks."""
        if self.of_reports:
            return AskStatus(request, reports_of=self.stream, reports_last=REPORTS_SHOWN)
        return AskBad(request, self.stream)


class StatusClient:
    """One thread calls ``run``, any the rest. ``on_status`` gets each status in that thread."""

    def __init__(self, on_status: Callable[[DaemonStatus], None] = lambda _status: None) -> None:
        self._on_status = on_status
        self._side_queries_wanted: dict[SideQuery, float] = {}
        self._side_answers: dict[SideQuery, tuple[float, Message]] = {}
        """When the last answer was asked for, and the answer."""
        self._side_query_asked: tuple[SideQuery, float] | None = None
        self._changed = Condition()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._latest: Answer | None = None
        self._asked_s = -INTERVAL_S
        """Time of the last question for the status."""
        self._last_s = -SPACING_S
        """Time of the last question of either kind."""
        self._was_side_query = False
        """True if that was not for the status."""
        self._wanted_s = 0.0
        self._pending_s: float | None = None
        """When the question was asked that has no answer yet."""
        self._is_brief = False
        """True if that was for a brief answer, as another one had been given up."""
        self._waiting_since_s: float | None = monotonic()
        """Since when no question was answered; at first since the start, until the session is
        open."""

    # --- any thread -------------------------------------------------------------------------------

    def latest(self) -> Answer | None:
        """The daemon's last answer; None before the first."""
        return self._latest

    def fresh(self, within_s: float) -> Answer | None:
        """Ask now; without an answer within ``within_s`` seconds return the last, if any."""
        wanted_s = monotonic()
        with self._changed:
            self._wanted_s = wanted_s
            os.eventfd_write(self._wake, 1)
            self._changed.wait_for(lambda: self._latest is not None and self._latest.asked_s >= wanted_s, within_s)
            return self._latest

    def bad(self, stream: str, within_s: float) -> BadSamples | None:
        """Bad samples of an existing stream; up to ``SIDE_ANSWER_S`` old if the daemon answers."""
        answer = self._side_answer(SideQuery(stream), within_s)
        return answer if isinstance(answer, BadSamples) else None

    def reports(self, stream: str, within_s: float) -> ReportPage | None:
        """The last reports about an existing stream, as ``bad``; None also if there are none."""
        answer = self._side_answer(SideQuery(stream, of_reports=True), within_s)
        return read_status(answer.status).reports if isinstance(answer, Status) else None

    def _side_answer(self, query: SideQuery, within_s: float) -> Message | None:
        oldest_s = monotonic() - SIDE_ANSWER_S
        with self._changed:
            if self._side_answers.get(query, (-inf, None))[0] < oldest_s:
                self._side_queries_wanted[query] = monotonic()
                os.eventfd_write(self._wake, 1)
                self._changed.wait_for(lambda: self._side_answers.get(query, (-inf, None))[0] >= oldest_s, within_s)
            return self._side_answers[query][1] if query in self._side_answers else None

    def silent_s(self) -> float:
        """Seconds for which a question has been unanswered."""
        since_s = self._waiting_since_s
        return 0.0 if since_s is None else monotonic() - since_s

    @property
    def is_answered(self) -> bool:
        """True while the daemon's loop answers."""
        return self.silent_s() < STALL_S

    # --- the thread that asks ---------------------------------------------------------------------

    def run(self, directory: RuntimeDirectory, lifeline: socket.socket) -> None:
        """Ask until the daemon is gone, or silent. Raises ``BatchdClientError`` if it refuses."""
        with (
            suppress(SessionLost),
            asking_parent(directory, lifeline, OPENING_S) as session,
            closing(Poller()) as poller,
        ):
            self._waiting_since_s = None
            for descriptor in session.descriptors:
                poller.watch(descriptor, lambda: None)  # it has to be asked after each wait
            poller.watch(self._wake, lambda: os.eventfd_read(self._wake))
            poller.at(self._due_s, lambda: self._ask(session))
            while self.silent_s() < LOST_S:
                poller.wait()
                self._take(session)

    def _due_s(self) -> float:
        """When the next question is due, also as the last one was not answered."""
        if self._pending_s is not None:
            return self._pending_s + DEADLINE_S
        spaced_s = self._last_s + SPACING_S
        return spaced_s if self._side_queries_wanted else max(spaced_s, self._status_due_s())

    def _status_due_s(self) -> float:
        return self._asked_s + (SPACING_S if self._wanted_s > self._asked_s else INTERVAL_S)

    def _ask(self, session: Session) -> None:
        """Ask one question. The two kinds take turns; one without an answer is given up."""
        now, is_late = monotonic(), self._pending_s is not None
        self._last_s = self._pending_s = now
        self._waiting_since_s = self._waiting_since_s or now
        self._is_brief = is_late
        if is_late:
            self._side_query_asked = None
            session.begin(lambda request: AskStatus(request, is_brief=True))
            return
        self._was_side_query = bool(self._side_queries_wanted) and (
            now < self._status_due_s() or not self._was_side_query
        )
        if self._was_side_query:
            with self._changed:
                query, _wanted_s = self._side_queries_wanted.popitem()
            self._side_query_asked = query, now
            session.begin(query.ask)
        else:
            self._asked_s = now
            session.begin(AskStatus)

    def _take(self, session: Session) -> None:
        """Take the answer, if it has arrived."""
        side_query_asked, self._side_query_asked = self._side_query_asked, None
        try:
            reply = session.answer()
        except BatchdClientError:
            if side_query_asked is None:
                raise
            self._waiting_since_s = self._pending_s = None  # the stream has ended
            return
        if reply is None:
            self._side_query_asked = side_query_asked
            return
        if self._is_brief and isinstance(reply, Status):
            self._waiting_since_s = self._pending_s = None
            return
        answer = None
        if isinstance(reply, Status) and side_query_asked is None:
            answer = Answer(read_status(reply.status), reply.status, self._asked_s, monotonic())
            self._on_status(answer.status)
        with self._changed:
            if answer is not None:
                self._latest = answer
            elif isinstance(reply, BadSamples | Status) and side_query_asked is not None:
                query, asked_s = side_query_asked
                self._side_answers.pop(query, None)
                self._side_answers[query] = (asked_s, reply)
                while len(self._side_answers) > SIDE_ANSWERS_KEPT_MAX:
                    del self._side_answers[next(iter(self._side_answers))]
            else:
                raise ProtocolError(f"the daemon answered AskStatus with {type(reply).__name__}")
            self._waiting_since_s = self._pending_s = None
            self._changed.notify_all()


class StatusRecorder:
    """One thread adds answers of the daemon; any thread reads the rest."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._lock = Lock()
        self._window = StatusWindow()
        self._histories = {FINE_STEP_S: History(FINE_POINTS), STEP_S: History(POINTS)}
        """By their steps in seconds, the finest first."""
        self._added_s = -STEP_S

    def add(self, status: DaemonStatus) -> None:
        """Add an answer of the daemon."""
        now_s = self._now()
        if now_s - self._added_s < STATUS_SPACING_S:
            return
        self._added_s = now_s
        with self._lock:
            self._window.add(status)
            overview = None
            for step_s, history in self._histories.items():
                tick = int(now_s // step_s)
                if tick != history.tick:
                    overview = overview or self._window.overview()
                    assert overview is not None, "a status was added"
                    history.add(tick, overview)

    def overview(self) -> Overview | None:
        """The present state; None before the first answer."""
        with self._lock:
            return self._window.overview()

    def history(self, seconds: float = STEP_S * POINTS) -> dict[str, object]:
        """All series of the last ``seconds`` as plain data, in the finest steps that reach it."""
        with self._lock:
            step_s = next((one for one, kept in self._histories.items() if one * kept.points >= seconds), STEP_S)
            kept = self._histories[step_s]
            points = max(SHOWN_POINTS_MIN, min(kept.points, ceil(seconds / step_s)))
            series = [*kept.plain(int(self._now() // step_s), points)]
            return {"step_s": step_s, "points": points, "series": series}


class History:
    """The series, oldest point first. A missing point is NaN; the last is that of ``tick``."""

    def __init__(self, points: int = POINTS) -> None:
        self.points = points
        self._empty = array("f", [nan]) * points
        self.tick: int | None = None
        self._series: dict[Key, array[float]] = {}

    def add(self, tick: int, overview: Overview) -> None:
        """Record one moment. Those between it and the last one stay empty."""
        elapsed = self.points if self.tick is None else min(tick - self.tick, self.points)
        for series in self._series.values():
            del series[:elapsed]
            series.extend(self._empty[:elapsed])
        self.tick = tick
        for key, value in _values(overview):
            admitted = key if key in self._series else self._admitted(key)
            series = self._series.setdefault(admitted, self._empty[:])
            merged = max(series[-1], value) if key[0] == WAIT_KIND else series[-1] + value
            series[-1] = value if isnan(series[-1]) else merged
        self._series = {key: series for key, series in self._series.items() if not all(map(isnan, series))}

    def plain(self, tick: int, points: int | None = None) -> Iterator[dict[str, object]]:
        """The last ``points`` of each series up to ``tick``, or up to the tick before it."""
        late = 0 if self.tick is None or tick - self.tick <= 1 else min(tick - self.tick, self.points)
        for key, series in self._series.items():
            shown = (series[late:] + self._empty[:late])[-(points or self.points) :]
            values = [None if isnan(point) else float(f"{point:.{DIGITS}g}") for point in shown]
            yield {"kind": key[0], "of": list(key[1:]), "values": values}

    def _admitted(self, key: Key) -> Key:
        """The key itself if it fits the limits, else that of ``OTHER``."""
        kind, stream = key[0], key[1]
        if kind in STREAM_KINDS:
            return key if self._count(kind) < STREAMS_MAX else (kind, OTHER)
        if kind == WAIT_KIND:
            return key if self._count(kind) < TRAINERS_MAX else (kind, OTHER, OTHER, OTHER)
        if (STREAM_KINDS[0], stream) not in self._series:
            return (PART_KIND, OTHER, OTHER)
        return key if self._count(kind, stream) < PARTS_MAX else (kind, stream, OTHER)

    def _count(self, *beginning: str) -> int:
        return sum(key[: len(beginning)] == beginning for key in self._series)


def _values(overview: Overview) -> Iterable[tuple[Key, float]]:
    """The values to record. Streams first: parts are admitted if their stream is."""
    for stream in overview.streams:
        for kind in STREAM_KINDS:
            value = getattr(stream, kind)
            if value is not None:
                yield (kind, stream.name), float(value)
    for stream in overview.streams:
        for part, ms in stream.parts:
            yield (PART_KIND, stream.name, part), ms
    for trainer in overview.trainers:
        if trainer.wait_share is not None:
            yield (WAIT_KIND, trainer.stream, trainer.name, str(trainer.claim.rank)), trainer.wait_share
