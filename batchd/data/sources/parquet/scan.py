"""Scans Parquet and Arrow files, in a process of its own: see ``data.sources.scan``.

    footers                       -> the rows, and the size of each row group
    columns of single numbers     -> read, and kept in the index: a worker need not read them
    columns of bytes and strings  -> read once if they are not compressed, for their extents
    all others                    -> workers decode row groups; too large ones are refused

    shards           uint8 [bytes]    the paths of the files, a NUL after each
    files            int64 [f, 2]     size in bytes and CRC-32 of the footer of each
    groups           int64 [g, 3]     (file, row group in it, first sample)
    chunks           int64 [g, c]     decoded bytes of each field in a row group; 0 if not decoded
    numbers.NAME     dtype [n, ...]   fields that are one number for each sample, or several columns
    extents.NAME     int64 [n, 2]     (first byte, bytes) of fields stored as they are; else (-1, 0)

pyarrow gives one value only by reading the whole row group around it. But where a column chunk is
not compressed, the file has each value plain, so a worker can read it with one ``pread``, or
one request:

    | page header | levels | length | value 1 | length | value 2 | ... | page header | levels | ...
                                    ^         ^
                                    place, bytes: an extent

The scan finds the extents (``_extents_of``), and parses nothing of the format: pyarrow gives the
values, and each is searched behind the one before it: right there first, then a little further on,
as pages begin. The place of a value that a dictionary holds once is where it was found first.
In an Arrow file (``record_batches``) the lengths of the values give all places; no value is read.

Invariants: no list with an entry for each sample is made; a sample is numbers in flat arrays. What
a worker has to decode as a whole row group is, by what its footer says, no larger than
``cache_bytes``. The bytes of an extent are the bytes of the value, compared when it was found; a
chunk in which one value is not found has no extents at all. The daemon opens a file (``_problems``)
and looks at no row group: pyarrow ends its process for some wrong bytes of one in the footer.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column, Default
from batchd.data.samples.values import Unfitting, converted
from batchd.data.sources.files.walk import file_to_look_at, shards_of, shards_problems
from batchd.data.sources.finding import FilePattern, find_in_shards
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import Neighbours, in_files
from batchd.data.sources.parquet import row_groups
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.parquet.record_batches import ArrowFile, TableFile, is_arrow, open_table
from batchd.data.sources.scan import answer, isolated_scan
from batchd.data.storage.access import ObjectStream, Storage
from batchd.data.storage.index import SourceIndex, blob, number_array, readable
from batchd.data.storage.paths import size_of
from batchd.data.storage.survey import Survey, quick_look
from batchd.errors import SourceInvalid
from batchd.runtime import failpoints
from batchd.runtime.suggestions import suggestion
from batchd_wire.views import Array
from batchd_wire.wording import counted

MODULE = "batchd.data.sources.parquet.scan"
ROWS_MAX = 1 << 27
"""The most rows of a row group; a footer that says more is damaged, or was not written for
training."""
LABEL = "label"
NUMBERS_BYTES_MAX = 8 * ROWS_MAX
LENGTH_BYTES = 4
"""Bytes between two values of a page, unless all values have the same length."""
GAP_BYTES = 64 << 10
"""The range behind a value in which the next one is searched: beyond the end of a page and the
beginning of another."""
ROWS_AT_ONCE = 32
"""Values of a column of bytes in memory while their places are searched, besides 1024 that
pyarrow has decoded."""
KEPT_BYTES_MAX = 256 << 20
"""Bytes from a server are kept until they were compared with pyarrow's values; beyond this limit
they are read again."""


def scan(source: ParquetSource, survey: Survey) -> SourceIndex:
    """Find all rows, by path, in the scanning process. Raises ``SourceInvalid``."""
    shards = shards_of(source, survey)
    scanning = _Scan(source, survey)
    for number, shard in enumerate(shards):
        path = source.root / shard.decode("utf-8", "surrogateescape")
        for folder in shard.split(b"/")[:-1]:
            if b"=" in folder:
                title = readable(folder.partition(b"=")[0])
                survey.note(f"partition column {title}, which stands in names of folders and is not read", str(path))
        with survey.open(path) as stream:
            failpoints.passing("scan.parquet.opening")
            scanning.add(number, path, stream)
    return scanning.finish(shards)


def check_columns(source: ParquetSource, path: Path, stream: BinaryIO) -> TableFile:
    """A file with all columns that are read. Raises ``SourceInvalid``."""
    if not size_of(stream):
        raise SourceInvalid(f"{path} is empty; leave it out of the shards")
    try:
        file = open_table(stream)
    except row_groups.Unreadable as error:
        raise _unreadable(path, stream, error) from None
    for column in source.columns:
        titles = _titles_of(source, column, file)
        for title in titles:
            count = len(file.schema.get_all_field_indices(title))
            found = row_groups.path_in(file.schema, title)
            if found is None and not count:
                is_partition = any(part.startswith(f"{title}=") for part in path.parts[:-1])
                advice = suggestion(title, file.schema.names)
                if is_partition:
                    advice = "it is a partition column, which stands in names of folders; write it into the files, too"
                raise SourceInvalid(f"{path} has no column {title!r} for the field {column.name}; {advice}")
            if found is None:
                raise SourceInvalid(f"{path} has {count} columns {title!r}")
            one = column if len(titles) == 1 else replace(column, shape=())
            if problem := row_groups.problem_of(one, found.kind):
                raise SourceInvalid(f"{path}: column {title!r} {problem}")
    return file


def _titles_of(source: ParquetSource, column: Column, file: TableFile) -> tuple[str, ...]:
    """The columns of a field: several if its name has braces, and no column is called so."""
    name = source.name_of(column.name)
    return (name,) if name in file.schema.names else source.names_of(column)


def _unreadable(path: Path, stream: BinaryIO, error: row_groups.Unreadable) -> SourceInvalid:
    return SourceInvalid(f"{path} cannot be read as {'Arrow' if is_arrow(stream) else 'Parquet'}: {error}")


class _Scan:
    """An index of rows while it is built."""

    def __init__(self, source: ParquetSource, survey: Survey) -> None:
        self._source = source
        self._survey = survey
        self._columns = source.columns
        self._samples = 0
        self._classes: tuple[str, ...] = ()
        self._files, self._groups, self._chunks = array("q"), array("q"), array("q")
        self._numbers: dict[str, bytearray] = {}
        self._extents: dict[str, list[array[int] | int]] = {}
        """Of each row group: places and bytes, or the number of rows that the file stores
        encoded."""

    def add(self, number: int, path: Path, stream: BinaryIO) -> None:
        """Add the rows of a file."""
        file = check_columns(self._source, path, stream)
        try:
            groups = file.rows
        except row_groups.Unreadable as error:
            raise _unreadable(path, stream, error) from None
        if not self._files:
            joined = {column.name for column in self._columns if len(_titles_of(self._source, column, file)) > 1}
            held = [
                column.name for column in self._columns if column.name in joined or row_groups.is_single_number(column)
            ]
            self._numbers = {name: bytearray() for name in held}
            self._extents = {column.name: [] for column in self._columns if column.name not in held}
        self._files.extend((file.footer.size, file.footer.crc))
        self._add_classes(path, file)
        before = self._samples
        for group, rows in enumerate(groups):
            if not 0 <= rows <= ROWS_MAX:
                raise SourceInvalid(f"{path}: row group {group} says that it has {rows} rows; {ROWS_MAX} are the most")
            if not rows:
                continue
            self._groups.extend((number, group, self._samples))
            where = _Where(path, group, self._samples - before)
            self._chunks.extend(self._chunk(file, stream, where, column, rows) for column in self._columns)
            self._check_size(file, where, rows)
            self._samples += rows
            self._survey.progress(self._samples)

    def finish(self, shards: Sequence[bytes]) -> SourceIndex:
        """Make the index."""
        if not self._samples:
            raise SourceInvalid(f"the files of {self._source.place} hold no row")
        arrays: dict[str, Array] = {
            "shards": blob(tuple(shards)),
            "files": number_array(self._files).reshape(-1, 2),
            "groups": number_array(self._groups).reshape(-1, 3),
            "chunks": number_array(self._chunks).reshape(-1, len(self._columns)),
        }
        for column in self._columns:
            if column.name in self._numbers:
                numbers = np.frombuffer(self._numbers[column.name], _stored(column))
                arrays[f"numbers.{column.name}"] = numbers.reshape(-1, *column.fixed_shape)
            elif (extents := _joined(self._extents[column.name])) is not None:
                arrays[f"extents.{column.name}"] = extents
        if self._classes:
            arrays["classes"] = blob([name.encode("utf-8", "surrogatepass") for name in self._classes])
        facts: dict[str, object] = {"fields": dict(self._source.fields), "names": dict(self._source.names)}
        if self._source.defaults:
            facts["defaults"] = dict(self._source.defaults)
        place = {"root": str(self._source.root.absolute()), **self._survey.place()}
        return SourceIndex.build(self._samples, facts, arrays, place)

    def _add_classes(self, path: Path, file: TableFile) -> None:
        """Record the names of the classes: of the field `label`, or the only field with names."""
        singles = filter(row_groups.is_single_number, self._columns)
        named = {
            column.name: row_groups.class_names(file.schema, self._source.name_of(column.name)) for column in singles
        }
        found = [names for name, names in named.items() if names and (name == LABEL or not named.get(LABEL))]
        if len(found) != 1:
            return
        (names,) = found
        if self._classes and names != self._classes:
            raise SourceInvalid(
                f"{path} has other classes than the files before it: {_difference(self._classes, names)}; a label means one class"
            )
        self._classes = names

    def _chunk(self, file: TableFile, stream: BinaryIO, where: "_Where", column: Column, rows: int) -> int:
        """Record a column of a row group; return the bytes that one of its values decodes."""
        title = self._source.name_of(column.name)
        try:
            if column.name in self._numbers:
                one = replace(column, shape=())
                titles = _titles_of(self._source, column, file)
                default = self._source.defaults.get(column.name)
                read = [_read_numbers(file, where, one, each, default) for each in titles]
                self._numbers[column.name] += (np.stack(read, 1) if len(read) > 1 else read[0]).tobytes()
                return 0
            extents = _find(file, stream, where.group, title)
            if extents is None:
                file.check_rows(where.group, title)
            decoded_bytes = file.decoded_bytes(where.group, title)
        except row_groups.Unreadable as error:
            where.refuse(title, str(error))
        if extents is not None:
            self._extents[column.name].append(extents)
            if row_groups.NOWHERE not in extents[::2]:
                return 0
        else:
            self._extents[column.name].append(rows)
        return decoded_bytes

    def _check_size(self, file: TableFile, where: "_Where", rows: int) -> None:
        sizes = dict(zip(self._source.fields, self._chunks[-len(self._columns) :], strict=True))
        size = sum(sizes.values())
        if size > self._source.cache_bytes:
            names = ", ".join(name for name, part in sizes.items() if part)
            fit = max(1, rows * self._source.cache_bytes // size // 16)
            raise SourceInvalid(
                f"{where.path}: row group {where.group} holds {counted(rows, 'row')} of {size} bytes together ({names}), "
                f"more than cache_bytes = {self._source.cache_bytes}, and one row cannot be read without the others: "
                f"{file.fewer_rows.format(rows=min(fit, 10))}; or raise cache_bytes"
            )


def _joined(found: Sequence["array[int] | int"]) -> NDArray[np.int64] | None:
    """(place, bytes) of each value, int64 ``[rows, 2]``; None if all of them are stored encoded."""
    nowhere = np.array([[row_groups.NOWHERE, 0]], "<i8")
    parts = [nowhere if isinstance(one, int) else number_array(one).reshape(-1, 2) for one in found]
    if all(part[:, 0].max() == row_groups.NOWHERE for part in parts):
        return None
    counts = [one if isinstance(one, int) else 1 for one in found]
    return np.concatenate([part.repeat(count, 0) for part, count in zip(parts, counts, strict=True)])


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    for label, (one, other) in enumerate(zip(before, now, strict=False)):
        if one != other:
            return f"label {label} is {other!r} and was {one!r}"
    return f"there are {len(now)} and were {len(before)}"


class _Where(NamedTuple):
    """A row group for messages. ``first_row`` is its first row, counted from 0 in the file."""

    path: Path
    group: int
    first_row: int

    def refuse(self, title: str, reason: str, row: int | None = None) -> NoReturn:
        """Raise ``SourceInvalid`` for a column; ``row`` counts from 0 in the row group."""
        place = f"row group {self.group}" if row is None else f"row {self.first_row + row} (row group {self.group})"
        raise SourceInvalid(f"{self.path}: {place}, column {title!r}: {reason}")


def _read_numbers(file: TableFile, where: _Where, column: Column, title: str, default: Default | None) -> Array:
    values = file.read(where.group, title, NUMBERS_BYTES_MAX)
    nulls = None
    if values.null_count and default is not None:
        nulls, values = values.is_null().to_numpy(), values.drop_null()
    if values.null_count:
        row = int(values.is_null().to_numpy().argmax())
        where.refuse(title, f"there is no value, and the field {column.name} needs one in each row", row)
    try:
        read = converted(column, values.to_numpy()).astype(_stored(column), copy=False)
    except Unfitting as error:
        where.refuse(title, str(error), error.place if nulls is None else int(np.flatnonzero(~nulls)[error.place]))
    if nulls is None:
        return read
    whole = np.full(len(nulls), default, _stored(column))
    whole[~nulls] = read
    return whole


def _find(file: TableFile, stream: BinaryIO, group: int, title: str) -> "array[int] | None":
    """The extents of a column's values in a row group; None if the file does not have them."""
    if isinstance(file, ArrowFile):
        return file.extents(group, title)
    at = row_groups.column_at(file.schema, title)
    kind = at.kind
    if at.steps or not row_groups.is_stored_as_bytes(kind):
        return None
    path = f"{title}.{row_groups.BYTES}" if row_groups.is_image(kind) else title
    chunk = file.uncompressed(group, path)
    if chunk is None:
        return None
    if isinstance(raw := getattr(stream, "raw", None), ObjectStream):
        raw.expect(chunk.end, KEPT_BYTES_MAX)
    return _extents_of(stream, chunk.start, chunk.end, _values(file, group, path), repeats=chunk.has_dictionary)


def _values(file: row_groups.ParquetFile, group: int, path: str) -> Iterator[memoryview | None]:
    for piece in file.batches(group, path, ROWS_AT_ONCE):
        values = piece.flatten()[0] if row_groups.is_image(piece.type) else piece
        for value in values:
            raw = value.as_buffer()
            # it is of signed ones, unequal to all bytes
            yield None if raw is None else memoryview(raw).cast("B")


def _extents_of(
    stream: BinaryIO, start: int, end: int, values: Iterable[memoryview | None], *, repeats: bool
) -> "array[int] | None":
    """(place, bytes) of each value of a chunk, flat.

    The chunk is bytes ``start`` to ``end`` of the file. ``repeats``: the file may hold one value
    for several rows. None if the file does not hold the values as they are.
    """
    found = array("q")
    known: dict[int, int] = {}
    behind = start
    for value in values:
        if value is None:
            found.extend((row_groups.NOWHERE, 0))
            continue
        size = value.nbytes
        place = _next_place(stream, behind, end, value)
        name = hash(bytes(value)) if repeats else 0
        if place is not None:
            behind = place + size
            known.setdefault(name, place)
        elif name in known and row_groups.read_at(stream, known[name], size) == value:
            place = known[name]
        else:
            return None
        found.extend((place, size))
    return found


def _next_place(stream: BinaryIO, behind: int, end: int, value: memoryview) -> int | None:
    size = value.nbytes
    for guess in (behind + LENGTH_BYTES, behind):
        if guess + size <= end and row_groups.read_at(stream, guess, size) == value:
            return guess
    window = row_groups.read_at(stream, behind, max(0, min(GAP_BYTES + size, end - behind)))
    offset = window.find(value)
    return None if offset < 0 else behind + offset


def _stored(column: Column) -> np.dtype[np.generic]:
    return np.dtype(column.dtype).newbyteorder("<")


def _problems(source: ParquetSource, storage: Storage) -> list[str]:
    """Check the footer of one file, too, to find a missing column before the daemon starts."""
    problems = shards_problems(source, storage)
    file = None if problems else file_to_look_at(source)
    if file is not None:
        with quick_look(storage).open(file) as stream:
            check_columns(source, file, stream)
    return problems


def _neighbours(_source: ParquetSource, index: SourceIndex) -> Neighbours:
    """Neighbours are rows of one row group; its bytes are those that a worker reads of it."""
    firsts = index.arrays["groups"][:, 2]
    rows = np.diff(firsts, append=len(index))
    has_rows = rows > 0
    sizes = index.arrays["chunks"].sum(axis=1)[has_rows].astype(np.float64)
    for name, extents in index.arrays.items():
        if name.startswith("extents."):
            sizes += np.add.reduceat(extents[:, 1], firsts[has_rows])
    return in_files(firsts, len(index), sample_bytes=sizes / rows[has_rows])


def _find_files(_source: ParquetSource, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    """The rows of the files that match."""
    files, _groups, firsts = index.arrays["groups"].T
    group = np.searchsorted(files, np.arange(len(index.names("shards"))))
    return find_in_shards(pattern, index, np.append(firsts, len(index))[group])


KINDS = {
    ParquetSource: BuiltInKind(
        problems=_problems,
        scan=lambda source, survey: isolated_scan(MODULE, source, survey),
        neighbours=_neighbours,
        find=_find_files,
    )
}


if __name__ == "__main__":
    sys.exit(answer(scan))
