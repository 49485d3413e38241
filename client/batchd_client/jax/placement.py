"""Batches go from the ring to JAX's devices. Runs in the trainer; see ``batchd_client.feed``.

    GPU, TPU      slot --(device_put, under way ahead of the loop)--> arrays; the batch is given back when they are there
    anything else slot --(copy)--> memory of our own --(device_put, which takes it as it is)--> arrays

On a CPU an array of JAX *is* the numpy memory that it was made of, where that is aligned, and slots
are: without the copy it would change under the loop as soon as the daemon fills the slot again. Of
other devices only those are let into the slots that are known to have memory of their own.

Invariant: a batch is held until nothing reads it, however its transfer ends. One that is cut off
before all of it is under way is only let go of and not released, since whatever JAX still reads it
holds itself.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import jax
import numpy.typing as npt

from batchd_client.batch import Batch
from batchd_client.errors import TensorsInvalid
from batchd_client.jax.arrays import host_array

HAVE_MEMORY = frozenset({"gpu", "cuda", "rocm", "tpu"})
"""The platforms whose devices read the host's memory once, into their own."""


class ArrayTarget(Protocol):
    """Where arrays go; tests have another one than ``JaxTarget``."""

    def keeps_host_memory(self) -> bool:
        """May an array there be the memory that it was made of?"""

    def put(self, local: npt.NDArray[Any]) -> Any:
        """Begin to make an array of what this process has of it."""


class JaxTarget:
    """Devices as ``sharding`` says, or JAX's default device at the time.

    Where other processes have devices of the sharding, each of ``world_size`` brings ``batch_size``
    rows of every array.
    """

    def __init__(self, sharding: jax.sharding.Sharding | None, batch_size: int, world_size: int) -> None:
        self._sharding = sharding
        self._batch_size = batch_size
        self._world_size = world_size

    @property
    def platform(self) -> str:
        """What kind of devices."""
        devices: Any = [_default_device()] if self._sharding is None else self._sharding.device_set
        return str(next(iter(devices)).platform)

    def keeps_host_memory(self) -> bool:
        """See ``ArrayTarget``."""
        kind = None if self._sharding is None else self._sharding.memory_kind
        return self.platform not in HAVE_MEMORY or kind not in {None, "device"}

    def put(self, local: npt.NDArray[Any]) -> jax.Array:
        """See ``ArrayTarget``."""
        if self._sharding is None or self._sharding.is_fully_addressable:
            return jax.device_put(local, self._sharding)
        if len(local) != self._batch_size:
            raise TensorsInvalid(
                f"this process has {len(local)} rows of a batch of {self._batch_size}, so {self._world_size} processes cannot "
                "make one array: set drop_last = true for the stream in batchd.toml"
            )
        shape = (self._batch_size * self._world_size, *local.shape[1:])
        return jax.make_array_from_process_local_data(self._sharding, local, shape)


class _JaxTransfer:
    """A batch on its way; see ``feed.Transfer``."""

    __slots__ = ("_arrays", "_batch")

    def __init__(self, batch: Batch, arrays: dict[str, Any]) -> None:
        self._batch = batch
        self._arrays = arrays

    def is_over(self) -> bool:
        """Has it arrived? Then the batch is given back. What the loop has got is not looked at: it may have been donated."""
        if not self._batch.released and all(array.is_ready() for array in self._arrays.values()):
            self._batch.release()
        return self._batch.released

    def finish(self) -> dict[str, Any]:
        """See ``feed.Transfer``. Waits until the arrays are there."""
        if not self._batch.released:
            self.wait()
        return dict(self._arrays)

    def wait(self) -> None:
        """Wait until it has arrived, and give the batch back."""
        for array in self._arrays.values():
            array.block_until_ready()
        self._batch.release()


class JaxPlacement:
    """See above."""

    def __init__(self, fields: Sequence[str], target: ArrayTarget) -> None:
        self._fields = fields
        self._target = target
        self._under_way: list[_JaxTransfer] = []

    def begin(self, batch: Batch) -> _JaxTransfer:
        """See ``feed.Placement``. Raises ``TensorsInvalid``, and what JAX raises."""
        if self._target.keeps_host_memory():
            with batch:
                local = self._local(batch, own=True)
        else:
            local = self._local(batch, own=False)
        transfer = _JaxTransfer(batch, {name: self._target.put(array) for name, array in local.items()})
        self._under_way.append(transfer)
        return transfer

    def _local(self, batch: Batch, *, own: bool) -> dict[str, npt.NDArray[Any]]:
        return {name: host_array(name, batch.room(name).array, own=own) for name in self._fields}

    def sweep(self, *, wait: bool = False) -> None:
        """See ``feed.Placement``."""
        if wait:
            for one in self._under_way:
                with suppress(jax.errors.JaxRuntimeError):  # a transfer that has failed reads nothing any more
                    one.finish()
        self._under_way = [one for one in self._under_way if not (wait or one.is_over())]

    def close(self) -> None:
        """See ``feed.Placement``."""
        self.sweep(wait=True)


def _default_device() -> Any:
    """Where ``jax.device_put`` brings what has no sharding."""
    config: Any = jax.config
    device = config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
