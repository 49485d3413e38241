"""The rows of Parquet and Arrow files: any row, at random. Workers only.

    a number         from the index
    with an extent   one pread of the file, or one request, wherever the row group ends
    any other        the row group is decoded, and kept while there is room for it

    on this machine  pyarrow reads the parts of the file that it needs
    on a server      the footer is one request, and a column of a row group another one, long ones
                     in parts at once; pyarrow finds all of it in memory

Invariants: a worker keeps no more than ``cache_bytes`` of row groups, and reads only columns that
are declared. A file that is open is the one that was scanned, by its size and the checksum of its
footer; an object stays of that version.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import BufferedReader
from itertools import groupby
from types import MappingProxyType
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.compute import list_value_length

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import (
    MediaFile,
    Value,
    check_count,
    converted,
    default_value,
    from_bytes,
    images_from,
    nested,
    shaped,
)
from batchd.data.sources.parquet import row_groups
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.parquet.record_batches import open_table
from batchd.data.storage.access import ObjectStream, Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.paths import below_root, blaming_the_sample, open_regular, real_path
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes
from batchd.data.storage.values import ObjectUnreadable
from batchd.errors import SourceInvalid
from batchd_wire.views import Array
from batchd_wire.wording import counted

FILES_MAX = 64
"""A worker keeps the footers of this many files, for row groups that it decodes."""
KEPT_BYTES_MIN = 1 << 10
"""The least that a row group counts in the cache, also a damaged one, whose reason is kept."""
OBJECT_NAME = "its file"
Parts: TypeAlias = Mapping[int, tuple[int, int]]
"""The part of the image of some samples: its first byte, and the one behind its last."""
NO_PARTS: Parts = MappingProxyType({})
_MEDIA = frozenset({"video", "audio"})
"""The kinds whose files may be read in parts."""


class ValuePlace(NamedTuple):
    """Where a sample is.

    ``row`` counts from 0 in the row group, ``group`` in the file, ``number`` through all files.
    """

    number: int
    file: int
    group: int
    row: int


class ParquetIndex:
    """An index as the rows of Parquet files see it; ``parquet.scan`` has its arrays."""

    def __init__(self, index: SourceIndex) -> None:
        self.root = os.fsencode(index.place["root"])
        self.arrays = index.arrays
        self._index = index
        self._shards = index.names("shards")
        self._groups = index.arrays["groups"]
        self._firsts = np.ascontiguousarray(self._groups[:, 2])

    def place(self, sample: int) -> ValuePlace:
        """The place of a sample. Raises ``IndexError``."""
        number = int(self._firsts.searchsorted(self._index.checked(sample), side="right")) - 1
        file, group, first = self._groups[number].tolist()
        return ValuePlace(number, file, group, sample - first)

    def file(self, number: int) -> bytes:
        """The path of a file as the kernel takes it."""
        return os.path.join(self.root, self._shards[number])  # noqa: PTH118  bytes

    def footer(self, number: int) -> row_groups.Footer:
        """Facts about a file from the scan."""
        return row_groups.Footer(*self.arrays["files"][number].tolist())

    def tail(self, number: int) -> Extent:
        """The end of a file, with its footer as a rule."""
        return _tail(self.file(number), self.footer(number).size)

    def shown(self, sample: int) -> str:
        """The place of a sample, for messages: the file, and the row in it, counted from 0."""
        file = self.place(sample).file
        first = int(self._firsts[int(self._groups[:, 0].searchsorted(file))])
        return f"{readable(self.file(file))}: row {sample - first}"


def _tail(path: bytes, size: int) -> Extent:
    count = min(size, row_groups.FOOTER_BYTES)
    return Extent(path, size - count, count)


class OpenFile:
    """An open file. Raises ``SampleUnreadable`` if it is damaged, or has another footer."""

    def __init__(self, path: bytes, footer: row_groups.Footer, remote: RemoteBytes) -> None:
        self._path = path
        self._remote = remote
        self._object: ObjectStream | None = None
        self._stream = self._open_object(footer.size) if remote.reads_ahead else _open_here(path)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.close)
            try:
                self._file = open_table(self._stream)
            except SourceInvalid as problem:
                raise SampleUnreadable(str(problem)) from None
            if self._file.footer != footer:
                raise SampleUnreadable("the file is another one than when the daemon started")
            where_it_fails.pop_all()

    def read(self, group: int, title: str, bytes_max: int) -> pa.ChunkedArray:
        """A column of a row group. Raises ``Unreadable`` for damage, else ``SampleUnreadable``."""
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
        """The extent of a column of a row group."""
        return Extent(self._path, *self._file.extent(group, title))

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def _open_object(self, size: int) -> BinaryIO:
        self._object = ObjectStream(
            OBJECT_NAME, size, lambda start, count: self._remote.read(Extent(self._path, start, count), count)
        )
        end = self._bytes(_tail(self._path, size))
        if len(end) < (longer := row_groups.footer_bytes(end)) <= size:
            end = self._bytes(Extent(self._path, size - longer, longer))
        self._object.hold(size - len(end), end)
        return BufferedReader(self._object)

    def _bytes(self, extent: Extent) -> memoryview:
        assert extent.size is not None, "it is a range"
        try:
            return self._remote.read(extent, extent.size)
        except ObjectUnreadable as reason:
            raise SampleUnreadable(f"{OBJECT_NAME} cannot be read at byte {extent.start}: {reason}") from None


def _open_here(path: bytes) -> BinaryIO:
    try:
        with blaming_the_sample():
            return open(os.fsdecode(path), "rb", buffering=0, opener=open_regular)
    except SourceInvalid as error:
        raise SampleUnreadable(str(error)) from None


class ParquetReader:
    """Reads the declared columns of any row. Belongs to one worker and one stream."""

    def __init__(self, source: ParquetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        row_groups.use_one_thread()
        self._index = ParquetIndex(index)
        self._columns = source.columns
        self._titles = [source.name_of(column.name) for column in self._columns]
        self._defaults = source.defaults
        self._outside = source.allow_outside_root
        self._max_bytes = max_bytes
        self._remote = RemoteBytes(storage, self._index.root, index.place)
        held = {column.name: index.arrays.get(f"numbers.{column.name}") for column in self._columns}
        self._numbers = {name: numbers for name, numbers in held.items() if numbers is not None}
        self._bytes = {
            column.name: BytesReader(self._remote, max_bytes, "file")
            for column in self._columns
            if column.name not in self._numbers
        }
        self._groups = _RowGroups(self._index, source.cache_bytes, self._remote)
        self.name = self._index.shown

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        return self._read(sample, NO_PARTS)

    def reads_parts(self) -> bool:
        """See ``interface.ReadsParts``: of images that are stored plain."""
        return self._remote.reads_ahead and "extents.image" in self._index.arrays

    def read_part(self, sample: int, first: int, end: int) -> Mapping[str, Value]:
        """See ``interface.ReadsParts``."""
        if self._extent("image", self._index.place(sample), sample) is None:
            raise SampleUnreadable("image is read with its row group")
        return self._read(sample, {sample: (first, end)})

    def _read(self, sample: int, parts: Parts) -> Mapping[str, Value]:
        place = self._index.place(sample)
        values = dict(self.known(sample))
        for number, column in enumerate(self._columns):
            if column.name not in values:
                values[column.name] = self._value(sample, place, number, parts)
        return values

    def reads_rows(self) -> bool:
        """See ``interface.ReadsRows``: such numbers are in the index."""
        return len(self._numbers) == len(self._columns)

    def read_rows(
        self, samples: NDArray[np.int64], chunks: Sequence[Mapping[str, Array]], begin: Callable[[int], None]
    ) -> None:
        """See ``interface.ReadsRows``."""
        end = 0
        for chunk, rows in enumerate(chunks):
            begin(chunk)
            first, end = end, end + len(next(iter(rows.values())))
            for name, numbers in self._numbers.items():
                rows[name][...] = numbers[samples[first:end]]

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request at once all that these samples need: values, and row groups that are not kept."""
        self.prefetch_with(samples, NO_PARTS)

    def prefetch_with(self, samples: Sequence[int], parts: Parts) -> None:
        """See ``interface.ReadsParts``."""
        if not self._remote.reads_ahead:
            for name, reader in self._bytes.items():
                found = (self._extent(name, self._index.place(sample), sample) for sample in samples)
                reader.prefetch(extent for extent in found if extent is not None)
            return
        values, groups = [], []
        for number, column in enumerate(self._columns):
            if column.name in self._numbers:
                continue
            for sample in samples:
                place = self._index.place(sample)
                extent = self._extent(column.name, place, sample, parts)
                if extent is None:
                    groups.append((place, number, self._titles[number]))
                elif 0 < (extent.size or 0) <= self._max_bytes:
                    values.append(extent)
        self._remote.fetch([*values, *self._groups.ahead(groups)])

    def lengths(self, samples: Sequence[int], field: str) -> NDArray[np.int64]:
        """See ``interface.ReadsLengths``: of lists of numbers, by their offsets."""
        unknown = np.zeros(len(samples), np.int64)
        decoded = [number for number, column in enumerate(self._columns) if column.name not in self._numbers]
        if len(decoded) != 1 or self._columns[decoded[0]].name != field or len(self._columns[decoded[0]].shape) != 1:
            return unknown
        self.prefetch(samples)
        places = [self._index.place(sample) for sample in samples]
        found: list[NDArray[np.int64]] = []
        for _number, those in groupby(places, key=lambda place: place.number):
            group = list(those)
            try:
                lists = self._groups.column(group[0], decoded[0], self._titles[decoded[0]])
            except SampleUnreadable:
                return unknown
            if not _has_numbers(lists, self._columns[decoded[0]]):
                return unknown
            of_rows = list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)
            found.append(of_rows[[place.row for place in group]])
        return np.concatenate(found)

    def known(self, sample: int) -> Mapping[str, Value]:
        """Single numbers are in the index."""
        return {name: numbers[sample] for name, numbers in self._numbers.items()}

    def close(self) -> None:
        """See ``interface.Reader``."""
        self._groups.close()
        for one in self._bytes.values():
            one.close()

    def _value(self, sample: int, place: ValuePlace, number: int, parts: Parts) -> Value:
        column = self._columns[number]
        extent = self._extent(column.name, place, sample, parts)
        try:
            if extent is not None:
                path, start, size = extent
                if column.kind in _MEDIA and size:
                    return self._bytes[column.name].open_extent(path, start, size)
                raw = self._bytes[column.name].read_extent(path, start, size) if size else b""
                return from_bytes(column, raw, self._max_bytes)
            values = self._groups.column(place, number, self._titles[number])
            return self._from_arrow(column, values, place.row, sample)
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{error} (row group {place.group}, row {place.row} of it)") from None

    def _extent(self, name: str, place: ValuePlace, sample: int, parts: Parts = NO_PARTS) -> Extent | None:
        """The extent of a value that is stored plain; None to decode its row group.

        Of the image of a sample in ``parts``, that of its part.
        """
        extents = self._index.arrays.get(f"extents.{name}")
        if extents is None or extents[sample, 0] == row_groups.NOWHERE:
            return None
        file, (start, size) = self._index.file(place.file), extents[sample].tolist()
        first, end = parts.get(sample, (0, size)) if name == "image" else (0, size)
        return Extent(file, start + first, end - first)

    def _from_arrow(self, column: Column, values: pa.ChunkedArray, row: int, sample: int) -> Value:
        value = values[row]
        if not value.is_valid:
            if column.name not in self._defaults:
                raise SampleUnreadable(f"there is no {column.name}")
            return default_value(column, self._defaults[column.name])
        if column.kind in ("json", "texts") and not hasattr(value, "as_buffer"):
            return nested(column, value.as_py())
        if column.kind == "array" and not hasattr(value, "as_buffer"):
            numbers = value.values
            if numbers.null_count:
                raise SampleUnreadable(f"{column.name} lacks {counted(numbers.null_count, 'number')}")
            return shaped(column, converted(column, numbers.to_numpy(zero_copy_only=False)))
        if column.kind == "images":
            return self._images(column, value, sample)
        raw = self._stored(column.name, column.name, value, sample, is_media=column.kind in _MEDIA)
        return raw if isinstance(raw, MediaFile) else from_bytes(column, raw, self._max_bytes)

    def _images(self, column: Column, value: pa.ListScalar, sample: int) -> Value:
        check_count(column, len(value))
        named = [(f"{column.name}[{place}]", one) for place, one in enumerate(value)]
        files: list[bytes | None] = []
        for name, one in named:
            stored = self._stored(column.name, name, one, sample) if one.is_valid else None
            files.append(bytes(stored) if isinstance(stored, memoryview) else None)
        return images_from(column, files, self._max_bytes)

    def _stored(
        self, name: str, shown: str, value: pa.Scalar, sample: int, *, is_media: bool = False
    ) -> memoryview | MediaFile:
        """The bytes that are stored, or those of the file whose path is.

        ``is_media``: such a file may be read in parts.
        """
        if not row_groups.is_image(value.type):
            return memoryview(value.as_buffer())
        raw = value[row_groups.BYTES].as_buffer()
        path = value[row_groups.PATH].as_buffer() if raw is None and row_groups.has_path(value.type) else None
        if path:
            return self._from_path(name, path.to_pybytes(), sample, is_media=is_media)
        if raw is None:
            raise SampleUnreadable(f"{shown} has neither bytes nor a path")
        return memoryview(raw)

    def _from_path(self, column: str, name: bytes, sample: int, *, is_media: bool) -> memoryview | MediaFile:
        if b"\0" in name:
            raise SampleUnreadable(f"the path of {column} holds the character NUL")
        root = self._index.root
        try:
            file = os.path.join(root, name) if self._outside else below_root(real_path(root), name)  # noqa: PTH118  bytes
            files = self._bytes[column]
            return files.open_file(file, sample) if is_media else files.read_file(file, sample)
        except ValueError as error:
            raise SampleUnreadable(f"{readable(name)}: {error}") from None


def _has_numbers(lists: pa.ChunkedArray, column: Column) -> bool:
    """True if each list has the numbers of a column, so that none of them can be bad."""
    kind = lists.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    stored = kind.value_type
    is_number = pa.types.is_integer(stored) or pa.types.is_floating(stored)
    is_safe = is_number and np.can_cast(row_groups.dtype_of(stored), column.dtype)
    return is_safe and not any(chunk.flatten().null_count for chunk in lists.chunks)


class _RowGroups:
    """Decoded columns of row groups, and open files: those that were used lately."""

    def __init__(self, index: ParquetIndex, cache_bytes: int, remote: RemoteBytes) -> None:
        self._index = index
        self._cache_bytes = cache_bytes
        self._remote = remote
        self._opened: dict[int, OpenFile] = {}
        self._kept: dict[tuple[int, int], tuple[str | pa.ChunkedArray, int]] = {}
        self._kept_bytes = 0

    def column(self, place: ValuePlace, number: int, title: str) -> pa.ChunkedArray:
        """A column of the row group of a sample. Raises ``SampleUnreadable``."""
        key = (place.number, number)
        kept = self._kept.pop(key, None)
        if kept is None:
            needed_bytes = int(self._index.arrays["chunks"][key])
            while self._kept and self._kept_bytes + needed_bytes > self._cache_bytes:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept)))[1]
            file = self._file(place.file)
            try:
                column = file.read(place.group, title, self._cache_bytes)
                kept = column, max(column.nbytes, KEPT_BYTES_MIN)
            except row_groups.Unreadable as error:
                kept = str(error), KEPT_BYTES_MIN
            self._kept_bytes += kept[1]
        self._kept[key] = kept
        if isinstance(kept[0], str):
            raise SampleUnreadable(kept[0])
        return kept[0]

    def ahead(self, wanted: Iterable[tuple[ValuePlace, int, str]]) -> list[Extent]:
        """The extents of the columns that are not kept here; footers that this needs are read."""
        absent = {(place.number, number): (place, title) for place, number, title in wanted}
        absent = {key: one for key, one in absent.items() if key not in self._kept}
        closed = {place.file for place, _title in absent.values()} - self._opened.keys()
        self._remote.fetch(map(self._index.tail, closed))
        extents = []
        for place, title in absent.values():
            with suppress(SampleUnreadable):  # reading the sample reports it
                extents.append(self._file(place.file).extent(place.group, title))
        return extents

    def close(self) -> None:
        """Close the files and give the memory back."""
        self._kept.clear()
        while self._opened:
            self._opened.popitem()[1].close()

    def _file(self, number: int) -> OpenFile:
        file = self._opened.pop(number, None)
        if file is None:
            if len(self._opened) >= FILES_MAX:
                self._opened.pop(next(iter(self._opened))).close()
            file = OpenFile(self._index.file(number), self._index.footer(number), self._remote)
        self._opened[number] = file
        return file


READERS = {ParquetSource: ParquetReader}
