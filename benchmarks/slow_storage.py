"""Benchmark: a first epoch from a server that answers after 20 ms, with and without blocks.

The same shards of token rows (4 KiB each) in batches of 256, by a shuffle of all samples, by
shuffles of blocks, and by WebDataset's reader in as many processes as batchd has workers, if it is
installed. The streams of one daemon take turns, without a cache. The server counts requests and
bytes. Before that, the gap up to which one request is faster than two.
"""

import io
import os
import statistics
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy as np
from harness import Bench, Player, endless, orders, served, spread
from slow_server import slow_server

import batchd_client
from batchd.data.storage import reader
from batchd.data.storage.access import Storage
from batchd.data.storage.ahead import RequestBudget, Requested
from batchd.data.storage.reader import Extent, RemoteBytes

DELAY_S = 0.02
SHARDS, SHARD_ROWS, ROW = 8, 2000, 1024
BATCH_SIZE, BATCHES = 256, 60
WORKERS = 2
SHUFFLES = {
    "all": "true",
    "16x16": "{ blocks = 16, block_samples = 16 }",
    "16x64": "{ blocks = 16, block_samples = 64 }",
    "64x16": "{ blocks = 64, block_samples = 16 }",
}
GAPS_KIB = (16, 64, 128, 256, 1024)
EXTENTS, EXTENT_BYTES = 64, 5120


def run(bench: Bench) -> None:
    """Rows/s of each way, one after the other in each round; the ratios are of one round."""
    folder = bench.scratch / "slow"
    folder.mkdir()
    _write_shards(folder)
    (folder / "gaps").write_bytes(bytes(EXTENTS * (EXTENT_BYTES + (GAPS_KIB[-1] << 10))))
    with ExitStack() as stack:
        port, requests = stack.enter_context(slow_server(folder, DELAY_S))
        stack.enter_context(patch.dict(os.environ, _environment(port)))
        _measure_gaps(bench)
        config = bench.scratch / "slow.toml"
        config.write_text(f'[daemon]\nworkers = {WORKERS}\nmemory = "512MiB"\n' + "".join(map(_stream, SHUFFLES)))
        address = stack.enter_context(served(config))
        players = {name: [stack.enter_context(Player(_trainer, address, name))] for name in SHUFFLES}
        if find_spec("webdataset"):
            url = f"http://127.0.0.1:{port}"
            players["WebDataset"] = [stack.enter_context(Player(_webdataset, url, number)) for number in range(WORKERS)]
        rounds: list[dict[str, tuple[float, float, float]]] = []
        for _ in range(bench.rounds):
            rounds.append({})
            for name, sides in players.items():
                rounds[-1][name] = bench.measure(name, lambda sides=sides: _turn(sides, requests))
    for name in players:
        rates, calls, sent = ([one[name][place] for one in rounds] for place in range(3))
        each = f"{statistics.median(calls):.3f} requests and {statistics.median(sent) / 1e3:.1f} kB for each row"
        print(f"{name}: {spread(rates, 0)} rows/s, {each}")
    # WebDataset mixes 1,000 rows at a time, about as many as 16 blocks of 64 have.
    rows_s = [{name: found[0] for name, found in one.items()} for one in rounds]
    for name, target, other in (("16x16", 4.0, "all"), ("16x64", 1.2, "WebDataset")):
        bench.compare(f"slow-storage-blocks-{other.lower()}", rows_s, name, (other,), target)


def _turn(sides: list[Player], requests: Connection) -> tuple[float, float, float]:
    """Rows/s of all sides together; requests and bytes for each row."""
    before = _requests(requests)
    for side in sides:
        side.tell(None)
    rows_s = sum(side.hear() for side in sides)
    calls, sent = (_requests(requests) - before) / (BATCHES * BATCH_SIZE)
    return rows_s, calls, sent


def _requests(pipe: Connection) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Requests and bytes so far: int64 ``[2]``."""
    pipe.send(None)
    return np.array(pipe.recv())


def _environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _stream(name: str) -> str:
    fields = 'fields = { x = "int32[1024]" }, names = { x = "x.npy" }'
    shards = f"{{0..{SHARDS - 1}}}.tar"
    return (
        f"[streams.{name}]\nbatch_size = {BATCH_SIZE}\nwindow = 4\nshuffle = {SHUFFLES[name]}\n"
        f'source = {{ type = "webdataset", root = "s3://bucket", shards = ["{shards}"], {fields} }}\n'
    )


def _write_shards(folder: Path) -> None:
    chance = np.random.default_rng(0)
    for number in range(SHARDS):
        with tarfile.open(folder / f"{number}.tar", "w") as shard:
            for row in range(SHARD_ROWS):
                file = io.BytesIO()
                np.save(file, chance.integers(0, 50_000, ROW, np.int32))
                member = tarfile.TarInfo(f"{row:06}.x.npy")
                member.size = file.tell()
                shard.addfile(member, io.BytesIO(file.getvalue()))


def _measure_gaps(bench: Bench) -> None:
    """Time of reading extents with equal gaps, each by a request and joined."""
    for gap in GAPS_KIB:
        starts = range(0, EXTENTS * (EXTENT_BYTES + (gap << 10)), EXTENT_BYTES + (gap << 10))
        extents = [Extent(b"s3://bucket/gaps", start, EXTENT_BYTES) for start in starts]
        times = {limit: [_fetch_ms(extents, limit) for _ in range(bench.rounds)] for limit in (0, gap << 10)}
        apart, joined = times.values()
        print(f"{EXTENTS} rows {gap} KiB apart: {spread(apart, 1)} ms by themselves, {spread(joined, 1)} ms joined")


def _fetch_ms(extents: list[Extent], gap_bytes_max: int) -> float:
    with Storage() as storage, patch.object(reader, "GAP_BYTES_MAX", gap_bytes_max):
        remote = RemoteBytes(storage, b"s3://bucket", {})
        storage.requested = Requested(RequestBudget(1 << 30))
        remote.fetch(extents[:1])  # connects
        storage.requested.wait(60)
        started_s = time.perf_counter()
        remote.fetch(extents)
        storage.requested.wait(60)
        return (time.perf_counter() - started_s) * 1e3


def _trainer(pipe: Connection, address: str, name: str) -> None:
    """Rows/s of the next batches; only the window of four is ready before."""
    with batchd_client.connect(address) as daemon:
        batches = endless(daemon.stream(name))
        for _turn in orders(pipe):
            started_s = time.perf_counter()
            for batch in islice(batches, BATCHES):
                batch.release()
            pipe.send(BATCHES * BATCH_SIZE / (time.perf_counter() - started_s))


def _webdataset(pipe: Connection, url: str, number: int) -> None:
    """Rows/s of one of the processes: it has every second shard."""
    import webdataset  # noqa: PLC0415  not everybody has it

    urls = [f"{url}/{shard}.tar" for shard in range(number, SHARDS, WORKERS)]

    def batches() -> Iterator[np.ndarray]:
        whole = webdataset.WebDataset(urls, shardshuffle=SHARDS, repeat=True).shuffle(1000).decode().to_tuple("x.npy")
        rows = (row for (row,) in whole)
        while True:
            yield np.stack([next(rows) for _ in range(BATCH_SIZE)])

    for _turn in orders(pipe):
        started_s = time.perf_counter()
        each = batches()
        for _ in range(BATCHES // WORKERS):
            next(each)
        pipe.send(BATCHES // WORKERS * BATCH_SIZE / (time.perf_counter() - started_s))
        each.close()
