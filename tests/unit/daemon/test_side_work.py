"""Questions and reports get their share of the loop, each session its own, and none is lost."""

from collections import Counter
from math import inf

import pytest

from batchd.core.course import Course
from batchd.core.plan import Plan
from batchd.daemon.doors import Peer, Query, Reported
from batchd.daemon.side_work import (
    BEHIND_S,
    PORTION_S,
    QUESTIONS_WAITING_MAX,
    REPORTS_AT_ONCE,
    REPORTS_PER_TICK,
    REPORTS_WAITING_MAX,
    REST,
    GrantedReports,
    SideWork,
)
from batchd.runtime.limits import QUESTIONS_PER_TICK
from batchd_wire.messages import AskStatus
from batchd_wire.reports import PULL_REPORTS

PEER = Peer("a", 1, "user 1")
COURSE = Course(Plan(10, 4, 0, shuffle=True, drop_last=False), 0, 1, 0, 0, None)


class World:
    """A clock, and the answers; each piece of work takes ``cost_s``."""

    def __init__(self) -> None:
        self.now_s, self.cost_s = 100.0, 0.001
        self.done: list[object] = []
        self.refused: list[int] = []
        self.work = SideWork(
            self.answer, lambda query: self.refused.append(query.session), self.keep, lambda: self.now_s
        )

    def answer(self, query: Query, _asked_s: float) -> None:
        self.now_s += self.cost_s
        self.done.append(query.session)

    def keep(self, part: GrantedReports) -> None:
        self.now_s += self.cost_s
        self.done.append(tuple(report[0] for report in part.reports))

    def ask(self, session: int = 1) -> None:
        self.work.ask(Query(session, AskStatus(1)))

    def report(self, count: int, session: int = 1) -> int:
        reports = [(epoch, 0, 0, 4, b"1234") for epoch in range(count)]
        return self.work.report(Reported(session, PEER, 1, reports), GrantedReports(1, COURSE, 1, PEER, reports))

    def run_all(self) -> None:
        while (due_s := self.work.due_s) < inf:
            self.now_s = max(self.now_s, due_s)
            self.work.run()


@pytest.fixture
def world() -> World:
    return World()


def test_side_work_has_its_share_of_the_loop(world) -> None:
    """However many ask, and whatever a piece costs, three quarters of the time are for trainers."""
    for world.cost_s in (0.0001, 0.001, 0.1):
        for session in range(40):
            world.ask(session)
        began_s, worked_s = world.now_s, 0.0
        while (due_s := world.work.due_s) < inf:
            world.now_s = max(world.now_s, due_s)
            start_s = world.now_s
            world.work.run()
            assert world.now_s - start_s <= PORTION_S + world.cost_s + 1e-9
            worked_s += world.now_s - start_s
        assert worked_s <= (world.now_s - began_s) / (1 + REST) + PORTION_S + world.cost_s


def test_questions_beyond_the_price_wait_for_the_next_tick(world) -> None:
    """Other sessions do not wait for them, and far too many are refused."""
    for _ in range(QUESTIONS_PER_TICK + QUESTIONS_WAITING_MAX + 3):
        world.ask(1)
    world.ask(2)
    world.run_all()
    assert Counter(world.done) == {1: QUESTIONS_PER_TICK, 2: 1}
    assert world.refused == [1, 1, 1]
    for tick in range(2, 4):
        world.work.tick()
        world.run_all()
        assert Counter(world.done)[1] == tick * QUESTIONS_PER_TICK


def test_question_is_answered_behind_the_reports_before_it(world) -> None:
    """Also those of other sessions, in parts."""
    assert world.report(REPORTS_AT_ONCE + 1, session=2) == 0
    world.ask(1)
    world.report(1, session=2)
    world.run_all()
    assert world.done == [tuple(range(REPORTS_AT_ONCE)), (REPORTS_AT_ONCE,), 1, (0,)]


def test_question_does_not_wait_for_very_many_reports(world) -> None:
    """A hostile trainer may send more than can be kept soon."""
    world.cost_s = BEHIND_S / 5
    for _ in range(20):
        world.report(PULL_REPORTS, session=2)
    world.ask(1)
    world.run_all()
    assert world.done.index(1) <= 5


def test_reports_have_a_budget_for_each_message_session_and_tick(world) -> None:
    """What a client sends again to a new session is within it."""
    assert world.report(PULL_REPORTS + 1) == PULL_REPORTS + 1
    world.work.tick()
    for _ in range(REPORTS_PER_TICK // PULL_REPORTS):
        assert world.report(PULL_REPORTS) == 0
    assert world.report(1) == 1
    assert world.report(1, session=2) == 0
    world.work.tick()
    assert world.report(1) == 0


def test_reports_that_wait_are_shared_by_the_sessions(world) -> None:
    """One that has filled all the room leaves others their part, and may report again later."""
    waiting = 0
    while world.report(PULL_REPORTS) == 0:
        waiting += PULL_REPORTS
        world.work.tick()
    assert waiting <= REPORTS_WAITING_MAX
    assert world.report(PULL_REPORTS, session=2) == 0
    assert world.report(PULL_REPORTS) == PULL_REPORTS
    world.run_all()
    world.work.tick()
    assert world.report(PULL_REPORTS) == 0
    world.run_all()
    assert not world.work._of_session
