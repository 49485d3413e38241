"""When a model saw samples: `batchd seen`, and ``batchd.seen`` in user's programs.

    file, label, number --index--> samples --inverse of each epoch's order--> places --> step, row
                                             bad samples --> those that stand in for them
    begun, world size, end --> stretches of steps that the ranks read        places outside: unseen

Nothing of the run was logged: a place is computed, in some microseconds. Runs in the user's
process; it opens the stream's index, and decodes nothing.

Invariant: what is found at a place is what ``replay`` makes there, as long as the bad samples are
those that were given.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.commands.history.batches import card_of, check_fingerprint, open_alone, read_run_position
from batchd.commands.history.cards import RunCard
from batchd.config.tree import Config
from batchd.core.course import Course, readers_of, rounds_from
from batchd.core.packs import packed_in
from batchd.core.plan import Plan
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.finding import FilePattern
from batchd.data.sources.interface import Reader, kind_of, open_reader
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.errors import BatchdError, SourceInvalid
from batchd.runtime.suggestions import suggestion
from batchd_wire.position import Position
from batchd_wire.wording import counted

PAIRS_MAX = 1 << 20
"""Pairs of a sample and an epoch that are looked up at once."""
EPOCHS_MAX = 100_000
RECORDS_MAX = 1_000_000
"""Records of a file whose names are compared, if they have other names than numbers."""
_NUMBER = re.compile(r"\d{1,18}")
SUBSTITUTES_MAX = 32
"""As in the worker: tries for one row."""

Numbers = NDArray[np.int64]


class Leg(NamedTuple):
    """A part of a run: from ``begin`` on, ``world_size`` ranks shared the stream."""

    begin: Position
    world_size: int


class SeenPlace(NamedTuple):
    """A row in which the model saw a sample.

    ``row``: of the batch at the position, as `batchd replay` counts. ``ranks``: those that read the
    row: several only where a batch has fewer rows than ranks. ``rank_rows``: the row in the batch
    of each of these, another number only where ranks share a batch, in the last round of an epoch.
    ``stands_in_for``: the bad sample in whose place it was. ``element``: of a packed stream, the
    first element of the document in this row.
    """

    sample: int
    epoch: int
    step: int
    row: int
    ranks: tuple[int, ...]
    stands_in_for: int | None = None
    element: int | None = None
    rank_rows: tuple[int, ...] = ()


class _SeenRows(NamedTuple):
    """Rows of some samples, int64 ``[rows]`` each. ``which``: their places among the samples."""

    which: Numbers
    epochs: Numbers
    places: Numbers
    planned: Numbers
    elements: Numbers


class _Stretches:
    """The steps that ranks read, as ranges of ``epoch * steps + step``."""

    def __init__(self, plan: Plan, legs: Sequence[Leg], until: Position) -> None:
        self._plan = plan
        self._legs: list[tuple[int, int]] = []
        """(Step from which rounds are counted, world size) of each range."""
        starts, ends = [], []
        stops = [*(leg.begin for leg in legs[1:]), until]
        for leg, stop in zip(legs, stops, strict=True):
            for epoch in range(leg.begin.epoch, stop.epoch + 1):
                base = leg.begin.step if epoch == leg.begin.epoch else 0
                last = stop.step if epoch == stop.epoch else plan.steps
                last = min(last, base + rounds_from(plan, leg.world_size, base) * leg.world_size, plan.steps)
                if last > base:
                    starts.append(epoch * plan.steps + base)
                    ends.append(epoch * plan.steps + last)
                    self._legs.append((base, leg.world_size))
        self._starts, self._ends = np.array(starts, np.int64), np.array(ends, np.int64)

    def __len__(self) -> int:
        return len(self._legs)

    @cached_property
    def epochs(self) -> list[tuple[int, bool]]:
        """The epochs that were read, at least in part, and whether all rows of each were."""
        read = self._ends - self._starts
        of_epoch = self._starts // self._plan.steps
        all_rows = self._plan.epoch_rows == self._plan.samples * self._plan.repeats
        return [
            (epoch, all_rows and int(read[of_epoch == epoch].sum()) == self._plan.steps)
            for epoch in np.unique(of_epoch).tolist()
        ]

    def has(self, epochs: Numbers, steps: Numbers) -> NDArray[np.bool_]:
        """Which of these steps were read."""
        keys = epochs * self._plan.steps + steps
        found = np.searchsorted(self._starts, keys, "right") - 1
        return (found >= 0) & (keys < self._ends[found]) & (steps < self._plan.steps)

    def ranks(self, position: Position, row: int) -> dict[int, int]:
        """The ranks that read a row of a step that was read, and the row in the batch of each."""
        key = self._plan.place_of(position)
        base, world_size = self._legs[int(np.searchsorted(self._starts, key, "right")) - 1]
        read = readers_of(self._plan, world_size, base, position.step)
        assert read is not None, "it was read"
        turn, ranks = read
        if len(ranks) == 1:
            return dict.fromkeys(ranks, row)
        courses = {rank: Course(self._plan, rank, world_size, position.epoch, base, None).at(turn) for rank in ranks}
        shares = [(rank, share) for rank, share in courses.items() if share is not None]
        return {rank: row - share.first for rank, share in shares if share.first <= row < share.first + share.rows}


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """When a model saw some samples, from the first leg's beginning up to before ``until``.

    ``samples``: their numbers in the source, int64 ``[samples]``. ``by_epoch``: how often they were
    seen in each epoch that was read; several times, where they stood in for bad ones.
    ``never``: how many of them were not seen at all. ``fingerprint``: of the stream.
    """

    stream: str
    fingerprint: str
    until: Position
    samples: Numbers
    by_epoch: Mapping[int, int]
    never: int
    _lookup: "SampleLookup"
    _stretches: _Stretches

    @property
    def times(self) -> int:
        """How often they were seen, all together."""
        return sum(self.by_epoch.values())

    def places(self) -> Iterator[SeenPlace]:
        """Every row in which they were, in the order of the run."""
        for found in self._lookup.rows(self.samples, self._stretches):
            order = np.lexsort((found.places, found.epochs))
            for which, epoch, place, planned, element in zip(*(part[order].tolist() for part in found), strict=True):
                sample = int(self.samples[which])
                step, row = divmod(place, self._lookup.plan.batch_size)
                ranks = self._stretches.ranks(Position(epoch, step), row)
                yield SeenPlace(
                    sample,
                    epoch,
                    step,
                    row,
                    tuple(ranks),
                    None if planned == sample else planned,
                    None if self._lookup.packs is None else element,
                    tuple(ranks.values()),
                )


class SampleLookup:
    """Finds samples of one stream, and their rows.

    ``bad``: the samples that are bad, such as `batchd bad` lists them. Raises as ``open_alone``.
    """

    def __init__(self, config: Config, stream: str, bad: Iterable[int] = ()) -> None:
        self._opened = open_alone(config, stream)
        self._source = config.streams[stream].source
        self._substitutes = config.streams[stream].on_error == "substitute"
        self._storage = Storage(config.daemon.storage_limits(), encloses=config.daemon.encloses)
        self._storage.as_of_ns = self._opened.message.as_of_ns
        with closing(self._opened):
            self.index = SourceIndex.from_descriptor(self._opened.index_descriptor)
        self.plan: Plan = self._opened.spec.plan
        self.packs = packed_in(self.index.arrays)
        self._bad: Numbers = np.unique(np.fromiter(bad, np.int64))
        self._check(self._bad)

    def card(self) -> RunCard:
        """The card of the stream, without the versions of decoders."""
        return card_of(self._opened, "")

    # --- which samples ----------------------------------------------------------------------------

    def find(self, file: str | None, label: str | int | None, index: int | None) -> Numbers:
        """The samples by the first of these that is not None. Raises ``BatchdError``."""
        if file is not None:
            return self.of_file(file)
        if label is not None:
            return self.of_label(str(label))
        assert index is not None, "one of them is given"
        return self.of_index(index)

    def of_file(self, text: str) -> Numbers:
        """The samples of a file, or of a pattern of files; see ``data.sources.finding``.

        A record is named as `batchd replay` names it: its file, a colon, and the record. Raises
        ``BatchdError`` if nothing matches, or if the index names no files.
        """
        try:
            found = self._find(FilePattern(text))
        except ValueError as error:
            raise BatchdError(str(error)) from None
        file, colon, record = text.rpartition(": ")
        if not len(found) and colon:
            found = self._record_in(file, record, text)
        if not len(found):
            raise BatchdError(
                f"stream {self._opened.name!r} has no sample in a file {text!r}; name it as `batchd replay` does, by its path, "
                "the end of that, or a pattern in quotes"
            )
        return found

    def _record_in(self, file: str, record: str, text: str) -> Numbers:
        """The samples of a file that are called ``text``, with or without their byte.

        Most records are called by their number in the file, so that one is tried first.
        """
        numbers = [int(number) for number in _NUMBER.findall(record)[:1]]
        for pattern in (*(FilePattern(file, number) for number in numbers), FilePattern(file)):
            names = {sample: self.reader.name(sample) for sample in self._find(pattern)[:RECORDS_MAX].tolist()}
            found = [sample for sample, name in names.items() if name == text or name.startswith(f"{text} (byte ")]
            if found:
                return np.array(found, np.int64)
        return np.zeros(0, np.int64)

    def _find(self, pattern: FilePattern) -> Numbers:
        try:
            return kind_of(self._source).find(self._source, self.index, pattern)
        except SourceInvalid as error:
            raise BatchdError(f"stream {self._opened.name!r}: {error}") from None

    def of_label(self, text: str) -> Numbers:
        """The samples with a label, by its number or by the name of its class.

        Raises ``BatchdError`` if no sample has it, or if the index has no labels.
        """
        labels = kind_of(self._source).labels(self._source, self.index)
        if labels is None:
            raise BatchdError(
                f"the index of stream {self._opened.name!r} has no labels: they are read with each sample; name files, or a "
                "sample by --index"
            )
        classes = self.index.class_names
        label: int | str | None = classes.index(text) if text in classes else None
        if label is None and text.removeprefix("-").isdecimal():
            label = int(text)
        found = np.flatnonzero(labels == label) if label is not None else np.zeros(0, np.int64)
        if not len(found):
            known = suggestion(text, classes) if any(classes) else "labels are numbers"
            raise BatchdError(f"stream {self._opened.name!r} has no sample with the label {text!r}; {known}")
        return found

    def of_index(self, sample: int) -> Numbers:
        """The sample with this number. Raises ``BatchdError`` if there is none."""
        found = np.array([sample], np.int64)
        self._check(found)
        return found

    def _check(self, samples: Numbers) -> None:
        count = self.plan.source_samples
        if len(samples) and not (samples.min() >= 0 and samples.max() < count):
            wrong = samples[(samples < 0) | (samples >= count)][0]
            raise BatchdError(f"stream {self._opened.name!r} has no sample {wrong}: they are numbered 0 to {count - 1}")

    def name(self, sample: int) -> str:
        """The file of a sample, and the record in it; "" if only the user's own code knows that."""
        if any(source.is_own_code for _key, source in sources_in(self._source)):
            return ""
        return self.reader.name(sample)

    @cached_property
    def reader(self) -> Reader:
        """Reads the samples of the stream's source."""
        return open_reader(self._source, self.index, 0, self._storage)

    # --- where they were --------------------------------------------------------------------------

    def seen(self, samples: Numbers, until: Position, legs: Sequence[Leg] = (Leg(Position(0, 0), 1),)) -> Seen:
        """Find out how often the model saw these ``samples`` before the position ``until``.

        Raises ``BatchdError`` if the legs do not follow each other, or are no legs of the stream.
        """
        if until.step == self.plan.steps:  # the end of an epoch is the beginning of the next
            until = Position(until.epoch + 1, 0)
        self._check_legs(legs, until)
        stretches = _Stretches(self.plan, legs, until)
        by_epoch = dict.fromkeys((epoch for epoch, _is_whole in stretches.epochs), 0)
        parts = np.where(np.isin(samples, self._bad), 0, self._parts_of(samples))
        was_seen = np.zeros(len(samples), np.bool_)
        for epoch, is_whole in stretches.epochs:
            if is_whole and self._is_each_there:  # each part of a good sample was in each copy
                by_epoch[epoch] = int(parts.sum())
                was_seen |= parts > 0
        for found in self.rows(samples, stretches, counts_only=True):
            was_seen[found.which] = True
            for epoch, times in zip(*np.unique(found.epochs, return_counts=True), strict=True):
                by_epoch[int(epoch)] += int(times)
        never = int((~was_seen).sum())
        fingerprint = self._opened.spec.fingerprint
        return Seen(self._opened.name, fingerprint, until, samples, by_epoch, never, self, stretches)

    @property
    def _is_each_there(self) -> bool:
        """Whether each epoch has all samples, or all of their parts, and each at one place."""
        return self.plan.has_each_once

    def _parts_of(self, samples: Numbers) -> Numbers:
        """The rows that the plan of an epoch has of each sample: int64 ``[samples]``."""
        parts = np.ones(len(samples), np.int64) if self.packs is None else self.packs.parts_of(samples, self.plan.seed)
        return parts * self.plan.repeats

    def _check_legs(self, legs: Sequence[Leg], until: Position) -> None:
        name, steps = self._opened.name, self.plan.steps
        for position in (*(leg.begin for leg in legs), until):
            if position.step >= steps:
                raise BatchdError(
                    f"stream {name!r} has no step {position.step}: an epoch has the steps 0 to {steps - 1}, counted over all "
                    "ranks"
                )
        if until.epoch > EPOCHS_MAX:
            raise BatchdError(f"the run is at epoch {until.epoch}, beyond the {EPOCHS_MAX} that are looked up")
        for before, after in zip(legs, (*(leg.begin for leg in legs[1:]), until), strict=True):
            if before.begin > after:
                raise BatchdError(
                    f"the run is at {after.epoch}:{after.step} after it began at {before.begin.epoch}:{before.begin.step}; "
                    "give the world sizes in the order of the run"
                )
            if not 1 <= before.world_size <= steps:
                raise BatchdError(
                    f"stream {name!r} has {counted(steps, 'step')} in an epoch, and none for {before.world_size} ranks"
                )

    def rows(self, samples: Numbers, stretches: _Stretches, *, counts_only: bool = False) -> Iterator[_SeenRows]:
        """The rows of ``samples`` that were read, some epochs at a time.

        ``counts_only``: without the rows that the plan has in epochs that were read whole.
        """
        good = np.flatnonzero(~np.isin(samples, self._bad))
        at_once = max(1, PAIRS_MAX // max(1, len(samples), len(self._bad)))
        for first in range(0, len(stretches.epochs), at_once):
            some = stretches.epochs[first : first + at_once]
            is_known = counts_only and self._is_each_there
            planned = [epoch for epoch, is_whole in some if not (is_known and is_whole)]
            found = self._planned(samples, good, np.array(planned, np.int64))
            if self._substitutes and self.packs is None and len(self._bad):
                stand_ins = self._stand_ins(samples, np.array([epoch for epoch, _is_whole in some], np.int64))
                found = _SeenRows(*map(np.concatenate, zip(found, stand_ins, strict=True)))
            is_read = stretches.has(found.epochs, found.places // self.plan.batch_size)
            yield _SeenRows(*(part[is_read] for part in found))

    def _planned(self, samples: Numbers, good: Numbers, epochs: Numbers) -> _SeenRows:
        """The rows in which the plan has good samples."""
        which, of_epoch = np.tile(good, len(epochs)), np.repeat(epochs, len(good))
        plan = self.plan
        if self.packs is None:
            pairs, places = plan.all_places(of_epoch, samples[which])
            elements = np.zeros(len(pairs), np.int64)
        else:
            found = self.packs.places(of_epoch, samples[which], plan.seed, shuffle=plan.shuffle, order=plan.order)
            pairs, elements = np.repeat(found[:, [0, 2]], plan.repeats, axis=0).T
            places = plan.copies(found[:, 1]).ravel()
        return _SeenRows(which[pairs], of_epoch[pairs], places, samples[which[pairs]], elements)

    def _stand_ins(self, samples: Numbers, epochs: Numbers) -> _SeenRows:
        """The rows in which samples stand in for bad ones."""
        bad, of_epoch = np.tile(self._bad, len(epochs)), np.repeat(epochs, len(self._bad))
        others, waiting = bad.copy(), np.arange(len(bad))
        for attempt in range(1, SUBSTITUTES_MAX + 1):
            others[waiting] = self.plan.substitutes(of_epoch[waiting], bad[waiting], attempt)
            waiting = waiting[np.isin(others[waiting], self._bad)]
            if not waiting.size:
                break
        order = np.argsort(samples, kind="stable")
        at = np.minimum(np.searchsorted(samples, others, sorter=order), len(samples) - 1)
        which = order[at]
        stands = samples[which] == others
        stands[waiting] = False
        which, of_epoch, bad = which[stands], of_epoch[stands], bad[stands]
        pairs, places = self.plan.all_places(of_epoch, bad)
        return _SeenRows(which[pairs], of_epoch[pairs], places, bad[pairs], np.zeros(len(pairs), np.int64))


def seen(  # noqa: PLR0913  each is a question of its own
    config: str | os.PathLike[str],
    stream: str,
    until: tuple[int, int] | Mapping[str, object],
    *,
    file: str | None = None,
    label: str | int | None = None,
    index: int | None = None,
    legs: Sequence[tuple[tuple[int, int], int]] = (((0, 0), 1),),
    bad: Iterable[int] = (),
    overrides: Mapping[str, str] | None = None,
) -> Seen:
    """Find out when the model saw samples of a stream, without a daemon and without decoding.

    ``config`` and ``overrides``: as of ``batchd.replay``. ``until``: (epoch, step), or the state of
    a trainer; batches before it count. One of ``file`` (a path, the end of one, a pattern, or a
    record as replay names it), ``label`` (a number or a class) and ``index`` names the samples.
    ``legs``: where the run began with how many ranks, and where it was resumed with others, as
    ((epoch, step), world size). ``bad``: the bad samples, such as ``daemon.bad`` lists them.

    The result has ``times``, ``by_epoch``, ``never`` and ``places()``. Raises ``BatchdError`` as
    ``batchd.replay``, and if no sample matches.
    """
    if sum(one is not None for one in (file, label, index)) != 1:
        raise BatchdError("name the samples by one of file, label and index")
    run = read_run_position(config, until, overrides)
    lookup = SampleLookup(run.config, stream, bad)
    check_fingerprint(lookup.card(), run.card, run.state)
    begun = [Leg(Position(*begin), world_size) for begin, world_size in legs]
    return lookup.seen(lookup.find(file, label, index), run.position, begun)
