"""Benchmark: CPU time of all workers for one, two and four mirror trainers of the same epochs."""

import statistics
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import Bench, Figure, Player, cpu_s, orders, served, spread

import batchd_client

EPOCHS = 2


def run(bench: Bench) -> None:
    """Each round decodes the same epochs for each number of trainers, with a daemon of its own."""
    config = bench.config(repeats=2, batch_size=128)
    ratios: dict[int, list[float]] = {2: [], 4: []}
    for _ in range(max(3, bench.rounds // 2)):
        cpu_s = {
            trainers: bench.measure(f"{trainers} trainers", partial(_decode_cpu_s, config, trainers))
            for trainers in (1, *ratios)
        }
        for trainers, found in ratios.items():
            found.append(cpu_s[trainers] / cpu_s[1])
    for trainers, found in ratios.items():
        print(f"decode CPU with {trainers} trainers / with one: {spread(found, 3)}")
        bench.report(Figure(f"sharing-{trainers}", statistics.median(found), "<=", 1.10))


def _decode_cpu_s(config: Path, trainers: int) -> float:
    with served(config) as address, batchd_client.connect(address) as daemon:
        players = [Player(_trainer, address) for _ in range(trainers)]
        for player in players:
            player.hear()
        pids = [worker["pid"] for worker in daemon.status()["workers"]]
        before = sum(map(cpu_s, pids))
        for player in players:
            player.tell("read")
        for player in players:
            player.hear()
        used = sum(map(cpu_s, pids)) - before
        for player in players:
            player.__exit__()
    return used


def _trainer(pipe: Connection, address: str) -> None:
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream("photos", epochs=EPOCHS)
        pipe.send("subscribed")
        for _order in orders(pipe):
            for _epoch in range(EPOCHS):
                for batch in stream:
                    np.max(batch["image"].reshape(-1)[::4096])
            pipe.send("done")
