"""One rank of a program with Hugging Face's accelerate or Trainer on the CPU.

Started by the tests of ``tests/with_torch``.

python -m support.accelerate_program NAME ADDRESS [MORE...]        (the name of a function here)
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from batchd_client.torch import BatchdDataset, BatchdLoader
from support.programs import say


def numbers(batches):
    """The samples of batches, in their order."""
    return [number for batch in batches for number in batch["index"].tolist()]


def loader_given_to_prepare(address, folder):
    """Prepare our loader, as the documentation recommends; save a checkpoint inside the epoch."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = BatchdLoader("photos", address=address, as_dict=True, device=accelerator.device)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    seen = []
    for step, batch in enumerate(prepared):
        loss = model(batch["label"].float().unsqueeze(1)).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch)
        if step == 0:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    told = {"seen": numbers(seen), "rest": numbers(seen[1:]), "after": numbers(prepared)}
    say(rank=accelerator.process_index, same=prepared is loader, **told)
    accelerator.end_training()


def data_loader_left_out(address):
    """Use a DataLoader that is not prepared."""
    accelerator = Accelerator(cpu=True)
    dataset = BatchdDataset(BatchdLoader("photos", address=address, as_dict=True))
    say(rank=accelerator.process_index, seen=numbers(DataLoader(dataset, batch_size=None)))
    accelerator.end_training()


def data_loader_prepared(address, dispatch):
    """Prepare a DataLoader, which the documentation advises against."""
    dispatch_batches = {"unsaid": None, "false": False}[dispatch]
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch_batches))
    dataset = BatchdDataset(BatchdLoader("photos", address=address, as_dict=True))
    try:
        prepared = accelerator.prepare(DataLoader(dataset, batch_size=None))
        say(rank=accelerator.process_index, seen=numbers(prepared))
    except TypeError as error:
        say(rank=accelerator.process_index, error=str(error))
    accelerator.end_training()


def train_with_trainer(address, folder, die_at):
    """Run ``transformers.Trainer`` over two epochs; from its last checkpoint, if there is one."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415  it takes seconds to load
    from transformers.trainer_utils import get_last_checkpoint  # noqa: PLC0415  the same

    class Model(torch.nn.Module):
        """Records the samples of each step."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)
            self.seen = []

        def forward(self, pixel_values, labels, index):
            self.seen.append(index.tolist())
            logits = self.linear(pixel_values.mean((2, 3)))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Position(TrainerCallback):
        """Write the position beside each checkpoint, and exit after ``die_at`` steps."""

        def on_save(self, args, state, control, **_):  # noqa: ARG002
            file = Path(args.output_dir, f"checkpoint-{state.global_step}", "batchd.json")
            file.write_text(json.dumps(loader.state_dict()))

        def on_step_end(self, args, state, control, **_):  # noqa: ARG002
            if state.global_step == int(die_at):
                raise InterruptedError

    class PhotoTrainer(Trainer):
        """A trainer that reads our loader."""

        def get_train_dataloader(self):
            return loader

    def named(batch):
        return {"pixel_values": batch["image"], "labels": batch["label"], "index": batch["index"]}

    Path(folder).mkdir(exist_ok=True)
    last = get_last_checkpoint(folder)
    arguments = TrainingArguments(
        folder,
        num_train_epochs=2,
        save_steps=3,
        ignore_data_skip=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    loader = BatchdLoader(
        "photos",
        address=address,
        as_dict=True,
        dtype=torch.float32,
        device=arguments.device,
        transform=named,
        state=json.loads(Path(last, "batchd.json").read_text()) if last else None,
    )
    model = Model()
    trainer = PhotoTrainer(model, arguments, callbacks=[Position()])
    with suppress(InterruptedError):
        trainer.train(resume_from_checkpoint=last)
    say(rank=arguments.process_index, seen=model.seen, steps=trainer.state.global_step)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
