"""batchd in JAX: dicts of ``jax.Array``, sent to the device ahead of the loop. In the trainer.

    from batchd_client.jax import BatchdLoader

    loader = BatchdLoader("photos", sharding=sharding)      # rank and world size: JAX's processes
    for epoch in range(90):
        for batch in loader:
            state = step(state, batch["image"], batch["label"])

``batches`` is the same over a stream that the program has opened itself.

    field in the slot             array that the loop gets
    float32 [B, 224, 224, 3]  ->  float32 [B, 224, 224, 3]
    int64 [B]                 ->  int32 [B] (TensorsInvalid if a number does not fit);
                                  int64 if jax_enable_x64 is set
    int32 [B, <=128]          ->  int32 [B, 128], the whole room, with NAME_length beside it

    GPU, TPU        slot --device_put, ahead of the loop--> arrays; then the batch is released
    other platforms slot --copy--> aligned host memory --device_put, without a copy--> arrays

On a CPU, a JAX array shares the memory of an aligned numpy array, and slots are aligned. Without
the copy, the array would change as soon as the daemon refills the slot. So only devices that are
known to have memory of their own read slots directly.

Invariants: an array has the same shape in every whole batch, so ``jax.jit`` compiles once. A batch
is held until no transfer reads it. An interrupted transfer's batch is dropped and not released,
because JAX itself holds what it still reads.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from types import MappingProxyType
from typing import Any, Unpack
from weakref import WeakSet

import numpy as np

try:
    import jax
except ImportError as _error:
    raise ImportError(
        "batchd_client.jax needs JAX: pip install jax (https://docs.jax.dev/en/latest/installation.html)"
    ) from _error

from batchd_client import loader
from batchd_client.batch import Batch
from batchd_client.daemon import Connecting, Daemon, connect
from batchd_client.errors import RankInvalid, StreamTaken, TensorsInvalid
from batchd_client.prefetch import Prefetcher
from batchd_client.stream import Stream
from batchd_wire.views import Array

__all__ = ["BatchdLoader", "Batches", "batches"]

HAVE_MEMORY = frozenset({"gpu", "cuda", "rocm", "tpu"})
"""Platforms whose devices copy the host's memory into their own."""

_taken: WeakSet[Stream] = WeakSet()


class Batches(loader.Loader[dict[str, jax.Array]]):
    """Batches of a stream as dicts of ``jax.Array``; made by ``batches`` and ``BatchdLoader``.

    ``for batch in ...`` reads the rest of the current epoch; the next ``for`` reads the next epoch,
    and prefetch crosses the boundary. An array never changes, and may be donated.
    """

    def __init__(
        self,
        stream: Stream,
        sharding: jax.sharding.Sharding | None,
        fields: Sequence[str] | None,
        prefetch: int,
        daemon: Daemon | None = None,
    ) -> None:
        """``daemon``: closed together with this. Raises ``StreamTaken`` and ``TensorsInvalid``."""
        if stream in _taken:
            raise StreamTaken(f"stream {stream.name!r} already has a loader for JAX")
        self._specs = specs_for(stream, fields, sharding)
        target = JaxTarget(sharding, stream.batch_size, stream.world_size)
        super().__init__(stream.name, loader.RankShare(stream.rank, stream.world_size), f"platform={target.platform}")
        ahead = 0 if target.keeps_host_memory() else prefetch
        self._prefetcher = Prefetcher(stream, JaxPlacement(tuple(self._specs), target), ahead)
        self._opened = loader.LoaderConnection(self, self._prefetcher, daemon)
        _taken.add(stream)

    @property
    def schema(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of a whole batch of all processes, by field, for ``jax.eval_shape``."""
        return MappingProxyType(self._specs)

    def _open(self) -> Prefetcher[dict[str, jax.Array]]:
        return self._prefetcher


def batches(
    stream: Stream,
    *,
    sharding: jax.sharding.Sharding | None = None,
    prefetch: int = loader.PREFETCH,
    fields: Sequence[str] | None = None,
) -> Batches:
    """Read a stream's batches as dicts of ``jax.Array``. Call it once for all epochs.

    The stream then belongs to the returned object:

        stream = daemon.stream("photos", rank=jax.process_index(), world_size=jax.process_count())
        train = batches(stream)

    ``sharding``, ``prefetch`` and ``fields``: as for ``BatchdLoader``. Raises ``TensorsInvalid``,
    ``PrefetchInvalid``, and ``StreamTaken`` if the stream already has such a reader.
    """
    loader.check_prefetch(prefetch)
    return Batches(stream, sharding, fields, prefetch)


class BatchdLoader(Batches):
    """The stream ``stream`` of the daemon at ``address`` as dicts of ``jax.Array``, by field.

    Arrays are ``[batch, *shape]``, dtypes as in the module's table. ``sharding``: of the arrays;
    default: JAX's default device. If it has devices of other processes, each process contributes
    its rows, and the arrays span all of them. ``fields``: names, in order; default: all. A padded
    or ragged field has its whole room, with a budget that of its bucket, and ``NAME_length`` or
    ``NAME_shape`` beside it.
    ``prefetch``: most batches in transit ahead of the loop; 0 on a CPU, where nothing is
    transferred.

    ``rank`` and ``world_size``: default: ``jax.process_index()`` and ``jax.process_count()``, so
    call ``jax.distributed.initialize()`` first. ``data_parallel``: instead, where several processes
    hold the same rows: the number of groups that read different rows, each of consecutive
    processes. ``window``, ``epochs``, ``state``, ``convert``, ``batch_size``, ``set`` and
    ``define``: of ``Daemon.stream``. ``restart``: each ``for`` restarts the epoch, as validation
    needs; otherwise, after a ``break``, the next ``for`` continues where the loop stopped.
    ``connecting``: as for ``batchd_client.connect``.

    Raises what ``connect`` and ``Daemon.stream`` raise, ``PrefetchInvalid`` and ``TensorsInvalid``.
    """

    def __init__(  # noqa: PLR0913  options of a loader, each by name
        self,
        stream: str,
        *,
        address: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: int | None = None,
        sharding: jax.sharding.Sharding | None = None,
        fields: Sequence[str] | None = None,
        prefetch: int = loader.PREFETCH,
        window: int | None = None,
        epochs: int | None = None,
        state: Mapping[str, object] | None = None,
        convert: bool = False,
        batch_size: int | None = None,
        set: Mapping[str, object] | None = None,  # noqa: A002  as of Daemon.stream
        define: Mapping[str, object] | None = None,
        restart: bool = False,
        **connecting: Unpack[Connecting],
    ) -> None:
        loader.check_prefetch(prefetch)
        share = _share(rank, world_size, data_parallel)
        daemon = connect(address, **connecting)
        with ExitStack() as on_failure:
            on_failure.callback(daemon.close)
            opened = daemon.stream(
                stream,
                *share,
                window=window,
                epochs=epochs,
                state=state,
                convert=convert,
                batch_size=batch_size,
                set=set,
                define=define,
            )
            super().__init__(opened, sharding, fields, prefetch, daemon)
            on_failure.pop_all()
        self._restart = restart


def _share(rank: int | None, world_size: int | None, data_parallel: int | None) -> loader.RankShare:
    if rank is None and world_size is None:
        share = loader.RankShare(jax.process_index(), jax.process_count())
        return share if data_parallel is None else share.among(data_parallel)
    if data_parallel is not None:
        raise RankInvalid("give data_parallel, or rank and world_size: each says which share this process reads")
    return loader.find_share({}, rank, world_size)


class JaxTarget:
    """The devices of ``sharding``, or JAX's present default device.

    If the sharding has devices of other processes, each of ``world_size`` processes contributes
    ``batch_size`` rows to every array.
    """

    def __init__(self, sharding: jax.sharding.Sharding | None, batch_size: int, world_size: int) -> None:
        self._sharding = sharding
        self._batch_size = batch_size
        self._world_size = world_size

    @property
    def platform(self) -> str:
        """Platform of the devices."""
        devices: Any = [_default_device()] if self._sharding is None else self._sharding.device_set
        return str(next(iter(devices)).platform)

    def keeps_host_memory(self) -> bool:
        """True if an array may share the host memory it was made from."""
        kind = None if self._sharding is None else self._sharding.memory_kind
        return self.platform not in HAVE_MEMORY or kind not in {None, "device"}

    def put(self, local: Array) -> jax.Array:
        """Begin the transfer of this process's rows, ``[rows, ...]``, to the device.

        Returns an array of the same dtype: ``[rows of all processes, ...]`` if the sharding spans
        them, else of the same shape. Raises ``TensorsInvalid`` if a batch is too small.
        """
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
    __slots__ = ("_arrays", "_batch")

    def __init__(self, batch: Batch, arrays: dict[str, jax.Array]) -> None:
        self._batch = batch
        self._arrays: dict[str, Any] = arrays
        """``jax.Array``, whose types do not name ``is_ready`` in JAX 0.10."""

    def is_over(self) -> bool:
        """True if done. Reads no arrays of a released batch: the loop may have donated them."""
        if not self._batch.released and all(array.is_ready() for array in self._arrays.values()):
            self._batch.release()
        return self._batch.released

    def finish(self) -> dict[str, Any]:
        """See ``prefetch.Transfer``. Waits for the arrays."""
        if not self._batch.released:
            self.wait()
        return dict(self._arrays)

    def wait(self) -> None:
        """Wait for the transfer, and release the batch."""
        for array in self._arrays.values():
            array.block_until_ready()
        self._batch.release()


class JaxPlacement:
    """Copies batches to JAX's devices; see the module."""

    def __init__(self, fields: Sequence[str], target: JaxTarget) -> None:
        self._fields = fields
        self._target = target
        self._under_way: list[_JaxTransfer] = []

    def begin(self, batch: Batch) -> _JaxTransfer:
        """See ``prefetch.Placement``. Raises ``TensorsInvalid``, and what JAX raises."""
        own = self._target.keeps_host_memory()
        with batch if own else nullcontext():
            local = {name: host_array(name, batch.room(name).array, own=own) for name in self._fields}
        transfer = _JaxTransfer(batch, {name: self._target.put(array) for name, array in local.items()})
        self._under_way.append(transfer)
        return transfer

    def sweep(self, *, wait: bool = False) -> None:
        """See ``prefetch.Placement``."""
        if wait:
            for one in self._under_way:
                with suppress(jax.errors.JaxRuntimeError):  # a failed transfer reads nothing
                    one.finish()
        self._under_way = [one for one in self._under_way if not (wait or one.is_over())]

    def close(self) -> None:
        """See ``prefetch.Placement``."""
        self.sweep(wait=True)


def _default_device() -> Any:
    """The ``jax.Device`` of ``jax.device_put`` without a sharding."""
    config: Any = jax.config
    device = config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def specs_for(
    stream: Stream, fields: Sequence[str] | None, sharding: jax.sharding.Sharding | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a whole batch's arrays, in order. Raises ``TensorsInvalid``."""
    schema = stream.schema
    names = loader.checked_fields(schema, fields, as_dict=True)
    is_whole = sharding is None or sharding.is_fully_addressable
    rows = stream.batch_size if is_whole else stream.batch_size * stream.world_size
    specs = {
        name: jax.ShapeDtypeStruct((rows, *schema[name].shape), dtype_in_jax(schema[name].dtype), sharding=sharding)
        for name in names
    }
    if sharding is not None:
        _check_rows(stream, specs, sharding)
    return specs


def dtype_in_jax(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """JAX's dtype for ``dtype``: at most 32 bits unless ``jax_enable_x64`` is set."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def host_array(name: str, array: Array, *, own: bool) -> Array:
    """Prepare a field for JAX, of any shape, in JAX's dtype: the array itself, or a copy if needed.

    ``own``: always copy. Raises ``TensorsInvalid`` if a number does not fit into JAX's dtype.
    """
    dtype = dtype_in_jax(array.dtype)
    if dtype == array.dtype and not own:
        return array
    copy = loader.aligned(array.shape, dtype)
    np.copyto(copy, array, casting="unsafe")
    if dtype != array.dtype and dtype.kind in "iu" and (copy != array).any():
        raise TensorsInvalid(
            f"field {name!r} has the number {array[copy != array][0]}, which is no {dtype.name}: set jax_enable_x64, or leave "
            "the field out (fields=)"
        )
    return copy


def _check_rows(stream: Stream, specs: Mapping[str, jax.ShapeDtypeStruct], sharding: jax.sharding.Sharding) -> None:
    """Raise ``TensorsInvalid`` unless the sharding fits every batch, also a smaller last one."""
    rest = stream.samples % stream.batch_size if stream.world_size == 1 else 0
    is_even = len(stream) * stream.world_size * stream.batch_size <= stream.samples * stream.repeats
    if not is_even and not sharding.is_fully_addressable:
        raise TensorsInvalid(
            f"stream {stream.name!r} may end its epochs with a smaller batch, which {stream.world_size} processes cannot combine "
            "into one array: set drop_last = true for it in batchd.toml"
        )
    for name, spec in specs.items():
        for rows in {spec.shape[0]} if is_even or not rest else {spec.shape[0], rest}:
            try:
                sharding.shard_shape((rows, *spec.shape[1:]))
            except ValueError as error:
                remedy = (
                    "" if rows == spec.shape[0] else " (the last batch of an epoch; drop_last = true leaves it out)"
                )
                raise TensorsInvalid(f"field {name!r}, {rows} rows{remedy}: {error}") from None
