"""Read the records of tables. Workers only.

Invariant: ``read`` returns what the cells of one record say. A record with more or fewer cells than
the header, or with a cell that does not fit its column, is a bad sample as a whole.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.csv.options import CsvSource
from batchd.sources.csv.values import IMAGE, TOO_LONG, cell_reader, split_record
from batchd.sources.interface import PlainReader
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex, readable
from batchd.storage.paths import below_root, real_path
from batchd.storage.reader import BytesReader, Extent, RemoteBytes
from batchd_wire.wording import counted

_LINE_FEED = b"\n"[0]


class CsvReader(PlainReader):
    """Reads the chosen columns of any record."""

    def __init__(self, source: CsvSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        facts, place = index.facts, index.place
        self._index = index
        self._starts: NDArray[np.int64] = index.arrays["starts"]
        self._ends = [end for _records, end, _checksum in facts["files"]]
        self._firsts = list(accumulate((records for records, *_rest in facts["files"]), initial=0))
        self._files = [os.fsencode(path) for path in place["files"]]
        self._titles: list[str] = facts["titles"]
        self._cells = [(column.name, facts["cells"][column.name], cell_reader(column)) for column in source.columns]
        self._image: int | None = facts["image"]
        root = place["image_root"]
        folders = [os.path.dirname(file) if root is None else os.fsencode(root) for file in self._files]  # noqa: PTH120  bytes
        self._roots = list(map(real_path, folders))
        self._allow_outside_root = source.allow_outside_root
        self._delimiter = source.delimiter
        self._max_bytes = max_bytes
        self._bytes = BytesReader(RemoteBytes(storage, self._files[0], place), max_bytes, "file")
        self._images = BytesReader(RemoteBytes(storage, self._roots[0], {}), max_bytes)
        self.close = self._bytes.close  # images are not kept open

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        file, row = self._row(sample)
        values: dict[str, Value] = {}
        if self._image is not None:
            values[IMAGE] = self._read_image(file, row[self._image], sample)
        for name, cell, read in self._cells:
            try:
                values[name] = read(row[cell])
            except ValueError as error:
                raise SampleUnreadable(f"{self._titles[cell]!r} {error}") from None
        return values

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request all these records from servers at once, and then the images that they name."""
        extents = map(self._extent, samples)
        self._bytes.prefetch(Extent(self._files[file], start, end - start) for file, start, end in extents)
        if self._image is not None:
            self._images.prefetch(self._images_of(samples))

    def name(self, sample: int) -> str:
        """See ``interface.Reader``. Records are counted from 1, behind the header."""
        file, start, _end = self._extent(sample)
        return f"{readable(self._files[file])}: record {sample - self._firsts[file] + 1} (byte {start})"

    def _extent(self, sample: int) -> tuple[int, int, int]:
        """Number of the file, first byte of the record, and the byte behind its last one."""
        sample = self._index.checked(sample)
        file = bisect_right(self._firsts, sample) - 1
        is_last = sample + 1 == self._firsts[file + 1]
        return file, int(self._starts[sample]), self._ends[file] if is_last else int(self._starts[sample + 1])

    def _row(self, sample: int) -> tuple[int, list[str]]:
        """The number of the file, and the cells. Raises ``SampleUnreadable``."""
        file, start, end = self._extent(sample)
        if end - start > self._max_bytes:
            raise SampleUnreadable(f"has {end - start} bytes, more than max_bytes = {self._max_bytes}; {TOO_LONG}")
        try:
            record = self._bytes.read_extent(self._files[file], start, end - start)
            if end < self._ends[file] and record[-1] != _LINE_FEED:
                raise SampleUnreadable("does not end where it did; the file was changed after the daemon read it")
            row = split_record(record, self._delimiter)
        except ValueError as error:
            raise SampleUnreadable(str(error)) from None
        if len(row) != len(self._titles):
            missing = self._titles[len(row) :]
            what = f", so there is no {missing[0]!r}" if missing else ""
            raise SampleUnreadable(f"has {counted(len(row), 'cell')}, and the header {len(self._titles)}{what}")
        return file, row

    def _images_of(self, samples: Sequence[int]) -> Iterator[Extent]:
        """The images that records name; a record that names none fails when it is read."""
        for sample in samples:
            with suppress(ValueError):
                file, row = self._row(sample)
                if row[self._image or 0]:
                    yield Extent(self._image_place(file, row[self._image or 0]), 0, None)

    def _image_place(self, file: int, path: str) -> bytes:
        """The path of an image. Raises ``ValueError``."""
        root, name = self._roots[file], path.encode()
        return os.path.join(root, name) if self._allow_outside_root else below_root(root, name)  # noqa: PTH118

    def _read_image(self, file: int, path: str, sample: int) -> Value:
        title = self._titles[self._image or 0]
        if not path:
            raise SampleUnreadable(f"{title!r} is empty, and not the path of an image")
        try:
            return self._images.read_file(self._image_place(file, path), sample)
        except ValueError as error:
            raise SampleUnreadable(f"{title!r} is {path!r}: {error}") from None


READERS = {CsvSource: CsvReader}
