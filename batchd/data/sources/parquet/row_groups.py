"""Parquet files in pyarrow: footers, types, and columns of row groups. Daemon and workers.

    file -- row group -- column chunk -- pages -- values     pyarrow reads at least one column chunk

The types of columns that fit each column of a sample:

    "image"     binary, or a struct of ``bytes`` and ``path``, as Hugging Face stores images
    "bytes"     the same
    "text"      string
    "text[<=8]" a list of strings; "image[<=8]" one of images
    "json"      structs, lists, strings, numbers in one another; a string with JSON
    "int64"     a number
    "int32[?]"  a list of numbers, or binary

A column is found by its name, or by a path of keys into structs and lists, as in JSON:
"meta.stars", "boxes.0", "boxes.#".

Everything runs in the caller's thread: there is a worker for every core.

Invariants: a type that is accepted here can be read; single values may still be null, too long or
too large. A file that cannot be read raises ``Unreadable`` with the reason, whatever pyarrow
raises; a fault of this process stays an ``OSError`` or a ``MemoryError``.
"""

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import OUR_OWN_FAULTS, SampleUnreadable
from batchd.data.sources.jsonl.values import LENGTH
from batchd.data.storage.index import readable
from batchd_wire.wording import counted

PAGE_BYTES, DATA_PAGE, DATA_PAGE_2 = 3, 5, 8
"""Numbers of the fields of a page header."""
VALUES = 1
"""Number of a field of a data page's header."""
HEADER_BYTES = 256
HEADER_BYTES_MAX = 1 << 20
"""A header may hold the smallest and the largest value of its page."""
_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 6, 7, 8, 9, 10, 12
_LONG: Final = 15
"""In place of the length of a list that has more elements than this."""
_SHIFT_MAX = 63

Header = dict[int, object]


def count_values(stream: BinaryIO, start: int, end: int) -> int:
    """The values of the pages from one byte of a file to another. Raises ``ValueError``.

        column chunk   | header | page | header | page | ...   header: bytes of the page, its values

    Headers are in Thrift. pyarrow gives the numbers of the footer only, and a few bytes of footer
    may announce any number of rows. No page is decoded.

    Invariant: every loop reads at least one byte of the header, whatever is in it.
    """
    found = 0
    while start < end:
        header, size = _header_at(stream, start, end)
        page_bytes = header.get(PAGE_BYTES)
        if not isinstance(page_bytes, int) or page_bytes < 0:
            raise ValueError(f"the header of a page at byte {start} is damaged")
        for kind in (DATA_PAGE, DATA_PAGE_2):
            data_page = header.get(kind)
            values = data_page.get(VALUES) if isinstance(data_page, dict) else None
            found += values if isinstance(values, int) else 0
        start += size + page_bytes
    return found


def _header_at(stream: BinaryIO, start: int, end: int) -> tuple[Header, int]:
    """The header of a page, and its bytes. Raises ``ValueError``."""
    window = HEADER_BYTES
    while True:
        stream.seek(start)
        data = stream.read(min(window, end - start))
        try:
            return _struct(data, 0)
        except (IndexError, RecursionError):
            window *= 16
            if window > HEADER_BYTES_MAX or len(data) == end - start:
                raise ValueError(f"the header of a page at byte {start} is damaged") from None


def _struct(data: bytes, offset: int) -> tuple[Header, int]:
    """The fields of a struct, and the byte behind it. Raises ``IndexError`` at the end of data."""
    found: Header = {}
    number = 0
    while head := data[offset]:
        offset += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, offset = _signed(data, offset)
        found[number], offset = _value(data, offset, kind)
    return found, offset + 1


def _value(data: bytes, offset: int, kind: int) -> tuple[object, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, offset
    if kind == _BYTE:
        return data[offset], offset + 1
    if _BYTE < kind <= _I64:
        return _signed(data, offset)
    if kind == _DOUBLE:
        return None, offset + 8
    if kind == _BINARY:
        length, offset = _unsigned(data, offset)
        return None, offset + length
    if kind in (_LIST, _SET):
        return None, _behind_list(data, offset)
    if kind == _STRUCT:
        return _struct(data, offset)
    raise ValueError(f"a page has a field of the unknown type {kind}")


def _behind_list(data: bytes, offset: int) -> int:
    count, kind = data[offset] >> 4, data[offset] & 15
    offset += 1
    if count == _LONG:
        count, offset = _unsigned(data, offset)
    for _element in range(count):
        _, offset = _value(data, offset, _BYTE if kind in (_TRUE, _FALSE) else kind)
        data[offset - 1]  # elements end with the data
    return offset


def _unsigned(data: bytes, offset: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        number |= (byte & 127) << shift
        if byte < 128:  # noqa: PLR2004  the highest bit says that another byte follows
            return number, offset
        shift += 7
        if shift > _SHIFT_MAX:
            raise ValueError("a page has a number of more than 64 bits")


def _signed(data: bytes, offset: int) -> tuple[int, int]:
    number, offset = _unsigned(data, offset)
    return number >> 1 ^ -(number & 1), offset


BYTES, PATH = "bytes", "path"
"""The fields of an image as Hugging Face stores it."""
HUGGING_FACE = b"huggingface"
"""The key, in a file's metadata, of what Hugging Face's `datasets` says about columns, in JSON."""
NOWHERE = -1
"""The place of a value that is null, or stored encoded."""
BUFFER_BYTES = 1 << 20
"""How much is read at once of a column chunk that is read in pieces."""
ROWS_AT_ONCE = 1024
"""Rows of a row group that are decoded at once."""
FOOTER_BYTES = 64 << 10
"""Read from the end of a file: the footer is in it, as a rule."""
_FLOATING = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""Numpy's names of the numbers that Arrow calls otherwise."""
TAIL_BYTES = 8
"""Behind the footer: its length and the magic."""
MAGICS = {b"PAR1": "", b"PARE": "is encrypted; batchd has no keys, so write it without encryption"}


class Unreadable(SampleUnreadable):
    """A file, or a part of it, cannot be read as what it is."""


class Footer(NamedTuple):
    """The size in bytes of a file and the CRC-32 of its footer, which identify it."""

    size: int
    crc: int


class ColumnChunk(NamedTuple):
    """The bytes of a column of a row group. With a dictionary, rows may share values."""

    start: int
    end: int
    has_dictionary: bool


class ColumnFacts(NamedTuple):
    """The nulls in a column, and the largest size of its whole numbers; None if it is not known."""

    nulls: int
    largest: int | None


class ColumnPath(NamedTuple):
    """A column of a file, or what a path of keys leads to in it, with its type."""

    top: str
    steps: tuple[str, ...]
    kind: pa.DataType
    stored: str
    """The part of the path that leads through structs alone: Parquet stores it by itself."""

    def within(self, values: pa.Array) -> pa.Array:
        """The values of a column that the path leads to; null where there are none."""
        for step in self.steps:
            if pa.types.is_struct(values.type):
                values = pc.struct_field(values, [step])
            elif step == LENGTH:
                values = pc.list_value_length(values).cast(pa.int64())
            else:
                values = _elements(values, int(step))
        return values


def _elements(lists: pa.Array, number: int) -> pa.Array:
    """The element ``number`` of each list; null in a shorter one."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(lists.type):
        firsts = (np.arange(len(lists)) + lists.offset) * lists.type.list_size
    else:
        firsts = lists.offsets.to_numpy()[: len(lists)]
    return lists.values.take(pa.array(firsts + number, pa.int64(), mask=lengths <= number))


def path_in(schema: pa.Schema, title: str) -> ColumnPath | None:
    """The column that is called so, or else that a path leads to; None if there is none.

    Names may have dots: the longest one that begins the path is the column's.
    """
    parts = title.split(".")
    begins = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    top = next((name for name in begins if len(schema.get_all_field_indices(name)) == 1), None)
    if top is None:
        return None
    steps = title[len(top) + 1 :].split(".") if title != top else []
    kind, stored = schema.field(top).type, [top]
    for number, step in enumerate(steps, 1):
        if pa.types.is_struct(kind) and kind.get_field_index(step) >= 0:
            stored += [step] if len(stored) == number else []
            kind = kind.field(step).type
        elif is_list(kind) and step == LENGTH:
            kind = pa.int64()
        elif is_list(kind) and step.isascii() and step.isdecimal():
            kind = kind.value_type
        else:
            return None
    return ColumnPath(top, tuple(steps), kind, ".".join(stored))


def column_at(schema: pa.Schema, title: str) -> ColumnPath:
    """As ``path_in``, of a column that ``check_columns`` has found."""
    path = path_in(schema, title)
    if path is None:
        raise Unreadable(f"has no column {title!r}")
    return path


class ParquetFile:
    """One open file, which the caller closes."""

    fewer_rows = "write the file again with row_group_size = {rows}, or without compression, where any size will do"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        footer, size = _read_footer(stream)
        self.footer = Footer(size, zlib.crc32(footer))
        with reasons():
            self._metadata = parquet.read_metadata(pa.BufferReader(footer))
            self._file = parquet.ParquetFile(
                stream,
                metadata=self._metadata,
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,  # or a whole column chunk is read before its first value is there
                page_checksum_verification=True,
            )
            self.schema: pa.Schema = self._file.schema_arrow
            self._counted: set[tuple[int, int]] = set()
            self._leaves = [self._file.schema.column(leaf).path for leaf in range(self._metadata.num_columns)]

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each row group, according to the footer."""
        with reasons():
            return [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]

    def decoded_bytes(self, group: int, title: str) -> int:
        """The approximate bytes of a decoded column of a row group, from the footer; at least 1."""
        with reasons():
            row_group = self._metadata.row_group(group)
            sizes = [int(row_group.column(leaf).total_uncompressed_size) for leaf in self._leaves_of(title)]
            return max(1, sum(sizes))

    def known(self, group: int, title: str) -> ColumnFacts | None:
        """What the footer says of the values of a plain column in a row group; None for nothing."""
        with reasons():
            leaves = self._leaves_of(title)
            found = self._metadata.row_group(group).column(leaves[0]).statistics if len(leaves) == 1 else None
            if found is None or not found.has_null_count:
                return None
            limits = (found.min, found.max) if found.has_min_max else ()
            whole = [limit for limit in limits if isinstance(limit, int)]
            return ColumnFacts(found.null_count, max(map(abs, whole)) if whole else None)

    def uncompressed(self, group: int, path: str) -> ColumnChunk | None:
        """The extent of a column that is not compressed; None for a compressed one."""
        with reasons():
            (leaf,) = self._leaves_of(path)
            chunk = self._metadata.row_group(group).column(leaf)
            if chunk.compression != "UNCOMPRESSED":
                return None
            return ColumnChunk(*_range_of(chunk), bool(chunk.has_dictionary_page))

    def extent(self, group: int, title: str) -> tuple[int, int]:
        """(first byte, bytes) in the file of a column of a row group, in all its stored columns."""
        with reasons():
            row_group = self._metadata.row_group(group)
            ranges = [_range_of(row_group.column(leaf)) for leaf in self._leaves_of(title)]
        start, end = min(first for first, _ in ranges), min(max(last for _, last in ranges), self.footer.size)
        return start, max(0, end - start)

    def check_rows(self, group: int, title: str) -> None:
        """Compare the rows that the footer announces with a column whose pages stay encoded.

        Only of a column with fewer bytes than rows, such as many nulls or one value repeated.
        Raises ``Unreadable`` if its pages hold fewer values, or are also those of another row
        group.
        """
        for leaf in self._leaves_of(title):
            with reasons():
                start, end = _range_of(self._metadata.row_group(group).column(leaf))
                if end - start >= self.rows[group]:
                    continue
                found = count_values(self._stream, start, min(end, self.footer.size))
            if found < self.rows[group]:
                raise Unreadable(
                    f"its pages hold {counted(found, 'value')}, and the footer announces {counted(self.rows[group], 'row')}"
                )
            if (leaf, start) in self._counted:
                raise Unreadable(f"it has its bytes, from {start} to {end}, in common with another row group")
            self._counted.add((leaf, start))

    def _leaves_of(self, title: str) -> list[int]:
        """The numbers of the stored columns of a column of the schema, or of a field of one."""
        stored = column_at(self.schema, title).stored
        return [leaf for leaf, path in enumerate(self._leaves) if path == stored or path.startswith(f"{stored}.")]

    def read(self, group: int, title: str, max_bytes: int) -> pa.ChunkedArray:
        """One column of a row group.

        Raises ``Unreadable``, also beyond ``max_bytes``: a footer may be wrong about the size, and
        a few values of a dictionary may be repeated millions of times.
        """
        pieces: list[pa.Array] = []
        size = 0
        for piece in self.batches(group, title, ROWS_AT_ONCE):
            pieces.append(piece)
            size += piece.nbytes
            if size > max_bytes:
                raise too_large(title, max_bytes)
        return pa.chunked_array(pieces)

    def batches(self, group: int, title: str, rows: int) -> Iterator[pa.Array]:
        """The same, in pieces of a number of rows, one of them in memory at a time."""
        path = column_at(self.schema, title)
        pieces = self._file.iter_batches(rows, row_groups=[group], columns=[path.stored], use_threads=False)
        found = 0
        while True:
            with reasons():
                piece = next(pieces, None)
            if piece is None:
                break
            found += len(piece)
            with reasons():
                column = path.within(piece.column(0))  # pandas' categories are numbers of values
            yield column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if found != self.rows[group]:
            raise Unreadable(f"holds {counted(found, 'row')}, and the footer says {self.rows[group]}")


def too_large(title: str, max_bytes: int) -> Unreadable:
    """The error of a column that has more bytes than its reader may keep."""
    return Unreadable(f"the column {title!r} of the row group has more than {max_bytes} bytes when it is decoded")


@contextmanager
def reasons() -> Iterator[None]:
    """What pyarrow raises, as one kind of error."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno in OUR_OWN_FAULTS:
            raise
        first_line = readable(str(error).strip().partition("\n")[0].encode())
        raise Unreadable(first_line or type(error).__name__) from None


def use_one_thread() -> None:
    """Keep pyarrow from making threads in this process."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def _range_of(chunk: parquet.ColumnChunkMetaData) -> tuple[int, int]:
    """The first byte of a column of a row group, and the one behind its last."""
    start = max(0, min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset))
    return start, start + chunk.total_compressed_size


def _read_footer(stream: BinaryIO) -> tuple[bytes, int]:
    """The footer with its length and the magic, mostly in one read, and the file's bytes."""
    size = stream.seek(0, os.SEEK_END)
    tail = read_at(stream, max(0, size - FOOTER_BYTES), FOOTER_BYTES)
    _check_magic(stream, tail[-4:], size)
    length = footer_bytes(tail)
    if len(tail) < length <= size:
        tail = read_at(stream, size - length, length)
    return tail[-length:], size


def footer_bytes(end: bytes | memoryview) -> int:
    """How long a footer is, with its length and the magic, by the last bytes of a file."""
    return int.from_bytes(end[-TAIL_BYTES:-4], "little") + TAIL_BYTES


def read_at(stream: BinaryIO, start: int, size: int) -> bytes:
    """Bytes of an open file, fewer where it ends before."""
    stream.seek(start)
    return stream.read(size)


def _check_magic(stream: BinaryIO, end: bytes, size: int) -> None:
    if MAGICS.get(end):
        raise Unreadable(MAGICS[end])
    if not size:
        raise Unreadable("is empty")
    if end in MAGICS and size >= TAIL_BYTES:
        return
    start = read_at(stream, 0, 4)
    if size < TAIL_BYTES or start not in MAGICS:
        raise Unreadable(f"is not a Parquet file: it starts with {start!r} and has {size} bytes")
    raise Unreadable(f"is cut or damaged: it ends at byte {size} without the footer of a Parquet file; copy it again")


def problem_of(column: Column, kind: pa.DataType) -> str:
    """Why a column of the file cannot be a column of a sample; "" where it can."""
    kind = _undictionary(kind)
    if column.is_file or column.kind == "bytes":
        good = is_bytes(kind) or is_image(kind)
    elif column.kind == "images":
        good = is_list(kind) and (is_bytes(kind.value_type) or is_image(kind.value_type))
    elif column.kind == "text":
        good = _is_text(kind)
    elif column.kind == "json":
        good = _is_json(kind)
    elif column.kind == "texts":
        good = _is_text(kind) or (is_list(kind) and _is_text(_undictionary(kind.value_type)))
    elif column.shape:
        good = is_bytes(kind) or (is_list(kind) and is_number(kind.value_type))
    else:
        good = is_number(kind)
    if good:
        return ""
    text = str(kind)
    shown = text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004  as much as a line holds
    return f'is {shown}, which cannot be "{column.text}": {_advice(column, kind)}'


def is_bytes(kind: pa.DataType) -> bool:
    """True if each value is a run of bytes."""
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def is_image(kind: pa.DataType) -> bool:
    """True for an image as Hugging Face stores it."""
    return bool(pa.types.is_struct(kind)) and kind.get_field_index(BYTES) >= 0 and is_bytes(kind.field(BYTES).type)


def has_path(kind: pa.DataType) -> bool:
    """True if such an image may be a file instead."""
    return is_image(kind) and kind.get_field_index(PATH) >= 0 and _is_text(kind.field(PATH).type)


def is_single_number(column: Column) -> bool:
    """True for one number for each sample, which the index holds."""
    return column.kind == "array" and not column.shape


def class_names(schema: pa.Schema, title: str) -> tuple[str, ...]:
    """The names of a column's labels, if Hugging Face's `datasets` wrote them into the file."""
    try:
        feature = json.loads(schema.metadata[HUGGING_FACE])["info"]["features"][title]
        names = feature["names"] if feature["_type"] == "ClassLabel" else ()
    except (LookupError, TypeError, ValueError, RecursionError):
        return ()
    good = isinstance(names, list) and all(isinstance(name, str) and name and "\0" not in name for name in names)
    return tuple(names) if good else ()


def is_stored_as_bytes(kind: pa.DataType) -> bool:
    """True if a page holds each value as a run of bytes."""
    kind = _undictionary(kind)
    return is_bytes(kind) or _is_text(kind) or is_image(kind)


def _undictionary(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_json(kind: pa.DataType) -> bool:
    """True if each value can be written as JSON."""
    kind = _undictionary(kind)
    if pa.types.is_struct(kind):
        return all(_is_json(kind.field(number).type) for number in range(kind.num_fields))
    return _is_json(kind.value_type) if is_list(kind) else _is_text(kind) or is_number(kind) or pa.types.is_null(kind)


def is_list(kind: pa.DataType) -> bool:
    """True for lists of values, of one length or of several."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """True for whole numbers, floating-point numbers and booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def dtype_of(number: pa.DataType) -> np.dtype[np.generic]:
    """Return numpy's dtype; ``to_pandas_dtype`` wants pandas in many versions of pyarrow."""
    return np.dtype(_FLOATING.get(str(number), str(number)))


def _advice(column: Column, kind: pa.DataType) -> str:
    if is_bytes(kind) or is_image(kind):
        return 'declare it as "image", or as "uint8[?]"' if is_bytes(kind) else 'declare it as "image"'
    if _is_text(kind):
        return 'declare it as "text"'
    if is_number(kind):
        return f'declare it as "{dtype_of(kind)}"'
    if is_list(kind) and is_number(kind.value_type):
        return f'declare it as "{dtype_of(kind.value_type)}[?]"'
    if is_list(kind) and (is_bytes(kind.value_type) or is_image(kind.value_type)):
        return 'declare it as "image[<=8]"'
    if is_list(kind) and _is_text(_undictionary(kind.value_type)):
        return 'declare it as "text[<=8]", or as "json"'
    if _is_json(kind) and pa.types.is_struct(kind.value_type if is_list(kind) else kind):
        return 'declare it as "json"'
    return f"write {column.name} as a number, a string, binary, or a list of numbers"
