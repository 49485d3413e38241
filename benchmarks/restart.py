"""Benchmark: from a killed daemon to the next batch, and from a killed trainer to free slots.

A supervisor starts the next daemon at once, as a service manager without a pause would. The
trainer's step takes some time in which it needs no CPU, as with a GPU. Trainers die in turn with
nothing else going on, and in the middle of other faults: workers and the fork server killed,
workers stopped, reloads, trainers that come.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Self

import numpy as np
from harness import RESIZE, Bench, Figure, Player, children, command_line, cpu_s, endless, family_cpu_s, orders

import batchd_client
from batchd_client.errors import DaemonUnavailable

KILLS_A_ROUND = 15
STEP_S = 0.005
SETTLE_S = 0.3
HELD = 2
LOOK_S = 0.001
FAULTS = ("none", "worker", "worker", "fork server", "stop", "reload", "newcomer")


class Supervised:
    """A daemon that is started again as soon as it has ended."""

    def __init__(self, config: Path, runtime_dir: Path) -> None:
        self.address = f"ipc://{runtime_dir}"
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "batchd",
            "serve",
            "--config",
            os.fspath(config),
            "--log-level",
            "error",
        ]
        self._is_over = False
        self.process = self._start()
        self._thread = Thread(target=self._supervise)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def _supervise(self) -> None:
        while True:
            self.process.wait()
            if self._is_over:
                return
            self.process = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over = True
        self.process.terminate()
        self._thread.join()


def run(bench: Bench) -> None:
    """Kill daemons, then trainers."""
    runtime_dir = bench.scratch / "run"
    config = bench.scratch / "restart.toml"
    stream = bench.stream("photos", pipeline=RESIZE, batch_size=32, repeats=1)
    config.write_text(
        f'[daemon]\nworkers = 2\nmemory = "256MiB"\nruntime_dir = "{runtime_dir}"\nhttp = "off"\n{stream}'
    )
    with Supervised(config, runtime_dir) as daemon:
        _wait_for(daemon.address)
        _kill_daemons(bench, daemon)
        _kill_trainers(bench, daemon)


def _kill_daemons(bench: Bench, daemon: Supervised) -> None:
    gaps, daemons_s, trainer_s = [], [], []
    with Player(_reader, daemon.address) as trainer:
        trainer.ask("begin")
        for _ in range(KILLS_A_ROUND * bench.rounds):
            trainer.tell("read")
            time.sleep(random.uniform(SETTLE_S, 2 * SETTLE_S))
            victim = daemon.process
            killed_s = time.monotonic()
            victim.kill()
            came_s, waiting_cpu_s = trainer.hear()
            daemons_s.append(family_cpu_s(daemon.process.pid))
            gaps.append(came_s - killed_s)
            trainer_s.append(waiting_cpu_s)
    print(f"daemon killed to next batch: {_line(gaps)}")
    print(
        f"CPU until then: {np.median(daemons_s):.2f} s of daemon and workers, {1e3 * np.median(trainer_s):.1f} ms of the trainer"
    )
    bench.report(Figure("restart-daemon-p50-s", float(np.percentile(gaps, 50)), "<=", 0.7))
    bench.report(Figure("restart-daemon-p99-s", float(np.percentile(gaps, 99)), "<=", 1.5))


def _kill_trainers(bench: Bench, daemon: Supervised) -> None:
    found: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    with Player(_reader, daemon.address) as other, batchd_client.connect(daemon.address) as eyes:
        other.ask("begin")
        other.tell("for ever")
        begun_s = cpu_s(daemon.process.pid)
        for number in range(KILLS_A_ROUND * bench.rounds):
            fault = FAULTS[number % len(FAULTS)]
            with Player(_reader, daemon.address) as victim:
                held = victim.ask("hold")
                undo = _commit(fault, daemon)
                killed_s = time.monotonic()
                os.kill(held, signal.SIGKILL)
                while _has(eyes, held):
                    time.sleep(LOOK_S)
                found[fault].append(time.monotonic() - killed_s)
                undo()
        spent_s = cpu_s(daemon.process.pid) - begun_s
        os.kill(other.process.pid or 0, signal.SIGKILL)
    for fault, seconds in found.items():
        print(f"trainer killed to free slots, {fault}: {_line(seconds)}")
    every = [one for seconds in found.values() for one in seconds]
    print(f"all: {_line(every)}; {1e3 * spent_s / len(every):.1f} ms of the daemon's CPU each, everything included")
    bench.report(Figure("restart-trainer-p50-ms", 1e3 * float(np.percentile(every, 50)), "<=", 20, 1))
    bench.report(Figure("restart-trainer-p99-ms", 1e3 * float(np.percentile(every, 99)), "<=", 100, 1))


def _commit(fault: str, daemon: Supervised) -> Callable[[], None]:
    """Do something else at the same moment; what undoes it."""
    server = next(child for child in children(daemon.process.pid) if b"batchd.worker" in command_line(child))
    workers = children(server)
    match fault:
        case "worker" if workers:
            os.kill(random.choice(workers), signal.SIGKILL)
        case "fork server":
            os.kill(server, signal.SIGKILL)
        case "stop" if workers:
            stopped = random.choice(workers)
            os.kill(stopped, signal.SIGSTOP)
            return lambda: _go_on(stopped)
        case "reload":
            daemon.process.send_signal(signal.SIGHUP)
        case "newcomer":
            newcomer = Player(_reader, daemon.address)
            newcomer.tell("begin")
            return lambda: (newcomer.hear(), newcomer.__exit__())[1]
    return lambda: None


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _has(eyes: batchd_client.Daemon, pid: int) -> bool:
    """Return whether the daemon still lists that trainer."""
    status = eyes.status()
    return any(trainer["pid"] == pid for trainer in status["trainers"])  # type: ignore[attr-defined, index]


def _reader(pipe: Connection, address: str) -> None:
    """A trainer.

    Says when the first batch of the next daemon came, and how much CPU it took to wait for it.
    """
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream("photos")
        batches = endless(stream)
        kept = []
        for order in orders(pipe):
            if order == "begin":
                next(batches).release()
                pipe.send(None)
            elif order == "hold":
                kept += [next(batches) for _ in range(HELD)]
                pipe.send(os.getpid())
            else:
                resubscribed = stream.statistics().resubscribed if order == "read" else -1
                while True:
                    begun_s = time.process_time()
                    batch = next(batches)
                    came_s, spent_s = time.monotonic(), time.process_time() - begun_s
                    batch.release()
                    if order == "read" and stream.statistics().resubscribed > resubscribed:
                        break
                    time.sleep(STEP_S)
                pipe.send((came_s, spent_s))


def _wait_for(address: str) -> None:
    while True:
        try:
            batchd_client.connect(address).close()
        except DaemonUnavailable:
            time.sleep(0.05)
        else:
            return


def _line(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99])
    return f"p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms, longest {1e3 * max(seconds):.1f} ms of {len(seconds)}"
