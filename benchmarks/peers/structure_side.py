"""Photographs with boxes and masks, or between texts, by other libraries and by hand.

``--data`` has "images" and "coco.json". Both make the same in one thread: what pycocotools reads,
the picture scaled to 480 x 480 with its boxes and masks, flipped and jittered. Albumentations has
its pixels from OpenCV and torchvision from Pillow, as on their pages.

The variant ``vlm`` has lines of JSON with tokens and photographs, and does in one thread what a
collate function by hand does: Pillow, the sizes and the order of patches of Qwen2-VL, and rows that
are filled one after the other.
"""

import contextlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
from pycocotools.coco import COCO

SIDE = 480
_LIBRARIES: list[Any] = []
"""What declares operators, as long as they are used."""


def by_torchvision(options: common.Options, coco: Any) -> Callable[[int], object]:
    """What makes the sample of an image id."""
    import torch  # noqa: PLC0415  this variant alone has it

    torch.set_num_threads(1)
    if not torch.version.cuda:  # torchvision's wheel is for CUDA: see torch_side
        library = torch.library.Library("torchvision", "FRAGMENT")
        _LIBRARIES.append(library)
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    from PIL import Image  # noqa: PLC0415
    from torchvision import tv_tensors  # noqa: PLC0415
    from torchvision.transforms import v2  # noqa: PLC0415

    steps = [v2.ToImage(), v2.Resize((SIDE, SIDE)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.3, 0.3, 0.3)]
    transform = v2.Compose(steps)

    def made(number: int) -> object:
        info, objects = coco.imgs[number], coco.imgToAnns[number]
        size = info["height"], info["width"]
        image = Image.open(options.data / "images" / info["file_name"]).convert("RGB")
        masks = [coco.annToMask(one) for one in objects]
        boxes = torch.tensor([one["bbox"] for one in objects], dtype=torch.float32).reshape(-1, 4)
        return transform(
            image,
            {
                "boxes": tv_tensors.BoundingBoxes(boxes, format="XYWH", canvas_size=size),
                "masks": tv_tensors.Mask(torch.from_numpy(np.stack(masks or [np.zeros(size, np.uint8)]))),
                "classes": torch.tensor([one["category_id"] for one in objects]),
            },
        )

    return made


def by_albumentations(options: common.Options, coco: Any) -> Callable[[int], object]:
    """The same."""
    import albumentations as A  # noqa: N812, PLC0415  as its pages write it
    import cv2  # noqa: PLC0415

    cv2.setNumThreads(1)
    jitter = A.ColorJitter((0.7, 1.3), (0.7, 1.3), (0.7, 1.3), (0, 0), p=1)
    boxes = A.BboxParams(format="coco", label_fields=["classes"])
    transform = A.Compose([A.Resize(SIDE, SIDE), A.HorizontalFlip(), jitter], bbox_params=boxes)

    def made(number: int) -> object:
        info, objects = coco.imgs[number], coco.imgToAnns[number]
        pixels = cv2.imread(str(options.data / "images" / info["file_name"]))
        return transform(
            image=cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB),
            bboxes=[one["bbox"] for one in objects],
            classes=[one["category_id"] for one in objects],
            masks=[coco.annToMask(one) for one in objects],
        )

    return made


ROW, PLACE, PATCH, MERGE = 8192, 9, 14, 2
PIXELS = 56 * 56, 1280 * 28 * 28


def size_of(height: int, width: int) -> tuple[int, int]:
    """Sides that are multiples of 28, within the pixels."""
    unit, (least, most) = PATCH * MERGE, PIXELS
    high, wide = (round(side / unit) * unit for side in (height, width))
    if high * wide > most:
        factor = math.sqrt(height * width / most)
        high, wide = (math.floor(side / factor / unit) * unit for side in (height, width))
    elif high * wide < least:
        factor = math.sqrt(least / (height * width))
        high, wide = (math.ceil(side * factor / unit) * unit for side in (height, width))
    return high, wide


def patches_of(path: Path) -> np.ndarray:
    """The patches of an image, those of one token after those of the other."""
    from PIL import Image  # noqa: PLC0415  this variant alone has it

    image = Image.open(path).convert("RGB")
    high, wide = size_of(image.height, image.width)
    pixels = np.asarray(image.resize((wide, high), Image.Resampling.BICUBIC))
    rows, columns = high // PATCH // MERGE, wide // PATCH // MERGE
    tiles = pixels.reshape(rows, MERGE, PATCH, columns, MERGE, PATCH, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    return tiles.reshape(rows * columns * MERGE**2, PATCH * PATCH * 3)


def collated(documents: list[tuple[np.ndarray, list[np.ndarray]]]) -> dict[str, np.ndarray]:
    """A row of documents."""
    images = [patches for _tokens, several in documents for patches in several]
    row = {"tokens": np.zeros(ROW, np.int32), "segments": np.zeros(ROW, np.int32)}
    row["patches"] = np.zeros((ROW * MERGE**2, PATCH * PATCH * 3), np.uint8)
    joined = np.concatenate(images)
    row["patches"][: len(joined)] = joined
    at = 0
    for number, (tokens, _images) in enumerate(documents, 1):
        row["tokens"][at : at + len(tokens)] = tokens
        row["segments"][at : at + len(tokens)] = number
        at += len(tokens)
    return row


@contextlib.contextmanager
def start_rows(options: common.Options) -> Iterator[common.Measure]:
    """Measure rows with images."""
    lines = (options.data / "samples.jsonl").read_text().splitlines()

    def epoch() -> int:
        row: list[tuple[np.ndarray, list[np.ndarray]]] = []
        images = length = 0
        for line in lines:
            sample = json.loads(line)
            several = [patches_of(options.data / path) for path in sample["images"]]
            tokens = np.array(sample["tokens"], np.int32)
            counts = np.ones(len(tokens), np.int64)
            counts[tokens == PLACE] = [len(patches) // MERGE**2 for patches in several]
            tokens = np.repeat(tokens, counts)
            if length + len(tokens) > ROW:
                collated(row)
                row, length = [], 0
            row.append((tokens, several))
            images, length = images + len(several), length + len(tokens)
        collated(row)
        return images

    def measure(seconds: float) -> tuple[int, float]:
        images, begun_s = 0, time.perf_counter()
        while time.perf_counter() - begun_s < seconds:
            images += epoch()
        return images, time.perf_counter() - begun_s

    epoch()
    yield measure


@contextlib.contextmanager
def start(options: common.Options) -> Iterator[common.Measure]:
    """Measure one of these."""
    if options.variant == "vlm":
        with start_rows(options) as rows:
            yield rows
        return
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(options.data / "coco.json")
    made = (by_torchvision if options.variant == "torchvision" else by_albumentations)(options, coco)

    def measure(seconds: float) -> tuple[int, float]:
        images, begun_s = 0, time.perf_counter()
        while time.perf_counter() - begun_s < seconds:
            for number in coco.imgs:
                made(number)
            images += len(coco.imgs)
        return images, time.perf_counter() - begun_s

    measure(0)
    yield measure


if __name__ == "__main__":
    common.play_measured(start)
