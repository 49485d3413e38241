"""Rows that are cut from all documents as one sequence: pure code, for the daemon and workers.

    documents   | d7 .......... | d2 .. | d5 ...................... | d0 ... | ...   in one order,
    rows        |   row 0   |   row 1   |   row 2   |   row 3   |   row 4 ...        of the seed

All rows but the last are full, and no element is lost. The order of the documents is one keyed
permutation for all epochs, so the same documents share a row in each; the shuffle of an epoch
permutes the rows. A row is found by a search in the sums of every ``STRIDE`` documents.

Invariant: an epoch has every element of every document exactly once.
"""

from typing import Self

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import EpochOrder, Permutation, Table, Tables

STRIDE = 1024
PREFIX = "cuts."
_NAMES = "lengths", "sums", "numbers"
"""Of the arrays that the stream adds to the index of its source."""
_DOCUMENTS, _ROWS = 1, 2
"""Which permutation of a seed."""

Numbers = NDArray[np.int64]


class Cuts:
    """The rows of every epoch. See the drawing.

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
        if f"{PREFIX}sums" not in arrays:
            return None
        return cls(*(arrays[f"{PREFIX}{name}"] for name in _NAMES))

    def to_arrays(self) -> dict[str, Table]:
        """The rows as arrays of an index, for ``from_arrays``."""
        return {f"{PREFIX}{name}": array for name, array in zip(_NAMES, self._arrays, strict=True)}

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
