"""What the loaders of all frameworks are: epochs, a state for the checkpoint, a life. Runs in the trainer.

    a framework's BatchdLoader: what batches become   --is a-->   Loader   --has-->   Opened   --has-->   Feed, Daemon
                                                                                      ends by itself

A framework's loader opens its feed when it is made (JAX), or else at its first use in a process
(torch, whose loaders may be pickled). So what is open is an object by itself: a pickle leaves it
out in one piece, and what ends it holds no loader alive.

Invariant: what ``state_dict`` says is what the loop has got, whatever is under way to the device.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from weakref import finalize

from batchd_client.daemon import Daemon
from batchd_client.errors import PrefetchInvalid, StreamClosed
from batchd_client.feed import Feed
from batchd_client.positions import StreamState
from batchd_client.ranks import RankShare
from batchd_client.stream import Stream, StreamStatistics

PREFETCH = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoaderStatistics(StreamStatistics):
    """As those of the stream; batches that are under way count as taken.

    ``next_s``: seconds that the loop was inside ``next`` for the batches that it got. Of these it
    waited ``wait_s`` for batches to come from the daemon; the rest is the loader's own: the copy,
    ``transform``, and waiting for a device that is behind.
    """

    next_s: float


class LoaderConnection(Generic[T]):
    """What a loader reads while it is connected. It ends with the loader or with the program, where nobody ends it before."""

    def __init__(self, loader: "Loader[T]", feed: Feed[T], daemon: Daemon | None) -> None:
        """``daemon``: is closed with it."""
        self.feed = feed
        self._end = partial(_end, feed, daemon, os.getpid())
        self._at_last = finalize(loader, self._end)

    def close(self) -> None:
        """Close feed and connection. Where it is interrupted, it is done again: in another ``close``, or at last."""
        if not self._at_last.alive:
            return
        try:
            self._end()
        except Exception:  # any library of a device may raise it: of a broken device nothing more is to be had
            self._at_last.detach()
            raise
        self._at_last.detach()


def _end(feed: Feed[Any], daemon: Daemon | None, process: int) -> None:
    try:
        if os.getpid() == process:  # in a forked child all of this is the parent's
            feed.close()
    finally:
        if daemon is not None:
            daemon.close()


class Loader(ABC, Generic[T]):
    """See above. One thread at a time may use it."""

    def __init__(self, name: str, share: RankShare, place: str, *, restart: bool = False) -> None:
        """``place``: where batches go, for people. ``restart``: begin the epoch anew with each ``for``."""
        self._name = name
        self._share = share
        self._place = place
        self._restart = restart
        self._opened: LoaderConnection[T] | None = None
        self._closed = False

    @abstractmethod
    def _open(self) -> Feed[T]:
        """The feed, opened where it was not. Closed, it still says where it stands; raises ``StreamClosed`` if there is none."""

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream that it reads: names of classes, fingerprint, samples. Positions are the loader's own to move."""
        return self._open().stream

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of one rank."""
        return self.stream.batch_size

    def __len__(self) -> int:
        """Batches in a whole epoch for this rank."""
        return len(self.stream)

    def statistics(self) -> LoaderStatistics:
        """What happened so far: whether the loop waits for data (``wait_s``) or for the loader (the rest of ``next_s``)."""
        feed = self._open()
        return LoaderStatistics(**asdict(feed.stream.statistics()), next_s=feed.next_s)

    # --- where it is --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; after an epoch's last one, the next epoch."""
        return self._open().position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``for`` be over this epoch. Where the loader stands within it already, it stays: as after a resume."""
        feed = self._open()
        if feed.position.epoch != epoch:
            feed.seek(epoch)

    def state_dict(self) -> StreamState:
        """What a checkpoint needs to go on exactly here: the batch in hand counts as done. Equal on ranks equally far."""
        return self._open().state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state_dict`` was taken, by any number of ranks. Raises ``StateMismatch``; then everything stays."""
        self._open().load_state_dict(state)

    # --- taking batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """Iterate the rest of the current epoch. Raises what iterating a ``Stream`` raises, and what the framework raises."""
        self._check_open()
        feed = self._open()
        if self._restart and feed.position.step:
            feed.seek(feed.position.epoch)
        return _LoaderEpoch(partial(self._take, feed.position.epoch))

    def _take(self, epoch: int) -> T | None:
        self._check_open()
        return self._open().take(epoch)

    # --- its life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up stream and connection, once nothing is read any more. What was given out stays; so does the position."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        share = self._share
        where = f"<{type(self).__name__} {self._name} rank={share.rank}/{share.world_size} {self._place}"
        if self._closed:
            return f"{where} [closed]>"
        if self._opened is None:
            return f"{where}>"
        epoch, step = self._opened.feed.position
        return f"{where} epoch={epoch} step={step}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"this loader of stream {self._name!r} has been closed")


class _LoaderEpoch(Iterator[T]):
    """One ``for`` over a loader, which ``take`` keeps open: ends with the epoch in which it began, and stays ended.

    ``iter(take, None)`` would ask every batch whether it equals None, which arrays answer for each
    of their numbers.
    """

    __slots__ = ("_take",)

    def __init__(self, take: Callable[[], T | None]) -> None:
        self._take: Callable[[], T | None] | None = take

    def __next__(self) -> T:
        batch = self._take() if self._take is not None else None
        if batch is None:
            self._take = None
            raise StopIteration
        return batch


def check_prefetch(prefetch: int) -> None:
    """Raise ``PrefetchInvalid`` where this is no number of batches."""
    if type(prefetch) is not int or prefetch < 0:
        raise PrefetchInvalid(f"prefetch={prefetch!r}")
