"""Questions, and reports of batches, which may wait: trainers get their batches first.

DAEMON process.

    question -> price of its session -> behind the reports before it -> answered
    reports  -> budget of its session -> a part at a time ------------> kept

A portion of this work ends after ``PORTION_S``, and the next one begins when the loop has had
several times as long for everything else. So it has its share of the loop, whatever peers ask for
and however many of them there are. One status answers all that had asked for it when it was made.

Invariant: a question is answered after all reports that came before it, or after ``BEHIND_S``: the
reports of others may be very many.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from batchd.core.course import Course
from batchd.daemon.doors import Peer, Query, Reported
from batchd.runtime.limits import QUESTIONS_PER_TICK
from batchd_wire.record import record
from batchd_wire.reports import PULL_REPORTS, ReportedRows

PORTION_S = 0.002
REST = 3
"""A portion is followed by so many times its duration without one: a quarter of the loop."""
BEHIND_S = 0.5
QUESTIONS_WAITING_MAX = 64
"""Questions of one session that wait for further ticks; one more is refused."""
REPORTS_PER_TICK = 32_768
"""Reports of one session in a tick: more than a client sends again to a new session."""
REPORTS_WAITING_MAX = 100_000
"""Reports that wait, some 300 bytes each. At this limit each session has its equal part of it."""
REPORTS_AT_ONCE = 64
"""So few that a part takes milliseconds, whatever positions they name."""


@record
class GrantedReports:
    """Reports of a subscription that was ``granted`` batches of its course by then."""

    stream: int
    course: Course
    granted: int
    peer: Peer
    reports: Sequence[ReportedRows]


@dataclass(slots=True)
class _Waiting:
    """Reports of a session from number ``at`` on."""

    session: int
    granted: GrantedReports
    at: int = 0


@record
class _Question:
    """``after``: the number of reports, from all sessions, that came before."""

    query: Query
    asked_s: float
    after: int


class SideWork:
    """See the module. ``answer`` gets a question and when it was asked; ``keep`` gets a part.

    ``refuse`` gets a question too many. ``now``: the loop's clock.
    """

    def __init__(
        self,
        answer: Callable[[Query, float], None],
        refuse: Callable[[Query], None],
        keep: Callable[[GrantedReports], None],
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._answer, self._refuse, self._keep, self._now = answer, refuse, keep, now
        self._questions: deque[_Question] = deque()
        self._held: deque[_Question] = deque()
        """Those that have to wait for another tick."""
        self._reports: deque[_Waiting] = deque()
        self._of_session: Counter[int] = Counter()
        """Reports that wait, by session."""
        self._asked: Counter[int] = Counter()
        """Questions in this tick, by session."""
        self._reported: Counter[int] = Counter()
        self._came = self._done = 0
        """Reports until now, and those of them that were kept or refused."""
        self._due_s = -inf

    @property
    def due_s(self) -> float:
        """When the next portion is due."""
        return self._due_s if self._questions or self._reports else inf

    def ask(self, query: Query) -> None:
        """Take a question, for ``run`` to answer."""
        self._admit(_Question(query, self._now(), self._came))

    def report(self, event: Reported, granted: GrantedReports) -> int:
        """Take reports, for ``run`` to keep. Returns how many were refused."""
        session, count = event.session, len(granted.reports)
        self._reported[session] += count
        waiting = self._of_session[session] + count
        is_full = self._came - self._done + count > REPORTS_WAITING_MAX
        if (
            count > PULL_REPORTS
            or self._reported[session] > REPORTS_PER_TICK
            or (is_full and waiting > REPORTS_WAITING_MAX // len(self._of_session))
        ):
            return count
        self._of_session[session] = waiting
        self._came += count
        self._reports.append(_Waiting(session, granted))
        return 0

    def tick(self) -> None:
        """A tick has passed, so each session may ask and report again."""
        self._asked.clear()
        self._reported.clear()
        held, self._held = self._held, deque()
        for question in held:
            self._admit(question)

    def run(self) -> None:
        """Work for a portion, which is due."""
        began_s = now = self._now()
        while now < began_s + PORTION_S and self._step():
            now = self._now()
        self._due_s = now + REST * (now - began_s)

    def _admit(self, question: _Question) -> None:
        session = question.query.session
        self._asked[session] += 1
        if self._asked[session] <= QUESTIONS_PER_TICK:
            self._questions.append(question)
        elif self._asked[session] <= QUESTIONS_PER_TICK + QUESTIONS_WAITING_MAX:
            self._held.append(question)
        else:
            self._refuse(question.query)

    def _step(self) -> bool:
        """Answer a question, or keep a part of the reports; False if there is nothing to do."""
        if self._questions:
            first = self._questions[0]
            if first.after <= self._done or self._now() - first.asked_s > BEHIND_S:
                self._questions.popleft()
                self._answer(first.query, first.asked_s)
                return True
        if self._reports:
            self._keep_part(self._reports[0])
            return True
        return False

    def _keep_part(self, waiting: _Waiting) -> None:
        whole = waiting.granted
        part = whole.reports[waiting.at : waiting.at + REPORTS_AT_ONCE]
        waiting.at += len(part)
        self._done += len(part)
        self._of_session[waiting.session] -= len(part)
        if waiting.at >= len(whole.reports):
            self._reports.popleft()
            if not self._of_session[waiting.session]:
                del self._of_session[waiting.session]
        self._keep(GrantedReports(whole.stream, whole.course, whole.granted, whole.peer, part))
