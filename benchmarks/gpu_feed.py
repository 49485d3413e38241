"""Feeding a GPU from the ring, measured: one table at the end. Needs PyTorch with CUDA and batchd installed on this machine.

    python benchmarks/gpu_feed.py [--data FOLDER] [--workers N] [--out FILE.md]

    bandwidth    host to device, from a registered slot of a ring, from a pin_memory() buffer and from pageable memory, in turns
    CPU          what a batch costs the trainer's process, and how long ``next`` takes, when batches are ready
    training     images/s into a ResNet-50 step, and how long the GPU idles, beside a torch DataLoader with as many processes

It stands alone: it makes its pictures where no folder is given. Without a GPU it says so; ``--rehearse`` goes through all of it
on the CPU with a small network, to see that it runs, and says that nothing was measured on a GPU.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

import batchd
import batchd_client
from batchd.pipeline.made import make_photos
from batchd_client.torch import BatchdLoader
from batchd_client.torch.cuda import REGISTER_PORTABLE, REGISTER_READ_ONLY, CudaRuntime, needs_writable
from batchd_client.torch.tensors import over

SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUNDS = 7
TRAINING_ROUNDS = 3
COPIES = 20
READY_BATCHES = 60
STEPS = 40
WARM_UP = 8
RING_BATCHES = 64
"""More than the ring has slots: each is registered the first time that a batch lies in it, and that is not to be measured."""
STILL = 'shuffle = false\nmemory = "1GiB"\n'


@dataclass
class Table:
    """What was found: rows of a name, a value with its spread, and a target where there is one."""

    caption: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, values: list[float], unit: str, target: str = "") -> None:
        """Add the median of several rounds."""
        digits = 3 if statistics.median(values) < 10 else 0
        spread = f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f}) {unit}"
        self.rows.append((name, spread, target))
        print(f"{name}: {spread} {target}", flush=True)

    @property
    def text(self) -> str:
        """Markdown."""
        lines = [self.caption, "", "| what | median (smallest to largest) | target |", "|---|---|---|"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows)]) + "\n"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of photographs (default: 512 made ones)")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="decode processes of each side"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument("--rehearse", action="store_true", help="go through it on the CPU; measures nothing of a GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("no GPU that torch can use is here: nothing is measured. --rehearse goes through it on the CPU")
        return 1
    device = torch.device("cpu" if options.rehearse else "cuda")
    table = Table(_caption(device, options.workers, options.batch))
    with tempfile.TemporaryDirectory(prefix="batchd-gpu-") as scratch:
        photos = options.data or Path(scratch) / "photos"
        if options.data is None:
            make_photos(photos, 512, 0, lambda _made: None)
        files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
        config = _config(Path(scratch), files, options)
        with batchd.serve(config) as address:
            if device.type == "cuda":
                bandwidth(table, address)
            per_batch(table, address, device)
            training(table, address, device, files, options)
    print()
    print(table.text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(table.text)
    return 0


def _caption(device: torch.device, workers: int, batch: int) -> str:
    where = (
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, torch {torch.__version__}"
    )
    if device.type != "cuda":
        return (
            f"NOT MEASURED ON A GPU: a rehearsal on the CPU ({where}, {workers} decode processes, batches of {batch})."
        )
    name = torch.cuda.get_device_name(device)
    measured = (
        f"Measured on one {name} ({where}, {workers} decode processes, batches of {batch}, uint8 {SIDE} x {SIDE})."
    )
    return measured + (
        " The device idles while no training step is under way on it; a copy that a step waits for counts as idling, gaps within "
        "a step do not."
    )


def _config(scratch: Path, files: list[Path], options: argparse.Namespace) -> Path:
    """Two streams: one that is decoded over and over, and one whose few batches stay in the ring."""
    wanted = (RING_BATCHES + STEPS + options.workers) * options.batch
    few = files[: 4 * options.batch]
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
        f'[daemon]\nworkers = {options.workers}\nmemory = "4GiB"\nwritable_slots = true\n'
        + stream.format(name="train", scratch=scratch, batch=options.batch, pipeline=crop, more='memory = "2GiB"\n')
        + stream.format(name="ready", scratch=scratch, batch=min(options.batch, len(few)), pipeline=still, more=STILL)
    )
    return path


# --- bandwidth --------------------------------------------------------------------------------------------------------


def bandwidth(table: Table, address: str) -> None:
    """GB/s of copies to the device, each kind of memory in turn."""
    device = torch.device("cuda", torch.cuda.current_device())
    runtime = CudaRuntime(device)
    with batchd_client.connect(address, writable_slots=needs_writable(runtime)) as daemon:
        batch = next(iter(daemon.stream("ready")))
        memory = batch.memory
        flags = REGISTER_PORTABLE | (REGISTER_READ_ONLY if memory.page.readonly else 0)
        is_registered = runtime.register(memory.address, memory.slot_bytes, flags)
        slot = over(batch.room("image").array)
        sources = {"pin_memory()": slot.clone().pin_memory(), "unregistered": slot.clone()}
        if is_registered:
            sources["registered ring"] = slot
        target = torch.empty_like(slot, device=device)
        rounds = [{name: _gigabytes_per_s(source, target) for name, source in sources.items()} for _ in range(ROUNDS)]
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


def _gigabytes_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source, non_blocking=True)
    begin.record()
    for _ in range(COPIES):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return COPIES * source.nbytes / begin.elapsed_time(end) / 1e6


# --- what a batch costs the trainer -----------------------------------------------------------------------------------


def per_batch(table: Table, address: str, device: torch.device) -> None:
    """CPU time of the trainer's thread for each batch, and of ``next``, while batches are ready in the ring."""
    with BatchdLoader("ready", address=address, device=device) as loader:
        batches = _endless(loader)
        for _ in range(WARM_UP):
            next(batches)
        cpu_us, next_us = [], []
        for _ in range(ROUNDS):
            worked, waited = 0.0, []
            for _ in range(READY_BATCHES):
                started_s, cpu_s = time.perf_counter(), time.thread_time()
                next(batches)
                worked += time.thread_time() - cpu_s
                waited.append(time.perf_counter() - started_s)
                _settle(
                    device
                )  # as a step does that takes longer than the copy; else the loop would wait for the device in next
            cpu_us.append(worked / READY_BATCHES * 1e6)
            next_us.append(statistics.median(waited) * 1e6)
    table.add("CPU time of the trainer for each batch", cpu_us, "us", "<= 100" if device.type == "cuda" else "")
    table.add("next(loader), batches ready", next_us, "us")


# --- training ---------------------------------------------------------------------------------------------------------


class PlainDataset(torch.utils.data.Dataset[Any]):
    """What a good engineer writes by hand: OpenCV, one thread for each process, a random crop, a flip."""

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


def training(table: Table, address: str, device: torch.device, files: list[Path], options: argparse.Namespace) -> None:
    """Images/s into a training step, from either side in turns, and which part of the time the device had nothing to do."""
    step = TrainingStep(device)
    warm_up = max(RING_BATCHES, 3 * options.workers)
    steps = -(-STEPS // options.workers) * options.workers  # a DataLoader's batches come in bursts of so many
    repeated = files * (1 + (steps + warm_up) * options.batch // len(files))
    theirs = torch.utils.data.DataLoader(
        PlainDataset(repeated),
        options.batch,
        shuffle=True,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
        prefetch_factor=4,
        drop_last=True,
    )
    with BatchdLoader("train", address=address, device=device) as ours:
        rounds = [
            {
                "batchd": step.run(_endless(ours), warm_up, steps),
                "DataLoader": step.run(_moved(theirs, device), warm_up, steps),
            }
            for _ in range(TRAINING_ROUNDS)
        ]
    for name in ("batchd", "DataLoader"):
        table.add(f"ResNet-50 training, {name}", [one[name][0] for one in rounds], "images/s")
        table.add(f"idle share of the device, {name}", [one[name][1] for one in rounds], "")
    table.add("images/s, batchd / DataLoader", [one["batchd"][0] / one["DataLoader"][0] for one in rounds], "")


class TrainingStep:
    """A ResNet-50 in bfloat16 with SGD; on the CPU a network of one layer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        model = resnet50() if is_cuda else nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 1000))
        self._model = model.to(device, memory_format=torch.channels_last if is_cuda else torch.contiguous_format)
        self._optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        mean, std = (torch.tensor(one, device=device).view(1, 3, 1, 1) for one in (MEAN, STD))
        self._scale, self._bias = 1 / (255 * std), -mean / std

    def run(self, batches: Iterator[Any], warm_up: int, steps: int) -> tuple[float, float]:
        """Images/s, and the share of the time in which no step was under way on the device."""
        for _ in range(warm_up):
            self._train(*next(batches))
        _settle(self._device)
        marks = []
        started_s, images_seen = time.perf_counter(), 0
        for _ in range(steps):
            images, labels = next(batches)
            begun = self._mark()
            self._train(images, labels)
            marks.append((begun, self._mark()))
            images_seen += len(images)
        _settle(self._device)
        took_s = time.perf_counter() - started_s
        busy_s = sum(_seconds(begun, ended) for begun, ended in marks)
        return images_seen / took_s, max(0.0, 1 - busy_s / took_s)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _train(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        inputs = torch.addcmul(self._bias, images.float(), self._scale)
        if self._device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self._model(inputs), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()


def _seconds(begun: Any, ended: Any) -> float:
    return ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1000


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """The network of He et al., "Deep Residual Learning for Image Recognition" (2015), with 50 layers."""
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        layers += [Bottleneck(channels, width, 2 if stage else 1)]
        channels = 4 * width
        layers += [Bottleneck(channels, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


if __name__ == "__main__":
    sys.exit(main())
