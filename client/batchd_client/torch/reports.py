"""Values of torch's tensors for ``report``, without a wait for the GPU. Runs in the trainer.

    tensor on a GPU --> a row of a block on the GPU      one small copy for each report
                        block --> locked memory, event   once for ``REPORTS_AT_ONCE`` reports
                                  locked memory --> read, when the event has happened

Launching work on a GPU costs the loop more than the rest of a report, so a report launches one copy
on the device, behind the work that computes the tensor. A block goes to the host when it is full,
when the next report has another shape or is on another stream of CUDA, after as many looks at it as
it has rows, or when the stream is closed. Blocks are used again.

Invariant: a later change of the tensor changes nothing that was reported. A block is filled again
only when all of its values were read.
"""

from collections.abc import Sequence

import numpy as np
import torch

from batchd_client.reports import Late, Values, values_of_tensor

REPORTS_AT_ONCE = 16


class CudaCalls:
    """The calls of CUDA for blocks; tests use a stand-in."""

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of CUDA on which the loop computes now: hashable."""
        return torch.cuda.current_stream(device)

    def memory(self, shape: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]:
        """Memory of the device and of the host, float32 of ``shape`` each, and an event."""
        with torch.inference_mode(mode=False):  # else it could not be written outside of that mode
            there = torch.empty(shape, dtype=torch.float32, device=device)
            return there, torch.empty(shape, dtype=torch.float32, pin_memory=True), torch.cuda.Event()

    def fetch(
        self, here: torch.Tensor, there: torch.Tensor, copied: torch.cuda.Event, stream: torch.cuda.Stream
    ) -> None:
        """Begin a copy to the host, float32 ``[rows, ...]``, behind the work of ``stream``.

        ``copied`` happens after it.
        """
        with torch.cuda.stream(stream):
            here.copy_(there, non_blocking=True)
        copied.record(stream)


class _DeviceBlock:
    """Rows of one shape. ``rows``: those that are filled; ``unread``: those not read yet."""

    def __init__(self, calls: CudaCalls, stream: torch.cuda.Stream, shape: torch.Size, device: torch.device) -> None:
        self.key = stream, shape
        self._calls, self._stream = calls, stream
        self._there, here, self._copied = calls.memory((REPORTS_AT_ONCE, *shape), device)
        self._here = here
        self._room = list(self._there)
        self._values = here.numpy().reshape(REPORTS_AT_ONCE, -1)
        self.begin()

    def begin(self) -> None:
        """Empty it."""
        self.rows = self.unread = self._looks = 0
        self._is_fetched = self._is_here = False

    @property
    def is_open(self) -> bool:
        """Whether it takes another row."""
        return not self._is_fetched and self.rows < REPORTS_AT_ONCE

    def add(self, values: torch.Tensor) -> int:
        """Copy values, ``[values]`` of any dtype, on the device; return their row.

        The copy runs behind the work that computes them.
        """
        row = self.rows
        self._room[row].copy_(values)
        self.rows, self.unread = row + 1, self.unread + 1
        if self.rows == REPORTS_AT_ONCE:
            self.fetch()
        return row

    def fetch(self) -> None:
        """Begin the copy to the host, once."""
        if not self._is_fetched:
            self._is_fetched = True
            self._calls.fetch(self._here, self._there, self._copied, self._stream)

    def read(self, row: int, *, wait: bool) -> Values | None:
        """The values of a row, float32 ``[values]``; None if they are not here yet."""
        self._looks += 1
        if wait or self._looks >= REPORTS_AT_ONCE:
            self.fetch()
        if wait and not self._is_here:
            self._copied.synchronize()
        self._is_here = self._is_here or (self._is_fetched and self._copied.query())
        if not self._is_here:
            return None
        self.unread -= 1
        return self._values[row].copy()


class DeviceValues:
    """The blocks of all reports of a process: one that is being filled for each stream of CUDA."""

    def __init__(self, calls: CudaCalls) -> None:
        self._calls = calls
        self._filling: dict[torch.cuda.Stream, _DeviceBlock] = {}
        self._free: dict[tuple[torch.cuda.Stream, torch.Size], list[_DeviceBlock]] = {}

    def late(self, values: torch.Tensor) -> Late:
        """Keep values of the device, ``[values]`` of any dtype, as they are now; see ``Late``."""
        stream = self._calls.stream(values.device)
        block = self._filling.get(stream)
        if block is None or not block.is_open or block.key[1] != values.shape:
            if block is not None:
                block.fetch()
            free = self._free.get((stream, values.shape))
            block = free.pop() if free else _DeviceBlock(self._calls, stream, values.shape, values.device)
            self._filling[stream] = block
        row = block.add(values)
        found: Values | None = None

        def read(wait: bool) -> Values | None:
            nonlocal found
            if found is None:  # a second read, after an interrupt, could find other values
                found = block.read(row, wait=wait)
                if found is not None and not block.unread:
                    self._let_go(block)
            return found

        return read

    def _let_go(self, block: _DeviceBlock) -> None:
        """All values of a block were read: fill it again from its first row."""
        if self._filling.get(block.key[0]) is block:
            del self._filling[block.key[0]]
        block.begin()
        self._free.setdefault(block.key, []).append(block)


device_values = DeviceValues(CudaCalls())


def is_on_gpu(values: torch.Tensor) -> bool:
    """True if values, of any shape and dtype, are in the memory of a CUDA device."""
    return values.device.type == "cuda"


@values_of_tensor.register
def late_values(tensor: torch.Tensor) -> Late:
    """Begin to copy a tensor of any shape, dtype and device; see ``Late``."""
    values = tensor.detach()
    if is_on_gpu(values):
        return device_values.late(values)
    here: Values = np.array(values.to("cpu", torch.float32).numpy()).reshape(-1)
    return lambda _wait: here
