"""Feeding a GPU from the ring, measured: one table at the end.

Needs PyTorch with CUDA and batchd installed on this machine.

    python benchmarks/gpu_feed.py [--data FOLDER] [--workers N] [--out FILE.md]

    bandwidth    host to device, from a registered slot, pin_memory() and pageable memory, in turn
    CPU          time of the trainer's process for a ready batch, and time of ``next``
    training     images/s into a ResNet-50 step, the GPU's idle time, against a torch DataLoader

It makes its pictures where no folder is given, and keeps its table in ``results``. Without a GPU it
says so; ``--rehearse`` goes through all of it on a stand-in for the CUDA runtime and with a small
network, to see that it runs, and measures nothing.
"""

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from gpu_device import Device, Gpu, StandIn
from torch import nn

import batchd
import batchd_client
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd_client.torch import BatchdLoader
from batchd_client.torch.cuda import REGISTER_PORTABLE, REGISTER_READ_ONLY, needs_writable
from batchd_client.torch.tensors import over
from batchd_wire.wording import counted

RESULTS = Path(__file__).resolve().parent / "results"
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NOT_MEASURED = "Not measured on a GPU: none could be had; the code paths were run on a stand-in for the CUDA runtime"
IDLE = (
    "The device idles while no training step is under way on it; a copy that a step waits for counts as idling, gaps within a "
    "step do not."
)
STILL = 'shuffle = false\nmemory = "1GiB"\n'


class Extent(NamedTuple):
    """How much is done.

    ``ring_batches``: more than the ring has slots, since registering each is not to be measured.
    """

    rounds: int
    training_rounds: int
    copies: int
    ready_batches: int
    steps: int
    warm_up: int
    ring_batches: int
    batch: int


MEASURED = Extent(7, 3, 20, 60, 40, 8, 64, 256)
REHEARSED = Extent(2, 1, 2, 4, 4, 2, 4, 8)


@dataclass
class Table:
    """What was found: rows of a name, a value with its spread, and a target where there is one.

    A rehearsal finds no values.
    """

    caption: str
    is_measured: bool
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, values: list[float], unit: str, target: str = "") -> None:
        """Add the median of several rounds."""
        if not self.is_measured:
            self.rows.append((name, f"not measured ({counted(len(values), 'round')} gone through)", target))
            return
        digits = 3 if statistics.median(values) < 10 else 0
        spread = f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}) {unit}"
        self.rows.append((name, spread, target))
        print(f"{name}: {spread} {target}", flush=True)

    @property
    def text(self) -> str:
        """Markdown."""
        lines = [
            "# Feeding a GPU",
            "",
            self.caption,
            "",
            "| what | median (smallest to largest) | target |",
            "|---|---|---|",
        ]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows)]) + "\n"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of photographs (default: 512 generated ones)")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="decode processes of each side"
    )
    parser.add_argument("--batch", type=int, help="images (default: 256, in a rehearsal 8)")
    parser.add_argument("--out", type=Path, help="where the table is written (default: benchmarks/results)")
    parser.add_argument("--rehearse", action="store_true", help="go through it on a stand-in; measures nothing")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("no GPU that torch can use is here: nothing is measured. --rehearse goes through it on a stand-in")
        return 1
    device: Device = StandIn() if options.rehearse else Gpu()
    extent = REHEARSED if options.rehearse else MEASURED
    extent = extent._replace(batch=options.batch or extent.batch)
    table = Table(_caption(device.name, options.workers, extent.batch), device.name is not None)
    with tempfile.TemporaryDirectory(prefix="batchd-gpu-") as scratch:
        photos = options.data.resolve() if options.data else Path(scratch) / "photos"
        if options.data is None:
            make_photos(photos, 512, 0, lambda _made: None)
        files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
        config = _config(Path(scratch), files, extent, options.workers)
        with batchd.serve(config) as address:
            run = Run(table, address, device, extent)
            bandwidth(run)
            per_batch(run)
            training(run, files, options.workers)
    print()
    print(table.text)
    out = options.out or RESULTS / _file_name(device.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table.text)
    return 0


class Run(NamedTuple):
    """What the measurements have in common. ``address``: of the daemon."""

    table: Table
    address: str
    device: Device
    extent: Extent


def _file_name(device: str | None) -> str:
    if device is None:
        return "gpu_feed-rehearsal.md"
    return f"gpu_feed-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{time.strftime('%Y-%m-%d')}.md"


def _caption(device: str | None, workers: int, batch: int) -> str:
    how = (
        f"{time.strftime('%Y-%m-%d')}; {platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, torch "
        f"{torch.__version__}, {counted(workers, 'decode process')}, batches of {batch}, uint8 {SIDE} x {SIDE}"
    )
    if device is None:
        return f"{NOT_MEASURED} ({how})."
    return f"Measured on one {device} ({how}). {IDLE}"


def _config(scratch: Path, files: list[Path], extent: Extent, workers: int) -> Path:
    """Two streams: one that is always decoded, and one whose few batches stay in the ring."""
    wanted = (extent.ring_batches + extent.steps + 4 * workers) * extent.batch
    few = (files * (1 + 4 * extent.batch // len(files)))[: 4 * extent.batch]
    for name, listed in (("train", files * (1 + wanted // len(files))), ("ready", few)):
        lines = [f"{file} {number % 1000}\n" for number, file in enumerate(listed)]
        (scratch / f"{name}.txt").write_text("".join(lines))
    path = scratch / "batchd.toml"
    stream = (
        '[streams.{name}]\nsource = {{ type = "list", path = "{scratch}/{name}.txt", allow_outside_root = true }}\n'
        "batch_size = {batch}\npipeline = [{pipeline}]\n{more}"
    )
    crop = f'{{ op = "decode" }}, {{ op = "random_resized_crop", size = [{SIDE}, {SIDE}] }}, {{ op = "random_flip" }}'
    still = f'{{ op = "decode" }}, {{ op = "resize", size = [{SIDE}, {SIDE}] }}'
    path.write_text(
        f'[daemon]\nworkers = {workers}\nmemory = "4GiB"\nwritable_slots = true\n'
        + stream.format(name="train", scratch=scratch, batch=extent.batch, pipeline=crop, more='memory = "2GiB"\n')
        + stream.format(name="ready", scratch=scratch, batch=extent.batch, pipeline=still, more=STILL)
    )
    return path


# --- bandwidth ------------------------------------------------------------------------------------


def bandwidth(run: Run) -> None:
    """GB/s of copies to the device, each kind of memory in turn."""
    table, device = run.table, run.device
    runtime = device.runtime()
    with batchd_client.connect(run.address, writable_slots=needs_writable(runtime)) as daemon:
        batch = next(iter(daemon.stream("ready")))
        memory = batch.memory
        flags = REGISTER_PORTABLE | (REGISTER_READ_ONLY if memory.page.readonly else 0)
        is_registered = runtime.register(memory.address, memory.slot_bytes, flags)
        slot = over(batch.room("image").array)
        sources = {"pin_memory()": device.locked(slot), "unregistered": slot.clone()}
        if is_registered:
            sources["registered ring"] = slot
        target = torch.empty_like(slot, device=device.place)
        rounds = [
            {name: _gigabytes_per_s(run, source, target) for name, source in sources.items()}
            for _ in range(run.extent.rounds)
        ]
        if is_registered:
            runtime.unregister(memory.address)
    for name in sources:
        table.add(f"host to device, {name}", [one[name] for one in rounds], "GB/s")
    if not is_registered:
        table.rows.append(("registered ring", "this driver registers no slots", ""))
        return
    for name, target_text in (("pin_memory()", ">= 0.95"), ("unregistered", ">= 2")):
        ratios = [one["registered ring"] / one[name] for one in rounds]
        table.add(f"registered ring / {name}", ratios, "", target_text)


def _gigabytes_per_s(run: Run, source: torch.Tensor, target: torch.Tensor) -> float:
    target.copy_(source, non_blocking=True)
    begun = run.device.mark()
    for _ in range(run.extent.copies):
        target.copy_(source, non_blocking=True)
    ended = run.device.mark()
    run.device.settle()
    return run.extent.copies * source.nbytes / run.device.seconds(begun, ended) / 1e9


# --- what a batch costs the trainer ---------------------------------------------------------------


def per_batch(run: Run) -> None:
    """CPU time of the trainer's thread for each batch, and of ``next``, with ready batches."""
    table, extent = run.table, run.extent
    with BatchdLoader("ready", address=run.address, device="cuda") as loader:
        batches = _endless(loader)
        for _ in range(extent.warm_up):
            next(batches)
        cpu_us, next_us = [], []
        for _ in range(extent.rounds):
            worked, waited = 0.0, []
            for _ in range(extent.ready_batches):
                started_s, cpu_s = time.perf_counter(), time.thread_time()
                next(batches)
                worked += time.thread_time() - cpu_s
                waited.append(time.perf_counter() - started_s)
                # as a step does that takes longer than the copy; else the loop would wait for the
                # device in next
                run.device.settle()
            cpu_us.append(worked / extent.ready_batches * 1e6)
            next_us.append(statistics.median(waited) * 1e6)
    table.add("CPU time of the trainer for each batch", cpu_us, "us", "<= 100")
    table.add("next(loader), batches ready", next_us, "us")


# --- training -------------------------------------------------------------------------------------


class PlainDataset(torch.utils.data.Dataset[Any]):
    """A hand-written loader: OpenCV, one thread for each process, a random crop, a flip."""

    def __init__(self, files: list[Path]) -> None:
        self._files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        cv2.setNumThreads(0)
        image = cv2.cvtColor(cv2.imread(self._files[number]), cv2.COLOR_BGR2RGB)
        chance = np.random.default_rng()
        height, width = image.shape[:2]
        side = int(min(height, width) * np.sqrt(chance.uniform(0.3, 1.0)))
        top, left = int(chance.integers(height - side + 1)), int(chance.integers(width - side + 1))
        crop = cv2.resize(image[top : top + side, left : left + side], (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        if chance.random() < 0.5:
            crop = crop[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1))), number % 1000


def training(run: Run, files: list[Path], workers: int) -> None:
    """Images/s into a training step, from each side in turn, and the device's idle share."""
    table, extent = run.table, run.extent
    step = TrainingStep(run.device)
    warm_up = max(extent.ring_batches, 3 * workers)
    steps = -(-extent.steps // workers) * workers  # a DataLoader's batches come in such bursts
    repeated = files * (1 + (steps + warm_up) * extent.batch // len(files))
    theirs = torch.utils.data.DataLoader(
        PlainDataset(repeated),
        extent.batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=run.device.place.type == "cuda",
        persistent_workers=True,
        prefetch_factor=4,
        drop_last=True,
    )
    with BatchdLoader("train", address=run.address, device="cuda") as ours:
        rounds = [
            {
                "batchd": step.run(_endless(ours), warm_up, steps),
                "DataLoader": step.run(_moved(theirs, run.device.place), warm_up, steps),
            }
            for _ in range(extent.training_rounds)
        ]
    for name in ("batchd", "DataLoader"):
        table.add(f"ResNet-50 training, {name}", [one[name][0] for one in rounds], "images/s")
        table.add(f"idle share of the device, {name}", [one[name][1] for one in rounds], "")
    table.add("images/s, batchd / DataLoader", [one["batchd"][0] / one["DataLoader"][0] for one in rounds], "")


class TrainingStep:
    """A ResNet-50 in bfloat16 with SGD; in a rehearsal a network of one layer."""

    def __init__(self, device: Device) -> None:
        self._device = device
        place = device.place
        is_cuda = place.type == "cuda"
        model = resnet50() if is_cuda else nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 1000))
        self._model = model.to(place, memory_format=torch.channels_last if is_cuda else torch.contiguous_format)
        self._optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        mean, std = (torch.tensor(one, device=place).view(1, 3, 1, 1) for one in (MEAN, STD))
        self._scale, self._bias = 1 / (255 * std), -mean / std

    def run(self, batches: Iterator[Any], warm_up: int, steps: int) -> tuple[float, float]:
        """Images/s, and the share of the time in which no step was under way on the device."""
        for _ in range(warm_up):
            self._train(*next(batches))
        self._device.settle()
        marks = []
        started_s, images_seen = time.perf_counter(), 0
        for _ in range(steps):
            images, labels = next(batches)
            begun = self._device.mark()
            self._train(images, labels)
            marks.append((begun, self._device.mark()))
            images_seen += len(images)
        self._device.settle()
        took_s = time.perf_counter() - started_s
        busy_s = sum(self._device.seconds(begun, ended) for begun, ended in marks)
        return images_seen / took_s, max(0.0, 1 - busy_s / took_s)

    def _train(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        inputs = torch.addcmul(self._bias, images.float(), self._scale)
        place = self._device.place.type
        if place == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(place, torch.bfloat16):
            loss = nn.functional.cross_entropy(self._model(inputs), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _moved(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    for images, labels in _endless(loader):
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and around them the input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self._path = nn.Sequential(
            *_convolution(channels, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, out, 1, 1),
        )
        plain = stride == 1 and channels == out
        self._around = nn.Identity() if plain else nn.Sequential(*_convolution(channels, out, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Add both ways."""
        return nn.functional.relu(self._path(images) + self._around(images), inplace=True)


def _convolution(channels: int, out: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]


def resnet50() -> nn.Module:
    """ResNet-50 of He et al., "Deep Residual Learning for Image Recognition" (2015)."""
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        layers += [Bottleneck(channels, width, 2 if stage else 1)]
        channels = 4 * width
        layers += [Bottleneck(channels, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


if __name__ == "__main__":
    sys.exit(main())
