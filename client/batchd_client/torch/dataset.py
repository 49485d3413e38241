"""The stream as an ``IterableDataset`` of whole batches, for programs that must have a DataLoader. Runs in the trainer."""

from collections.abc import Iterator
from typing import Any

import torch.utils.data

from batchd_client.positions import StreamState
from batchd_client.torch.loader import BatchdLoader


class BatchdDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a ``BatchdLoader`` as a data set.

        dataset = BatchdDataset(BatchdLoader("photos"))
        loader = DataLoader(dataset, batch_size=None, num_workers=0)

    ``batch_size=None``, since batches come whole; ``num_workers=0``, since the daemon's workers do
    the work: in a worker process of a DataLoader it raises ``LoaderInWorker``. For a checkpoint ask
    the data set for its state, not the DataLoader.
    """

    def __init__(self, loader: BatchdLoader) -> None:
        super().__init__()
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Iterate the rest of the current epoch."""
        return iter(self.loader)

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """See ``BatchdLoader``."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> StreamState:
        """See ``BatchdLoader``."""
        return self.loader.state_dict()

    def load_state_dict(self, state: StreamState) -> None:
        """See ``BatchdLoader``."""
        self.loader.load_state_dict(state)
