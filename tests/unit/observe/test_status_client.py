"""How often the observer asks the daemon, however many requests arrive: with a fake clock."""

import itertools
import subprocess
import sys
from contextlib import nullcontext
from math import inf

import pytest

from batchd.observe.http import status_client
from batchd.observe.http.status_client import (
    DEADLINE_S,
    INTERVAL_S,
    LOST_S,
    SPACING_S,
    STALL_S,
)
from batchd.runtime import poller
from batchd.runtime.poller import Poller
from batchd_client.lifeline import SessionLost
from batchd_wire.codec import Message
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Status
from batchd_wire.status import plain_status
from support.statuses import open_status_client, two_looks

ANSWERED = plain_status(two_looks()[0])


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Session:
    """Records the time and kind of each question, and answers at once, until ``ends_s``."""

    descriptors = ()

    def __init__(self, clock: Clock, ends_s: float) -> None:
        self.asked: list[tuple[float, type]] = []
        self._clock = clock
        self._ends_s = ends_s
        self._questions: list[Message] = []

    def begin(self, make) -> None:
        if self._clock.now >= self._ends_s:
            raise SessionLost
        question = make(1)
        self._questions.append(question)
        self.asked.append((self._clock.now, type(question)))

    def answer(self) -> Message | None:
        """Answer each question once."""
        return self.answer_to(self._questions.pop()) if self._questions else None

    def answer_to(self, question: Message) -> Message | None:
        return BadSamples(1, 0, []) if isinstance(question, AskBad) else Status(1, ANSWERED)


class TimersAlone(Poller):
    """Lets time pass instead of waiting, in steps that are shorter than any pause."""

    def __init__(self, clock: Clock, before) -> None:
        super().__init__()
        self._clock = clock
        self._before = before

    def watch(self, *_descriptor) -> None:
        """Watch nothing."""

    def dispatch(self, timeout_s: float = 0.0) -> None:
        assert 0 <= timeout_s <= max(DEADLINE_S, INTERVAL_S)
        self._before()
        self._clock.now += min(timeout_s, 0.01)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the client."""
    found = Clock()
    monkeypatch.setattr(status_client, "monotonic", found)
    monkeypatch.setattr(poller, "monotonic", found)
    return found


@pytest.fixture
def asking():
    """A client that asks nobody yet."""
    with open_status_client() as found:
        yield found


@pytest.fixture
def run(asking, clock, monkeypatch):
    """Return a function that runs the client, and calls ``before`` before each pause."""

    def run_in(session: Session, before=lambda: None) -> list[tuple[float, type]]:
        monkeypatch.setattr(status_client, "asking_parent", lambda *_arguments: nullcontext(session))
        monkeypatch.setattr(status_client, "Poller", lambda: TimersAlone(clock, before))
        asking.run(None, None)
        return session.asked

    return run_in


def test_questions_are_spaced_whatever_is_wanted(asking, clock, run):
    """Requests want the status and the bad samples of many streams all the time.

    The client asks for both, ten times a second in total.
    """
    streams = map(str, itertools.count())

    def want():
        asking.fresh(0)
        asking.bad(next(streams), 0)

    asked = run(Session(clock, clock.now + 10), want)

    times = [when for when, _kind in asked]
    assert min(after - before for before, after in itertools.pairwise(times)) >= SPACING_S - 1e-6
    assert len(asked) >= 90
    assert 40 <= sum(kind is AskBad for _when, kind in asked) <= len(asked) - 40


def test_without_requests_the_status_alone_is_asked_for(clock, run):
    """The client asks once a second."""
    asked = run(Session(clock, clock.now + 10))

    assert {kind for _when, kind in asked} == {AskStatus}
    assert len(asked) == 10 / INTERVAL_S


def test_bad_samples_do_not_delay_the_status(asking, clock, run):
    """The client still asks for the status once a second."""
    streams = map(str, itertools.count())
    asked = run(Session(clock, clock.now + 10), lambda: asking.bad(next(streams), 0))

    assert 9 <= sum(kind is AskStatus for _when, kind in asked) <= 11


def test_status_that_is_never_answered_does_not_look_like_a_loop_that_hangs(asking, clock, run):
    """The loop is asked for the least that it can answer, and for another status after that."""
    briefs = []

    class BriefSession(Session):
        def answer_to(self, question):
            briefs.append(question.is_brief)
            return Status(1, {}) if question.is_brief else None

    def check():
        assert asking.is_answered

    run(BriefSession(clock, clock.now + 30), check)

    assert sum(briefs) >= 5
    assert asking.latest() is None


def test_session_without_any_answer_is_given_up(asking, clock, run, monkeypatch):
    """Its connection may be broken: the daemon starts another observer."""
    session = Session(clock, inf)
    monkeypatch.setattr(session, "answer", lambda: None)

    def check():
        assert asking.is_answered == (asking.silent_s() < STALL_S)

    asked = run(session, check)

    assert LOST_S <= asking.silent_s() < LOST_S + 1
    assert len(asked) <= 1 + LOST_S / DEADLINE_S


def test_the_observer_loads_no_numpy():
    """Other modules that make a process large are not loaded either.

    The client loads what it needs at its first use.
    """
    large = {"numpy", "cv2", "pydantic", "click", "rich"}
    program = f"import batchd.observe.http.__main__, sys; print({large} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-P", "-c", program], text=True) == "set()\n"
