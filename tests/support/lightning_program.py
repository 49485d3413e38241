"""Two ranks of Lightning's DDP on the CPU, started by a test.

python -m support.lightning_program ADDRESS CHECKPOINT [SAVE_AFTER]

With SAVE_AFTER, train from the beginning and write the checkpoint after so many batches; without
it, resume from the checkpoint.
"""

import json
import sys

from lightning.pytorch import Trainer

from batchd_client.lightning import BatchdDataModule
from support.lightning_model import SaveAfter, Witness


def main(address, checkpoint, save_after=None):
    """Run one rank; the trainer starts the other."""
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if save_after is None else [SaveAfter(int(save_after), checkpoint)],
    )
    model = Witness()
    data = BatchdDataModule("photos", address=address, as_dict=True)
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint if save_after is None else None)
    sys.stdout.write(json.dumps({"rank": trainer.global_rank, "seen": model.seen}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
