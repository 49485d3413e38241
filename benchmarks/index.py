"""Benchmark: the index of 1,280,000 samples: seconds to build it, and its cost for each worker.

A list of 1,280,000 paths is scanned once; after that it comes from the cache, as at every further
start. Then new processes map the index as workers do, and look at every sixteenth path; what counts
is the memory that is a process's own.
"""

import os
import statistics
import subprocess
import sys
import time

from harness import Bench, Figure, spread

from batchd.data.sources.files.options import ListSource
from batchd.data.sources.scan import scan_source
from batchd.data.storage import index_cache as cache_module
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache

SAMPLES = 1_280_000
CLASS_SAMPLES = 1_280
PRIVATE_BYTES = """
import sys
from batchd.data.sources.files.index import FilesIndex
from batchd.data.storage.index import SourceIndex

def private_bytes():
    fields = (line.split() for line in open("/proc/self/smaps_rollup"))
    return sum(int(field[1]) * 1024 for field in fields if field[0].startswith("Private_"))

before = private_bytes()
index = FilesIndex(SourceIndex.from_descriptor(int(sys.argv[1])))
print(private_bytes() - before if all(index.path(sample) for sample in range(0, len(index), 16)) else 0)
"""


def run(bench: Bench) -> None:
    """The first start, further starts, and a worker."""
    file = bench.scratch / "list.txt"
    with file.open("w") as stream:
        for sample in range(SAMPLES):
            stream.write(f"train/n{sample // CLASS_SAMPLES:08}/n{sample:08}_10026.JPEG {sample // CLASS_SAMPLES}\n")
    time.sleep(cache_module.SETTLED_NS / 1e9)
    source, cache = ListSource(path=file), IndexCache(bench.scratch / "cache")
    first_s = _seconds(source, cache)
    again_s = [bench.measure("a start", lambda: _seconds(source, cache)) for _ in range(bench.rounds)]
    print(f"{SAMPLES} samples: first start {first_s:.2f} s, further ones {spread(again_s, 3)} s")
    bench.report(Figure("index-from-cache-s", statistics.median(again_s), "<=", 2.0, 3))
    private_mb = [_private_mb(source, cache) for _ in range(bench.rounds)]
    print(f"private memory of a worker for it: {spread(private_mb, 2)} MB")
    bench.report(Figure("index-worker-mb", statistics.median(private_mb), "<=", 10.0, 2))


def _seconds(source: ListSource, cache: IndexCache) -> float:
    started_s = time.perf_counter()
    os.close(scan_source(source, lambda _found: None, cache, Storage()).to_memfd())
    return time.perf_counter() - started_s


def _private_mb(source: ListSource, cache: IndexCache) -> float:
    descriptor = scan_source(source, lambda _found: None, cache, Storage()).to_memfd()
    first_worker = SourceIndex.from_descriptor(
        descriptor
    )  # this process; it touches every page, so that none is another's own
    touched = sum(len(array.tobytes()) for array in first_worker.arrays.values())
    command = [sys.executable, "-c", PRIVATE_BYTES, str(descriptor)]
    done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, check=True)
    os.close(descriptor)
    assert touched > SAMPLES
    return int(done.stdout) / 1e6
