"""One sample of arrays in files, or the reason why there is none. Workers only.

Files are read, not mapped: a mapped file that somebody cuts ends the process that touches it, with
SIGBUS.

Invariant: what ``read`` returns are the bytes of one sample, in this machine's order, valid until
the next ``read``.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.arrays.index import ArrayField, Run
from batchd.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex, readable
from batchd.storage.reader import BytesReader, Extent, RemoteBytes


class ArrayReader:
    """Reads any sample of arrays in files."""

    def __init__(
        self, source: NpySource | NpzSource | RawSource, index: SourceIndex, max_bytes: int, storage: Storage
    ) -> None:
        del source  # the index says all
        facts = index.facts
        self._index = index
        self._max_bytes = max_bytes
        self._files = [os.fsencode(path) for path in index.place["files"]]
        self._parts = [[Run(*run) for run in runs] for _samples, *runs in facts["parts"]]
        self._firsts = list(accumulate((samples for samples, *_runs in facts["parts"]), initial=0))
        self._fields = [
            ArrayField(name, run, offset, dtype, tuple(shape), order)
            for name, run, offset, dtype, shape, order in facts["fields"]
        ]
        remotes = (RemoteBytes(storage, self._files[0], index.place) for _run in self._parts[0])
        self._bytes = [BytesReader(remote, max_bytes, "file") for remote in remotes]

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        runs, place = self._find(sample)
        data = [self._read_run(number, run, place) for number, run in enumerate(runs)]
        return {field.name: _array(field, data[field.run]) for field in self._fields}

    def prefetch(self, samples: Sequence[int]) -> None:
        """Ask servers for all these samples at once."""
        for number, reader in enumerate(self._bytes):
            found = ((runs[number], place) for runs, place in map(self._find, samples))
            reader.prefetch(self._extent(run, place) for run, place in found if run.pieces == 1)

    def known(self, sample: int) -> Mapping[str, Value]:
        """The index holds no values."""
        del sample
        return {}

    def name(self, sample: int) -> str:
        """See ``kinds.Reader``. Samples are counted from 0, as numpy does."""
        runs, place = self._find(sample)
        run = runs[0]
        return f"{readable(self._files[run.file])}: sample {place} (byte {run.first + place * run.stride})"

    def close(self) -> None:
        """Give back what is open."""
        for reader in self._bytes:
            reader.close()

    def _extent(self, run: Run, place: int) -> Extent:
        return Extent(self._files[run.file], run.first + place * run.stride, run.size)

    def _find(self, sample: int) -> tuple[list[Run], int]:
        """The runs of a sample, and its number in its part."""
        part = bisect_right(self._firsts, self._index.checked(sample)) - 1
        return self._parts[part], sample - self._firsts[part]

    def _read_run(self, number: int, run: Run, place: int) -> memoryview:
        """The bytes of one run. Each has a reader, and so a buffer, of its own."""
        file, start = self._files[run.file], run.first + place * run.stride
        reader = self._bytes[number]
        try:
            if run.pieces == 1:
                return reader.read_extent(file, start, run.size)
            pieces = (reader.read_extent(file, start + piece * run.gap, run.size) for piece in range(run.pieces))
            return memoryview(b"".join(map(bytes, pieces)))
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{error} ({readable(file)})" if number else str(error)) from None


def _array(field: ArrayField, data: memoryview) -> NDArray[Any]:
    dtype = np.dtype(field.dtype)
    items = np.frombuffer(data, dtype, prod(field.shape), field.offset)
    if dtype.kind == "b" and items.view(np.uint8).max() > 1:
        raise SampleUnreadable(f"{field.name!r} has a byte {items.view(np.uint8).max()}, which is not bool: 0 or 1")
    array = items.reshape(field.shape, order="F" if field.order == "F" else "C")
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


READERS = dict.fromkeys((NpySource, NpzSource, RawSource), ArrayReader)
