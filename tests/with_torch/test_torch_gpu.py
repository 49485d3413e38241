"""The torch loader on a real GPU: what ``test_torch_cuda`` cannot show. Skipped without one."""

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

import batchd_client  # noqa: E402
import batchd_client.torch  # noqa: E402
from batchd.core.erasing import RowErasing  # noqa: E402
from batchd.core.mixing import RowMixing  # noqa: E402
from batchd_client.erasing import erased  # noqa: E402
from batchd_client.mixing import mixed  # noqa: E402
from batchd_client.torch import BatchdLoader, varlen  # noqa: E402
from batchd_client.torch.cuda import CudaRuntime  # noqa: E402
from batchd_wire.position import Position  # noqa: E402
from support.settings import folder_stream  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here that torch can use")

EPOCHS = 20
DELAY_CYCLES = 20_000_000
"""Some ten milliseconds: longer than the daemon takes to fill a slot of the tests again."""


class DelayedRuntime(CudaRuntime):
    """CUDA with a kernel before each batch's copies that delays them."""

    def aside(self):
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(DELAY_CYCLES)
        return super().aside()


@pytest.fixture(scope="module", params=[True, False], ids=["writable slots", "read-only slots"])
def daemon(request, start_shared_daemon, photos):
    """Serve from a small ring, which is filled many times over."""
    return start_shared_daemon({"photos": folder_stream(photos)}, writable_slots=request.param)


@pytest.mark.parametrize("runtime", [CudaRuntime, DelayedRuntime], ids=["at once", "delayed"])
def test_tensors_on_the_gpu_are_the_streams_and_never_change(daemon, monkeypatch, runtime):
    """Tensors are kept while the ring is reused, and compared at the end."""
    monkeypatch.setattr(batchd_client.torch, "CudaRuntime", runtime)
    with BatchdLoader("photos", address=daemon.address, device="cuda", window=1) as loader:
        kept = [batch for _ in range(EPOCHS) for batch in loader]
        assert {tensor.device for batch in kept for tensor in batch} == {loader.device}
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=EPOCHS)
        for number, (images, labels) in enumerate(kept):
            batch = stream.take(number // len(stream))
            assert np.array_equal(images.cpu().numpy(), batch["image"].transpose(0, 3, 1, 2))
            assert np.array_equal(labels.cpu().numpy(), batch["label"])
            batch.release()


def test_a_loop_on_a_stream_of_its_own_sees_whole_tensors(daemon):
    """Any stream may be the current one when the loop takes a batch."""
    with BatchdLoader("photos", address=daemon.address, device="cuda", epochs=2) as loader:
        own = torch.cuda.Stream()
        sums = []
        with torch.cuda.stream(own):
            for _ in range(2):
                sums += [images.long().sum() for images, _ in loader]
        torch.cuda.synchronize()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        expected = [int(batch["image"].astype(np.int64).sum()) for _ in range(2) for batch in stream]
    assert [int(one) for one in sums] == expected


@pytest.mark.parametrize("fill", ["mean", "color", "noise"])
@pytest.mark.parametrize("by", ["batch", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixing_and_erasing_wait_for_nothing_and_are_the_hosts(dtype, by, fill):
    """The numbers are on the host, as a loader keeps them; the loop may be ahead of the device."""
    rows, size, classes = 16, (40, 60), 10
    for step in range(4):
        position = Position(0, step)
        mix = RowMixing(0.8, 1.0, 1.0, 0.5, by == "row", *size).numbers(1, position, rows)
        erase = RowErasing(0.5, (0.02, 0.33), (0.3, 3.3), 2, fill, *size).numbers(1, position, rows)
        drawn = {name: torch.tensor(values) for name, values in (mix._asdict() | erase._asdict()).items()}
        if fill == "mean":
            del drawn["erase_key"]
        fields = {"image": torch.randn(rows, 3, *size).to(dtype), "label": torch.arange(rows) % classes}
        there = {name: tensor.cuda() for name, tensor in fields.items()}
        torch.cuda.set_sync_debug_mode("error")
        try:
            there["image"], targets = mixed({**there, **drawn}, classes, in_place=True)
            images = erased({**there, **drawn}, in_place=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        fields["image"], soft = mixed(fields | drawn, classes)
        wanted = erased(fields | drawn)
        close = 2**-6 if dtype == torch.bfloat16 else 2**-9 if dtype == torch.float16 else 1e-6
        assert torch.allclose(images.cpu().float(), wanted.float(), rtol=close, atol=close)
        assert torch.allclose(targets.cpu(), soft)


def test_attention_over_a_packed_row_sees_one_document_at_a_time():
    """``varlen`` gives PyTorch's kernel its bounds; attention is computed for each document."""
    attend = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn").varlen_attn
    row, heads, width = 256, 2, 64
    lengths = torch.tensor([[100, 60, 96], [200, 31, 0]], dtype=torch.int32, device="cuda")
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2 * row, heads, width, dtype=torch.bfloat16, device="cuda")

    bounds, longest = varlen(lengths, row)
    together = attend(query, key, value, bounds, bounds, longest, longest)

    pieces = [slice(int(begin), int(end)) for begin, end in pairwise(bounds.tolist())]
    assert [piece.stop - piece.start for piece in pieces] == [100, 60, 96, 200, 31, 25]
    for piece in pieces:
        q, k, v = (one[piece].transpose(0, 1).float() for one in (query, key, value))
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)
        torch.testing.assert_close(together[piece].float(), alone, atol=2e-2, rtol=2e-2)
