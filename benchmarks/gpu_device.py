"""The device of `gpu_feed.py`: a GPU, or the tests' stand-in for CUDA, which measures nothing.

Invariant: either goes the same way through the loader, with slots that are registered and copies
that are under way.
"""

import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

import batchd_client.torch
from batchd_client.torch.cuda import CudaRuntime

TESTS = Path(__file__).resolve().parents[1] / "tests"


class Device(Protocol):
    """Where batches are brought.

    ``name`` is None where there is none; ``place`` is where its tensors are.
    """

    name: str | None
    place: torch.device

    def runtime(self) -> CudaRuntime:
        """The runtime of a loader, and a stream of its own."""

    def locked(self, source: torch.Tensor) -> torch.Tensor:
        """A copy in page-locked memory of torch's own."""

    def mark(self) -> Any:
        """A point in what the device does."""

    def seconds(self, begun: Any, ended: Any) -> float:
        """The time between two points that it has passed."""

    def settle(self) -> None:
        """Wait until it has nothing to do."""


class Gpu:
    """The current device of CUDA."""

    def __init__(self) -> None:
        self.place = torch.device("cuda", torch.cuda.current_device())
        self.name: str | None = torch.cuda.get_device_name(self.place)

    def runtime(self) -> CudaRuntime:
        """See ``Device``."""
        return CudaRuntime(self.place)

    def locked(self, source: torch.Tensor) -> torch.Tensor:
        """See ``Device``."""
        return source.clone().pin_memory()

    def mark(self) -> Any:
        """See ``Device``."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:
        """See ``Device``."""
        return float(begun.elapsed_time(ended)) / 1000

    def settle(self) -> None:
        """See ``Device``."""
        torch.cuda.synchronize(self.place)


class StandIn:
    """Without a GPU: loaders in this process get the stand-in, and all memory is the host's."""

    name: str | None = None
    place = torch.device("cpu")

    def __init__(self) -> None:
        sys.path.insert(0, str(TESTS))
        from support.fake_cuda import FakeCuda  # noqa: PLC0415  only a rehearsal needs the tests

        self._fake: Any = FakeCuda
        vars(batchd_client.torch)["CudaRuntime"] = lambda _device: FakeCuda()

    def runtime(self) -> CudaRuntime:
        """See ``Device``."""
        fake: CudaRuntime = self._fake()
        return fake

    def locked(self, source: torch.Tensor) -> torch.Tensor:
        """See ``Device``."""
        return source.clone()

    def mark(self) -> Any:
        """See ``Device``."""
        return time.perf_counter()

    def seconds(self, begun: Any, ended: Any) -> float:
        """See ``Device``."""
        return float(ended - begun)

    def settle(self) -> None:
        """See ``Device``. All is done at once."""
