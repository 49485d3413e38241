"""Recipes of pictures as timm and torchvision have them.

The variants are "timm", its own loader with its recipe for ImageNet, up to the bytes that it sends
to the device, where it normalises and erases; "dino", the views of DINO by torchvision v2 in the
workers of a DataLoader, as tensors of uint8, which it advises; "rand-augment", timm's alone, of
photographs of 224 x 224; "mixup", torchvision's, and "mixed", batchd's, of batches of 256 in torch.
The last three measure this process, and count images.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import common
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

if not torch.version.cuda:  # torchvision's wheel is for CUDA: see torch_side
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _operator in ("nms", "qnms"):
        _LIBRARY.define(f"{_operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from timm.data import create_loader
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import v2

RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
MEAN = (124, 116, 104)
ROWS, CLASSES, DIFFERENT = 256, 1000, 128


class Photographs(Dataset[Any]):
    """Photographs again and again, as ``ImageDataset`` of timm opens them, and a class."""

    def __init__(self, options: common.Options, transform: Callable[[Any], Any] | None = None) -> None:
        paths = common.photographs(options.data)
        self.paths, self.transform = paths * (common.ENDLESS // len(paths)), transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:  # noqa: PTH123  as timm does
            image = Image.open(file).convert("RGB")
        assert self.transform is not None, "set by the loader"
        return self.transform(image), 0


def timm_batches(options: common.Options) -> Iterator[Any]:
    """Tensors [batch, 3, 224, 224]."""
    loader = create_loader(
        Photographs(options),
        (3, common.SIDE, common.SIDE),
        options.batch,
        is_training=True,
        auto_augment=RAND_AUGMENT,
        interpolation="bicubic",
        num_workers=options.workers,
        device=torch.device("cpu"),
    )
    return ([images] for images, _classes in loader.loader)


def _view(side: int, scale: tuple[float, float], *, blur: float, solarize: float = 0.0) -> v2.Transform:
    return v2.Compose(
        [
            v2.RandomResizedCrop(side, scale, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            v2.RandomGrayscale(0.2),
            v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], blur),
            v2.RandomSolarize(128, solarize),
        ]
    )


class Dino:
    """Two global and eight local views."""

    def __init__(self) -> None:
        of_all, local = (0.4, 1.0), _view(96, (0.05, 0.4), blur=0.5)
        self._views = [_view(224, of_all, blur=1.0), _view(224, of_all, blur=0.1, solarize=0.2), *[local] * 8]

    def __call__(self, image: Any) -> Any:
        """All views, each a tensor."""
        pixels = v2.functional.pil_to_tensor(image)
        return tuple(view(pixels) for view in self._views)


def dino_batches(options: common.Options) -> Iterator[Any]:
    """Lists of tensors [batch, 3, side, side]."""
    photographs = Photographs(options, Dino())
    loader = DataLoader(photographs, options.batch, shuffle=True, num_workers=options.workers, drop_last=True)
    return (list(views) for views, _classes in loader)


# --- without a loader -----------------------------------------------------------------------------


def rand_augment(options: common.Options) -> Callable[[], int]:
    """What augments each photograph once, and counts them."""
    augment = rand_augment_transform(RAND_AUGMENT, {"translate_const": 100, "img_mean": MEAN})
    images = [
        Image.open(path).convert("RGB").resize((common.SIDE, common.SIDE))
        for path in common.photographs(options.data)[:DIFFERENT]
    ]
    return lambda: sum(augment(image) is not None for image in images)


def mixes(options: common.Options) -> Callable[[], int]:
    """What mixes a batch of normalised images."""
    images, labels = torch.randn(ROWS, 3, common.SIDE, common.SIDE), torch.randint(CLASSES, (ROWS,))
    if options.variant == "mixup":
        mixup = v2.MixUp(alpha=0.8, num_classes=CLASSES)
        return lambda: len(mixup(images, labels)[0])
    from batchd_client.mixing import mixed  # noqa: PLC0415  this variant alone has it

    batch = {
        "image": images,
        "label": labels,
        "mix_row": (np.arange(ROWS, dtype=np.int32) + 1) % ROWS,
        "mix_lambda": np.full(ROWS, 0.3, np.float32),
        "mix_box": np.zeros((ROWS, 4), np.int32),
    }
    return lambda: len(mixed(batch, CLASSES, in_place=True)[0])


@contextmanager
def start(options: common.Options) -> Iterator[common.Measure]:
    """Measure one of these, in one thread."""
    torch.set_num_threads(1)
    once = rand_augment(options) if options.variant == "rand-augment" else mixes(options)
    once()

    def measure(seconds: float) -> tuple[int, float]:
        images, begun_s = 0, time.perf_counter()
        while time.perf_counter() - begun_s < seconds:
            images += once()
        return images, time.perf_counter() - begun_s

    yield measure


if __name__ == "__main__":
    match common.told().variant:
        case "timm":
            common.play(timm_batches)
        case "dino":
            common.play(dino_batches)
        case _:
            common.play_measured(start)
