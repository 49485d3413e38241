"""Benchmark: CPU time of all workers for several trainers, of one stream and of several streams.

And what a slow trainer costs three fast ones of its stream with default settings, where no trainer
waits for another: the lowest rate of a fast one beside it, divided by the lowest of three without
it, and memory (PSS) of daemon, workers and trainers, the slow one's too, with it and without it.
"""

import statistics
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import CROP, Bench, Figure, Player, cpu_s, endless, orders, served, spread, wait_for_rest
from peers.common import pss_bytes, tree

import batchd_client

EPOCHS = 2
FAST, SLOW_PAUSE_S = 3, 1.0
"""Fast trainers; how long the slow one pauses after each batch, so that it is far behind."""
TURN_S = 6.0
JITTER = CROP[:-1].rstrip() + ', { op = "color_jitter", brightness = 0.4 } ]'
VALIDATION = '[ { op = "decode" }, { op = "resize", shorter_side = 256 }, { op = "center_crop", size = [224, 224] } ]'
KINDS = {
    "one trainer": ["train"],
    "two trainers of one stream": ["train", "train"],
    "four trainers of one stream": ["train"] * 4,
    "two batch sizes": ["train", "small"],
    "two augmentations": ["train", "jitter"],
    "two augmentations, cache_memory in both": ["train-kept", "jitter-kept"],
    "training and validation": ["train", "validation"],
    "training and validation, cache_memory in both": ["train-kept", "validation-kept"],
}
"""What runs at the same time, by the streams that its trainers read."""


def run(bench: Bench) -> None:
    """Each round decodes the same epochs for each number of trainers, with a daemon of its own."""
    _print_kinds(bench)
    config = bench.config(repeats=2, batch_size=128)
    ratios: dict[int, list[float]] = {2: [], 4: []}
    for _ in range(max(3, bench.rounds // 2)):
        cpu_s = {trainers: _decode_cpu_s(config, ["photos"] * trainers) for trainers in (1, *ratios)}
        for trainers, found in ratios.items():
            found.append(cpu_s[trainers] / cpu_s[1])
    for trainers, found in ratios.items():
        print(f"decode CPU with {trainers} trainers / with one: {spread(found, 3)}")
        bench.report(Figure(f"sharing-{trainers}", statistics.median(found), "<=", 1.10))
    _beside_slow(bench)


def _print_kinds(bench: Bench) -> None:
    config = bench.scratch / "kinds.toml"
    text = '[daemon]\nworkers = 2\nmemory = "2GiB"\n'
    for name, pipeline in {"train": CROP, "jitter": JITTER, "validation": VALIDATION}.items():
        text += bench.stream(name, pipeline=pipeline, batch_size=128, repeats=2, memory='"256MiB"')
        text += bench.stream(
            f"{name}-kept", pipeline=pipeline, batch_size=128, repeats=2, memory='"256MiB"', cache_memory='"400MiB"'
        )
    text += bench.stream("small", batch_size=32, repeats=2, memory='"256MiB"')
    config.write_text(text)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(3):
        for kind, streams in KINDS.items():
            found[kind].append(_decode_cpu_s(config, streams, per_images=1000))
    for kind, values in found.items():
        print(f"worker CPU s for each 1,000 images that trainers get, {kind}: {spread(values)}", flush=True)


def _decode_cpu_s(config: Path, streams: list[str], per_images: int | None = None) -> float:
    """CPU seconds of all workers while a trainer for each of the streams reads its epochs."""
    with served(config) as address, batchd_client.connect(address) as daemon:
        players = [Player(_trainer, address, name) for name in streams]
        for player in players:
            player.hear()
        pids = [worker["pid"] for worker in daemon.status()["workers"]]
        before = sum(map(cpu_s, pids))
        for player in players:
            player.tell("read")
        images = sum(player.hear() for player in players)
        used = sum(map(cpu_s, pids)) - before
        for player in players:
            player.__exit__()
    return used if per_images is None else used * per_images / images


def _trainer(pipe: Connection, address: str, name: str) -> None:
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream(name, epochs=EPOCHS)
        pipe.send("subscribed")
        for _order in orders(pipe):
            images = 0
            for _epoch in range(EPOCHS):
                for batch in stream:
                    np.max(batch["image"].reshape(-1)[::4096])
                    images += len(batch["image"])
            pipe.send(images)


def _beside_slow(bench: Bench) -> None:
    """Each side has a daemon of its own, which rests while the other one has its turn."""
    config = bench.config(repeats=8, batch_size=128)
    pauses_s = {"alone": [0.0] * FAST, "beside": [0.0] * FAST + [SLOW_PAUSE_S]}
    with ExitStack() as stack:
        sides = {}
        for name, trainers in pauses_s.items():
            address = stack.enter_context(served(config))
            pid = stack.enter_context(batchd_client.connect(address)).status()["daemon"]["pid"]
            players = [stack.enter_context(Player(_paced, address, pause_s)) for pause_s in trainers]
            sides[name] = partial(_together, pid, players)
            sides[name]()  # the first epochs read files and find access points
        rounds = [{name: bench.measure(name, side) for name, side in sides.items()} for _ in range(bench.rounds)]
    for name in sides:
        fastest, lowest = ([pick(one[name][0][:FAST]) for one in rounds] for pick in (max, min))
        print(f"images/s of {FAST} trainers, {name}: {spread(lowest, 0)} to {spread(fastest, 0)}")
    print(f"images/s of the slow one: {spread([one['beside'][0][FAST] for one in rounds], 0)}")
    rates = [min(one["beside"][0][:FAST]) / min(one["alone"][0]) for one in rounds]
    memory = [one["beside"][1] / one["alone"][1] for one in rounds]
    each = (f"{name} {spread([one[name][1] / 1e6 for one in rounds], 0)} MB" for name in sides)
    print(f"beside a slow one / alone: images/s {spread(rates)}; PSS {spread(memory)} ({', '.join(each)})")
    bench.report(Figure("sharing-beside-slow", statistics.median(rates), ">=", 0.95))
    bench.report(Figure("sharing-beside-slow-pss", max(memory), "<=", 2.0))


def _together(daemon: int, players: list[Player]) -> tuple[list[float], int]:
    """Let all trainers read for a turn: images/s of each, and bytes of all processes after it."""
    for player in players:
        player.tell(TURN_S)
    rates = [player.hear() for player in players]
    memory = sum(map(pss_bytes, [*tree(daemon), *(player.process.pid for player in players)]))
    wait_for_rest(daemon)
    return rates, memory


def _paced(pipe: Connection, address: str, pause_s: float) -> None:
    """Images/s of a turn, after the batches that were ready before."""
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream("photos")
        batches = endless(stream)
        for seconds in orders(pipe):
            for _ in range(stream.window + 1):
                next(batches).release()
            images, begun_s = 0, time.perf_counter()
            while (passed_s := time.perf_counter() - begun_s) < seconds:
                with next(batches) as batch:
                    np.max(batch["image"].reshape(-1)[::4096])
                    images += batch.samples
                    time.sleep(pause_s)
            pipe.send(images / passed_s)
