"""What does a source cost? images/s from shards in tar format, divided by images/s of the same files in a folder.

Two streams of one daemon over the same photographs take turns, so that both have the same workers; each turn claims its stream
anew, so that nothing is decoded ahead for it meanwhile.
"""

import io
import statistics
import tarfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from harness import CROP, Bench, Figure, Player, endless, orders, served, spread

import batchd_client
from batchd.config.file_sources import WebDatasetSource
from batchd.sources.cache import IndexCache
from batchd.sources.scan import scan_source

TURN = 12
SHARDS = 4
REPEATS = 8
SCANNED = 20_000


def run(bench: Bench) -> None:
    """Tar against files, and what scanning a shard takes for each sample."""
    files = sorted(path for path in bench.photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
    shards = bench.scratch / "shards"
    shards.mkdir()
    for number in range(SHARDS):
        members = [(f"{row:06}{path.suffix.lower()}", path.read_bytes()) for row, path in enumerate(files * REPEATS)]
        _write(shards / f"{number}.tar", members[number::SHARDS])
    source = f'{{ type = "webdataset", root = "{shards}", shards = ["{{0..{SHARDS - 1}}}.tar"], label = "" }}'
    tar = f"[streams.tar]\nsource = {source}\nbatch_size = 256\npipeline = {CROP}\n"
    file = bench.config(repeats=REPEATS)
    file.write_text(file.read_text() + tar)
    with ExitStack() as stack:
        address = stack.enter_context(served(file))
        sides = {name: stack.enter_context(Player(_trainer, address, name)) for name in ("photos", "tar")}
        for side in sides.values():
            side.ask(TURN)
        rounds = [{name: side.ask(TURN) for name, side in sides.items()} for _ in range(bench.rounds)]
    ratios = [rates["tar"] / rates["photos"] for rates in rounds]
    print(f"tar / files {spread(ratios, 3)}; files {spread([rates['photos'] for rates in rounds], 0)} images/s")
    bench.report(Figure("source-tar", statistics.median(ratios), ">=", 0.95, 3))
    _scan(bench)


def _scan(bench: Bench) -> None:
    _write(
        bench.scratch / "scan/0.tar", [(f"{row:06}{end}", b"7") for row in range(SCANNED) for end in (".jpg", ".cls")]
    )
    times = []
    for _ in range(bench.rounds):
        started_s = time.perf_counter()
        scan_source(
            WebDatasetSource(root=bench.scratch / "scan", shards=("0.tar",)), lambda _found: None, IndexCache(None)
        )
        times.append((time.perf_counter() - started_s) / SCANNED * 1e6)
    print(f"scanning tar: {spread(times, 1)} us for each sample of two members")
    bench.report(Figure("source-tar-scan-us", statistics.median(times), "<=", 200.0, 1))


def _write(file: Path, members: list[tuple[str, bytes]]) -> None:
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as shard:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))


def _trainer(pipe: Connection, address: str, name: str) -> None:
    """images/s of so many batches, the first one aside."""
    with batchd_client.connect(address) as daemon:
        for count in orders(pipe):
            stream = daemon.stream(name)
            batches = endless(stream)
            next(batches).release()
            started_s, samples = time.perf_counter(), 0
            for _ in range(count):
                with next(batches) as batch:
                    samples += batch.samples
            pipe.send(samples / (time.perf_counter() - started_s))
            stream.close()
