"""batchd in PyTorch, in place of a DataLoader. Runs in the trainer; needs torch 2.4 or newer.

    from batchd_client.torch import BatchdLoader

    loader = BatchdLoader("photos", device="cuda")     # rank and world size from torchrun or Slurm
    for epoch in range(90):
        for images, labels in loader:                  # tensors on the device; images [B, C, H, W]
            ...

``BatchdDataset`` is the same as an ``IterableDataset``, for programs that must have a
``DataLoader``.
"""

try:
    import torch as _torch  # noqa: F401  imported first, so that its absence is reported with a remedy
except ImportError as _error:
    raise ImportError(
        "batchd_client.torch needs PyTorch: pip install torch (https://pytorch.org/get-started)"
    ) from _error

from batchd_client.torch.loader import BatchdDataset, BatchdLoader
from batchd_client.torch.tensors import TensorSchema

__all__ = ["BatchdDataset", "BatchdLoader", "TensorSchema"]
