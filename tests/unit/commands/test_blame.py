"""Groups are named where they are at fault, and hardly ever where none is, by simulated runs."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from batchd.cli.blame import stacked
from batchd.commands.history.blame import (
    CLASS,
    FILE,
    SAMPLE,
    Grouping,
    Outcome,
    badness_of,
    hypergeometric_tails,
    stand_out,
)
from batchd.commands.history.losses import HEAD_DTYPE, Losses, from_lines, from_pages
from batchd.core.plan import Plan
from batchd.errors import BatchdError
from batchd_wire.position import Position
from batchd_wire.reports import HEAD
from batchd_wire.status import ReportPage

SAMPLES, BATCH, SHARDS, EPOCHS = 1000, 32, 50, 8
BAD_SHARD = 7
CLEAN_RUNS = 8
"""Of each of 12 kinds: two of all these runs could have a false alarm, at 1 in 100."""


class Run:
    """A simulated run: its plan, positions, samples, and the losses of its rows.

    ``is_young``: its loss still falls, and it is unstable now and then, whatever the data.
    """

    def __init__(self, seed: int, noise: str, *, is_shuffled: bool, is_young: bool = False) -> None:
        self.plan = Plan(SAMPLES, BATCH, seed, is_shuffled, drop_last=False)
        self.chance = np.random.default_rng(seed)
        self.positions = [Position(epoch, step) for epoch in range(EPOCHS) for step in range(self.plan.steps)]
        self.samples = [self.plan.indices(one, 0, self.plan.rows(one)) for one in self.positions]
        usual = 0.3 + 2 * is_young * np.exp(-np.arange(len(self.positions)) / 40)
        make = {
            "normal": lambda level, rows: self.chance.normal(level, 0.1 * level, rows),
            "skewed": self.chance.exponential,
            "heavy": lambda level, rows: level * np.abs(self.chance.standard_t(2, rows)),
        }[noise]
        self.rows = [make(level, len(samples)) for level, samples in zip(usual, self.samples, strict=True)]
        for begin in self.chance.integers(0, len(self.rows) - 10, 5) if is_young else ():
            for after in range(10):
                self.rows[begin + after] += 2 - 0.2 * after

    def spoil(self, shard: int, by: float) -> None:
        """Mislabel a shard: each of its rows has a larger loss."""
        for rows, samples in zip(self.rows, self.samples, strict=True):
            rows[samples * SHARDS // SAMPLES == shard] += by

    def losses(self, *, of_rows: bool) -> Losses:
        values = self.rows if of_rows else [rows.mean(keepdims=True) for rows in self.rows]
        heads = np.zeros(len(values), HEAD_DTYPE)
        heads["epoch"], heads["step"] = np.array(self.positions).T
        heads["rows"], heads["world_size"] = list(map(len, self.rows)), 1
        counts = list(map(len, values))
        heads["values"] = counts
        return Losses("", heads, np.concatenate(values).astype(float), np.cumsum([0, *counts]))

    def outcome(self, *, of_rows: bool, spikes: int | None = None, batches: int | None = None) -> Outcome | None:
        """What stands out up to the n-th spike, or in so many batches; None if there are fewer."""
        losses = self.losses(of_rows=of_rows)
        badness = badness_of(losses)
        end = batches
        if spikes is not None:
            places = np.flatnonzero(badness.bad) if self.plan.shuffle else badness.jumps
            if len(places) < spikes:
                return None
            end = int(places[spikes - 1]) + 1
        if end is not None:
            cut = replace(
                losses,
                heads=losses.heads[:end],
                values=losses.values[: losses.starts[end]],
                starts=losses.starts[: end + 1],
            )
            losses, badness = cut, badness_of(cut)
        samples = np.concatenate(self.samples[: len(losses)]).astype(np.int64)
        shards = Grouping(FILE, samples * SHARDS // SAMPLES, tuple(map(str, range(SHARDS))))
        classes = Grouping(CLASS, samples % 10, tuple(map(str, range(10))))
        return stand_out(losses, badness, samples, [shards, classes], is_shuffled=self.plan.shuffle)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("noise", ["normal", "skewed", "heavy"])
@pytest.mark.parametrize("is_shuffled", [True, False], ids=["shuffled", "in order"])
@pytest.mark.parametrize("of_rows", [True, False], ids=["rows", "batches"])
def test_clean_runs_are_not_blamed(noise, is_shuffled, of_rows) -> None:
    """Neither where losses are skewed, nor where training is unstable for a while."""
    false_alarms = [
        seed
        for seed in range(CLEAN_RUNS)
        if Run(seed, noise, is_shuffled=is_shuffled, is_young=True).outcome(of_rows=of_rows).found
    ]
    assert false_alarms == []


@pytest.mark.slow
def test_few_of_many_clean_runs_are_blamed() -> None:
    """At most one in a hundred, of 1,200; docs/blame.md has how many."""
    false_alarms = 0
    for noise, is_shuffled, of_rows in product(["normal", "skewed", "heavy"], [True, False], [True, False]):
        for seed in range(1000, 1100):
            run = Run(seed, noise, is_shuffled=is_shuffled, is_young=True)
            false_alarms += bool(run.outcome(of_rows=of_rows).found)
    assert false_alarms <= 12


@pytest.mark.slow
def test_mislabelled_shard_is_named_by_its_rows_in_all_of_many_runs() -> None:
    """At the third bad batch, and no other shard is; docs/blame.md has how many."""
    runs = 0
    for noise in ("normal", "skewed", "heavy"):
        for seed in range(1000, 1100):
            run = Run(seed, noise, is_shuffled=True)
            run.spoil(BAD_SHARD, 5.0)
            outcome = run.outcome(of_rows=True, spikes=3)
            if outcome is not None:
                assert {one.name for one in outcome.found if one.kind == FILE} == {str(BAD_SHARD)}
                runs += 1
    assert runs > 200


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("noise", ["normal", "skewed", "heavy"])
def test_mislabelled_shard_is_named_within_three_spikes(noise) -> None:
    """Where each row has its loss: the shard alone, in nine of ten runs."""
    named, runs = 0, 0
    for seed in range(20):
        run = Run(seed, noise, is_shuffled=True)
        run.spoil(BAD_SHARD, 5.0)
        outcome = run.outcome(of_rows=True, spikes=3)
        if outcome is not None:
            files = {one.name for one in outcome.found if one.kind == FILE}
            assert files <= {str(BAD_SHARD)}
            assert not any(one.kind == CLASS for one in outcome.found)
            named, runs = named + bool(files), runs + 1
    assert runs >= 5
    assert named >= 0.9 * runs


@pytest.mark.parametrize(("noise", "by"), [("normal", 1.0), ("skewed", 5.0), ("heavy", 5.0)])
def test_mislabelled_shard_is_named_by_the_losses_of_all_batches(noise, by) -> None:
    """Where a batch has one loss: within four epochs, and nothing else is, not even too rare."""
    for seed in range(5):
        run = Run(seed, noise, is_shuffled=True)
        run.spoil(BAD_SHARD, by)
        outcome = run.outcome(of_rows=False, batches=4 * run.plan.steps)
        assert {(one.kind, one.name) for one in outcome.found} == {(FILE, str(BAD_SHARD))}
        (found,) = [one for one in outcome.found if one.way == "losses"]
        assert found.hits / found.seen > 0.6
        assert not found.is_rare


@pytest.mark.parametrize("of_rows", [True, False], ids=["rows", "batches"])
def test_class_that_is_never_bad_is_too_rare(of_rows) -> None:
    """Its losses are a tenth of the others'. No other group is named for that."""
    run = Run(5, "skewed", is_shuffled=True)
    for rows, samples in zip(run.rows, run.samples, strict=True):
        rows[samples % 10 == 3] *= 0.01 if of_rows else -5.0

    outcome = run.outcome(of_rows=of_rows)

    assert {(one.kind, one.name, one.is_rare) for one in outcome.found} == {(CLASS, "3", True)}
    assert all(one.times < 0.9 for one in outcome.found)


def test_too_rare_groups_are_compared_without_those_that_are_too_frequent() -> None:
    """Else, all other shards of a long run would be called too rare."""
    run = Run(1, "skewed", is_shuffled=True)
    run.spoil(BAD_SHARD, 50.0)
    found = run.outcome(of_rows=True).found
    assert {one.name for one in found if one.kind == FILE} == {str(BAD_SHARD)}
    assert not any(one.is_rare for one in found)


def test_shard_in_order_is_named_at_its_third_jump() -> None:
    """A stream without a shuffle comes to the shard once in each epoch."""
    for seed in range(10):
        run = Run(seed, "normal", is_shuffled=False)
        run.spoil(BAD_SHARD, 5.0)
        outcome = run.outcome(of_rows=False)
        assert {one.name for one in outcome.found if one.kind == FILE} == {str(BAD_SHARD)}


def test_sample_at_fault_is_named_where_its_epochs_agree() -> None:
    """One of a thousand, after eight epochs; its class and its shard are behind it."""
    run = Run(3, "normal", is_shuffled=True)
    for rows, samples in zip(run.rows, run.samples, strict=True):
        rows[samples == 234] += 50.0

    found, *others = run.outcome(of_rows=True).found
    assert {(one.kind, one.name) for one in others} <= {(SAMPLE, "234"), (CLASS, "4"), (FILE, "11")}
    assert (found.kind, found.name, found.way, found.hits, found.seen) == (SAMPLE, "234", "rows", EPOCHS, EPOCHS)
    assert found.times > 10


def test_losses_that_are_no_numbers_are_bad() -> None:
    """NaN in a class's rows names the class; a batch of nothing else says nothing of its rows."""
    run = Run(1, "normal", is_shuffled=True)
    for rows, samples in zip(run.rows, run.samples, strict=True):
        rows[(samples % 10 == 4) & (samples % 100 < 50)] = math.nan
    run.rows[9][:] = math.inf

    outcome = run.outcome(of_rows=True)
    assert [one.name for one in outcome.found if one.kind == CLASS][:1] == ["4"]
    assert {one.name for one in outcome.found if one.kind == CLASS} == {"4"}


def test_exact_chances_are_those_of_counting() -> None:
    """Against sums of binomial coefficients of whole numbers."""
    for population, members, draws in ((30, 7, 9), (500, 40, 60), (5000, 3, 700), (12, 12, 5)):
        for hits in range(math.ceil(members * draws / population), min(members, draws) + 1):
            ways = sum(
                math.comb(members, one) * math.comb(population - members, draws - one)
                for one in range(hits, min(members, draws) + 1)
            )
            (chance,) = hypergeometric_tails(
                float(population), np.array([float(members)]), float(draws), np.array([float(hits)])
            )
            assert chance == pytest.approx(ways / math.comb(population, draws), rel=1e-8)


@pytest.mark.parametrize("values", [[1.0], [1.0] * 3, [math.nan] * 3, [2.0] * 200, [math.inf, *[1.0] * 99]])
def test_few_and_equal_losses_are_measured_without_an_error(values) -> None:
    """Equal losses are never bad, and one that is no number always is."""
    heads = np.zeros(len(values), HEAD_DTYPE)
    heads["rows"], heads["values"], heads["step"], heads["world_size"] = 4, 1, np.arange(len(values)), 1
    losses = Losses("", heads, np.array(values), np.arange(len(values) + 1))

    badness = badness_of(losses)
    assert badness.bad.tolist() == [not math.isfinite(value) for value in values]
    samples = np.arange(4 * len(values))
    assert not stand_out(losses, badness, samples, [], is_shuffled=True).found


def test_steps_of_all_ranks_are_one_jump() -> None:
    """Ranks of one round, and the rounds after it, are no further evidence."""
    heads = np.zeros(400, HEAD_DTYPE)
    heads["rows"], heads["values"], heads["world_size"], heads["step"] = 4, 1, 4, np.arange(400)
    values = np.random.default_rng(0).normal(1, 0.01, 400)
    values[[100, 101, 103, 104, 130]] = [2, 3, 2, 2, 2]
    values[[300]] = 2

    badness = badness_of(Losses("", heads, values, np.arange(401)))
    assert set(badness.jumps.tolist()) >= {101, 300}
    assert not {100, 103, 104, 130} & set(badness.jumps.tolist())


# --- reading -----------------------------------------------------------------------------------

PLAN = Plan(10, 4, 0, shuffle=True, drop_last=False)


def test_lines_are_read_in_the_order_of_positions(tmp_path) -> None:
    """The last line about the same rows counts."""
    file = tmp_path / "losses.jsonl"
    file.write_text(
        '{"epoch": 1, "step": 0, "loss": 3}\n\n{"epoch": 0, "step": 2, "loss": [1, NaN], "rank": 1, "world_size": 2}\n'
        '{"epoch": 0, "step": 1, "loss": 9, "first": 2, "rows": 2, "lr": 0.1}\n{"epoch": 1, "step": 0, "loss": 4}\n'
    )
    losses = from_lines(file, PLAN)

    assert [losses.position(one) for one in range(3)] == [(0, 1), (0, 2), (1, 0)]
    assert losses.heads["rows"].tolist() == [2, 2, 4]
    assert losses.heads["first"].tolist() == [2, 0, 0]
    np.testing.assert_array_equal(losses.values, [9, 1, math.nan, 4])
    np.testing.assert_array_equal(losses.means, [9, math.nan, 4])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: not JSON"),
        ("3", "line 2: not an object"),
        ('{"step": 0, "loss": 1}', 'line 2: has no "epoch"'),
        ('{"epoch": 0, "step": 0}', 'line 2: has no "loss"'),
        ('{"epoch": 0, "step": true, "loss": 1}', '"step" is a whole number from 0, not true'),
        ('{"epoch": -1, "step": 0, "loss": 1}', '"epoch" is a whole number from 0, not -1'),
        ('{"epoch": 0, "step": 3, "loss": 1}', "the stream has no rows 0 to 0 at epoch 0, step 3"),
        ('{"epoch": 0, "step": 2, "loss": 1, "rows": 3}', "no rows 0 to 3"),
        ('{"epoch": 0, "step": 2, "loss": [1, 2, 3]}', "3 values for 2 rows"),
        ('{"epoch": 0, "step": 2, "loss": "low"}', '"loss" is a number'),
    ],
)
def test_line_that_is_no_report_is_named(tmp_path, line, named) -> None:
    """With its number and what it should be."""
    file = tmp_path / "losses.jsonl"
    file.write_text('{"epoch": 0, "step": 0, "loss": 1}\n' + line + "\n")
    with pytest.raises(BatchdError, match=r"losses\.jsonl") as raised:
        from_lines(file, PLAN)
    assert named in str(raised.value)


def test_missing_and_empty_files_are_named(tmp_path) -> None:
    """So is one that is no text."""
    file = tmp_path / "losses.jsonl"
    with pytest.raises(BatchdError, match="there is no file"):
        from_lines(file, PLAN)
    file.touch()
    with pytest.raises(BatchdError, match="is empty; each line is a JSON object"):
        from_lines(file, PLAN)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BatchdError, match="is not UTF-8"):
        from_lines(file, PLAN)


def test_pages_give_the_reports_of_each_run() -> None:
    """In the order of positions; those of others are apart."""
    heads = [
        HEAD.pack(0, 2, 1, 0, 2, 2, 1, 0, 1),
        HEAD.pack(0, 0, 2, 0, 4, 1, 2, 0, 1),
        HEAD.pack(0, 1, 3, 0, 4, 1, 1, 0, 1),
    ]
    values = np.array([1, 2, 9, 3], "<f4").tobytes()
    runs = from_pages([ReportPage(("a", "b"), (1, 2), b"".join(heads), values, 3)])

    assert {name: losses.values.tolist() for name, losses in runs.items()} == {"a": [3, 1, 2], "b": [9]}


@pytest.mark.parametrize(("heads", "values"), [(b"x", b""), (HEAD.pack(*[1] * 9), b""), (HEAD.pack(*[0] * 9), b"")])
def test_pages_that_do_not_add_up_are_refused(heads, values) -> None:
    """A daemon of another version may send them."""
    with pytest.raises(BatchdError, match="same version"):
        from_pages([ReportPage(("a",), (1,), heads, values, 1)])


def test_rows_of_batches_with_different_rooms_are_stacked() -> None:
    """The values of a ragged row begin it, and those of others are its first corner."""
    small, large = np.arange(6).reshape(1, 2, 3), np.arange(12).reshape(1, 4, 3)
    tall, wide = np.ones((3, 1), np.uint8), np.full((1, 2), 2, np.uint8)

    together = stacked([small, large], is_ragged=True)

    assert together.reshape(2, 12).tolist() == [[*range(6), *[0] * 6], [*range(12)]]
    assert stacked([tall, wide], is_ragged=False).tolist() == [[[1, 0]] * 3, [[2, 2], [0, 0], [0, 0]]]
    assert stacked([np.int64(3), np.int64(4)], is_ragged=False).tolist() == [3, 4]
