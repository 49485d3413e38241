"""TensorSocket: consumers in the trainers.

The producer wraps a torch DataLoader (cv2) in its own process.

Chosen: the producer puts two batches of its DataLoader together, the fewest with which it works, so
these are half of a trainer's: without a GPU it sends, to each consumer, the whole memory of what it
cuts a batch out of. Everything else as it comes. It is made for trainers on GPUs, to which it hands
pointers.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import common

SERVER = "server"
PARTS = 2


@contextmanager
def serve(_options: common.Options) -> Iterator[str]:
    """Start the producer's process; its ports are TensorSocket's own."""
    command = [sys.executable, __file__, SERVER, *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        yield "default ports"
        server.kill()


def be_producer() -> None:
    """Wrap a DataLoader, until the process is killed."""
    import torch_side  # noqa: PLC0415  trainers need neither
    from tensorsocket import TensorProducer  # noqa: PLC0415

    del sys.argv[1]
    load = common.loader("cv2")
    options = common.told()
    halves = options._replace(batch=options.batch // PARTS)
    loader = torch_side.data_loader(halves, lambda path: (load(path),))
    producer = TensorProducer(loader, producer_batch_size=PARTS)
    while True:
        for _ in producer:
            pass


def batches(options: common.Options) -> Iterator[Any]:
    """Tensors [batch, 224, 224, 3] uint8."""
    from tensorsocket import TensorConsumer  # noqa: PLC0415

    return (images for (images,) in TensorConsumer(batch_size=options.batch))


if __name__ == "__main__":
    if sys.argv[1] == SERVER:
        be_producer()
    else:
        common.play(batches, serve)
