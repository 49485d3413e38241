"""Samples as they were first read, in a file that outlives the daemon. The daemon opens it; workers fill it and read it.

    0        8         16                48       4096                    records start                 grows up to the budget
    +--------+---------+-----------------+--------+-----------------------+--------------+--------------+----
    | magic  | samples | key, 32 bytes   | zeros  | index: uint64 for each| record       | record       | ...
    +--------+---------+-----------------+--------+-----------------------+--------------+--------------+----

    index[sample]    0: not here; else where its record begins
    record           | sample | facts bytes, uint32 | values bytes, uint64 | crc of the rest | crc of this | facts | values |
    memory           the header of ``sample_cache`` and the index, as the daemon found it in the file and workers go on with it
    notes            a second memory, to which workers append what is wrong with the file: see ``Trouble``

``key`` names the samples that are in it. The CRC-32 of zlib; each begins with one of the key, so
that what another cache had on the same blocks of the disk is no record of this one.

A record is appended by one call (``O_APPEND``), which the kernel does for one process after the
other; then its entry is written into the file, and then into the memory, by one store. Nothing is
ever synchronised: after a power cut entries may be there without their records, which the checksums
tell. So may a worker die anywhere, and leaves nothing behind but space.

The file itself is never mapped: who cuts it off makes samples absent, and no bus error. Its records
are read into memory that is used again, as files are.

Invariant: what comes out is what was put in, whole, or it does not come out; and whatever is wrong
with the file or its disk is never an error of a sample.
"""

import mmap
import os
from collections.abc import Sequence
from errno import EIO, ENOSPC
from struct import Struct
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from time import monotonic
from typing import Any, NamedTuple
from zlib import crc32

from batchd import failpoints
from batchd.sources.cache.memory import ENTRY_BYTES, HEADER_BYTES, PAGE_BYTES, HeaderNumber, check_header

FILE_MAGIC = b"BATCHDD1"
"""Names the format and its version; another layout gets another magic."""
FILE_HEADER = Struct("<8sQ32s")
FULL_PAUSE_S = 30.0
"""After the disk has refused a record, for so long no further one is offered to it."""
NOTES_BYTES_MAX = 1 << 20
_ENTRY = Struct("<Q")
_FACTS = Struct("<QIQI")
_OWN_CRC = Struct("<I")
_RECORD_BYTES = _FACTS.size + _OWN_CRC.size


class Trouble(NamedTuple):
    """A note of a worker. ``number`` is the errno of what the system said of the file; 0: a record was not what was written."""

    sample: int
    number: int


_TROUBLE = Struct("<QQ")


def records_start(samples: int) -> int:
    """Where the first record lies in the file; as long is the memory."""
    return -(-(HEADER_BYTES + ENTRY_BYTES * samples) // PAGE_BYTES) * PAGE_BYTES


def key_seed(key: bytes) -> int:
    """What the checksums of a cache begin with."""
    return crc32(key)


def troubles(notes: int, first: int) -> list[Trouble]:
    """The notes that workers have written, but for the ``first`` ones."""
    whole = os.fstat(notes).st_size // _TROUBLE.size
    content = os.pread(notes, (whole - first) * _TROUBLE.size, first * _TROUBLE.size)
    return [Trouble(*one) for one in _TROUBLE.iter_unpack(content)]


class DiskCache:
    """A cache on disk as a worker has it: of one stream, not for several threads at once. The descriptors stay the caller's."""

    def __init__(self, memory: int, notes: int, file: int) -> None:
        # Opened anew: where one has appended to is a fact of the open file, which all who got this
        # descriptor share.
        self._notes = os.open(f"/proc/self/fd/{notes}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._reading = os.dup(file)
        mapped = mmap.mmap(memory, os.fstat(memory).st_size)
        view = memoryview(mapped)
        self._header = check_header(view)
        self._index = view[HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES * self._header[HeaderNumber.SAMPLES]].cast("Q")
        self._seed = self._header[HeaderNumber.SEED]
        self._records_start = records_start(self._header[HeaderNumber.SAMPLES])
        self._buffer = bytearray(1 << 16)
        self._full_until_s = float("-inf")
        self._appending = self._open_to_append(file)

    def close(self) -> None:
        """Close the descriptors; the mapping ends with the last view of it."""
        for descriptor in (self._notes, self._reading, self._appending):
            if descriptor >= 0:
                os.close(descriptor)

    def __contains__(self, sample: int) -> bool:
        return self._index[sample] != 0

    def find(self, sample: int) -> tuple[memoryview, memoryview] | None:
        """The facts and the values of a sample, until the next one is looked for; None where it is not here."""
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

    def has_room(self, values_bytes: int) -> bool:
        """Would a sample of so many bytes be kept, as far as this worker can tell?"""
        if monotonic() < self._full_until_s:
            return False
        try:
            size = os.fstat(self._appending).st_size
        except OSError:  # a file server says nothing of a file that is gone
            return False
        # Where even the index was cut off, a record would lie in it; the next daemon begins anew.
        return self._records_start <= size <= self._header[HeaderNumber.ALLOWED] - values_bytes

    def keep(self, sample: int, facts: bytes, values: Sequence[Any]) -> None:
        """Keep a sample of which ``values`` are the contiguous buffers, if the budget and the disk have room for it."""
        values_bytes = sum(memoryview(value).nbytes for value in values)
        size = _RECORD_BYTES + len(facts) + values_bytes
        if not self.has_room(size):
            return
        try:
            failpoints.passing("worker.cache.claimed", sample)
            start = self._append(sample, facts, values, size)
            failpoints.passing("worker.cache.written", sample)
            os.pwrite(self._reading, _ENTRY.pack(start), HEADER_BYTES + ENTRY_BYTES * sample)
        except OSError as error:
            self._full_until_s = monotonic() + FULL_PAUSE_S
            self._note(Trouble(sample, error.errno or EIO))
            return
        self._index[sample] = start  # one aligned store: it is there, or it is not
        failpoints.passing("worker.cache.entered", sample)

    def _open_to_append(self, file: int) -> int:
        """-1 where the file cannot be had any more (its rights, say, were taken away): then nothing is kept."""
        try:
            return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            self._full_until_s = float("inf")
            self._note(Trouble(0, error.errno or EIO))
            return -1

    def _append(self, sample: int, facts: bytes, values: Sequence[Any], size: int) -> int:
        """Write a record; where it begins. Raises ``OSError``."""
        crc = crc32(facts, self._seed)
        for value in values:
            crc = crc32(value, crc)
        known = _FACTS.pack(sample, len(facts), size - _RECORD_BYTES - len(facts), crc)
        written = os.writev(self._appending, [known, _OWN_CRC.pack(crc32(known, self._seed)), facts, *values])
        end = os.lseek(self._appending, 0, os.SEEK_CUR)
        # Of two workers the one with less may come last, and then it is too little until the next
        # record.
        self._header[HeaderNumber.USED] = max(end, self._header[HeaderNumber.USED])
        if written < size:  # of what was asked for; why, the kernel says only to who asks once more
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return end - size

    def _read(self, sample: int, start: int) -> tuple[memoryview, memoryview] | None:
        """A record, if there is one of this sample, and it is what was written. Raises ``OSError``."""
        try:
            head = os.pread(self._reading, _RECORD_BYTES, start)
            known, facts_bytes, values_bytes, crc = _FACTS.unpack_from(head)
            (own_crc,) = _OWN_CRC.unpack_from(head, _FACTS.size)
        except (StructError, OverflowError):  # behind the end of the file
            return None
        if own_crc != crc32(head[: _FACTS.size], self._seed) or known != sample:
            return None
        size = facts_bytes + values_bytes
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size].toreadonly()
        if self._fill(size, start + _RECORD_BYTES) < size or crc32(view, self._seed) != crc:
            return None
        return view[:facts_bytes], view[facts_bytes:]

    def _fill(self, size: int, start: int) -> int:
        """Read so many bytes into the buffer, or as many as there are."""
        done = 0
        with memoryview(self._buffer) as buffer:
            while done < size and (count := os.preadv(self._reading, [buffer[done:size]], start + done)):
                done += count
        return done

    def _forget(self, sample: int, start: int) -> None:
        """What the entry names is no record of this sample: it is not here, now and after the next start."""
        if self._index[sample] == start:
            self._index[sample] = 0
        self._note(Trouble(sample, 0))
        try:
            os.pwrite(self._reading, _ENTRY.pack(0), HEADER_BYTES + ENTRY_BYTES * sample)
        except OSError as error:
            self._note(Trouble(sample, error.errno or EIO))

    def _note(self, trouble: Trouble) -> None:
        """Tell the daemon, which says it to people."""
        if os.fstat(self._notes).st_size < NOTES_BYTES_MAX:
            os.write(self._notes, _TROUBLE.pack(*trouble))
