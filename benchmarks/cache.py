"""Benchmark: what a cache of samples saves and costs.

Epochs with a cache against epochs without, in turn.

Slow storage is a source that waits for ``DELAY_S`` before it reads each file, as a network file
system does that asks its server; fast storage is the page cache, where a cache has nothing to save.
The first epoch fills the cache and is not counted.

Access points, with which crops decode less of a file: the same epochs with these alone, and with
the files as well, behind the one that finds them.

Cutting a decoded photograph instead of decoding it: the same epochs with a cache of pixels, and
with one of decoded samples with a shorter side of 256, which makes other batches.

After a restart, a daemon with a cache on disk has at once what one without reads again: first
epochs, in turns, with whatever the start of workers takes of them.

In this process alone, sample by sample: how long it takes to read a file from the page cache, how
much longer where it is kept as well, and how long it takes to find it in the cache; in memory, and
on disk (in the page cache), checksums included.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, perf_counter_ns
from typing import TypeAlias

from harness import Bench, Figure, served, spread

import batchd_client
from batchd.data.pipeline.cache_split import RECORD_BYTES_MAX
from batchd.data.sources.cache.disk import DiskCache
from batchd.data.sources.cache.memory import SampleCache
from batchd.data.sources.cache.reader import CachedReader
from batchd.data.sources.files.options import ListSource
from batchd.data.sources.interface import Reader, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.stream.cache_file import CacheOnDisk
from batchd.stream.cache_memory import CacheMemory, CacheSpec

DELAY_S = 0.005
SAMPLES = 1024
"""Of an epoch: the photographs, several times where they are fewer."""
BATCH_SIZE = 64
WORKERS = 2
BUDGET_BYTES = 2 << 30
FIND_US_MAX = {"cache": 20.0, "cache-disk": 100.0}
MakeCache: TypeAlias = Callable[[int], AbstractContextManager[SampleCache | DiskCache]]
_SLOW_SOURCE = """
import time
from pathlib import Path

class Photos:
    def __init__(self, listing, delay_s):
        self.files = [Path(line.rpartition(" ")[0]) for line in Path(listing).read_text().splitlines()]
        self.delay_s = delay_s

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        return {"image": self.files[index].read_bytes()}
"""
_CACHE = f'cache = "encoded"\ncache_memory = {BUDGET_BYTES}\n'
_POINTS = 'cache = "points"\n'
_OFF = 'cache = "off"\n'
_PIPELINE = """[
    { op = "decode" },
    { op = "random_resized_crop", size = [224, 224] },
    { op = "random_flip" },
]"""


def run(bench: Bench) -> None:
    """Slow storage, fast storage, restarts, and single samples."""
    (bench.scratch / "batchd_bench_slow.py").write_text(_SLOW_SOURCE)
    files = sorted(file for file in bench.photos.rglob("*") if file.suffix.lower() in {".jpg", ".jpeg", ".png"})
    listing = bench.scratch / "cache-list.txt"
    listing.write_text("".join(f"{file} 0\n" for file in (files * -(-SAMPLES // len(files)))[:SAMPLES]))
    options = f'listing = "{listing}", delay_s = {DELAY_S}'
    slow = f'type = "python", function = "batchd_bench_slow:Photos", options = {{ {options} }}, fields = {{ image = "image" }}'
    ratios = _ratios(bench, slow)
    print(f"{1000 * DELAY_S:.0f} ms for each file, later epochs with a cache against without: {spread(ratios)}")
    bench.report(Figure("cache-slow-storage", statistics.median(ratios), ">=", 2.0))
    fast = f'type = "list", path = "{listing}", allow_outside_root = true'
    ratios = _ratios(bench, fast, without=_POINTS)
    print(f"files in the page cache, a cache of them against access points alone: {spread(ratios)}")
    bench.report(Figure("cache-page-cache", statistics.median(ratios), ">=", 0.97))
    ratios = _ratios(bench, fast, _CACHE.replace("encoded", "pixels"))
    print(f"files in the page cache, pixels: {spread(ratios)}")
    bench.report(Figure("cache-pixels", statistics.median(ratios), ">=", 3.0))
    ratios = _ratios(bench, fast, f"{_CACHE.replace('encoded', 'decoded')}cache_short_side = 256\n")
    print(f"files in the page cache, decoded samples of 256: {spread(ratios)}")
    bench.report(Figure("cache-decoded-256", statistics.median(ratios), ">=", 1.5))
    ratios = _ratios(bench, fast, _POINTS)
    print(f"files in the page cache, access points: {spread(ratios)}")
    bench.report(Figure("cache-points", statistics.median(ratios), ">=", 1.25))
    ratios = _restarted(bench, slow)
    print(f"the first epoch after a restart with a cache on disk against without: {spread(ratios)}")
    bench.report(Figure("cache-disk-restart", statistics.median(ratios), ">=", 1.25))
    for name, make in (("cache", _in_memory), ("cache-disk", partial(_on_disk, bench))):
        _singles(bench, listing, name, make)


def _ratios(bench: Bench, source: str, with_cache: str = _CACHE, without: str = _OFF) -> list[float]:
    """Of each round, how many times as fast an epoch is with a cache."""
    with ExitStack() as stack:
        sides = [_Side(stack, bench, source, cache) for cache in (without, with_cache)]
        for side in sides:
            side.epoch_s()
        ratios = []
        for number in range(bench.rounds):
            seconds = {side: bench.measure("an epoch", side.epoch_s) for side in (sides if number % 2 else sides[::-1])}
            ratios.append(seconds[sides[0]] / seconds[sides[1]])
        return ratios


def _restarted(bench: Bench, source: str) -> list[float]:
    """For each round, the speed-up of a daemon's first epoch with an existing cache on disk."""
    folder = bench.scratch / "disk"
    folder.mkdir(exist_ok=True)
    on_disk = f'cache = "encoded"\ncache_dir = "{folder}"\ncache_size = {BUDGET_BYTES}\n'
    _first_epoch_s(bench, source, on_disk)
    ratios = []
    for number in range(bench.rounds):
        caches = (_OFF, on_disk) if number % 2 else (on_disk, _OFF)
        seconds = {
            cache: bench.measure("a first epoch", partial(_first_epoch_s, bench, source, cache)) for cache in caches
        }
        ratios.append(seconds[_OFF] / seconds[on_disk])
    return ratios


def _first_epoch_s(bench: Bench, source: str, cache: str) -> float:
    with ExitStack() as stack:
        return _Side(stack, bench, source, cache).epoch_s()


class _Side:
    """A daemon with one stream, whose epochs are read in turn.

    It does nothing between two of them.
    """

    def __init__(self, stack: ExitStack, bench: Bench, source: str, cache: str) -> None:
        config = bench.scratch / f"batchd-{sha256(cache.encode()).hexdigest()[:8]}.toml"
        config.write_text(
            f'[daemon]\nworkers = {WORKERS}\nmemory = "256MiB"\n[streams.photos]\nsource = {{ {source} }}\n'
            f"batch_size = {BATCH_SIZE}\npipeline = {_PIPELINE}\n{cache}"
        )
        self._connection = stack.enter_context(batchd_client.connect(stack.enter_context(served(config))))
        self._epochs = 0
        self._state: Mapping[str, object] | None = None

    def epoch_s(self) -> float:
        """Read the next epoch; how long it took."""
        self._epochs += 1
        begun_s = perf_counter()
        with self._connection.stream("photos", epochs=self._epochs, state=self._state) as stream:
            for batch in stream:
                batch.release()
            self._state = stream.state_dict()
        return perf_counter() - begun_s


@dataclass(frozen=True, slots=True)
class _Single:
    """Microseconds of one round, medians over all samples."""

    read_us: float
    missed_us: float
    found_us: float


@contextmanager
def _in_memory(samples: int) -> Iterator[SampleCache | DiskCache]:
    memory = CacheMemory(CacheSpec("encoded", "bench", samples, BUDGET_BYTES))
    memory.allow(BUDGET_BYTES)
    with closing(memory), closing(SampleCache(*memory.descriptors)) as cache:
        yield cache


@contextmanager
def _on_disk(bench: Bench, samples: int) -> Iterator[SampleCache | DiskCache]:
    with TemporaryDirectory(dir=bench.scratch) as folder:
        spec = CacheSpec("encoded", sha256(b"bench").hexdigest(), samples, BUDGET_BYTES, folder)
        with closing(CacheOnDisk(spec)) as opened, closing(DiskCache(*opened.descriptors)) as cache:
            yield cache


def _singles(bench: Bench, listing: Path, name: str, make: MakeCache) -> None:
    source = ListSource(path=listing, allow_outside_root=True)
    index = scan_source(source, lambda _found: None, IndexCache(None), Storage())
    reader = open_reader(source, index, RECORD_BYTES_MAX, Storage())
    rounds = [_single(reader, len(index), make) for _ in range(bench.rounds)]
    reader.close()
    kept = [one.missed_us - one.read_us for one in rounds]
    print(f"to read a file: {spread([one.read_us for one in rounds], 1)} us")
    print(f"to keep it as well ({name}): {spread(kept, 1)} us")
    print(f"to find it ({name}): {spread([one.found_us for one in rounds], 1)} us")
    bench.report(
        Figure(f"{name}-find-us", statistics.median(one.found_us for one in rounds), "<=", FIND_US_MAX[name], 1)
    )


def _single(reader: Reader, samples: int, make: MakeCache) -> _Single:
    with make(samples) as cache:
        cached = CachedReader(reader, cache)
        times = list(zip(*(_times_us(reader, cached, sample) for sample in range(samples)), strict=True))
    return _Single(*map(statistics.median, times))


def _times_us(reader: Reader, cached: CachedReader, sample: int) -> Iterator[float]:
    """Reading a file that was read before, the same through an empty cache, and again."""
    reader.read(sample)
    for read in (reader.read, cached.read, cached.read):
        begun_ns = perf_counter_ns()
        read(sample)
        cached.keep()
        yield (perf_counter_ns() - begun_ns) / 1000
