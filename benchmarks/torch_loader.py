"""Benchmark: the torch loader's CPU time, and the wait of a training step. Needs PyTorch.

    loader   images/s through BatchdLoader, divided by the bare client's, in turn on one stream
    wait     waiting share of a loop whose step takes 5 % longer than decoding

The step sleeps, as a trainer does whose GPU computes.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, islice
from multiprocessing.connection import Connection
from typing import Any

from harness import Bench, Figure, Player, orders, served, spread

import batchd_client

TURN = 12
REPEATS = 32
"""Makes a turn less than an epoch.

Each turn has an epoch of its own, with nothing of it in the ring yet.
"""
STEPS = 60
WARM_UP = 10
SLOWER = 1.05
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOADERS: dict[str, dict[str, Any]] = {
    "channels last": {"channels_last": True},
    "channels first": {},
    "normalised": {"normalize": (MEAN, STD), "channels_last": True},
}


def run(bench: Bench) -> None:
    """Images/s in turns, then the wait of a step loop."""
    try:
        import torch  # noqa: F401, PLC0415  the one benchmark that needs it
    except ImportError:
        print("PyTorch is not installed here: pip install torch")
        return
    with ExitStack() as stack:
        address = stack.enter_context(served(bench.config(repeats=REPEATS)))
        players = {"bare": stack.enter_context(Player(_bare, address))}
        players |= {name: stack.enter_context(Player(_loader, address, name)) for name in LOADERS}
        epochs = count()
        for player in players.values():
            player.ask(next(epochs))
        rounds = [
            {
                name: bench.measure(name, lambda player=player: player.ask(next(epochs)))
                for name, player in players.items()
            }
            for _ in range(bench.rounds)
        ]
        loops = [stack.enter_context(Player(_step_loop, address)) for _ in range(min(3, bench.rounds))]
        waits = [bench.measure("steps", lambda loop=loop: loop.ask(None)) for loop in loops]
    for name in LOADERS:
        ratios = [rates[name] / rates["bare"] for rates in rounds]
        print(f"{name} / bare {spread(ratios, 3)}; bare {spread([rates['bare'] for rates in rounds], 0)} images/s")
        if name != "normalised":  # converting is the trainer's own wish, and four times the bytes
            bench.report(Figure(f"torch-loader-{name.replace(' ', '-')}", statistics.median(ratios), ">=", 0.97, 3))
    print(f"waiting {spread(waits, 4)} of the loop's time")
    bench.report(Figure("torch-wait", statistics.median(waits), "<=", 0.02, 4))


def _images_per_s(batches: Iterator[int]) -> float:
    """Of a turn of batches, the first one aside."""
    next(batches)
    started_s = time.perf_counter()
    samples = sum(islice(batches, TURN))
    return samples / (time.perf_counter() - started_s)


def _bare(pipe: Connection, address: str) -> None:
    """The bare client: each batch is given back at once."""
    with batchd_client.connect(address) as daemon:
        for epoch in orders(pipe):
            with daemon.stream("photos") as stream:
                stream.seek(epoch)
                pipe.send(_images_per_s(_released(stream)))


def _released(stream: batchd_client.Stream) -> Iterator[int]:
    for batch in stream:
        with batch:
            yield batch.samples


def _loader(pipe: Connection, address: str, name: str) -> None:
    """The loader: tensors of one's own."""
    from batchd_client.torch import BatchdLoader  # noqa: PLC0415  see run

    for epoch in orders(pipe):
        with BatchdLoader("photos", address=address, **LOADERS[name]) as loader:
            loader.set_epoch(epoch)
            pipe.send(_images_per_s(len(images) for images, _labels in loader))


def _step_loop(pipe: Connection, address: str) -> None:
    """The waiting share of a loop whose step takes 5 % longer than decoding a batch."""
    from batchd_client.torch import BatchdLoader  # noqa: PLC0415  see run

    for _ in orders(pipe):
        with BatchdLoader("photos", address=address, channels_last=True) as loader:
            iterator = _endless(loader)
            for _ in range(WARM_UP):
                next(iterator)
            started_s = time.perf_counter()
            for _ in range(STEPS // 2):
                next(iterator)
            step_s = SLOWER * (time.perf_counter() - started_s) / (STEPS // 2)
            for _ in range(WARM_UP):
                next(iterator)
                time.sleep(step_s)
            started_s, waited_s = time.perf_counter(), loader.statistics().wait_s
            for _ in range(STEPS):
                next(iterator)
                time.sleep(step_s)
            pipe.send((loader.statistics().wait_s - waited_s) / (time.perf_counter() - started_s))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
