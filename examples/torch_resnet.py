"""Train a small ResNet on a folder of photographs, on one GPU or the CPU.

Ctrl-C, start it again, and it goes on.

    python examples/torch_resnet.py --data /path/to/images [--epochs 10]    a folder for each class
    python examples/torch_resnet.py                                         generates photographs

A daemon runs as a child of this script, unless $BATCHD_ADDRESS names one that serves a stream
``photos``. Needs, in a clone: pip install ./client . torch
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import batchd
from batchd.data.pipeline.image.synthetic_images import make_photos
from batchd.errors import BatchdError
from batchd_client.errors import BatchdClientError
from batchd_client.torch import BatchdLoader

CONFIG = """\
[streams.photos]
source = {{ type = "folder", path = {data} }}
batch_size = {batch_size}
pipeline = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = [{side}, {side}] }},
    {{ op = "random_flip" }},
]
"""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MADE_PHOTOS = 512


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.through = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wider),
        )
        shortcut = (nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))
        self.around = nn.Identity() if (channels, stride) == (wider, 1) else nn.Sequential(*shortcut)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images of half the size where ``stride`` is 2."""
        return nn.functional.relu(self.through(images) + self.around(images))


def resnet18(classes: int, width: int) -> nn.Module:
    """ResNet-18; ``width`` is 64 in the paper."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for wider, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(channels, wider, stride), Block(wider, wider, 1)]
        channels = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str | None]:
    """The address of a daemon: None for the one that $BATCHD_ADDRESS names."""
    if os.environ.get("BATCHD_ADDRESS"):
        yield None
        return
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.data or options.out / "photos"
    if options.data is None and not data.exists():
        print(f"making {MADE_PHOTOS} photographs in {data}")
        make_photos(data, MADE_PHOTOS, 0, lambda made: None)  # noqa: ARG005
    config = options.out / "batchd.toml"
    path = json.dumps(str(data.resolve()))
    config.write_text(CONFIG.format(data=path, batch_size=options.batch_size, side=options.side))
    with batchd.serve(config) as address:
        yield address


def train(loader: BatchdLoader, options: argparse.Namespace) -> None:
    """Train to the last epoch, from the checkpoint where there is one.

    Write it every few steps and after each epoch.
    """
    checkpoint = options.out / "checkpoint.pt"
    classes = options.classes or len(loader.stream.classes)
    model = resnet18(classes, options.width).to(loader.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # documented, and not in its types
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=loader.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        print(f"resuming at epoch {saved['data']['epoch']}, step {saved['data']['step']}", flush=True)

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    for epoch in range(loader.epoch, options.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = loader.state_dict()["step"] or len(loader)
            print(f"epoch {epoch}, step {step} of {len(loader)}: loss {loss.item():.3f}", flush=True)
            if step % options.save_every == 0:
                save()
        save()
    print(f"done: {options.epochs} epochs")


def main() -> int:
    """Serve and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of images, one sub-folder for each class")
    parser.add_argument(
        "--out", type=Path, default=Path("demo/resnet"), help="where the checkpoint is (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--side", type=int, default=128, help="pixels")
    parser.add_argument(
        "--classes", type=int, metavar="N", help="how many there are (default: as the source names them)"
    )
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer")
    parser.add_argument("--save-every", type=int, default=4, metavar="STEPS")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with (
            served(options) as address,
            BatchdLoader(
                "photos",
                address=address,
                device=device,
                normalize=(MEAN, STD),
                channels_last=True,
                epochs=options.epochs,
            ) as loader,
        ):
            if not options.classes and not loader.stream.classes:
                parser.error("the source of stream 'photos' names no classes: say with --classes N how many there are")
            train(loader, options)
    except (BatchdError, BatchdClientError) as error:
        print(f"torch_resnet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {options.out / 'checkpoint.pt'}")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
