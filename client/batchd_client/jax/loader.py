"""Batches as dicts of ``jax.Array``: from a stream that is open, or by name. Runs in the trainer.

Invariant: what ``state_dict`` says is what the loop has got, whatever is under way to the devices.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet, finalize

import jax

from batchd_client.course import StreamState
from batchd_client.daemon import Connecting, Daemon, connect
from batchd_client.errors import PrefetchInvalid, StreamClosed, StreamTaken
from batchd_client.feed import Feed
from batchd_client.jax.arrays import specs_for
from batchd_client.jax.placement import JaxTarget, Placement
from batchd_client.ranks import Share, find_share
from batchd_client.stream import Stream, StreamStatistics

PREFETCH = 2

_taken: WeakSet[Stream] = WeakSet()


class Batches:
    """Batches of a stream as dicts of ``jax.Array``; ``batches`` and ``BatchdLoader`` make it.

    ``for batch in ...`` gives the rest of the current epoch; the next ``for`` gives the next one, and what is under way goes on
    across the boundary. An array never changes, and may be donated.
    """

    def __init__(
        self,
        stream: Stream,
        sharding: jax.sharding.Sharding | None,
        fields: Sequence[str] | None,
        prefetch: int,
        daemon: Daemon | None = None,
    ) -> None:
        """``daemon``: is closed with this. Raises ``StreamTaken`` and ``TensorsInvalid``."""
        if stream in _taken:
            raise StreamTaken(f"the batches of stream {stream.name!r} are brought to JAX already")
        self._specs = specs_for(stream, fields, sharding)
        target = JaxTarget(sharding, stream.batch_size, stream.world_size)
        ahead = 0 if target.keeps_host_memory() else prefetch
        self._feed = Feed(stream, Placement(tuple(self._specs), target), ahead)
        self._platform = target.platform
        self._restart = False
        self._closed = False
        self._end = finalize(self, _end, self._feed, daemon, os.getpid())
        _taken.add(stream)

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> Stream:
        """The stream that it reads: names of classes, fingerprint, samples. Positions are for this object to move."""
        return self._feed.stream

    @property
    def schema(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The arrays of a whole batch, by field, those of all processes together: what ``jax.eval_shape`` and ``lower`` take."""
        return MappingProxyType(self._specs)

    @property
    def batch_size(self) -> int:
        """Samples in a full batch of one process."""
        return self.stream.batch_size

    def __len__(self) -> int:
        """Batches in a whole epoch for this process."""
        return len(self.stream)

    def statistics(self) -> StreamStatistics:
        """As ``Stream.statistics``; batches that are under way count as taken."""
        return self.stream.statistics()

    # --- where it is --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; after an epoch's last one, the next epoch."""
        return self._feed.position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``for`` be over this epoch. Where it stands within it already, it stays: as after a resume."""
        if self.epoch != epoch:
            self._feed.seek(epoch)

    def state_dict(self) -> StreamState:
        """What a checkpoint needs to go on exactly here: the batch in hand counts as done. Equal in processes equally far."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state_dict`` was taken, by any number of processes. Raises ``StateMismatch``; then everything stays."""
        self._feed.load_state_dict(state)

    # --- taking batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Iterate the rest of the current epoch. Raises what iterating a ``Stream`` and JAX raise, and ``TensorsInvalid``."""
        self._check_open()
        if self._restart and self._feed.position.step:
            self._feed.seek(self.epoch)
        return iter(partial(self._take, self.epoch), None)

    def _take(self, epoch: int) -> dict[str, jax.Array] | None:
        self._check_open()
        return self._feed.take(epoch)

    # --- its life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the stream, once nothing is read of it any more. Arrays that were given out stay; so does the position."""
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        stream, position = self.stream, self._feed.position
        where = f"<{type(self).__name__} {stream.name} rank={stream.rank}/{stream.world_size} platform={self._platform}"
        return f"{where} [closed]>" if self._closed else f"{where} epoch={position.epoch} step={position.step}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"these batches of stream {self.stream.name!r} have been closed")


def batches(
    stream: Stream,
    *,
    sharding: jax.sharding.Sharding | None = None,
    prefetch: int = PREFETCH,
    fields: Sequence[str] | None = None,
) -> Batches:
    """Bring the batches of a stream to JAX; make it once, for all epochs. The stream belongs to it from now on.

        stream = daemon.stream("photos", rank=jax.process_index(), world_size=jax.process_count())
        train = batches(stream)

    ``sharding``, ``prefetch`` and ``fields`` as for ``BatchdLoader``. Raises ``TensorsInvalid``, ``PrefetchInvalid`` and, where
    another one has the stream, ``StreamTaken``.
    """
    _check_prefetch(prefetch)
    return Batches(stream, sharding, fields, prefetch)


class BatchdLoader(Batches):
    """The stream ``stream`` of the daemon at ``address`` as dicts of ``jax.Array``, by field.

    ``sharding``: how arrays lie on devices; default: all of them on JAX's default device. Where it has devices of other processes
    too, each brings its share of the rows, and the arrays are of all of them together. ``fields``: which, in which order;
    default: all. A padded or ragged field comes with all the room that it has, with ``NAME_length`` or ``NAME_shape`` beside it.
    ``prefetch``: how many batches are under way ahead of the loop; on a CPU there is no way to go, and so none.

    ``rank`` and ``world_size``: default: ``jax.process_index()`` and ``jax.process_count()``, so it is made after
    ``jax.distributed.initialize()``. ``window``, ``epochs`` and ``state`` as for ``Daemon.stream``. ``restart``: begin the epoch
    anew with each ``for``, as validation wants it; else a ``for`` that was left goes on where it stopped. ``connecting``: as for
    ``batchd_client.connect``.

    Raises what ``connect`` and ``Daemon.stream`` raise, ``PrefetchInvalid`` and ``TensorsInvalid``.
    """

    def __init__(  # noqa: PLR0913  what a program may say of its arrays, each by its name
        self,
        stream: str,
        *,
        address: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        sharding: jax.sharding.Sharding | None = None,
        fields: Sequence[str] | None = None,
        prefetch: int = PREFETCH,
        window: int | None = None,
        epochs: int | None = None,
        state: Mapping[str, object] | None = None,
        restart: bool = False,
        **connecting: Unpack[Connecting],
    ) -> None:
        _check_prefetch(prefetch)
        share = _share(rank, world_size)
        daemon = connect(address, **connecting)
        try:
            opened = daemon.stream(stream, *share, window=window, epochs=epochs, state=state)
            super().__init__(opened, sharding, fields, prefetch, daemon)
        except BaseException:
            daemon.close()
            raise
        self._restart = restart


def _end(feed: Feed[Any], daemon: Daemon | None, process: int) -> None:
    if os.getpid() == process:  # in a forked child all of this is the parent's
        feed.close()
    if daemon is not None:
        daemon.close()


def _check_prefetch(prefetch: int) -> None:
    if type(prefetch) is not int or prefetch < 0:
        raise PrefetchInvalid(f"prefetch={prefetch!r}")


def _share(rank: int | None, world_size: int | None) -> Share:
    if rank is None and world_size is None:
        return Share(jax.process_index(), jax.process_count())
    return find_share({}, rank, world_size)
