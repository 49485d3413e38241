"""Read samples of arrays in files. Workers only.

Files are read, not mapped: if a mapped file is truncated, a process that touches it dies of SIGBUS.

Invariant: ``read`` returns the values of one sample, in this machine's byte order, valid until the
next ``read``.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.arrays.index import Run, StoredArray
from batchd.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.sources.interface import PlainReader
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex, readable
from batchd.storage.location import is_url
from batchd.storage.reader import BytesReader, Extent, RemoteBytes
from batchd_wire.views import Array


class ArrayReader(PlainReader):
    """Reads any sample of arrays in files."""

    def __init__(self, _source: SourceOptions, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        parts = index.facts["parts"]
        self._index = index
        self._files = [os.fsencode(path) for path in index.place["files"]]
        self._parts = [[Run(*run) for run in runs] for _samples, *runs in parts]
        self._firsts = list(accumulate((samples for samples, *_runs in parts), initial=0))
        self._fields = [
            (name, run, StoredArray(offset, np.dtype(dtype), tuple(shape), order == "F"))
            for name, run, offset, dtype, shape, order in index.facts["fields"]
        ]
        remotes = (RemoteBytes(storage, self._files[0], index.place) for _run in self._parts[0])
        self._bytes = [BytesReader(remote, max_bytes, "file") for remote in remotes]

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        runs, place = self._find(sample)
        data = [self._read_run(number, run, place) for number, run in enumerate(runs)]
        return {name: array.numbers(repr(name), data[run]) for name, run, array in self._fields}

    def reads_rows(self) -> bool:
        """See ``interface.ReadsRows``."""
        is_whole = all(run.pieces == 1 for runs in self._parts for run in runs)
        return (
            is_whole and not any(array.fortran for *_place, array in self._fields) and not any(map(is_url, self._files))
        )

    def read_rows(self, samples: NDArray[np.int64], rows: Mapping[str, Array]) -> None:
        """See ``interface.ReadsRows``."""
        if len(self._parts) == 1:
            chosen = [(0, np.arange(len(samples)))]
        else:
            parts = np.searchsorted(self._firsts, samples, side="right") - 1
            chosen = [(int(part), np.flatnonzero(parts == part)) for part in np.unique(parts)]
        for number, reader in enumerate(self._bytes):
            fields = [(name, array) for name, of, array in self._fields if of == number]
            size = self._parts[0][number].size
            data = _whole_rows(rows, fields, size)
            made = np.empty((len(samples), size), np.uint8) if data is None else data
            for part, places in chosen:
                run = self._parts[part][number]
                starts = run.first + (samples[places] - self._firsts[part]) * run.stride
                reader.read_rows(self._files[run.file], starts, made, places)
            if data is None:
                for name, array in fields:
                    rows[name][...] = array.rows(repr(name), made)

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request all these samples from servers at once."""
        for number, reader in enumerate(self._bytes):
            found = ((runs[number], place) for runs, place in map(self._find, samples))
            reader.prefetch(
                Extent(self._files[run.file], run.first + place * run.stride, run.size)
                for run, place in found
                if run.pieces == 1
            )

    def name(self, sample: int) -> str:
        """See ``interface.Reader``. Samples are counted from 0, as numpy does."""
        runs, place = self._find(sample)
        run = runs[0]
        return f"{readable(self._files[run.file])}: sample {place} (byte {run.first + place * run.stride})"

    def close(self) -> None:
        """Close the files."""
        for reader in self._bytes:
            reader.close()

    def _find(self, sample: int) -> tuple[list[Run], int]:
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


def _whole_rows(
    rows: Mapping[str, Array], fields: list[tuple[str, StoredArray]], size: int
) -> NDArray[np.uint8] | None:
    """The memory of ``rows``, if a run reads one field unchanged: then it copies nothing."""
    (name, array), *others = fields
    numbers = rows[name]
    is_same = numbers.dtype == array.dtype and array.dtype.kind != "b" and array.size == size
    if others or not is_same or not numbers.flags.c_contiguous:
        return None
    return numbers.reshape(-1).view(np.uint8).reshape(len(numbers), size)


READERS = dict.fromkeys((NpySource, NpzSource, RawSource), ArrayReader)
