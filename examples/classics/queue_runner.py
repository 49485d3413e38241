"""6.

A queue runner and a coordinator feeding a small model: feeding by hand, from a queue, and pulling
from batchd.

The model is a few lines of numpy, so that this runs everywhere; the coordinator is one in the
manner of TensorFlow 1.
"""

import itertools
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from common import BATCH_SIZE, CLASSES, WORKERS, Example, Photograph, endless, main, put, same, taken

SIDE = 64
HIDDEN = 64
RATE = 0.05
TOLERANCE = 0.01
"""Tolerance for losses around 2: OpenCV rounds one mean of pixels in 1,500 differently from batchd,
and each step of the training makes more of it."""
STEPS_COMPARED = 8
QUEUE_BATCHES = 8


class Model:
    """One hidden layer, trained by gradient descent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.first = rng.normal(0, 0.01, (SIDE * SIDE * 3, HIDDEN)).astype(np.float32)
        self.second = rng.normal(0, 0.1, (HIDDEN, CLASSES)).astype(np.float32)

    def train(self, images: np.ndarray, labels: np.ndarray) -> float:
        """One step; the value is the loss before it."""
        pixels = images.reshape(len(images), -1).astype(np.float32) / np.float32(255) - np.float32(0.5)
        hidden = np.maximum(pixels @ self.first, 0)
        scores = np.exp(hidden @ self.second)
        chances = scores / scores.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(chances[rows, labels]).mean()
        chances[rows, labels] -= 1
        back = chances @ self.second.T * (hidden > 0) / len(labels)
        self.second -= RATE * hidden.T @ chances / len(labels)
        self.first -= RATE * pixels.T @ back
        return float(loss)


# --- the old ways ---------------------------------------------------------------------------------


def load(file: Path) -> np.ndarray:
    """Read one photograph."""
    image = cv2.resize(cv2.imread(str(file)), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def load_batch(photographs: Sequence[Photograph], numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Read a batch, for a ``feed_dict``."""
    return np.stack([load(photographs[i].path) for i in numbers]), np.array([photographs[i].label for i in numbers])


def orders(photographs: Sequence[Photograph], seed: int) -> Iterator[np.ndarray]:
    """Which photographs make the next batch, without end."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, len(photographs), BATCH_SIZE) for _ in itertools.count())


@contextmanager
def by_hand(photographs: Sequence[Photograph]) -> Iterator[Iterator[Any]]:
    """The model waits while a batch is read, and the reader while it trains."""
    yield (load_batch(photographs, numbers) for numbers in orders(photographs, 0))


class Coordinator:
    """Ends a group of threads together, and hands on the exception of one of them."""

    def __init__(self) -> None:
        self.stop, self._error = threading.Event(), None

    def request_stop(self, error: BaseException | None = None) -> None:
        """Ask for the end."""
        self._error = self._error or error
        self.stop.set()

    def join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the end."""
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error


def run_queue(
    photographs: Sequence[Photograph], seed: int, filled: "queue.Queue[Any]", coordinator: Coordinator
) -> None:
    """Runs in a thread: fill the queue."""
    try:
        for numbers in orders(photographs, seed):
            if not put(load_batch(photographs, numbers), filled, coordinator.stop):
                return
    except (OSError, cv2.error) as error:
        coordinator.request_stop(error)


@contextmanager
def from_a_queue(photographs: Sequence[Photograph]) -> Iterator[Iterator[Any]]:
    """Threads fill a queue while the model trains."""
    filled: queue.Queue[Any] = queue.Queue(QUEUE_BATCHES)
    coordinator = Coordinator()
    threads = [
        threading.Thread(target=run_queue, args=(photographs, seed, filled, coordinator)) for seed in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield taken(filled, threads)
    finally:
        coordinator.request_stop()
        coordinator.join(threads)


# --- with batchd ----------------------------------------------------------------------------------

CONFIG = """
[streams.photos]
source = { type = "list", path = $listed, root = $data }
batch_size = $batch_size
pipeline = [ { op = "decode", scale = "off" }, { op = "resize", size = [64, 64], interpolation = "area" } ]

[streams.decoded_small]
source = { type = "list", path = $listed, root = $data }
batch_size = $batch_size
pipeline = [ { op = "decode" }, { op = "resize", size = [64, 64] } ]
"""


def run(example: Example) -> None:
    """Compare what the model learns, then how fast."""
    photographs, listed = example.photographs, example.folder / "train.txt"
    listed.write_text("".join(f"{one.path.relative_to(example.data)} {one.label}\n" for one in photographs))
    with example.serve(CONFIG, listed=str(listed)) as daemon:
        stream, decoded_small = daemon.stream("photos"), daemon.stream("decoded_small")
        pulling, feeding, losses, apart = Model(), Model(), [], []
        with endless(stream) as batches:
            for batch in itertools.islice(batches, STEPS_COMPARED):
                images, labels = load_batch(photographs, batch["index"])
                apart.append(int(np.abs(images.astype(np.int16) - batch["image"]).max()))
                losses.append((feeding.train(images, labels), pulling.train(batch["image"], batch["label"])))
        same("pixels, by their largest difference", [0] * len(apart), apart, tolerance=1)
        same("losses, step by step", *zip(*losses, strict=True), tolerance=TOLERANCE)
        model = Model()

        def train(batch: Any) -> int:
            images, labels = (batch["image"], batch["label"]) if hasattr(batch, "keys") else batch
            model.train(images, labels)
            return len(labels)

        example.compare(
            {
                "by hand": example.steady(lambda: by_hand(photographs), train),
                "queue runner and coordinator": example.steady(lambda: from_a_queue(photographs), train),
                "batchd": example.steady(lambda: endless(stream), train),
                "batchd, JPEGs decoded small (other pixels)": example.steady(lambda: endless(decoded_small), train),
            }
        )


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
