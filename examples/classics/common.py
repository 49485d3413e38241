"""Shared by the classics: photographs, a daemon for one example, timing and comparison.

Invariant: an example leaves no process and no file behind, whether it ends by itself, fails or is
interrupted with Ctrl-C.
"""

import argparse
import importlib
import itertools
import json
import os
import queue
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

import batchd
import batchd_client
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd.errors import BatchdError

HERE = Path(__file__).parent
BATCH_SIZE = 32
WORKERS = len(os.sched_getaffinity(0))
CLASSES = 10
QUEUE_TIMEOUT_S = 0.1
SUFFIXES = (".jpg", ".jpeg")

Way = Callable[[], AbstractContextManager[Iterator[Any]]]
Round = Callable[[], "Speed"]


class Photograph(NamedTuple):
    """A file and its class: the number of its folder, or some number if there is one folder."""

    path: Path
    label: int


class Unavailable(Exception):  # noqa: N818  not an error
    """The example needs a library that is not installed here.

    The text says which, and what installs it.
    """


def photographs(folder: Path) -> list[Photograph]:
    """All JPEG files below ``folder``, in the order of their paths."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise SystemExit(f"there is no JPEG file below {folder}")
    folders = sorted({file.parent for file in files})
    numbers = [folders.index(file.parent) if len(folders) > 1 else i for i, file in enumerate(files)]
    return [Photograph(file, number % CLASSES) for file, number in zip(files, numbers, strict=True)]


@dataclass(frozen=True, slots=True)
class Example:
    """What an example works with. ``folder`` is for its files and is removed at the end.

    ``warm_up`` batches are taken before the clock starts, so that what was made ready meanwhile is
    used up.
    """

    data: Path
    photographs: list[Photograph]
    folder: Path
    rounds: int
    seconds: float
    warm_up: int

    def config(self, text: str, **values: object) -> Path:
        """Write a ``batchd.toml``, with $data, $here and the names of ``values`` substituted."""
        names = {"data": str(self.data), "here": str(HERE), "batch_size": BATCH_SIZE, "classes": CLASSES, **values}
        file = self.folder / "batchd.toml"
        file.write_text(Template(text).substitute({name: json.dumps(value) for name, value in names.items()}))
        return file

    @contextmanager
    def serve(self, text: str, **values: object) -> Iterator[batchd_client.Daemon]:
        """Run a daemon with this configuration as a child, and connect to it."""
        with batchd.serve(self.config(text, **values)) as address, batchd_client.connect(address) as daemon:
            yield daemon

    def steady(self, way: Way, use: Callable[[Any], int] | None = None) -> Round:
        """One round of a way that gives batches without end, timed when it is under way.

        ``use`` is what the trainer does with a batch; it gives the number of images.
        """

        def one_round() -> Speed:
            with way() as batches:
                for batch in itertools.islice(batches, self.warm_up):
                    (use or look)(batch)
                clock, images = Clock(), 0
                while not images or clock.seconds < self.seconds:
                    images += (use or look)(next(batches))
                return clock.speed(images)

        return one_round

    def whole(self, way: Callable[[], int]) -> Round:
        """One timed round of a function that does all its work and returns the number of images."""

        def one_round() -> Speed:
            clock = Clock()
            return clock.speed(way())

        return one_round

    def compare(self, ways: Mapping[str, Round]) -> None:
        """Time all ways in turn, several rounds long, and print a table.

        Ratios are to the first way, round by round.
        """
        speeds: dict[str, list[Speed]] = {name: [] for name in ways}
        for _round in range(self.rounds):
            for name, one_round in ways.items():
                speeds[name].append(one_round())
        first = next(iter(speeds.values()))
        print(f"\n  {'':42} {'images/s':>20} {'ratio':>21} {'CPU ms/image':>20}")
        for name, measured in speeds.items():
            ratios = [one.images_per_s / other.images_per_s for one, other in zip(measured, first, strict=True)]
            images, cpu = ([one[column] for one in measured] for column in (0, 1))
            print(f"  {name:42} {spread(images, '.0f'):>20} {spread(ratios, '.2f'):>21} {spread(cpu, '.2f'):>20}")
        print(f"\n  medians of {self.rounds} rounds (smallest to largest), {WORKERS} cores", flush=True)


class Speed(NamedTuple):
    """How fast a round was, and what it cost in all processes together."""

    images_per_s: float
    cpu_ms_per_image: float


class Clock:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._begun_s, self._cpu_s = time.perf_counter(), cpu_seconds()

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self._begun_s

    def speed(self, images: int) -> Speed:
        """So many images since it began."""
        return Speed(images / self.seconds, 1000 * (cpu_seconds() - self._cpu_s) / images)


def cpu_seconds() -> float:
    """Processor time of this process and of all that it started, with those that have ended."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        parents[int(stat.parent.name)], ticks[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[member] for member in family) / os.sysconf("SC_CLK_TCK")


def look(batch: Any) -> int:
    """What a trainer does at least: every pixel is read.

    Images come first in a batch, or are its field ``image``.
    """
    images = batch["image"] if isinstance(batch, Mapping) else batch[0]
    for image in images:
        np.asarray(image).max()
    return len(images)


def tensorflow() -> Any:
    """TensorFlow, or None where it is not installed, and then the old way is left out."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        return importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        print(
            "  left out: the old way needs TensorFlow, which is not installed here (pip install tensorflow)", flush=True
        )
        return None


def spread(numbers: Sequence[float], form: str) -> str:
    """The median and the range."""
    return f"{statistics.median(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


@contextmanager
def endless(stream: batchd_client.Stream) -> Iterator[Iterator[batchd_client.Batch]]:
    """Give epoch after epoch of a stream, which goes on the next time where it was left."""
    yield itertools.chain.from_iterable(itertools.repeat(stream))


def same(what: str, old: Sequence[Any], new: Sequence[Any], tolerance: float = 0.0) -> None:
    """Say that the old way and batchd gave the same, or end the example."""
    assert len(old) == len(new) > 0, f"{what}: {len(old)} and {len(new)}"
    for number, (one, other) in enumerate(zip(old, new, strict=True)):
        ours, theirs = np.asarray(one), np.asarray(other)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise SystemExit(f"{what}: {ours.dtype}{ours.shape} is not {theirs.dtype}{theirs.shape}, at {number}")
        is_number = np.issubdtype(ours.dtype, np.number)
        difference = float(np.abs(ours.astype(float) - theirs).max()) if is_number else float((ours != theirs).any())
        if difference > tolerance:
            raise SystemExit(f"{what}: differ by {difference:g} at {number}, which is more than {tolerance:g}")
    print(
        f"  same {what}: {len(old)} compared, " + (f"to within {tolerance:g}" if tolerance else "exactly"), flush=True
    )


def put(batch: Any, into: Any, stop: Any) -> bool:
    """Put a batch into a queue of threads or processes.

    False where that was told to stop meanwhile.
    """
    while not stop.is_set():
        try:
            into.put(batch, timeout=QUEUE_TIMEOUT_S)
        except queue.Full:
            continue
        return True
    return False


def taken(filled: Any, runners: Sequence[Any]) -> Iterator[Any]:
    """Yield items from a queue while all producers live: waiting for a dead one never ends."""
    while True:
        try:
            yield filled.get(timeout=QUEUE_TIMEOUT_S)
        except queue.Empty:
            if not all(runner.is_alive() for runner in runners):
                raise SystemExit("what fills the queue has ended, so nothing more will come") from None


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started in here do not hear Ctrl-C; who started them ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delays Ctrl-C to the end: after an interrupted ``start()`` the thread's state is unknown."""
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    for number in heard[:1]:
        signal.raise_signal(number)


def main(about: str, run: Callable[[Example], None]) -> int:
    """Run an example from the command line; the value is the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of photographs (default: generated ones)")
    parser.add_argument("--photographs", type=int, default=256, help="how many are made, where --data is not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each way is timed in a round")
    parser.add_argument("--warm-up", type=int, default=12, help="batches of each round that are not timed")
    options = parser.parse_args()
    print(about.splitlines()[0], flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="batchd-classic-") as folder:
            data = options.data and options.data.expanduser().resolve()
            if not data:
                data = Path(folder) / "photographs"
                make_photos(data, options.photographs, 0, lambda _made: None)
            run(Example(data, photographs(data), Path(folder), options.rounds, options.seconds, options.warm_up))
    except Unavailable as reason:
        print(f"  left out: {reason}")
    except (BatchdError, batchd_client.errors.BatchdClientError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
