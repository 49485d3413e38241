"""Read samples of arrays in files. Workers only.

Samples that are read one by one are not mapped: if a mapped file is truncated, a process that
touches it dies of SIGBUS. Only rows that are copied by ``data.storage.rows`` are, which guards
that.

Invariant: ``read`` returns the values of one sample, in this machine's byte order, valid until the
next ``read``.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.location import is_url
from batchd.data.samples.values import Value
from batchd.data.sources.arrays.index import Run, StoredArray
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.interface import PlainReader
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes, RowsPart
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

    def read_rows(
        self, samples: NDArray[np.int64], chunks: Sequence[Mapping[str, Array]], begin: Callable[[int], None]
    ) -> None:
        """See ``interface.ReadsRows``."""
        name = self._fields[0][0]
        ends = list(accumulate((len(chunk[name]) for chunk in chunks), initial=0))
        if len(self._parts) > 1 and len(chunks) > 1:  # of hundreds of parts, a chunk may need few
            for number, (first, end) in enumerate(pairwise(ends)):
                self.read_rows(samples[first:end], chunks[number : number + 1], partial(_begin_other, begin, number))
            return
        parts = np.searchsorted(self._firsts, samples, side="right") - 1 if len(self._parts) > 1 else None
        for number, reader in enumerate(self._bytes):
            fields = [(name, array) for name, of, array in self._fields if of == number]
            size = self._parts[0][number].size
            whole = [_whole_rows(chunk, fields, size) for chunk in chunks]
            made = [np.empty((end - start, size), np.uint8) for start, end in pairwise(ends) if None in whole]
            memories = [data.reshape(-1).data for data in made] or whole
            for part in (0,) if parts is None else np.unique(parts).tolist():
                run = self._parts[part][number]
                starts = run.first + (samples - self._firsts[part]) * run.stride
                chosen = None if parts is None else parts == part
                reader.read_rows(self._files[run.file], size, _parts_of(starts, chosen, ends, memories, begin))
            for chunk, data in zip(chunks, made, strict=False):
                for name, array in fields:
                    chunk[name][...] = array.rows(repr(name), data)

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


def _begin_other(begin: Callable[[int], None], number: int, _only: int) -> None:
    """Begin the chunk with this ``number``, which is read as the only one."""
    begin(number)


def _parts_of(
    starts: NDArray[np.int64],
    chosen: NDArray[np.bool_] | None,
    ends: Sequence[int],
    memories: Sequence[memoryview | None],
    begin: Callable[[int], None],
) -> Iterator[RowsPart]:
    """The rows of each chunk that are in one file: those that are ``chosen``, bool ``[samples]``.

    ``starts`` of all samples: int64. Chunk ``n`` has samples ``ends[n]`` to ``ends[n + 1]``.
    """
    every = np.arange(len(starts))
    for chunk, (first, end) in enumerate(pairwise(ends)):
        memory = memories[chunk]
        assert memory is not None, "all chunks have rows, or none has"
        mine = starts[first:end]
        places = every[: end - first] if chosen is None else np.flatnonzero(chosen[first:end])
        if len(places):
            begin(chunk)
            yield RowsPart(mine if chosen is None else mine[places], places, memory)


def _whole_rows(rows: Mapping[str, Array], fields: list[tuple[str, StoredArray]], size: int) -> memoryview | None:
    """The memory of ``rows``, if a run reads one field unchanged: then it copies nothing."""
    (name, array), *others = fields
    numbers = rows[name]
    is_same = not others and numbers.dtype == array.dtype and numbers.dtype.kind != "b"
    if not is_same or numbers.nbytes != len(numbers) * size or not numbers.flags.c_contiguous:
        return None
    return numbers.reshape(-1).view(np.uint8).data


READERS = dict.fromkeys((NpySource, NpzSource, RawSource), ArrayReader)
