"""A cache of samples in a file that outlives the daemon. The daemon opens it; workers use it.

  0        8         16              48      4096            records start     grows to the budget
  +--------+---------+---------------+-------+---------------+-----------------+-----------------+--
  | magic  | samples | key, 32 bytes | zeros | index: uint64 | record          | record          | …
  +--------+---------+---------------+-------+---------------+-----------------+-----------------+--

    index[sample]    0: absent; else the first byte of its record
    record           | sample | facts bytes, uint32 | values bytes, uint64 |
                     | CRC of the rest | CRC of this | facts | values |
    memory           the header of ``cache.memory``, and the index: loaded by the daemon, then
                     extended by workers
    notes            a second memory, to which workers append errors of the file: see ``Trouble``

``key`` identifies the samples in the file. Each checksum (CRC-32 of zlib) begins with the key, so
the checks reject a record of another cache on the same blocks of the disk.

A worker appends a record by one call (``O_APPEND``), which the kernel serialises between processes.
Then it writes the entry into the file, and then into the memory, by one store. There is no fsync:
after a power failure there may be entries without records, which the checksums detect. A worker
that dies at any point leaves only unused space.

The file itself is never mapped: if it is truncated, samples are absent, and no process gets SIGBUS.
Records are read into a reused buffer, as files are.

Invariant: a record is returned whole and unchanged, or not at all. An error of the file or its disk
is never an error of a sample.
"""

import mmap
import os
from collections.abc import Sequence
from errno import EIO, ENOSPC
from struct import Struct
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from time import monotonic
from typing import NamedTuple
from zlib import crc32

import numpy as np

from batchd.data.sources.cache.memory import (
    ALLOWED_AT,
    ENTRY,
    ENTRY_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    SAMPLES_AT,
    SEED_AT,
    USED_AT,
    check_header,
    open_to_append,
)
from batchd.data.sources.cache.record import Bytes, CacheRows, Heads, Starts
from batchd.data.storage.rows import read_rows
from batchd.runtime import failpoints

FILE_MAGIC = b"BATCHDD1"
"""Names the format and its version; another layout needs another magic."""
FILE_HEADER = Struct("<8sQ32s")
FULL_PAUSE_S = 30.0
"""Pause of writing after the disk has refused a record."""
NOTES_BYTES_MAX = 1 << 20
_ENTRY = Struct("<Q")
_FACTS = Struct("<QIQI")
_OWN_CRC = Struct("<I")
_RECORD_BYTES = _FACTS.size + _OWN_CRC.size
_HEAD = np.dtype(
    [("sample", "<u8"), ("facts_bytes", "<u4"), ("values_bytes", "<u8"), ("crc", "<u4"), ("own_crc", "<u4")]
)
"""As ``_FACTS`` and ``_OWN_CRC``."""


class Trouble(NamedTuple):
    """A worker's note of an error. ``number``: the errno of the file; 0: a damaged record."""

    sample: int
    number: int


_TROUBLE = Struct("<QQ")


def records_start(samples: int) -> int:
    """The offset of the first record, in bytes; also the length of the memory."""
    return -(-(HEADER_BYTES + ENTRY_BYTES * samples) // PAGE_BYTES) * PAGE_BYTES


def key_seed(key: bytes) -> int:
    """The initial value of all checksums of a cache."""
    return crc32(key)


def troubles(notes: int, first: int) -> list[Trouble]:
    """The notes of workers after the first ``first`` ones."""
    whole = os.fstat(notes).st_size // _TROUBLE.size
    content = os.pread(notes, (whole - first) * _TROUBLE.size, first * _TROUBLE.size)
    return [Trouble(*one) for one in _TROUBLE.iter_unpack(content)]


class DiskCache(CacheRows):
    """A worker's side of a cache on disk, for one stream. The caller keeps the descriptors.

    ``appending``: the file, opened for this worker alone, as its offset is needed after an append;
    -1 if the daemon could not open it again, and then nothing is kept.
    """

    _head = _HEAD

    def __init__(self, memory: int, notes: int, file: int, appending: int = -1) -> None:
        self._notes = open_to_append(notes)
        self._reading = os.dup(file)
        mapped = mmap.mmap(memory, os.fstat(memory).st_size)
        view = memoryview(mapped)
        self._header = check_header(view)
        self._index = view[HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES * self._header[SAMPLES_AT]].cast("Q")
        self._entries = np.frombuffer(self._index, ENTRY)
        self._seed = self._header[SEED_AT]
        self._records_start = records_start(self._header[SAMPLES_AT])
        self._buffer = bytearray(1 << 16)
        self._full_until_s = float("-inf")
        self._appending = -1
        if appending < 0:
            self._full_until_s = float("inf")
            self._note(Trouble(0, EIO))
        else:
            self._appending = os.dup(appending)

    def close(self) -> None:
        """Close the descriptors; the mapping ends with the last view of it."""
        for descriptor in (self._notes, self._reading, self._appending):
            if descriptor >= 0:
                os.close(descriptor)

    def find(self, sample: int) -> tuple[memoryview, memoryview] | None:
        """Facts and values of a sample (uint8), valid until the next call; None if absent."""
        start = self._index[sample]
        if start == 0:
            return None
        try:
            found = self._read(sample, start)
        except OSError as error:
            self._note(Trouble(sample, error.errno or EIO))
            return None
        if found is None:
            self._forget(sample, start)
        return found

    def _copy(self, starts: Starts, rows: Bytes) -> bool:
        count, size = rows.shape
        try:
            return not size or read_rows(self._reading, starts, np.arange(count), rows.reshape(-1).data, size) == count
        except OSError:  # ``find`` notes it
            return False

    def _are_heads_whole(self, heads: Heads) -> bool:
        known = heads.tobytes()
        starts = range(0, len(known), _RECORD_BYTES)
        crcs = [crc32(known[start : start + _FACTS.size], self._seed) for start in starts]
        return bool((heads["own_crc"] == crcs).all())

    def _are_whole(self, heads: Heads, facts: list[bytes], values: Bytes) -> bool:
        crcs = [crc32(row, crc32(one, self._seed)) for one, row in zip(facts, values, strict=True)]
        return bool((heads["crc"] == crcs).all())

    def has_room(self, values_bytes: int) -> bool:
        """True if this worker could keep a sample of ``values_bytes`` now."""
        if monotonic() < self._full_until_s:
            return False
        try:
            size = os.fstat(self._appending).st_size
        except OSError:  # a file server has no status of a removed file
            return False
        # If the file was truncated within its index, a record would overwrite the index; the next
        # daemon makes a new file.
        return self._records_start <= size <= self._header[ALLOWED_AT] - values_bytes

    def keep(self, sample: int, facts: bytes, values: Sequence[memoryview | bytes]) -> bool:
        """Keep a sample if budget and disk have room; true if it was kept.

        ``values``: contiguous buffers.
        """
        values_bytes = sum(memoryview(value).nbytes for value in values)
        size = _RECORD_BYTES + len(facts) + values_bytes
        if not self.has_room(size):
            return False
        try:
            failpoints.passing("worker.cache.claimed", sample)
            start = self._append(sample, facts, values, size)
            failpoints.passing("worker.cache.written", sample)
            os.pwrite(self._reading, _ENTRY.pack(start), HEADER_BYTES + ENTRY_BYTES * sample)
        except OSError as error:
            self._full_until_s = monotonic() + FULL_PAUSE_S
            self._note(Trouble(sample, error.errno or EIO))
            return False
        self._index[sample] = start  # one aligned store, so readers see all of it or nothing
        failpoints.passing("worker.cache.entered", sample)
        return True

    def _append(self, sample: int, facts: bytes, values: Sequence[memoryview | bytes], size: int) -> int:
        """Append a record and return its offset, in bytes. Raises ``OSError``."""
        crc = crc32(facts, self._seed)
        for value in values:
            crc = crc32(value, crc)
        known = _FACTS.pack(sample, len(facts), size - _RECORD_BYTES - len(facts), crc)
        written = os.writev(self._appending, [known, _OWN_CRC.pack(crc32(known, self._seed)), facts, *values])
        end = os.lseek(self._appending, 0, os.SEEK_CUR)
        # Of two workers, the one with the smaller end may store last; then the value is too small
        # until the next record.
        self._header[USED_AT] = max(end, self._header[USED_AT])
        if written < size:  # a short write has no errno; only another write would report it
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return end - size

    def _read(self, sample: int, start: int) -> tuple[memoryview, memoryview] | None:
        """The record of this sample; None if it is damaged. Raises ``OSError``."""
        try:
            head = os.pread(self._reading, _RECORD_BYTES, start)
            known, facts_bytes, values_bytes, crc = _FACTS.unpack_from(head)
            (own_crc,) = _OWN_CRC.unpack_from(head, _FACTS.size)
        except (StructError, OverflowError):  # beyond the end of the file
            return None
        if own_crc != crc32(head[: _FACTS.size], self._seed) or known != sample:
            return None
        size = facts_bytes + values_bytes
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size].toreadonly()
        done = 0
        with memoryview(self._buffer) as buffer:
            while done < size and (
                count := os.preadv(self._reading, [buffer[done:size]], start + _RECORD_BYTES + done)
            ):
                done += count
        if done < size or crc32(view, self._seed) != crc:
            return None
        return view[:facts_bytes], view[facts_bytes:]

    def _forget(self, sample: int, start: int) -> None:
        """Remove an entry without a valid record of its sample, from memory and file."""
        if self._index[sample] == start:
            self._index[sample] = 0
        self._note(Trouble(sample, 0))
        try:
            os.pwrite(self._reading, _ENTRY.pack(0), HEADER_BYTES + ENTRY_BYTES * sample)
        except OSError as error:
            self._note(Trouble(sample, error.errno or EIO))

    def _note(self, trouble: Trouble) -> None:
        if os.fstat(self._notes).st_size < NOTES_BYTES_MAX:
            os.write(self._notes, _TROUBLE.pack(*trouble))
