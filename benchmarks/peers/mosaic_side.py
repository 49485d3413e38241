"""Four photographs in one with their boxes, 640 x 640: batchd, or ultralytics' own loader.

``--data`` has "images", "coco.json" and "labels", which have the same boxes. Each has two workers,
takes samples in random order, and does what ultralytics does by default: mosaic, affine, colours,
flip. With "-cached" both keep all images in memory, at 640 pixels, and draw any of them. Else both
read files, and draw from what they have read last: ultralytics from the images that its worker has
decoded last, eight batches, and batchd from the same row of eight batches.
"""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import common

WORKERS = 2
OURS = """
[daemon]
workers = {workers}
memory = "256MiB"
[streams.mosaic]
source = {{ type = "coco", path = "{data}/coco.json", images = "{data}/images", allow_outside_root = true }}
batch_size = {batch}
cache = "{cache}"
pipeline = [
    {{ op = "decode" }},
    {{ op = "follow", boxes = "boxes", labels = ["classes"], min_visible = 0.1 }},
    {{ op = "resize", longer_side = 640 }},
    {{ op = "mosaic", size = [640, 640]{near} }},
    {{ op = "affine", scale = [0.5, 1.5], translate = [0.05, 0.05], fill = [114], size = [640, 640] }},
    {{ op = "color_jitter", brightness = 0.4, saturation = 0.7, hue = 0.015 }},
    {{ op = "random_flip" }},
    {{ op = "to", dtype = "uint8", layout = "nchw" }},
    {{ op = "pad_batch", field = "boxes", max_shape = [200, 4] }},
    {{ op = "pad_batch", field = "classes", max_shape = [200], fill = -1 }},
]
"""


def by_batchd(options: common.Options) -> Iterator[Any]:
    """Batches of a daemon of its own."""
    cache, near = "off", ", near = 8"
    if options.variant.endswith("cached"):
        cache, near = 'decoded"\ncache_memory = "512MiB', ""
    options_of = {"workers": options.workers, "data": options.data, "batch": options.batch}
    with common.served(OURS.format(**options_of, cache=cache, near=near)) as address:
        yield from common.read(address, "mosaic", "image")


def by_ultralytics(options: common.Options) -> Iterator[Any]:
    """Batches of its ``YOLODataset`` and ``InfiniteDataLoader``."""
    os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp(prefix="batchd-peers-")
    import torch  # noqa: PLC0415  this variant alone has it

    if not torch.version.cuda:  # torchvision's wheel is for CUDA: see torch_side
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    from ultralytics.cfg import get_cfg  # noqa: PLC0415
    from ultralytics.data.build import build_dataloader  # noqa: PLC0415
    from ultralytics.data.dataset import YOLODataset  # noqa: PLC0415
    from ultralytics.utils import DEFAULT_CFG  # noqa: PLC0415

    dataset = YOLODataset(
        img_path=str(options.data / "images"),
        imgsz=640,
        batch_size=options.batch,
        augment=True,
        hyp=get_cfg(DEFAULT_CFG),
        cache="ram" if options.variant.endswith("cached") else False,
        data={"names": {0: "thing"}, "channels": 3},
        task="detect",
    )
    loader = build_dataloader(dataset, options.batch, options.workers, shuffle=True, rank=-1)
    while True:
        for batch in loader:
            yield [batch["img"].numpy()]


def batches(options: common.Options) -> Iterator[Any]:
    """One of these."""
    made = by_batchd if options.variant.startswith("batchd") else by_ultralytics
    return made(options._replace(workers=WORKERS))


if __name__ == "__main__":
    common.play(batches)
