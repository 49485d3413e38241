"""Ray's object store between two nodes of a cluster on this host, as a link for rows.

An actor on one node gives rows of zeros, the driver on the other one gets them and copies them into
memory of its own, where batchd's gateway copies into a slot. The variant is the number of rows that
one object has: those of a batch, or of an order of batchd's worker host.

Chosen: as many calls ahead as batchd has orders in flight; the driver frees each object once it is
copied, so that both stores use the same pages again.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import common
import numpy as np
import ray
from ray.cluster_utils import Cluster

AHEAD = 4
STORE_BYTES = 1 << 30


class Sender:
    """The actor: the same rows again and again, each time as a new object of its node."""

    def __init__(self, rows: int) -> None:
        self._rows = np.zeros((rows, common.SIDE, common.SIDE, 3), np.uint8)

    def node(self) -> str:
        """The node that it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def send(self) -> Any:
        """uint8 ``[rows, 224, 224, 3]``."""
        return self._rows


@contextmanager
def start(options: common.Options) -> Iterator[common.Measure]:
    """Start a head without CPUs, on which the driver is, and a node for the actor."""
    rows = int(options.variant)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        sender = ray.remote(Sender).options(num_cpus=1).remote(rows)
        assert ray.get(sender.node.remote()) != ray.get_runtime_context().get_node_id()
        slot = np.zeros((options.batch, common.SIDE, common.SIDE, 3), np.uint8)
        sent = deque(sender.send.remote() for _ in range(AHEAD))
        first = 0

        def measure(seconds: float) -> tuple[int, float]:
            nonlocal first
            copied, begun_s = 0, time.perf_counter()
            while not copied or time.perf_counter() - begun_s < seconds:
                sent.append(sender.send.remote())
                np.copyto(slot[first : first + rows], ray.get(sent.popleft()))
                common.touch(slot[first : first + rows])
                first = (first + rows) % options.batch
                copied += rows
            return copied, time.perf_counter() - begun_s

        measure(0.0)
        yield measure
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    common.play_measured(start)
