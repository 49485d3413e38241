"""Arrow files in pyarrow, as `save_to_disk` of Hugging Face's `datasets` writes them.

Daemon and workers. An Arrow stream is messages, one after the other:

    | FF FF FF FF | bytes of metadata | metadata | body | ... | FF FF FF FF | 0 |

    schema          the columns
    record batch    some rows; its body has the buffers of each column, as they are in memory

The other form is a file with a footer, which has the columns, and where each record batch is:

    | ARROW1 0 0 | messages | FF FF FF FF | 0 | footer | bytes of the footer | ARROW1 |

What lies between may be such a stream, or only have the record batches (as of polars). A record
batch counts as a row group. pyarrow wants the whole body of a record batch to find its buffers, so
it gets anonymous memory of this size, and only the needed buffers are read into it. All other pages
stay untouched and take no memory.

Invariants: no file is mapped, so one that is cut ends no process. No value is looked at before
pyarrow has validated its column. A file that cannot be read raises ``Unreadable``.
"""

import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from batchd.data.sources.parquet.row_groups import (
    BYTES,
    NOWHERE,
    Footer,
    ParquetFile,
    Unreadable,
    column_at,
    is_image,
    is_stored_as_bytes,
    read_at,
    reasons,
    too_large,
)
from batchd.data.storage.paths import behind_the_end

FILE_MAGIC = b"ARROW1\0\0"
MESSAGE_MAGIC = b"\xff\xff\xff\xff"
HEAD = struct.Struct("<4si")
"""In front of a message: the magic, and the bytes of the metadata."""
METADATA_BYTES_MAX = 64 << 20
TAIL = struct.Struct("<i6s")
"""Behind a footer: its bytes, and the magic."""
BLOCK = struct.Struct("<qi4xq")
"""In a footer: the first byte of a message, the bytes of its head, and those of its body."""
ZEROS_MAX = 64 << 10
"""The longest padding between two record batches."""
SCHEMA, DICTIONARY, RECORD_BATCH = 1, 2, 3
"""Kinds of messages."""
END = HEAD.pack(MESSAGE_MAGIC, 0)
"""The end of a stream."""
_DICTIONARIES = "has dictionary-encoded columns; cast them to plain ones, or write Parquet"
INLINE_BYTES_MAX = 12
"""The longest value that is in its view."""
MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000
"""The last one is MAP_NORESERVE, which `mmap` names since Python 3.13. Shared, as the limit of a
scan counts private memory, and most of a record batch is never read."""


class _Message(NamedTuple):
    """A message of a file: where it starts, the bytes of its parts, and its rows."""

    start: int
    head_bytes: int
    body_bytes: int
    rows: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.start + self.head_bytes + self.body_bytes


class _FileFooter(NamedTuple):
    """Where a footer begins, and the message of each record batch: ``BLOCK``."""

    start: int
    blocks: list[tuple[int, ...]]


class _MappedColumn(NamedTuple):
    """A column of a record batch in memory that is zero where nothing was read."""

    values: pa.Array
    memory: mmap.mmap
    address: int
    start: int
    """Where the first byte of the memory is in the file."""

    def place(self, buffer: pa.Buffer) -> int:
        """Where a buffer is in the file."""
        return int(buffer.address) - self.address + self.start


class ArrowFile:
    """One open file, which the caller closes."""

    fewer_rows = "write the file again with {rows} rows in each record batch (`max_chunksize`)"

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._size = stream.seek(0, os.SEEK_END)
        self._footer = self._footer_in_file() if read_at(stream, 0, len(FILE_MAGIC)) == FILE_MAGIC else None
        with reasons():
            self.schema: pa.Schema = ipc.open_file(stream).schema if self._footer else self._schema_in_stream()
            _names = self.schema.names, list(map(str, self.schema.types))  # raises unless UTF-8

    def _schema_in_stream(self) -> pa.Schema:
        _first, head, kind = self._message(0)
        if kind != SCHEMA:
            raise Unreadable("does not begin with a schema")
        _check_endianness(head[HEAD.size :], 2)
        return ipc.read_schema(pa.BufferReader(head))

    def _footer_in_file(self) -> "_FileFooter":
        """The place of the footer, and the blocks of record batches in it."""
        tail = read_at(self._stream, max(0, self._size - TAIL.size), TAIL.size)
        size, magic = TAIL.unpack(tail) if len(tail) == TAIL.size else (0, b"")
        start = self._size - TAIL.size - size
        if magic != FILE_MAGIC[: TAIL.size - 4] or size <= 0 or start < len(FILE_MAGIC):
            raise Unreadable(f"is cut: it ends at byte {self._size} without the footer of an Arrow file; copy it again")
        _check_endianness(footer := read_at(self._stream, start, size), 1)
        try:
            table = _FlatTable.root(footer)
            has_dictionaries = bool(table.items(2, BLOCK))
            blocks = table.items(3, BLOCK)
        except (struct.error, ValueError):
            raise Unreadable("is damaged: its footer cannot be read") from None
        if has_dictionaries:
            raise Unreadable(_DICTIONARIES)
        return _FileFooter(start, blocks)

    @property
    def footer(self) -> Footer:
        """The bytes of the file, and the CRC-32 of the heads of all messages."""
        return Footer(self._size, self._messages[1])

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each record batch."""
        return [one.rows for one in self._messages[0]]

    @cached_property
    def _messages(self) -> tuple[list[_Message], int]:
        """All record batches, and the CRC-32 of all heads."""
        found: list[_Message] = []
        crc = 0
        for message, head, kind in self._in_stream() if self._footer is None else self._in_file(self._footer):
            if kind == DICTIONARY:
                raise Unreadable(_DICTIONARIES)
            if kind != RECORD_BATCH:
                raise Unreadable(f"has at byte {message.start} a message that is no record batch")
            crc = zlib.crc32(head, crc)
            found.append(message)
            if message.rows <= 0:
                self._batch(message)  # compares the rows with those of the columns
        return found, crc

    def _in_stream(self) -> Iterator[tuple[_Message, bytes, int]]:
        """The messages of a stream behind its schema, up to its end, behind which is nothing."""
        message = self._message(0)[0]
        while read_at(self._stream, message.end, HEAD.size) != END:
            yield (read := self._message(message.end))
            message = read[0]
        if problem := behind_the_end(self._stream, message.end + HEAD.size):
            raise Unreadable(f"{problem}; write the tables into one stream, or into files of their own")

    def _in_file(self, footer: "_FileFooter") -> Iterator[tuple[_Message, bytes, int]]:
        """The messages of a file, by its footer; nothing but padding and an end lies between."""
        end = None
        for start, _head_bytes, _body_bytes in footer.blocks:
            self._check_between(end, start)
            yield (read := self._message(start))
            end = read[0].end
        self._check_between(end, footer.start)

    def _check_between(self, end: int | None, start: int) -> None:
        """Refuse bytes from the ``end`` of a record batch to the next one, or to the footer."""
        if end is None or start == end:
            return
        is_near = end < start <= end + ZEROS_MAX
        if not is_near or read_at(self._stream, end, start - end).removeprefix(END).strip(b"\0"):
            raise Unreadable(
                f"has other bytes behind the record batch that ends at byte {end}, which its footer does not name, so no sample "
                "would have them; write it again"
            )

    def _message(self, start: int) -> tuple[_Message, bytes, int]:
        """The message at a byte, its head, and its kind."""
        front = read_at(self._stream, start, HEAD.size)
        if len(front) < HEAD.size:
            raise Unreadable(f"is cut: it ends at byte {self._size} without the end of an Arrow stream; copy it again")
        magic, metadata_bytes = HEAD.unpack(front)
        if magic != MESSAGE_MAGIC or not 0 < metadata_bytes <= METADATA_BYTES_MAX:
            raise Unreadable(f"is damaged: there is no message at byte {start}")
        metadata = read_at(self._stream, start + HEAD.size, metadata_bytes)
        try:
            table = _FlatTable.root(metadata)
            kind, body_bytes = table.number(1, "<B"), table.number(3, "<q")
            batch = table.below(2)
            rows = batch.number(0, "<q") if kind == RECORD_BATCH else 0
            is_compressed = kind == RECORD_BATCH and batch.has(3)
        except (struct.error, ValueError):
            raise Unreadable(f"is damaged: the message at byte {start} cannot be read") from None
        if is_compressed:
            raise Unreadable("is compressed, so no row can be read alone; write it without compression, or as Parquet")
        message = _Message(start, HEAD.size + metadata_bytes, body_bytes, rows)
        if body_bytes < 0 or len(metadata) < metadata_bytes or start + message.head_bytes + body_bytes > self._size:
            raise Unreadable(
                f"is cut or damaged: the message at byte {start} ends behind the file's {self._size} bytes"
            )
        return message, front + metadata, kind

    def decoded_bytes(self, group: int, title: str) -> int:
        """The bytes of a column of a record batch; at least 1."""
        return max(1, sum(int(buffer.size) for buffer in _buffers(self._column(group, title).values)))

    def extent(self, group: int, title: str) -> tuple[int, int]:
        """(first byte, bytes) in the file of a column of a record batch."""
        column = self._column(group, title)
        ranges = [(column.place(one), int(one.size)) for one in _buffers(column.values)]
        start = min((first for first, _size in ranges), default=0)
        return start, max((first + size for first, size in ranges), default=0) - start

    def extents(self, group: int, title: str) -> "array[int] | None":
        """(place, bytes) of each value of a column of bytes, flat; None for other columns.

        Reads the lengths of the values, and none of the values.
        """
        path = column_at(self.schema, title)
        kind = path.kind
        if path.steps or not is_stored_as_bytes(kind):
            return None
        column = self._column(group, title)
        values = column.values
        with reasons():
            is_null = np.zeros(len(values), bool)
            if is_image(kind):
                self._read(column, values.buffers()[:1])
                is_null |= values.is_null().to_numpy(zero_copy_only=False)
                values = values.field(kind.get_field_index(BYTES))
            if pa.types.is_binary_view(values.type) or pa.types.is_string_view(values.type):
                return self._extents_of_views(column, values, is_null)
            *others, data = values.buffers()
            self._read(column, others)
            is_null |= values.is_null().to_numpy(zero_copy_only=False)
            if pa.types.is_fixed_size_binary(values.type):
                ends = np.arange(len(values) + 1, dtype=np.int64) * values.type.byte_width
            else:
                large = pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)
                ends = np.frombuffer(others[1], np.int64 if large else np.int32)[: len(values) + 1].astype(np.int64)
        sizes = np.diff(ends)
        if ends[0] < 0 or sizes.min() < 0 or ends[-1] > (0 if data is None else data.size):
            raise Unreadable("the lengths of its values are damaged")
        found = np.empty((len(values), 2), np.int64)
        found[:, 0] = ends[:-1] + (0 if data is None else column.place(data))
        found[:, 1] = sizes
        found[is_null] = NOWHERE, 0
        return array("q", found.tobytes())

    def check_rows(self, group: int, title: str) -> None:
        """Compare the rows of a record batch with the buffers of a column.

        Raises ``Unreadable``.
        """
        self._column(group, title)

    def _extents_of_views(self, column: _MappedColumn, values: pa.Array, is_null: NDArray[np.bool_]) -> "array[int]":
        """Return the extents of values with views: a length, and the value or its place."""
        validity, views, *data = values.buffers()
        self._read(column, [validity, views])
        is_null |= values.is_null().to_numpy(zero_copy_only=False)
        fields = np.frombuffer(views, np.int32)[: 4 * len(values)].reshape(-1, 4).astype(np.int64)
        fields[is_null] = 0
        sizes, _prefix, numbers, offsets = fields.T
        is_inline = sizes <= INLINE_BYTES_MAX
        numbers = np.where(is_inline, len(data), numbers)
        if sizes.min() < 0 or numbers.min() < 0 or numbers[~is_inline].max(initial=-1) >= len(data):
            raise Unreadable("the lengths of its values are damaged")
        starts = np.array([*map(column.place, data), 0], np.int64)
        ends = np.array([*(buffer.size for buffer in data), 0], np.int64)
        if (~is_inline & ((offsets < 0) | (offsets + sizes > ends[numbers]))).any():
            raise Unreadable("the places of its values are damaged")
        inline = column.place(views) + 16 * np.arange(len(values)) + 4
        found = np.stack([np.where(is_inline, inline, starts[numbers] + offsets), sizes], 1)
        found[is_null] = NOWHERE, 0
        return array("q", found.astype(np.int64).tobytes())

    def read(self, group: int, title: str, max_bytes: int) -> pa.ChunkedArray:
        """One column of a record batch.

        Raises ``Unreadable``, also beyond ``max_bytes``.
        """
        column = self._column(group, title)
        buffers = list(_buffers(column.values))
        if sum(buffer.size for buffer in buffers) > max_bytes:
            raise too_large(title, max_bytes)
        self._read(column, buffers)
        with reasons():
            column.values.validate(full=True)
            return pa.chunked_array([column_at(self.schema, title).within(column.values)])

    def batches(self, group: int, title: str, rows: int) -> Iterator[pa.Array]:
        """The same, in pieces of a number of rows."""
        column = self.read(group, title, self._size).chunk(0)
        for first in range(0, len(column), rows):
            yield column[first : first + rows]

    def _column(self, group: int, title: str) -> _MappedColumn:
        """A column of a record batch in memory; nothing of it is read yet."""
        message = self._messages[0][group]
        batch, memory, buffer = self._batch(message)
        values = batch.column(self.schema.get_field_index(column_at(self.schema, title).top))
        end = buffer.address + buffer.size
        if any(not buffer.address <= one.address <= end - one.size for one in _buffers(values)):
            raise Unreadable("has a buffer that is not where its type needs it")
        return _MappedColumn(values, memory, buffer.address, message.start)

    def _batch(self, message: _Message) -> tuple[pa.RecordBatch, mmap.mmap, pa.Buffer]:
        """A record batch, the memory that it is in, and that memory as a buffer."""
        memory = mmap.mmap(-1, message.head_bytes + message.body_bytes, flags=MAP_FLAGS)
        memory[: message.head_bytes] = read_at(self._stream, message.start, message.head_bytes)
        buffer = pa.py_buffer(memory)
        with reasons():
            batch = ipc.read_record_batch(ipc.read_message(pa.BufferReader(buffer)), self.schema)
            batch.validate()  # all buffers are as long as the rows need
        return batch, memory, buffer

    def _read(self, column: _MappedColumn, buffers: Iterable[pa.Buffer | None]) -> None:
        """Read buffers of a column out of the file."""
        for buffer in buffers:
            if buffer is None or not buffer.size:
                continue
            offset = column.place(buffer)
            room = memoryview(column.memory)[offset - column.start :][: buffer.size]
            self._stream.seek(offset)  # type: ignore[attr-defined, unused-ignore]
            while room and (count := self._stream.readinto(room)):  # type: ignore[attr-defined]
                room = room[count:]
            if room:
                raise Unreadable(f"is cut: it ends within the buffer at byte {offset}")


TableFile: TypeAlias = ParquetFile | ArrowFile


def is_arrow(stream: BinaryIO) -> bool:
    """True for a file that begins as one of Arrow does."""
    start = read_at(stream, 0, len(FILE_MAGIC))
    return start == FILE_MAGIC or start.startswith(MESSAGE_MAGIC)


def open_table(stream: BinaryIO) -> TableFile:
    """A Parquet or Arrow file. Raises ``Unreadable``.

    The end of a file, which is read first, tells Parquet: its beginning would be one more request.
    """
    try:
        return ParquetFile(stream)
    except Unreadable:
        if not is_arrow(stream):
            raise
        return ArrowFile(stream)


def _check_endianness(data: bytes, field: int) -> None:
    """Refuse numbers whose bytes are in the other order; the schema is a field of a table."""
    try:
        is_big = _FlatTable.root(data).below(field).number(0, "<h")
    except (struct.error, ValueError):
        raise Unreadable("is damaged: its schema cannot be read") from None
    if is_big:
        raise Unreadable("has big-endian numbers; read it with pyarrow.ipc, which turns them, and write it again")


def _buffers(values: pa.Array) -> Iterator[pa.Buffer]:
    return (buffer for buffer in values.buffers() if buffer is not None and buffer.size)


class _FlatTable:
    """A table of a FlatBuffer. Raises ``struct.error`` beyond its end, and ``ValueError``.

    pyarrow gives neither the bytes of a body nor the rows without the body.
    """

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._start = offset
        self._fields = offset - self._at("<i", offset)

    @classmethod
    def root(cls, data: bytes) -> "_FlatTable":
        """The table that a buffer begins with."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, field: int) -> bool:
        """True if a field is set."""
        return bool(self._offset(field))

    def number(self, field: int, form: str) -> int:
        """A field that is a number; 0 if it is not set."""
        offset = self._offset(field)
        return self._at(form, self._start + offset) if offset else 0

    def below(self, field: int) -> "_FlatTable":
        """A field that is a table."""
        offset = self._start + self._offset(field)
        return _FlatTable(self._data, offset + self._at("<I", offset))

    def items(self, field: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """A field that is a list of structures; empty if it is not set."""
        if not self.has(field):
            return []
        offset = self._start + self._offset(field)
        offset += self._at("<I", offset)
        end = offset + 4 + self._at("<I", offset) * form.size
        if end > len(self._data):
            raise ValueError("behind the last byte")
        return list(form.iter_unpack(self._data[offset + 4 : end]))

    def _offset(self, field: int) -> int:
        offset = 4 + 2 * field
        return self._at("<H", self._fields + offset) if offset < self._at("<H", self._fields) else 0

    def _at(self, form: str, offset: int) -> int:
        if offset < 0:
            raise ValueError("before the first byte")
        (number,) = struct.unpack_from(form, self._data, offset)
        return int(number)
