"""The daemon keeps the last reports of a stream once each, within limits, whatever arrives."""

import math

import numpy as np
import pytest

from batchd.core.course import Course
from batchd.core.plan import Plan
from batchd.daemon import reports as module
from batchd.daemon.reports import REPORT_BYTES, RUNS_MAX, StreamReports, granted_part
from batchd_wire.position import Position
from batchd_wire.reports import HEAD
from batchd_wire.status import REPORT_BOUNDS, ReportPage

PLAN = Plan(samples=10, batch_size=4, seed=0, shuffle=True, drop_last=False)
"""Steps of 4, 4 and 2 rows."""


def packed(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def kept(page: ReportPage) -> dict[tuple[str, int, int, int], tuple[float, ...]]:
    """The values by run, epoch, step and first row."""
    names = dict(zip(page.run_numbers, page.runs, strict=True))
    values = np.frombuffer(page.values, "<f4")
    found, at = {}, 0
    for epoch, step, _number, first, _rows, count, run, _rank, _world_size in HEAD.iter_unpack(page.heads):
        found[names[run], epoch, step, first] = tuple(values[at : at + count].tolist())
        at += count
    assert at == len(values)
    return found


@pytest.fixture
def reports() -> StreamReports:
    return StreamReports(PLAN, is_live=False, memory_bytes=1 << 20)


def test_repeated_report_counts_once_and_a_new_value_replaces_the_old(reports) -> None:
    """Trainers send their last reports again after each reconnect."""
    assert reports.statistics() is None
    for values in (packed(1.0), packed(1.0), packed(2.0)):
        assert not reports.add("a", 0, 2, [(0, 1, 0, 4, values)])
    reports.add("b", 1, 2, [(0, 1, 0, 4, packed(5.0))])

    assert kept(reports.page(0)) == {("a", 0, 1, 0): (2.0,), ("b", 0, 1, 0): (5.0,)}
    statistics = reports.statistics()
    assert (statistics.kept, statistics.received, statistics.values, statistics.sum) == (2, 3, 3, 8.0)
    assert sum(statistics.buckets) == 3


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ((0, 3, 0, 4, packed(1)), "the stream has no rows 0 to 4 at epoch 0, step 3"),
        ((0, 2, 0, 4, packed(1)), "no rows 0 to 4"),
        ((0, 2, 1, 2, packed(1)), "no rows 1 to 3"),
        ((0, 0, 0, 0, packed(1)), "no rows 0 to 0"),
        ((1 << 62, 0, 0, 4, packed(1)), "the stream has no rows"),
        ((0, 1 << 62, 0, 4, packed(1)), "the stream has no rows"),
        ((0, 0, (1 << 63) - 1, (1 << 63) - 1, packed(1)), "the stream has no rows"),
        ((0, 0, 0, 4, packed(1, 2, 3)), "12 bytes of values for 4 rows"),
        ((0, 0, 0, 4, b""), "0 bytes of values"),
        ((0, 0, 0, 4, b"123"), "3 bytes of values"),
    ],
)
def test_report_that_does_not_fit_the_stream_is_refused_and_counted(reports, report, named) -> None:
    """Others of the same message are kept."""
    assert named in reports.add("a", 0, 1, [report, (0, 2, 0, 2, packed(1, 2))])
    assert kept(reports.page(0)) == {("a", 0, 2, 0): (1.0, 2.0)}
    assert reports.statistics().refused == 1


def test_values_that_are_no_numbers_are_kept_and_counted_apart(reports) -> None:
    """The histogram has the finite ones alone."""
    reports.add("a", 0, 1, [(0, 0, 0, 4, packed(math.nan, math.inf, -math.inf, 0.5)), (0, 1, 0, 4, packed(1e30))])

    statistics = reports.statistics()
    assert (statistics.not_finite, statistics.values) == (3, 2)
    assert statistics.buckets[REPORT_BOUNDS.index(1.0)] == statistics.buckets[-1] == 1
    assert math.isnan(kept(reports.page(0))["a", 0, 0, 0][0])


def test_flood_takes_no_more_memory_than_allowed(reports) -> None:
    """The newest reports stay."""
    room = 5 * (REPORT_BYTES + 16)
    reports = StreamReports(PLAN, is_live=False, memory_bytes=room)
    for epoch in range(100):
        reports.add("a", 0, 1, [(epoch, 0, 0, 4, packed(1, 2, 3, epoch))])

    assert [key[1] for key in kept(reports.page(0))] == [95, 96, 97, 98, 99]
    assert reports.statistics().received == 100


def test_no_more_than_a_number_of_reports_and_runs_is_kept(reports, monkeypatch) -> None:
    """The oldest run makes room for another: a program may have a new name at each start."""
    monkeypatch.setattr(module, "REPORTS_MAX", 2 * RUNS_MAX)
    for epoch in range(3):
        for run in range(RUNS_MAX):
            reports.add(str(run), 0, 1, [(epoch, 0, 0, 4, packed(run))])
    assert reports.statistics().kept == 2 * RUNS_MAX

    assert not reports.add("more", 0, 1, [(0, 0, 0, 4, packed(1))])
    assert {key[0] for key in kept(reports.page(0))} == {*map(str, range(1, RUNS_MAX)), "more"}
    assert reports.statistics().kept == 2 * RUNS_MAX - 1


def test_pages_have_each_report_once(reports, monkeypatch) -> None:
    """Also where replaced ones have left gaps, and up to a limit of values."""
    monkeypatch.setattr(module, "PAGE_REPORTS", 3)
    for epoch in range(10):
        reports.add("a", 0, 1, [(epoch, 0, 0, 4, packed(epoch))])
    for epoch in (2, 3, 4, 8):
        reports.add("a", 0, 1, [(epoch, 0, 0, 4, packed(-epoch))])

    found, after = {}, 0
    while (page := reports.page(after)).heads:
        assert len(page.heads) <= 3 * HEAD.size
        assert not found.keys() & kept(page).keys()
        found |= kept(page)
        after = page.last
    assert [key[1] for key in found] == [0, 1, 5, 6, 7, 9, 2, 3, 4, 8]
    assert found["a", 8, 0, 0] == (-8,)
    assert not reports.page(1 << 62).heads


def test_last_reports_have_one_mean_each(reports) -> None:
    """For the page, in the order in which they came; NaN stays NaN."""
    reports.add(
        "a", 0, 1, [(0, 0, 0, 4, packed(1, 2, 3, 6)), (0, 1, 0, 4, packed(5)), (0, 2, 0, 2, packed(1, math.nan))]
    )

    page = reports.last(2)
    assert [HEAD.unpack_from(page.heads, HEAD.size * one)[1] for one in range(2)] == [1, 2]
    np.testing.assert_array_equal(np.frombuffer(page.values, "<f4"), [5, math.nan])
    assert np.frombuffer(reports.last(9).values, "<f4")[0] == 3


def test_live_stream_has_no_plan_to_compare_with() -> None:
    """Its steps have no end, and its rows are those of a batch."""
    reports = StreamReports(PLAN, is_live=True, memory_bytes=1 << 20)
    assert not reports.add("a", 0, 1, [(0, 1 << 35, 0, 4, packed(1))])
    assert reports.add("a", 0, 1, [(0, 0, 0, 5, packed(1))])


def test_page_costs_what_is_kept_and_not_what_was_replaced() -> None:
    """A trainer may replace its reports for hours: numbers grow, and nothing else."""
    reports = StreamReports(PLAN, is_live=False, memory_bytes=1 << 20)
    reports.add("a", 0, 1, [(0, 0, 0, 4, packed(1))])
    looks = []

    class Counting(dict):
        def __getitem__(self, key):
            looks.append(key)
            return super().__getitem__(key)

        get = __getitem__

    reports._last = 1 << 60
    reports.add("a", 0, 1, [(0, 1, 0, 4, packed(2))])
    reports._kept = Counting(reports._kept)

    assert [key[2] for key in kept(reports.page(0))] == [0, 1]
    assert len(looks) == 2


def test_runs_that_make_room_are_not_seen_again(reports, monkeypatch) -> None:
    """Their reports are forgotten a few at a time, as there may be very many."""
    monkeypatch.setattr(module, "FORGOTTEN_AT_ONCE", 1)
    reports.add("old", 0, 1, [(epoch, 0, 0, 4, packed(epoch)) for epoch in range(3)])
    for run in range(RUNS_MAX):
        reports.add(str(run), 0, 1, [(0, 0, 0, 4, packed(run))])
    assert reports.statistics().kept == RUNS_MAX
    assert {key[0] for key in kept(reports.page(0))} == set(map(str, range(RUNS_MAX)))
    for last in (1, 2, 3):
        reports.add("0", 0, 1, [(0, 0, 0, 4, packed(-last))])
        assert reports.statistics().kept == RUNS_MAX
    assert not reports._gone


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trainer_reports_what_it_was_granted_or_had_before(world_size) -> None:
    """Every rank, in the middle of an epoch and across its end, also where ranks share a batch."""
    for rank in range(world_size):
        course = Course(PLAN, rank, world_size, 5, 1, None)
        for granted in range(6):
            had = {course.at(sequence).position for sequence in range(granted)}
            there = [Position(epoch, step) for epoch in range(4, 12) for step in range(5)]
            asked = [(*position, 0, 1, packed(0)) for position in there]

            allowed = {Position(*one[:2]) for one in granted_part(course, granted, asked)}

            assert allowed == had | {one for one in there if one < Position(5, 1)}


def test_trainer_names_few_epochs_of_before_its_beginning() -> None:
    """With a budget, a look at another epoch takes as long as a hundred at the same one."""
    course = Course(PLAN, 0, 1, 1 << 40, 0, None)
    asked = [(epoch, step, 0, 4, packed(0)) for epoch in range(100) for step in range(2)]
    assert [one[0] for one in granted_part(course, 0, asked)] == [
        epoch for epoch in range(module.EARLIER_EPOCHS_MAX) for _ in range(2)
    ]
