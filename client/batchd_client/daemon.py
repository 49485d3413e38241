"""The daemon as a trainer sees it: where streams come from. Runs in the trainer.

Invariant: one ``Daemon`` is one connection: a session at a time, ZeroMQ's own thread, and none of
ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import index
from types import TracebackType
from typing import NamedTuple, Self, TypedDict

from batchd_client.connection import Connection, Deadlines
from batchd_client.discovery import find_connections, find_daemon, find_key
from batchd_client.errors import PositionInvalid, RankInvalid, Unique, WindowInvalid
from batchd_client.opening import Target
from batchd_client.positions import checked_position
from batchd_client.session import Session
from batchd_client.sockets import Sockets
from batchd_client.stream import Stream
from batchd_client.subscription import SubscriptionRequest
from batchd_wire.messages import AskBad, AskStatus, BadSamples, Status


class BadSample(NamedTuple):
    """A sample that could not be used: its index in the source, its path, why, and how often it was met."""

    sample: int
    path: str
    reason: str
    times: int


@dataclass(frozen=True, slots=True)
class BadReport:
    """The bad samples of a stream: ``total`` of them, of which ``samples`` has the first few thousand."""

    total: int
    samples: tuple[BadSample, ...]


class Connecting(TypedDict, total=False):
    """What ``connect`` takes besides the address, for those who pass it on."""

    key: str | None
    connections: int | None
    connect_timeout_s: float
    reconnect_timeout_s: float
    batch_timeout_s: float


def connect(  # noqa: PLR0913  what a trainer may say of its way to the daemon, each by its name
    address: str | None = None,
    *,
    key: str | None = None,
    connections: int | None = None,
    connect_timeout_s: float = 10.0,
    reconnect_timeout_s: float = 60.0,
    batch_timeout_s: float = 300.0,
    writable_slots: bool = False,
) -> "Daemon":
    """Connect to a batchd daemon.

    ``address`` is its runtime directory on this machine, as in ``ipc:///run/batchd``, or its place
    in the network, as in ``tcp://bigbox:7070``. Default: ``$BATCHD_ADDRESS``, else the first of
    ``/run/batchd`` and ``$XDG_RUNTIME_DIR/batchd`` where one answers. ``key``: the connection file
    for a daemon in the network; default: ``$BATCHD_KEY``. ``connections``: over how many TCP
    connections batches shall come; default: ``$BATCHD_CONNECTIONS``, else 1. More of them help
    where one is the limit: by encryption on one core, by a long way, by a network that shares by
    connection.

    A daemon whose address is given or in the environment may be starting: it is waited for, up to
    ``connect_timeout_s``. Without an address, nothing says that there is one, and where none
    answers this fails at once.

    ``connect_timeout_s`` bounds connecting and every question, ``reconnect_timeout_s`` how long a
    daemon may be away (loops just wait longer meanwhile), ``batch_timeout_s`` how long a living
    daemon may take for one batch.

    ``writable_slots`` is for adapters that register slots with a device which reads no memory that
    is mapped read-only: slots are mapped writable where the daemon's configuration allows it.
    Arrays stay read-only, and nobody shall write.

    Raises ``DaemonNotFound``, ``PermissionDenied``, ``DaemonFull``, ``ConnectTimeout``,
    ``VersionMismatch``, ``AddressInvalid``, ``KeyInvalid``, ``ConnectionsInvalid`` or
    ``ProtocolError``.
    """
    deadlines = Deadlines(connect_timeout_s, reconnect_timeout_s, batch_timeout_s)
    count = find_connections(connections)
    sockets = Sockets(count)
    connection = None
    try:
        target_at = partial(Target, sockets, key=find_key(key), connections=count, writable_slots=writable_slots)
        target, session = find_daemon(target_at, address, connect_timeout_s)
        connection = Connection(target, session, deadlines)
    finally:
        if connection is None:
            sockets.destroy()
    return Daemon(connection)


class Daemon(Unique):
    """A connection to a daemon; ``connect`` makes it. Use it in a ``with``, or close it."""

    INSTEAD = "a connection is its program's own; open another with batchd_client.connect(daemon.address)"

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def address(self) -> str:
        """Where the daemon is: what ``connect`` takes."""
        return self._connection.place.address

    def stream(  # noqa: PLR0913  what a trainer may say of a stream, each by its name
        self,
        name: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        window: int | None = None,
        epochs: int | None = None,
        state: Mapping[str, object] | None = None,
    ) -> Stream:
        """Claim the stream ``name``: all of it, or share ``rank`` of ``world_size``, which take its steps in turn.

        ``window``: how many batches shall be ready ahead of this trainer (default: the stream's
        setting). ``epochs``: the training's length, counted from epoch 0, so a resumed run says the
        same number; nothing is decoded beyond it, and iteration past it ends at once. ``state``:
        what ``state_dict()`` gave, to go on exactly there.

        Raises ``StreamUnknown``, ``RankInvalid``, ``WindowInvalid``, ``TooFewBatches``,
        ``RingTooSmall``, ``StateMismatch``, …
        """
        rank, world_size = index(rank), index(world_size)
        if not 0 <= rank < world_size:
            raise RankInvalid(f"rank {rank} of world_size {world_size}")
        if window is not None and index(window) < 1:
            raise WindowInvalid(f"window {window}: at least one batch has to be ready at a time")
        if epochs is not None and index(epochs) < 0:
            raise PositionInvalid(f"epochs {epochs}")
        claim = SubscriptionRequest(
            name, rank, world_size, 0 if window is None else index(window), None if epochs is None else index(epochs)
        )
        return Stream(self._connection, claim, state)

    def spectate(self, name: str, epoch: int = 0, step: int = 0) -> Stream:
        """Look at the stream ``name`` as a trainer that begins there would see it; no trainer waits for a spectator.

        Of a live stream it gets one batch, the first from there on, and uses nothing up. Raises
        ``StreamUnknown``, ``PositionInvalid``, …
        """
        claim = SubscriptionRequest(name, rank=0, world_size=1, window=1, end_epoch=None, is_spectator=True)
        return Stream(self._connection, claim, None, checked_position(epoch, step))

    def status(self) -> dict[str, object]:
        """What everybody does right now: the same data that `batchd status --json` prints."""
        return self._connection.run(self._ask_status)

    def bad(self, stream: str) -> BadReport:
        """Which samples of ``stream`` are bad, and why. Raises ``StreamUnknown``."""
        return self._connection.run(partial(self._ask_bad, stream=stream))

    def close(self) -> None:
        """End the connection and all its streams. Batches that are still alive stay readable. Closing twice does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        session = self._connection.session
        return f"<Daemon {self.address} {f'version {session.daemon_version}' if session else '[closed]'}>"

    def _ask_status(self, session: Session) -> dict[str, object]:
        return session.request(AskStatus, Status, self._connection.deadlines.request_deadline()).status

    def _ask_bad(self, session: Session, stream: str) -> BadReport:
        answer = session.request(
            lambda request: AskBad(request, stream), BadSamples, self._connection.deadlines.request_deadline()
        )
        return BadReport(answer.total, tuple(BadSample(*sample) for sample in answer.samples))
