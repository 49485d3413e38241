"""Producers of numbered frames, in this process or as processes of their own.

For tests of processes.

A frame is 6 x 8 pixels; each pixel and the label hold its number, so a reader can check that it
is complete.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import batchd_client
from support.daemon_process import clean_environment
from support.waiting import PATIENCE_S

PROGRAM = Path(__file__).with_name("producer_program.py")
FIELDS = {"image": "uint16[6,8]", "label": "int64"}


def push_stream(batch_size: int = 4, **changes: Any) -> dict[str, Any]:
    """Make a live stream of frames; ``changes`` are keys of its source."""
    return {"source": {"type": "push", "fields": FIELDS, "capacity": 32, **changes}, "batch_size": batch_size}


def frame(number: int) -> dict[str, Any]:
    """Make the frame of this number."""
    return {"image": np.full((6, 8), number, np.uint16), "label": number}


def numbers_in(batch: batchd_client.Batch) -> list[int]:
    """Return the numbers of the frames in a batch, which must be complete."""
    labels: list[int] = batch["label"].tolist()
    assert all((image == label).all() for image, label in zip(batch["image"], labels, strict=True)), "a frame is torn"
    assert batch["valid"].all()
    return labels


def read(stream: batchd_client.Stream, batches: int) -> list[int]:
    """Return the numbers of the frames in the next batches."""
    found = []
    for batch in islice(iter(stream), batches):
        with batch:
            found += numbers_in(batch)
    return found


class ProducerProcess:
    """A producer that can be killed."""

    def __init__(self, address: str, stream: str, first: int, count: int) -> None:
        options = {"address": address, "stream": stream, "first": first, "count": count}
        environment = {**clean_environment(), "PYTHONPATH": str(PROGRAM.parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def said(self) -> Iterator[int]:
        """Yield the numbers that it reports as pushed, to the end of its output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield int(line)

    def kill(self) -> None:
        """Kill it at any point."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it in any state."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
