"""The loader: an iterable of tensors where a DataLoader was. Runs in the trainer.

Invariant: what ``state_dict`` says is what the loop has got, whatever is under way to the device.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self, Unpack
from weakref import finalize

import torch
import torch.distributed
import torch.utils.data

from batchd_client.course import StreamState
from batchd_client.daemon import Connecting, Daemon, connect
from batchd_client.errors import LoaderInWorker, PrefetchInvalid, StreamClosed
from batchd_client.feed import Feed
from batchd_client.ranks import Share, find_share
from batchd_client.stream import Stream, StreamStatistics
from batchd_client.torch.cuda import CudaPlacement, CudaRuntime, needs_writable
from batchd_client.torch.placements import HostPlacement
from batchd_client.torch.tensors import INDEX, Look, Recipe, Tensors, TensorSchema, recipes_for

PREFETCH = 2


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the user asked for: enough to make the same loader elsewhere."""

    stream: str
    address: str | None
    connecting: Connecting
    share: Share
    window: int | None
    epochs: int | None
    state: Mapping[str, object] | None
    device: torch.device
    fields: Sequence[str] | None
    look: Look
    as_dict: bool
    transform: Callable[[Any], Any] | None
    prefetch: int
    restart: bool


class BatchdLoader:
    """Batches of a stream as tensors. ``for images, labels in loader`` gives the rest of the current epoch, each rank its share.

    ``device``: where tensors are wanted; "cuda" is the current device. On a GPU ``prefetch`` batches are under way ahead of the
    loop. ``as_dict``: give dicts and not tuples. ``fields``: which, in which order; default: all, in tuples without ``index``.

    Images come as ``[B, C, H, W]``: fields of shape [height, width, 1, 3 or 4], or those that ``images`` names. ``dtype``:
    of images; default: as in the stream. ``normalize=(mean, std)``, a number for each channel: ``(x / 255 - mean) / std``,
    float32 where no ``dtype`` is given. ``channels_last``: give images in that memory format, which saves a pass over them.
    ``transform``: called with what the loop would get, on the device; what it returns is what the loop gets.

    ``rank`` and ``world_size``: default: those of torch.distributed where it is initialised, else of torchrun, Slurm or mpirun.
    ``window``, ``epochs`` and ``state`` as for ``Daemon.stream``. ``restart``: begin the epoch anew with each ``for``, as
    validation wants it; else a ``for`` that was left goes on where it stopped. ``connecting``: as for ``batchd_client.connect``.

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
        if type(prefetch) is not int or prefetch < 0:
            raise PrefetchInvalid(f"prefetch={prefetch!r}")
        self._wish = _Wish(
            stream,
            address,
            connecting,
            _share(rank, world_size),
            window,
            epochs,
            state,
            torch.device(device),
            fields,
            Look(images, dtype, normalize, channels_last),
            as_dict,
            transform,
            prefetch,
            restart,
        )
        self._opened: _Opened | None = None
        self._closed = False
        self._open()

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream that it reads: names of classes, fingerprint, samples. Positions are the loader's own to move."""
        return self._open().feed.stream

    @property
    def schema(self) -> Mapping[str, TensorSchema]:
        """The tensors of a batch, by field, before ``transform``; ``shape`` is that of one sample."""
        return MappingProxyType({recipe.name: recipe.schema for recipe in self._open().recipes})

    @property
    def device(self) -> torch.device:
        """Where the tensors are, with the number of the device."""
        return self._open().device

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of one rank."""
        return self.stream.batch_size

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return len(self.stream)

    def statistics(self) -> StreamStatistics:
        """As ``Stream.statistics``; batches that are under way count as taken."""
        return self.stream.statistics()

    # --- where it is --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; after an epoch's last one, the next epoch."""
        return self._open().feed.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``for`` be over this epoch. Where the loader stands within it already, it stays: as after a resume."""
        feed = self._open().feed
        if feed.position.epoch != epoch:
            feed.seek(epoch)

    def state_dict(self) -> StreamState:
        """What a checkpoint needs to go on exactly here: the batch in hand counts as done. Equal on ranks equally far."""
        return self._open().feed.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state_dict`` was taken, by any number of ranks. Raises ``StateMismatch``; then everything stays."""
        self._open().feed.load_state_dict(state)

    # --- taking batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Iterate the rest of the current epoch. Raises what iterating a ``Stream`` raises, and ``LoaderInWorker``."""
        if torch.utils.data.get_worker_info() is not None:
            raise LoaderInWorker
        feed = self._open().feed
        if self._wish.restart and feed.position.step:
            feed.seek(feed.position.epoch)
        return _Epoch(self, feed.position.epoch)

    def _take(self, epoch: int) -> Any:
        return self._open().feed.take(epoch)

    # --- its life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the stream and the connection. Tensors that were given out stay; the position can no longer be asked for."""
        self._closed = True
        opened = self._opened
        if opened is not None:
            try:
                opened.close()  # may be interrupted, and is done again then: in another ``close``, or by ``end``
            except Exception:  # of a device that is broken nothing more is to be had
                opened.end.detach()
                self._opened = None
                raise
            opened.end.detach()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        wish = self._wish
        where = f"<BatchdLoader {wish.stream} rank={wish.share.rank}/{wish.share.world_size} device={wish.device}"
        if self._closed:
            return f"{where} [closed]>"
        return where + (">" if self._opened is None else f" epoch={self.epoch} step={self._opened.feed.position.step}>")

    def __getstate__(self) -> tuple[_Wish, bool]:
        """Pickle what it is and where it stands; whoever unpickles it connects by himself, at the first use."""
        opened = self._opened
        return (self._wish if opened is None else replace(self._wish, state=opened.feed.state_dict())), self._closed

    def __setstate__(self, pickled: tuple[_Wish, bool]) -> None:
        self._wish, self._closed = pickled
        self._opened = None

    def _open(self) -> "_Opened":
        """Connect, where that was not done: at the beginning, and in a process that has unpickled the loader."""
        if self._closed:
            raise StreamClosed(f"this loader of stream {self._wish.stream!r} has been closed")
        if self._opened is None:
            self._opened = _open(self, self._wish)
        return self._opened


class _Opened(NamedTuple):
    """A loader that is connected. ``end`` closes it by itself at the end of the loader or of the program."""

    feed: Feed[Any]
    recipes: tuple[Recipe, ...]
    device: torch.device
    close: Callable[[], None]
    end: "finalize[..., BatchdLoader]"


def _open(loader: BatchdLoader, wish: _Wish) -> _Opened:
    runtime = CudaRuntime(wish.device) if wish.device.type == "cuda" else None
    device = wish.device if runtime is None else runtime.device
    writable_slots = runtime is not None and needs_writable(runtime)
    daemon = connect(wish.address, **wish.connecting, writable_slots=writable_slots)
    try:
        stream = daemon.stream(wish.stream, *wish.share, window=wish.window, epochs=wish.epochs, state=wish.state)
        fields = wish.fields
        if fields is None:
            fields = [name for name in stream.schema if wish.as_dict or name != INDEX]
        with nullcontext() if runtime is None else runtime.aside():  # a batch's event is behind it
            recipes = recipes_for(stream.schema, fields, wish.look, device)
        names = tuple(recipe.name for recipe in recipes) if wish.as_dict else None
        give = _Given(names, wish.transform)
        if runtime is not None:
            feed = Feed[Any](stream, CudaPlacement(recipes, give, runtime, stream.memories), wish.prefetch)
        else:
            feed = Feed[Any](stream, HostPlacement(recipes, give, device), 0)
    except BaseException:
        daemon.close()
        raise
    close = partial(_end, feed, daemon, os.getpid())
    return _Opened(feed, recipes, device, close, finalize(loader, close))


def _end(feed: Feed[Any], daemon: Daemon, process: int) -> None:
    """Close both. Where it is interrupted, it may be done again."""
    try:
        if os.getpid() == process:  # in a forked child all of this is the parent's
            feed.close()
    finally:
        daemon.close()


class _Given:
    """Makes of the tensors of a batch what the loop gets."""

    def __init__(self, names: tuple[str, ...] | None, transform: Callable[[Any], Any] | None) -> None:
        self._names = names
        self._transform = transform

    def __call__(self, tensors: list[Tensors]) -> Any:
        given: Any = tuple(tensors) if self._names is None else dict(zip(self._names, tensors, strict=True))
        return given if self._transform is None else self._transform(given)


class _Epoch(Iterator[Any]):
    """One ``for`` over a loader, which it keeps open: ends with the epoch in which it began, and stays ended."""

    __slots__ = ("_epoch", "_loader")

    def __init__(self, loader: BatchdLoader, epoch: int) -> None:
        self._loader: BatchdLoader | None = loader
        self._epoch = epoch

    def __next__(self) -> Any:
        batch = self._loader._take(self._epoch) if self._loader is not None else None  # noqa: SLF001  one thing in two parts
        if batch is None:
            self._loader = None
            raise StopIteration
        return batch


def _share(rank: int | None, world_size: int | None) -> Share:
    distributed = torch.distributed
    if rank is None and world_size is None and distributed.is_available() and distributed.is_initialized():
        return Share(distributed.get_rank(), distributed.get_world_size())
    return find_share(os.environ, rank, world_size)
