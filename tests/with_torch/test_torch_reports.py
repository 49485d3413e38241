"""Losses of torch's tensors reach the daemon as they were when they were reported."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from batchd.commands.history.losses import from_pages  # noqa: E402
from batchd_client.asking import ask_reports, asking  # noqa: E402
from batchd_client.batch import BatchRows  # noqa: E402
from batchd_client.errors import ReportInvalid  # noqa: E402
from batchd_client.reports import Reports  # noqa: E402
from batchd_client.torch import BatchdLoader  # noqa: E402
from batchd_client.torch import reports as module  # noqa: E402
from batchd_client.torch.reports import REPORTS_AT_ONCE, DeviceValues  # noqa: E402

ROWS = BatchRows(0, 0, 0, 4)
DELAY_CYCLES = 2_000_000_000
"""Some second."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class CountedCopies(TorchDispatchMode):
    """Counts the operations that write to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, _types, arguments=(), options=None):
        self.number += function._schema.is_mutable
        return function(*arguments, **(options or {}))


def sent(reports: Reports) -> list[list[float]]:
    part = reports.next_part(ROWS.__class__) or []
    return [np.frombuffer(values, "<f4").tolist() for *_rows, values in part]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_reports_the_batch_of_its_loop(start_daemon, prefetch) -> None:
    """Not those in transit; the last one is sent when the loader closes."""
    daemon = start_daemon()
    with BatchdLoader("photos", address=daemon.address, prefetch=prefetch) as loader:
        for step, (_images, labels) in enumerate(loader):
            loader.report(labels + 100 * step)
        loader.report(-1.0, at=(0, 1))
    with asking(daemon.address) as session:
        (losses,) = from_pages(ask_reports(session, "photos")).values()

    assert [losses.position(one) for one in range(len(losses))] == [(0, step) for step in range(5)]
    assert losses.of(1).tolist() == [-1]
    assert all((losses.of(step) // 100 == step).all() for step in (0, 2, 3, 4))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64"])
def test_tensors_of_any_type_are_taken_with_their_gradient(dtype) -> None:
    """A later change of the tensor changes nothing."""
    values = torch.arange(4).to(getattr(torch, dtype))
    if values.is_floating_point():
        values.requires_grad_()
    reports = Reports("photos")
    reports.add(values, ROWS)
    values.detach().zero_()

    assert sent(reports) == [[0, 1, 2, 3]]


def test_a_tensor_of_a_wrong_size_is_refused_at_once() -> None:
    """Without a look at its values."""
    with pytest.raises(ReportInvalid, match="3 values for the 4 rows"):
        Reports("photos").add(torch.zeros(3, device="meta"), ROWS)


class LateCuda:
    """A stand-in for CUDA on tensors of the host: copies to the host are made by ``finish``."""

    def __init__(self) -> None:
        self.present_stream = "main"
        self.fetches: list[tuple[str, list[Any]]] = []
        """For each copy that was begun: its stream of CUDA, and what makes it."""
        self.memories = 0

    def stream(self, _device):
        return self.present_stream

    def memory(self, shape, _device):
        self.memories += 1
        return torch.full(shape, -1.0), torch.full(shape, -2.0), LateEvent(self)

    def fetch(self, here, there, copied, stream):
        copied.is_over = False
        self.fetches.append((stream, [here, there.clone(), copied]))

    def finish(self) -> None:
        """Make all copies."""
        for _stream, pieces in self.fetches:
            while pieces:
                copied, values, here = pieces.pop(), pieces.pop(), pieces.pop()
                here.copy_(values)
                copied.is_over = True


class LateEvent:
    """The end of a copy."""

    def __init__(self, cuda: LateCuda) -> None:
        self._cuda, self.is_over = cuda, False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self._cuda.finish()


@pytest.fixture
def cuda() -> LateCuda:
    """Make a device whose copies are late."""
    return LateCuda()


@pytest.fixture
def device(cuda) -> DeviceValues:
    """Make the blocks of that device."""
    return DeviceValues(cuda)


def whole(reads: list[Any]) -> list[list[float]]:
    """Return the values that have arrived."""
    return [found.tolist() for read in reads if (found := read(False)) is not None]


@pytest.mark.thorough
def test_reports_of_a_device_go_to_the_host_together(cuda, device) -> None:
    """Each is one copy on the device: a static tensor is overwritten by the next step."""
    loss, reads = torch.zeros(2), []
    for step in range(REPORTS_AT_ONCE):
        assert not cuda.fetches
        loss.fill_(step)
        with CountedCopies() as copies:
            reads.append(device.late(loss))
        assert copies.number == 1
    assert len(cuda.fetches) == 1
    assert whole(reads) == []
    loss.zero_()
    cuda.finish()
    assert whole(reads) == [[step, step] for step in range(REPORTS_AT_ONCE)]


def test_the_memory_of_reports_is_used_again_once_all_were_read(cuda, device) -> None:
    """A block with an unread value is not; a value that was read stays what it was."""
    for turn in range(4):
        reads = [device.late(torch.tensor(float(turn))) for _ in range(REPORTS_AT_ONCE)]
        cuda.finish()
        assert whole(reads) == [[turn]] * REPORTS_AT_ONCE
        assert whole(reads) == [[turn]] * REPORTS_AT_ONCE
    assert cuda.memories == 1
    [device.late(torch.tensor(0.0)) for _ in range(REPORTS_AT_ONCE)]
    device.late(torch.tensor(0.0))
    assert cuda.memories == 2


def test_a_report_of_another_shape_or_stream_does_not_delay_the_earlier_ones(cuda, device) -> None:
    """Its block goes to the host at once, on its own stream of CUDA."""
    batch, short = device.late(torch.ones(4)), device.late(torch.ones(3))
    assert [stream for stream, _pieces in cuda.fetches] == ["main"]
    cuda.present_stream = "side"
    aside = device.late(torch.ones(3))
    assert [stream for stream, _pieces in cuda.fetches] == ["main"], "each stream has a block of its own"
    cuda.finish()
    assert whole([batch, short, aside]) == [[1, 1, 1, 1]]
    assert aside(True).tolist() == [1, 1, 1]
    assert short(True).tolist() == [1, 1, 1]
    assert sorted(stream for stream, _pieces in cuda.fetches) == ["main", "main", "side"]


def test_few_reports_arrive_after_some_pulls(cuda, device, monkeypatch) -> None:
    """A loop that reports now and then does not wait for a full block."""
    monkeypatch.setattr(module, "device_values", device)
    monkeypatch.setattr(module, "is_on_gpu", lambda _values: True)
    reports = Reports("photos")
    reports.add(torch.arange(4), ROWS)
    for _pull in range(REPORTS_AT_ONCE):
        assert sent(reports) == []
    assert len(cuda.fetches) == 1
    cuda.finish()
    assert sent(reports) == [[0, 1, 2, 3]]


def test_close_waits_for_a_block_that_is_not_full(device, monkeypatch) -> None:
    """Gradients and other types are taken as of tensors of the host."""
    monkeypatch.setattr(module, "device_values", device)
    monkeypatch.setattr(module, "is_on_gpu", lambda _values: True)
    reports = Reports("photos")
    reports.add(torch.arange(4.0, dtype=torch.float64, requires_grad=True), ROWS)
    with torch.inference_mode():
        reports.add(torch.arange(4) + 1, BatchRows(0, 1, 0, 4))
    reports.wait()
    assert sent(reports) == [[0, 1, 2, 3], [1, 2, 3, 4]]


@needs_gpu
def test_the_loop_does_not_wait_for_a_gpu() -> None:
    """A report of work in progress is sent later, and has the value of its time.

    The first report of a process takes page-locked memory, for which CUDA waits.
    """
    loss, first, reports = torch.arange(4, device="cuda"), Reports("photos"), Reports("photos")
    first.add(loss, ROWS)
    first.wait()
    assert sent(first) == [[0, 1, 2, 3]]

    torch.cuda._sleep(DELAY_CYCLES)
    loss += 1
    reports.add(loss, ROWS)
    for _look in range(REPORTS_AT_ONCE):
        assert sent(reports) == []
    loss.zero_()
    torch.cuda.synchronize()

    assert sent(reports) == [[1, 2, 3, 4]]
