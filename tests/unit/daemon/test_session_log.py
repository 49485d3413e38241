"""Every trainer's start and end is logged once, however it ends, and within a rate limit."""

import pytest
from structlog.testing import capture_logs

from batchd.core.actions import AdmitProducer, AdmitSubscription
from batchd.core.course import Course
from batchd.core.events import SessionCutOff, SessionEnded, SubscriptionEnded, Ticked
from batchd.core.plan import Plan
from batchd.daemon.doors import Peer, SessionLog
from batchd.runtime import limits
from batchd.runtime.limits import PERIOD_S, SESSION_LINES_PER_MINUTE, LinesPerMinute, OncePerMinute

HERE = Peer("resnet", 4711, "user 1000")
THERE = Peer("resnet", 1, "host 10.0.0.5", is_remote=True)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(limits, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def log():
    with capture_logs() as lines:
        yield lines


def admission(session=1, subscription=5):
    plan = Plan(samples=100, batch_size=10, seed=1, shuffle=True, drop_last=True)
    course = Course(plan, 1, 4, 2, 30, None)
    return AdmitSubscription(session, 1, subscription, 1, course, 8)


def said(log):
    return [(line["event"], line.get("reason")) for line in log if line["log_level"] == "info"]


def test_a_trainer_that_comes_says_where_it_begins(log):
    """The line has everything by which an operator tells trainers apart."""
    SessionLog().subscribed(admission(), "photos", HERE)

    assert log == [
        {
            "event": "trainer subscribed",
            "log_level": "info",
            "stream": "photos",
            "name": "resnet",
            "pid": 4711,
            "session": 1,
            "rank": "1 of 4",
            "epoch": 2,
            "step": 30,
        }
    ]


@pytest.mark.parametrize(
    ("peer", "event", "reason"),
    [
        (HERE, SubscriptionEnded(1, 5, 0), "it closed the stream"),
        (HERE, SessionEnded(1), "its connection ended"),
        (HERE, SessionCutOff(1), "it was disconnected"),
        (THERE, SessionCutOff(1), "its connection ended"),
    ],
)
def test_a_trainer_that_leaves_says_why_and_once(log, peer, event, reason):
    """The end of its connection, which follows in any case, adds no second line."""
    book = SessionLog()
    book.subscribed(admission(), "photos", peer)
    for one in (Ticked(), event, event, SessionEnded(1)):
        book.observe(one)

    assert said(log)[1:] == [("trainer left", reason)]


def test_each_stream_of_a_trainer_is_left(log):
    """Streams of other trainers are not logged as left."""
    book = SessionLog()
    book.subscribed(admission(1, 5), "photos", HERE)
    book.subscribed(admission(1, 6), "texts", HERE)
    book.subscribed(admission(2, 7), "photos", HERE)
    book.observe(SessionEnded(1))

    assert [(line["stream"], line["session"]) for line in log if line["event"] == "trainer left"] == [
        ("photos", 1),
        ("texts", 1),
    ]


def test_a_producer_comes_and_leaves_once(log):
    """A producer that announces itself twice adds no second line."""
    book = SessionLog()
    for _ in range(2):
        book.produces(AdmitProducer(1, 1, 3), "camera", HERE)
    for _ in range(2):
        book.observe(SessionEnded(1))

    assert said(log) == [("producer connected", None), ("producer left", None)]


def test_a_trainer_that_comes_and_goes_without_end_does_not_fill_the_log(log, clock):
    """Beyond the limit for a minute, its lines have debug level; other trainers are logged."""
    book = SessionLog()

    def come_and_go(times, peer=HERE):
        before = len(said(log))
        for _ in range(times):
            book.subscribed(admission(), "photos", peer)
            book.observe(SubscriptionEnded(1, 5, 0))
        return len(said(log)) - before

    assert come_and_go(1000) == SESSION_LINES_PER_MINUTE
    assert [line["about"] for line in log if line["event"] == "log lines left out"] == ["user 1000"]
    assert come_and_go(1, Peer("other", 1, "user 1001")) == 2
    assert come_and_go(1) == 0
    clock[0] += PERIOD_S
    assert come_and_go(1) == 2


def left_out(log):
    return [
        (line["about"], line.get("left_out", line.get("lines_per_minute")))
        for line in log
        if line["event"] == "log lines left out"
    ]


@pytest.mark.parametrize("lines", [OncePerMinute(), LinesPerMinute(2, 20)], ids=["once", "twice"])
def test_peers_without_number_fill_neither_log_nor_memory(lines, log, clock):
    """Each line is of another peer.

    One line says when the limit is reached, and one by how much.
    """
    for minute in range(3):
        allowed = [lines.allows("refused", f"host {minute} {number}") for number in range(10_000)]
        assert allowed == [number < 20 for number in range(10_000)]
        clock[0] += PERIOD_S

    assert len(lines._by_subject) <= limits.SUBJECTS_MAX
    about = "refused, of all together"
    assert left_out(log) == [(about, 20), (about, 9_980), (about, 20), (about, 9_980), (about, 20)]


@pytest.mark.usefixtures("clock")
def test_other_kinds_of_lines_have_limits_of_their_own():
    """A flood of one kind does not hide what another one says."""
    lines = OncePerMinute()
    for number in range(100):
        lines.allows("refused", f"host {number}")

    assert lines.allows("disconnected", "user 1000")


@pytest.mark.usefixtures("clock")
def test_peers_that_come_later_do_not_let_an_earlier_one_begin_again():
    """The oldest is forgotten, not all of them: a crowd cannot reset what was counted."""
    lines = LinesPerMinute(1, 100_000)
    for number in range(limits.SUBJECTS_MAX):
        assert lines.allows("refused", f"host {number}")
    lines.allows("refused", "one more")

    assert lines.allows("refused", "host 0")
    assert not any(lines.allows("refused", f"host {number}") for number in range(3, limits.SUBJECTS_MAX))
