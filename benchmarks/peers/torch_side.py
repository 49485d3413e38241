"""torch.utils.data.DataLoader, in three variants.

"pil" (torchvision's transforms in their most common form), "cv2" and "region".

Chosen: a map-style dataset that gives uint8 arrays, which the default collation stacks in shared
memory inside the workers; ``persistent_workers``; the default ``prefetch_factor``; no
``pin_memory``, as there is no GPU. Workers run torch with one thread by default, and cv2 is set to
one. A random sampler that never ends spares it the end of an epoch, at which its workers would run
dry. With several trainers each has a DataLoader of its own.
"""

from collections.abc import Iterator
from typing import Any

import common
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Photographs(Dataset[Any]):
    """A photograph from its file to an array, by ``load``."""

    def __init__(self, paths: list[str], load: Any) -> None:
        self._paths, self._load = paths, load

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        return self._load(self._paths[index])


class LoadWithPil:
    """``RandomResizedCrop`` and ``RandomHorizontalFlip`` on PIL images, then an array."""

    def __init__(self) -> None:
        if (
            not torch.version.cuda
        ):  # its wheel is for CUDA: the compiled part cannot load, and its Python asks for these
            self._library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self._library.define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        from torchvision import transforms  # noqa: PLC0415  takes seconds, which the other variants need not wait

        self._transform = transforms.Compose(
            [transforms.RandomResizedCrop(common.SIDE), transforms.RandomHorizontalFlip()]
        )

    def __call__(self, path: str) -> Any:
        """[224, 224, 3] uint8."""
        import numpy as np  # noqa: PLC0415
        from PIL import Image  # noqa: PLC0415

        with open(path, "rb") as file:  # noqa: PTH123  as torchvision's own loader does
            return np.array(self._transform(Image.open(file).convert("RGB")))


def data_loader(options: common.Options, load: Any) -> DataLoader[Any]:
    """Over all photographs, again and again."""
    photographs = Photographs(common.photographs(options.data), load)
    return DataLoader(
        photographs,
        batch_size=options.batch,
        sampler=RandomSampler(photographs, replacement=True, num_samples=common.ENDLESS),
        num_workers=options.workers,
        persistent_workers=True,
        drop_last=True,
    )


def batches(options: common.Options) -> Iterator[Any]:
    """Tensors [batch, 224, 224, 3] uint8."""
    return iter(data_loader(options, LoadWithPil() if options.variant == "pil" else common.loader(options.variant)))


if __name__ == "__main__":
    common.play(batches)
