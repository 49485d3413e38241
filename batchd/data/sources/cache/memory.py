"""A cache of samples in shared memory. The daemon creates it; workers fill and read it.

  0       8         16        24     32     40      4096            first extent            budget
  +-------+---------+---------+------+------+-------+---------------+-------------+-------------+--
  | magic | samples | allowed | used | seed | zeros | index: uint64 | records ... | records ... | …
  +-------+---------+---------+------+------+-------+---------------+-------------+-------------+--

    index[sample]    0: absent; else the first byte of its record
    record           | sample | facts bytes, uint32 | values bytes, uint64 | facts | values |
                     ``cache.record`` has facts and values
    claims           a second memory: a worker that appends byte n to it owns extent n for ever

The daemon is the only writer of ``magic``, ``samples`` and ``allowed`` (the number of bytes that
may be in use now). ``used`` and ``seed`` belong to caches on disk (``cache.disk``), which have only
header and index in memory: the end of the file, and the initial value of its checksums. A record
belongs to the worker that owns its extent. An index entry may have several writers: each wrote a
whole record of the same sample, so it does not matter which one stores last.

The kernel serialises appends, so there is no lock that a dead process could hold. A killed worker
loses only the rest of its extent: the entry is stored last, after the call that wrote the record.
Such a call also writes each page first: without memory it returns an error, whereas a store would
raise SIGBUS.

On x86-64, another process sees the stores in this order: record, then entry. On other processors,
the return from a system call and some interpreter code are between them.

Invariant: an index entry names a whole record, which never changes.
"""

import errno
import mmap
import os
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchd.data.sources.cache.record import Bytes, CacheRows, Starts
from batchd.runtime import failpoints

MAGIC = int.from_bytes(b"BATCHDC1", "little")
HEADER_BYTES = 4096
ENTRY = np.dtype("<u8")
ENTRY_BYTES = ENTRY.itemsize
EXTENT_BYTES_MAX = 4 << 20
EXTENTS_MIN = 64
"""Minimum for a small cache, so the extents that workers have begun are a small part of it."""
PAGE_BYTES = 4096
RECORD_ALIGNMENT_BYTES = 64
MAGIC_AT, SAMPLES_AT, ALLOWED_AT, USED_AT, SEED_AT = range(5)
"""The places of the header's numbers. The last two are of caches on disk: see ``cache.disk``."""
_RECORD = Struct("<QIQ")
_HEAD = np.dtype([("sample", "<u8"), ("facts_bytes", "<u4"), ("values_bytes", "<u8")])
"""As ``_RECORD``."""
COPIED_TWICE_BYTES_MAX = 4096
"""Rows up to this size are copied all together by numpy, by way of an array of its own."""
_PLACES_OF_SAMPLE, _PLACES_MIN = 2, 64
_NO_MEMORY = {errno.ENOMEM, errno.ENOSPC, errno.EFBIG}


def places_of(samples: int) -> int:
    """How many entries a cache has whose records are of files, by keys: see ``cache.keyed``."""
    return max(_PLACES_MIN, _PLACES_OF_SAMPLE * samples)


class CacheForm(NamedTuple):
    """The layout of a cache for ``samples`` samples, of ``budget_bytes`` bytes."""

    samples: int
    budget_bytes: int

    @property
    def records_start(self) -> int:
        """The offset of the first extent, in bytes."""
        return _rounded_up(HEADER_BYTES + ENTRY_BYTES * self.samples, PAGE_BYTES)

    @property
    def extent_bytes(self) -> int:
        """The size of each extent, in bytes: whole pages."""
        share = (self.budget_bytes - self.records_start) // EXTENTS_MIN
        return max(PAGE_BYTES, min(EXTENT_BYTES_MAX, share // PAGE_BYTES * PAGE_BYTES))

    @property
    def extents(self) -> int:
        """The number of extents; 0 or less if the index takes everything."""
        return (self.budget_bytes - self.records_start) // self.extent_bytes


class CacheHeader:
    """The header and the index of a cache, mapped by the daemon."""

    def __init__(self, samples: int, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, HEADER_BYTES + ENTRY_BYTES * samples)
        self._numbers = np.frombuffer(self._memory, ENTRY, HEADER_BYTES // ENTRY_BYTES)
        self._index = np.frombuffer(self._memory, ENTRY, samples, HEADER_BYTES)

    @property
    def held_samples(self) -> int:
        """The number of samples in it. Reads all entries: half a millisecond for each million."""
        return int(np.count_nonzero(self._index))

    def close(self) -> None:
        """Unmap it."""
        del self._numbers, self._index
        self._memory.close()

    @property
    def used_bytes(self) -> int:
        """The end of the file of a cache on disk, in bytes."""
        return int(self._numbers[USED_AT])

    def write(self, entries: npt.NDArray[np.uint64] | None = None, used_bytes: int = 0, seed: int = 0) -> None:
        """Write the header of a new cache and its entries, uint64 ``[samples]``, if given.

        ``allowed`` stays 0.
        """
        if entries is not None:
            self._index[:] = entries
        self._numbers[USED_AT] = used_bytes
        self._numbers[SEED_AT] = seed
        self._numbers[SAMPLES_AT] = len(self._index)
        self._numbers[MAGIC_AT] = MAGIC

    def allow(self, allowed_bytes: int) -> None:
        """Let workers use up to ``allowed_bytes`` from now on; bytes in use stay in use."""
        self._numbers[ALLOWED_AT] = allowed_bytes


def check_header(memory: memoryview) -> memoryview:
    """The header of a cache's memory, as uint64 ``[HEADER_BYTES // 8]``."""
    header = memory[:HEADER_BYTES].cast("Q")
    assert header[MAGIC_AT] == MAGIC, "the daemon makes caches of this version"
    return header


def open_to_append(descriptor: int) -> int:
    """Reopen a file: processes that share an open file share its offset, needed after an append."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)


class SampleCache(CacheRows):
    """A worker's side of a cache, for one stream. The caller keeps the descriptors."""

    _head = _HEAD

    def __init__(self, data: int, claims: int) -> None:
        self._data = os.dup(data)
        self._claims = open_to_append(claims)
        size = os.fstat(data).st_size
        mapped = mmap.mmap(data, size)
        mapped.madvise(mmap.MADV_DONTDUMP)
        memory = memoryview(mapped)
        self._header = check_header(memory)
        self._form = CacheForm(self._header[SAMPLES_AT], size)
        self._index = memory[HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES * self._form.samples].cast("Q")
        self._entries = np.frombuffer(self._index, ENTRY)
        self._records = memory.toreadonly()
        self._extent_bytes, self._records_start = self._form.extent_bytes, self._form.records_start
        self._room_start = self._room_end = 0

    def close(self) -> None:
        """Close the descriptors; the mapping ends with the last value in it."""
        os.close(self._data)
        os.close(self._claims)

    def find(self, sample: int) -> tuple[memoryview, memoryview] | None:
        """Facts and values of a sample (uint8), valid while referenced; None if absent."""
        start = self._index[sample]
        if start == 0:
            return None
        known, facts_bytes, values_bytes = _RECORD.unpack_from(self._records, start)
        facts_start = start + _RECORD.size
        values_start = facts_start + facts_bytes
        if known != sample:  # where stores are not seen in order, the entry may be seen first
            return None
        return self._records[facts_start:values_start], self._records[values_start : values_start + values_bytes]

    def _copy(self, starts: Starts, rows: Bytes) -> bool:
        size = rows.shape[1]
        if size > COPIED_TWICE_BYTES_MAX:
            into = rows.reshape(-1).data
            for place, start in enumerate(starts.tolist()):
                into[place * size : place * size + size] = self._records[start : start + size]
        elif size:
            # One element for each byte of the memory: those at the starts are the rows.
            every = np.ndarray((len(self._records) - size + 1,), f"V{size}", self._records, strides=(1,))
            rows.view(every.dtype)[:, 0] = every[starts]
        return True

    def has_room(self, values_bytes: int) -> bool:
        """True if this worker could keep a sample of ``values_bytes`` now."""
        size = _rounded_up(_RECORD.size + values_bytes, RECORD_ALIGNMENT_BYTES)
        return self._room_start + size <= self._room_end or self._claimable(-(-size // self._extent_bytes))

    def keep(self, sample: int, facts: bytes, values: Sequence[memoryview | bytes]) -> bool:
        """Keep a sample if there is room and memory; true if it was kept.

        ``values``: contiguous buffers.
        """
        values_bytes = sum(memoryview(value).nbytes for value in values)
        size = _RECORD.size + len(facts) + values_bytes
        start = self._room(_rounded_up(size, RECORD_ALIGNMENT_BYTES))
        if start is None:
            return False
        failpoints.passing("worker.cache.claimed", sample)
        try:
            written = os.pwritev(self._data, [_RECORD.pack(sample, len(facts), values_bytes), facts, *values], start)
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            return False
        failpoints.passing("worker.cache.written", sample)
        if written == size:
            self._index[sample] = start  # one aligned store, so readers see all of it or nothing
            failpoints.passing("worker.cache.entered", sample)
        return written == size

    def _room(self, size: int) -> int | None:
        """Take ``size`` bytes of the present extent or of new ones; None if there is no room."""
        start = self._room_start
        if start + size <= self._room_end:
            self._room_start += size
            return start
        count = -(-size // self._extent_bytes)
        first = self._claim(count)
        if first is None:
            return None
        start = self._records_start + first * self._extent_bytes
        end = start + count * self._extent_bytes
        if end - start - size > self._room_end - self._room_start:
            self._room_start, self._room_end = start + size, end
        return start

    def _claimable(self, count: int) -> bool:
        claimed = os.fstat(self._claims).st_size
        end = self._records_start + (claimed + count) * self._extent_bytes
        return end <= min(self._header[ALLOWED_AT], self._form.budget_bytes)

    def _claim(self, count: int) -> int | None:
        """Claim ``count`` consecutive extents for this worker; return the first, or None."""
        if not self._claimable(count):
            return None
        os.write(self._claims, bytes(count))
        behind = os.lseek(self._claims, 0, os.SEEK_CUR)
        # Others may have taken the last ones in the meantime.
        return behind - count if behind <= self._form.extents else None


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
