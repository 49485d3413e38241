"""The rows of Parquet files: any row, at random. Workers read; the scan is ``parquet_scan``.

    number       from the index
    verbatim     one pread of the file, or one request, wherever the row group ends
    the rest     the row group is decoded, and kept while there is room for it (``parquet_files``)

Invariant: a worker keeps no more than ``cache_bytes`` of row groups, and reads only columns that are declared.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from batchd.config.arrow_sources import ParquetSource
from batchd.config.columns import Column
from batchd.config.declared import declared_columns
from batchd.config.values import Value
from batchd.samples.errors import SampleUnreadable
from batchd.sources.conversion import converted, from_bytes, shaped
from batchd.sources.kinds import BuiltInKind
from batchd.sources.parquet_files import OpenFiles
from batchd.sources.parquet_index import ParquetIndex, Place
from batchd.sources.parquet_scan import check_columns, scan
from batchd.sources.parquet_types import BYTES, PATH, has_path, is_image, is_single_number
from batchd.sources.row_groups import Unreadable, use_one_thread
from batchd.sources.verbatim import NOWHERE
from batchd.sources.walk import file_to_look_at, shards_problems
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex, readable
from batchd.storage.paths import below_root, real_path
from batchd.storage.reader import BytesReader
from batchd.storage.remote_reader import Extent, RemoteBytes
from batchd.storage.survey import quick_look
from batchd_wire.wording import counted

KEPT_BYTES_MIN = 1 << 10
"""What a row group counts in the cache at least, also one that is damaged, of which the reason is kept."""


class ParquetReader:
    """Reads the declared columns of any row. Belongs to one worker and one stream."""

    def __init__(self, source: ParquetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        use_one_thread()
        self._index = ParquetIndex(index)
        self._columns = declared_columns(source.fields)
        self._titles = [source.names.get(column.name, column.name) for column in self._columns]
        self._outside = source.allow_outside_root
        self._max_bytes = max_bytes
        self._numbers = {
            column.name: self._index.numbers(column.name) for column in self._columns if is_single_number(column)
        }
        self._remote = RemoteBytes(storage, os.fsencode(self._index.root), index.place)
        self._bytes = {
            column.name: BytesReader(self._remote, max_bytes, "file")
            for column in self._columns
            if not is_single_number(column)
        }
        self._groups = _RowGroups(self._index, source.cache_bytes, self._remote)
        self.name = self._index.shown

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        place = self._index.place(sample)
        values = dict(self.known(sample))
        for number, column in enumerate(self._columns):
            if column.name not in values:
                values[column.name] = self._value(sample, place, number)
        return values

    def prefetch(self, samples: Sequence[int]) -> None:
        """Ask servers at once for all that these samples need: values, and row groups that are not kept."""
        if not self._remote.reads_ahead:
            return
        values, groups = [], []
        for number, column in enumerate(self._columns):
            if column.name in self._numbers:
                continue
            for sample in samples:
                place = self._index.place(sample)
                extent = self._extent(column.name, place, sample)
                if extent is None:
                    groups.append((place, number, self._titles[number]))
                elif 0 < (extent.size or 0) <= self._max_bytes:
                    values.append(extent)
        self._remote.fetch([*values, *self._groups.ahead(groups)], further=True)

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
        extent = self._extent(column.name, place, sample)
        try:
            if extent is not None:
                path, start, size = extent
                raw = self._bytes[column.name].read_extent(path, start, size) if size else b""
                return from_bytes(column, raw, self._max_bytes)
            values = self._groups.column(place, number, self._titles[number])
            return self._from_arrow(column, values, place.row, sample)
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{error} (row group {place.group}, row {place.row} of it)") from None

    def _extent(self, name: str, place: Place, sample: int) -> Extent | None:
        """Where a value stands in its file as it is; None where its row group has to be decoded."""
        extents = self._index.extents(name)
        if extents is None or extents[sample, 0] == NOWHERE:
            return None
        return Extent(self._index.file(place.file), *extents[sample].tolist())

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
            file = os.path.join(root, name) if self._outside else below_root(real_path(root), name)  # noqa: PTH118  bytes
            return self._bytes[column.name].read_file(file, sample)
        except ValueError as error:
            raise SampleUnreadable(f"{readable(name)}: {error}") from None


class _RowGroups:
    """Columns of row groups, decoded; those that were used least lately go when there is no room."""

    def __init__(self, index: ParquetIndex, cache_bytes: int, remote: RemoteBytes) -> None:
        self._index = index
        self._cache_bytes = cache_bytes
        self._remote = remote
        self._files = OpenFiles(index, remote)
        self._kept: dict[tuple[int, int], tuple[Any, int]] = {}
        self._kept_bytes = 0

    def column(self, place: Place, number: int, title: str) -> Any:
        """A column of the row group of a sample. Raises ``SampleUnreadable``."""
        key = (place.number, number)
        kept = self._kept.pop(key, None)
        if kept is None:
            self._make_room(int(self._index.chunks[key]))
            file = self._files[place.file]
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

    def ahead(self, wanted: Iterable[tuple[Place, int, str]]) -> list[Extent]:
        """Where the columns of row groups are stored that are not here. Footers that this needs are read at once."""
        absent = {(place.number, number): (place, title) for place, number, title in wanted}
        absent = {key: one for key, one in absent.items() if key not in self._kept}
        self._remote.fetch(self._files.tails({place.file for place, _title in absent.values()}))
        extents = []
        for place, title in absent.values():
            with suppress(SampleUnreadable):  # whoever reads the sample is told
                extents.append(self._files[place.file].extent(place.group, title))
        return extents

    def close(self) -> None:
        """Close the files and give the memory back."""
        self._kept.clear()
        self._files.close()

    def _make_room(self, needed_bytes: int) -> None:
        while self._kept and self._kept_bytes + needed_bytes > self._cache_bytes:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept)))[1]


def _problems(source: ParquetSource, storage: Storage) -> list[str]:
    """The footer of one file is read too, so that a column that is not there is found before the daemon starts."""
    problems = shards_problems(source.root, source.shards, storage)
    file = None if problems else file_to_look_at(source.root, source.shards)
    if file is not None:
        with quick_look(storage).open(file) as stream:
            check_columns(source, file, stream)
    return problems


KIND = BuiltInKind(
    problems=_problems,
    columns=lambda source, _storage: declared_columns(source.fields),
    scan=scan,
    open=ParquetReader,
)
