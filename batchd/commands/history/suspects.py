"""What was in the batches whose loss jumped: joins reports, plan, index and replay. `batchd blame`.

    Losses --> Badness --+
    plan --> samples ----+--> groups that stand out --replay--> their names, and the worst rows
    index --> groups ----+

Invariant: only batches that are shown or named are made again; all else is arithmetic.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np

from batchd.commands.history import blame
from batchd.commands.history.batches import Replayed, Replayer
from batchd.commands.history.losses import Losses
from batchd.core.plan import Plan
from batchd.errors import BatchdError
from batchd_wire.position import Position

BATCHES_MADE_MAX = 16
"""Batches that are made again for the worst rows."""
BATCHES_OF_MEANS_MAX = 4
"""The same, where reports have one value for a batch: each has many rows."""
NAMED_MAX = 16
"""Groups that get a name by making a batch again."""
BATCHES_SHOWN_MAX = 100
ROWS_MAX = 1 << 28


class BadBatch(NamedTuple):
    """A report whose loss is above the usual one; ``rows`` from ``first`` on, of this rank."""

    position: Position
    first: int
    rows: int
    rank: int
    loss: float
    usual: float
    deviations: float


class SuspectRow(NamedTuple):
    """One of the worst rows. ``loss`` and ``deviations``: None if its batch has one loss."""

    position: Position
    row: int
    sample: int
    name: str
    label: int | None
    class_name: str
    loss: float | None
    deviations: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Blame:
    """What stands out in the reports of one run.

    ``bad``: the worst of ``bad_batches``. ``bad_rows`` of all ``rows`` with a loss of their own.
    ``found``: groups, after ``compared`` comparisons. ``worst``: rows, with the ``batches`` that
    have them, by position.
    """

    stream: str
    run: str
    reports: int
    bad_batches: int
    rows: int
    bad_rows: int
    bad: list[BadBatch]
    found: list[blame.Found]
    compared: int
    is_shuffled: bool
    worst: list[SuspectRow]
    batches: Mapping[Position, Replayed]

    def to_plain(self) -> dict[str, object]:
        """All of it as JSON, without pixels."""
        return {
            "stream": self.stream,
            "run": self.run,
            "reports": self.reports,
            "bad_batches": self.bad_batches,
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "compared": self.compared,
            "bad": [_plain(record) for record in self.bad],
            "found": [{**_plain(record), "times": record.times} for record in self.found],
            "worst": [_plain(record) for record in self.worst],
        }


def examine(replayer: Replayer, losses: Losses, rows_shown: int) -> Blame:
    """Find what stands out, and make the worst rows again. Raises ``BatchdError``."""
    plan, heads = replayer.plan, losses.heads
    _check(replayer.name, plan, losses)
    rows = heads["rows"].astype(np.int64)
    samples = _samples(plan, losses)
    groupings = blame.groupings_of(replayer.source, replayer.index, samples)
    badness = blame.badness_of(losses)
    # of copies of one batch, the samples of one say those of the others
    is_shuffled = plan.shuffle and plan.order is None and plan.repeats == 1
    outcome = blame.stand_out(losses, badness, samples, groupings, is_shuffled=is_shuffled)
    report_of = np.repeat(np.arange(len(losses)), rows)
    made: dict[Position, Replayed] = {}
    by_kind = {grouping.kind: grouping for grouping in groupings}
    found = [
        _named(replayer, losses, group, by_kind, samples, report_of, badness.bad[report_of], made)
        if number < NAMED_MAX
        else group
        for number, group in enumerate(outcome.found)
    ]
    order = np.argsort(-badness.deviations, kind="stable")[: int(badness.bad.sum())]
    bad_rows = badness.row_deviations > blame.DEVIATIONS
    return Blame(
        stream=replayer.name,
        run=losses.run,
        reports=len(losses),
        bad_batches=int(badness.bad.sum()),
        rows=int((~np.isnan(badness.row_deviations)).sum()),
        bad_rows=int(bad_rows.sum()),
        bad=[_bad_batch(losses, badness, report) for report in order[:BATCHES_SHOWN_MAX].tolist()],
        found=found,
        compared=outcome.compared,
        is_shuffled=is_shuffled,
        worst=_worst(replayer, losses, badness, _members(outcome.found, by_kind, samples), report_of, rows_shown, made),
        batches=made,
    )


def _check(stream: str, plan: Plan, losses: Losses) -> None:
    """Raise ``BatchdError`` if the rows are packs, or the reports of other batches."""
    if plan.documents is not None:
        raise BatchdError(
            f'stream {stream!r} has several samples in a row ("pack"), so a loss of a row is not that of a sample: '
            "`batchd replay` shows the documents of a batch"
        )
    heads = losses.heads
    there = plan.rows_of(heads["epoch"].astype(np.int64), heads["step"].astype(np.int64))
    wrong = (heads["step"] >= plan.steps) | (heads["first"] + heads["rows"] > there)
    if wrong.any():
        epoch, step = losses.position(int(np.flatnonzero(wrong)[0]))
        raise BatchdError(
            f"stream {stream!r} has no such rows at epoch {epoch}, step {step}, so the losses are of another configuration; give "
            "that of the run, such as its --card"
        )
    if heads["rows"].sum() > ROWS_MAX:
        raise BatchdError(
            f"the reports are about {heads['rows'].sum():,} rows, more than {ROWS_MAX:,}; give a part of them"
        )


def _samples(plan: Plan, losses: Losses) -> blame.Numbers:
    """The samples of all rows of all reports, int64 ``[rows]``."""
    heads = zip(*(losses.heads[name].tolist() for name in ("epoch", "step", "first", "rows")), strict=True)
    found = [plan.indices(Position(epoch, step), first, rows) for epoch, step, first, rows in heads]
    return np.concatenate(found).astype(np.int64) if found else np.empty(0, np.int64)


def _bad_batch(losses: Losses, badness: blame.Badness, report: int) -> BadBatch:
    head = losses.heads[report]
    facts = float(losses.means[report]), float(badness.usual[report]), float(badness.deviations[report])
    return BadBatch(losses.position(report), int(head["first"]), int(head["rows"]), int(head["rank"]), *facts)


def _members(
    found: Iterable[blame.Found], groupings: Mapping[str, blame.Grouping], samples: blame.Numbers
) -> blame.Flags:
    """Which rows are in a group that stands out by being too frequent, bool ``[rows]``."""
    members = np.zeros(len(samples), np.bool_)
    for group in (group for group in found if not group.is_rare):
        members |= samples == int(group.name) if group.kind == blame.SAMPLE else groupings[group.kind].of == group.group
    return members


def _named(  # noqa: PLR0913, PLR0917  all that a row is found by
    replayer: Replayer,
    losses: Losses,
    group: blame.Found,
    groupings: Mapping[str, blame.Grouping],
    samples: blame.Numbers,
    report_of: blame.Numbers,
    bad: blame.Flags,
    made: dict[Position, Replayed],
) -> blame.Found:
    """Name a sample, or a file of many samples, by making one of its rows again."""
    if group.kind not in {blame.SAMPLE, blame.FILE}:
        return group
    is_member = samples == int(group.name) if group.kind == blame.SAMPLE else groupings[blame.FILE].of == group.group
    rows = np.flatnonzero(is_member)
    row = int(rows[np.argmax(bad[rows])])
    report = int(report_of[row])
    batch = _made(replayer, losses.position(report), made)
    replayed = batch.rows[int(losses.heads["first"][report]) + row - int(np.searchsorted(report_of, report))]
    if group.kind == blame.SAMPLE:
        return group._replace(name=f"{replayed.name} (sample {group.name})")
    return group._replace(name=f"{replayed.name.rpartition(': ')[0] or replayed.name} ({group.name})")


def _made(replayer: Replayer, position: Position, made: dict[Position, Replayed]) -> Replayed:
    if position not in made:
        made[position] = replayer.at(position)
    return made[position]


def _worst(  # noqa: PLR0913, PLR0917  all that a row is found by
    replayer: Replayer,
    losses: Losses,
    badness: blame.Badness,
    members: blame.Flags,
    report_of: blame.Numbers,
    rows_shown: int,
    made: dict[Position, Replayed],
) -> list[SuspectRow]:
    """The worst rows, made again; where only batches have losses, rows of groups that stand out."""
    rows, counts = losses.heads["rows"].astype(np.int64), np.diff(losses.starts)
    first_rows = np.cumsum(rows) - rows
    deviations = np.full(len(report_of), np.nan)
    own = np.repeat((counts == rows) & (counts > 1), counts)
    has_own = ((counts == rows) & (counts > 1))[report_of]
    deviations[has_own] = badness.row_deviations[own]
    if has_own.any():
        bad = np.flatnonzero(deviations > blame.DEVIATIONS)
        order, batches = bad[np.argsort(-deviations[bad], kind="stable")], BATCHES_MADE_MAX
    else:
        bad = np.flatnonzero(badness.bad[report_of])
        keys = (bad, -badness.deviations[report_of[bad]], ~members[bad])
        order, batches = bad[np.lexsort(keys)], BATCHES_OF_MEANS_MAX
    found, shown = list[SuspectRow](), set[Position]()
    for row in order.tolist():
        report = int(report_of[row])
        position = losses.position(report)
        if len(found) == rows_shown or (position not in shown and len(shown) == batches):
            break
        shown.add(position)
        at = row - int(first_rows[report])
        replayed = _made(replayer, position, made).rows[int(losses.heads["first"][report]) + at]
        of_row = (float(losses.of(report)[at]), float(deviations[row])) if has_own[row] else (None, None)
        found.append(
            SuspectRow(
                position, replayed.row, replayed.sample, replayed.name, replayed.label, replayed.class_name, *of_row
            )
        )
    return found


def _plain(record: BadBatch | blame.Found | SuspectRow) -> dict[str, object]:
    """The fields as JSON has them: no position but its numbers, and no number that is none."""
    plain: dict[str, object] = {}
    for name, value in record._asdict().items():
        if isinstance(value, Position):
            plain |= {"epoch": value.epoch, "step": value.step}
        elif name != "group":
            plain[name] = str(value) if isinstance(value, float) and not isfinite(value) else value
    return plain
