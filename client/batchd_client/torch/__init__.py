"""batchd in PyTorch, in place of a DataLoader. Runs in the trainer; needs torch 2.4 or newer.

    from batchd_client.torch import BatchdLoader

    loader = BatchdLoader("photos", device="cuda")     # rank and world size from torchrun or Slurm
    for epoch in range(90):
        for images, labels in loader:                  # tensors on the device; images [B, C, H, W]
            ...

``BatchdDataset`` is the same as an ``IterableDataset``, for programs that must have a
``DataLoader``.

Invariant: ``state_dict`` counts the batches that the loop has received, not those in transit.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

try:
    import torch
except ImportError as _error:
    raise ImportError(
        "batchd_client.torch needs PyTorch: pip install torch (https://pytorch.org/get-started)"
    ) from _error
import torch.distributed
import torch.utils.data

from batchd_client.daemon import Connecting, connect
from batchd_client.erasing import ERASE_FIELDS, check_erasable, erase_fields, erased
from batchd_client.errors import LoaderInWorker, RankInvalid
from batchd_client.loader import (
    ALONE,
    PREFETCH,
    Loader,
    LoaderConnection,
    RankShare,
    check_prefetch,
    checked_fields,
    find_share,
)
from batchd_client.mixing import MIX_FIELDS, Mixing, classes_of, fields_read, mixed
from batchd_client.prefetch import Prefetcher
from batchd_client.subscription import StreamState
from batchd_client.torch.cuda import CudaPlacement, CudaRuntime, needs_writable
from batchd_client.torch.tensors import HOST, HostPlacement, ImageLayout, Recipe, Tensors, TensorSchema, recipes_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["BatchdDataset", "BatchdLoader", "TensorSchema", "Varlen", "varlen"]


class Varlen(NamedTuple):
    """Arguments of attention over documents of different length; see ``varlen``."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


def varlen(lengths: torch.Tensor, length: int) -> Varlen:
    """Return the bounds of the documents in packed rows, for attention that keeps them apart.

    ``lengths``: the field of this name, whole numbers ``[rows, documents]``; ``length``: of a row.
    ``cu_seqlens``: int32 ``[pieces + 1]`` on the same device, for the rows as one sequence of
    ``rows * length`` elements. A piece is a document, or what is left of a row after its last one.
    """
    rests = length - lengths.sum(1, keepdim=True)
    pieces = torch.cat([lengths, rests], 1).flatten()
    pieces = pieces[pieces > 0]
    ends = pieces.cumsum(0, dtype=torch.int32)
    return Varlen(torch.nn.functional.pad(ends, (1, 0)), int(pieces.max()))


class BatchdLoader(Loader[Any]):
    """Batches of a stream as tensors. ``for images, labels in loader`` reads the rest of the epoch.

    ``device``: the device of the tensors; "cuda" is the current device. On a GPU, up to
    ``prefetch`` batches are in transit ahead of the loop. ``as_dict``: give dicts instead of
    tuples. ``fields``: names, in order; default: all, in tuples without ``index``.

    Images are ``[B, C, H, W]``: fields of shape [height, width, 1, 3 or 4], or those named in
    ``images``. ``dtype``: dtype of images; default: the stream's. ``normalize=(mean, std)``, a
    number for each channel: ``(x / 255 - mean) / std``, float32 unless ``dtype`` is given.
    ``channels_last``: give images in that memory format, which saves a pass over them. Other fields
    keep the dtype and shape of ``Stream.schema``; a ragged field is a list of tensors.
    ``mix``: apply the mixup and cutmix of a stream with ``mix``, on the device; labels become
    float32 ``[B, classes]``. A ``Mixing`` says how many classes there are, and smooths labels.
    ``erase``: cover parts of images, in a stream with ``erase``, on the device, after ``normalize``
    and ``mix``; a name is that of the images, True is "image". The loop does not get the numbers of
    either. ``transform``: called with each item, on the device; the loop gets what it returns.

    ``rank`` and ``world_size``: default: those of torch.distributed if it is initialised, else of
    torchrun, Slurm or mpirun. ``data_parallel``: instead, where several ranks compute one model (by
    tensor, pipeline or context parallelism): the part of a device mesh over which data are split,
    such as ``mesh["dp"]``, or the number of such groups, each of consecutive ranks. ``window``,
    ``epochs``, ``state``, ``convert``, ``batch_size``, ``set`` and ``define``: as for
    ``Daemon.stream``. ``restart``: each ``for`` restarts the epoch, as validation needs; otherwise,
    after a ``break``, the next ``for`` continues where the loop stopped. ``connecting``: as for
    ``batchd_client.connect``.

    Raises what ``connect`` and ``Daemon.stream`` raise, ``PrefetchInvalid`` and ``TensorsInvalid``.
    """

    def __init__(  # noqa: PLR0913  options of a loader, each by name
        self,
        stream: str,
        *,
        address: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        data_parallel: "int | DeviceMesh | None" = None,
        device: torch.device | str = "cpu",
        fields: Sequence[str] | None = None,
        images: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        channels_last: bool = False,
        as_dict: bool = False,
        mix: Mixing | bool = False,
        erase: bool | str = False,
        transform: Callable[[Any], Any] | None = None,
        prefetch: int = PREFETCH,
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
        check_prefetch(prefetch)
        share, self._wanted_device = _share(rank, world_size, data_parallel), torch.device(device)
        super().__init__(stream, share, f"device={self._wanted_device}", restart=restart)
        self._connect_daemon = partial(connect, address, **connecting)
        self._window, self._epochs, self._state, self._convert = window, epochs, state, convert
        self._batch_size, self._set, self._define = batch_size, set, define
        self._fields, self._layout = fields, ImageLayout(images, dtype, normalize, channels_last)
        self._as_dict, self._transform, self._prefetch = as_dict, transform, prefetch
        self._mixing = Mixing() if mix is True else mix or None
        self._erase = "image" if erase is True else erase or None
        self._recipes: tuple[Recipe, ...] = ()
        self._classes = 0
        self._open()

    # --- what it is -------------------------------------------------------------------------------

    @property
    def schema(self) -> Mapping[str, TensorSchema]:
        """Dtype and shape, of one sample, of the tensors by field, before ``transform``."""
        self._open()
        schema = {recipe.name: recipe.schema for recipe in self._recipes}
        if self._mixing is not None:
            schema[self._mixing.label] = TensorSchema(torch.float32, (self._classes,), None)
        return MappingProxyType(schema)

    @property
    def device(self) -> torch.device:
        """The device of the tensors, with its number."""
        self._open()
        return self._device

    # --- taking batches ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Rest of the epoch. Raises what iterating a ``Stream`` raises, and ``LoaderInWorker``."""
        if torch.utils.data.get_worker_info() is not None:
            raise LoaderInWorker
        return super().__iter__()

    # --- its life ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the options and the position; the unpickled loader connects at its first use."""
        state = vars(self) | {"_opened": None, "_recipes": ()}
        return state if self._opened is None else state | {"_state": self._opened.prefetcher.state_dict()}

    def _open(self) -> Prefetcher[Any]:
        """See ``Loader``. Connects when the loader is made, and after unpickling."""
        if self._opened is None:
            self._check_open()
            self._opened = self._connect()
        return self._opened.prefetcher

    def _connect(self) -> LoaderConnection[Any]:
        runtime = CudaRuntime(self._wanted_device) if self._wanted_device.type == "cuda" else None
        self._device = self._wanted_device if runtime is None else runtime.device
        daemon = self._connect_daemon(writable_slots=runtime is not None and needs_writable(runtime))
        as_dict, transform, mixing, erase = self._as_dict, self._transform, self._mixing, self._erase
        with ExitStack() as on_failure:
            on_failure.callback(daemon.close)
            stream = daemon.stream(
                self._name,
                *self._share,
                window=self._window,
                epochs=self._epochs,
                state=self._state,
                convert=self._convert,
                batch_size=self._batch_size,
                set=self._set,
                define=self._define,
            )
            names = shown = checked_fields(stream.schema, self._fields, as_dict=as_dict)
            classes, numbers = 0, tuple[str, ...]()
            if mixing is not None:
                shown = tuple(name for name in names if name not in MIX_FIELDS)
                names, numbers = fields_read(stream.schema, shown, mixing)
                classes = self._classes = classes_of(mixing, stream.classes, stream.schema[mixing.label].shape)
            if erase is not None:
                shown = tuple(name for name in shown if name not in ERASE_FIELDS)
                names = tuple(dict.fromkeys((*(name for name in names if name not in ERASE_FIELDS), erase)))
                numbers += erase_fields(stream.schema, erase)
            # the events of batches follow it there
            with nullcontext() if runtime is None else runtime.aside():
                self._recipes = recipes_for(stream.schema, names, self._layout, self._device)
            for recipe in self._recipes:
                if recipe.name == erase:
                    check_erasable(recipe.schema.dtype)
            on_host = recipes_for(stream.schema, numbers, ImageLayout(), HOST)

            # without self, which it would keep alive
            def make_item(tensors: list[Tensors]) -> object:
                read = dict(zip(names, tensors, strict=False))
                drawn = dict(zip(numbers, tensors[len(names) :], strict=True))
                if mixing is not None:
                    made = mixed(read | drawn, classes, mixing, in_place=True)
                    read[mixing.image], read[mixing.label] = made
                if erase is not None:
                    read[erase] = erased(read | drawn, erase, in_place=True)
                item: object = {name: read[name] for name in shown} if as_dict else tuple(map(read.__getitem__, shown))
                return item if transform is None else transform(item)

            if runtime is not None:
                placement = CudaPlacement(self._recipes, make_item, runtime, stream.memories, on_host)
                prefetcher = Prefetcher[Any](stream, placement, self._prefetch)
            else:
                recipes = [*self._recipes, *on_host]
                prefetcher = Prefetcher[Any](stream, HostPlacement(recipes, make_item, self._device), 0)
            on_failure.pop_all()
        return LoaderConnection(self, prefetcher, daemon)


def _share(rank: int | None, world_size: int | None, data_parallel: "int | DeviceMesh | None") -> RankShare:
    if data_parallel is not None:
        if rank is not None or world_size is not None:
            raise RankInvalid("give data_parallel, or rank and world_size: each says which share this process reads")
        if not isinstance(data_parallel, int):
            return _share_of(data_parallel)
        return _share(None, None, None).among(data_parallel)
    distributed = torch.distributed
    if rank is None and world_size is None and distributed.is_available() and distributed.is_initialized():
        return RankShare(distributed.get_rank(), distributed.get_world_size())
    return find_share(os.environ, rank, world_size)


def _share_of(mesh: "DeviceMesh") -> RankShare:
    """Return the share of this process in a device mesh, all of whose dimensions split the data."""
    place = mesh.get_coordinate()
    if place is None:
        raise RankInvalid("data_parallel: this process is not in that device mesh")
    share = ALONE
    for number, size in zip(place, mesh.mesh.shape, strict=True):
        share = RankShare(share.rank * size + number, share.world_size * size)
    return share


class BatchdDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a ``BatchdLoader`` as an ``IterableDataset``, for programs with a DataLoader.

        dataset = BatchdDataset(BatchdLoader("photos"))
        loader = DataLoader(dataset, batch_size=None, num_workers=0)

    ``batch_size=None``, because items are whole batches; ``num_workers=0``, because the daemon's
    workers do the work: in a worker process of a DataLoader, iterating raises ``LoaderInWorker``.
    Take the state for a checkpoint from the dataset, not from the DataLoader.
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

    def load_state_dict(self, state: StreamState, *, convert: bool = False) -> None:
        """See ``BatchdLoader``."""
        self.loader.load_state_dict(state, convert=convert)
