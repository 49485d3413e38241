"""Shared by all benchmarks: photographs, daemons, trainer processes, ratios with their spread.

These machines are shared and noisy, so no absolute time is compared with anything: the sides of a
comparison take turns in one run, each round gives one ratio, and the median of the ratios is
reported with the smallest and the largest. A window beside other programs is measured again, see
``foreign``; a figure of windows that were kept beside them says so.
"""

import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from foreign import Foreign, Window, quiet

import batchd
import batchd_client
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd_wire.wording import counted

T = TypeVar("T")

PHOTOS = 512
CROP = '[{ op = "decode" }, { op = "random_resized_crop", size = [224, 224] }, { op = "random_flip" }]'
REST_S, BUSY = 0.2, 0.05
"""A daemon rests when it and its workers take less than this part of a core for so long."""
RESIZE = '[{ op = "decode" }, { op = "resize", size = [224, 224] }]'


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its target: it shall be at least (``>=``) or at most (``<=``) that."""

    name: str
    value: float
    comparison: str
    target: float
    digits: int = 2
    kept: int = 0
    """Windows that were kept beside other programs."""

    @property
    def line(self) -> str:
        """``BENCH efficiency 0.96 >= 0.95 ok``, and how many windows were not quiet, if any."""
        reached = self.value >= self.target if self.comparison == ">=" else self.value <= self.target
        value = f"{self.value:.{self.digits}f}"
        beside = f" ({counted(self.kept, 'window')} beside other programs)" if self.kept else ""
        return f"BENCH {self.name} {value} {self.comparison} {self.target:g} {'ok' if reached else 'short'}{beside}"


@dataclass(slots=True)
class Bench:
    """Arguments of a benchmark: photographs, a scratch folder, the number of repeats."""

    photos: Path
    scratch: Path
    rounds: int
    figures: list[Figure] = field(default_factory=list)
    _kept: int = 0
    """Windows of the next figures that were kept beside other programs."""
    _is_reported: bool = False

    def begin(self) -> None:
        """Begin a part, whose figures count no window of the parts before it."""
        self._kept = 0

    def measure(self, name: str, measure: Callable[[], T]) -> T:
        """Measure, and again while programs other than this one's descendants use the CPUs."""
        if self._is_reported:
            self._kept, self._is_reported = 0, False
        window = quiet(name, lambda: _beside(measure))
        self._kept += not window.beside.is_quiet
        return window.found

    def report(self, figure: Figure) -> None:
        """Keep a figure and say it."""
        figure = replace(figure, kept=self._kept)
        self._is_reported = True
        self.figures.append(figure)
        print(figure.line, flush=True)

    def compare(
        self, figure: str, rounds: Sequence[Mapping[str, float]], ours: str, peers: Sequence[str], target: float
    ) -> None:
        """Report ``ours`` ÷ the fastest of ``peers`` by rounds, or name a peer that is missing."""
        if missing := [peer for peer in peers if peer not in rounds[0]]:
            print(f"{figure}: not measured, as not installed here: {', '.join(missing)}", flush=True)
            return
        ratios = [one[ours] / max(one[peer] for peer in peers) for one in rounds]
        print(f"{figure}: {spread(ratios)}")
        self.report(Figure(figure, statistics.median(ratios), ">=", target))

    def config(self, *, workers: int = 2, **stream: Any) -> Path:
        """Write a configuration with one stream, ``photos``.

        ``stream`` is what ``self.stream`` takes.
        """
        path = self.scratch / "batchd.toml"
        path.write_text(f'[daemon]\nworkers = {workers}\nmemory = "2GiB"\n{self.stream("photos", **stream)}')
        return path

    def stream(self, name: str, *, pipeline: str = CROP, batch_size: int = 256, repeats: int = 4, **keys: str) -> str:
        """The part of a configuration about a stream over the photographs ``repeats`` times.

        ``keys`` are more of it.
        """
        files = sorted(path for path in self.photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
        listing = self.scratch / f"list-{repeats}.txt"
        if not listing.exists():  # a reload must find it unchanged
            listing.write_text("".join(f"{path} 0\n" for path in files * repeats))
        return (
            f'[streams.{name}]\nsource = {{ type = "list", path = "{listing}", allow_outside_root = true }}\n'
            f"batch_size = {batch_size}\npipeline = {pipeline}\n"
            + "".join(f"{key} = {value}\n" for key, value in keys.items())
        )


def _beside(measure: Callable[[], T]) -> Window[T]:
    foreign = Foreign(os.getpid())
    found = measure()
    return Window(found, foreign.beside())


@contextmanager
def benchmark(data: Path | None, rounds: int) -> Iterator[Bench]:
    """Photographs, given or made, and a scratch folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="batchd-bench-") as scratch:
        photos = data or Path(scratch) / "photos"
        if data is None:
            make_photos(photos, PHOTOS, 0, lambda _made: None)
        yield Bench(photos, Path(scratch), rounds)


@contextmanager
def served(config: Path) -> Iterator[str]:
    """A daemon of its own for a configuration."""
    with batchd.serve(config) as address:
        yield address


def wait_for_rest(daemon: int) -> None:
    """Wait until the workers of ``daemon`` (a pid) have prepared the batches after those taken."""
    busy_s = 1.0
    while busy_s > BUSY * REST_S:
        before_s = family_cpu_s(daemon)
        time.sleep(REST_S)
        busy_s = family_cpu_s(daemon) - before_s


class Player:
    """One side of a comparison: a process that runs a task on request and answers with numbers."""

    def __init__(self, target: Callable[..., None], *arguments: Any, has_children: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=not has_children)
        self.process.start()
        theirs.close()

    def tell(self, order: Any) -> None:
        """Tell it to begin."""
        self._pipe.send(order)

    def hear(self) -> Any:
        """Wait for its answer."""
        return self._pipe.recv()

    def ask(self, order: Any) -> Any:
        """Tell and hear."""
        self.tell(order)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pipe.close()
        self.process.join(10)
        self.process.kill()


def orders(pipe: Connection) -> Iterator[Any]:
    """Yield the orders for a player until the other side is gone."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def endless(stream: batchd_client.Stream) -> Iterator[batchd_client.Batch]:
    """Epoch after epoch."""
    while True:
        yield from stream


@contextmanager
def beside(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Another process meanwhile. ``target`` gets an event, last, that is set when it has to end."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    process = context.Process(target=target, args=(*arguments, over))
    process.start()
    try:
        yield
    finally:
        over.set()
        process.join()


def spread(values: list[float], digits: int = 2) -> str:
    """Median with the smallest and the largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}, {len(values)} rounds)"


def anonymous_bytes(pid: int) -> int:
    """Memory that a process has for itself alone, that is no file's and no slot's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no RssAnon")


def private_bytes(pid: int) -> int:
    """Memory that only this process maps, without the slots (memfds that are shared by design)."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counts = "memfd:batchd" not in line
        elif counts and words[0] in {"Private_Clean:", "Private_Dirty:"}:
            total += int(words[1]) * 1024
    return total


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, in seconds."""
    text = Path(f"/proc/{pid}/stat").read_text()
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def family_cpu_s(pid: int) -> float:
    """CPU time of a process and of everything that lives below it, in seconds."""
    return cpu_s(pid) + sum(map(family_cpu_s, children(pid)))


def children(pid: int) -> list[int]:
    """The child processes of a process with one thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_line(pid: int) -> bytes:
    """The words of a process's command, each with a zero behind it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def processor() -> str:
    """What the machine says of its processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
