"""Programs with a JAX loader, each in its own process, like typical users' scripts.

The tests of ``tests/with_jax`` start them.

python -m support.jax_program NAME ADDRESS [MORE...]        (the name of a function here)
"""

import os
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import batchd_client
from batchd_client.jax import BatchdLoader, batches
from support.programs import epochs_in_threads, say, say_last

warnings.simplefilter("error")


def exit_with_batches_held(address):
    """End at the end of the script; arrays, an iterator and the loader still exist."""
    iterator = iter(BatchdLoader("photos", address=address))
    kept = [next(iterator), next(iterator)]
    say_last(batches=len(kept))


def exit_with_everything_open(address):
    """Do the same with a stream and a daemon that the program has opened itself."""
    daemon = batchd_client.connect(address)
    iterator = iter(batches(daemon.stream("photos")))
    kept = [next(iterator), next(iterator)]
    say_last(batches=len(kept))


def exit_by_an_exception(address):
    """Raise an exception in the body of the loop."""
    for _batch in BatchdLoader("photos", address=address):
        say_last(batches=1)
        raise ValueError("the loss is nan")


def wait_for_interrupt(address):
    """Train until Ctrl-C, and then print the content of a checkpoint."""
    loader = BatchdLoader("photos", address=address)
    total = jax.jit(lambda images: jnp.sum(images, dtype=jnp.int32))
    trained = []
    try:
        while True:
            for batch in loader:
                total(batch["image"])
                trained.append(batch["index"].tolist())
                if len(trained) == 3:
                    say(ready=True)
    except KeyboardInterrupt:
        say_last(trained=trained, state=loader.state_dict())
    raise SystemExit(130)


def fork_and_go_on(address):
    """Fork: the child has the parent's loader, cannot use it, and disturbs no process."""
    loader = BatchdLoader("photos", address=address)
    iterator = iter(loader)
    numbers = next(iterator)["index"].tolist()
    with warnings.catch_warnings(action="ignore"):  # JAX warns of every fork
        child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except Exception as error:  # noqa: BLE001  the test says which
            say(child=type(error).__name__)
        sys.stdout.flush()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    for batch in iterator:
        numbers += batch["index"].tolist()
    say(child_status=os.waitstatus_to_exitcode(status), numbers=numbers)


def read_in_threads(address):
    """Read with several loaders in one program, each in a thread of its own."""
    say(epochs=epochs_in_threads(4, lambda: BatchdLoader("photos", address=address)))


def train_as_a_host(address, coordinator, process, processes):
    """Train as one of several processes with two devices each: global arrays, a sum over all."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(coordinator, int(processes), int(process))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    total = jax.jit(jnp.sum, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))
    loader = BatchdLoader("photos", address=address, sharding=sharding)
    for batch in loader:
        own = sorted(batch["index"].addressable_shards, key=lambda shard: shard.index[0].start)
        say(
            numbers=np.concatenate([shard.data for shard in own]).tolist(),
            first_row=own[0].index[0].start,
            shape=batch["image"].shape,
            total=int(total(batch["index"])),
            schema=list(loader.schema["image"].shape),
            state=loader.state_dict(),
        )
    try:
        BatchdLoader("uneven", address=address, sharding=sharding)
    except batchd_client.BatchdClientError as error:
        say(error=type(error).__name__, text=str(error))
    loader.close()
    jax.distributed.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
