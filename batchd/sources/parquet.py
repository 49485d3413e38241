"""The rows of Parquet files: any row, at random. Workers read; the scan is ``parquet_scan``.

    number       from the index
    verbatim     one pread of the file, wherever the row group ends
    the rest     the row group is decoded, and kept while there is room for it

Invariant: a worker keeps no more than ``cache_bytes`` of row groups, and reads only columns that are declared.
"""

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from batchd.config.arrow_sources import ParquetSource
from batchd.config.columns import Column
from batchd.config.declared import declared_columns
from batchd.config.values import Value
from batchd.errors import SourceInvalid
from batchd.sources.conversion import converted, from_bytes, shaped
from batchd.sources.errors import SampleUnreadable
from batchd.sources.index import SourceIndex, readable
from batchd.sources.kinds import SourceKind
from batchd.sources.parquet_index import ParquetIndex, Place
from batchd.sources.parquet_scan import check_columns, scan
from batchd.sources.parquet_types import BYTES, PATH, has_path, is_image, is_single_number
from batchd.sources.places import below_root, open_regular, reading
from batchd.sources.reader import BytesReader
from batchd.sources.row_groups import ParquetFile, Unreadable, use_one_thread
from batchd.sources.shards import blaming_the_sample
from batchd.sources.survey import Survey
from batchd.sources.walk import file_to_look_at, shards_problems
from batchd_wire.wording import counted

FILES_MAX = 16
"""Files whose footers a worker keeps, for row groups that it decodes."""
KEPT_BYTES_MIN = 1 << 10
"""What a row group counts in the cache at least, also one that is damaged, of which the reason is kept."""


class ParquetReader:
    """Reads the declared columns of any row. Belongs to one worker and one stream."""

    def __init__(self, source: ParquetSource, index: SourceIndex, max_bytes: int) -> None:
        use_one_thread()
        self._index = ParquetIndex(index)
        self._columns = declared_columns(source.fields)
        self._titles = [source.names.get(column.name, column.name) for column in self._columns]
        self._outside = source.allow_outside_root
        self._max_bytes = max_bytes
        self._numbers = {
            column.name: self._index.numbers(column.name) for column in self._columns if is_single_number(column)
        }
        self._bytes = {
            column.name: BytesReader(max_bytes, index.place, "file")
            for column in self._columns
            if not is_single_number(column)
        }
        self._groups = _RowGroups(self._index, source.cache_bytes)
        self.name = self._index.shown

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        place = self._index.place(sample)
        values = dict(self.known(sample))
        for number, column in enumerate(self._columns):
            if column.name not in values:
                values[column.name] = self._value(sample, place, number)
        return values

    def known(self, sample: int) -> Mapping[str, Value]:
        """Single numbers stand in the index."""
        return {name: numbers[sample] for name, numbers in self._numbers.items() if numbers is not None}

    def close(self) -> None:
        """See ``kinds.Reader``."""
        self._groups.close()
        for one in self._bytes.values():
            one.close()

    def _value(self, sample: int, place: Place, number: int) -> Value:
        column = self._columns[number]
        extents = self._index.extents(column.name)
        try:
            if extents is not None and (extent := extents[sample].tolist())[0] >= 0:
                raw = self._bytes[column.name].read_extent(self._index.file(place.file), *extent) if extent[1] else b""
                return from_bytes(column, raw, self._max_bytes)
            values = self._groups.column(place, number, self._titles[number])
            return self._from_arrow(column, values, place.row, sample)
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{error} (row group {place.group}, row {place.row} of it)") from None

    def _from_arrow(self, column: Column, values: Any, row: int, sample: int) -> Value:
        value = values[row]
        if not value.is_valid:
            raise SampleUnreadable(f"there is no {column.name}")
        if column.kind == "array" and not hasattr(value, "as_buffer"):
            numbers = value.values
            if numbers.null_count:
                raise SampleUnreadable(f"{column.name} lacks {counted(numbers.null_count, 'number')}")
            return shaped(column, converted(column, numbers.to_numpy(zero_copy_only=False)))
        if is_image(values.type):
            raw = value[BYTES].as_buffer()
            path = value[PATH].as_buffer() if raw is None and has_path(values.type) else None
            if path:
                return self._from_path(column, path.to_pybytes(), sample)
            if raw is None:
                raise SampleUnreadable(f"{column.name} has neither bytes nor a path")
            return from_bytes(column, memoryview(raw), self._max_bytes)
        return from_bytes(column, memoryview(value.as_buffer()), self._max_bytes)

    def _from_path(self, column: Column, name: bytes, sample: int) -> Value:
        if b"\0" in name:
            raise SampleUnreadable(f"the path of {column.name} holds the character NUL")
        root = os.fsencode(self._index.root)
        try:
            file = os.path.join(root, name) if self._outside else below_root(os.path.realpath(root), name)  # noqa: PTH118  bytes
            return self._bytes[column.name].read_file(file, sample)
        except ValueError as error:
            raise SampleUnreadable(f"{readable(name)}: {error}") from None


class _RowGroups:
    """Columns of row groups, decoded; those that were used least lately go when there is no room."""

    def __init__(self, index: ParquetIndex, cache_bytes: int) -> None:
        self._index = index
        self._cache_bytes = cache_bytes
        self._files: dict[int, tuple[BinaryIO, ParquetFile]] = {}
        self._kept: dict[tuple[int, int], tuple[Any, int]] = {}
        self._kept_bytes = 0

    def column(self, place: Place, number: int, title: str) -> Any:
        """A column of the row group of a sample. Raises ``SampleUnreadable``."""
        key = (place.number, number)
        kept = self._kept.pop(key, None)
        if kept is None:
            self._make_room(int(self._index.chunks[key]))
            file = self._file(place.file)
            try:
                column = file.read(place.group, title, self._cache_bytes)
                kept = column, max(column.nbytes, KEPT_BYTES_MIN)
            except Unreadable as error:
                kept = str(error), KEPT_BYTES_MIN
            self._kept_bytes += kept[1]
        self._kept[key] = kept
        if isinstance(kept[0], str):
            raise SampleUnreadable(kept[0])
        return kept[0]

    def close(self) -> None:
        """Close the files and give the memory back."""
        self._kept.clear()
        while self._files:
            self._files.popitem()[1][0].close()

    def _make_room(self, needed_bytes: int) -> None:
        while self._kept and self._kept_bytes + needed_bytes > self._cache_bytes:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept)))[1]

    def _file(self, number: int) -> ParquetFile:
        opened = self._files.pop(number, None)
        if opened is None:
            if len(self._files) >= FILES_MAX:
                self._files.pop(next(iter(self._files)))[0].close()
            opened = self._open(number)
        self._files[number] = opened
        return opened[1]

    def _open(self, number: int) -> tuple[BinaryIO, ParquetFile]:
        try:
            with blaming_the_sample():
                stream = open(os.fsdecode(self._index.file(number)), "rb", buffering=0, opener=open_regular)  # noqa: SIM115
        except SourceInvalid as error:
            raise SampleUnreadable(str(error)) from None
        try:
            file = ParquetFile(stream)
            if (file.footer.size, file.footer.crc) != self._index.footer(number):
                raise SampleUnreadable("the file is another one than when the daemon started")
        except BaseException:
            stream.close()
            raise
        return stream, file


def _problems(source: ParquetSource) -> list[str]:
    """The footer of one file is read too, so that a column that is not there is found before the daemon starts."""
    problems = shards_problems(source.root, source.shards)
    file = None if problems else file_to_look_at(source.root, source.shards)
    if file is not None:
        with reading(file, Survey(lambda _found: None)) as stream:
            check_columns(source, file, stream)
    return problems


KIND = SourceKind(
    problems=_problems,
    columns=lambda source: declared_columns(source.fields),
    scan=scan,
    open=ParquetReader,
)
