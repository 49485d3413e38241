"""Which samples, classes, files and sources stand out where the loss jumped. Pure, of arrays.

Bad are the steps, and the rows of a step, whose loss is more than ``DEVIATIONS`` robust deviations
above the usual one: the running median of the steps around, or the median of the step's rows. The
deviation is 1.4826 times the median of the absolute differences (B. Iglewicz, D. Hoaglin: How to
Detect and Handle Outliers, 1993). NaN and infinities are always bad.

A group stands out if the bad ones have more of it than chance explains, or less. What is random
decides what is counted, so that the statement holds whatever the losses look like:

    rows      each row has a loss of its own: which rows of its step are bad is compared
    batches   the stream is shuffled: the rows of a bad batch are a random draw from all rows
    losses    the same, of all batches, by their ranks: no row has a loss of its own
    jumps     the order is that of the source, or of blocks: neighbours come together, so a jump of
              the loss, with the bad steps that follow it, is one draw from all steps: its worst one

For batches that is Fisher's exact test: a group's rows among those of bad batches have, without any
cause, a hypergeometric distribution (R. A. Fisher: The Logic of Inductive Inference, 1935). For
rows and jumps it is a bound: their number is a sum of draws without replacement of values from 0 to
1. With n draws, a mean m that is expected and a mean x that is found, it is as large with a chance
of at most exp(-n KL(x || m)), where KL(x || m) is x ln(x/m) + (1 - x) ln((1 - x)/(1 - m))
(W. Hoeffding: Probability Inequalities for Sums of Bounded Random Variables, JASA 58, 1963, theorem
1 and section 6). Bad rows and rows of the group change places in this, so the fewer of both are the
draws. Ranks have a known variance, so theirs is a bound with it (G. Bennett: Probability
Inequalities for the Sum of Independent Random Variables, JASA 57, 1962), which the same section
extends to draws without replacement.

Where one group is too frequent, all others are too rare: those that are compared for that are
without the rows of the former.

The chances of all groups of a kind are corrected for their number (S. Holm, Scandinavian Journal of
Statistics 6, 1979), and the kinds, the ways of counting, and both directions share ``ALPHA``: the
chance of any false alarm in a run is at most that. A cause is not a fault: a class that is harder
than others stands out, too.

Groups are classes, files of many samples and sources. They come from the index alone, so a class is
known where it has labels, and a file where it holds many samples: a shard, a table, a row group.
Its name comes from the first of its samples that is made again.

Invariant: nothing here depends on the order of groups, nor on random numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from batchd.commands.history.losses import Losses
from batchd.data.sources.composed.options import ConcatSource, MixSource, parts_of
from batchd.data.sources.interface import kind_of, part_of
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.index import SourceIndex

DEVIATIONS = 3.5
MAD_SCALE = 1.4826
"""The deviation of normally distributed numbers, in medians of their absolute differences."""
AROUND = 101
"""Steps whose median is the usual loss of the one in their middle."""
APART_ROUNDS = 10
"""Bad steps with fewer rounds of all ranks between them are one jump."""
ALPHA = 0.01
RARE_PART = 0.05
"""Part of ``ALPHA`` for groups that are too rare, which tell less than too frequent ones."""
FLOOR = 1e-6
"""Least deviation, as a part of the usual loss: equal losses have none of their own."""
STEPS_MIN = 8
TERM_MIN = 1e-12
"""Least term of a sum, as a part of it."""

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
SAMPLE, CLASS, FILE, SOURCE = "sample", "class", "file", "source"
NO_GROUP = -1


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Groups of one kind. ``of``: the group of each sample, or ``NO_GROUP``; int64 ``[samples]``.

    ``names``: by group. A file's is a range of samples, as the index does not name it.
    """

    kind: str
    of: Numbers
    names: tuple[str, ...]


def groupings_of(source: SourceOptions, index: SourceIndex, samples: Numbers) -> list[Grouping]:
    """The groups of some samples, int64 ``[samples]``; a kind with a single group is left out.

    Raises ``SourceInvalid`` if a library that the source needs is not installed.
    """
    return [one for one in _groupings(source, index, samples, 0) if len(one.names) > 1]


def _groupings(source: SourceOptions, index: SourceIndex, samples: Numbers, first: int) -> list[Grouping]:
    """As ``groupings_of``; ``first``: the number of sample 0 in the whole source, for names."""
    parts = [part for _key, part in parts_of(source)]
    if parts:
        return _of_parts(source, parts, index, samples)
    found = []
    labels = index.arrays.get("labels")
    if labels is not None and len(labels) == len(index):
        numbers, of = np.unique(labels[samples], return_inverse=True)
        names = dict(enumerate(index.class_names))
        found.append(Grouping(CLASS, of, tuple(names.get(label) or str(label) for label in numbers.tolist())))
    firsts = kind_of(source).neighbours(source, index).firsts
    if len(firsts) > 1:
        numbers, of = np.unique(np.searchsorted(firsts, samples, "right") - 1, return_inverse=True)
        ends = np.append(firsts[1:], len(index))
        ranges = zip((firsts[numbers] + first).tolist(), (ends[numbers] + first - 1).tolist(), strict=True)
        found.append(Grouping(FILE, of, tuple(f"samples {begin} to {last}" for begin, last in ranges)))
    return found


def _of_parts(
    source: SourceOptions, parts: list[SourceOptions], index: SourceIndex, samples: Numbers
) -> list[Grouping]:
    """The groups within each part, those of one name together, and the parts themselves."""
    starts = np.cumsum([0, *(count for count, _facts in index.facts["parts"])])
    own, part_numbers = index.arrays.get("numbers"), index.arrays.get("parts")
    if own is None:
        of_part = np.searchsorted(starts, samples, "right") - 1
        numbers = samples - starts[of_part]
    else:
        of_part = part_numbers[samples].astype(np.int64) if part_numbers is not None else np.zeros_like(samples)
        numbers = own[samples]
    groups: dict[str, tuple[Numbers, dict[str, int]]] = {}
    for number, part in enumerate(parts):
        here = np.flatnonzero(of_part == number)
        first = int(starts[number]) if own is None else 0
        for one in _groupings(part, part_of(index, number), numbers[here], first) if len(here) else ():
            of, names = groups.setdefault(one.kind, (np.full(len(samples), NO_GROUP), {}))
            mark = "" if own is None or len(parts) == 1 or one.kind != FILE else f" of sources[{number}]"
            merged = [names.setdefault(name + mark, len(names)) for name in one.names]
            of[here] = np.array(merged)[one.of]
    found = [Grouping(kind, of, tuple(names)) for kind, (of, names) in groups.items()]
    if isinstance(source, ConcatSource | MixSource):
        present, of = np.unique(of_part, return_inverse=True)
        texts = (f"sources[{number}]: {parts[number].type} {parts[number].place}" for number in present.tolist())
        return [Grouping(SOURCE, of, tuple(texts)), *(one for one in found if one.kind != SOURCE)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Badness:
    """How bad the reports and their rows are.

    ``usual`` and ``deviations``: float64 ``[reports]``; infinite deviations where the loss is no
    number. ``row_deviations``: float64 ``[values]``, NaN where a report has one value alone.
    ``jumps``: the worst report of each jump; int64 ``[jumps]``.
    """

    usual: Floats
    deviations: Floats
    row_deviations: Floats
    jumps: Numbers

    @property
    def bad(self) -> Flags:
        """Which reports are bad, ``[reports]``."""
        flags: Flags = self.deviations > DEVIATIONS
        return flags


class Found(NamedTuple):
    """A group that stands out.

    ``way``: "rows", "batches", "losses" or "jumps". ``hits`` of ``seen`` are bad, where
    ``expected`` would be by chance: rows, or for jumps, whole batches. For losses ``hits`` is the
    sum of the ranks, from 0 to 1, of the rows' batches. ``chance``: at most this likely without a
    cause, corrected for all comparisons.
    """

    kind: str
    name: str
    group: int
    way: str
    hits: float
    seen: float
    expected: float
    chance: float

    @property
    def times(self) -> float:
        """How many times as often as by chance."""
        return self.hits / self.expected

    @property
    def is_rare(self) -> bool:
        """Whether the bad ones have less of it than by chance."""
        return self.hits < self.expected


class Outcome(NamedTuple):
    """``found``: too frequent groups, then too rare ones, the surest first.

    ``compared``: number of comparisons.
    """

    found: list[Found]
    compared: int


def badness_of(losses: Losses) -> Badness:
    """Measure the reports of one run, in the order of their positions."""
    means, counts = losses.means, np.diff(losses.starts)
    usual, deviations = _deviations(means)
    rows = np.full(len(losses.values), np.nan)
    several = np.flatnonzero(counts > 1)
    if len(several):
        medians, spreads = np.array([_spread(losses.of(report)) for report in several.tolist()]).T
        spreads = np.fmax(_running_median(spreads), FLOOR * np.abs(medians))
        mine = np.repeat(counts > 1, counts)
        values = losses.values[mine]
        with np.errstate(invalid="ignore", divide="ignore"):
            above = (values - np.repeat(medians, counts[several])) / np.repeat(spreads, counts[several])
        rows[mine] = np.where(np.isfinite(values), np.nan_to_num(above), np.inf)
    return Badness(usual, deviations, rows, _jumps(losses, deviations))


def stand_out(
    losses: Losses,
    badness: Badness,
    samples: Numbers,
    groupings: Sequence[Grouping],
    *,
    is_shuffled: bool,
) -> Outcome:
    """Compare all groups. ``samples``: of all rows of all reports, int64 ``[rows]``, in order.

    ``groupings``: of the same rows. ``is_shuffled``: each epoch is one random order of all samples.
    """
    distinct, of = np.unique(samples, return_inverse=True)
    every = [*groupings, Grouping(SAMPLE, of, tuple(map(str, distinct.tolist())))]
    rows = losses.heads["rows"].astype(np.int64)
    report_of = np.repeat(np.arange(len(losses)), rows)
    has_rows = ((np.diff(losses.starts) == rows) & (rows > 1))[report_of]

    def compared(there: Flags, *, rare: bool) -> list[Outcome]:
        """Compare the groups of these rows."""
        ways = [_by_rows(losses, badness, has_rows & there)] if has_rows.any() else []
        if len(losses) >= STEPS_MIN and is_shuffled:
            ways.append(_by_batches(badness, report_of, there))
            ways += [] if has_rows.any() else [_by_losses(badness, report_of, there)]
        elif len(losses) >= STEPS_MIN and not rare:  # a jump has its neighbours' rows alone
            ways.append(_by_jumps(badness, rows, report_of))
        return [_compare(grouping, way, len(every) * len(ways), rare=rare) for grouping in every for way in ways]

    outcomes = compared(np.ones(len(samples), np.bool_), rare=False)
    there = np.ones(len(samples), np.bool_)
    for grouping in every:
        groups = [one.group for outcome in outcomes for one in outcome.found if one.kind == grouping.kind]
        there &= ~np.isin(grouping.of, groups)
    outcomes += compared(there, rare=True)
    found = [one for outcome in outcomes for one in outcome.found]
    return Outcome(sorted(found, key=lambda one: (one.is_rare, one.chance)), sum(one.compared for one in outcomes))


def _divergence(found: Floats, expected: Floats) -> Floats:
    """Kullback-Leibler divergence of two coins, float64 ``[groups]``; both from 0 to 1."""
    x, m = np.clip(found, 0.0, 1.0), np.clip(expected, 0.0, 1.0)
    heads = np.where(x > 0, x * np.log(np.where(x > 0, x, 1.0) / m), 0.0)
    tails = np.where(x < 1, (1 - x) * np.log(np.where(x < 1, 1 - x, 1.0) / (1 - m)), 0.0)
    divergence: Floats = np.maximum(heads + tails, 0.0)
    return divergence


class _Way(NamedTuple):
    """A way of counting.

    ``weights``: what each row counts for; ``hits``: the part that is bad;
    ``expected``: the part that is by chance; each float64 ``[rows]``. ``draws``: their number, or
    that of a group's rows if these are fewer and ``is_symmetric``. ``is_exact``: all rows are one
    population from which the bad ones are drawn. ``divergence``: of a mean per draw from the
    expected one, such that the chance is at most exp(-draws * divergence).
    """

    name: str
    weights: Floats
    hits: Floats
    expected: Floats
    draws: float
    is_symmetric: bool
    is_exact: bool = False
    divergence: Callable[[Floats, Floats], Floats] = _divergence


def _by_rows(losses: Losses, badness: Badness, there: Flags) -> _Way:
    """Rows of reports with a value for each, compared within their batch."""
    rows, values = losses.heads["rows"].astype(np.int64), np.diff(losses.starts)
    own = (values == rows) & (rows > 1)
    report_of = np.repeat(np.arange(len(losses)), rows)
    bad = np.zeros(len(there))
    bad[own[report_of]] = badness.row_deviations[np.repeat(own, values)] > DEVIATIONS
    bad *= there
    counts = np.bincount(report_of, there, len(losses))
    share = np.bincount(report_of, bad, len(losses)) / np.maximum(counts, 1)
    return _Way("rows", there.astype(np.float64), bad, share[report_of] * there, float(bad.sum()), is_symmetric=True)


def _by_batches(badness: Badness, report_of: Numbers, there: Flags) -> _Way:
    """Rows of bad batches among all rows."""
    bad, weights = badness.bad[report_of] & there, there.astype(np.float64)
    expected = weights * (bad.sum() / max(1, there.sum()))
    return _Way(
        "batches", weights, bad.astype(np.float64), expected, float(bad.sum()), is_symmetric=True, is_exact=True
    )


def _by_losses(badness: Badness, report_of: Numbers, there: Flags) -> _Way:
    """Rows of all batches: the part of the batches that are better than their own.

    Each row of a group draws the rank of its batch among all rows, without replacement.
    """
    _values, which, counts = np.unique(badness.deviations, return_inverse=True, return_counts=True)
    ranks: Floats = ((np.cumsum(counts) - 0.5 * counts) / len(which))[which][report_of] * there
    weights, known = there.astype(np.float64), ranks[there]
    mean, variance = (float(known.mean()), float(known.var())) if len(known) else (0.0, 0.0)
    low, high = float(known.min(initial=1.0)), float(known.max(initial=0.0))

    def divergence(found: Floats, expected: Floats) -> Floats:
        room = np.where(found > expected, high - mean, mean - low)
        above = room * np.abs(found - expected) / variance
        bennett: Floats = variance / room**2 * ((1 + above) * np.log1p(above) - above)
        return bennett

    draws = np.inf if variance > 0 else 0.0
    return _Way("losses", weights, ranks, mean * weights, draws, is_symmetric=True, divergence=divergence)


def _by_jumps(badness: Badness, rows: Numbers, report_of: Numbers) -> _Way:
    """The worst batch of each jump among all batches."""
    weights = 1.0 / rows[report_of]
    is_worst = np.zeros(len(rows), np.bool_)
    is_worst[badness.jumps] = True
    jumps = len(badness.jumps)
    return _Way(
        "jumps", weights, weights * is_worst[report_of], weights * (jumps / len(rows)), float(jumps), is_symmetric=False
    )


def _compare(grouping: Grouping, way: _Way, shares: int, *, rare: bool) -> Outcome:
    """Compare the groups of one kind in one way, which has one of ``shares`` of ``ALPHA``.

    ``rare``: find groups that the bad ones have too little of, instead of too much.
    """
    mine = (grouping.of != NO_GROUP) & (way.weights > 0)
    groups, of = len(grouping.names), grouping.of[mine]
    if way.draws == 0 or groups < 2:  # noqa: PLR2004  nothing to compare with
        return Outcome([], 0)
    seen = _sums(of, way.weights[mine], groups)
    hits = _sums(of, way.hits[mine], groups)
    expected = _sums(of, way.expected[mine], groups)
    draws = np.minimum(seen, way.draws) if way.is_symmetric else np.full(groups, way.draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.exp(-draws * way.divergence(hits / draws, expected / draws))
    chances = np.where((seen > 0) & ((hits < expected) if rare else (hits > expected)), bound, 1.0)
    if way.is_exact:
        chosen, population = np.flatnonzero(chances < 1.0), float(way.weights.sum())
        marked, there = way.draws, hits[chosen]
        if rare:  # too few bad ones are too many good ones
            marked, there = population - way.draws, seen[chosen] - hits[chosen]
        chances[chosen] = hypergeometric_tails(population, seen[chosen], marked, there)
    chances /= RARE_PART if rare else 1 - RARE_PART
    order = np.argsort(chances, kind="stable")
    compared = int((seen > 0).sum())
    holm = np.maximum.accumulate(chances[order] * np.maximum(compared - np.arange(groups), 1)) * shares
    found = [
        Found(
            grouping.kind,
            grouping.names[group],
            group,
            way.name,
            *(float(value) for value in (hits[group], seen[group], expected[group], chance)),
        )
        for group, chance in zip(order.tolist(), holm.tolist(), strict=True)
        if chance <= ALPHA
    ]
    return Outcome(found, compared)


def _sums(groups: Numbers, values: Floats, count: int) -> Floats:
    """The sum of the values of each group, float64 ``[count]``."""
    return np.bincount(groups, values, count).astype(np.float64)


def hypergeometric_tails(population: float, members: Floats, draws: float, hits: Floats) -> Floats:
    """The chance of ``hits`` members or more among so many draws, float64 ``[groups]``.

    Hypergeometric; ``hits`` are at least the mean, so the terms fall from the first one on.
    """
    log_first = (
        _log_choose(members, hits)
        + _log_choose(population - members, draws - hits)
        - _log_choose(np.array(population), np.array(draws))
    )
    terms, total, at = np.ones(len(hits)), np.ones(len(hits)), hits.copy()
    while (terms > TERM_MIN * total).any():
        above = (members - at) * (draws - at) / ((at + 1) * (population - members - draws + at + 1))
        terms = terms * np.maximum(above, 0.0)
        total += terms
        at += 1
    return np.minimum(1.0, np.exp(log_first) * total)


def _log_choose(whole: Floats, part: Floats) -> Floats:
    """The logarithm of the binomial coefficient, of arrays of one shape."""
    return _log_factorial(whole) - _log_factorial(part) - _log_factorial(whole - part)


def _log_factorial(number: Floats) -> Floats:
    """ln(n!) by Stirling's series from n + 8 on, to 1e-10."""
    x = number + 9.0
    series = (x - 0.5) * np.log(x) - x + 0.5 * np.log(2 * np.pi) + 1 / (12 * x) - 1 / (360 * x**3) + 1 / (1260 * x**5)
    found: Floats = series - np.log(number[..., np.newaxis] + np.arange(1, 9)).sum(axis=-1)
    return found


def _deviations(values: Floats) -> tuple[Floats, Floats]:
    """The usual value at each place, and how many robust deviations a value is above it.

    Near the first value, that is the median of as many on both sides as there are before it,
    because a loss falls steeply at the start; near the last one, of the last ``AROUND``.
    """
    is_number = np.isfinite(values)
    numbers = np.where(is_number, values, np.nan)
    usual = _running_median(numbers)
    for place in range(min(AROUND // 2, (len(values) - 1) // 2)):
        usual[place] = _medians(numbers[np.newaxis, : 2 * place + 1])[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = np.where(is_number, values - usual, np.nan)
        spread = np.fmax(MAD_SCALE * _running_median(np.abs(differences)), FLOOR * np.abs(usual))
        above = np.nan_to_num(differences / spread)
    return usual, np.where(is_number, above, np.inf)


def _running_median(values: Floats) -> Floats:
    """The median of the ``AROUND`` values around each, without NaN; float64 ``[values]``."""
    around = min(AROUND, len(values))
    if not around:
        return values
    windows = sliding_window_view(values, around)
    with np.errstate(invalid="ignore"):
        medians = np.concatenate([_medians(windows[first : first + 4096]) for first in range(0, len(windows), 4096)])
    before = (around - 1) // 2
    return np.pad(medians, (before, len(values) - len(medians) - before), mode="edge")


def _medians(windows: Floats) -> Floats:
    """The median of each row without NaN; NaN for a row of nothing else."""
    ordered = np.sort(windows, axis=1)  # NaN come last
    there = (~np.isnan(ordered)).sum(axis=1)
    low, high = np.maximum(0, (there - 1) // 2), np.maximum(0, there // 2)
    rows = np.arange(len(ordered))
    medians: Floats = (ordered[rows, low] + ordered[rows, high]) / 2
    return medians


def _spread(values: Floats) -> tuple[float, float]:
    """The median of a batch's rows, and their robust deviation, without what is no number."""
    numbers = values[np.isfinite(values)]
    if not len(numbers):
        return 0.0, np.nan
    median = float(np.median(numbers))
    return median, MAD_SCALE * float(np.median(np.abs(numbers - median)))


def _jumps(losses: Losses, deviations: Floats) -> Numbers:
    """The worst report of each jump; see ``Badness``."""
    heads, worst = losses.heads, list[int]()
    rounds = heads["step"] // np.maximum(1, heads["world_size"])
    last = None
    for report in np.flatnonzero(deviations > DEVIATIONS).tolist():
        here = int(heads["epoch"][report]), int(rounds[report])
        if last is None or here[0] != last[0] or here[1] - last[1] > APART_ROUNDS:
            worst.append(report)
        elif deviations[report] > deviations[worst[-1]]:
            worst[-1] = report
        last = here
    return np.array(worst, np.int64)
