"""Reports of a loop travel with its pulls, once each, and cost it no wait."""

import logging
import math
from collections.abc import Iterator

import numpy as np
import pytest

import batchd_client
from batchd_client.batch import BatchRows
from batchd_client.errors import ReportInvalid
from batchd_client.hints import log_once
from batchd_client.reports import SENT_BYTES, Reports
from batchd_wire.messages import Pull, Subscribed
from batchd_wire.reports import PULL_BYTES, ROWS_AT_ONCE
from support.fake_daemon import FakeDaemon

Sent = dict[tuple[int, int, int, int], tuple[float, ...]]
FIRST = BatchRows(0, 0, 0, 4)
SESSION = type("Session", (), {})


def keeping(message):
    if isinstance(message, Subscribed):
        message.keeps_reports = True
    return message


@pytest.fixture
def fake(tmp_path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "run") as fake:
        fake.alter = keeping
        yield fake


def sent_in(pulls: list[Pull]) -> list[tuple[tuple[int, int, int, int], tuple[float, ...]]]:
    return [
        (tuple(rows), tuple(np.frombuffer(values, "<f4").tolist()))
        for pull in pulls
        for *rows, values in pull.reports or []
    ]


def part_of(reports: Reports, session: object) -> Sent:
    """All that a session gets, message by message."""
    found: Sent = {}
    while part := reports.next_part(session):
        reports.sent(part)
        found |= {tuple(rows): tuple(np.frombuffer(values, "<f4").tolist()) for *rows, values in part}
        if not reports.has_unsent:
            break
    return found


def test_each_batch_is_reported_once_with_the_next_pull(fake) -> None:
    """The last one goes when the loop ends."""
    with batchd_client.connect(fake.address) as daemon, daemon.stream("photos") as stream:
        for batch in stream:
            stream.report(batch.step / 2)
        fake.wait_until(lambda: len(sent_in(fake.heard_of(Pull))) == 5)

    assert sent_in(fake.heard_of(Pull)) == [((0, step, 0, 4), (step / 2,)) for step in range(5)]


def test_rows_can_be_reported_one_by_one_and_later(fake) -> None:
    """``at`` names an earlier batch, by itself or by its position; the last report counts."""
    with batchd_client.connect(fake.address) as daemon, daemon.stream("photos") as stream:
        batches = iter(stream)
        first = next(batches)
        next(batches)
        stream.report([1, 2, 3, 4], at=first)
        stream.report(np.array([9.0]), at=(0, 1))
        stream.report(7)
    fake.wait_until(lambda: len(sent_in(fake.heard_of(Pull))) == 2)

    assert sent_in(fake.heard_of(Pull)) == [((0, 0, 0, 4), (1, 2, 3, 4)), ((0, 1, 0, 4), (7,))]


@pytest.mark.parametrize(
    ("values", "at", "named"),
    [
        ([1, 2], None, "2 values for the 4 rows of epoch 0, step 0"),
        ("much", None, "str is not a number"),
        (object(), None, "object is not a number"),
        (None, None, "NoneType is not a number"),
        (["1", 2, 3, 4], None, "list is not a number"),
        (1.0, "0:0", "at = '0:0' is neither a batch nor"),
        ([], None, "0 values"),
        (1.0, (0, 3), "epoch 0, step 3 of stream 'photos' is not among the last 1 batches"),
    ],
)
def test_impossible_report_is_refused_in_the_loop(fake, values, at, named) -> None:
    """The error says what does not fit, and nothing is sent."""
    with batchd_client.connect(fake.address) as daemon, daemon.stream("photos") as stream:
        with pytest.raises(ReportInvalid, match="no batch of stream"):
            stream.report(1.0)
        next(iter(stream))
        with pytest.raises(ReportInvalid, match=named):
            stream.report(values, at)

    assert sent_in(fake.heard_of(Pull)) == []


def test_losses_that_are_no_numbers_are_reported_as_they_are() -> None:
    """NaN and infinities are what a user looks for; what float32 cannot hold is an infinity."""
    reports = Reports("photos")
    reports.add([math.nan, math.inf, -math.inf, 1e300], FIRST)

    ((values),) = part_of(reports, SESSION()).values()
    assert math.isnan(values[0])
    assert values[1:] == (math.inf, -math.inf, math.inf)


def test_daemon_that_keeps_no_reports_gets_none(tmp_path, caplog) -> None:
    """The log says so once, and what helps."""
    log_once.cache_clear()
    with (
        caplog.at_level(logging.WARNING),
        FakeDaemon(tmp_path / "run") as fake,
        batchd_client.connect(fake.address) as daemon,
        daemon.stream("photos") as stream,
    ):
        for _batch in stream:
            stream.report(1.0)

    assert sent_in(fake.heard_of(Pull)) == []
    (line,) = [line for line in caplog.messages if "report" in line]
    assert "upgrade batchd" in line


def test_new_daemon_gets_the_last_reports_again(fake) -> None:
    """What the dead one had, and what was on its way."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=20) as daemon, daemon.stream("photos") as stream:
        for _epoch in range(2):
            for batch in stream:
                if (batch.epoch, batch.step) == (0, 3):
                    fake.kill()
                    fake.heard.clear()
                    fake.start()
                stream.report(batch.step)
        fake.wait_until(lambda: len(sent_in(fake.heard_of(Pull))) == 10)

    assert sent_in(fake.heard_of(Pull)) == [((epoch, step, 0, 4), (step,)) for epoch in range(2) for step in range(5)]


def test_reports_of_many_rows_go_in_messages_that_a_daemon_reads() -> None:
    """Each has at most 32 KiB of values, and together they have all of them in order."""
    rows = 3 * ROWS_AT_ONCE + 1
    reports = Reports("photos")
    for step in range(4):
        reports.add(np.arange(rows, dtype=np.float32), BatchRows(0, step, 0, rows))

    session, parts = SESSION(), []
    while part := reports.next_part(session):
        assert sum(len(values) for *_rows, values in part) <= PULL_BYTES
        parts += part
        reports.sent(part)

    assert [(step, first, count) for _epoch, step, first, count, _values in parts] == [
        (step, first, min(ROWS_AT_ONCE, rows - first)) for step in range(4) for first in range(0, rows, ROWS_AT_ONCE)
    ]
    joined = np.frombuffer(b"".join(values for *_rows, values in parts), "<f4")
    np.testing.assert_array_equal(joined, np.tile(np.arange(rows, dtype=np.float32), 4))


@pytest.mark.thorough
def test_sent_reports_are_kept_within_a_limit_for_the_next_session() -> None:
    """The newest are; one that was replaced meanwhile is sent in its last form alone."""
    reports, count = Reports("photos"), 2 * SENT_BYTES // 36
    for step in range(count):
        reports.add(step, BatchRows(0, step, 0, 4))
    assert len(part_of(reports, SESSION())) == count

    reports.add(-1.0, BatchRows(0, count - 2, 0, 4))
    again = part_of(reports, SESSION())

    assert len(again) == SENT_BYTES // 36
    assert again[0, count - 1, 0, 4] == (count - 1,)
    assert again[0, count - 2, 0, 4] == (-1,)
    assert (0, 0, 0, 4) not in again


class OnItsWay:
    """An array of a device: computed after ``polls`` questions."""

    def __init__(self, values, polls) -> None:
        self.values, self.polls, self.size, self.copies = np.array(values, np.float32), polls, len(values), 0

    def copy_to_host_async(self) -> None:
        self.copies += 1

    def is_ready(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def __array__(self, dtype=None, copy=None):
        assert self.polls < 0, "the loop waited for the device"
        return self.values.astype(dtype)


def test_values_of_a_device_are_sent_once_they_have_arrived() -> None:
    """Until then the loop goes on; later reports keep their order behind them."""
    reports, session = Reports("photos"), SESSION()
    slow = OnItsWay([5.0], polls=2)
    reports.add(slow, FIRST)
    reports.add(OnItsWay([6.0], polls=0), BatchRows(0, 1, 0, 4))

    assert slow.copies == 1
    assert [part_of(reports, session) for _ in range(3)] == [
        {},
        {},
        {(0, 0, 0, 4): (5.0,), (0, 1, 0, 4): (6.0,)},
    ]


def test_wrong_number_of_values_on_a_device_is_refused_at_once() -> None:
    """Without a wait for them."""
    with pytest.raises(ReportInvalid, match="3 values for the 4 rows"):
        Reports("photos").add(OnItsWay([1, 2, 3], polls=9), FIRST)
