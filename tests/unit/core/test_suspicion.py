"""Bad and deadly samples: found, proved, quarantined, counted; innocent ones acquitted."""

import random
from math import log2

import pytest

from batchd.core import actions as act
from batchd.core import events as ev
from batchd.core.stream import BLANK_DEATHS_MAX
from batchd.core.suspicion import (
    CRASHES_MAX,
    CRASHES_WINDOW_S,
    LISTED_MAX,
    LONG_REASONS_MAX,
    PROOF_WEIGHT,
    QUARANTINED_MIN,
    REASON_BYTES_MAX,
    SURE_ROWS,
    BadSampleList,
    Suspects,
    split,
)
from support.core_invariants import CheckedWorld
from support.core_world import make_spec, pick


class DeadlyWorld(CheckedWorld):
    """Workers that die of some samples, with or without a note, until these are quarantined.

    ``deaths`` counts the dead workers by sample.
    """

    def __init__(
        self,
        deadly: set[int],
        *,
        with_note: bool,
        workers: int = 1,
        chunk_rows_max: int = 256,
        out_of_memory: bool = False,
        **changes,
    ) -> None:
        super().__init__([make_spec(**changes)], workers, chunk_rows_max)
        self.deadly = deadly
        self.with_note = with_note
        self.why = {"out_of_memory": True} if out_of_memory else {}
        self.deaths = dict.fromkeys(deadly, 0)
        self.ordered_to: dict[int, int] = {}
        self.start_workers()

    def work(self, turns: int = 500) -> list[act.Action]:
        """Let the workers fill orders until none are left."""
        actions: list[act.Action] = []
        for _ in range(turns):
            self.now += 0.5
            actions += self.do(ev.Ticked())
            for number in [number for number, worker in self.workers.items() if not worker.ready]:
                actions += self.ready(number)
            for number in list(self.workers):
                if self.workers[number].orders:
                    actions += self._carry_out(number)
        return actions

    def _carry_out(self, number: int) -> list[act.Action]:
        order = self.workers[number].orders[0]
        for row, sample in zip(order.rows, self.samples(order), strict=True):
            if sample in self.deadly and (1, sample) not in self.quarantined:
                self.deaths[sample] += 1
                return self.kill_at(number, row, **self.why) if self.with_note else self.kill(number, **self.why)
        known = tuple(sample for _stream, sample in self.quarantined)
        return self.fill(number, bad=known)


@pytest.mark.parametrize("rows", [1, 2, 3, 12])
def test_a_note_finds_a_deadly_sample_with_two_deaths(rows):
    """The sample ends one worker in a chunk of several rows, and one worker alone.

    Then it is quarantined, and all batches arrive whole and in order.
    """
    world = DeadlyWorld({7}, with_note=True, batch_size=rows)
    world.subscribe(end_epoch=1, window=12)
    actions = world.work(40)
    assert world.deaths == {7: 2}
    reason = "quarantined: it ended 2 workers, the last by signal 11 (SIGSEGV)"
    assert pick(act.QuarantineSample, actions) == [act.QuarantineSample(1, 7, reason)]
    assert [report.reason for report in pick(act.ReportBad, actions)] == [reason]
    assert len(pick(act.GrantLease, actions)) == min(2, -(-12 // rows))


@pytest.mark.parametrize("sample", range(0, 64, 7))
def test_without_notes_a_deadly_sample_is_found_by_halving(sample):
    """It takes one death for each halving, and two for the proof; all other samples are read."""
    world = DeadlyWorld({sample}, with_note=False, samples=64, batch_size=64)
    world.state.streams[1].sample_s = 1e-6
    world.subscribe(end_epoch=1)
    actions = world.work(60)
    assert world.deaths[sample] <= log2(64) + 2
    assert world.quarantined == {(1, sample)}
    assert len(pick(act.GrantLease, actions)) == 1


@pytest.mark.parametrize("with_note", [True, False], ids=["with notes", "without"])
@pytest.mark.parametrize("workers", [1, 3])
def test_several_deadly_samples_are_found_each(with_note, workers):
    """Two samples are neighbours in one batch, and one is in another batch.

    With notes, none of them ends a third worker.
    """
    world = DeadlyWorld({3, 4, 20}, with_note=with_note, workers=workers, samples=24, batch_size=12)
    world.subscribe(end_epoch=1)
    actions = world.work(80)
    assert world.quarantined == {(1, 3), (1, 4), (1, 20)}
    assert len(pick(act.GrantLease, actions)) == 2
    if with_note:
        assert set(world.deaths.values()) == {2}


def test_a_sample_met_in_two_batches_at_once_takes_no_third_worker():
    """Trainers are in different epochs: two deaths in two batches prove as much as in one."""
    world = DeadlyWorld({5}, with_note=True, workers=1, samples=12, batch_size=12, slots_max=8)
    for epoch in range(4):
        world.subscribe(session=epoch + 1, epoch=epoch, end_epoch=epoch + 1)
    world.work(40)
    assert world.deaths == {5: 2}
    assert {one.granted for one in world.trainers.values()} == {1}


def test_a_worker_killed_from_outside_makes_no_sample_guilty():
    """The next worker decodes the sample, which clears it each time."""
    world = DeadlyWorld(set(), with_note=True, samples=12, batch_size=12, slots_max=10)
    for epoch in range(5):
        world.subscribe(session=epoch + 1, epoch=epoch, end_epoch=epoch + 1)
        world.kill_at(next(iter(world.workers)), 5)
        world.work(10)
    assert world.quarantined == set()
    assert [one.granted for one in world.trainers.values()] == [1] * 5


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("chunk_rows", [1, 4])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_hundred_killed_workers_lose_nothing_and_make_no_sample_guilty(seed, chunk_rows):
    """The kills hit any sample of one epoch, and often the same one again.

    Every batch arrives whole and in order.
    """
    world = DeadlyWorld(
        set(), with_note=True, workers=2, chunk_rows_max=chunk_rows, samples=2400, batch_size=40, slots_max=4
    )
    world.subscribe(end_epoch=1)
    chance = random.Random(seed)
    killed = 0
    while world.trainers[1].upcoming is not None:
        number = chance.choice(list(world.workers))
        order = world.workers[number].orders[0] if world.workers[number].orders else None
        if killed < 100 and order is not None and chance.random() < 0.5:
            world.kill_at(number, order.rows[0] + chance.randrange(len(order.rows)), from_outside=True)
            killed += 1
        world.work(1)
        world.pull(1)
    assert killed == 100
    assert world.trainers[1].granted == 60
    assert world.quarantined == set()


def test_killing_every_worker_that_has_just_begun_does_not_stop_the_stream():
    """The number of kills does not matter.

    When they end, the stream continues, and each batch arrives.
    """
    world = DeadlyWorld(set(), with_note=True, batch_size=6)
    world.subscribe(end_epoch=1)
    actions = _die_between_samples(world, 10 * BLANK_DEATHS_MAX, from_outside=True)
    assert not any(isinstance(action, act.ReportStopped) for action in actions)
    assert [lease.step for lease in pick(act.GrantLease, world.work(40))] == [0, 1]


def test_a_sample_for_which_its_worker_is_killed_again_and_again_is_quarantined():
    """A guard that limits memory kills from outside, too, and again at the same sample.

    Without quarantine, the kills would go on for ever.
    """
    world = DeadlyWorld(set(), with_note=True, samples=12, batch_size=12, slots_max=2)
    world.subscribe(end_epoch=1)
    for _ in range(PROOF_WEIGHT):
        assert world.quarantined == set()
        number = next(iter(world.workers))
        world.kill_at(number, world.workers[number].orders[0].rows[5], from_outside=True)
        world.now += 10.0
        world.start_workers()
    assert len(world.quarantined) == 1


def test_a_chunk_whose_worker_was_killed_from_outside_is_not_cut():
    """No sample is under suspicion, so no row has to be decoded alone."""
    world = DeadlyWorld(set(), with_note=True, batch_size=12)
    world.state.streams[1].sample_s = 1e-6
    world.subscribe(end_epoch=1)
    world.kill_at(1, 5, from_outside=True)
    world.now += 10.0
    world.start_workers()
    orders = [order for worker in world.workers.values() for order in worker.orders]
    assert [(order.rows[0], len(order.rows)) for order in orders] == [(0, 12)]


def test_a_note_that_makes_no_sense_accuses_no_sample():
    """Row or sample are not in the order, so the chunk is halved as without a note."""
    world = DeadlyWorld(set(), with_note=True, batch_size=6)
    world.subscribe(end_epoch=1)
    for note in (ev.Note(1, 99, 0), ev.Note(1, 0, 10**9)):
        number, worker = next(iter(world.workers.items()))
        world.kill(number, note._replace(order=worker.orders[0].order))
        world.now += 10.0
        world.start_workers()
    assert not world.state.streams[1].suspects.deaths
    assert [lease.step for lease in pick(act.GrantLease, world.work(10))] == [0, 1]


def test_too_many_deadly_samples_are_no_matter_of_single_files():
    """More than ten samples of a small stream stop it: the decoder or the machine is at fault."""
    world = DeadlyWorld(set(range(40)), with_note=True, samples=100, batch_size=10)
    world.subscribe(end_epoch=1)
    world.pull(1)
    stopped = pick(act.ReportStopped, world.work(100))
    assert len(world.quarantined) == QUARANTINED_MIN + 1
    assert "11 samples ended their workers, more than the 10 that may be odd files" in stopped[0].text


@pytest.mark.parametrize("workers", [1, 8])
def test_samples_that_are_too_large_for_the_memory_are_bad_ones_however_many(workers):
    """Each of them ends two workers, and ``max_bad_fraction`` limits their number."""
    large = set(range(0, 600, 10))
    world = DeadlyWorld(
        large, with_note=True, workers=workers, out_of_memory=True, samples=600, batch_size=60, bad_fraction_max=1.0
    )
    world.subscribe(end_epoch=1, window=10)
    actions = []
    while world.trainers[1].upcoming is not None:
        actions += [*world.work(10), *world.pull(1)]
    assert not pick(act.ReportStopped, actions)
    assert world.quarantined == {(1, sample) for sample in large}
    assert set(world.deaths.values()) == {2}
    reason = "quarantined: it ended 2 workers, the last by signal 9 (SIGKILL), out of memory"
    assert {report.reason for report in pick(act.ReportBad, actions)} == {reason}


def test_more_samples_that_are_too_large_than_may_be_bad_stop_the_stream():
    """The limit is that for any other bad samples."""
    world = DeadlyWorld(
        set(range(20)), with_note=True, out_of_memory=True, samples=100, batch_size=10, bad_fraction_max=0.05
    )
    world.subscribe(end_epoch=1)
    world.pull(1)
    stopped = pick(act.ReportStopped, world.work(100))
    assert "are bad, more than max_bad_fraction = 0.05" in stopped[0].text


@pytest.mark.parametrize(
    ("chunk", "row", "parts"),
    [
        ((0, 8), None, [(0, 4), (4, 4)]),
        ((3, 5), None, [(3, 2), (5, 3)]),
        ((3, 1), None, [(3, 1)]),
        ((0, 8), 0, [(0, 1), (1, 7)]),
        ((0, 8), 7, [(0, 7), (7, 1)]),
        ((4, 8), 6, [(4, 2), (6, 1), (7, 5)]),
        ((4, 1), 4, [(4, 1)]),
        ((4, 4), 3, [(4, 2), (6, 2)]),
        ((4, 4), 8, [(4, 2), (6, 2)]),
    ],
)
def test_a_chunk_is_cut_around_the_suspect_or_in_half(chunk, row, parts):
    """No row is lost, and a row outside the chunk is ignored."""
    first, count = chunk
    assert split(range(first, first + count), row) == [range(at, at + rows) for at, rows in parts]


def test_rows_with_gaps_are_cut_around_the_suspect_too():
    """A row in a gap does not belong to the chunk."""
    assert split((1, 4, 5, 9), 4) == [(1,), (4,), (5, 9)]
    assert split((1, 4, 5, 9), 3) == [(1, 4), (5, 9)]


def test_two_deaths_quarantine_and_life_acquits():
    """The count of a sample that was decoded in between starts again.

    A quarantined sample is not quarantined again.
    """
    suspects = Suspects(1000)
    assert not suspects.accuse(5, "signal 9")
    assert suspects.deaths
    suspects.acquit([4, 5, 6])
    assert not suspects.deaths
    assert not suspects.accuse(5, "signal 9")
    assert suspects.accuse(5, "signal 11")
    assert suspects.quarantined == {5: "quarantined: it ended 2 workers, the last by signal 11"}
    assert not suspects.accuse(5, "signal 11")


@pytest.mark.parametrize(("samples", "limit"), [(10, 10), (10_000, 10), (50_000, 50), (10**6, 1000)])
def test_a_thousandth_of_the_samples_may_be_deadly(samples, limit):
    """The limit is at least ten samples."""
    suspects = Suspects(samples)
    for sample in range(limit + 1):
        assert suspects.excess() is None
        suspects.accuse(sample, "signal 11")
        suspects.accuse(sample, "signal 11")
    assert f"more than the {limit} that may be odd files" in suspects.excess()


def test_a_crash_weighs_more_than_a_kill():
    """After one crash, ten kills weigh as much as the second crash."""
    suspects = Suspects(1000)
    suspects.accuse(5, "signal 11")
    for _ in range(9):
        assert not suspects.accuse(5, "signal 9", from_outside=True)
    assert suspects.accuse(5, "signal 9", from_outside=True)
    assert suspects.quarantined == {5: "quarantined: it ended 11 workers, the last by signal 9"}


def test_many_crashes_in_a_short_time_are_no_matter_of_single_files():
    """The limit is 100 crashes within a minute, over all samples; slower ones do not count."""
    for seconds, too_many in [(CRASHES_WINDOW_S, True), (CRASHES_WINDOW_S + 1, False)]:
        suspects = Suspects(10**7)
        for number in range(CRASHES_MAX):
            assert suspects.excess() is None
            suspects.crashed_s.append(seconds * number / (CRASHES_MAX - 1))
        assert (suspects.excess() is not None) is too_many


def test_a_stream_of_many_samples_stops_when_a_hundred_workers_crash_within_a_minute():
    """The stream stops long before a thousandth of its samples is quarantined."""
    world = DeadlyWorld(set(range(60_000)), with_note=True, workers=8, samples=60_000, batch_size=64)
    world.subscribe(end_epoch=1)
    world.pull(1)
    stopped = pick(act.ReportStopped, world.work(30))
    assert "100 workers crashed within 60 s: something is wrong with the decoder or the machine" in stopped[0].text


def test_a_bad_sample_is_reported_once_and_counted_each_time():
    """The record has the path and the reason."""
    bad = BadSampleList(1000, 0.05)
    assert bad.record(7, "a/b.jpg", "is no image")
    assert not bad.record(7, "a/b.jpg", "is no image")
    assert (bad.bad_rows, bad.listed[7].times, bad.listed[7].path, bad.listed[7].reason) == (
        2,
        2,
        "a/b.jpg",
        "is no image",
    )


def test_bad_samples_beyond_the_list_are_counted_and_reported_once_each():
    """A stream of nothing but bad files does not fill the daemon's memory, and has a total."""
    bad = BadSampleList(10**6, 1.0)
    for is_new in (True, False):
        for sample in (*range(LISTED_MAX), 999_999, *range(LISTED_MAX, LISTED_MAX + 9)):
            assert bad.record(sample, "x", "y") is is_new
    assert (len(bad.listed), bad.total, bad.bad_rows) == (LISTED_MAX, LISTED_MAX + 10, 2 * (LISTED_MAX + 10))


def test_more_bad_samples_than_the_share_of_the_source_are_too_many():
    """Six of a hundred are too many where five are allowed, however few rows were read."""
    bad = BadSampleList(100, 0.05)
    for sample in range(5):
        bad.record(sample, "x", "y")
    assert bad.excess() is None
    bad.record(5, "x", "z")
    assert bad.excess() == "6 of 100 samples are bad, more than max_bad_fraction = 0.05"


def test_one_reason_for_all_is_said_once():
    """A function that returns another type than is declared makes every sample bad."""
    bad = BadSampleList(100, 0.05)
    for sample in range(6):
        bad.record(sample, "x", "mine:fn returns the wrong type")
    told = bad.excess()
    assert told is not None
    assert told.endswith("max_bad_fraction = 0.05, all for one reason: mine:fn returns the wrong type")


def test_a_stream_that_is_mostly_broken_is_known_from_the_rows_read():
    """The stream stops long before a twentieth of a million samples has been read.

    It does not stop before enough rows rule out chance.
    """
    bad = BadSampleList(10**6, 0.05)
    bad.rows = SURE_ROWS - 1
    for sample in range(40):
        bad.record(sample, "x", f"reason {sample}")
    assert bad.excess() is None
    bad.rows = SURE_ROWS
    assert bad.excess() == "40 of 256 rows read so far are bad, more than max_bad_fraction = 0.05"


def test_a_few_bad_samples_met_early_are_no_broken_stream():
    """With 4 % at random where 5 % are allowed, the stream stops in no epoch."""
    for seed in range(200):
        chance = random.Random(seed)
        bad = BadSampleList(10_000, 0.05)
        for sample in range(4000):
            bad.rows += 1
            if chance.random() < 0.04:
                bad.record(sample, "x", "y")
                assert bad.excess() is None


def test_no_bad_sample_at_all_may_be_asked_for():
    """``max_bad_fraction = 0`` stops the stream at the first bad sample."""
    bad = BadSampleList(10**6, 0.0)
    assert bad.excess() is None
    bad.record(3, "x", "y")
    assert bad.excess() == "1 of 1000000 samples are bad, more than max_bad_fraction = 0"


NOTHING_IN_HAND = ev.Note(order=0, row=0, sample=0)


def _die_between_samples(world: DeadlyWorld, times: int, *, from_outside: bool = False) -> list[act.Action]:
    """Let one worker after the other end with orders, before it begins a sample."""
    actions: list[act.Action] = []
    for _ in range(times):
        world.now += 10.0
        world.do(ev.Ticked())
        number = next(iter(world.workers))
        world.ready(number)
        assert world.workers[number].orders
        actions += world.kill(number, NOTHING_IN_HAND, from_outside=from_outside)
    return actions


def test_workers_that_all_die_between_samples_stop_the_stream():
    """No sample is at fault and none is quarantined, but the deaths must not go on for ever."""
    world = DeadlyWorld(set(), with_note=True, batch_size=6)
    world.subscribe(end_epoch=1)
    assert not any(
        isinstance(action, act.ReportStopped) for action in _die_between_samples(world, BLANK_DEATHS_MAX - 1)
    )
    stopped = [one for one in _die_between_samples(world, 1) if isinstance(one, act.ReportStopped)]
    assert [
        f"{BLANK_DEATHS_MAX} workers in a row ended before they had done anything" in one.text for one in stopped
    ] == [True]
    assert world.quarantined == set()


def test_a_chunk_done_in_between_shows_that_workers_can_work():
    """Kills from outside, however many, do not stop a stream that makes progress."""
    world = DeadlyWorld(set(), with_note=True, samples=240, batch_size=6, slots_max=64, chunk_rows_max=1)
    world.subscribe(end_epoch=1, window=40)
    for _ in range(3):
        actions = _die_between_samples(world, BLANK_DEATHS_MAX - 2)
        assert not any(isinstance(action, act.ReportStopped) for action in actions)
        world.now += 10.0
        world.do(ev.Ticked())
        number = next(iter(world.workers))
        world.ready(number)
        world.fill(number)
        world.kill(number, NOTHING_IN_HAND)


def test_only_the_first_bad_samples_keep_a_long_reason():
    """Ten thousand bad samples take little memory, and a list of them fits into a message."""
    bad = BadSampleList(1000, 1.0)
    reason = "ä" * 500
    for sample in range(LONG_REASONS_MAX + 10):
        bad.record(sample, "path", "short")
        bad.record(1000 + sample, "path", reason)

    kept = [bad.listed[1000 + sample].reason for sample in range(LONG_REASONS_MAX + 10)]
    assert kept == [reason] * LONG_REASONS_MAX + ["ä" * (REASON_BYTES_MAX // 2)] * 10
    assert all(bad.listed[sample].reason == "short" for sample in range(LONG_REASONS_MAX + 10))
