"""Losses of torch's tensors reach the daemon as they were when they were reported."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from batchd.history.losses import from_pages  # noqa: E402
from batchd_client.asking import ask_reports, asking  # noqa: E402
from batchd_client.batch import BatchRows  # noqa: E402
from batchd_client.errors import ReportInvalid  # noqa: E402
from batchd_client.reports import Reports  # noqa: E402
from batchd_client.torch import BatchdLoader  # noqa: E402

ROWS = BatchRows(0, 0, 0, 4)
DELAY_CYCLES = 2_000_000_000
"""Some second."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


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


@needs_gpu
def test_the_loop_does_not_wait_for_a_gpu() -> None:
    """A report of work in progress is sent later, and has the value of its time.

    The first report of a process takes page-locked memory, for which CUDA waits.
    """
    loss, first, reports = torch.arange(4, device="cuda"), Reports("photos"), Reports("photos")
    first.add(loss, ROWS)
    torch.cuda.synchronize()
    assert sent(first) == [[0, 1, 2, 3]]

    torch.cuda._sleep(DELAY_CYCLES)
    loss += 1
    reports.add(loss, ROWS)
    assert sent(reports) == []
    loss.zero_()
    torch.cuda.synchronize()

    assert sent(reports) == [[1, 2, 3, 4]]
