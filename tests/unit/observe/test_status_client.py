"""How often the observer asks the daemon, however many requests arrive: with a fake clock."""

import itertools
import os
import subprocess
import sys

import pytest

from batchd.observe.http import status_client
from batchd.observe.http.status_client import (
    DEADLINE_S,
    INTERVAL_S,
    LOST_S,
    SPACING_S,
    STALL_S,
    Aside,
    StatusClient,
)
from batchd_wire.messages import AskBad, AskStatus, Status


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Session:
    """Records the time and kind of each question, and answers at once."""

    def __init__(self, clock: Clock) -> None:
        self.asked: list[tuple[float, type]] = []
        self.last = None
        self._clock = clock

    def begin(self, make) -> None:
        self.last = make(1)
        self.asked.append((self._clock.now, type(self.last)))

    def answer(self) -> Status | None:
        """Answer what is brief, and lose all else."""
        return Status(1, {}) if self.last.is_brief else None


@pytest.fixture
def clock(monkeypatch):
    """The clock of the client."""
    found = Clock()
    monkeypatch.setattr(status_client, "monotonic", found)
    return found


@pytest.fixture
def asking():
    """A client whose session is open."""
    found = StatusClient()
    found._waiting_since_s = None
    yield found
    os.close(found._wake)


def run(asking, clock, want, seconds=10.0) -> list[tuple[float, type]]:
    """Let time pass, in steps that are shorter than any pause; ``want`` is called before each."""
    session = Session(clock)
    for _ in range(int(seconds * 100)):
        want()
        asking._ask_if_due(session)
        asking._waiting_since_s = asking._pending_s = None
        clock.now += 0.01
    return session.asked


def test_questions_are_spaced_whatever_is_wanted(asking, clock):
    """Requests want the status and the bad samples of many streams all the time.

    The client asks for both, ten times a second in total.
    """

    def want():
        asking._wanted_s = clock.now
        asking._asides_wanted.update({Aside("one"): clock.now, Aside("other"): clock.now})

    asked = run(asking, clock, want)

    times = [when for when, _kind in asked]
    assert min(after - before for before, after in itertools.pairwise(times)) >= SPACING_S - 1e-6
    assert len(asked) >= 90
    assert 40 <= sum(kind is AskBad for _when, kind in asked) <= len(asked) - 40


def test_without_requests_the_status_alone_is_asked_for(asking, clock):
    """The client asks once a second."""
    asked = run(asking, clock, lambda: None)

    assert {kind for _when, kind in asked} == {AskStatus}
    assert len(asked) == 10 / INTERVAL_S


def test_bad_samples_do_not_delay_the_status(asking, clock):
    """The client still asks for the status once a second."""
    asked = run(asking, clock, lambda: asking._asides_wanted.update({Aside("one"): clock.now}))

    assert 9 <= sum(kind is AskStatus for _when, kind in asked) <= 11


def test_status_that_is_never_answered_does_not_look_like_a_loop_that_hangs(asking, clock):
    """The loop is asked for the least that it can answer, and for another status after that."""
    session = Session(clock)
    briefs = 0
    for _ in range(3_000):
        asking._ask_if_due(session)
        asking._take(session)
        assert asking._patience_ms() <= 1000 * max(DEADLINE_S, INTERVAL_S) + 1
        assert asking.is_answered
        briefs += session.last.is_brief and asking._pending_s is None
        clock.now += 0.01
    assert briefs >= 5
    assert asking.latest() is None


def test_session_without_any_answer_is_given_up(asking, clock, monkeypatch):
    """Its connection may be broken: the daemon starts another observer."""
    session = Session(clock)
    monkeypatch.setattr(session, "answer", lambda: None)
    while asking.silent_s() < LOST_S:
        asking._ask_if_due(session)
        asking._take(session)
        assert asking.is_answered == (asking.silent_s() < STALL_S)
        clock.now += 0.1
    assert len(session.asked) <= 1 + LOST_S / DEADLINE_S


def test_the_observer_loads_no_numpy():
    """Other modules that make a process large are not loaded either.

    The client loads what it needs at its first use.
    """
    large = {"numpy", "cv2", "pydantic", "click", "rich"}
    program = f"import batchd.observe.http.__main__, sys; print({large} & set(sys.modules))"

    assert subprocess.check_output([sys.executable, "-P", "-c", program], text=True) == "set()\n"
