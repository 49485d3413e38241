"""Benchmark: images/s from shards divided by those from a folder, and the time of a scan.

The streams of one daemon over the same photographs take turns, so that all have the same workers.
Each turn subscribes again, so that nothing is decoded ahead for it meanwhile, and reads an epoch
that is not in the ring yet.
"""

import statistics
import time
from contextlib import ExitStack
from itertools import count, islice
from multiprocessing.connection import Connection

from harness import CROP, Bench, Figure, Player, orders, served, spread
from source_sides import SIDES, Side

import batchd_client
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache

TURN = 12
SAMPLES_MIN = 4096
"""In an epoch: more than a turn takes."""
SCANNED = 20_000
FILES = "photos"


def run(bench: Bench) -> None:
    """Each kind of source against files, and what scanning takes for each sample."""
    pictures = sorted(path for path in bench.photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
    repeats = -(-SAMPLES_MIN // len(pictures))
    file = bench.config(repeats=repeats)
    for name, side in SIDES.items():
        folder = bench.scratch / name
        folder.mkdir()
        source = side.write(folder, pictures * repeats)
        stream = f"[streams.{name}]\nsource = {source}\nbatch_size = 256\npipeline = {CROP}\n"
        file.write_text(file.read_text() + stream)
    with ExitStack() as stack:
        address = stack.enter_context(served(file))
        players = {name: stack.enter_context(Player(_trainer, address, name)) for name in (FILES, *SIDES)}
        for player in players.values():
            player.ask(0)
        epochs = count(1)  # nothing of a new one is in the ring
        rounds = [
            {
                name: bench.measure(name, lambda player=player: player.ask(next(epochs)))
                for name, player in players.items()
            }
            for _ in range(bench.rounds)
        ]
    for name, side in SIDES.items():
        ratios = [rates[name] / rates[FILES] for rates in rounds]
        print(f"{name} / files {spread(ratios, 3)}; files {spread([rates[FILES] for rates in rounds], 0)} images/s")
        bench.report(Figure(f"source-{name}", statistics.median(ratios), ">=", 0.95, 3))
        _scan(bench, name, side)


def _scan(bench: Bench, name: str, side: Side) -> None:
    folder = bench.scratch / f"scan-{name}"
    folder.mkdir()
    source = side.write_small(folder, SCANNED)
    times = [bench.measure(f"scanning {name}", lambda: _scan_us(source)) for _ in range(bench.rounds)]
    print(f"scanning {name}: {spread(times, 1)} us for each sample")
    bench.report(Figure(f"source-{name}-scan-us", statistics.median(times), "<=", side.scan_us_max, 1))


def _scan_us(source: SourceOptions) -> float:
    started_s = time.perf_counter()
    scan_source(source, lambda _found: None, IndexCache(None), Storage())
    return (time.perf_counter() - started_s) / SCANNED * 1e6


def _trainer(pipe: Connection, address: str, name: str) -> None:
    """images/s of the first batches of an epoch, the very first one aside."""
    with batchd_client.connect(address) as daemon:
        for epoch in orders(pipe):
            stream = daemon.stream(name)
            stream.seek(epoch)
            batches = iter(stream)
            next(batches).release()
            started_s, samples = time.perf_counter(), 0
            for batch in islice(batches, TURN):
                with batch:
                    samples += batch.samples
            pipe.send(samples / (time.perf_counter() - started_s))
            stream.close()
