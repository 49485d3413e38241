"""Programs with a torch loader, each in its own process, like typical users' scripts.

For ``tests/with_torch``.

python -m support.torch_program NAME ADDRESS [MORE...]        (the name of a function here)
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from batchd_client.errors import BatchdClientError
from batchd_client.torch import BatchdDataset, BatchdLoader
from support.programs import say, say_last


def exit_with_batches_held(address):
    """End at the end of the script; tensors, an iterator and the loader still exist."""
    loader = BatchdLoader("photos", address=address)
    iterator = iter(loader)
    kept = [next(iterator), next(iterator)]
    say_last(batches=len(kept))


def exit_by_an_exception(address):
    """Raise an exception in the body of the loop."""
    for _images, _labels in BatchdLoader("photos", address=address):
        say_last(batches=1)
        raise ValueError("the loss is nan")


def wait_for_interrupt(address):
    """Train until Ctrl-C, and then print the content of a checkpoint."""
    loader = BatchdLoader("photos", address=address, as_dict=True)
    trained = []
    try:
        for epoch in range(1_000_000):
            loader.set_epoch(epoch)
            for batch in loader:
                trained.append(batch["index"].tolist())
                if len(trained) == 3:
                    say(ready=True)
    except KeyboardInterrupt:
        say_last(trained=trained, state=loader.state_dict())
    raise SystemExit(130)


def fork_and_go_on(address):
    """Fork: the child has the parent's loader, cannot use it, and disturbs no process."""
    loader = BatchdLoader("photos", address=address, as_dict=True)
    iterator = iter(loader)
    numbers = next(iterator)["index"].tolist()
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except Exception as error:  # noqa: BLE001  the test says which
            say(child=type(error).__name__)
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    for batch in iterator:
        numbers += batch["index"].tolist()
    say(child_status=os.waitstatus_to_exitcode(status), numbers=numbers)


def read_in_a_worker(address, context):
    """Give a DataLoader a worker of its own."""
    dataset = BatchdDataset(BatchdLoader("photos", address=address))
    through = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context)
    try:
        next(iter(through))
    except BatchdClientError as error:
        say(error=type(error).__name__, text=str(error))


def train_as_a_rank(address, checkpoint, epochs, die_at):
    """Train as one rank under torchrun: read, synchronise, save at the same step; or die."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    file = Path(checkpoint)
    state = json.loads(file.read_text()) if file.exists() else None
    loader = BatchdLoader("photos", address=address, as_dict=True, state=state, epochs=int(epochs))
    step = 0
    for epoch in range(loader.epoch, int(epochs)):
        loader.set_epoch(epoch)
        for batch in loader:
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            assert total.item() == torch.distributed.get_world_size()
            say(rank=rank, epoch=epoch, numbers=batch["index"].tolist(), state=loader.state_dict())
            if rank == 0:
                file.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
                file.with_suffix(".new").replace(file)
            torch.distributed.barrier()
            step += 1
            if rank == 1 and step == int(die_at):
                os.kill(os.getpid(), signal.SIGKILL)
    loader.close()
    torch.distributed.destroy_process_group()


def read_as_a_mesh(address):
    """Say which share each way of naming the data-parallel groups gives, and what a rank reads."""
    torch.distributed.init_process_group("gloo")
    outer, inner = (init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in (("dp", "tp"), ("tp", "dp")))
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    groups = {"outer": outer["dp"], "inner": inner["dp"], "whole": whole["dp_replicate", "dp_shard"], "two": 2}
    shares, numbers = {}, []
    for name, group in groups.items():
        with BatchdLoader("photos", address=address, as_dict=True, data_parallel=group, epochs=1) as loader:
            shares[name] = loader.stream.rank, loader.stream.world_size
            if name == "outer":
                numbers += [number for batch in loader for number in batch["index"].tolist()]
    try:
        BatchdLoader("photos", address=address, data_parallel=3)
    except BatchdClientError as error:
        shares["three"] = str(error)
    say(rank=torch.distributed.get_rank(), shares=shares, numbers=numbers)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
