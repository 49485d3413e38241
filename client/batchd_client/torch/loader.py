"""The loader: an iterable of tensors where a DataLoader was. Runs in the trainer.

Invariant: what ``state_dict`` says is what the loop has got, whatever is under way to the device.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Unpack

import torch
import torch.distributed
import torch.utils.data

from batchd_client.daemon import Connecting, connect
from batchd_client.errors import LoaderInWorker
from batchd_client.feed import Feed
from batchd_client.loader import PREFETCH, Loader, LoaderConnection, RankShare, check_prefetch, find_share, wanted
from batchd_client.positions import StreamState
from batchd_client.torch.cuda import CudaPlacement, CudaRuntime, needs_writable
from batchd_client.torch.tensors import HostPlacement, ImageLayout, Tensors, TensorSchema, recipes_for


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the user asked for: enough to make the same loader elsewhere."""

    stream: str
    address: str | None
    connecting: Connecting
    share: RankShare
    window: int | None
    epochs: int | None
    state: Mapping[str, object] | None
    device: torch.device
    fields: Sequence[str] | None
    look: ImageLayout
    as_dict: bool
    transform: Callable[[Any], Any] | None
    prefetch: int
    restart: bool


class BatchdLoader(Loader[Any]):
    """Batches of a stream as tensors. ``for images, labels in loader`` gives the rest of the current epoch, each rank its share.

    ``device``: where tensors are wanted; "cuda" is the current device. On a GPU ``prefetch``
    batches are under way ahead of the loop. ``as_dict``: give dicts and not tuples. ``fields``:
    which, in which order; default: all, in tuples without ``index``.

    Images come as ``[B, C, H, W]``: fields of shape [height, width, 1, 3 or 4], or those that
    ``images`` names. ``dtype``: of images; default: as in the stream. ``normalize=(mean, std)``, a
    number for each channel: ``(x / 255 - mean) / std``, float32 where no ``dtype`` is given.
    ``channels_last``: give images in that memory format, which saves a pass over them.
    ``transform``: called with what the loop would get, on the device; what it returns is what the
    loop gets.

    ``rank`` and ``world_size``: default: those of torch.distributed where it is initialised, else
    of torchrun, Slurm or mpirun. ``window``, ``epochs`` and ``state`` as for ``Daemon.stream``.
    ``restart``: begin the epoch anew with each ``for``, as validation wants it; else a ``for`` that
    was left goes on where it stopped. ``connecting``: as for ``batchd_client.connect``.

    Raises what ``connect`` and ``Daemon.stream`` raise, and ``TensorsInvalid``.
    """

    def __init__(  # noqa: PLR0913  what a program may say of its tensors, each by its name
        self,
        stream: str,
        *,
        address: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str = "cpu",
        fields: Sequence[str] | None = None,
        images: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        channels_last: bool = False,
        as_dict: bool = False,
        transform: Callable[[Any], Any] | None = None,
        prefetch: int = PREFETCH,
        window: int | None = None,
        epochs: int | None = None,
        state: Mapping[str, object] | None = None,
        restart: bool = False,
        **connecting: Unpack[Connecting],
    ) -> None:
        check_prefetch(prefetch)
        wish = _Wish(
            stream,
            address,
            connecting,
            _share(rank, world_size),
            window,
            epochs,
            state,
            torch.device(device),
            fields,
            ImageLayout(images, dtype, normalize, channels_last),
            as_dict,
            transform,
            prefetch,
            restart,
        )
        self._begin(wish, closed=False)
        self._open()

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def schema(self) -> Mapping[str, TensorSchema]:
        """The tensors of a batch, by field, before ``transform``; ``shape`` is that of one sample."""
        self._open()
        return MappingProxyType({recipe.name: recipe.schema for recipe in self._recipes})

    @property
    def device(self) -> torch.device:
        """Where the tensors are, with the number of the device."""
        self._open()
        return self._device

    # --- taking batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate the rest of the current epoch. Raises what iterating a ``Stream`` raises, and ``LoaderInWorker``."""
        if torch.utils.data.get_worker_info() is not None:
            raise LoaderInWorker
        return super().__iter__()

    # --- its life -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> tuple[_Wish, bool]:
        """Pickle what it is and where it stands; whoever unpickles it connects by himself, at the first use."""
        opened = self._opened
        return (self._wish if opened is None else replace(self._wish, state=opened.feed.state_dict())), self._closed

    def __setstate__(self, pickled: tuple[_Wish, bool]) -> None:
        self._begin(*pickled)

    def _begin(self, wish: _Wish, closed: bool) -> None:
        super().__init__(wish.stream, wish.share, f"device={wish.device}", restart=wish.restart)
        self._wish = wish
        self._closed = closed

    def _open(self) -> Feed[Any]:
        """See ``Loader``. Connects at the beginning, and in a process that has unpickled the loader."""
        if self._opened is None:
            self._check_open()
            self._opened = self._connect(self._wish)
        return self._opened.feed

    def _connect(self, wish: _Wish) -> LoaderConnection[Any]:
        runtime = CudaRuntime(wish.device) if wish.device.type == "cuda" else None
        self._device = wish.device if runtime is None else runtime.device
        writable_slots = runtime is not None and needs_writable(runtime)
        daemon = connect(wish.address, **wish.connecting, writable_slots=writable_slots)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(daemon.close)
            stream = daemon.stream(wish.stream, *wish.share, window=wish.window, epochs=wish.epochs, state=wish.state)
            names = wanted(stream.schema, wish.fields, as_dict=wish.as_dict)
            with nullcontext() if runtime is None else runtime.aside():  # a batch's event is behind it
                self._recipes = recipes_for(stream.schema, names, wish.look, self._device)
            give = _Given(names if wish.as_dict else None, wish.transform)
            if runtime is not None:
                feed = Feed[Any](stream, CudaPlacement(self._recipes, give, runtime, stream.memories), wish.prefetch)
            else:
                feed = Feed[Any](stream, HostPlacement(self._recipes, give, self._device), 0)
            where_it_fails.pop_all()
        return LoaderConnection(self, feed, daemon)


class _Given:
    """Makes of the tensors of a batch what the loop gets."""

    def __init__(self, names: tuple[str, ...] | None, transform: Callable[[Any], Any] | None) -> None:
        self._names = names
        self._transform = transform

    def __call__(self, tensors: list[Tensors]) -> Any:
        given: Any = tuple(tensors) if self._names is None else dict(zip(self._names, tensors, strict=True))
        return given if self._transform is None else self._transform(given)


def _share(rank: int | None, world_size: int | None) -> RankShare:
    distributed = torch.distributed
    if rank is None and world_size is None and distributed.is_available() and distributed.is_initialized():
        return RankShare(distributed.get_rank(), distributed.get_world_size())
    return find_share(os.environ, rank, world_size)


class BatchdDataset(torch.utils.data.IterableDataset[Any]):
    """The batches of a ``BatchdLoader`` as a data set.

        dataset = BatchdDataset(BatchdLoader("photos"))
        loader = DataLoader(dataset, batch_size=None, num_workers=0)

    ``batch_size=None``, since batches come whole; ``num_workers=0``, since the daemon's workers do
    the work: in a worker process of a DataLoader it raises ``LoaderInWorker``. For a checkpoint ask
    the data set for its state, not the DataLoader.
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

    def load_state_dict(self, state: StreamState) -> None:
        """See ``BatchdLoader``."""
        self.loader.load_state_dict(state)
