"""The trainer of ``batchd bench``: takes batches as fast as they come. A child of the command.

    python -m batchd.commands.bench.trainer ADDRESS STREAM SHARE

Begins at this share of epoch 0, and reads a byte of each page of each batch, as a copy to a GPU
would, until it is killed.
"""

import sys
from collections.abc import Iterator

import numpy as np

import batchd_client
from batchd.runtime.children import die_with_parent
from batchd_wire.views import Array

PAGE_BYTES = 4096


def touch(array: Array) -> None:
    """Read a byte of each page of a contiguous array."""
    array.reshape(-1).view(np.uint8)[::PAGE_BYTES].max(initial=0)


def _batches(stream: batchd_client.Stream) -> Iterator[batchd_client.Batch]:
    while True:
        yield from stream


def run(address: str, name: str, share: float) -> None:
    """Take batches, epoch after epoch."""
    with batchd_client.connect(address) as daemon:
        stream = daemon.stream(name)
        stream.seek(0, int(share * stream.steps))
        for batch in _batches(stream):
            for field in batch:
                touch(batch.room(field).array)
            batch.release()


if __name__ == "__main__":
    die_with_parent()
    run(sys.argv[1], sys.argv[2], float(sys.argv[3]))
