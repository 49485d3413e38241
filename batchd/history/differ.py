"""Where the batches of two runs begin to differ, and why. Pure, from cards alone.

    parts of the fingerprints that differ       the first position that differs
    batch_size, shuffle, drop_last, seed        computed: the plans are compared
    seed, with random steps                     0:0
    source, steps, fields, code                 0:0, or the first batch with a changed sample
    on_error, or the seed alone                 the first batch with a bad sample, if there is one

Invariant: a position that is named is one whose rows are of other samples, or drew other numbers.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from batchd.config.tree import BlockShuffle, StreamConfig
from batchd.core.plan import Plan
from batchd.history.cards import RunCard, part_differences, version_differences
from batchd.pipeline.cache_split import plan_pipeline
from batchd.pipeline.sample_fields import pack_of
from batchd_wire.position import Position
from batchd_wire.wording import counted

ORDER = {"batch_size", "seed", "shuffle", "drop_last"}
"""Parts that decide which samples are in which batch."""
_FIRST = Position(0, 0)


@dataclass(frozen=True, slots=True)
class RunDifference:
    """``parts``, ``versions``: lines of text. ``position``: the first one that differs.

    ``position`` is None if no batch differs, or if ``note`` says where one may. ``delivered``: lines
    about the rows that were delivered in each epoch, and ``has_other_rows`` if they differ.
    """

    parts: list[str]
    versions: list[str]
    position: Position | None
    note: str
    delivered: list[str] = field(default_factory=list)
    has_other_rows: bool = False


def difference(before: RunCard, after: RunCard) -> RunDifference:
    """Compare two runs. Raises ``BatchdError`` if the configuration of a card cannot be used."""
    delivered, has_other_rows = _delivered(before, after)
    return replace(_planned(before, after), delivered=delivered, has_other_rows=has_other_rows)


def _delivered(before: RunCard, after: RunCard) -> tuple[list[str], bool]:
    """Compare the digests of epochs that both cards have; True if the rows of one differ."""
    known = {one.epoch: one for one in after.digests}
    pairs = [(one, known[one.epoch]) for one in before.digests if one.epoch in known]
    lines, same, has_other_rows = [], 0, False
    for one, other in pairs:
        if one == other:
            same += one.rows
        elif (one.rows, one.rows_max) == (other.rows, other.rows_max) and one.rows == one.rows_max:
            has_other_rows = True
            lines.append(f"epoch {one.epoch}: other rows were delivered, digest {one.digest} became {other.digest}")
        else:
            rows = " and ".join(f"{each.rows:,} of {each.rows_max:,}" for each in (one, other))
            lines.append(f"epoch {one.epoch}: {rows} rows were delivered, which cannot be compared")
    if same:
        epochs = sum(one == other for one, other in pairs)
        lines.append(f"the same {counted(same, 'row')} delivered in {epochs} epoch{'s' * (epochs > 1)}")
    return lines, has_other_rows


def _planned(before: RunCard, after: RunCard) -> RunDifference:
    """Compare what the cards say that the runs have at each position."""
    parts = part_differences(before.parts, after.parts)
    versions = version_differences(before.versions, after.versions)
    if not parts:
        note = "pixels may differ everywhere, as other versions made them" if versions else ""
        return RunDifference(parts, versions, None, note)
    names = {name for name in {*before.parts, *after.parts} if before.parts.get(name) != after.parts.get(name)}
    streams = [card.config().streams[card.stream] for card in (before, after)]
    if any(pack_of(stream.pipeline) or isinstance(stream.shuffle, BlockShuffle) for stream in streams):
        note = 'rows of "pack" and the blocks of a shuffle follow from the data, so any batch may differ'
        return RunDifference(parts, versions, None, note)
    plans = [
        Plan(card.samples, stream.batch_size, stream.seed, stream.is_shuffled, stream.drop_last)
        for card, stream in zip((before, after), streams, strict=True)
    ]
    position, note = _first_difference(names, streams, plans)
    return RunDifference(parts, versions, position, note)


def _first_difference(names: set[str], streams: list[StreamConfig], plans: list[Plan]) -> tuple[Position | None, str]:
    """The first position that differs, and what is not known of those before it."""
    is_random = any(plan_pipeline(stream.pipeline).is_random for stream in streams)
    has_mask = "on_error" in names and any(stream.on_error == "mask" for stream in streams)
    others = names - ORDER - {"on_error"}
    found = _first_other_samples(*plans)
    if found == _FIRST or ("seed" in names and is_random) or has_mask or others - {"source"}:
        return _FIRST, ""
    if others:
        return None, "the first batch with a sample that has changed differs; 0:0 is the first that may"
    if names & {"seed", "on_error"}:
        return found, "a batch with a bad sample may differ earlier: other samples stand in for it"
    return found, "" if found else "an epoch has whole batches alone, so only ranks that share its last round differ"


def _first_other_samples(before: Plan, after: Plan) -> Position | None:
    """The first position of two epochs where the plans name other samples; None: there is none."""
    is_same_order = replace(before, drop_last=after.drop_last) == after
    for epoch in range(2):
        for step in range(0 if is_same_order else min(before.steps, after.steps)):
            position = Position(epoch, step)
            rows = before.rows(step), after.rows(step)
            if rows[0] != rows[1] or not np.array_equal(
                before.indices(position, 0, rows[0]), after.indices(position, 0, rows[1])
            ):
                return position
        if before.steps != after.steps:
            return Position(epoch, min(before.steps, after.steps))
    return None
