"""A LightningModule that learns nothing and records its batches.

For tests of the data module.
"""

# ruff: noqa: ARG002  hooks have the signatures that Lightning calls them with

import os

import torch
from lightning.pytorch import Callback, LightningModule


class Witness(LightningModule):
    """A module that records the samples of each batch, by stage and epoch, in order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []
        self.evaluated = []

    def training_step(self, batch, batch_idx):
        """Return a loss that depends on a parameter."""
        self.seen.append((self.current_epoch, batch["index"].tolist()))
        return (self.weight * batch["image"].float().mean()).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        """Record the batch."""
        self.evaluated.append(batch["index"].tolist())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        """Return the sample numbers themselves."""
        return batch["index"]

    def configure_optimizers(self):
        """Return an optimizer that changes the parameter."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(Callback):
    """A callback that writes a checkpoint after so many batches of the training."""

    def __init__(self, batches, file):
        self.batches = batches
        self.file = file

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Save, like ``ModelCheckpoint(every_n_train_steps=)``."""
        if trainer.global_step == self.batches:
            trainer.save_checkpoint(self.file)


class StopAfter(SaveAfter):
    """A callback that dies after so many batches of the training, like a killed job.

    Before that, it writes a checkpoint to continue from.
    """

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Die some batches after the checkpoint, so that those are read again."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step == self.batches + 1:
            raise InterruptedError(os.getpid())
