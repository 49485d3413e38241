"""Base of the frameworks' loaders: rank, fields, epochs, checkpoints. Runs in the trainer.

    BatchdLoader  --is a-->  Loader  --has-->  LoaderConnection  --has-->  Prefetcher, Daemon
    (of a framework)                           (closes itself)

A JAX loader connects when it is made; a torch loader, which may be pickled, at its first use in a
process. So the connection is an object of its own: a pickle leaves it out as a whole, and its
finalizer does not keep the loader alive.

``find_share`` reads the rank of this process from the first of these pairs of variables that is
set:

    torchrun, accelerate, Lightning   RANK           WORLD_SIZE
    srun                              SLURM_PROCID   SLURM_STEP_NUM_TASKS
    mpirun (Open MPI)                 OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE

Slurm's variables of a step are read and not those of the job: a script under ``sbatch`` without
``srun`` has SLURM_NTASKS, but is a single process.

Invariants: ``state_dict`` counts the batches that the loop has received, not those in transit. A
rank is never guessed: half a pair, or an impossible one, is an error. Arrays from ``own`` have
memory of their own, which no other batch overwrites.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Generic, NamedTuple, Self, TypeVar
from weakref import finalize

import numpy as np
import numpy.typing as npt

from batchd_client.daemon import Daemon
from batchd_client.errors import PrefetchInvalid, RankInvalid, StreamClosed, TensorsInvalid
from batchd_client.prefetch import Prefetcher
from batchd_client.stream import EpochIterator, FieldSchema, Stream, StreamStatistics
from batchd_client.subscription import StreamState
from batchd_wire.wording import classes_apart

PREFETCH = 2

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


class RankShare(NamedTuple):
    """Share ``rank``, from 0, of ``world_size``."""

    rank: int
    world_size: int

    def among(self, groups: int) -> "RankShare":
        """Return the share of this process's group: ``groups`` of equally many consecutive ranks.

        The ranks of a group compute one model together, so they read the same rows. Raises
        ``RankInvalid`` if ``groups`` does not divide ``world_size``.
        """
        if type(groups) is not int or groups < 1 or self.world_size % groups:
            raise RankInvalid(f"data_parallel={groups!r} does not divide the {self.world_size} ranks of this job")
        return RankShare(self.rank // (self.world_size // groups), groups)


ALONE = RankShare(0, 1)
INDEX = "index"
"""The field that every stream has: each sample's index in its source."""
ALIGNMENT_BYTES = 64
"""Alignment of arrays that TensorFlow and JAX take without another copy."""

_CLASSES: dict[str, tuple[str, ...]] = {}
"""The classes of each stream that loaders of this program have read."""
_log = logging.getLogger("batchd_client")
T = TypeVar("T")
D = TypeVar("D", bound=np.generic)


def find_share(environment: Mapping[str, str], rank: int | None = None, world_size: int | None = None) -> RankShare:
    """Find this process's rank: as given, else in ``environment``, else 0 of 1.

    Raises ``RankInvalid``.
    """
    if (rank is None) != (world_size is None):
        raise RankInvalid("give rank and world_size both, or neither: then they come from the environment")
    if rank is not None and world_size is not None:
        return _checked(RankShare(rank, world_size), f"rank {rank!r} of {world_size!r}")
    for names in _LAUNCHERS:
        values = [environment.get(name) for name in names]
        if names[0] == "SLURM_PROCID" and values[1] is None:
            continue  # a process of a job, outside of a step
        if values == [None, None]:
            continue
        found = " and ".join(f"{name}={value}" for name, value in zip(names, values, strict=True) if value is not None)
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        if missing:
            raise RankInvalid(f"{found} is set, and {missing[0]} is not: set both, or give rank= and world_size=")
        try:
            share = RankShare(*(int(value or "") for value in values))
        except ValueError:
            raise RankInvalid(f"{found}: these are not numbers") from None
        return _checked(share, found)
    return ALONE


def _checked(share: RankShare, origin: str) -> RankShare:
    if not 0 <= share.rank < share.world_size:
        raise RankInvalid(f"{origin}: there is no such share")
    return share


@dataclass(frozen=True, slots=True)
class LoaderStatistics(StreamStatistics):
    """Statistics of the stream, where batches in transit count as taken, and of the loader.

    ``next_s``: seconds that the loop spent inside ``next`` for the batches it received. ``wait_s``
    of them were spent waiting for the daemon; the rest is the copy, ``transform``, and waiting for
    a device that lags behind.
    """

    next_s: float


class LoaderConnection(Generic[T]):
    """The connection and stream of a loader; closed with the loader or the program."""

    def __init__(self, loader: "Loader[T]", prefetcher: Prefetcher[T], daemon: Daemon | None) -> None:
        """``daemon``: closed together with this connection."""
        _compare_classes(loader._name, prefetcher.stream.classes)  # noqa: SLF001  of this module
        self.prefetcher = prefetcher
        self._end = partial(_end, prefetcher, daemon, os.getpid())
        self._finalizer = finalize(loader, self._end)

    def close(self) -> None:
        """Close prefetcher and daemon; after an interrupt, the next ``close`` repeats it."""
        if not self._finalizer.alive:
            return
        try:
            self._end()
        # Any device library may raise; closing a broken device again is of no use.
        except Exception:
            self._finalizer.detach()
            raise
        self._finalizer.detach()


def _end(prefetcher: Prefetcher[T], daemon: Daemon | None, process: int) -> None:
    try:
        if os.getpid() == process:  # a forked child has copies of the parent's handles
            prefetcher.close()
    finally:
        if daemon is not None:
            daemon.close()


def _compare_classes(name: str, classes: Sequence[str]) -> None:
    """Warn of a stream whose classes are not those of another one of this program.

    Training and validation are such a pair, whichever adapter has them, and in one loader each.
    """
    if not classes or name in _CLASSES:
        return
    for other, others in _CLASSES.items():
        if found := classes_apart(name, classes, other, others):
            _log.warning('classes differ: %s; set classes = "%s" of the source of %s', found, other, name)
    _CLASSES[name] = tuple(classes)


class Loader(ABC, Generic[T]):
    """Base of the loaders; see the module. For one thread at a time."""

    def __init__(self, name: str, share: RankShare, place: str, *, restart: bool = False) -> None:
        """``place``: of batches, for ``repr``. ``restart``: each ``for`` restarts the epoch."""
        self._name = name
        self._share = share
        self._place = place
        self._restart = restart
        self._opened: LoaderConnection[T] | None = None
        self._closed = False

    @abstractmethod
    def _open(self) -> Prefetcher[T]:
        """Return the prefetcher. Raises ``StreamClosed`` if closed before it ever connected."""

    # --- what it is -------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream: class names, fingerprint, samples. Only the loader may move its position."""
        return self._open().stream

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of one rank."""
        return self.stream.batch_size

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return len(self.stream)

    def statistics(self) -> LoaderStatistics:
        """Return the totals: ``wait_s`` for data, the rest of ``next_s`` for the loader."""
        prefetcher = self._open()
        return LoaderStatistics(**asdict(prefetcher.stream.statistics()), next_s=prefetcher.next_s)

    # --- where it is ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; after an epoch's last one, the next epoch."""
        return self._open().position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``for`` read this epoch. A loader within it stays, as after a resume."""
        prefetcher = self._open()
        if prefetcher.position.epoch != epoch:
            prefetcher.seek(epoch)

    def state_dict(self, *, card: bool = False) -> StreamState:
        """State for a checkpoint: the current batch counts as done. Equal on ranks equally far.

        ``card``: as of ``Stream.state_dict``.
        """
        return self._open().state_dict(card=card)

    def load_state_dict(self, state: Mapping[str, object], *, convert: bool = False) -> None:
        """Continue where any ranks took ``state_dict``. ``StateMismatch`` changes nothing.

        ``convert``: as of ``Daemon.stream``.
        """
        self._open().load_state_dict(state, convert=convert)

    def seek(self, epoch: int, step: int = 0, *, sample: int | None = None) -> None:
        """Continue elsewhere, as ``Stream.seek``; batches in transit are dropped."""
        self._open().seek(epoch, step, sample=sample)

    # --- taking batches ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """Iterate the rest of the epoch.

        Raises what iterating a ``Stream`` raises, ``StreamClosed``, and what the framework raises.
        """
        self._check_open()
        prefetcher = self._open()
        if self._restart and prefetcher.position.step:
            prefetcher.seek(prefetcher.position.epoch)
        return EpochIterator(partial(self._take, prefetcher.position.epoch))

    def _take(self, epoch: int) -> T | None:
        self._check_open()
        return self._open().take(epoch)

    def report(self, values: object, at: tuple[int, int] | None = None) -> None:
        """Report one number for a batch, such as its loss, or one for each of its rows.

        ``at``: the (epoch, step) of the batch; default: the last one that the loop received. See
        ``Stream.report``.
        """
        self._check_open()
        prefetcher = self._open()
        if at is not None:
            prefetcher.stream.report(values, at)
        else:
            prefetcher.stream.report_of(values, prefetcher.rows)

    # --- its life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Close stream and connection once no transfer reads them. Batches and position stay."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        share = self._share
        where = f"<{type(self).__name__} {self._name} rank={share.rank}/{share.world_size} {self._place}"
        if self._closed:
            return f"{where} [closed]>"
        if self._opened is None:
            return f"{where}>"
        epoch, step = self._opened.prefetcher.position
        return f"{where} epoch={epoch} step={step}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"this loader of stream {self._name!r} has been closed")


def check_prefetch(prefetch: int) -> None:
    """Raise ``PrefetchInvalid`` unless ``prefetch`` is an int of at least 0."""
    if type(prefetch) is not int or prefetch < 0:
        raise PrefetchInvalid(f"prefetch={prefetch!r}")


def checked_fields(
    schema: Mapping[str, FieldSchema], fields: Sequence[str] | None, *, as_dict: bool
) -> tuple[str, ...]:
    """Validate the names of the fields that a loop gets, in order.

    Default: all fields; in tuples, all but ``index``. Raises ``TensorsInvalid`` for an unknown
    name.
    """
    if fields is None:
        return tuple(name for name in schema if as_dict or name != INDEX)
    for name in fields:
        if name not in schema:
            raise TensorsInvalid(f"fields: the stream has no field {name!r}; it has {', '.join(schema)}")
    return tuple(fields)


def own(array: npt.NDArray[D]) -> npt.NDArray[D]:
    """Copy an array into new aligned memory of the same shape and dtype."""
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def aligned(shape: tuple[int, ...], dtype: np.dtype[D]) -> npt.NDArray[D]:
    """Allocate an array of ``shape`` and ``dtype``, uninitialised, at ``ALIGNMENT_BYTES``."""
    size = dtype.itemsize * prod(shape)
    memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)
