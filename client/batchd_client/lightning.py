"""batchd in Lightning: streams in place of a LightningDataModule. Needs Lightning 2.2 or newer.

    from batchd_client.lightning import BatchdDataModule

    data = BatchdDataModule("photos", val="photos-val", normalize=(MEAN, STD))
    trainer.fit(model, datamodule=data)

Runs in the trainer. Lightning asks a training loader for its state when it writes a checkpoint, and
returns it before the first batch. It announces the epoch by ``loader.sampler.set_epoch``, after
``iter`` and before the first ``next``.

Invariant: training reads epoch E of the stream in Lightning's epoch E, however much of the previous
epoch was left. All other stages read epoch 0 from its beginning each time, so that their figures
are comparable.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from batchd_client.torch import BatchdLoader

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule
else:
    try:
        if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
            # The program uses this one of the two packages.
            from pytorch_lightning import LightningDataModule
        else:
            from lightning.pytorch import LightningDataModule
    except ImportError:
        try:
            from pytorch_lightning import LightningDataModule
        except ImportError as _error:
            raise ImportError(
                "batchd_client.lightning needs Lightning 2.2 or newer: pip install lightning (or pytorch-lightning)"
            ) from _error

__all__ = ["BatchdDataModule", "StageLoader", "TrainingLoader"]

Streams = str | Sequence[str] | None


class StageLoader:
    """Loader of a stage: reads epoch 0 from its beginning each time; connects at its first use."""

    _epoch: int | None = 0

    def __init__(self, connect: Callable[[Mapping[str, object] | None], BatchdLoader]) -> None:
        self._connect = connect
        self._opened: BatchdLoader | None = None
        self._state: Mapping[str, object] | None = None

    @property
    def loader(self) -> BatchdLoader:
        """The loader: classes, schema, statistics. Connects; raises as ``BatchdLoader``."""
        if self._opened is None:
            self._opened = self._connect(self._state)
        return self._opened

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate an epoch, which is fixed at the first batch."""
        loader = self.loader
        if self._epoch is not None:
            loader.set_epoch(self._epoch)
        yield from loader

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._state = opened.state_dict()
            opened.close()


class TrainingLoader(StageLoader):
    """Loader for training: reads the epoch that Lightning sets. ``close`` keeps its state."""

    _epoch = None

    @property
    def sampler(self) -> "TrainingLoader":
        """The object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``for`` read this epoch."""
        self._epoch = epoch

    def state_dict(self) -> Mapping[str, object]:
        """See ``BatchdLoader``."""
        if self._opened is None and self._state is not None:
            return self._state
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See ``BatchdLoader``."""
        self.loader.load_state_dict(state)


class BatchdDataModule(LightningDataModule):
    """Streams of a batchd daemon for the stages of a ``Trainer``.

    ``train``, ``val``, ``test``, ``predict``: names of streams; several names give the stage
    several loaders. ``options`` are those of ``BatchdLoader``, for every stage; the trainer sets
    ``rank`` and ``world_size``. On GPUs ``device`` is the trainer's own, so Lightning need not move
    batches.

    A checkpoint of the trainer has the position; ``trainer.fit(..., ckpt_path=...)`` continues with
    the next batch. Within an epoch that needs the same number of ranks, as Lightning counts the
    batches of a rank.
    """

    def __init__(
        self, train: Streams = None, val: Streams = None, test: Streams = None, predict: Streams = None, **options: Any
    ) -> None:
        super().__init__()
        self._options = options
        self._loaders: dict[str, list[StageLoader]] = {}
        for stage, streams in {"train": train, "val": val, "test": test, "predict": predict}.items():
            # Otherwise Lightning's own method stays, by which it knows that there is none.
            if streams is not None:
                setattr(self, f"{stage}_dataloader", partial(self._make, stage, streams))

    def teardown(self, stage: str) -> None:  # noqa: ARG002  Lightning's own signature
        """Close all loaders; checkpoints may still be written."""
        for loaders in self._loaders.values():
            _close(loaders)

    def _make(self, stage: str, streams: str | Sequence[str]) -> StageLoader | list[StageLoader]:
        """Make the loaders of a stage, in place of its old ones: ``train_dataloader`` and so on."""
        _close(self._loaders.get(stage, ()))
        loaders = [self._loader(stage, name) for name in ([streams] if isinstance(streams, str) else streams)]
        self._loaders[stage] = loaders
        return loaders[0] if isinstance(streams, str) else loaders

    def _loader(self, stage: str, stream: str) -> StageLoader:
        trainer: Any = self.trainer  # overfit_batches is set where type checkers do not see it
        options = dict(self._options)
        if trainer is not None and "data_parallel" not in options:
            # A tensor-parallel strategy has fewer shares of the data than processes, and says so
            # here.
            shares = trainer.distributed_sampler_kwargs or {}
            options["rank"] = shares.get("rank", trainer.global_rank)
            options["world_size"] = shares.get("num_replicas", trainer.world_size)
        if trainer is not None and trainer.strategy.root_device.type == "cuda":
            options.setdefault("device", trainer.strategy.root_device)
        if stage == "train" and not (trainer is not None and trainer.overfit_batches):
            return TrainingLoader(lambda state: BatchdLoader(stream, state=state, **options))
        options.update(restart=True, epochs=1)
        return StageLoader(lambda state: BatchdLoader(stream, state=state, **options))


def _close(loaders: Sequence[StageLoader]) -> None:
    for loader in loaders:
        loader.close()
