"""Photographs with boxes and masks of a JSON of COCO, by torchvision v2 or albumentations.

``--data`` has "images" and "coco.json". Both make the same in one thread: what pycocotools reads,
the picture scaled to 480 x 480 with its boxes and masks, flipped and jittered. Albumentations has
its pixels from OpenCV and torchvision from Pillow, as on their pages.
"""

import contextlib
import io
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def start(options: common.Options) -> Iterator[common.Measure]:
    """Measure one of these."""
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
