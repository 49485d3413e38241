"""Read samples of sources that are made of others. Workers only.

concat     0 ........ n0-1 | n0 ........ n0+n1-1 | ...      the index holds nothing per sample
           part 0          | part 1              |
others     arrays of the index have the part of each sample, and its number in the part

Invariant: the reader of a part is opened for its first sample.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.values import Value
from batchd.data.sources import interface
from batchd.data.sources.composed.options import ConcatSource, MixSource, SubsetSource, parts_of
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex


class ComposedReader:
    """Reads samples of several parts."""

    def __init__(
        self, source: ConcatSource | MixSource | SubsetSource, index: SourceIndex, max_bytes: int, storage: Storage
    ) -> None:
        self._parts = [part for _key, part in parts_of(source)]
        self._source_field = "" if isinstance(source, SubsetSource) else source.source_field
        self._index = index
        self._max_bytes = max_bytes
        self._storage = storage
        self._readers: dict[int, interface.Reader] = {}
        self._starts = list(accumulate((samples for samples, _facts in index.facts["parts"]), initial=0))
        self._numbers, self._part_of = index.arrays.get("numbers"), index.arrays.get("parts")
        self._with_points = False
        self.points: Mapping[str, memoryview] = {}

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        part, number = self._place(sample)
        reader = self._reader(part)
        values = reader.read(number)
        self.points = reader.points if isinstance(reader, interface.ReadsPoints) else {}
        return self._with_source(values, part)

    def read_points(self) -> bool:
        """See ``interface.ReadsPoints``: each part says for itself whether it has any."""
        self._with_points = True
        return True

    def prefetch(self, samples: Sequence[int]) -> None:
        """Have every part read its samples ahead."""
        wanted: dict[int, list[int]] = {}
        for part, number in map(self._place, samples):
            wanted.setdefault(part, []).append(number)
        for part in {*wanted, *self._readers}:
            interface.read_ahead(self._reader(part), wanted.get(part, ()))

    def lengths(self, samples: Sequence[int], field: str) -> NDArray[np.int64]:
        """See ``interface.ReadsLengths``."""
        found = np.zeros(len(samples), np.int64)
        parts, numbers = np.array([self._place(sample) for sample in samples], np.int64).reshape(-1, 2).T
        for part in np.unique(parts).tolist():
            if isinstance(reader := self._reader(part), interface.ReadsLengths):
                found[parts == part] = reader.lengths(numbers[parts == part].tolist(), field)
        return found

    def known(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        part, number = self._place(sample)
        return self._with_source(self._reader(part).known(number), part)

    def name(self, sample: int) -> str:
        """See ``interface.Reader``."""
        part, number = self._place(sample)
        return self._reader(part).name(number)

    def file(self, sample: int) -> bytes | None:
        """See ``interface.NamesFiles``."""
        part, number = self._place(sample)
        reader = self._reader(part)
        return reader.file(number) if isinstance(reader, interface.NamesFiles) else None

    def part_with(self, sample: int) -> tuple[interface.Reader, SourceIndex, int]:
        """See ``interface.HasParts``."""
        part, number = self._place(sample)
        return self._reader(part), interface.part_of(self._index, part), number

    def close(self) -> None:
        """Close all that are open."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _with_source(self, values: Mapping[str, Value], part: int) -> Mapping[str, Value]:
        return {**values, self._source_field: part} if self._source_field else values

    def _place(self, sample: int) -> tuple[int, int]:
        """The part of a sample, and its number in the part. Raises ``IndexError``."""
        sample = self._index.checked(sample)
        if self._numbers is not None:
            return 0 if self._part_of is None else int(self._part_of[sample]), int(self._numbers[sample])
        part = bisect_right(self._starts, sample) - 1
        return part, sample - self._starts[part]

    def _reader(self, part: int) -> interface.Reader:
        reader = self._readers.get(part)
        if reader is None:
            reader = interface.open_reader(
                self._parts[part], interface.part_of(self._index, part), self._max_bytes, self._storage
            )
            if self._with_points and isinstance(reader, interface.ReadsPoints):
                reader.read_points()
            self._readers[part] = reader
        return reader


READERS = dict.fromkeys((ConcatSource, MixSource, SubsetSource), ComposedReader)
