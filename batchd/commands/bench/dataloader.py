"""The other side of ``batchd bench``: a torch DataLoader over the same samples. A child.

    PYTHON dataloader.py JOB    as ``beside`` writes it, in JSON

It runs in the interpreter that trains, so it imports nothing of batchd: the standard library,
numpy, torch, and PIL with torchvision, else OpenCV, else PIL alone, on Python 3.9 or newer. It
reads, decodes and augments as most people do: in a map-style dataset, with the default collation,
``persistent_workers``, and a sampler whose epoch does not end meanwhile. Each of its workers counts
the samples that it has made, in a file that they map, so seconds are enough.

Invariant: it does the work of every step, or says which one it cannot do.
Invariant: it ends with its parent, and until then only by an error.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import numpy as np

COUNTER_BYTES = 64
"""Of each worker, so that no two write to one line of the cache."""
TOOLS = "batchd bench: "
"""Begins the line with the libraries."""
TICK_S = 0.5
PAGE_BYTES = 4096
ENDLESS = 1 << 30
ATTEMPTS = 10
WHITE = 255.0
_RANDOM = Random()  # noqa: S311  crops, no secrets

Foreign = Any
"""What a library of this environment makes, or the library: none is imported here by name."""
Step = Mapping[str, Any]
"""The options of a step, by name."""
Change = Callable[[Foreign], Foreign]
"""A step: a file's bytes, or an image of its library -> an image of its library, or a tensor."""


def tools() -> tuple[str, str]:
    """The library that decodes and augments, and its version."""
    note = ""
    try:
        import PIL  # noqa: PLC0415  only if it is there
        import torchvision.transforms  # noqa: PLC0415  the same
    except (ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError):  # it is of another torch
            note = f" (torchvision does not work there: {str(error).partition(chr(10))[0]})"
    else:
        return "torchvision", f"PIL {PIL.__version__} and torchvision {torchvision.__version__}"
    try:
        import cv2  # noqa: PLC0415  the same
    except ImportError:
        try:
            import PIL  # noqa: PLC0415  the same
        except ImportError:
            return "none", "no library for images"
        return "PIL", f"PIL {PIL.__version__}{note}"
    cv2.setNumThreads(0)
    return "OpenCV", f"OpenCV {cv2.__version__}{note}"


# --- the steps ------------------------------------------------------------------------------------


def changes_of(steps: Sequence[Step], library: str) -> Change:
    """All steps as one: bytes, or uint8 [height, width, channels], -> an array or a tensor."""
    if steps and steps[0]["op"] in _TEXT_CHANGES:
        return partial(_changed, [partial(_TEXT_CHANGES[step["op"]], step) for step in steps])
    if library == "torchvision":
        made = [_with_torchvision(step) for step in steps]
    else:
        kind = _OpenCV if library == "OpenCV" else _Pillow
        made = [_with(kind(), step) for step in steps]
    if library != "OpenCV" and steps and steps[0]["op"] != "decode":
        from PIL import Image  # noqa: PLC0415  only if it is there

        made.insert(0, Image.fromarray)
    return partial(_changed, made)


def _changed(changes: Sequence[Change], value: object) -> object:
    for change in changes:
        value = change(value)
    return value if hasattr(value, "numpy") else np.array(value)  # a tensor stays one


def _opened(step: Step, data: bytes) -> Foreign:
    from PIL import Image, ImageOps  # noqa: PLC0415  only if it is there

    image: Foreign = Image.open(BytesIO(data))
    if step["exif"] == "apply":
        image = ImageOps.exif_transpose(image)
    return image.convert("L" if step["color"] == "gray" else "RGB")


def _with_torchvision(step: Step) -> Change:  # noqa: C901  one case for each step
    from torchvision import transforms  # noqa: PLC0415  only if it is there

    def channels_first(value: object) -> object:
        return value if hasattr(value, "numpy") else transforms.functional.pil_to_tensor(value)

    op = step["op"]
    made: Foreign = channels_first
    if op == "decode":
        made = partial(_opened, step)
    elif op == "resize":
        made = transforms.Resize(step["size"] or step["shorter_side"])
    elif op == "center_crop":
        made = transforms.CenterCrop(step["size"])
    elif op == "random_crop":
        fill = tuple(step["fill"]) if len(step["fill"]) > 1 else step["fill"][0]
        made = transforms.RandomCrop(step["size"], step["padding"] or None, pad_if_needed=True, fill=fill)
    elif op == "random_resized_crop":
        made = transforms.RandomResizedCrop(step["size"], step["scale"], step["ratio"])
    elif op == "random_flip":
        flips = {"horizontal": transforms.RandomHorizontalFlip, "vertical": transforms.RandomVerticalFlip}
        made = transforms.Compose(
            [flips[one](step["probability"]) for one in flips if step["direction"] in (one, "both")]
        )
    elif op == "gray":
        made = transforms.Grayscale(step["channels"])
    elif op == "color_jitter":
        made = transforms.ColorJitter(*(step[name] for name in ("brightness", "contrast", "saturation", "hue")))
    elif op == "normalize":
        made = transforms.Compose([transforms.ToTensor(), transforms.Normalize(step["mean"], step["std"])])
    elif op == "to" and step["dtype"] != "uint8" and step["scale"]:
        made = transforms.ToTensor()
    elif op not in ("layout", "to"):
        raise SystemExit(f"no counterpart of the step {op}")
    return made  # type: ignore[no-any-return]  # torchvision has no types


class _Pillow:
    """Images of PIL; the other library has the same methods."""

    def __init__(self) -> None:
        from PIL import Image, ImageOps  # noqa: PLC0415  only if it is there

        self._images: Foreign = Image
        self._ops: Foreign = ImageOps

    def decoded(self, step: Step, data: bytes) -> Foreign:
        return _opened(step, data)

    def sides(self, image: Foreign) -> tuple[int, int]:
        """Height and width."""
        return image.size[1], image.size[0]

    def cut(self, image: Foreign, top: int, left: int, height: int, width: int) -> Foreign:
        """A box of the image; black where it reaches beyond it."""
        return image.crop((left, top, left + width, top + height))

    def scaled(self, image: Foreign, height: int, width: int) -> Foreign:
        return image.resize((width, height), self._images.BILINEAR)

    def padded(self, image: Foreign, margin: int) -> Foreign:
        return self._ops.expand(image, margin)

    def mirrored(self, image: Foreign) -> Foreign:
        return self._ops.mirror(image)

    def flipped(self, image: Foreign) -> Foreign:
        return self._ops.flip(image)

    def grey(self, image: Foreign, channels: int) -> Foreign:
        grey = image.convert("L")
        return grey if channels == 1 else self._images.merge("RGB", [grey] * channels)


class _OpenCV:
    """Images of OpenCV: arrays, uint8 [height, width, channels]."""

    def __init__(self) -> None:
        import cv2  # noqa: PLC0415  only if it is there

        self._cv2 = cv2

    def decoded(self, step: Step, data: bytes) -> Foreign:
        names = {"rgb": "IMREAD_COLOR_RGB", "bgr": "IMREAD_COLOR", "gray": "IMREAD_GRAYSCALE"}
        # an older one decodes to blue, green, red: no more work
        is_new = hasattr(self._cv2, "IMREAD_COLOR_RGB")
        how = getattr(self._cv2, names[step["color"]] if is_new or step["color"] != "rgb" else "IMREAD_COLOR")
        image = self._cv2.imdecode(np.frombuffer(data, np.uint8), how)
        if image is None:
            raise ValueError("no image")
        return self._with_channels(image)

    def _with_channels(self, image: Foreign) -> Foreign:
        return image if image.ndim == 3 else image[..., None]  # noqa: PLR2004  height, width, channels

    def sides(self, image: Foreign) -> tuple[int, int]:
        return image.shape[0], image.shape[1]

    def cut(self, image: Foreign, top: int, left: int, height: int, width: int) -> Foreign:
        beyond = (
            [max(0, -top), max(0, top + height - image.shape[0])],
            [max(0, -left), max(0, left + width - image.shape[1])],
        )
        if any(map(any, beyond)):
            image = np.pad(image, [*beyond, (0, 0)])
            top, left = top + beyond[0][0], left + beyond[1][0]
        return image[top : top + height, left : left + width]

    def scaled(self, image: Foreign, height: int, width: int) -> Foreign:
        return self._with_channels(self._cv2.resize(image, (width, height)))

    def padded(self, image: Foreign, margin: int) -> Foreign:
        return np.pad(image, [(margin, margin)] * 2 + [(0, 0)])

    def mirrored(self, image: Foreign) -> Foreign:
        return image[:, ::-1]

    def flipped(self, image: Foreign) -> Foreign:
        return image[::-1]

    def grey(self, image: Foreign, channels: int) -> Foreign:
        if image.shape[2] == 3:  # noqa: PLR2004  red, green, blue
            image = self._cv2.cvtColor(np.ascontiguousarray(image), self._cv2.COLOR_RGB2GRAY)[..., None]
        return np.repeat(image[..., :1], channels, axis=2)


def _with(library: Foreign, step: Step) -> Change:
    """A step by a library without transforms of its own."""
    if step["op"] not in _CHANGES:
        raise SystemExit(f"no counterpart of the step {step['op']}")
    return partial(_CHANGES[step["op"]], library, step)


def _resized(library: Foreign, step: Step, image: Foreign) -> Foreign:
    if step["size"] is not None:
        return library.scaled(image, *step["size"])
    sides = library.sides(image)
    return library.scaled(image, *(round(side * step["shorter_side"] / min(sides)) for side in sides))


def _cropped(library: Foreign, step: Step, image: Foreign) -> Foreign:
    is_random = step["op"] == "random_crop"
    if is_random and step["padding"]:
        image = library.padded(image, step["padding"])
    top, left = (
        _RANDOM.randint(0, there - wanted) if is_random and there >= wanted else (there - wanted) // 2
        for there, wanted in zip(library.sides(image), step["size"])  # noqa: B905  not in Python 3.9
    )
    return library.cut(image, top, left, *step["size"])


def _resized_crop(library: Foreign, step: Step, image: Foreign) -> Foreign:
    height, width = library.sides(image)
    for _ in range(ATTEMPTS):
        area = height * width * _RANDOM.uniform(*step["scale"])
        ratio = math.exp(_RANDOM.uniform(*map(math.log, step["ratio"])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            top, left = _RANDOM.randint(0, height - down), _RANDOM.randint(0, width - across)
            return library.scaled(library.cut(image, top, left, down, across), *step["size"])
    side = min(height, width)
    middle = library.cut(image, (height - side) // 2, (width - side) // 2, side, side)
    return library.scaled(middle, *step["size"])


def _flipped(library: Foreign, step: Step, image: Foreign) -> Foreign:
    if step["direction"] != "vertical" and _RANDOM.random() < step["probability"]:
        image = library.mirrored(image)
    if step["direction"] != "horizontal" and _RANDOM.random() < step["probability"]:
        image = library.flipped(image)
    return image


def _array(image: Foreign) -> Foreign:
    """uint8 [height, width, channels] of an image."""
    made = np.asarray(image)
    return made if made.ndim == 3 else made[..., None]  # noqa: PLR2004  grey of PIL


def _normalized(_library: Foreign, step: Step, image: Foreign) -> Foreign:
    mean, scale = (np.array(step[name], np.float32) * np.float32(WHITE) for name in ("mean", "std"))
    return (_array(image) - mean) / scale


def _numbers(_library: Foreign, step: Step, image: Foreign) -> Foreign:
    numbers = _array(image).astype(step["dtype"])
    if step["dtype"] != "uint8" and step["scale"]:
        numbers /= numbers.dtype.type(WHITE)
    return _ordered(numbers, step["layout"])


def _ordered(image: Foreign, order: str) -> Foreign:
    return np.ascontiguousarray(_array(image).transpose(2, 0, 1) if order == "nchw" else _array(image))


_CHANGES: Mapping[str, Callable[[Foreign, Step, Foreign], Foreign]] = {
    "decode": lambda library, step, data: library.decoded(step, data),
    "resize": _resized,
    "center_crop": _cropped,
    "random_crop": _cropped,
    "random_resized_crop": _resized_crop,
    "random_flip": _flipped,
    "gray": lambda library, step, image: library.grey(image, step["channels"]),
    "normalize": _normalized,
    "to": _numbers,
    "layout": lambda _library, step, image: _ordered(image, step["order"]),
}


def _text_bytes(step: Step, text: str) -> Foreign:
    encoded = text.encode()[: step["length"]]
    made = np.zeros(step["length"], np.uint8)
    made[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return made


_TEXT_CHANGES: Mapping[str, Callable[[Step, Foreign], Foreign]] = {
    "lowercase": lambda _step, text: text.lower(),
    "text_bytes": _text_bytes,
}


# --- the dataset and its loader -------------------------------------------------------------------


class Samples:
    """A map-style dataset: the samples of the job, with its steps."""

    def __init__(self, job: Mapping[str, Any], counters: mmap.mmap, library: str) -> None:
        self._samples, self._counters = job["samples"], counters
        with Path(job["copies"]).open("rb") as file:
            self._copies = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        by_field: dict[str, list[Step]] = {}
        for step in job["steps"]:
            by_field.setdefault(step["field"], []).append(step)
        self._changes = {field: changes_of(steps, library) for field, steps in by_field.items()}
        self._count: Foreign = None

    def __len__(self) -> int:
        return len(self._samples)

    def begin(self, worker: int) -> None:
        """Count in a worker's own place."""
        self._count = np.frombuffer(self._counters, np.int64, 1, worker * COUNTER_BYTES)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """One sample; instead of a bad one, the next one."""
        for other in range(sample, sample + len(self)):
            try:
                values = self._samples[other % len(self)].items()
                made = {name: self._made(name, value) for name, value in values}
            except (ValueError, OSError):
                continue
            self._count += 1
            return made
        raise ValueError("no sample is good")

    def _made(self, name: str, value: Foreign) -> Foreign:
        """The value of a field.

        A string is the path of a file, a list is (first byte, end) of a copy, with dtype and shape
        if it is an array; a number is the value, and so is what stands under "text".
        """
        if isinstance(value, str):
            with open(value, "rb") as file:  # noqa: PTH123  as datasets do: no object for each path
                value = file.read()
        elif isinstance(value, list):
            first, end, *array = value
            value = self._copies[first:end]
            if array:
                value = np.frombuffer(value, array[0]).reshape(array[1])
        elif isinstance(value, dict):
            value = value["text"]
        change = self._changes.get(name)
        return change(value) if change is not None else np.array(value)


def _begin(worker: int) -> None:
    from torch.utils.data import get_worker_info  # noqa: PLC0415  it takes seconds

    info: Foreign = get_worker_info()
    info.dataset.begin(worker)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK_S)
    os.killpg(0, signal.SIGKILL)


def run(job: Mapping[str, Any]) -> None:
    """Take batches as fast as they come, until the parent ends this process."""
    import torch  # noqa: PLC0415  it takes seconds
    from torch.utils.data import DataLoader, RandomSampler  # noqa: PLC0415  the same

    library, version = tools()
    with Path(job["counters"]).open("r+b") as file:
        counters = mmap.mmap(file.fileno(), job["workers"] * COUNTER_BYTES)
    samples: Foreign = Samples(job, counters, library)
    print(f"{TOOLS}torch {torch.__version__}{f', {version}' if job['steps'] else ''}", flush=True)  # noqa: T201  the answer
    loader = DataLoader(
        samples,
        batch_size=job["batch_size"],
        sampler=RandomSampler(samples, replacement=True, num_samples=ENDLESS),
        num_workers=job["workers"],
        persistent_workers=True,
        worker_init_fn=_begin,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    Thread(target=_end_with, args=(job["parent"],), daemon=True).start()  # behind the forks
    for batch in batches:
        for tensor in batch.values():
            tensor.reshape(-1).view(torch.uint8)[::PAGE_BYTES].max()  # as a copy to a GPU reads it


if __name__ == "__main__":
    # the modules beside this file are batchd's
    sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]
    warnings.simplefilter("ignore")
    run(json.loads(Path(sys.argv[1]).read_text()))
