"""Batches as dicts of ``jax.Array``: from a stream that is open, or by name. Runs in the trainer.

Invariant: what ``state_dict`` says is what the loop has got, whatever is under way to the devices.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Unpack
from weakref import WeakSet

import jax

from batchd_client.daemon import Connecting, Daemon, connect
from batchd_client.errors import StreamTaken
from batchd_client.feed import Feed
from batchd_client.jax.arrays import specs_for
from batchd_client.jax.placement import JaxPlacement, JaxTarget
from batchd_client.loader import PREFETCH, Loader, LoaderConnection, check_prefetch
from batchd_client.ranks import RankShare, find_share
from batchd_client.stream import Stream

_taken: WeakSet[Stream] = WeakSet()


class Batches(Loader[dict[str, jax.Array]]):
    """Batches of a stream as dicts of ``jax.Array``; ``batches`` and ``BatchdLoader`` make it.

    ``for batch in ...`` gives the rest of the current epoch; the next ``for`` gives the next one,
    and what is under way goes on across the boundary. An array never changes, and may be donated.
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
        super().__init__(stream.name, RankShare(stream.rank, stream.world_size), f"platform={target.platform}")
        ahead = 0 if target.keeps_host_memory() else prefetch
        self._feed = Feed(stream, JaxPlacement(tuple(self._specs), target), ahead)
        self._opened = LoaderConnection(self, self._feed, daemon)
        _taken.add(stream)

    @property
    def schema(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The arrays of a whole batch, by field, those of all processes together: what ``jax.eval_shape`` and ``lower`` take."""
        return MappingProxyType(self._specs)

    def _open(self) -> Feed[dict[str, jax.Array]]:
        """See ``Loader``. It was open from the beginning."""
        return self._feed


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

    ``sharding``, ``prefetch`` and ``fields`` as for ``BatchdLoader``. Raises ``TensorsInvalid``,
    ``PrefetchInvalid`` and, where another one has the stream, ``StreamTaken``.
    """
    check_prefetch(prefetch)
    return Batches(stream, sharding, fields, prefetch)


class BatchdLoader(Batches):
    """The stream ``stream`` of the daemon at ``address`` as dicts of ``jax.Array``, by field.

    ``sharding``: how arrays lie on devices; default: all of them on JAX's default device. Where it
    has devices of other processes too, each brings its share of the rows, and the arrays are of all
    of them together. ``fields``: which, in which order; default: all. A padded or ragged field
    comes with all the room that it has, with ``NAME_length`` or ``NAME_shape`` beside it.
    ``prefetch``: how many batches are under way ahead of the loop; on a CPU there is no way to go,
    and so none.

    ``rank`` and ``world_size``: default: ``jax.process_index()`` and ``jax.process_count()``, so it
    is made after ``jax.distributed.initialize()``. ``window``, ``epochs`` and ``state`` as for
    ``Daemon.stream``. ``restart``: begin the epoch anew with each ``for``, as validation wants it;
    else a ``for`` that was left goes on where it stopped. ``connecting``: as for
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
        check_prefetch(prefetch)
        share = _share(rank, world_size)
        daemon = connect(address, **connecting)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(daemon.close)
            opened = daemon.stream(stream, *share, window=window, epochs=epochs, state=state)
            super().__init__(opened, sharding, fields, prefetch, daemon)
            where_it_fails.pop_all()
        self._restart = restart


def _share(rank: int | None, world_size: int | None) -> RankShare:
    if rank is None and world_size is None:
        return RankShare(jax.process_index(), jax.process_count())
    return find_share({}, rank, world_size)
