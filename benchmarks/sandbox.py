"""Benchmark: the sandbox. The same batches by workers in it and outside of it, and their start.

Two daemons take turns; their workers' CPU time is compared, as the machine may do other things.
"""

import gc
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

from harness import Bench, Figure, cpu_s, endless, served, spread

import batchd_client
from batchd.runtime.sandbox import NOTHING, enter, prepare, rules_of, version

BATCHES = 16
STARTS = 40


def run(bench: Bench) -> None:
    """Workers' CPU time outside of the sandbox ÷ in it, then milliseconds more for a start."""
    if not version():
        print("this kernel has no Landlock")
        return
    with ExitStack() as stack:
        sides = {}
        for mode in ("off", "on"):
            file = bench.scratch / f"sandbox-{mode}.toml"
            file.write_text(f'[daemon]\nworkers = 2\nsandbox = "{mode}"\n{bench.stream("photos")}')
            daemon = stack.enter_context(batchd_client.connect(stack.enter_context(served(file))))
            stream = stack.enter_context(daemon.stream("photos"))
            sides[mode] = partial(_read, daemon, endless(stream))
        rounds = [
            {mode: bench.measure(f"decode, sandbox {mode}", read) for mode, read in sides.items()}
            for _ in range(bench.rounds)
        ]
    ratios = [seconds["off"] / seconds["on"] for seconds in rounds]
    print(f"decode: workers' CPU time without / with the sandbox {spread(ratios, 3)}")
    bench.report(Figure("sandbox-decode", statistics.median(ratios), ">=", 0.99, 3))
    with multiprocessing.get_context("spawn").Pool(1) as fork_server:
        more_ms = fork_server.apply(_starts_ms)
    print(f"start: {spread(more_ms, 2)} ms more for each worker")
    bench.report(Figure("sandbox-start-ms", statistics.median(more_ms), "<=", 1.0, 2))


def _read(daemon: batchd_client.Daemon, batches: Iterator[batchd_client.Batch]) -> float:
    """CPU seconds of the workers for so many batches."""
    pids = [worker["pid"] for worker in daemon.status()["workers"]]
    before = sum(map(cpu_s, pids))
    for _ in range(BATCHES):
        next(batches).release()
    return sum(map(cpu_s, pids)) - before


def _starts_ms() -> list[float]:
    """Milliseconds in which forks enclose themselves, of a process as workers are forked from."""
    import_module("batchd.worker.fork_server")
    gc.collect()
    gc.freeze()
    prepare()
    return sorted(_enclosing_ms() for _ in range(STARTS))


def _enclosing_ms() -> float:
    """Milliseconds in which this process makes rules for a fork, and the fork takes them on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            _, (rules, *_others), *_rest = socket.recv_fds(theirs, 1, 1)
            started_s = time.perf_counter()
            enter(rules, has_network=False)
            theirs.send(struct.pack("d", time.perf_counter() - started_s))
            os._exit(0)
        access = NOTHING._replace(read=[str(Path.cwd())])
        # a daemon does not fork workers itself, and copies no pages
        os.close(rules_of(access, pid))
        started_s = time.perf_counter()
        rules = rules_of(access, pid)
        made_s = time.perf_counter() - started_s
        socket.send_fds(ours, [b"-"], [rules])
        os.close(rules)
        (taken_s,) = struct.unpack("d", ours.recv(8))
        os.waitpid(pid, 0)
    return 1000 * float(made_s + taken_s)
