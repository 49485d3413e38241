"""The overview of a daemon, computed from two or more statuses."""

import json
from dataclasses import replace

import pytest

from batchd.observe.columns import HOSTS, STREAMS, TRAINERS, WORKERS
from batchd.observe.diagnosis.overview import (
    FILES_PART,
    GONE,
    NO_CPU_PART,
    STILL_S,
    WINDOW_S,
    StatusWindow,
    VerdictView,
    overview_between,
)
from batchd.observe.http.routes import plain_overview
from batchd_wire.status import WaitStatistics
from support.statuses import SECONDS, later, link, two_looks, with_pool


def test_rates_are_differences_of_two_looks():
    """The rates cover the samples decoded and delivered in between; a sample's time has parts."""
    before, after = two_looks(parts={"read": 1.0, "decode": 8.0}, work={"waited_s": 2.0})
    after.streams[0].delivered_samples += 5_000

    (stream,) = overview_between(before, after).streams

    assert stream.decoded_per_s == 10_000 / SECONDS
    assert stream.delivered_per_s == 5_000 / SECONDS
    assert dict(stream.parts) == {"read": 0.1, "decode": 0.8, FILES_PART: 0.2}
    assert stream.sample_ms == 1.2


def test_time_without_a_cpu_is_a_part_of_its_own():
    """The other parts shrink in proportion, so that the sum stays the time of a sample."""
    (stream,) = overview_between(
        *two_looks(parts={"read": 1.0, "decode": 7.0}, work={"cpu_wait_s": 4.0, "waited_s": 2.0})
    ).streams

    parts = dict(stream.parts)
    assert [*parts] == ["read", "decode", NO_CPU_PART, FILES_PART]
    assert parts == pytest.approx({"read": 0.06, "decode": 0.42, NO_CPU_PART: 0.4, FILES_PART: 0.2})
    assert stream.sample_ms == pytest.approx(1.2)
    assert NO_CPU_PART not in dict(overview_between(*two_looks()).streams[0].parts)


def test_partly_filled_batches_are_not_called_filling():
    """Only the daemon knows the batches being filled for a trainer; an older daemon sends none."""
    ring = {"slots": 8, "ready_slots": 3, "leased_slots": 0, "filling_slots": 2, "partial_slots": 1}
    (stream,) = overview_between(*two_looks(stream=ring)).streams
    (older,) = overview_between(*two_looks(stream={**ring, "filling_slots": None, "partial_slots": None})).streams

    assert (stream.filling_slots, older.filling_slots) == (2, 5)


def test_one_number_of_batches_ahead_is_shown():
    """The number is that of the verdict's evidence: the smaller end of the window."""
    before, after = two_looks()
    before.streams[0].subscriptions[0].ready_ahead = 1
    (trainer,) = overview_between(before, after).trainers

    assert trainer.verdict is not None
    assert trainer.ready_ahead == 1
    assert "1 of 4 batches ready ahead" in trainer.verdict.proof


def test_the_parts_of_a_ring_make_up_its_slots():
    """A leased slot is ready too, and is counted once."""
    (stream,) = overview_between(
        *two_looks(stream={"slots": 8, "slots_max": 10, "ready_slots": 5, "leased_slots": 2})
    ).streams

    assert (stream.leased_slots, stream.ready_slots, stream.filling_slots, stream.now.slots_max) == (2, 3, 3, 10)


def test_one_look_has_no_rates():
    """An unknown value is not shown as zero."""
    _before, only = two_looks()
    overview = overview_between(only, only)

    assert overview.seconds is None
    assert overview.busy_share is None
    assert [overview.streams[0].decoded_per_s, overview.streams[0].delivered_per_s, overview.streams[0].sample_ms] == [
        None
    ] * 3
    assert [overview.trainers[0].wait_share, overview.trainers[0].verdict, overview.workers[0].busy_share] == [None] * 3


def test_each_trainer_has_its_own_verdict():
    """The verdicts differ even if two trainers have the same name."""
    before, after = two_looks(waits={"workers_s": 8.0}, trainer={"waiting": True})
    for status in (before, after):
        (first,) = status.streams[0].subscriptions
        second = replace(first, number=2, waits=WaitStatistics())
        status.streams[0].subscriptions = (first, second)

    waiting, fed = overview_between(before, after).trainers

    assert waiting.verdict is not None
    assert fed.verdict is not None
    assert (waiting.verdict.is_healthy, fed.verdict.is_healthy) == (False, True)
    assert (waiting.wait_share, fed.wait_share) == (0.8, 0.0)


def test_a_trainer_that_does_nothing_new_stands_still():
    """A trainer counts as idle while its position and waiting stay the same in all statuses."""
    _before, status = two_looks(trainer={"waiting": True})
    window = StatusWindow()
    for seconds in range(41):
        window.add(later(status, seconds))

    overview = window.overview()
    assert overview is not None
    (trainer,) = overview.trainers
    assert trainer.still_s == 40
    assert trainer.is_still
    assert trainer.claim.waiting

    moved = later(status, 41)
    moved.streams[0].subscriptions[0].consumed_batches += 1
    window.add(moved)
    overview = window.overview()
    assert overview is not None
    assert overview.trainers[0].still_s == 0
    assert not overview.trainers[0].is_still


def test_a_trainer_at_its_end_does_not_stand_still():
    """The trainer has read every batch, so it is not idle."""
    _before, status = two_looks(trainer={"epoch": None, "step": None})
    window = StatusWindow()
    for seconds in (0, STILL_S * 2):
        window.add(later(status, seconds))

    overview = window.overview()
    assert overview is not None
    assert not overview.trainers[0].is_still


def test_statuses_are_kept_for_the_window_and_no_longer():
    """Rates cover the last seconds, and memory does not grow."""
    _before, status = two_looks()
    window = StatusWindow()
    for seconds in range(100):
        window.add(later(status, seconds))
        overview = window.overview()
        assert overview is not None
        assert overview.seconds is None or overview.seconds <= WINDOW_S

    assert len(window._kept) == WINDOW_S + 1


def test_a_daemon_that_was_restarted_is_not_compared_with_the_last():
    """The totals of the new daemon start again at zero."""
    before, after = two_looks()
    window = StatusWindow()
    window.add(after)
    other = later(before, -50)
    other.daemon.pid += 1
    window.add(other)

    overview = window.overview()
    assert overview is not None
    assert overview.seconds is None


def test_workers_that_were_replaced_are_counted_by_their_places():
    """A worker's number is used once, and its place is used again."""
    _before, status = two_looks()
    window = StatusWindow()
    window.add(status)
    replaced = later(status, 1)
    replaced.workers[1].number = 7
    window.add(replaced)

    overview = window.overview()
    assert overview is not None
    assert [worker.replaced for worker in overview.workers] == [0, 1]


def test_batches_of_a_trainer_that_is_gone_are_no_trainer():
    """The trainer has disconnected, so its name is unknown."""
    before, after = two_looks()
    after.trainers = ()

    overview = overview_between(before, after)
    assert overview.trainers == ()
    assert [one.trainer for one in overview.claims] == [GONE]


@pytest.mark.parametrize("columns", [STREAMS, TRAINERS, WORKERS, HOSTS])
def test_a_column_is_somewhere_and_its_title_once_at_each_place(columns):
    """Two columns of one title are of different places."""
    for column in columns:
        assert column.page or (column.status, column.top) != (None, None), column.title
    for place in (
        [one.title for one in columns if one.status is not None],
        [one.title for one in columns if one.top is not None],
        [one.page for one in columns if one.page],
    ):
        assert len(set(place)) == len(place) > 0


def test_what_the_page_gets_is_plain_data():
    """Each row has a cell for each column, and the numbers that are plotted."""
    looks = two_looks(waits={"workers_s": 4.0}, trainer={"waiting": True}, sent_bytes_per_s=3.5e6)
    with_pool(looks, link())
    plain = json.loads(json.dumps(plain_overview(overview_between(*looks)), allow_nan=False))

    assert plain["streams"][0]["name"] == "photos"
    assert plain["trainers"][0]["wait_share"] == 0.4
    for name, rows in (
        ("trainers", plain["trainers"]),
        ("workers", plain["workers"]),
        ("hosts", plain["pool"]["hosts"]),
    ):
        assert {len(row["cells"]) for row in rows} == {len(plain["columns"][name])}
    cells = dict(
        zip([title for title, _kind in plain["columns"]["trainers"]], plain["trainers"][0]["cells"], strict=True)
    )
    assert cells["trainer"] == ["train-01", "", ["pid 77"]]
    assert cells["position"] == ["epoch 0, step 40", "", []]
    assert cells["from"] == ["tcp", "", ["3.5 MB/s"]]
    assert cells["verdict"][:2] == ["memory-bound", "bad"]


def test_a_trainer_that_stands_still_shows_for_how_long():
    """Below that are the kind, unless it says the same, the proof, and what helps."""
    (one,) = overview_between(*two_looks(waits={"workers_s": 4.0}, trainer={"waiting": True})).trainers
    still = VerdictView("stands-still", True, "it took no batch", "")
    cell = {column.title: column.cell for column in TRAINERS}["verdict"]

    assert cell(replace(one, still_s=9.0))[:2] == ("waiting for 9.0 s", "bad")
    assert cell(replace(one, still_s=9.0)).notes[0] == one.verdict.kind
    assert cell(replace(one, still_s=9.0, verdict=still)).notes == ("it took no batch", "")
    assert cell(replace(one, verdict=None)) == ("-", "plain", ())
