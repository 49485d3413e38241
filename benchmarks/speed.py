"""Benchmark: small batches, batches without decoding, and images that are decoded once.

Batches/s and the CPU time of daemon, workers and trainer together for rows of arrays; photographs/s
and CPU time of the workers in batches of one, divided by those in batches of 256. Photographs/s of
four streams with other augmentations over the same files, together, with memory for their pixels,
divided by those of one stream with the default cache.

Each stream has a daemon of its own, which does nothing while the others take their turns: a turn
ends when the next batches of its stream are ready. A round's
first batches, which were ready before it began, are not counted.
"""

import statistics
import time
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection

import numpy as np
from harness import CROP, Bench, Figure, Player, endless, family_cpu_s, orders, served, spread, wait_for_rest

import batchd_client

WORKERS = 2
SECONDS = 3.0
TOKENS, PIXELS = 2_048, 28
LARGE = 256
SWEEP_MEMORY = "1GiB"
AUGMENTATIONS = (
    "",
    '{ op = "gray" }',
    '{ op = "cutout", size = [56, 56] }',
    '{ op = "color_jitter", brightness = 0.4 }',
)


def run(bench: Bench) -> None:
    """Measure in turns, and compare."""
    made = np.random.default_rng(0)
    np.save(bench.scratch / "tokens.npy", made.integers(0, 50_000, (20_000, TOKENS), dtype=np.int32))
    np.save(bench.scratch / "digits.npy", made.integers(0, 256, (60_000, PIXELS, PIXELS), dtype=np.uint8))
    sweep = [
        bench.stream(f"photos{number}", pipeline=_augmented(step), batch_size=64, cache_memory=f'"{SWEEP_MEMORY}"')
        for number, step in enumerate(AUGMENTATIONS)
    ]
    streams = {
        "rows": _rows(bench, "tokens", 32),
        "digits": _rows(bench, "digits", LARGE),
        "large": bench.stream("photos", pipeline=CROP, batch_size=LARGE),
        "one": bench.stream("photos", pipeline=CROP, batch_size=1),
        "alone": bench.stream("photos", pipeline=CROP, batch_size=64),
        "sweep": "".join(sweep),
    }
    with ExitStack() as stack:
        players = {}
        for name, stream in streams.items():
            config = bench.scratch / f"{name}.toml"
            config.write_text(f'[daemon]\nworkers = {WORKERS}\nmemory = "1GiB"\n{stream}')
            players[name] = stack.enter_context(Player(read_in_turn, stack.enter_context(served(config))))
        for player in players.values():
            # The first epochs read files, find access points and keep pixels.
            player.ask(SECONDS)
        rounds = [
            {name: bench.measure(name, partial(player.ask, SECONDS)) for name, player in players.items()}
            for _ in range(bench.rounds)
        ]
    for name, target_us in (("rows", 150.0), ("digits", 0.0)):
        batches_s = [round_[name]["batches"] for round_ in rounds]
        cpu_us = [round_[name]["cpu_us"] for round_ in rounds]
        parts = {
            part: statistics.median(round_[name][part] for round_ in rounds)
            for part in ("daemon", "workers", "trainer")
        }
        each = ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
        print(f"{name}: {spread(batches_s, 0)} batches/s, {spread(cpu_us, 0)} us of CPU for each ({each})")
        if target_us:
            bench.report(Figure(f"speed-{name}-cpu-us", statistics.median(cpu_us), "<=", target_us, 0))
    rates = [round_["one"]["samples"] / round_["large"]["samples"] for round_ in rounds]
    workers = [round_["one"]["workers"] / (round_["large"]["workers"] / round_["large"]["size"]) for round_ in rounds]
    one, large = ([round_[name]["samples"] for round_ in rounds] for name in ("one", "large"))
    print(f"photographs/s: in batches of 1 {spread(one, 0)}, of {LARGE} {spread(large, 0)}")
    cpu_s = {name: [round_[name]["cpu_us"] / round_[name]["size"] / 1000 for round_ in rounds] for name in streams}
    each = ", ".join(f"{name} {spread(cpu_s[name])}" for name in ("one", "large", "alone", "sweep"))
    print(f"CPU s for 1,000 photographs: {each}")
    print(f"of 1 / of {LARGE}: photographs/s {spread(rates)}, CPU of workers {spread(workers)}")
    bench.report(Figure("speed-batch-1", statistics.median(rates), ">=", 0.85))
    bench.report(Figure("speed-batch-1-workers-cpu", statistics.median(workers), "<=", 1.1))

    together = [round_["sweep"]["samples"] / round_["alone"]["samples"] for round_ in rounds]
    alone, four = ([round_[name]["samples"] for round_ in rounds] for name in ("alone", "sweep"))
    print(
        f"photographs/s: one stream {spread(alone, 0)}, {len(sweep)} with {SWEEP_MEMORY} for pixels {spread(four, 0)}"
    )
    print(f"{len(sweep)} streams with other augmentations / one: {spread(together)}")
    bench.report(Figure("speed-four-augmentations", statistics.median(together), ">=", 4.0))


def _augmented(step: str) -> str:
    return f"{CROP[:-1]}, {step}]" if step else CROP


def _rows(bench: Bench, name: str, batch_size: int) -> str:
    source = f'{{ type = "npy", path = "{bench.scratch / name}.npy" }}'
    return f"[streams.photos]\nsource = {source}\nbatch_size = {batch_size}\n"


def read_in_turn(pipe: Connection, address: str) -> None:
    """Batches/s, samples/s and us of CPU for each batch, of all processes and of each kind.

    Batches of several streams are read in turn.
    """
    with batchd_client.connect(address) as daemon:
        status = daemon.status()
        streams = [daemon.stream(stream["name"]) for stream in status["streams"]]
        turns = cycle(map(endless, streams))
        pid, workers = status["daemon"]["pid"], [worker["pid"] for worker in status["workers"]]
        for seconds in orders(pipe):
            for _ in range(sum(stream.window + 1 for stream in streams)):
                next(next(turns)).release()
            before = _cpu(pid, workers)
            begun_s = time.perf_counter()
            count = samples = 0
            while time.perf_counter() - begun_s < seconds:
                with next(next(turns)) as batch:
                    count += 1
                    samples += batch.samples
            taken_s = time.perf_counter() - begun_s
            used = {part: 1e6 * (now - before[part]) / count for part, now in _cpu(pid, workers).items()}
            wait_for_rest(pid)
            pipe.send(
                {
                    "batches": count / taken_s,
                    "samples": samples / taken_s,
                    "size": samples / count,
                    "cpu_us": sum(used.values()),
                    **used,
                }
            )


def _cpu(daemon: int, workers: list[int]) -> dict[str, float]:
    """CPU seconds so far, by kind of process."""
    of_workers = sum(map(family_cpu_s, workers))
    return {"daemon": family_cpu_s(daemon) - of_workers, "workers": of_workers, "trainer": time.process_time()}
