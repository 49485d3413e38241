"""Where the batches of two runs begin to differ, and why. From cards alone, or also from indexes.

    parts of the fingerprints that differ       the first position that differs
    batch_size, shuffle, drop_last, seed        computed: the plans are compared; those of packs,
    and weights                                 blocks and draws need the indexes of the sources
    seed, with random steps                     0:0
    source, steps, fields, code                 0:0, or the first batch with a changed sample
    on_error, or the seed alone                 the first batch with a bad sample, if there is one

Invariant: a position that is named is one whose rows are of other samples, or drew other numbers.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.commands.history.batches import check_fingerprint
from batchd.commands.history.cards import RunCard, version_differences
from batchd.commands.history.seen import SampleLookup
from batchd.config.tree import BlockShuffle, StreamConfig
from batchd.core.packs import Cuts, Packs, PartPacks
from batchd.core.plan import Plan
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.sample_fields import bucket_crop_of, pack_of
from batchd.data.sources.composed.options import MixSource
from batchd.stream.fingerprints import part_differences
from batchd_wire.position import Position
from batchd_wire.wording import counted

ORDER = {"batch_size", "seed", "shuffle", "drop_last", "weights", "repeats", "balance"}
"""Parts that decide which samples are in which batch."""
DATA = {"seed", "shuffle", "weights", "source"}
"""Those that decide it together with the samples, where ``_follows_from_data``."""
NEEDS_SCAN = (
    'rows of "pack", buckets, blocks of a shuffle and draws follow from the data, so any batch may differ; --scan reads the '
    "indexes and says which is the first"
)
_FIRST = Position(0, 0)


@dataclass(frozen=True, slots=True)
class RunDifference:
    """``parts``, ``versions``: lines of text. ``position``: the first one that differs.

    ``position`` is None if no batch differs, or if ``note`` says where one may. ``delivered``: text
    about the rows that were delivered in each epoch, and ``has_other_rows`` if they differ.
    """

    parts: list[str]
    versions: list[str]
    position: Position | None
    note: str
    delivered: list[str] = field(default_factory=list)
    has_other_rows: bool = False


class RowOrder(NamedTuple):
    """Which samples are in which row. ``packs``: of a packed stream, if they are known."""

    plan: Plan
    packs: Packs | Cuts | PartPacks | None = None

    @classmethod
    def scan(cls, card: RunCard) -> "RowOrder":
        """Read the index of a card's stream. Raises ``BatchdError``, also if that has changed."""
        lookup = SampleLookup(card.config(), card.stream)
        check_fingerprint(lookup.card(), card, None)
        return cls(lookup.plan, lookup.packs)

    def rows_at(self, position: Position) -> NDArray[np.int64]:
        """The samples of a batch, int64 ``[rows]``.

        Of packed rows ``[parts, 3]`` or ``[parts, 4]``: the row, the sample, its first element.
        """
        plan, rows = self.plan, self.plan.rows(position)
        if self.packs is None:
            return plan.indices(position, 0, rows)
        numbers = plan.first_place(position) + np.arange(rows)
        return self.packs.contents(position.epoch, numbers, plan.seed, shuffle=plan.shuffle, order=plan.order)


def difference(before: RunCard, after: RunCard, orders: tuple[RowOrder, RowOrder] | None = None) -> RunDifference:
    """Compare two runs. ``orders``: of both, if their indexes were read.

    Raises ``BatchdError`` if the configuration of a card cannot be used.
    """
    delivered, has_other_rows = _delivered(before, after)
    return replace(_planned(before, after, orders), delivered=delivered, has_other_rows=has_other_rows)


def _delivered(before: RunCard, after: RunCard) -> tuple[list[str], bool]:
    """Compare the digests of epochs that both cards have; True if the rows of one differ."""
    known = {new.epoch: new for new in after.digests}
    pairs = [(old, known[old.epoch]) for old in before.digests if old.epoch in known]
    lines, same, has_other_rows = [], 0, False
    for old, new in pairs:
        if old == new:
            same += old.rows
        elif (old.rows, old.rows_max) == (new.rows, new.rows_max) and old.rows == old.rows_max:
            has_other_rows = True
            lines.append(f"epoch {old.epoch}: other rows were delivered, digest {old.digest} became {new.digest}")
        else:
            rows = " and ".join(f"{each.rows:,} of {each.rows_max:,}" for each in (old, new))
            lines.append(f"epoch {old.epoch}: {rows} rows were delivered, which cannot be compared")
    if same:
        epochs = sum(old == new for old, new in pairs)
        lines.append(f"the same {counted(same, 'row')} delivered in {epochs} epoch{'s' * (epochs > 1)}")
    return lines, has_other_rows


def _planned(before: RunCard, after: RunCard, orders: tuple[RowOrder, RowOrder] | None) -> RunDifference:
    """Compare what the cards say that the runs have at each position."""
    parts = part_differences(before.parts, after.parts)
    versions = version_differences(before.versions, after.versions)
    if not parts:
        note = "pixels may differ everywhere, as other versions made them" if versions else ""
        return RunDifference(parts, versions, None, note)
    names = {name for name in {*before.parts, *after.parts} if before.parts.get(name) != after.parts.get(name)}
    streams = [card.config().streams[card.stream] for card in (before, after)]
    if _differs_everywhere(names, streams):
        return RunDifference(parts, versions, _FIRST, "")
    if orders is None:
        has_budget = any(
            (stream.bucket and stream.bucket.budget) or bucket_crop_of(stream.pipeline) for stream in streams
        )
        if (names & DATA or has_budget) and any(map(_follows_from_data, streams)):
            return RunDifference(parts, versions, None, NEEDS_SCAN)
        # rows in one order, whatever that is: numbers of packs, blocks and draws stand for them
        orders = tuple(  # type: ignore[assignment]
            RowOrder(
                Plan(
                    card.samples,
                    stream.batch_size,
                    stream.seed,
                    stream.is_shuffled,
                    stream.drop_last,
                    **stream.draws,
                )
            )
            for card, stream in zip((before, after), streams, strict=True)
        )
    assert orders is not None, "given, or made"
    position, note = _first_difference(names, orders)
    return RunDifference(parts, versions, position, note)


def _differs_everywhere(names: set[str], streams: list[StreamConfig]) -> bool:
    """Whether each row is another one, or may be, whatever the order of the samples."""
    is_random = any(plan_pipeline(stream.pipeline).is_random for stream in streams)
    has_mask = "on_error" in names and any(stream.on_error == "mask" for stream in streams)
    return ("seed" in names and is_random) or has_mask or bool(names - ORDER - {"on_error", "source"})


def _follows_from_data(stream: StreamConfig) -> bool:
    """Whether the order of its rows follows from its samples, too, which a card does not have."""
    is_changing = isinstance(stream.source, MixSource) and bool(stream.source.changes)
    is_drawn = is_changing or stream.weights is not None or stream.buckets is not None
    return is_drawn or isinstance(stream.shuffle, BlockShuffle) or pack_of(stream.pipeline) is not None


def _first_difference(names: set[str], orders: tuple[RowOrder, RowOrder]) -> tuple[Position | None, str]:
    """The first position that differs, and what is not known of those before it."""
    found = _first_other_rows(*orders, is_same_order=not names & (DATA | {"batch_size", "repeats", "balance"}))
    if found == _FIRST:
        return _FIRST, ""
    if "source" in names:
        return None, "the first batch with a sample that has changed differs; 0:0 is the first that may"
    if names & {"seed", "on_error"}:
        return found, "a batch with a bad sample may differ earlier: other samples stand in for it"
    return found, "" if found else "an epoch has whole batches alone, so only ranks that share its last round differ"


def _first_other_rows(before: RowOrder, after: RowOrder, *, is_same_order: bool) -> Position | None:
    """The first position of two epochs with other rows; None: there is none."""
    for epoch in range(2):
        for step in range(0 if is_same_order else min(before.plan.steps, after.plan.steps)):
            position = Position(epoch, step)
            draws = (one.plan.draw_epoch(position) for one in (before, after))
            if len(set(draws)) > 1 or not np.array_equal(before.rows_at(position), after.rows_at(position)):
                return position
        if before.plan.steps != after.plan.steps:
            return Position(epoch, min(before.plan.steps, after.plan.steps))
    return None
