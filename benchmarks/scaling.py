"""Benchmark: the daemon's share of one core at 60,000 images/s.

With 64 and 192 workers and eight trainers.

There are two cores here, so workers sleep instead of decoding: each answers its orders when a
decoder of its speed would have, with the same messages. What the loop costs is the daemon's CPU
time; it is given for 60,000 images a second.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from harness import Bench, Figure, Player, cpu_s, endless, orders, spread

import batchd_client

IMAGES_PER_S = 60_000
WORKERS = (64, 192)
TRAINERS = 8
WINDOW = 24
"""Batches ahead: 192 workers with two orders each hold the rows of 24 batches."""
SETTLE_S = 20.0
"""Until every worker has been handed every slot of the ring, once.

That is some 13,000 messages with 192 of them.
"""
ROUND_S = 10.0
SMALL = '[{ op = "decode" }, { op = "resize", size = [8, 8] }]'


def run(bench: Bench) -> None:
    """All trainers read every batch ("mirror"), or share an epoch ("ranks")."""
    for workers in WORKERS:
        for way in ("mirror", "ranks"):
            name = f"{workers} workers, {way}"
            rounds = range(min(bench.rounds, 3))
            shares = [bench.measure(name, partial(_round, bench, workers, way)) for _ in rounds]
            each_us = [1e6 * share / IMAGES_PER_S for share in shares]
            print(f"{name}: CPU of the daemon for each image, us: {spread(each_us)}")
            bench.report(Figure(f"scaling-{workers}-workers-{way}-percent-of-a-core", 100 * min(shares), "<=", 50, 1))


def _round(bench: Bench, workers: int, way: str) -> float:
    """Part of one core that the daemon would need."""
    config = bench.config(workers=workers, pipeline=SMALL, repeats=100, window=str(WINDOW))
    config.write_text(config.read_text().replace("[daemon]", '[daemon]\nhttp = "off"'))
    with _daemon(config, 1e6 * workers / IMAGES_PER_S) as (pid, address):
        players = [Player(_train, address, rank, way) for rank in range(TRAINERS)]
        try:
            for player in players:
                player.tell("begin")
            time.sleep(SETTLE_S)
            images, began, used = _decoded(address), time.monotonic(), cpu_s(pid)
            time.sleep(ROUND_S)
            used, images = cpu_s(pid) - used, _decoded(address) - images
            print(
                f"  {images / (time.monotonic() - began):,.0f} images/s, {100 * used / ROUND_S:.1f} % of a core",
                flush=True,
            )
            return used / images * IMAGES_PER_S
        finally:
            for player in players:
                player.process.kill()


def _decoded(address: str) -> int:
    with batchd_client.connect(address) as connection:
        (stream,) = connection.status()["streams"]
        return int(stream["decoded_batches"]) * 256


@contextmanager
def _daemon(config: Path, image_us: float) -> Iterator[tuple[int, str]]:
    runtime = config.parent / "run"
    config.write_text(config.read_text().replace("[daemon]", f'[daemon]\nruntime_dir = "{runtime}"'))
    program = Path(__file__).with_name("scaling_daemon.py")
    daemon = subprocess.Popen(
        [sys.executable, program, "serve", "--config", config, "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SCALING_IMAGE_US": str(image_us)},
    )
    try:
        assert daemon.stdout is not None
        address = daemon.stdout.readline().strip()
        _wait_for_workers(address)
        yield daemon.pid, address
    finally:
        daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(30)
        daemon.kill()


def _wait_for_workers(address: str) -> None:
    with batchd_client.connect(address) as connection:
        while any(worker["state"] != "ready" for worker in connection.status()["workers"]):
            time.sleep(0.2)


def _train(pipe: Connection, address: str, rank: int, way: str) -> None:
    """A trainer that takes what it can get."""
    place = {"rank": rank, "world_size": TRAINERS} if way == "ranks" else {}
    with batchd_client.connect(address) as connection:
        stream = connection.stream("photos", **place)
        for _ in orders(pipe):
            for batch in endless(stream):
                batch.release()
