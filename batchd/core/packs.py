r"""Which documents share a row of a batch: pure code, for the daemon and workers.

A packed stream fills the rows of its batches with several samples each, its documents. A row, or
**pack**, has room for a number of elements, such as tokens. ``Cuts`` are rows of all documents as
one sequence. For ``Packs``, the documents, in parts that fit, are sorted by their length, and the
sorted table is cut into strata of N neighbours. A **window** takes one part from each stratum, so
an epoch has N windows:

    table     | long ........ | stratum 1 ... |      ...      | ... short |      N parts each
                  |       \\        |    \\                          |    \
    window        0  ...  N-1      0     N-1                       0     N-1

    template  pack 0: strata 0, 317, 4071    pack 1: strata 1, 318, 2044, 4088    ...

The **template** says which strata share a pack. It is made once for the longest part of each
stratum, so it fits every window of every epoch, and all epochs have the same number of packs: the
length of an epoch is known, ranks have equal steps, and a position needs no other position. The
neighbours of a stratum have nearly the same length, so little room is lost by this: at most the
range of all lengths in each window.

The shuffle decides which part of a stratum is in which window, by another bijection of [0, N) for
each stratum and epoch, and the order of all packs, by another bijection for each epoch;
``core.buckets`` orders them by their cost instead.

Invariant: an epoch has every part of the table exactly once, and no pack is longer than its room.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchd.core.mixtures import Mixture
from batchd.core.plan import EpochOrder, Permutation, Table, Tables, mixed, mixed_all

STRIDE = 1024
CUTS_PREFIX = "cuts."
_CUTS_NAMES = "lengths", "sums", "numbers"
"""Of the arrays that the stream adds to the index of its source."""
_DOCUMENTS, _ROWS = 1, 2
"""Which permutation of a seed."""

Numbers = NDArray[np.int64]


class Cuts:
    """The rows of every epoch, cut from all documents as one sequence.

        documents   | d7 .......... | d2 .. | d5 ...................... | d0 ... | ..  in one order,
        rows        |   row 0   |   row 1   |   row 2   |   row 3   |   row 4 ...      of the seed

    All rows but the last are full, and no element is lost. The order of the documents is one keyed
    permutation for all epochs, so the same documents share a row in each; the shuffle of an epoch
    permutes the rows. A row is found by a search in the sums of every ``STRIDE`` documents.

    Invariant: an epoch has every element of every document exactly once.

    ``lengths``: of the documents in their order, int32 ``[documents]``, 0 for those in no row.
    ``sums``: the elements before every ``STRIDE``-th document, and of all, int64. ``numbers``: the
    elements of a row, and 1 if the documents are permuted, int64 ``[2]``.
    """

    def __init__(self, lengths: NDArray[np.int32], sums: Numbers, numbers: Numbers) -> None:
        self._arrays: tuple[Table, ...] = lengths, sums, numbers
        self._lengths, self._sums = lengths, sums
        self._room, self._is_permuted = int(numbers[0]), bool(numbers[1])
        self.elements = int(sums[-1])
        """Of all documents together."""

    @classmethod
    def plan(cls, lengths: Numbers, room: int, seed: int, *, shuffle: bool) -> Self:
        """Plan rows of ``room`` elements of samples with these ``lengths``, int64 ``[samples]``.

        Raises ``ValueError`` if there is no element.
        """
        known = np.maximum(lengths, 0).astype(np.int32)
        if not known.any():
            raise ValueError("no sample has an element")
        if shuffle:
            known = known[_permuted(len(known), seed, np.arange(len(known)))]
        sums = np.append(0, np.cumsum(np.add.reduceat(known, np.arange(0, len(known), STRIDE), dtype=np.int64)))
        return cls(known, sums, np.array([room, shuffle], np.int64))

    @classmethod
    def from_arrays(cls, arrays: Tables) -> Self | None:
        """The rows in the arrays of an index; None without such rows."""
        if f"{CUTS_PREFIX}sums" not in arrays:
            return None
        return cls(*(arrays[f"{CUTS_PREFIX}{name}"] for name in _CUTS_NAMES))

    def to_arrays(self) -> dict[str, Table]:
        """The rows as arrays of an index, for ``from_arrays``."""
        return {f"{CUTS_PREFIX}{name}": array for name, array in zip(_CUTS_NAMES, self._arrays, strict=True)}

    def __len__(self) -> int:
        """The rows of an epoch."""
        return (self.elements + self._room - 1) // self._room

    def documents_and_costs(self) -> tuple[Numbers, Numbers]:
        """The parts of documents in each row, and the sum of their squares: int64 ``[rows]``."""
        ends = np.cumsum(self._lengths, dtype=np.int64)
        rows, begins, part_ends = self._cut(ends - self._lengths, ends)[1:]
        costs = np.zeros(len(self), np.int64)
        np.add.at(costs, rows, (part_ends - begins) ** 2)
        return np.bincount(rows, minlength=len(self)), costs

    def contents(
        self, epoch: int, rows: Numbers, seed: int, *, shuffle: bool, order: EpochOrder | None = None
    ) -> Numbers:
        """Return the parts in some ``rows`` of an epoch, int64 ``[rows]``.

        Returns int64 ``[parts, 4]``, row by row: the row's place in ``rows``, the sample, the first
        of its elements, and their number. ``order``: of the rows, in place of the shuffle of all.
        """
        if order is not None:
            rows = order.samples_at(epoch, rows)
        elif shuffle:
            rows = Permutation(len(self), (seed, epoch, _ROWS))(rows.astype(np.uint64)).astype(np.int64)
        return np.concatenate([self._row(place, row, seed) for place, row in enumerate(rows.tolist())])

    def places(
        self, epochs: Numbers, samples: Numbers, seed: int, *, shuffle: bool, order: EpochOrder | None = None
    ) -> Numbers:
        """Return the rows that have parts of ``samples``, each in its epoch; int64 ``[samples]``.

        Returns int64 ``[parts, 3]``: the place in ``samples``, the row, and the first element of
        the part. The inverse of ``contents``; a sample without an element is in no row.
        """
        begins, ends = self._extents(samples, seed)
        which, rows, firsts, _part_ends = self._cut(begins, ends)
        epochs = np.broadcast_to(epochs, samples.shape)[which]
        if order is not None:
            for epoch in np.unique(epochs).tolist():
                rows[epochs == epoch] = order.places_of(epoch, rows[epochs == epoch])
        elif shuffle and rows.size:
            rows = Permutation(len(self), (seed, epochs, _ROWS)).inverse(rows.astype(np.uint64)).astype(np.int64)
        return np.stack([which, rows, firsts - begins[which]], axis=1)

    def parts_of(self, samples: Numbers, seed: int) -> Numbers:
        """Return the number of parts of each sample: int64 ``[samples]``."""
        which, *_parts = self._cut(*self._extents(samples, seed))
        return np.bincount(which, minlength=len(samples))

    def _extents(self, samples: Numbers, seed: int) -> tuple[Numbers, Numbers]:
        """Return where ``samples`` begin and end in the sequence: int64 ``[samples]`` each."""
        numbers = samples
        if self._is_permuted and samples.size:
            permutation = Permutation(len(self._lengths), (seed, _DOCUMENTS))
            numbers = permutation.inverse(samples.astype(np.uint64)).astype(np.int64)
        begins = np.zeros(len(samples), np.int64)
        by_number = np.argsort(numbers, kind="stable")
        blocks, firsts = np.unique(numbers[by_number] // STRIDE, return_index=True)
        for block, mine in zip(blocks.tolist(), np.split(by_number, firsts[1:]), strict=False):
            lengths = self._lengths[block * STRIDE : (block + 1) * STRIDE]
            inside = np.append(0, np.cumsum(lengths, dtype=np.int64))
            begins[mine] = self._sums[block] + inside[numbers[mine] - block * STRIDE]
        return begins, begins + self._lengths[numbers]

    def _row(self, place: int, row: int, seed: int) -> Numbers:
        first, end = row * self._room, min((row + 1) * self._room, self.elements)
        block = int(np.searchsorted(self._sums, first, "right")) - 1
        block_end = int(np.searchsorted(self._sums, end, "left"))
        lengths = self._lengths[block * STRIDE : block_end * STRIDE]
        ends = self._sums[block] + np.cumsum(lengths, dtype=np.int64)
        documents, rows, begins, part_ends = self._cut(ends - lengths, ends)
        mine = rows == row
        documents, begins = documents[mine], begins[mine]
        numbers = documents + block * STRIDE
        samples = _permuted(len(self._lengths), seed, numbers) if self._is_permuted else numbers
        firsts = begins - (ends - lengths)[documents]
        return np.stack([np.full(len(samples), place), samples, firsts, part_ends[mine] - begins], axis=1)

    def _cut(self, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Cut documents from ``begins`` to ``ends`` at rows: document, row, begin, end."""
        first_rows = begins // self._room
        counts = np.where(ends > begins, (ends - 1) // self._room - first_rows + 1, 0)
        documents = np.repeat(np.arange(len(begins)), counts)
        rows = first_rows[documents] + np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        return (
            documents,
            rows,
            np.maximum(begins[documents], rows * self._room),
            np.minimum(ends[documents], (rows + 1) * self._room),
        )


def _permuted(length: int, seed: int, numbers: Numbers) -> Numbers:
    """The samples that stand at some places of the order of all documents."""
    return Permutation(length, (seed, _DOCUMENTS))(numbers.astype(np.uint64)).astype(np.int64)


WINDOWS_MIN = 16
"""Windows of an epoch, if that leaves ``WINDOW_MIN`` parts for each: with few windows, documents
would often meet again in the next epoch."""
WINDOW_MIN = 64
PREFIX = "packs."
"""Of the arrays that a packed stream adds to the index of its source."""
_NAMES = "table", "later", "numbers", "strata", "splits"
_STRATA_KEY = np.uint64(0x57A7)
_WITHIN, _LAST, _PACKS = 1, 2, 3
"""Which of the bijections of one epoch."""

Long: TypeAlias = Literal["split", "crop", "drop"]


class PackLimits(NamedTuple):
    """``length``: elements of a pack. ``documents``: the most parts in it. ``window``: in parts.

    ``patches``: the most of the second length that parts may have, 0 without one.
    """

    length: int
    documents: int
    window: int
    too_long: Long
    patches: int = 0


def packed_in(arrays: Tables) -> "Packs | Cuts | PartPacks | None":
    """The rows of several samples in the arrays of an index; None if its stream is not packed."""
    if PARTS_FIRSTS in arrays:
        return PartPacks.from_arrays(arrays)
    packs = Packs.from_arrays(arrays)
    return Cuts.from_arrays(arrays) if packs is None else packs


class Packs:
    """The packs of every epoch. See the drawing.

    ``table``: the sample of each part, longest part first, int32 or int64 ``[parts]``. ``later``:
    the parts that are not the first of their sample, int64 ``[later, 2]``, by their place in the
    table: that place, and the first element. ``strata``: int32, those of pack 0, then of pack 1,
    and so on; pack ``p`` of a window has those from ``splits[p]`` to ``splits[p + 1]``, int64.
    ``numbers``: the windows, and the elements of all parts, int64 ``[2]``.
    """

    def __init__(
        self,
        table: Table,
        later: NDArray[np.int64],
        numbers: NDArray[np.int64],
        strata: NDArray[np.int32],
        splits: NDArray[np.int64],
    ) -> None:
        self._arrays: tuple[Table, ...] = table, later, numbers, strata, splits
        self._table, self._later, self._strata, self._splits = table, later, strata, splits
        self._windows = int(numbers[0])
        self.elements = int(numbers[1])
        """Of all parts together."""
        self._of_a_window = len(splits) - 1

    @classmethod
    def plan(cls, lengths: NDArray[np.int64], limits: PackLimits, patches: NDArray[np.int64] | None = None) -> Self:
        """Plan the packs of samples with these ``lengths``, int64 ``[samples]``.

        ``patches``: a second length, which ``limits`` limit, too; no sample is cut then. A sample
        of length 0 or less is in no pack. Raises ``ValueError`` if no sample is in one.
        """
        if patches is not None:
            lengths = np.where(patches <= limits.patches, lengths, 0)
        samples, starts, costs = _parts(lengths, limits)
        if not len(costs):
            raise ValueError("no sample has a length that fits a pack")
        second = np.zeros_like(costs) if patches is None else patches[samples]
        order = np.lexsort((-second, -costs))
        table, starts = samples[order], starts[order]
        later = np.flatnonzero(starts)
        windows = max(len(table) // limits.window, min(WINDOWS_MIN, len(table) // WINDOW_MIN), 1)
        firsts = np.arange(0, len(table), windows)
        packs = template(costs[order][firsts].tolist(), limits, np.maximum.reduceat(second[order], firsts).tolist())
        splits = np.cumsum([0, *map(len, packs)], dtype=np.int64)
        return cls(
            table.astype(np.int32 if len(lengths) <= np.iinfo(np.int32).max else np.int64),
            np.stack([later, starts[later]], axis=1),
            np.array([windows, costs.sum()], np.int64),
            np.concatenate(packs).astype(np.int32),
            splits,
        )

    @classmethod
    def from_arrays(cls, arrays: Tables) -> Self | None:
        """The packs in the arrays of an index; None without packs."""
        if f"{PREFIX}table" not in arrays:
            return None
        return cls(*(arrays[f"{PREFIX}{name}"] for name in _NAMES))

    def to_arrays(self) -> dict[str, Table]:
        """The packs as arrays of an index, for ``from_arrays``."""
        return {f"{PREFIX}{name}": array for name, array in zip(_NAMES, self._arrays, strict=True)}

    def __len__(self) -> int:
        """The packs of an epoch."""
        return self._windows * self._of_a_window

    @property
    def documents_of_a_pack(self) -> tuple[int, int]:
        """The least and the most documents in a pack."""
        counts = np.diff(self._splits)
        return int(counts.min()), int(counts.max())

    @property
    def parts(self) -> int:
        """The parts of documents in an epoch."""
        return len(self._table)

    def attention(self, lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
        """Return the cost of attention in each pack, its squared lengths: int64 ``[packs]``.

        ``lengths``: of all samples. Each pack counts as that of window 0 in the order of the table,
        which has the longest part of each stratum.
        """
        parts = self.contents(0, np.arange(self._of_a_window), 0, shuffle=False)
        costs = np.minimum(lengths[parts[:, 1]] - parts[:, 2], room) ** 2
        of_window = np.zeros(self._of_a_window, np.int64)
        np.add.at(of_window, parts[:, 0], costs)
        return np.tile(of_window, self._windows)

    def contents(
        self, epoch: int, packs: NDArray[np.int64], seed: int, *, shuffle: bool, order: EpochOrder | None = None
    ) -> NDArray[np.int64]:
        """Return the parts in some ``packs`` of an epoch, int64 ``[packs]``.

        ``order``: of the packs, in place of the shuffle of all.

        Returns int64 ``[parts, 3]``, pack by pack: the pack's place in ``packs``, the sample, and
        the first of its elements.
        """
        places = packs
        if order is not None:
            places = order.samples_at(epoch, packs)
        elif shuffle:
            places = Permutation(len(self), (seed, epoch, _PACKS))(packs.astype(np.uint64)).astype(np.int64)
        windows, numbers = np.divmod(places, self._of_a_window)
        begins, ends = self._splits[numbers], self._splits[numbers + 1]
        strata = np.concatenate(
            [self._strata[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        ).astype(np.int64)
        members = np.repeat(windows, ends - begins)
        last, members_of_last = divmod(len(self._table), self._windows)
        is_whole = strata < last
        is_there = is_whole | (members < members_of_last)
        if shuffle:
            key = seed, epoch
            whole, shared = np.flatnonzero(is_whole), np.flatnonzero(is_there & ~is_whole)
            members[whole] = _shuffled(self._windows, (*key, _WITHIN), members[whole], strata[whole])
            if shared.size:
                members[shared] = _shuffled(members_of_last, (*key, _LAST), members[shared], strata[shared])
        found = (strata * self._windows + members)[is_there]
        parts = np.zeros((len(found), 3), np.int64)
        parts[:, 0] = np.repeat(np.arange(len(packs)), ends - begins)[is_there]
        parts[:, 1] = self._table[found]
        parts[:, 2] = self._first_elements(found)
        return parts

    def places(
        self,
        epochs: NDArray[np.int64],
        samples: NDArray[np.int64],
        seed: int,
        *,
        shuffle: bool,
        order: EpochOrder | None = None,
    ) -> NDArray[np.int64]:
        """Return the packs that have parts of ``samples``, each in its epoch; int64 ``[samples]``.

        Returns int64 ``[parts, 3]``: the place in ``samples``, the pack, and the first element of
        the part. The inverse of ``contents``; a sample without a part is in no pack.
        """
        first, behind = (np.searchsorted(self._sorted, samples, side) for side in ("left", "right"))
        counts = behind - first
        which = np.repeat(np.arange(len(samples)), counts)
        found = self._by_sample[np.arange(len(which)) + np.repeat(first - np.cumsum(counts) + counts, counts)]
        strata, members = np.divmod(found, self._windows)
        last, members_of_last = divmod(len(self._table), self._windows)
        epochs = np.broadcast_to(epochs, samples.shape)[which]
        if shuffle:
            for word, length, chosen in (
                (_WITHIN, self._windows, np.flatnonzero(strata < last)),
                (_LAST, members_of_last, np.flatnonzero(strata == last)),
            ):
                if chosen.size:
                    tweaks = mixed_all(strata[chosen].astype(np.uint64), _STRATA_KEY)
                    keyed = Permutation(length, (seed, epochs[chosen], word))
                    members[chosen] = keyed.inverse(members[chosen].astype(np.uint64), tweaks).astype(np.int64)
        packs = members * self._of_a_window + self._pack_of_stratum[strata]
        if order is not None:
            for epoch in np.unique(epochs).tolist():
                packs[epochs == epoch] = order.places_of(epoch, packs[epochs == epoch])
        elif shuffle and packs.size:
            packs = Permutation(len(self), (seed, epochs, _PACKS)).inverse(packs.astype(np.uint64)).astype(np.int64)
        return np.stack([which, packs, self._first_elements(found)], axis=1)

    def parts_of(self, samples: NDArray[np.int64], _seed: int) -> NDArray[np.int64]:
        """Return the number of parts of each sample, int64 ``[samples]``, as of ``Cuts``."""
        return np.searchsorted(self._sorted, samples, "right") - np.searchsorted(self._sorted, samples, "left")

    @cached_property
    def _by_sample(self) -> NDArray[np.int64]:
        """The places of the table in the order of their samples."""
        return np.argsort(self._table, kind="stable")

    @cached_property
    def _sorted(self) -> Table:
        return self._table[self._by_sample]

    @cached_property
    def _pack_of_stratum(self) -> NDArray[np.int64]:
        """The number of the pack, in its window, that has each stratum."""
        packs = np.empty(len(self._strata), np.int64)
        packs[self._strata] = np.repeat(np.arange(self._of_a_window), np.diff(self._splits))
        return packs

    def _first_elements(self, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first element of each part, by its place in the table: int64 ``[parts]``."""
        if not len(self._later):
            return np.zeros(len(found), np.int64)
        nearest = np.minimum(np.searchsorted(self._later[:, 0], found), len(self._later) - 1)
        return np.where(self._later[nearest, 0] == found, self._later[nearest, 1], 0)


def _shuffled(
    length: int, key: tuple[int, ...], indices: NDArray[np.int64], strata: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Apply each stratum's bijection of [0, length) to its index."""
    tweaks = mixed_all(strata.astype(np.uint64), _STRATA_KEY)
    return Permutation(length, key)(indices.astype(np.uint64), tweaks).astype(np.int64)


def _parts(
    lengths: NDArray[np.int64], limits: PackLimits
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut, shorten or leave out long samples: (sample, first element, length) of each part."""
    room = limits.length
    if limits.too_long == "split":
        counts = np.maximum(-(-lengths // room), 0)
        samples = np.repeat(np.arange(len(lengths)), counts)
        starts = (np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)) * room
        return samples, starts, np.minimum(lengths[samples] - starts, room)
    fits = (lengths > 0) & ((lengths <= room) | (limits.too_long == "crop"))
    samples = np.flatnonzero(fits)
    return samples, np.zeros_like(samples), np.minimum(lengths[samples], room)


def template(costs: Sequence[int], limits: PackLimits, patches: Sequence[int] = ()) -> list[list[int]]:
    """Pack parts of ``costs``, descending, each where the least room is left that is enough.

    ``patches``: their second length, if it is limited, too. Returns the numbers of the parts in
    each pack, which are at most ``documents``.
    """
    packs: list[list[int]] = []
    patches_left: list[int] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    """The keys of ``with_room``, ascending."""
    for part, cost in enumerate(costs):
        needed = patches[part] if patches else 0
        found = (
            (rooms[at], pack)
            for at in range(bisect_left(rooms, cost), len(rooms))
            for pack in reversed(with_room[rooms[at]])
            if patches_left[pack] >= needed
        )
        room, pack = next(found, (limits.length, len(packs)))
        left = room - cost
        if pack == len(packs):
            packs.append([])
            patches_left.append(limits.patches)
        else:
            if with_room[room][-1] == pack:  # as always without patches
                with_room[room].pop()
            else:
                with_room[room].remove(pack)
            if not with_room[room]:
                del with_room[room], rooms[bisect_left(rooms, room)]
        packs[pack].append(part)
        patches_left[pack] -= needed
        if left and len(packs[pack]) < limits.documents:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(pack)
    return packs


PARTS_FIRSTS = "parts.firsts"


class PartPacks:
    """The packs of a mix whose shares change: those of each part, which share no row.

        row of the run  --Mixture-->  part, pass, place  --Packs | Cuts-->  documents

    So the shares are those of rows, and a part goes on where it was: each pass has all of its
    documents once, and is shuffled as an epoch of the part alone.

    ``packs``: of each part. ``firsts``: the first sample of each, and the number of all, int64
    ``[parts + 1]``.
    """

    def __init__(self, packs: Sequence[Packs | Cuts], firsts: Numbers) -> None:
        self.packs, self._firsts = tuple(packs), firsts
        self.elements = sum(one.elements for one in packs)
        """Of all documents together."""

    @classmethod
    def from_arrays(cls, arrays: Tables) -> Self:
        """The packs in the arrays of an index."""
        firsts: Numbers = arrays[PARTS_FIRSTS]
        parts = []
        for number in range(len(firsts) - 1):
            prefix = _part_prefix(number)
            own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            packs = packed_in(own)
            assert isinstance(packs, Packs | Cuts), "each part has some"
            parts.append(packs)
        return cls(parts, firsts)

    def to_arrays(self) -> dict[str, Table]:
        """The packs as arrays of an index, for ``from_arrays``."""
        own = {
            f"{_part_prefix(number)}{name}": array
            for number, packs in enumerate(self.packs)
            for name, array in packs.to_arrays().items()
        }
        return {PARTS_FIRSTS: self._firsts, **own}

    def __len__(self) -> int:
        """The packs of a pass of each part."""
        return sum(map(len, self.packs))

    def contents(self, epoch: int, rows: Numbers, seed: int, *, shuffle: bool, order: EpochOrder | None) -> Numbers:
        """Return the parts of documents in some ``rows``, as ``Packs`` or ``Cuts`` of them do."""
        assert isinstance(order, Mixture), "it says whose row it is"
        found = []
        for part, number, chosen, places in _passes(order, epoch, rows):
            own = self.packs[part].contents(number, places, part_seed(seed, part), shuffle=shuffle)
            own[:, 0] = chosen[own[:, 0]]
            own[:, 1] += self._firsts[part]
            found.append(own)
        parts = np.concatenate(found)
        return parts[np.argsort(parts[:, 0], kind="stable")]

    def places(
        self, epochs: Numbers, samples: Numbers, seed: int, *, shuffle: bool, order: EpochOrder | None
    ) -> Numbers:
        """Return the rows that have parts of ``samples``, as ``Packs``; looks at whole epochs."""
        assert isinstance(order, Mixture), "as above"
        epochs, found = np.broadcast_to(epochs, samples.shape), [np.zeros((0, 3), np.int64)]
        for epoch in np.unique(epochs).tolist():
            for part, number, rows, places in _passes(order, epoch, np.arange(order.rows)):
                low, high = self._firsts[part : part + 2]
                mine = np.flatnonzero((epochs == epoch) & (samples >= low) & (samples < high))
                of_part = part_seed(seed, part)
                own = self.packs[part].places(np.full(len(mine), number), samples[mine] - low, of_part, shuffle=shuffle)
                by_place = np.argsort(places)
                at = np.minimum(np.searchsorted(places[by_place], own[:, 1]), len(places) - 1)
                is_there = places[by_place[at]] == own[:, 1]
                found.append(np.stack([mine[own[:, 0]], rows[by_place[at]], own[:, 2]], axis=1)[is_there])
        parts = np.concatenate(found)
        return parts[np.lexsort((parts[:, 1], parts[:, 0]))]

    def parts_of(self, samples: Numbers, seed: int) -> Numbers:
        """Return the parts of each sample in a pass: int64 ``[samples]``."""
        counts = np.zeros(len(samples), np.int64)
        part_of = np.searchsorted(self._firsts, samples, "right") - 1
        for part in np.unique(part_of).tolist():
            mine = part_of == part
            counts[mine] = self.packs[part].parts_of(samples[mine] - self._firsts[part], part_seed(seed, part))
        return counts


def part_seed(seed: int, part: int) -> int:
    """The seed of the packs of a part."""
    return mixed((seed, part, _PACKS))


def _part_prefix(number: int) -> str:
    return f"parts.{number}."


def _passes(order: Mixture, epoch: int, rows: Numbers) -> Iterator[tuple[int, int, Numbers, Numbers]]:
    """Rows by their part and its pass: both, which of ``rows``, and the places in the pass."""
    parts, passes, places = order.passes_at(epoch, rows)
    for part, number in np.unique(np.stack([parts, passes], axis=1), axis=0).tolist():
        chosen = np.flatnonzero((parts == part) & (passes == number))
        yield part, number, chosen, places[chosen]
