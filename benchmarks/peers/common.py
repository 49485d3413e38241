"""What all sides of the comparison share: the contract with the runner, and decoding by hand.

Runs in each side's environment.

    python torch_side.py --data FOLDER --batch 256 --workers 2 --variant cv2 [--trainers 4]

    stdin   one line for each round: seconds to warm up, seconds to measure
    stdout  {"first_batch_s"}; then for each round {"images", "seconds", "cpu_s", "pss_bytes"}
    stderr  whatever the peer says; the end of stdin ends the side

With ``--trainers`` the side starts so many processes, and each wants every picture; ``images`` are
those of one trainer then, on average. Measured are whole processes with all their descendants.
Standard library, numpy and cv2 alone, as every environment has these; cv2 is loaded by those who
decode with it.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 224
AREA = 0.08, 1.0
PROPORTIONS = 3 / 4, 4 / 3
ATTEMPTS = 10
PAGE_BYTES = 4096
ENDLESS = 1_000_000
"""Samples of a peer's epoch: more than one round reads, so that no pipeline drains."""
_SET_CHILD_SUBREAPER = 36
_TICKS_S = os.sysconf("SC_CLK_TCK")


class Options(NamedTuple):
    """The options of a side.

    ``address``: of the server that its trainers share, if there is one.
    """

    data: Path
    batch: int
    workers: int
    variant: str
    trainers: int
    trainer: int
    address: str


Batches = Callable[[Options], Iterator[Any]]
"""Start the peer and yield its batches: uint8 ``[batch, 224, 224, 3]``, array-like."""
Serve = Callable[[Options], AbstractContextManager[str]]
"""Starts what several trainers share, and gives its address."""
Measure = Callable[[float], tuple[int, float]]
"""Work for at least ``seconds``. Return the images made and the seconds taken."""


def play(batches: Batches, serve: Serve | None = None) -> None:
    """Be a side until standard input ends."""
    answers = _answers_alone()
    options = told()
    adopt_orphans()  # a peer's background processes stay ours
    is_trainer = bool(options.address)
    with nullcontext(options.address) if is_trainer or serve is None else serve(options) as address:
        options = options._replace(address=address)
        if options.trainers > 1 and not is_trainer:
            _lead(options, answers)
        else:
            delivered = batches(options)
            touch(next(delivered))
            answer(lambda seconds: deliver(delivered, seconds, options.workers), answers)


@contextmanager
def served(configuration: str) -> Iterator[str]:
    """A daemon of batchd, which the environment has to have; gives its address."""
    import batchd  # noqa: PLC0415  peers' environments have none

    with tempfile.TemporaryDirectory(prefix="batchd-peers-") as scratch:
        file = Path(scratch) / "batchd.toml"
        file.write_text(configuration)
        with batchd.serve(file) as address:
            yield address


def read(address: str, stream: str, field: str) -> Iterator[Any]:
    """A field of each batch of a daemon, without end, until the next one is taken."""
    import batchd_client  # noqa: PLC0415  peers' environments have none

    with batchd_client.connect(address) as daemon:
        batches = daemon.stream(stream)
        while True:
            for batch in batches:
                with batch:
                    yield [batch[field].view(np.uint8)]


def play_measured(start: Callable[[Options], AbstractContextManager[Measure]]) -> None:
    """Be a side that delivers nothing: ``start`` gives what measures one round."""
    answers = _answers_alone()
    with start(told()) as measure:
        answer(measure, answers)


def answer(measure: Measure, answers: Callable[..., None]) -> None:
    """Say that the first batch is there, then measure each round that is asked for."""
    answers(first_batch_s=_seconds_since_start())
    for line in sys.stdin:
        warm_up_s, seconds_at_least = map(float, line.split())
        measure(warm_up_s)
        before_s = sum(map(cpu_s, tree(os.getpid())))
        images, seconds = measure(seconds_at_least)
        pids = tree(os.getpid())
        used_s = sum(map(cpu_s, pids)) - before_s
        answers(images=images, seconds=seconds, cpu_s=used_s, pss_bytes=sum(map(pss_bytes, pids)))


def deliver(batches: Iterator[Any], seconds: float, workers: int) -> tuple[int, float]:
    """Take batches.

    Workers finish theirs at the same time, so it ends with as many as there are workers.
    """
    images, begun_s = 0, time.perf_counter()
    while True:
        for _ in range(workers):
            images += touch(next(batches))
        passed_s = time.perf_counter() - begun_s
        if passed_s >= seconds:
            return images, passed_s


def touch(batch: Any) -> int:
    """Read a byte of every page, as a copy to a GPU would, and give the number of images.

    A list has the arrays of a batch of another form.
    """
    arrays = [np.asarray(array) for array in (batch if isinstance(batch, list) else [batch])]
    for pixels in arrays:
        assert pixels.dtype == np.uint8, pixels.dtype
        assert isinstance(batch, list) or pixels.shape[1:] == (SIDE, SIDE, 3), pixels.shape
        pixels.reshape(-1)[::PAGE_BYTES].max()
    return len(arrays[0])


def photographs(folder: Path) -> list[str]:
    """All files, in the order of their names."""
    return sorted(str(path) for path in folder.iterdir())


# --- decoding by hand -----------------------------------------------------------------------------


def random_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a box, as torchvision's RandomResizedCrop draws it."""
    for _ in range(ATTEMPTS):
        area = height * width * random.uniform(*AREA)
        proportion = PROPORTIONS[0] * (PROPORTIONS[1] / PROPORTIONS[0]) ** random.random()
        across, down = round((area * proportion) ** 0.5), round((area / proportion) ** 0.5)
        if 0 < across <= width and 0 < down <= height:
            return random.randint(0, height - down), random.randint(0, width - across), down, across
    across = min(width, round(height * PROPORTIONS[1]))
    down = min(height, round(width / PROPORTIONS[0]))
    return (height - down) // 2, (width - across) // 2, down, across


def flipped_or_not(image: Any, out: Any = None) -> Any:
    """Mirror an image, or not, at random."""
    import cv2  # noqa: PLC0415  not in every environment

    return cv2.flip(image, 1, dst=out) if random.random() < 1 / 2 else image


def load_with_cv2(path: str) -> Any:
    """Read a photograph, decode it whole with cv2, cut, scale, flip: [224, 224, 3] uint8."""
    import cv2  # noqa: PLC0415  not in every environment

    image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR_RGB)
    top, left, height, width = random_box(*image.shape[:2])
    return flipped_or_not(cv2.resize(image[top : top + height, left : left + width], (SIDE, SIDE)))


class RegionLoader:
    """The same with batchd's decoder, which makes nothing but the crop.

    Batchd is found on PYTHONPATH.
    """

    def __init__(self) -> None:
        self._decoder: Any = None

    def __call__(self, path: str) -> Any:
        """Read a photograph, decode the part that is wanted, scale, flip: [224, 224, 3] uint8."""
        import cv2  # noqa: PLC0415  not in every environment

        from batchd.data.pipeline.image.geometry import Cut, Resampling, plan_decoding  # noqa: PLC0415
        from batchd.data.pipeline.image.jpeg_box import BoxDecoder  # noqa: PLC0415
        from batchd.data.pipeline.image.opencv import Scratch  # noqa: PLC0415
        from batchd.data.pipeline.image.probe import probe_image  # noqa: PLC0415

        if self._decoder is None:  # in the worker, as memory is its own
            self._decoder = BoxDecoder("rgb", Scratch())
        data = memoryview(np.fromfile(path, np.uint8))
        header = probe_image(data)
        box = Cut(*random_box(header.height, header.width))
        plan = plan_decoding([box, Resampling(SIDE, SIDE, "auto")], header.height, header.width, is_scaled=True)
        pixels = self._decoder.decode(data, header, plan.factor, plan.box)
        return flipped_or_not(cv2.resize(pixels, (SIDE, SIDE)))


def loader(variant: str) -> Callable[[str], Any]:
    """What loads a photograph by hand: "cv2" or "region"."""
    import cv2  # noqa: PLC0415  not in every environment

    cv2.setNumThreads(0)
    return RegionLoader() if variant == "region" else load_with_cv2


# --- processes ------------------------------------------------------------------------------------


def tree(root: int) -> list[int]:
    """A process with all its descendants, however they were started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended; 0 where there is none."""
    return sum(map(int, (_stat(pid) or ["0"] * 15)[11:15])) / _TICKS_S


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end: ``tree`` finds them, also when ended.

    They stay as zombies, with their CPU time, until this process ends: nobody waits for them.
    """
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def pss_bytes(pid: int) -> int:
    """Memory of a process, what it shares counted in proportion; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if there is no such process."""
    stat = _stat(pid)
    return int(stat[19]) if stat else 0


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _seconds_since_start() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started(os.getpid()) / _TICKS_S


# --- the contract ---------------------------------------------------------------------------------


def told() -> Options:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variant", default="")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--trainer", type=int, default=0)
    parser.add_argument("--address", default="")
    return Options(**vars(parser.parse_args()))


def _answers_alone() -> Callable[..., None]:
    """Standard output is for answers, whatever a peer prints; give what writes one."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda **numbers: print(json.dumps(numbers), file=stream, flush=True)


def _lead(options: Options, answers: Callable[..., None]) -> None:
    """Start the trainers, and let them play the rounds together."""
    players = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--address", options.address or "none", "--trainer", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(options.trainers)
    ]
    hear = lambda: [json.loads(player.stdout.readline()) for player in players]  # noqa: E731
    hear()
    answers(first_batch_s=_seconds_since_start())
    for line in sys.stdin:
        before_s = sum(map(cpu_s, tree(os.getpid())))
        for player in players:
            player.stdin.write(line)
            player.stdin.flush()
        heard = hear()
        pids = tree(os.getpid())
        used_s = sum(map(cpu_s, pids)) - before_s
        answers(
            images=statistics.mean(one["images"] for one in heard),
            seconds=statistics.mean(one["seconds"] for one in heard),
            cpu_s=used_s,
            pss_bytes=sum(map(pss_bytes, pids)),
        )
    for player in players:
        player.stdin.close()
