"""Bounds of documents in packed rows, as attention with ``cu_seqlens`` takes them."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from batchd_client.torch import varlen  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pieces_are_documents_and_what_is_left_of_each_row(dtype):
    lengths = torch.tensor([[3, 2, 0], [8, 0, 0], [0, 0, 0]], dtype=dtype)

    found = varlen(lengths, 8)

    assert found.cu_seqlens.tolist() == [0, 3, 5, 8, 16, 24]
    assert found.cu_seqlens.dtype == torch.int32
    assert found.max_seqlen == 8


def test_the_bounds_make_a_nested_tensor_of_all_elements():
    lengths = torch.tensor([[3, 2], [1, 4]], dtype=torch.int32)
    tokens = torch.arange(12).reshape(2, 6)

    nested = torch.nested.nested_tensor_from_jagged(tokens.flatten(), varlen(lengths, 6).cu_seqlens.long())

    assert [piece.tolist() for piece in nested.unbind()] == [[0, 1, 2], [3, 4], [5], [6], [7, 8, 9, 10], [11]]
