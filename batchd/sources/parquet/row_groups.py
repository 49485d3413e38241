"""Parquet files in pyarrow: footers, and columns of whole row groups. Daemon and workers.

    file -- row group -- column chunk -- pages -- values     pyarrow reads at least one column chunk

Everything runs in the caller's thread: there is a worker for every core.

Invariant: a file that cannot be read raises ``Unreadable`` with the reason, whatever pyarrow
raises; a fault of this process stays an ``OSError`` or a ``MemoryError``.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import parquet

from batchd.samples.errors import OUR_OWN_FAULTS, SampleUnreadable
from batchd.storage.index import readable
from batchd_wire.wording import counted

BUFFER_BYTES = 1 << 20
"""How much is read at once of a column chunk that is read in pieces."""
ROWS_AT_ONCE = 1024
"""Rows of a row group that are decoded at once."""
FOOTER_BYTES = 64 << 10
"""Read from the end of a file: the footer is in it, as a rule."""
TAIL_BYTES = 8
"""Behind the footer: its length and the magic."""
MAGICS = {b"PAR1": "", b"PARE": "is encrypted; batchd has no keys, so write it without encryption"}


class Unreadable(SampleUnreadable):
    """A file, or a part of it, cannot be read as Parquet."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The size in bytes and the CRC-32 of a footer, which identify a file."""

    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A column of a row group: bytes ``start`` to ``end`` of the file.

    With a dictionary, rows may share a value.
    """

    start: int
    end: int
    has_dictionary: bool


class ParquetFile:
    """One open file.

    The caller closes ``stream``. ``looked`` is called for each piece of a column that is read.
    """

    def __init__(self, stream: BinaryIO, looked: Callable[[], None] = lambda: None) -> None:
        self._looked = looked
        footer, size = _read_footer(stream)
        self.footer = Footer(size, zlib.crc32(footer))
        with _reasons():
            self._metadata = parquet.read_metadata(pa.BufferReader(footer))
            self._file = parquet.ParquetFile(
                stream,
                metadata=self._metadata,
                buffer_size=BUFFER_BYTES,
                pre_buffer=False,  # or a whole column chunk is read before its first value is there
                page_checksum_verification=True,
            )
            self.schema: Any = self._file.schema_arrow
            self._leaves = [self._file.schema.column(leaf).path for leaf in range(self._metadata.num_columns)]

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each row group, according to the footer."""
        with _reasons():
            return [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]

    def decoded_bytes(self, group: int, title: str) -> int:
        """The approximate bytes of a decoded column of a row group, from the footer; at least 1."""
        with _reasons():
            row_group = self._metadata.row_group(group)
            sizes = [int(row_group.column(leaf).total_uncompressed_size) for leaf in self._leaves_of(title)]
            return max(1, sum(sizes))

    def uncompressed(self, group: int, path: str) -> ColumnChunk | None:
        """The extent of a column that is not compressed; None for a compressed one."""
        with _reasons():
            (leaf,) = self._leaves_of(path)
            chunk = self._metadata.row_group(group).column(leaf)
            if chunk.compression != "UNCOMPRESSED":
                return None
            return ColumnChunk(*_range_of(chunk), bool(chunk.has_dictionary_page))

    def extent(self, group: int, title: str) -> tuple[int, int]:
        """(first byte, bytes) in the file of a column of a row group, in all its stored columns."""
        with _reasons():
            row_group = self._metadata.row_group(group)
            ranges = [_range_of(row_group.column(leaf)) for leaf in self._leaves_of(title)]
        start, end = min(first for first, _ in ranges), min(max(last for _, last in ranges), self.footer.size)
        return start, max(0, end - start)

    def _leaves_of(self, title: str) -> list[int]:
        """The numbers of the stored columns of a column of the schema, or of a field of one."""
        return [leaf for leaf, path in enumerate(self._leaves) if path == title or path.startswith(f"{title}.")]

    def read(self, group: int, title: str, max_bytes: int) -> Any:
        """One column of a row group as a pyarrow ChunkedArray.

        Raises ``Unreadable``, also beyond ``max_bytes``: a footer may be wrong about the size, and
        a few values of a dictionary may be repeated millions of times.
        """
        pieces: list[Any] = []
        size = 0
        for piece in self.batches(group, title, ROWS_AT_ONCE):
            pieces.append(piece)
            size += piece.nbytes
            if size > max_bytes:
                raise Unreadable(
                    f"the column {title!r} of the row group has more than {max_bytes} bytes when it is decoded"
                )
        return pa.chunked_array(pieces)

    def batches(self, group: int, title: str, rows: int) -> Iterator[Any]:
        """The same, in pieces of a number of rows, one of them in memory at a time."""
        pieces = self._file.iter_batches(rows, row_groups=[group], columns=[title], use_threads=False)
        found = 0
        while True:
            with _reasons():
                piece = next(pieces, None)
            if piece is None:
                break
            self._looked()
            found += len(piece)
            yield _plain(piece.column(0))
        if found != self.rows[group]:
            raise Unreadable(f"holds {counted(found, 'row')}, and the footer says {self.rows[group]}")


@contextmanager
def _reasons() -> Iterator[None]:
    """What pyarrow raises, as one kind of error."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno in OUR_OWN_FAULTS:
            raise
        raise Unreadable(reason_of(error)) from None


def reason_of(error: BaseException) -> str:
    """The first line of a library's message."""
    text = readable(str(error).strip().partition("\n")[0].encode())
    return text or type(error).__name__


def use_one_thread() -> None:
    """Keep pyarrow from making threads in this process."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def _range_of(chunk: Any) -> tuple[int, int]:
    """The first byte of a column of a row group, and the one behind its last."""
    start = max(0, min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset))
    return start, start + chunk.total_compressed_size


def _read_footer(stream: BinaryIO) -> tuple[bytes, int]:
    """A file's footer with its length and the magic, and the file's size in bytes.

    Mostly one read, from its end.
    """
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
        raise Unreadable(f"is no Parquet file: it starts with {start!r} and has {size} bytes")
    raise Unreadable(f"is cut or damaged: it ends at byte {size} without the footer of a Parquet file; copy it again")


def _plain(array: Any) -> Any:
    """Values as they are; pandas' categories are numbers of them."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
