"""Benchmark: the time between batches during reloads.

Two trainers, in steady state and while another stream is added and removed.

Both sides take turns: each round is a stretch of reading without reloads and one, as long, with
them. A trainer's step takes some time in which it needs no CPU, as with a GPU; else the trainers
would take the cores that the scan is to have.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from harness import RESIZE, Bench, Figure, Player, endless, orders

import batchd_client

RELOADS = 100
ROUNDS = 10
TRAINERS = 2
PERCENTILE = 0.99
STEP_S = 0.005
WARM_UP_S = 3.0


def run(bench: Bench) -> None:
    """p99 of the time between batches during reloads, divided by that in steady state.

    And the longest of each.
    """
    gaps: dict[bool, list[float]] = {False: [], True: []}
    config = bench.scratch / "reload.toml"
    with _daemon(bench, config) as (process, address), batchd_client.connect(address) as daemon:
        players = [Player(_trainer, address) for _ in range(TRAINERS)]
        try:
            for player in players:
                player.ask(WARM_UP_S)  # the whole epoch is in the ring, and everything was imported
            for _ in range(ROUNDS):
                seconds = _reload(bench, config, process, daemon, players, gaps[True])
                for player in players:
                    player.tell(seconds)
                gaps[False] += [gap for player in players for gap in player.hear()]
        finally:
            for player in players:
                player.__exit__()
    for reloads, found in gaps.items():
        name = f"during {RELOADS} reloads" if reloads else "steady state"
        print(f"{name}: {_line(found)}")
    bench.report(Figure("reload-p99", _p99(gaps[True]) / _p99(gaps[False]), "<=", 1.5))
    bench.report(Figure("reload-longest-gap-by-steady-p99", max(gaps[True]) / _p99(gaps[False]), "<=", 1.0))
    bench.report(Figure("steady-longest-gap-by-steady-p99", max(gaps[False]) / _p99(gaps[False]), "<=", 1.0))


def _reload(  # noqa: PLR0913, PLR0917  who takes part
    bench: Bench,
    config: Path,
    process: "subprocess.Popen[bytes]",
    daemon: batchd_client.Daemon,
    players: list[Player],
    gaps: list[float],
) -> float:
    """Read while the configuration is read again, some times; how long that took."""
    for player in players:
        player.tell("until told")
    begun = time.perf_counter()
    for number in range(RELOADS // ROUNDS):
        before = _outcome(daemon)
        _write(bench, config, with_more=number % 2 == 0)
        process.send_signal(signal.SIGHUP)
        while (outcome := _outcome(daemon)) == before:
            time.sleep(0.02)
        assert isinstance(outcome, dict), outcome
        assert outcome["exit_code"] == 0, outcome["text"]
    seconds = time.perf_counter() - begun
    for player in players:
        player.tell("stop")
        gaps += player.hear()
    return seconds


def _outcome(daemon: batchd_client.Daemon) -> object:
    facts = daemon.status()["daemon"]
    assert isinstance(facts, dict)
    return facts["reload"]


def _write(bench: Bench, config: Path, *, with_more: bool) -> None:
    keys = {"memory": '"128MiB"', "shuffle": "false"}
    streams = [bench.stream("photos", pipeline=RESIZE, batch_size=16, repeats=1, **keys)]
    if with_more:
        streams.append(bench.stream("more", pipeline=RESIZE, batch_size=32, repeats=1, **keys))
    head = f'[daemon]\nworkers = 1\nmemory = "512MiB"\nruntime_dir = "{bench.scratch / "run"}"\n'
    config.write_text(head + "".join(streams))


@contextmanager
def _daemon(bench: Bench, config: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    _write(bench, config, with_more=False)
    command = [sys.executable, "-m", "batchd", "serve", "--config", os.fspath(config), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.terminate()


def _trainer(pipe: Connection, address: str) -> None:
    """Take batches for some seconds, or until told; answers with the times between them."""
    with batchd_client.connect(address) as daemon:
        batches = endless(daemon.stream("photos"))
        for order in orders(pipe):
            gaps = []
            until = time.perf_counter() + order if isinstance(order, float) else float("inf")
            last = time.perf_counter()
            while last < until and not (isinstance(order, str) and pipe.poll()):
                next(batches).release()
                time.sleep(STEP_S)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
            if isinstance(order, str):
                pipe.recv()
            pipe.send(gaps)


def _p99(gaps: list[float]) -> float:
    return sorted(gaps)[int(len(gaps) * PERCENTILE)]


def _line(gaps: list[float]) -> str:
    return (
        f"median {statistics.median(gaps) * 1e3:.2f} ms, p99 {_p99(gaps) * 1e3:.2f} ms, longest {max(gaps) * 1e3:.1f} ms "
        f"of {len(gaps)} gaps"
    )
