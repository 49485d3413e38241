"""Benchmark: checksums. The same batches with and without ``verify``, decoded and handed over.

Two streams of one daemon take turns, so that both sides have the same workers and the same memory.
"""

import statistics
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection

from harness import CROP, RESIZE, Bench, Figure, Player, endless, orders, served, spread

import batchd_client

DECODED = 24
READY = 60


def run(bench: Bench) -> None:
    """Images/s of the workers, then milliseconds for each ready batch of 38.5 MB."""
    for name, pipeline, batches, keys in (
        ("decode", CROP, DECODED, {}),
        ("ready", RESIZE, READY, {"shuffle": "false", "repeats": 1}),
    ):
        file = bench.scratch / "verify.toml"
        streams = [
            bench.stream(one, pipeline=pipeline, verify=verify, memory='"1GiB"', **keys) for one, verify in STREAMS
        ]
        file.write_text('[daemon]\nworkers = 2\nmemory = "2GiB"\n' + "".join(streams))
        with ExitStack() as stack:
            address = stack.enter_context(served(file))
            sides = {one: stack.enter_context(Player(_trainer, address, one)) for one, _ in STREAMS}
            for side in sides.values():
                side.ask(batches)
            rounds = [
                {one: bench.measure(f"{name}, {one}", partial(side.ask, batches)) for one, side in sides.items()}
                for _ in range(bench.rounds)
            ]
        ratios = [seconds["bare"] / seconds["checked"] for seconds in rounds]
        more_ms = [1000 * (seconds["checked"] - seconds["bare"]) / batches for seconds in rounds]
        print(f"{name}: batches/s with checksums / without {spread(ratios, 3)}, {spread(more_ms, 1)} ms more for each")
        if name == "decode":
            bench.report(Figure("verify-decode", statistics.median(ratios), ">=", 0.9, 3))
        else:
            bench.report(Figure("verify-ready-ms", statistics.median(more_ms), "<=", 20.0, 1))


STREAMS = (("bare", "false"), ("checked", "true"))


def _trainer(pipe: Connection, address: str, stream: str) -> None:
    """Seconds for so many batches.

    In between the stream is given up, so that nothing is decoded ahead for it.
    """
    with batchd_client.connect(address) as daemon:
        for count in orders(pipe):
            source = daemon.stream(stream)
            batches = endless(source)
            next(batches).release()
            started_s = time.perf_counter()
            for _ in range(count):
                next(batches).release()
            pipe.send(time.perf_counter() - started_s)
            source.close()
