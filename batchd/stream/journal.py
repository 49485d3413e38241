"""The journal of a push stream: what was in its batches. DAEMON process; `batchd replay` reads it.

    cache_dir/batchd-STREAM.journal

    0        8            4096
    +--------+------------+----------+----------+--    as many as the stream's ``journal`` holds;
    | magic  | JSON, zeros| record 0 | record 1 | …    number n is in the place n modulo their count
    +--------+------------+----------+----------+--

    record   | CRC-32 of the rest | its number | time, ns | epoch | step | fingerprint |
             | numbers of the pushes, uint64 [rows] | each small field and the checksum, [rows, …] |

The JSON is the dtype of a record, and the bytes of a row of the batch. A record is written by one
call before any trainer gets the batch. There is no fsync: after a power failure the last records
may be damaged, which their checksums detect. The disk has room for all of them from the start.

Invariant: a record that ``read_journal`` returns was written whole, and what it says can be: any
other content of a file is "damaged". What goes wrong costs records, which are counted in the log,
and no batch.
"""

import fcntl
import json
import os
import re
import stat
from contextlib import ExitStack
from errno import ENOSPC
from io import FileIO
from itertools import chain
from pathlib import Path
from struct import Struct
from time import time_ns
from typing import NamedTuple
from zlib import crc32

import numpy as np
import structlog
from numpy.typing import NDArray

from batchd.config.tree import Config
from batchd.data.storage.paths import FileForeign, open_own
from batchd.errors import BatchdError
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.limits import OncePerMinute
from batchd.stream.cache_file import CacheUnusable
from batchd_wire.fields import SlotLayout
from batchd_wire.position import Position

_log = structlog.get_logger()

HEADER = Struct("<8s")
MAGIC = b"BATCHDJ1"
HEADER_BYTES = 4096
SMALL_BYTES = 64
"""Fields with rows of at most this size are in the journal."""
ROW = "row "
"""Before the names of a batch's fields."""
HEAD = [
    ("crc", "<u4"),
    ("number", "<u8"),
    ("time_ns", "<i8"),
    ("epoch", "<i8"),
    ("step", "<i8"),
    ("fingerprint", "|S64"),
    ("pushed", "<u8"),
]
"""The fields of a record before those of the batch; the last one has a number for each row."""
NUMBER_MAX = 1 << 62
ROW_BYTES_MAX = 1 << 31
TIME_NS_MAX = 253_402_300_800 * 10**9
"""The year 10,000."""
_KIND = re.compile(r"[<|][biuf][1248]")
_CRC_BYTES = 4


class JournalSpec(NamedTuple):
    """The file of a journal, and its size in bytes at most."""

    path: str
    max_bytes: int


class Records(NamedTuple):
    """The records of a journal in the order of their numbers, structured ``[records]``.

    ``row_bytes``: of a row of the batch, in all its fields.
    """

    records: NDArray[np.void]
    row_bytes: int


def journal_spec(config: Config, stream: str) -> JournalSpec | None:
    """The journal of a stream; None if it has none. Raises ``BatchdError`` without a folder."""
    max_bytes = config.streams[stream].journal
    if max_bytes is None:
        return None
    folder = config.daemon.cache_dir or default_cache_dir()
    if folder is None:
        raise BatchdError(f"streams.{stream}.journal: this user has no folder for it; set cache_dir in [daemon]")
    return JournalSpec(str(folder / f"batchd-{stream}.journal"), max_bytes)


def _record_dtype(layout: SlotLayout) -> np.dtype[np.void]:
    small = [one for one in layout.fields if one.varying is None and one.row_bytes <= SMALL_BYTES]
    fields = [(ROW + one.name, np.dtype(one.dtype).newbyteorder("<").str, (layout.rows, *one.shape)) for one in small]
    *head, (pushed, kind) = HEAD
    return np.dtype([*head, (pushed, kind, (layout.rows,)), *fields])


class Journal:
    """Appends records to one file. Raises ``CacheUnusable``; ``close`` it at the end.

    ``before``: a journal of this process that has the file; both may write until it is closed.
    """

    def __init__(
        self, spec: JournalSpec, layout: SlotLayout, fingerprint: str, before: "Journal | None" = None
    ) -> None:
        self.spec, self.layout, self._fingerprint = spec, layout, fingerprint
        self._dtype = _record_dtype(layout)
        self._places = (spec.max_bytes - HEADER_BYTES) // self._dtype.itemsize
        self._number = self._lost = 0
        self.file: int = -1
        self._once_per_minute = OncePerMinute()
        if self._places < 1:
            need = HEADER_BYTES + self._dtype.itemsize
            raise CacheUnusable(f"journal = {spec.max_bytes} has no room for one batch: it needs {need} bytes or more")
        with ExitStack() as on_failure:
            try:
                Path(spec.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.file = os.dup(before.file) if before else open_own(Path(spec.path), os.O_RDWR | os.O_CREAT)
                on_failure.callback(self.close)
                self._begin()
            except BlockingIOError:
                text = (
                    f"another daemon writes {spec.path}: give one of them another cache_dir, or the stream another name"
                )
                raise CacheUnusable(text) from None
            except FileForeign as error:
                raise CacheUnusable(str(error)) from None
            except OSError as error:
                raise CacheUnusable(
                    f"{spec.path} cannot be used: {error.strerror}; set cache_dir in [daemon]"
                ) from None
            on_failure.pop_all()

    def _begin(self) -> None:
        """Lock the file, and continue it; begin it again if its batches had other fields."""
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        row_bytes = sum(field.row_bytes for field in self.layout.sample_fields)
        text = json.dumps([self._dtype.descr, row_bytes]).encode("ascii")
        if HEADER.size + len(text) > HEADER_BYTES:
            raise OSError(0, "the batch has too many small fields for a journal")
        header = HEADER.pack(MAGIC) + text.ljust(HEADER_BYTES - HEADER.size, b"\0")
        size = HEADER_BYTES + self._places * self._dtype.itemsize
        kept = np.zeros(0, self._dtype)
        if os.pread(self.file, HEADER_BYTES, 0) == header:
            kept = read_journal(self.spec.path).records
            self._number = int(kept["number"].max(initial=0))
        elif os.fstat(self.file).st_size:
            _log.warning("the journal begins again: its batches had other fields", file=self.spec.path)
            os.ftruncate(self.file, 0)
        if os.fstat(self.file).st_size != size:  # another budget: records have other places
            os.ftruncate(self.file, 0)
            os.posix_fallocate(self.file, 0, size)
            os.pwrite(self.file, header, 0)
            for record in kept[-self._places :]:
                self._write(int(record["number"]), record.tobytes())

    def add(self, position: Position, pushed: tuple[int, ...], slot: int) -> None:
        """Write what is in a batch. ``pushed``: number of each row; ``slot``: its descriptor."""
        try:
            record = np.zeros((), self._dtype)
            record["number"], record["time_ns"] = self._number + 1, time_ns()
            record["epoch"], record["step"] = position
            record["fingerprint"], record["pushed"] = self._fingerprint, pushed
            for field in self.layout.fields:
                if (name := ROW + field.name) in (record.dtype.names or ()):
                    found = os.pread(slot, field.row_bytes * self.layout.rows, field.offset)
                    record[name] = np.frombuffer(found, field.dtype).reshape(record[name].shape)
            record["crc"] = crc32(record.tobytes()[_CRC_BYTES:])
            self._write(self._number + 1, record.tobytes())
            self._number += 1
        except (OSError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
            self._lost += 1
            if self._once_per_minute.allows("lost"):
                reason = getattr(error, "strerror", None) or str(error)
                _log.error("a batch is missing in the journal", file=self.spec.path, reason=reason, missing=self._lost)

    def _write(self, number: int, record: bytes) -> None:
        written = os.pwrite(self.file, record, HEADER_BYTES + number % self._places * len(record))
        if written != len(record):
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    def close(self) -> None:
        """Close the file, which ends the lock."""
        os.close(self.file)


def read_journal(path: str | Path) -> Records:
    """Read a journal, also while a daemon writes it: whole records only.

    Raises ``BatchdError``, naming the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with FileIO(descriptor) as file:
            content = file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError as error:
        raise BatchdError(
            f"{path} cannot be read: {error.strerror}; a daemon writes it when it serves the stream"
        ) from None
    try:
        dtype, row_bytes = _form_in(content)
        count = max(0, len(content) - HEADER_BYTES) // dtype.itemsize
        records = np.frombuffer(content, dtype, count, HEADER_BYTES if count else 0)
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise BatchdError(f"{path} is damaged, or no journal: remove it, and restart the daemon") from None
    may_be = (records["number"] > 0) & (records["number"] <= NUMBER_MAX)
    may_be &= (records["time_ns"] >= 0) & (records["time_ns"] < TIME_NS_MAX)
    may_be &= (records["epoch"] >= 0) & (records["step"] >= 0)
    whole = [at for at in np.flatnonzero(may_be) if _is_whole(records[at])]
    chosen = records[whole]
    return Records(chosen[np.argsort(chosen["number"])], row_bytes)


def _is_whole(record: np.void) -> bool:
    is_text = bool(record["fingerprint"].isascii())
    return is_text and crc32(record.tobytes()[_CRC_BYTES:]) == record["crc"]


def _form_in(content: bytes) -> tuple[np.dtype[np.void], int]:
    """The form of the records of a file, and the bytes of a row. Raises as parsing does.

    Only what ``_record_dtype`` makes is taken: NumPy would evaluate other texts.
    """
    described, row_bytes = json.loads(content[HEADER.size : HEADER_BYTES].rstrip(b"\0"))
    fields = [(str(name), str(kind), tuple(chain(*shape))) for name, kind, *shape in described]
    of_batch = fields[len(HEAD) :]
    is_ours = (
        content[: HEADER.size] == MAGIC
        and [(name, kind) for name, kind, _shape in fields[: len(HEAD)]] == HEAD
        and all(name.startswith(ROW) and _KIND.fullmatch(kind) for name, kind, _shape in of_batch)
        and [shape for _name, _kind, shape in fields[: len(HEAD) - 1]] == [()] * (len(HEAD) - 1)
        and all(type(length) is int and 0 <= length <= len(content) for *_, shape in fields for length in shape)
        and type(row_bytes) is int
        and 0 <= row_bytes <= ROW_BYTES_MAX
    )
    if not is_ours:
        raise ValueError("no journal")
    return np.dtype(fields), row_bytes
