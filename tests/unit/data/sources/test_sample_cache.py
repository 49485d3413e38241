"""A cache of samples returns what was stored, within its limit, for concurrent workers."""

import errno
import mmap
import os

import numpy as np
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.kept_files import KeptFiles
from batchd.data.sources.cache import memory as sample_cache
from batchd.data.sources.cache.memory import CacheForm, SampleCache
from batchd.data.sources.cache.reader import CachedReader
from batchd.data.sources.cache.record import pack, unpack
from batchd.runtime.available import RESERVE_BYTES
from batchd.stream.cache_memory import CacheMemory, CacheSpec, allow_caches
from support.kernel import descriptors_of

SAMPLES = 1000
BUDGET_BYTES = 4 << 20
SAMPLE_BYTES = 5000


@pytest.fixture
def memory():
    """A cache that may take all of its budget."""
    memory = CacheMemory(CacheSpec("encoded", "key", SAMPLES, BUDGET_BYTES))
    memory.allow(BUDGET_BYTES)
    yield memory
    memory.close()


@pytest.fixture
def start_worker(memory):
    """A function that opens the cache as a further worker does."""
    opened = []

    def start():
        opened.append(SampleCache(*memory.descriptors))
        return opened[-1]

    yield start
    while opened:
        opened.pop().close()


def allowed_bytes(cache):
    """What workers may use of a cache, as they read it."""
    return int.from_bytes(os.pread(cache.descriptors[0], 8, 8 * sample_cache.ALLOWED_AT), "little")


def content(sample, size=SAMPLE_BYTES):
    """The bytes of a sample: no other sample has the same."""
    return sample.to_bytes(4, "little") * (size // 4)


def keep(cache, sample, size=SAMPLE_BYTES):
    cache.keep(sample, b"facts", [content(sample, size)])


def held(cache, samples, size=SAMPLE_BYTES):
    """The samples among ``samples`` that the cache holds, each checked to have its own bytes."""
    found = {sample: cache.find(sample) for sample in samples}
    for sample, parts in found.items():
        assert parts is None or [bytes(part) for part in parts] == [b"facts", content(sample, size)]
    return [sample for sample, parts in found.items() if parts is not None]


def test_every_kind_of_value_comes_back_as_it_was():
    """Type, order, shape and content survive, for half a surrogate pair and empty arrays, too."""
    values = {
        "image": memoryview(b"\xff\xd8 bytes"),
        "label": np.int64(-7),
        "flag": np.bool_(True),
        "text": "na\u00efve \udcff",
        "count": 1 << 63,
        "share": 0.1,
        "is_good": True,
        "empty": memoryview(b""),
        "pixels": np.arange(24, dtype=np.uint16).reshape(2, 3, 4),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "none": np.empty((0, 4), np.float32),
        "zero": np.array(3, np.int8),
    }
    record = pack(values)

    back, _points = unpack(memoryview(record.facts), memoryview(b"".join(record.values)))

    assert list(back) == list(values)
    for name, value in values.items():
        assert type(back[name]) is type(value), name
        if isinstance(value, np.ndarray):
            assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
            assert np.array_equal(back[name], value)
        else:
            assert back[name] == value


def test_an_array_from_the_cache_is_the_steps_to_write_into(start_worker):
    """Changes that a step makes to the array do not reach the next epoch."""
    cache = start_worker()
    cache.keep(3, *pack({"x": np.arange(4)}))

    unpack(*cache.find(3))[0]["x"][:] = 77

    assert unpack(*cache.find(3))[0]["x"].tolist() == [0, 1, 2, 3]


def test_bytes_from_the_cache_cannot_be_written(start_worker):
    """The bytes are in memory that all workers share."""
    cache = start_worker()
    cache.keep(3, *pack({"image": memoryview(b"bytes")}))

    with pytest.raises(TypeError, match="read-only"):
        unpack(*cache.find(3))[0]["image"][0] = 1


def test_what_one_worker_keeps_all_workers_have(memory, start_worker):
    """Workers fill the cache in turn, and no worker writes where another one does."""
    first, second = start_worker(), start_worker()
    for sample in range(100):
        keep((first, second)[sample % 2], sample)

    assert held(first, range(SAMPLES)) == held(second, range(SAMPLES)) == list(range(100))
    assert memory.statistics().held_samples == 100


def test_a_full_cache_keeps_what_it_has(memory, start_worker):
    """A full cache forgets no sample and stays within its budget."""
    caches = [start_worker() for _ in range(3)]
    for sample in range(SAMPLES):
        keep(caches[sample % 3], sample)

    kept = held(caches[0], range(SAMPLES))

    assert kept[:100] == list(range(100))
    assert BUDGET_BYTES * 0.9 < len(kept) * SAMPLE_BYTES < BUDGET_BYTES
    assert memory.used_bytes <= BUDGET_BYTES
    assert memory.statistics().held_samples == len(kept)


def test_a_record_may_be_longer_than_an_extent(start_worker):
    """The record gets several extents in a row; records of other workers go elsewhere."""
    first, second = start_worker(), start_worker()
    long = 3 * CacheForm(SAMPLES, BUDGET_BYTES).extent_bytes
    for sample in range(4):
        keep(first, sample, long)
        keep(second, 10 + sample)

    assert held(second, range(10), long) == [0, 1, 2, 3]
    assert held(first, range(10, 20)) == [10, 11, 12, 13]


def test_a_record_that_can_never_fit_is_not_kept(start_worker):
    """A shorter record after it is kept."""
    cache = start_worker()
    keep(cache, 1, BUDGET_BYTES)
    keep(cache, 2)

    assert held(cache, [1, 2]) == [2]


def test_nothing_is_kept_beyond_what_the_machine_has_left(memory, start_worker):
    """The cache grows again when memory is free again. Several caches share the free memory."""
    cache = start_worker()
    allow_caches([memory], RESERVE_BYTES)
    keep(cache, 1)
    assert held(cache, [1]) == []

    allow_caches([memory], RESERVE_BYTES + (1 << 20))
    for sample in range(SAMPLES):
        keep(cache, sample)
    half = memory.used_bytes
    assert 1 << 19 < half <= 1 << 21

    other = CacheMemory(CacheSpec("encoded", "other", SAMPLES, BUDGET_BYTES))
    allow_caches([memory, other], RESERVE_BYTES + (8 << 20))
    for sample in range(SAMPLES):
        keep(cache, sample)
    assert memory.used_bytes > half
    other.close()


def test_caches_of_defined_streams_have_what_is_left_by_weight(memory):
    """That of a stream of the file comes first; one that is full leaves the rest to the others."""
    budgets = {"a": 1 << 30, "b": 1 << 30, "small": BUDGET_BYTES}
    caches = [CacheMemory(CacheSpec("encoded", name, SAMPLES, size)) for name, size in budgets.items()]
    used = memory.used_bytes + sum(cache.used_bytes for cache in caches)
    left_bytes = BUDGET_BYTES + (400 << 20)
    weights = (("a", 3.0), ("b", 1.0))
    allow_caches([*caches, memory], RESERVE_BYTES + left_bytes, [*budgets, None], weights)
    first, second, small = (allowed_bytes(cache) for cache in caches)
    assert allowed_bytes(memory) == small == BUDGET_BYTES
    assert first / second == pytest.approx(3.0, rel=0.01)
    assert first + second + small + BUDGET_BYTES == pytest.approx(left_bytes + used, rel=0.01)
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
def test_a_lack_of_memory_is_a_sample_that_is_not_kept(start_worker, monkeypatch, number):
    """The cache raises no error and causes no SIGBUS."""
    cache = start_worker()

    def no_memory(*_call):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(sample_cache.os, "pwritev", no_memory)
        keep(cache, 1)
    keep(cache, 2)

    assert held(cache, [1, 2]) == [2]


def test_half_a_record_is_not_entered(start_worker, monkeypatch):
    """The kernel may write fewer bytes than requested."""
    cache = start_worker()
    with monkeypatch.context() as patch:
        patch.setattr(sample_cache.os, "pwritev", lambda _data, parts, _start: sum(map(len, parts)) - 1)
        keep(cache, 1)

    assert held(cache, [1]) == []


def test_an_entry_without_its_record_is_not_there(memory, start_worker):
    """An entry may point to zeros or to the record of another sample: neither is returned."""
    cache = start_worker()
    keep(cache, 1)
    index = memoryview(mmap.mmap(memory.descriptors[0], 1 << 14)).cast("Q")[512:]
    index[2] = index[1]
    index[3] = CacheForm(SAMPLES, BUDGET_BYTES).records_start + (1 << 20)

    assert held(cache, [1, 2, 3]) == [1]


def test_the_memory_cannot_be_shortened(memory):
    """A worker that reads shortened memory would end with SIGBUS."""
    for size in (4096, 2 * BUDGET_BYTES):
        with pytest.raises(PermissionError):
            os.truncate(memory.descriptors[0], size)


class OneReader:
    """Reads samples whose bytes count the reads so far; odd samples cannot be read."""

    def __init__(self):
        self.reads = []
        self.asked = []

    def read(self, sample):
        self.reads.append(sample)
        if sample % 2:
            raise SampleUnreadable("is odd")
        return {"image": memoryview(b"read %d" % len(self.reads)), "label": sample}

    def prefetch(self, samples):
        self.asked += samples

    def known(self, sample):
        return {"label": sample}

    def name(self, sample):
        return f"sample {sample}"

    def close(self):
        pass


def test_a_reader_keeps_the_samples_that_are_reported_good(start_worker):
    """The reader reads other samples again, and reads ahead only samples that are not kept."""
    inner = OneReader()
    reader = CachedReader(inner, start_worker())
    for sample in (2, 4):
        reader.read(sample)
        assert not reader.is_hit
    reader.keep()
    with pytest.raises(SampleUnreadable):
        reader.read(5)
    reader.keep()

    assert bytes(reader.read(4)["image"]) == b"read 2"
    assert reader.is_hit
    assert bytes(reader.read(2)["image"]) == b"read 4"
    assert inner.reads == [2, 4, 5, 2]
    reader.prefetch([2, 4, 6])
    assert inner.asked == [2, 6]
    assert (reader.known(4), reader.name(4)) == ({"label": 4}, "sample 4")


def test_the_last_stream_that_leaves_closes_the_cache():
    """The memory of the cache is freed with its last stream."""
    before = len(descriptors_of(os.getpid()))
    memory = CacheMemory(CacheSpec("encoded", "key", SAMPLES, BUDGET_BYTES))
    memory.join()
    memory.join()

    memory.leave()
    assert len(memory.descriptors) == 2
    memory.leave()

    assert memory.descriptors == []
    assert len(descriptors_of(os.getpid())) == before


def points_of_a_sample(reader, points, sample, size):
    """Read a sample and walk its file if its points are wanted; return whether they were."""
    reader.read(sample)
    is_walked = points.are_wanted("image")
    if is_walked:
        points.found["image"] = bytes(size)
    reader.keep()
    return is_walked


def test_samples_with_points_are_still_read_ahead(start_worker):
    """Their bytes still come from the source in each epoch."""
    source, files = OneReader(), KeptFiles(["image"])
    reader = CachedReader(source, start_worker(), "points", files=files)
    points_of_a_sample(reader, files.points, 2, 100)

    reader.prefetch([1, 2, 3])

    assert source.asked == [1, 2, 3]


def test_points_for_which_there_is_no_room_are_not_sought_again(start_worker):
    """The reader does not try again even where smaller points would fit."""
    cache, files = start_worker(), KeptFiles(["image"])
    reader = CachedReader(OneReader(), cache, "points", files=files)
    walked = [points_of_a_sample(reader, files.points, sample, 60_000) for sample in range(0, 400, 2)]
    kept = sum(sample in cache for sample in range(0, 400, 2))

    assert 20 < kept < 100
    assert sum(walked) <= kept + 1
    assert not any(points_of_a_sample(reader, files.points, sample, 60_000) for sample in range(300, 400, 2))


def test_points_of_a_sample_that_is_never_the_same_are_replaced_once(start_worker):
    """A replaced record keeps its space, so replacing more often would fill the cache."""
    cache, files = start_worker(), KeptFiles(["image"])
    reader = CachedReader(OneReader(), cache, "points", files=files)

    assert [points_of_a_sample(reader, files.points, 6, 100) for _ in range(4)] == [True, True, False, False]
