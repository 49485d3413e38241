"""Benchmark: CPU time of all workers for several trainers, of one stream and of several streams."""

import statistics
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from harness import CROP, Bench, Figure, Player, cpu_s, orders, served, spread

import batchd_client

EPOCHS = 2
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
        cpu_s = {
            trainers: bench.measure(f"{trainers} trainers", partial(_decode_cpu_s, config, ["photos"] * trainers))
            for trainers in (1, *ratios)
        }
        for trainers, found in ratios.items():
            found.append(cpu_s[trainers] / cpu_s[1])
    for trainers, found in ratios.items():
        print(f"decode CPU with {trainers} trainers / with one: {spread(found, 3)}")
        bench.report(Figure(f"sharing-{trainers}", statistics.median(found), "<=", 1.10))


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
