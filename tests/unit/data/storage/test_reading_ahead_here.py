"""Shards of this host on a slow disk: the kernel is told what is read next, and only then."""

import os
import time

import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.storage import reader as reading
from batchd.data.storage.access import Storage
from batchd.data.storage.reader import SLOW_CHUNKS, BytesReader, Extent, RemoteBytes

EXTENTS = [(4096, 5000), (100, 70), (12_000, 800)]


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "shard.tar"
    path.write_bytes(bytes(range(256)) * 64)
    return os.fsencode(path)


@pytest.fixture
def reader(shard):
    made = BytesReader(RemoteBytes(Storage(), shard, {}), 1 << 20)
    yield made
    made.close()


@pytest.fixture
def announced(monkeypatch):
    """Record what the kernel is told: (start, size) of extents."""
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _shard, start, size, _advice: told.append((start, size)))
    return told


@pytest.fixture
def slow(monkeypatch):
    """Let a read of a shard take a millisecond."""
    preadv = os.preadv

    def wait(*arguments):
        time.sleep(0.001)
        return preadv(*arguments)

    return lambda is_slow: monkeypatch.setattr(reading.os, "preadv", wait if is_slow else preadv)


def announce(reader, shard):
    reader.prefetch(Extent(shard, start, size) for start, size in EXTENTS)


def test_a_disk_that_answers_at_once_is_told_nothing(reader, shard, announced, monkeypatch):
    """Not even the list of extents is made."""
    monkeypatch.setattr(reading, "SLOW_NS", 10**12)
    reader.read_extent(shard, 0, 100)

    reader.prefetch(pytest.fail("this list is not needed") for _ in range(1))

    assert not announced


def test_after_a_slow_read_the_next_chunks_are_announced(reader, shard, announced, slow):
    """Once reads are fast for long enough, announcing ends; another slow read begins it again."""
    for _ in range(2):
        slow(True)
        content = bytes(reader.read_extent(shard, 4096, 5000))
        slow(False)
        for _chunk in range(SLOW_CHUNKS + 3):
            announce(reader, shard)
        assert announced == EXTENTS * SLOW_CHUNKS
        assert content == (bytes(range(256)) * 64)[4096:9096]
        announced.clear()


def test_what_cannot_be_announced_fails_when_it_is_read(reader, shard, announced, slow, tmp_path):
    """A shard that vanished is named by the read; others are announced all the same."""
    slow(True)
    reader.read_extent(shard, 0, 10)
    gone = os.fsencode(tmp_path / "gone.tar")

    reader.prefetch([Extent(gone, 0, 10), Extent(shard, 0, None), Extent(shard, 0, 2 << 20), Extent(shard, 7, 9)])

    assert announced == [(0, 1 << 20), (7, 9)]
    with pytest.raises(SampleUnreadable, match="No such file"):
        reader.read_extent(gone, 0, 10)


def test_the_kernel_takes_the_announcement(reader, shard, slow):
    """Nothing of it changes what is read."""
    slow(True)
    reader.read_extent(shard, 0, 10)
    announce(reader, shard)

    assert bytes(reader.read_extent(shard, 100, 70)) == (bytes(range(256)) * 64)[100:170]
