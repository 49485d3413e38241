"""The samples of sources that are made of others. Workers only.

concat     0 ........ n0-1 | n0 ........ n0+n1-1 | ...      nothing is kept for each sample
of part 0       | of part 1           |
others     arrays of the index say the part of a sample, and its number within the part
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from numpy.typing import NDArray

from batchd.samples.values import Value
from batchd.sources.composed.options import ConcatSource, MixSource, SubsetSource
from batchd.sources.interface import Reader, open_reader, read_ahead
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex


class PartReaders:
    """The readers of all parts, each opened when its first sample is asked for."""

    def __init__(self, parts: Sequence[SourceOptions], index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._parts = parts
        self._storage = storage
        self._index = index
        self._max_bytes = max_bytes
        self._readers: dict[int, Reader] = {}

    def __getitem__(self, number: int) -> Reader:
        reader = self._readers.get(number)
        if reader is None:
            part = self._parts[number]
            reader = open_reader(part, self._part(number), self._max_bytes, self._storage)
            self._readers[number] = reader
        return reader

    def read_ahead(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """Have every part read ahead what is wanted of it."""
        for number in {*wanted, *self._readers}:
            read_ahead(self[number], wanted.get(number, ()))

    def close(self) -> None:
        """Close all that are open."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _part(self, number: int) -> SourceIndex:
        samples, facts = self._index.facts["parts"][number]
        prefix = f"{number}/"
        arrays: dict[str, NDArray[Any]] = {
            name.removeprefix(prefix): array for name, array in self._index.arrays.items() if name.startswith(prefix)
        }
        return SourceIndex(samples, facts, arrays, self._index.place["parts"][number], "")


Places: TypeAlias = Callable[[int], tuple[int, int]]
"""The part that a sample of the whole is of, and its number within it. Raises ``IndexError`` where there is no such sample."""


class ComposedReader:
    """Samples of several parts."""

    def __init__(self, readers: PartReaders, places: Places, source_field: str = "") -> None:
        self._readers = readers
        self._places = places
        self._source_field = source_field
        self.close = readers.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        part, number = self._places(sample)
        return self._with_source(self._readers[part].read(number), part)

    def prefetch(self, samples: Sequence[int]) -> None:
        """See ``kinds.read_ahead``."""
        wanted: dict[int, list[int]] = {}
        for part, number in map(self._places, samples):
            wanted.setdefault(part, []).append(number)
        self._readers.read_ahead(wanted)

    def known(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        part, number = self._places(sample)
        return self._with_source(self._readers[part].known(number), part)

    def name(self, sample: int) -> str:
        """See ``kinds.Reader``."""
        part, number = self._places(sample)
        return self._readers[part].name(number)

    def _with_source(self, values: Mapping[str, Value], part: int) -> Mapping[str, Value]:
        return {**values, self._source_field: part} if self._source_field else values


def _places_one_after_the_other(index: SourceIndex) -> Places:
    """Where samples are; nothing is kept for each."""
    starts = list(accumulate((samples for samples, _ in index.facts["parts"]), initial=0))

    def place(sample: int) -> tuple[int, int]:
        part = bisect_right(starts, index.checked(sample)) - 1
        return part, sample - starts[part]

    return place


def _places_in(index: SourceIndex) -> Places:
    """Where samples are, of an index with the arrays ``numbers``, int64 [n], and ``parts``, int [n], where there are several."""
    parts, numbers = index.arrays.get("parts"), index.arrays["numbers"]

    def place(sample: int) -> tuple[int, int]:
        sample = index.checked(sample)
        return 0 if parts is None else int(parts[sample]), int(numbers[sample])

    return place


def _open_concat(source: ConcatSource, index: SourceIndex, max_bytes: int, storage: Storage) -> ComposedReader:
    readers = PartReaders(source.sources, index, max_bytes, storage)
    return ComposedReader(readers, _places_one_after_the_other(index), source.source_field)


def _open_mix(source: MixSource, index: SourceIndex, max_bytes: int, storage: Storage) -> ComposedReader:
    readers = PartReaders(source.sources, index, max_bytes, storage)
    return ComposedReader(readers, _places_in(index), source.source_field)


def _open_subset(source: SubsetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> ComposedReader:
    return ComposedReader(PartReaders([source.of], index, max_bytes, storage), _places_in(index))


READERS = {ConcatSource: _open_concat, MixSource: _open_mix, SubsetSource: _open_subset}
