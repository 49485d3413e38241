"""A LightningModule that learns nothing and remembers what it was given.

For tests of the data module.
"""

# ruff: noqa: ARG002  hooks have the signatures that Lightning calls them with

import os

import torch
from lightning.pytorch import Callback, LightningModule


class Witness(LightningModule):
    """Remembers the samples of each batch, by stage and epoch, in order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []
        self.evaluated = []

    def training_step(self, batch, batch_idx):
        """A loss that depends on a parameter."""
        self.seen.append((self.current_epoch, batch["index"].tolist()))
        return (self.weight * batch["image"].float().mean()).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        """Remember it."""
        self.evaluated.append(batch["index"].tolist())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        """The numbers themselves."""
        return batch["index"]

    def configure_optimizers(self):
        """One that does something."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(Callback):
    """Write a checkpoint after so many batches of the training."""

    def __init__(self, batches, file):
        self.batches = batches
        self.file = file

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """As ``ModelCheckpoint(every_n_train_steps=)`` does."""
        if trainer.global_step == self.batches:
            trainer.save_checkpoint(self.file)


class StopAfter(SaveAfter):
    """Die after so many batches of the training, as a killed job does.

    Before it, write what it takes to go on.
    """

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Some batches after the checkpoint, so that those are read again."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step == self.batches + 1:
            raise InterruptedError(os.getpid())
