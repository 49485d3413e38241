"""What is known of files is found by each worker, and takes no more than its room."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from batchd.data.sources.cache import keyed
from batchd.data.sources.cache.keyed import KeyedCache
from batchd.data.sources.cache.memory import places_of
from batchd.data.sources.cache.reader import open_cache
from batchd.stream.cache_file import CacheOnDisk
from batchd.stream.cache_memory import CacheMemory, CacheSpec

SAMPLES = 100
BUDGET_BYTES = 1 << 20


def key(number: int, place: int | None = None) -> bytes:
    """A key; ``place``: at which it is looked for first."""
    return (number if place is None else place).to_bytes(8, "little") + number.to_bytes(8, "little")


def found(cache: KeyedCache, wanted: bytes) -> bytes | None:
    """The record of a key."""
    record = cache.find(wanted)
    return None if record is None else bytes(record)


@pytest.fixture(params=["memory", "disk"])
def caches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[KeyedCache]]:
    """The cache as two workers have it."""
    spec = CacheSpec("media", "5e" * 32, places_of(SAMPLES), BUDGET_BYTES, str(tmp_path) * (request.param == "disk"))
    with ExitStack() as opened:
        memory = opened.enter_context(closing(CacheOnDisk(spec) if spec.folder else CacheMemory(spec)))
        if isinstance(memory, CacheMemory):
            memory.allow(BUDGET_BYTES)
        workers = []
        for _worker in range(2):
            cache = open_cache(opened.enter_context(memory.opened()))
            opened.callback(cache.close)
            workers.append(KeyedCache(cache))
        yield workers
        workers.clear()  # which ends their mappings


def test_a_worker_finds_what_another_one_has_kept(caches: list[KeyedCache]) -> None:
    """Of as many files as there are samples, and twice of each; not of a file that is not there."""
    first, second = caches
    for number in range(2 * SAMPLES):
        first.keep(key(number), b"record %d" % number)
    for number in (0, 7, 2 * SAMPLES - 1):
        assert found(second, key(number)) == b"record %d" % number
    assert found(second, key(2 * SAMPLES + 1)) is None


def test_files_whose_keys_begin_alike_have_places_behind_each_other(caches: list[KeyedCache]) -> None:
    """Up to a number of them; also at the end of the table."""
    first, second = caches
    last = places_of(SAMPLES) - 1
    for number in range(keyed.TRIED_MAX + 2):
        first.keep(key(number, last), b"%d" % number)
    records = [b"%d" % number for number in range(keyed.TRIED_MAX)]
    assert [found(second, key(number, last)) for number in range(keyed.TRIED_MAX + 2)] == [*records, None, None]


def test_records_take_no_more_than_their_room(caches: list[KeyedCache], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no room, or is too long, is not kept."""
    first, second = caches
    for number in range(20):
        first.keep(key(number), bytes(100_000))
    kept = [number for number in range(20) if found(second, key(number)) is not None]
    assert kept
    assert len(kept) * 100_000 < BUDGET_BYTES
    monkeypatch.setattr(keyed, "RECORD_BYTES_MAX", 10)
    first.keep(key(99), bytes(11))
    assert found(second, key(99)) is None
