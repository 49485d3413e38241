"""1. A Keras-style GeneratorEnqueuer over your own generator, with threads and with processes.

Keras 3 has no GeneratorEnqueuer any more, so the old way is one in its manner, and needs neither
Keras nor TensorFlow.
"""

import multiprocessing
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from common import (
    BATCH_SIZE,
    WORKERS,
    Example,
    deaf_to_interrupts,
    endless,
    interrupts_later,
    main,
    photographs,
    put,
    same,
    taken,
)

SIDE = 224
QUEUE_BATCHES = 10


def load(path: Path) -> np.ndarray:
    """Read one photograph as such generators do."""
    image = cv2.resize(cv2.imread(str(path)), (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.float32) / np.float32(255)


def batches(folder: str, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A user's generator, unchanged for both ways: images, labels, numbers of photographs."""
    files = photographs(Path(folder))
    while True:
        chosen = rng.integers(0, len(files), BATCH_SIZE)
        images = np.stack([load(files[i].path) for i in chosen])
        yield images, np.array([files[i].label for i in chosen]), chosen


# --- the old way ----------------------------------------------------------------------------------


class OneAtATime:
    """A generator cannot run in two threads at once, so those that share it wait for each other."""

    def __init__(self, generator: Iterator[Any]) -> None:
        self._generator, self._lock = generator, threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._generator)


def enqueue(generator: Iterator[Any], into: Any, stop: Any) -> None:
    """Runs in a thread or process: put what the generator yields, until told to stop."""
    for batch in generator:
        if not put(batch, into, stop):
            return


def enqueue_own(folder: str, seed: int, into: Any, stop: Any) -> None:
    """Runs in a process: its own generator and seed; otherwise all would yield the same."""
    enqueue(batches(folder, np.random.default_rng(seed)), into, stop)


def wait_for(runner: threading.Thread) -> None:
    """It was told to stop.

    Ctrl-C does not leave it behind either, or it would read from a folder that is gone.
    """
    try:
        runner.join()
    except KeyboardInterrupt:
        runner.join()
        raise


@contextmanager
def with_threads(folder: str) -> Iterator[Iterator[Any]]:
    """``GeneratorEnqueuer(generator, use_multiprocessing=False)``."""
    filled: queue.Queue[Any] = queue.Queue(QUEUE_BATCHES)
    stop, shared = threading.Event(), OneAtATime(batches(folder, np.random.default_rng(0)))
    runners = [threading.Thread(target=enqueue, args=(shared, filled, stop)) for _ in range(WORKERS)]
    with ExitStack() as ending:
        with interrupts_later():
            for runner in runners:
                runner.start()
                ending.callback(wait_for, runner)
            ending.callback(stop.set)  # comes first at the end
        yield taken(filled, runners)


@contextmanager
def with_processes(folder: str) -> Iterator[Iterator[Any]]:
    """``GeneratorEnqueuer(generator, use_multiprocessing=True)``: pickles batches into a pipe."""
    context = multiprocessing.get_context("spawn")
    filled, stop, runners = context.Queue(QUEUE_BATCHES), context.Event(), []
    with ExitStack() as ending:
        with deaf_to_interrupts():
            for seed in range(WORKERS):
                runner = context.Process(target=enqueue_own, args=(folder, seed, filled, stop), daemon=True)
                runners.append(runner)
                runner.start()
                ending.callback(runner.join)
                ending.callback(runner.terminate)
        yield taken(filled, runners)


# --- with batchd ----------------------------------------------------------------------------------

CONFIG = """
[daemon]
python_path = [$here]

[streams.generated]
source.type = "generator"
source.function = "generator_enqueuer:batches"
source.options = { folder = $data }
source.fields = { image = "float32[224,224,3]", label = "int64", number = "int64" }
source.yields = "batch"
shuffle = false
batch_size = $batch_size

[streams.without_python]
source = { type = "folder", path = $data }
pipeline = [ { op = "decode" }, { op = "resize", size = [224, 224] }, { op = "to", layout = "nhwc" } ]
batch_size = $batch_size
"""


def run(example: Example) -> None:
    """Compare what comes out, then how fast."""
    with example.serve(CONFIG) as daemon:
        stream, without_python = daemon.stream("generated"), daemon.stream("without_python")
        batch = next(iter(stream))
        files = [example.photographs[number] for number in batch["number"]]
        same("pixels", [load(file.path) for file in files], batch["image"])
        same("labels", [file.label for file in files], batch["label"])
        example.compare(
            {
                "threads around a generator": example.steady(lambda: with_threads(str(example.data))),
                "processes with a generator each": example.steady(lambda: with_processes(str(example.data))),
                "batchd, the same generator": example.steady(lambda: endless(stream)),
                "batchd, decoding by itself (other pixels)": example.steady(lambda: endless(without_python)),
            }
        )


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
