"""The other side of ``batchd bench``: a torch DataLoader over the same samples. A child.

    python -m batchd.commands.bench.dataloader CONFIG STREAM WORKERS SECONDS  -> JSON: ``Measured``

It reads the samples as batchd does, and decodes and augments them with PIL and torchvision, if
these are installed, else with OpenCV: as most people do, in a map-style dataset, with the default
collation, ``persistent_workers``, and a sampler whose epoch does not end meanwhile. Each sample is
counted when it is made, in memory that its workers share with it, so seconds are enough.

Invariant: it does the work of every step, or says which one it cannot do.
"""

import json
import math
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from batchd.commands.bench import measure
from batchd.commands.bench.trainer import touch
from batchd.config.load import load_config
from batchd.config.tree import StreamConfig
from batchd.data.pipeline.cache_split import plan_pipeline
from batchd.data.pipeline.image.options import (
    CenterCrop,
    ChanceStep,
    ColorJitter,
    Decode,
    Gray,
    ImageStep,
    Layout,
    Normalize,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    To,
)
from batchd.data.pipeline.options import StepOptions
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.code.options import PluginSource, PythonSource
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.interface import Reader, open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.runtime.children import die_with_parent
from batchd.runtime.directories import default_cache_dir
from batchd_wire.views import Array

Change: TypeAlias = Callable[[Any], object]
"""A step: a file's bytes, or an image of its library -> an image of its library, or a tensor."""

KNOWN = (Decode, Resize, CenterCrop, RandomCrop, RandomResizedCrop, RandomFlip, Gray, Normalize, Layout, To)
"""Steps that both libraries can do; with torchvision there is color_jitter, too."""
COUNTER_BYTES = 64
"""Of each worker, so that no two write to one line of the cache."""
ENDLESS = 1 << 30
ATTEMPTS = 10
WHITE = 255.0
_RANDOM = Random()  # noqa: S311  crops, no secrets


class _Tensor(Protocol):
    """What is used of a ``torch.Tensor``."""

    def numpy(self) -> Array:
        """The same memory."""


class Measured(NamedTuple):
    """What the child prints, in this order."""

    samples: int
    seconds: float
    cpu_s: float
    others_cpus: float
    tools: str


def why_none(stream: StreamConfig, tools: str = "") -> str:
    """Why there is no DataLoader that does the same; "" if there is one."""
    for _key, source in sources_in(stream.source):
        if isinstance(source, (PythonSource, PluginSource)):
            return "the source is code of your own"
    known = KNOWN if tools == "OpenCV" else (*KNOWN, ColorJitter)
    others = [step.op for step in stream.pipeline if not isinstance(step, known) or _acts_at_random(step)]
    return f"no counterpart of the step {', '.join(dict.fromkeys(others))}" if others else ""


def _acts_at_random(step: StepOptions) -> bool:
    return isinstance(step, ChanceStep) and step.probability < 1


# --- the steps ------------------------------------------------------------------------------------


def changes_of(steps: Sequence[ImageStep], *, with_pil: bool) -> Change:
    """All steps as one: bytes, or uint8 [height, width, channels], -> an array or a tensor."""
    made = [(_with_pil if with_pil else _with_opencv)(step) for step in steps]
    if with_pil and steps and not isinstance(steps[0], Decode):
        from PIL import Image  # noqa: PLC0415  only if it is there

        made.insert(0, Image.fromarray)
    return partial(_changed, made)


def _changed(changes: Sequence[Change], value: object) -> object:
    for change in changes:
        value = change(value)
    return value if hasattr(value, "numpy") else np.array(value)  # a tensor stays one


def _with_pil(step: ImageStep) -> Change:  # noqa: C901, PLR0912  one case for each step
    from PIL import Image, ImageOps  # noqa: PLC0415  only if it is there
    from torchvision import transforms  # noqa: PLC0415  the same

    def opened(decode: Decode, data: memoryview) -> object:
        image: Image.Image = Image.open(BytesIO(data))
        if decode.exif == "apply":
            image = ImageOps.exif_transpose(image)
        return image.convert("L" if decode.color == "gray" else "RGB")

    def channels_first(value: object) -> object:
        return value if hasattr(value, "numpy") else transforms.functional.pil_to_tensor(value)

    made: Change
    match step:
        case Decode():
            made = partial(opened, step)
        case Resize():
            made = transforms.Resize(list(step.size) if step.size is not None else step.shorter_side)
        case CenterCrop():
            made = transforms.CenterCrop(list(step.size))
        case RandomCrop():
            fill = step.fill if len(step.fill) > 1 else step.fill[0]
            made = transforms.RandomCrop(list(step.size), step.padding or None, pad_if_needed=True, fill=fill)
        case RandomResizedCrop():
            made = transforms.RandomResizedCrop(list(step.size), step.scale, step.ratio)
        case RandomFlip(direction="horizontal"):
            made = transforms.RandomHorizontalFlip(step.probability)
        case RandomFlip(direction="vertical"):
            made = transforms.RandomVerticalFlip(step.probability)
        case RandomFlip():
            both = [transforms.RandomHorizontalFlip(step.probability), transforms.RandomVerticalFlip(step.probability)]
            made = transforms.Compose(both)
        case Gray():
            made = transforms.Grayscale(step.channels)
        case ColorJitter():
            made = transforms.ColorJitter(step.brightness, step.contrast, step.saturation, step.hue)
        case Normalize():
            made = transforms.Compose([transforms.ToTensor(), transforms.Normalize(step.mean, step.std)])
        case To() if step.dtype != "uint8" and step.scale:
            made = transforms.ToTensor()
        case _:
            made = channels_first
    return made


def _with_opencv(step: ImageStep) -> Change:  # noqa: C901  one case for each step
    match step:
        case Decode():
            return partial(_decoded, step.color)
        case Resize():
            return partial(_resized, step)
        case CenterCrop():
            return lambda image: _cut(image, *_middle(image, step.size), *step.size)
        case RandomCrop():
            return partial(_cropped, step)
        case RandomResizedCrop():
            return partial(_resized_crop, step)
        case RandomFlip():
            return partial(_flipped, step)
        case Gray():
            return partial(_grey, step.channels)
        case Normalize():
            mean, scale = (np.array(values, np.float32) * np.float32(WHITE) for values in (step.mean, step.std))
            return lambda image: (image - mean) / scale
        case To():
            return lambda image: _ordered(_numbers(image, step), step.layout)
        case Layout():
            return lambda image: _ordered(image, step.order)
    raise AssertionError(step)


def _decoded(color: str, data: memoryview) -> Array:
    import cv2  # noqa: PLC0415  in workers only

    how = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}[color]
    image = cv2.imdecode(np.frombuffer(data, np.uint8), how)
    if image is None:
        raise ValueError("no image")
    return image if image.ndim == 3 else image[..., np.newaxis]  # noqa: PLR2004  with channels


def _scaled(image: Array, height: int, width: int) -> Array:
    import cv2  # noqa: PLC0415  in workers only

    made = cv2.resize(image, (width, height))
    return made if made.ndim == 3 else made[..., np.newaxis]  # noqa: PLR2004  with channels


def _resized(step: Resize, image: Array) -> Array:
    if step.size is not None:
        return _scaled(image, *step.size)
    factor = (step.shorter_side or 1) / min(image.shape[:2])
    return _scaled(image, round(image.shape[0] * factor), round(image.shape[1] * factor))


def _middle(image: Array, size: tuple[int, int]) -> tuple[int, int]:
    return (image.shape[0] - size[0]) // 2, (image.shape[1] - size[1]) // 2


def _cut(image: Array, top: int, left: int, height: int, width: int) -> Array:
    """A box of the image; zeros where it reaches beyond it."""
    if top >= 0 and left >= 0 and top + height <= image.shape[0] and left + width <= image.shape[1]:
        return image[top : top + height, left : left + width]
    room = max(0, -top), max(0, -left)
    beyond = max(0, top + height - image.shape[0]), max(0, left + width - image.shape[1])
    padded = np.pad(image, [(room[0], beyond[0]), (room[1], beyond[1]), (0, 0)])
    return _cut(padded, top + room[0], left + room[1], height, width)


def _cropped(step: RandomCrop, image: Array) -> Array:
    if step.padding:
        image = np.pad(image, [(step.padding, step.padding)] * 2 + [(0, 0)])
    top, left = (
        _RANDOM.randint(0, there - wanted) if there >= wanted else (there - wanted) // 2
        for there, wanted in zip(image.shape[:2], step.size, strict=True)
    )
    return _cut(image, top, left, *step.size)


def _resized_crop(step: RandomResizedCrop, image: Array) -> Array:
    height, width = image.shape[:2]
    for _ in range(ATTEMPTS):
        area = height * width * _RANDOM.uniform(*step.scale)
        ratio = math.exp(_RANDOM.uniform(math.log(step.ratio[0]), math.log(step.ratio[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            top, left = _RANDOM.randint(0, height - down), _RANDOM.randint(0, width - across)
            return _scaled(image[top : top + down, left : left + across], *step.size)
    side = min(height, width)
    return _scaled(_cut(image, *_middle(image, (side, side)), side, side), *step.size)


def _flipped(step: RandomFlip, image: Array) -> Array:
    if step.direction != "vertical" and _RANDOM.random() < step.probability:
        image = image[:, ::-1]
    if step.direction != "horizontal" and _RANDOM.random() < step.probability:
        image = image[::-1]
    return image


def _grey(channels: int, image: Array) -> Array:
    import cv2  # noqa: PLC0415  in workers only

    grey = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY) if image.shape[2] == 3 else image[..., 0]  # noqa: PLR2004  red, green, blue
    return np.repeat(grey[..., np.newaxis], channels, axis=2)


def _numbers(image: Array, step: To) -> Array:
    if step.dtype == "uint8":
        return image
    numbers = image.astype(step.dtype)
    return numbers / np.array(WHITE, step.dtype) if step.scale else numbers


def _ordered(image: Array, order: str) -> Array:
    return np.ascontiguousarray(image.transpose(2, 0, 1) if order == "nchw" else image)


# --- the dataset and its loader -------------------------------------------------------------------


class Samples:
    """A map-style dataset: the samples of the stream's source, with the stream's steps."""

    def __init__(self, stream: StreamConfig, cache: IndexCache, counters: mmap.mmap, *, with_pil: bool) -> None:
        steps = [step for step in stream.pipeline if isinstance(step, ImageStep)]
        fields = dict.fromkeys(step.field for step in steps)
        self._changes: Mapping[str, Change] = {
            field: changes_of([step for step in steps if step.field == field], with_pil=with_pil) for field in fields
        }
        self._stream, self._counters = stream, counters
        self._storage = Storage()
        self._index = scan_source(stream.source, lambda _found: None, cache, self._storage)
        self._reader: Reader | None = None
        self._count = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def begin(self, worker: int) -> None:
        """Open the source in a worker."""
        import cv2  # noqa: PLC0415  in workers only

        cv2.setNumThreads(0)
        stream = self._stream
        self._reader = open_reader(
            stream.source, self._index, plan_pipeline(stream.pipeline).record_bytes_max, self._storage
        )
        self._count = np.frombuffer(self._counters, np.int64, 1, worker * COUNTER_BYTES)

    def __getitem__(self, sample: int) -> dict[str, object]:
        """One sample; instead of a bad one, the next one."""
        assert self._reader is not None, "begin was called in this worker"
        for other in range(sample, sample + len(self)):
            try:
                values = self._reader.read(other % len(self))
                made = {name: self._made(name, value) for name, value in values.items()}
            except (SampleUnreadable, SampleUndecodable, ValueError, OSError):
                continue
            self._count += 1
            return made
        raise ValueError("no sample is good")

    def _made(self, name: str, value: Value) -> object:
        change = self._changes.get(name)
        return change(value) if change is not None else np.array(value)


def _begin(worker: int) -> None:
    from torch.utils.data import get_worker_info  # noqa: PLC0415  it takes seconds

    info = get_worker_info()
    assert info is not None, "this is a worker"
    assert isinstance(info.dataset, Samples), "it is this module's"
    info.dataset.begin(worker)


def _take(batches: Iterable[Mapping[str, _Tensor]]) -> None:
    for batch in batches:
        for tensor in batch.values():
            touch(tensor.numpy())


def run(config: Path, name: str, workers: int, seconds: float) -> Measured:
    """Measure. ``seconds``: those that it may take, with the start of torch."""
    began_s = monotonic()
    import torch  # noqa: PLC0415  it takes seconds, which count
    from torch.utils.data import DataLoader, RandomSampler  # noqa: PLC0415  the same

    tools = _tools()
    settings = load_config(config)
    stream = settings.streams[name]
    if why := why_none(stream, tools):
        raise SystemExit(why)
    counters = mmap.mmap(-1, workers * COUNTER_BYTES)
    cache = IndexCache(settings.daemon.cache_dir or default_cache_dir())
    samples: Any = Samples(stream, cache, counters, with_pil=tools != "OpenCV")
    loader = DataLoader(
        samples,
        batch_size=stream.batch_size,
        sampler=RandomSampler(samples, replacement=True, num_samples=ENDLESS),
        num_workers=workers,
        persistent_workers=True,
        worker_init_fn=_begin,
        multiprocessing_context="fork",
    )
    taker = Thread(target=_take, args=(iter(loader),), daemon=True)
    taker.start()
    counts = np.frombuffer(counters, np.int64)
    until_s = began_s + seconds
    while not counts.any() and taker.is_alive() and monotonic() < until_s:
        taker.join(measure.TICK_S)
    taker.join(max(measure.MEASURED_S_MIN / 2, measure.WARM_UP_SHARE * (until_s - monotonic())))
    before, measured_s = int(counts.sum()), monotonic()
    own_s, all_s = measure.tree_cpu_s(os.getpid()), measure.cpu_times(os.getpid())
    taker.join(max(measure.MEASURED_S_MIN, until_s - monotonic()))
    patient_s = monotonic() + measure.PATIENCE_S
    while counts.sum() == before and taker.is_alive() and monotonic() < patient_s:
        taker.join(measure.TICK_S)
    if not taker.is_alive():
        raise SystemExit("its loop ended; the reason is above")
    made, taken_s = int(counts.sum()) - before, monotonic() - measured_s
    found = measure.figures_between(
        workers, taken_s, made, (own_s, measure.tree_cpu_s(os.getpid())), (all_s, measure.cpu_times(os.getpid()))
    )
    named = f"torch {torch.__version__}, {tools}"
    return Measured(found.samples, found.seconds, found.cpu_s, found.others_cpus, named)


def _tools() -> str:
    """What decodes and augments."""
    try:
        import PIL  # noqa: PLC0415  only if it is there
        import torchvision.transforms  # noqa: PLC0415  the same
    except (ImportError, RuntimeError):  # RuntimeError: torchvision is of another torch
        return "OpenCV"
    return f"PIL {PIL.__version__} and torchvision {torchvision.__version__}"


if __name__ == "__main__":
    die_with_parent()
    warnings.simplefilter("ignore")
    answer = run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
    sys.stdout.flush()
    os._exit(0)  # its thread waits for a batch, and its workers end with their group
