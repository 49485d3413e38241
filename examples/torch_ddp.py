"""Several processes train one model, each on its share of the same stream.

Nothing but the launcher says who is who.

    torchrun --nproc-per-node 2 examples/torch_ddp.py --data /path/to/images    gloo or nccl

Rank 0 runs the daemon as its child, unless $BATCHD_ADDRESS names one that serves a stream
``photos``. Kill a rank or press Ctrl-C, start it again, and it goes on after the last checkpoint,
with another number of processes too. Needs, in a clone: pip install ./client . torch
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import batchd
from batchd_client.torch import BatchdLoader

CONFIG = """\
[streams.photos]
source = {{ type = "folder", path = {data} }}
batch_size = {batch_size}
pipeline = [ {{ op = "decode" }}, {{ op = "random_resized_crop", size = [64, 64] }}, {{ op = "random_flip" }} ]
"""


@contextmanager
def served(options: argparse.Namespace) -> Iterator[str]:
    """Address of the daemon that rank 0 runs for all ranks, or of the one in the environment."""
    if address := os.environ.get("BATCHD_ADDRESS"):
        yield address
        return
    told: list[str | None] = [None]
    if dist.get_rank() != 0:
        dist.broadcast_object_list(told)
        yield str(told[0])
        return
    options.out.mkdir(parents=True, exist_ok=True)
    config = options.out / "batchd.toml"
    config.write_text(CONFIG.format(data=json.dumps(str(options.data.resolve())), batch_size=options.batch_size))
    with batchd.serve(config) as address:
        dist.broadcast_object_list([address])
        yield address


def train(loader: BatchdLoader, options: argparse.Namespace) -> None:
    """Train to the last epoch; rank 0 writes the checkpoint, all read it."""
    checkpoint = options.out / "checkpoint.pt"
    small = nn.Sequential(nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(small, nn.Linear(16, len(loader.stream.classes))).to(loader.device)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=loader.device, weights_only=True)
        network.load_state_dict(saved["model"])
        loader.load_state_dict(saved["data"])
        if dist.get_rank() == 0:
            print(f"resuming at epoch {saved['data']['epoch']}, step {saved['data']['step']}", flush=True)
    for epoch in range(loader.epoch, options.epochs):
        loader.set_epoch(epoch)
        samples = 0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
            if dist.get_rank() == 0:
                state = {"model": network.state_dict(), "data": loader.state_dict()}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: epoch {epoch}, {samples} samples", flush=True)


def main() -> int:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of images, one sub-folder for each class", required=True)
    parser.add_argument(
        "--out", type=Path, default=Path("demo/ddp"), help="where the checkpoint is (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    options.out.mkdir(parents=True, exist_ok=True)
    scale = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    with (
        served(options) as address,
        BatchdLoader("photos", address=address, device=device, normalize=scale, epochs=options.epochs) as loader,
    ):
        train(loader, options)
        dist.barrier()  # rank 0 ends the daemon only when all have read what they wanted
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
