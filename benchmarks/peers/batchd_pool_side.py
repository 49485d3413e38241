"""batchd with a worker host: daemon, gateway and a host with workers, over loopback.

The variant "decode" makes pictures of the photographs. "plain-64" and "curve-64" (encrypted) send
rows of zeros over the one link, 64 in an order, from workers that cost nothing.

A daemon keeps a local worker, which gets orders first, and whose speed says how many rows an order
has. So here it sleeps as long as a photograph takes: it takes no CPU, and the rows that it "fills"
do not count. Images are those that the worker host has filled. The local worker's rows are zeros,
so with "decode" the worker host is not compared with them.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import batchd_side
import common
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from harness import endless
from pool_daemon import run_daemon, run_host

import batchd_client

DECODE, CURVE = "decode", "curve"
LOCAL_DECODE_US = 1_200
"""An image of the local worker: orders have 20 ms of work, so 16 rows."""
LOCAL_LINK_US = 300
"""Beside workers that cost nothing: orders have 64 rows, or as few as the variant says."""
FREE_US = 1.0
LINK_SAMPLES = 8_192


def _rows(folder: Path, batch: int) -> str:
    """The stream of zeros, in a sparse file."""
    file = folder / "rows.npy"
    shape = (LINK_SAMPLES, common.SIDE, common.SIDE, 3)
    np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    return f'[streams.photos]\nsource = {{ type = "npy", path = "{file}" }}\nbatch_size = {batch}\n'


@contextmanager
def start(options: common.Options) -> Iterator[common.Measure]:
    """Start everything, and read until the worker host serves."""
    link, _, order_rows = options.variant.partition("-")
    decodes = link == DECODE
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchd-peers-")))
        daemon = stack.enter_context(
            run_daemon(
                folder,
                batchd_side.stream(options._replace(variant="files")) if decodes else _rows(folder, options.batch),
                with_key=link == CURVE,
                image_us=LOCAL_DECODE_US if decodes else LOCAL_LINK_US,
                more='pool_accept = "any"\npool_audit = 0\n' if decodes else f"chunk_rows = {order_rows}\n",
            )
        )
        stack.enter_context(run_host(daemon, workers=options.workers, image_us=0.0 if decodes else FREE_US))
        trainer = stack.enter_context(batchd_client.connect(daemon.address))
        batches = endless(stack.enter_context(trainer.stream("photos")))

        def read(seconds: float) -> None:
            begun_s = time.perf_counter()
            while time.perf_counter() - begun_s < seconds:
                with next(batches) as batch:
                    common.touch(batch[next(iter(batch))])

        def measure(seconds: float) -> tuple[int, float]:
            before, begun_s = daemon.remote_samples, time.perf_counter()
            read(seconds)
            filled, took_s = daemon.remote_samples - before, time.perf_counter() - begun_s
            if filled < 0 or not daemon.links:
                raise RuntimeError("the link of the worker host has ended")
            return filled, took_s

        while not any(link["state"] == "serving" for link in daemon.links):
            read(0.1)
        yield measure


if __name__ == "__main__":
    common.play_measured(start)
