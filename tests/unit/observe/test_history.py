"""The last quarter of an hour, which the page plots.

The tests cover its values, its period, and its limit of memory.
"""

import json
from dataclasses import replace
from math import isclose
from typing import Any

import pytest

from batchd.observe.diagnosis.overview import Overview, overview_between
from batchd.observe.http.status_client import (
    FINE_POINTS,
    FINE_STEP_S,
    OTHER,
    PART_KIND,
    PARTS_MAX,
    POINTS,
    SHOWN_POINTS_MIN,
    STEP_S,
    STREAM_KINDS,
    STREAMS_MAX,
    TRAINERS_MAX,
    WAIT_KIND,
    History,
    StatusRecorder,
)
from support.statuses import later, two_looks

TICK = 1_000


def overview(**changes: Any) -> Overview:
    """The overview of a simulated daemon."""
    return replace(overview_between(*two_looks(waits={"workers_s": 4.0})), **changes)


def series(history: History, kind: str, *of: str, tick: int = TICK) -> list[float | None]:
    """The values of one series."""
    (found,) = [one for one in history.plain(tick) if (one["kind"], *one["of"]) == (kind, *of)]
    return found["values"]


def test_values_stay_at_their_times():
    """The newest value is last, and an unknown value is None."""
    history = History()
    history.add(TICK - 3, overview())
    history.add(TICK, overview())

    assert series(history, "decoded_per_s", "photos")[-5:] == [None, 1000.0, None, None, 1000.0]
    assert series(history, "leased_slots", "photos")[-1] == 1
    assert series(history, PART_KIND, "photos", "decode")[-1] == 0.9
    assert series(history, WAIT_KIND, "photos", "train-01", "0")[-1] == 0.4


def test_a_daemon_that_does_not_answer_leaves_a_gap():
    """The plots continue without its values."""
    history = History()
    history.add(TICK, overview())

    assert series(history, "decoded_per_s", "photos", tick=TICK + 1)[-1] == 1000.0, "the next point is not complete yet"
    assert series(history, "decoded_per_s", "photos", tick=TICK + 3)[-4:] == [1000.0, None, None, None]
    assert series(history, "decoded_per_s", "photos", tick=TICK + POINTS) == [None] * POINTS


def test_values_older_than_the_plots_are_removed():
    """Their names are removed, too."""
    history = History()
    gone = replace(overview().streams[0], name="gone")
    history.add(TICK - POINTS, overview(streams=(gone,)))
    history.add(TICK - 1, overview())
    history.add(TICK, overview())

    assert {one["of"][0] for one in history.plain(TICK)} == {"photos"}


@pytest.mark.thorough
def test_memory_is_limited_for_any_number_of_series():
    """Further series count together: rates as their sum, waiting as the worst value."""
    stream, trainer = overview().streams[0], overview().trainers[0]
    parts = tuple((f"step {number}", 1.0) for number in range(100))
    streams = tuple(replace(stream, name=f"stream {number}", parts=parts) for number in range(100))
    trainers = tuple(replace(trainer, name=f"trainer {number}", wait_share=number / 1000) for number in range(1000))
    history = History()
    for tick in range(TICK - 3, TICK + 1):
        history.add(tick, overview(streams=streams, trainers=trainers))

    kept = [*history.plain(TICK)]
    assert len(kept) <= (STREAMS_MAX + 1) * (len(STREAM_KINDS) + PARTS_MAX + 1) + TRAINERS_MAX + 1
    assert series(history, "decoded_per_s", OTHER)[-1] == 1000 * (100 - STREAMS_MAX)
    assert isclose(series(history, WAIT_KIND, OTHER, OTHER, OTHER)[-1] or 0, 0.999, rel_tol=1e-3)
    assert series(history, PART_KIND, "stream 0", OTHER)[-1] == 100 - PARTS_MAX


def test_trainers_that_connect_and_leave_do_not_add_up():
    """Any number of them may have connected in a quarter of an hour."""
    trainer = overview().trainers[0]
    history = History()
    for tick in range(TICK, TICK + POINTS):
        newcomers = tuple(replace(trainer, name=f"trainer {tick}.{number}") for number in range(20))
        history.add(tick, overview(trainers=newcomers))

    assert sum(one["kind"] == WAIT_KIND for one in history.plain(TICK + POINTS)) <= TRAINERS_MAX + 1


def test_a_recorder_keeps_a_point_every_few_seconds():
    """The number of requests to the daemon does not matter, and its answer is plain data."""
    now = [0.0]
    recorder = StatusRecorder(lambda: now[0])
    _before, status = two_looks()
    for tenth in range(300):
        now[0] = tenth / 10
        recorder.add(later(status, tenth / 10))

    history = json.loads(json.dumps(recorder.history(), allow_nan=False))
    (ready,) = [one for one in history["series"] if one["kind"] == "ready_slots"]
    assert sum(value is not None for value in ready["values"]) == 30 / STEP_S
    current = recorder.overview()
    assert current is not None
    assert current.trainers[0].still_s > 25


def test_a_recorder_knows_nothing_before_the_first_answer():
    """It returns no invented values."""
    recorder = StatusRecorder()

    assert recorder.overview() is None
    assert recorder.history()["series"] == []


def test_the_first_minute_has_finer_steps():
    """A range has few points at the start, and never more than are kept."""
    now = [1000.0]
    recorder = StatusRecorder(lambda: now[0])
    _before, status = two_looks()
    for second in range(70):
        now[0] = 1000.0 + second
        recorder.add(later(status, second))

    def shape(*seconds: float) -> tuple[object, object, set[int]]:
        found = recorder.history(*seconds)
        series: Any = found["series"]
        return found["step_s"], found["points"], {len(one["values"]) for one in series}

    assert shape(3) == (FINE_STEP_S, SHOWN_POINTS_MIN, {SHOWN_POINTS_MIN})
    assert shape(30) == (FINE_STEP_S, 15, {15})
    assert shape(60) == (FINE_STEP_S, FINE_POINTS, {FINE_POINTS})
    assert shape(61) == (STEP_S, 13, {13})
    assert shape(300) == (STEP_S, 60, {60})
    assert shape() == shape(10**9) == (STEP_S, POINTS, {POINTS})
    fine: Any = recorder.history(60)["series"]
    values = next(one["values"] for one in fine if one["kind"] == "leased_slots")
    assert values == [1.0] * FINE_POINTS, "a status a second leaves no gap"
