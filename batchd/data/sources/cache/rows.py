"""Reads the records of many samples at once, values straight into rows. Workers only.

    index[samples] -> heads -> values, into the rows of a batch
                            -> facts

All of it is done with arrays, not sample by sample. If anything is not as expected, nothing is
found, and the caller reads the samples one by one.

Invariant: what is found is what ``find`` gives for each of the samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Heads: TypeAlias = NDArray[np.void]
Starts: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
FindRows: TypeAlias = Callable[[int], Bytes]
"""Finds the memory ``[samples, length]`` for values of so many bytes each."""


class CacheRows(ABC):
    """Base of the caches: their index, and what they do for many samples."""

    _index: memoryview
    """The first byte of each sample's record, 0 if it is absent: uint64 ``[samples]``."""
    _entries: NDArray[np.uint64]
    """The same memory."""
    _head: np.dtype[np.void]
    """What a record begins with: ``sample``, ``facts_bytes``, ``values_bytes``, and more."""

    def __len__(self) -> int:
        """The number of samples of the source."""
        return len(self._index)

    def __contains__(self, sample: int) -> bool:
        return self._index[sample] != 0

    def has_all(self, samples: NDArray[np.int64]) -> bool:
        """True if all samples are in the cache, as far as the index tells."""
        return bool(self._entries[samples].all())

    def read_rows(self, samples: NDArray[np.int64], rows: FindRows) -> list[bytes] | None:
        """Copy the values of samples into ``rows(length)``; return the facts of each.

        None if a sample is absent or damaged, or values differ in length; rows are undefined then.
        """
        starts = self._entries[samples].astype(np.int64)
        heads = np.empty(len(starts), self._head)
        if not starts.all() or not self._copy(starts, heads.view(np.uint8).reshape(len(starts), -1)):
            return None
        length = int(heads["values_bytes"][0])
        is_expected = (heads["sample"] == samples) & (heads["values_bytes"] == length)
        if not is_expected.all() or not self._are_heads_whole(heads):
            return None
        starts += self._head.itemsize
        sizes = heads["facts_bytes"].astype(np.int64)
        values, facts = rows(length), self._facts(starts, sizes)
        if facts is None or not self._copy(starts + sizes, values) or not self._are_whole(heads, facts, values):
            return None
        return facts

    def _facts(self, starts: Starts, sizes: NDArray[np.int64]) -> list[bytes] | None:
        facts = np.empty(len(starts), object)
        for size in np.unique(sizes).tolist():
            places = np.flatnonzero(sizes == size)
            copied = np.empty((len(places), size), np.uint8)
            if not self._copy(starts[places], copied):
                return None
            facts[places] = copied.view(f"V{size}")[:, 0]
        found: list[bytes] = facts.tolist()
        return found

    @abstractmethod
    def _copy(self, starts: Starts, rows: Bytes) -> bool:
        """Copy as many bytes as a row has from each start; False if that cannot be."""

    def _are_heads_whole(self, _heads: Heads) -> bool:
        """True if heads are as they were written: memory keeps them so."""
        return True

    def _are_whole(self, _heads: Heads, _facts: list[bytes], _values: Bytes) -> bool:
        """True if facts and values are as they were written: memory keeps them so."""
        return True
