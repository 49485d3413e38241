"""A connection to the daemon, which opens streams. Runs in the trainer.

Invariant: one ``Daemon`` is one connection: one session at a time, and no threads but ZeroMQ's.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import NamedTuple, Self, TypedDict

from batchd_client import errors
from batchd_client.connection import Connection, Deadlines
from batchd_client.discovery import find_connections, find_daemon, find_key, find_name, find_reconnect_timeout
from batchd_client.extensions import Extension
from batchd_client.opening import Target
from batchd_client.sockets import Sockets
from batchd_client.stream import Stream
from batchd_client.subscription import (
    BEGINNING,
    Beginning,
    SubscriptionRequest,
    checked_position,
    definition_bytes,
    read_state,
    settings_text,
)
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Status
from batchd_wire.status import DaemonStatus, read_status

html_of_daemon: Extension[[str, DaemonStatus], str] = Extension("batchd_client.notebook")

BATCH_SIZE_MAX = 65_536
"""As of a stream in batchd.toml."""
KEEP_S = 60
"""How long a defined stream stays after its last trainer by default, in seconds."""
KEEP_MAX_S = 30 * 86_400
SHOWN_WITHIN_S = 2.0
"""How long a notebook that shows a connection waits for the daemon."""


class BadSample(NamedTuple):
    """An unusable sample: index in the source, path, reason, and number of occurrences."""

    sample: int
    path: str
    reason: str
    times: int


@dataclass(frozen=True, slots=True)
class BadReport:
    """The bad samples of a stream: their number, ``total``, and the first few thousand."""

    total: int
    samples: tuple[BadSample, ...]


class Connecting(TypedDict, total=False):
    """Arguments of ``connect`` besides the address, for functions that pass them on."""

    name: str | None
    key: str | None
    connections: int | None
    connect_timeout_s: float
    reconnect_timeout_s: float | None
    batch_timeout_s: float


def connect(  # noqa: PLR0913  options of a connection, each by name
    address: str | None = None,
    *,
    name: str | None = None,
    key: str | None = None,
    connections: int | None = None,
    connect_timeout_s: float = 10.0,
    reconnect_timeout_s: float | None = None,
    batch_timeout_s: float = 300.0,
    writable_slots: bool = False,
) -> "Daemon":
    """Connect to a batchd daemon.

    ``address``: its runtime directory on this machine, as in ``ipc:///run/batchd``, or its network
    address, as in ``tcp://bigbox:7070``. Default: ``$BATCHD_ADDRESS``, else the first of
    ``/run/batchd`` and ``$XDG_RUNTIME_DIR/batchd`` where a daemon answers. ``name``: what the
    daemon shows for this run, 1 to 64 printable characters; default: ``$BATCHD_NAME``, else the
    job's name and number (Slurm, torchrun, Kubernetes), else the program and its process number.
    ``key``: the connection file for a daemon in the network; default: ``$BATCHD_KEY``.
    ``connections``: the number of TCP connections that carry batches; default:
    ``$BATCHD_CONNECTIONS``, else 1. More help where one connection is the limit: encryption on one
    core, a long distance, or a network that limits each connection.

    If an address is given, here or in the environment, the daemon may still be starting: this waits
    for it up to ``connect_timeout_s``. Without an address, this fails at once if no daemon answers.

    ``connect_timeout_s``: limit on connecting, and on every request. ``reconnect_timeout_s``: how
    long a daemon may be away while loops wait; default: ``$BATCHD_RECONNECT_TIMEOUT``, else 4
    hours, or 10 s for a daemon of `batchd.serve`. ``batch_timeout_s``: how long a running daemon
    may take for one batch. All in seconds.

    ``writable_slots``: for adapters that register slots with a device that cannot read memory
    mapped read-only. Slots are then mapped writable, if the daemon's configuration allows it.
    Arrays stay read-only; never write into the mapping.

    Raises ``DaemonNotFound``, ``PermissionDenied``, ``DaemonFull``, ``ConnectTimeout``,
    ``VersionMismatch``, ``AddressInvalid``, ``NameInvalid``, ``KeyInvalid``,
    ``ConnectionsInvalid``, ``TimeoutInvalid`` or ``ProtocolError``.
    """
    count = find_connections(connections)
    sockets = Sockets(count)
    connection = None
    try:
        run, its_key = find_name(name, os.environ), find_key(key)
        target_at = partial(Target, sockets, run, key=its_key, connections=count, writable_slots=writable_slots)
        target, session = find_daemon(target_at, address, connect_timeout_s)
        reconnect_s = find_reconnect_timeout(reconnect_timeout_s, target.place)
        connection = Connection(target, session, Deadlines(connect_timeout_s, reconnect_s, batch_timeout_s))
    finally:
        if connection is None:
            sockets.destroy()
    return Daemon(connection)


def _claim(name: str, rank: int, world_size: int, window: int | None, epochs: int | None) -> SubscriptionRequest:
    """The part of a stream that is claimed. Raises ``RankInvalid`` and others."""
    rank, world_size = index(rank), index(world_size)
    if not 0 <= rank < world_size:
        raise errors.RankInvalid(f"rank {rank} of world_size {world_size}")
    if window is not None and index(window) < 1:
        raise errors.WindowInvalid(f"window {window}: at least one batch has to be ready at a time")
    if epochs is not None and index(epochs) < 0:
        raise errors.PositionInvalid(f"epochs {epochs}")
    end_epoch = None if epochs is None else index(epochs)
    return SubscriptionRequest(name, rank, world_size, 0 if window is None else index(window), end_epoch)


class Daemon(errors.NotCopyable):
    """A connection to a daemon; ``connect`` makes it. Use it in a ``with``, or close it."""

    COPY_ADVICE = "a connection is its program's own; open another with batchd_client.connect(daemon.address)"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def address(self) -> str:
        """The daemon's address, as ``connect`` takes it."""
        return self._connection.place.address

    def stream(  # noqa: PLR0913  options of a stream, each by name
        self,
        name: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        window: int | None = None,
        epochs: int | None = None,
        state: Mapping[str, object] | None = None,
        convert: bool = False,
        batch_size: int | None = None,
        set: Mapping[str, object] | None = None,  # noqa: A002  as --set of the commands
        define: Mapping[str, object] | None = None,
    ) -> Stream:
        """Claim the stream ``name``: all of it, or the part of ``rank`` of ``world_size``.

        Ranks take the stream's steps in turn. ``window``: number of batches to keep ready ahead of
        this trainer (default: the stream's setting). ``epochs``: length of the training, counted
        from epoch 0, so a resumed run gives the same number; nothing is decoded beyond it, and
        iteration past it ends at once. ``state``: from ``state_dict()``, to continue exactly there.
        With ``convert`` it may be of batches of another size, if the samples and their order are
        the same: then the first batch begins behind the last sample that was delivered.
        ``batch_size``: this trainer's own; the samples and their order stay. Where a batch is of
        one of the stream's, it is a view of it, else it is copied; each rank reads all batches.
        ``set``: other values for keys of the stream, by dotted paths as in batchd.toml, such as
        ``{"pipeline.1.scale": [0.2, 1]}``: the stream that the daemon derives with them, one for
        all trainers with the same settings. States have them, so ``state`` alone will do.
        ``define``: the table of the stream, as the method ``define`` takes it; loaders take it.

        Raises ``StreamUnknown``, ``RankInvalid``, ``WindowInvalid``, ``PositionInvalid``,
        ``TooFewBatches``, ``BatchSizeInvalid``, ``SettingsInvalid``, ``RingTooSmall``,
        ``RingBusy``, ``StateMismatch``, ``StreamStopped``, ``ConnectTimeout``,
        ``ReconnectTimeout``, ``DaemonClosed`` or ``ProtocolError``.
        """
        table = (state or {}).get("define") if define is None else define
        settings = (state or {}).get("set") if set is None else set
        claim = _claim(name, rank, world_size, window, epochs)
        claim = replace(
            claim,
            settings=settings_text(settings if isinstance(settings, Mapping) else None),
            defines=definition_bytes(table) if isinstance(table, Mapping) else b"",
            keep_s=KEEP_S,
        )
        return self._open(claim, state, batch_size, converts=convert)

    def define(  # noqa: PLR0913  options of a stream, each by name
        self,
        name: str,
        table: Mapping[str, object],
        rank: int = 0,
        world_size: int = 1,
        *,
        keep_s: float = KEEP_S,
        keep: bool = False,
        window: int | None = None,
        epochs: int | None = None,
        state: Mapping[str, object] | None = None,
        convert: bool = False,
        batch_size: int | None = None,
    ) -> Stream:
        """Define the stream ``name`` by a ``table``, and claim it as ``stream`` does.

        ``table``: the keys of `[streams.NAME]` of batchd.toml, such as ``{"source": {"type":
        "folder", "path": "/data/photos"}, "batch_size": 256, "pipeline": [{"op": "decode"}, …]}``.
        Paths are those of the daemon's host, where you must have the right to read them. All that
        define the same table under this name, as the same user or with the same key, share one
        stream; nobody else reads it but the operator. ``keep_s``: how long it stays after its last
        trainer, in seconds; ``keep``: until `batchd streams remove` or the daemon's end. States
        have the table, and after a restart of the daemon trainers define the stream again.

        Raises ``DefinitionRefused``, and what ``stream`` raises.
        """
        if not 0 <= keep_s <= KEEP_MAX_S:
            raise errors.DefinitionRefused(
                f"keep_s {keep_s}: it is 0 to {KEEP_MAX_S} seconds; keep=True keeps the stream"
            )
        claim = _claim(name, rank, world_size, window, epochs)
        claim = replace(claim, defines=definition_bytes(table), keep_s=None if keep else round(keep_s))
        return self._open(claim, state, batch_size, converts=convert)

    def _open(
        self, claim: SubscriptionRequest, state: Mapping[str, object] | None, batch_size: int | None, *, converts: bool
    ) -> Stream:
        if batch_size is not None and not 0 < index(batch_size) <= BATCH_SIZE_MAX:
            raise errors.BatchSizeInvalid(f"batch_size {batch_size}: it is 1 to {BATCH_SIZE_MAX}")
        begin = BEGINNING if state is None else read_state(state, claim.stream, converts=converts)
        try:
            return Stream(self._connection, claim, begin, batch_size)
        except errors.StreamUnknown as error:
            if claim.defines:  # a daemon that reads the table knows the stream
                raise errors.VersionMismatch(f"the daemon is too old for define; upgrade it ({error})") from None
            raise

    def spectate(self, name: str, epoch: int = 0, step: int = 0) -> Stream:
        """Read the stream ``name`` as a spectator, from (``epoch``, ``step``).

        No trainer waits for it. From a live stream it gets one batch, the first from there on, and
        consumes nothing. Raises what ``stream`` raises.
        """
        claim = SubscriptionRequest(name, rank=0, world_size=1, window=1, end_epoch=None, is_spectator=True)
        return Stream(self._connection, claim, Beginning(checked_position(epoch, step)))

    def status(self) -> dict[str, object]:
        """Return the daemon's status: the data that `batchd status --json` prints.

        Raises ``ConnectTimeout``, ``ReconnectTimeout`` or ``DaemonClosed``.
        """
        return self._connection.request(AskStatus, Status).status

    def bad(self, stream: str) -> BadReport:
        """List bad samples of ``stream``. Raises ``StreamUnknown``, ``ConnectTimeout``."""
        answer = self._connection.request(lambda request: AskBad(request, stream), BadSamples)
        return BadReport(answer.total, tuple(BadSample(*sample) for sample in answer.samples))

    def close(self) -> None:
        """Close the connection and all streams; living batches stay readable. May be repeated."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        session = self._connection.session
        return f"<Daemon {self.address} {f'version {session.daemon_version}' if session else '[closed]'}>"

    def _repr_html_(self) -> str | None:
        """HTML for notebooks: the streams and their trainers, if the daemon answers soon."""
        found: list[DaemonStatus] = []
        deadline = time.monotonic() + min(SHOWN_WITHIN_S, self._connection.deadlines.connect_timeout_s)
        with suppress(errors.BatchdClientError):
            self._connection.run_if_usable(
                lambda session: found.append(read_status(session.request(AskStatus, Status, deadline).status))
            )
        return html_of_daemon(repr(self), found[0]) if found else None
