"""Parquet files that are open, on this machine or on a server. Workers only.

    on this machine    pyarrow reads what it needs
    on a server        the footer is one request, and what is stored of a column in a row group another one, long ones in parts
                       at once; pyarrow finds all of it in memory

Invariant: a file that is open is the one that was scanned, by its size and the checksum of its footer; an object stays of that
version.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from typing import Any, BinaryIO

from batchd.errors import SourceInvalid
from batchd.samples.errors import SampleUnreadable
from batchd.sources.parquet_index import ParquetIndex
from batchd.sources.row_groups import FOOTER_BYTES, Footer, ParquetFile, footer_bytes
from batchd.storage.open_files import blaming_the_sample
from batchd.storage.paths import open_regular
from batchd.storage.remote_reader import Extent, RemoteBytes
from batchd.storage.remote_stream import ObjectStream
from batchd.storage.values import ObjectUnreadable

FILES_MAX = 64
"""Files whose footers a worker keeps, for row groups that it decodes."""
OBJECT_NAME = "its file"


class OpenFile:
    """One of them. Raises ``SampleUnreadable`` where it cannot be read, or is another one than ``footer`` says."""

    def __init__(self, path: bytes, footer: Footer, remote: RemoteBytes) -> None:
        self._path = path
        self._remote = remote
        self._object: ObjectStream | None = None
        self._stream = self._open_object(footer.size) if remote.reads_ahead else _open_here(path)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.close)
            self._file = self._opened(footer)
            where_it_fails.pop_all()

    def read(self, group: int, title: str, bytes_max: int) -> Any:
        """A column of a row group. Raises ``Unreadable`` where it is damaged, ``SampleUnreadable`` where it is out of reach."""
        if self._object is None:
            return self._file.read(group, title, bytes_max)
        extent = self.extent(group, title)
        if extent.size and extent.size <= bytes_max:
            self._object.hold(extent.start, self._bytes(extent))
        try:
            return self._file.read(group, title, bytes_max)
        except SourceInvalid as problem:
            raise SampleUnreadable(str(problem)) from None
        finally:
            self._object.hold(0, memoryview(b""))

    def extent(self, group: int, title: str) -> Extent:
        """Where a column of a row group is stored."""
        return Extent(self._path, *self._file.extent(group, title))

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def _opened(self, footer: Footer) -> ParquetFile:
        try:
            file = ParquetFile(self._stream)
        except SourceInvalid as problem:
            raise SampleUnreadable(str(problem)) from None
        if file.footer != footer:
            raise SampleUnreadable("the file is another one than when the daemon started")
        return file

    def _open_object(self, size: int) -> BinaryIO:
        self._object = ObjectStream(
            OBJECT_NAME, size, lambda start, count: self._remote.read(Extent(self._path, start, count), count)
        )
        end = self._bytes(tail_of(self._path, size))
        if len(end) < (longer := footer_bytes(end)) <= size:
            end = self._bytes(Extent(self._path, size - longer, longer))
        self._object.hold(size - len(end), end)
        return BufferedReader(self._object)

    def _bytes(self, extent: Extent) -> memoryview:
        assert extent.size is not None, "it is a range"
        try:
            return self._remote.read(extent, extent.size)
        except ObjectUnreadable as reason:
            raise SampleUnreadable(f"{OBJECT_NAME} cannot be read at byte {extent.start}: {reason}") from None


class OpenFiles:
    """Those that were used lately, by their numbers in the index."""

    def __init__(self, index: ParquetIndex, remote: RemoteBytes) -> None:
        self._index = index
        self._remote = remote
        self._opened: dict[int, OpenFile] = {}

    def __getitem__(self, number: int) -> OpenFile:
        """A file, opened if it is not. Raises ``SampleUnreadable``."""
        file = self._opened.pop(number, None)
        if file is None:
            if len(self._opened) >= FILES_MAX:
                self._opened.pop(next(iter(self._opened))).close()
            file = OpenFile(self._index.file(number), self._index.footer(number), self._remote)
        self._opened[number] = file
        return file

    def tails(self, numbers: Iterable[int]) -> Iterator[Extent]:
        """Where the footers of those are that are not open."""
        for number in numbers:
            if number not in self._opened:
                yield tail_of(self._index.file(number), self._index.footer(number).size)

    def close(self) -> None:
        """Close all that are open."""
        while self._opened:
            self._opened.popitem()[1].close()


def tail_of(path: bytes, size: int) -> Extent:
    """The end of a file, with its footer as a rule."""
    count = min(size, FOOTER_BYTES)
    return Extent(path, size - count, count)


def _open_here(path: bytes) -> BinaryIO:
    try:
        with blaming_the_sample():
            return open(os.fsdecode(path), "rb", buffering=0, opener=open_regular)
    except SourceInvalid as error:
        raise SampleUnreadable(str(error)) from None
