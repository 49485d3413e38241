"""Parquet files become an index. Daemon, once at the start.

    footers                       -> which rows there are, and how much a row group holds
    columns of single numbers     -> read, and kept in the index: a worker need not read them
    columns of bytes and strings  -> read once where they are not compressed, to know where each value stands (``verbatim``)
    everything else               -> workers decode row groups; one that is too large for that is refused

Invariant: no list with an entry for each sample is made; what is kept of a sample are numbers in
flat arrays.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column, declared_columns
from batchd.samples.values import Unfitting, converted
from batchd.sources.files.walk import Patterns, file_to_look_at, shards_of, shards_problems
from batchd.sources.interface import BuiltInKind
from batchd.sources.parquet.index import NOWHERE, extents_of
from batchd.sources.parquet.options import ParquetSource
from batchd.sources.parquet.row_groups import ParquetFile, Unreadable
from batchd.sources.parquet.types import BYTES, class_names, is_image, is_single_number, is_stored_as_bytes, problem_of
from batchd.storage.access import Storage
from batchd.storage.index import NUMBER, SourceIndex, blob
from batchd.storage.paths import size_of
from batchd.storage.remote_stream import ObjectStream
from batchd.storage.survey import Survey, quick_look
from batchd.suggestions import suggestion
from batchd_wire.wording import counted

ROWS_MAX = 1 << 27
"""Rows of one row group; a footer that says more is damaged, or was not written for training."""
LABEL = "label"
NUMBERS_BYTES_MAX = 8 * ROWS_MAX
ROWS_AT_ONCE = 32
"""Values of a column of bytes in memory at a time while their places are looked for, besides what pyarrow has decoded: 1024."""
KEPT_BYTES_MAX = 256 << 20
"""What was read of a server is kept until pyarrow's values were compared with it; beyond this it is read a second time."""


def _scan(source: ParquetSource, survey: Survey) -> SourceIndex:
    """Find all rows of all files, in the order of the files' paths. Raises ``SourceInvalid``."""
    shards = shards_of(Patterns(source.root, source.shards, "shards", source.allow_outside_root), survey)
    scanning = _Scan(source, survey)
    for number, shard in enumerate(shards):
        path = source.root / shard.decode("utf-8", "surrogateescape")
        with survey.open(path) as stream:
            scanning.add(number, path, stream)
    return scanning.finish(shards)


def check_columns(
    source: ParquetSource, path: Path, stream: BinaryIO, looked: Callable[[], None] = lambda: None
) -> ParquetFile:
    """A file that has all columns that are read of it; ``looked`` as ``ParquetFile`` has it. Raises ``SourceInvalid``."""
    if not size_of(stream):
        raise SourceInvalid(f"{path} is empty; leave it out of the shards")
    try:
        file = ParquetFile(stream, looked)
    except Unreadable as error:
        raise SourceInvalid(f"{path} cannot be read as Parquet: {error}") from None
    for column in declared_columns(source.fields):
        _check_column(path, file, column, source.names.get(column.name, column.name))
    return file


class _Scan:
    """An index of rows while it is built."""

    def __init__(self, source: ParquetSource, survey: Survey) -> None:
        self._source = source
        self._survey = survey
        self._columns = declared_columns(source.fields)
        self._samples = 0
        self._classes: tuple[str, ...] = ()
        self._files, self._groups, self._chunks = array("q"), array("q"), array("q")
        self._numbers = {column.name: bytearray() for column in self._columns if is_single_number(column)}
        self._extents = {column.name: array("q") for column in self._columns if not is_single_number(column)}

    def add(self, number: int, path: Path, stream: BinaryIO) -> None:
        """Add the rows of a file."""
        file = check_columns(self._source, path, stream, self._survey.looked)
        try:
            groups = file.rows
        except Unreadable as error:
            raise SourceInvalid(f"{path} cannot be read as Parquet: {error}") from None
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
            self._check_size(where, rows)
            self._samples += rows
            self._survey.progress(self._samples)

    def finish(self, shards: Sequence[bytes]) -> SourceIndex:
        """Make the index."""
        if not self._samples:
            raise SourceInvalid(f"the files of {self._source.place} hold no row")
        arrays: dict[str, NDArray[Any]] = {
            "shards": blob(tuple(shards)),
            "files": _rows(self._files, 2),
            "groups": _rows(self._groups, 3),
            "chunks": _rows(self._chunks, len(self._columns)),
        }
        for column in self._columns:
            if is_single_number(column):
                arrays[f"numbers.{column.name}"] = np.frombuffer(self._numbers[column.name], _stored(column))
            elif (extents := _rows(self._extents[column.name], 2))[:, 0].max() > NOWHERE:
                arrays[f"extents.{column.name}"] = extents
        if self._classes:
            arrays["classes"] = blob([name.encode("utf-8", "surrogatepass") for name in self._classes])
        facts = {"fields": dict(self._source.fields), "names": dict(self._source.names)}
        return SourceIndex.build(
            self._samples, facts, arrays, {"root": str(self._source.root.absolute()), **self._survey.place()}
        )

    def _add_classes(self, path: Path, file: ParquetFile) -> None:
        """Note the names of the classes: those of the field `label`, or of the only field that has some."""
        singles = filter(is_single_number, self._columns)
        named = {column.name: class_names(file.schema, self._title(column)) for column in singles}
        found = [names for name, names in named.items() if names and (name == LABEL or not named.get(LABEL))]
        if len(found) != 1:
            return
        (names,) = found
        if self._classes and names != self._classes:
            raise SourceInvalid(
                f"{path} has other classes than the files before it: {_difference(self._classes, names)}; a label means one class"
            )
        self._classes = names

    def _title(self, column: Column) -> str:
        return self._source.names.get(column.name, column.name)

    def _chunk(self, file: ParquetFile, stream: BinaryIO, where: "_Where", column: Column, rows: int) -> int:
        """Note a column of a row group; returns how many bytes workers have to decode for one value of it."""
        title = self._title(column)
        try:
            if is_single_number(column):
                self._numbers[column.name] += _read_numbers(file, where, column, title).tobytes()
                return 0
            extents = _find(file, stream, where.group, title)
            decoded_bytes = file.decoded_bytes(where.group, title)
        except Unreadable as error:
            where.refuse(title, str(error))
        if extents is not None:
            self._extents[column.name] += extents
            if NOWHERE not in extents[::2]:
                return 0
        else:
            self._extents[column.name].frombytes(np.tile(np.array([NOWHERE, 0], np.int64), rows).tobytes())
        return decoded_bytes

    def _check_size(self, where: "_Where", rows: int) -> None:
        sizes = dict(zip(self._source.fields, self._chunks[-len(self._columns) :], strict=True))
        size = sum(sizes.values())
        if size > self._source.cache_bytes:
            names = ", ".join(name for name, part in sizes.items() if part)
            fit = max(1, rows * self._source.cache_bytes // size // 16)
            raise SourceInvalid(
                f"{where.path}: row group {where.group} holds {counted(rows, 'row')} of {size} bytes together ({names}), "
                f"more than cache_bytes = {self._source.cache_bytes}, and one row cannot be read without the others: write the "
                f"file again with row_group_size = {min(fit, 10)}, or without compression, where any size will do; or raise "
                "cache_bytes"
            )


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    """The first label with another name."""
    for label, (one, other) in enumerate(zip(before, now, strict=False)):
        if one != other:
            return f"label {label} is {other!r} and was {one!r}"
    return f"there are {len(now)} and were {len(before)}"


class _Where:
    """A row group for messages. ``first_row`` is its first row, counted from 0 in the file."""

    def __init__(self, path: Path, group: int, first_row: int) -> None:
        self.path, self.group, self.first_row = path, group, first_row

    def refuse(self, title: str, reason: str, row: int | None = None) -> NoReturn:
        """Raise ``SourceInvalid`` for a column; ``row`` counts from 0 in the row group."""
        place = f"row group {self.group}" if row is None else f"row {self.first_row + row} (row group {self.group})"
        raise SourceInvalid(f"{self.path}: {place}, column {title!r}: {reason}")


def _check_column(path: Path, file: ParquetFile, column: Column, title: str) -> None:
    places = file.schema.get_all_field_indices(title)
    if not places:
        raise SourceInvalid(
            f"{path} has no column {title!r} for the field {column.name}; {suggestion(title, file.schema.names)}"
        )
    if len(places) > 1:
        raise SourceInvalid(f"{path} has {len(places)} columns {title!r}")
    problem = problem_of(column, file.schema.field(places[0]).type)
    if problem:
        raise SourceInvalid(f"{path}: column {title!r} {problem}")


def _read_numbers(file: ParquetFile, where: _Where, column: Column, title: str) -> NDArray[Any]:
    values = file.read(where.group, title, NUMBERS_BYTES_MAX)
    if values.null_count:
        row = int(values.is_null().to_numpy().argmax())
        where.refuse(title, f"there is no value, and the field {column.name} needs one in each row", row)
    try:
        return converted(column, values.to_numpy()).astype(_stored(column), copy=False)
    except Unfitting as error:
        where.refuse(title, str(error), error.place)


def _find(file: ParquetFile, stream: BinaryIO, group: int, title: str) -> "array[int] | None":
    """The extents of a column's values in a row group; None where they do not stand in the file as they are."""
    kind = file.schema.field(title).type
    if not is_stored_as_bytes(kind):
        return None
    path = f"{title}.{BYTES}" if is_image(kind) else title
    chunk = file.uncompressed(group, path)
    if chunk is None:
        return None
    if isinstance(raw := getattr(stream, "raw", None), ObjectStream):
        raw.expect(chunk.end, KEPT_BYTES_MAX)
    values = _values(file, group, path)
    return extents_of(stream, chunk.start, chunk.end, values, repeats=chunk.has_dictionary)


def _values(file: ParquetFile, group: int, path: str) -> Iterator[memoryview | None]:
    for piece in file.batches(group, path, ROWS_AT_ONCE):
        values = piece.flatten()[0] if is_image(piece.type) else piece
        for value in values:
            raw = value.as_buffer()
            yield None if raw is None else memoryview(raw).cast("B")  # it is of signed ones, unequal to all bytes


def _stored(column: Column) -> np.dtype[Any]:
    return np.dtype(column.dtype).newbyteorder("<")


def _rows(numbers: "array[int]", width: int) -> NDArray[np.int64]:
    flat = np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)
    return flat.astype(NUMBER, copy=False).reshape(-1, width)


def _problems(source: ParquetSource, storage: Storage) -> list[str]:
    """The footer of one file is read too, so that a column that is not there is found before the daemon starts."""
    problems = shards_problems(source.root, source.shards, storage)
    file = None if problems else file_to_look_at(source.root, source.shards)
    if file is not None:
        with quick_look(storage).open(file) as stream:
            check_columns(source, file, stream)
    return problems


KINDS = {
    ParquetSource: BuiltInKind(
        problems=_problems,
        columns=lambda source, _storage: declared_columns(source.fields),
        scan=_scan,
    )
}
