"""Parquet files as pyarrow reads them: footers, and columns of whole row groups. Daemon and workers.

    file -- row group -- column chunk -- pages -- values        pyarrow reads no less than one column chunk

Everything runs in the thread that asks: there is a worker for every core.

Invariant: a file that cannot be read raises ``Unreadable`` with the reason, whatever pyarrow makes of it; what is this process's
own fault stays an ``OSError`` or a ``MemoryError``.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import parquet

from batchd.sources.errors import OUR_OWN_FAULTS, SampleUnreadable
from batchd.sources.index import readable
from batchd_wire.wording import counted

BUFFER_BYTES = 1 << 20
"""How much is read at once of a column chunk that is read in pieces."""
ROWS_AT_ONCE = 1024
"""Rows of a row group that are decoded at once."""
TAIL_BYTES = 8
"""Behind the footer: its length and the magic."""
MAGICS = {b"PAR1": "", b"PARE": "is encrypted; batchd has no keys, so write it without encryption"}


class Unreadable(SampleUnreadable):
    """A file, or a part of it, cannot be read as Parquet."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What a file says of itself. ``size`` and ``crc`` tell it from others."""

    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column of a row group: bytes ``start`` to ``end`` of the file. Where it has a dictionary, rows may share a value."""

    start: int
    end: int
    has_dictionary: bool


class ParquetFile:
    """One open file. ``stream`` stays the caller's to close."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = os.fstat(stream.fileno()).st_size
        _check_magic(stream, self.size)
        with _reasons():
            self._file = parquet.ParquetFile(stream, buffer_size=BUFFER_BYTES, page_checksum_verification=True)
            self._metadata = self._file.metadata
            self.schema: Any = self._file.schema_arrow
            self._leaves = [self._file.schema.column(leaf).path for leaf in range(self._metadata.num_columns)]

    @cached_property
    def footer(self) -> Footer:
        """Size and checksum of the footer: schema, row groups, where they lie, their statistics."""
        length = self._metadata.serialized_size + TAIL_BYTES
        return Footer(self.size, zlib.crc32(os.pread(self._stream.fileno(), length, self.size - length)))

    @cached_property
    def rows(self) -> list[int]:
        """The rows of each row group, by what the footer says."""
        with _reasons():
            return [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]

    def decoded_bytes(self, group: int, title: str) -> int:
        """About how many bytes a column of a row group has when it is decoded, by what the footer says; 1 or more."""
        with _reasons():
            row_group = self._metadata.row_group(group)
            sizes = [int(row_group.column(leaf).total_uncompressed_size) for leaf in self._leaves_of(title)]
            return max(1, sum(sizes))

    def uncompressed(self, group: int, path: str) -> Chunk | None:
        """Where a column that is not compressed lies in the file; None where it is compressed."""
        with _reasons():
            (leaf,) = self._leaves_of(path)
            chunk = self._metadata.row_group(group).column(leaf)
            if chunk.compression != "UNCOMPRESSED":
                return None
            starts = [chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset]
            start = max(0, min(starts))
            return Chunk(start, start + chunk.total_compressed_size, bool(chunk.has_dictionary_page))

    def _leaves_of(self, title: str) -> list[int]:
        """The numbers of the columns that a column of the schema, or a field of one, is stored in."""
        return [leaf for leaf, path in enumerate(self._leaves) if path == title or path.startswith(f"{title}.")]

    def read(self, group: int, title: str, max_bytes: int) -> Any:
        """One column of a row group as a pyarrow ChunkedArray. Raises ``Unreadable``, also where it is longer than that.

        A footer need not be right about that, and a few values of a dictionary may stand for millions.
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
        """The same, in pieces of so many rows, of which one is in memory at a time."""
        pieces = self._file.iter_batches(rows, row_groups=[group], columns=[title], use_threads=False)
        found = 0
        while True:
            with _reasons():
                piece = next(pieces, None)
            if piece is None:
                break
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
    """The first line of what a library says."""
    text = readable(str(error).strip().partition("\n")[0].encode())
    return text or type(error).__name__


def use_one_thread() -> None:
    """Keep pyarrow from making threads in this process."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def _check_magic(stream: BinaryIO, size: int) -> None:
    start, end = os.pread(stream.fileno(), 4, 0), os.pread(stream.fileno(), 4, max(0, size - 4))
    if MAGICS.get(end):
        raise Unreadable(MAGICS[end])
    if not size:
        raise Unreadable("is empty")
    if size < TAIL_BYTES or start not in MAGICS:
        raise Unreadable(f"is no Parquet file: it starts with {start!r} and has {size} bytes")
    if end not in MAGICS:
        raise Unreadable(
            f"is cut or damaged: it ends at byte {size} without the footer of a Parquet file; copy it again"
        )


def _plain(array: Any) -> Any:
    """Values as they are; pandas' categories are numbers of them."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
