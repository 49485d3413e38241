"""One subscription as the trainer sees it: its terms, what has arrived for it, how far it is. Runs in the trainer.

    sequence   0 ........... taken ........... leased ........... leased + len(handles)
               | handed to the | at most one:   | arrived, not
               | user's loop   | made, not yet  | looked at yet
               |               | handed over    |

Invariant: ``taken`` alone says where the subscription stands; it grows in the same instant in which
the loop gets its batch.
"""

from collections import deque
from dataclasses import dataclass, field
from weakref import ref

from batchd_client.batch import FieldView, Lease, LeaseToken, field_views
from batchd_client.errors import ProtocolError
from batchd_client.positions import PositionCounter
from batchd_client.remote import Arrivals, ReceiveBuffer
from batchd_wire.fields import SlotLayout, layout_from_wire
from batchd_wire.messages import Handle, Parcel, Pull, Refused, Subscribe, Subscribed
from batchd_wire.position import Position
from batchd_wire.slot import RowChecksums

RELEASED_MAX = 1024
"""Most ended leases in one message, well below the daemon's limit on its length."""
HANDLES_MAX = 1024
"""More handles than any window has; a daemon that sends more is broken."""


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """What the user asked for.

    ``window`` 0 is the stream's own; ``end_epoch`` None is never; spectators: see ``Subscribe``.
    """

    stream: str
    rank: int
    world_size: int
    window: int
    end_epoch: int | None
    is_spectator: bool = False

    def subscribe(self, request: int, position: Position, fingerprint: str | None) -> Subscribe:
        """The message that claims it from ``position`` on."""
        end_epoch = None if self.end_epoch is None else max(self.end_epoch, position.epoch)
        return Subscribe(
            request,
            self.stream,
            self.rank,
            self.world_size,
            self.window,
            position.epoch,
            position.step,
            end_epoch,
            fingerprint,
            self.is_spectator,
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """What a stream is, as the daemon admitted it.

    The same after every restart, or the stream has changed.
    """

    fingerprint: str
    samples: int
    batch_size: int
    steps: int
    rounds: int
    classes: tuple[str, ...]
    layout: SlotLayout = field(compare=False)
    """Its samples' fields follow from the fingerprint; checksums may come and go."""


class OwnerToken(ref[object]):
    """What is left of a subscription's owner when it was forgotten: the subscription's number."""

    __slots__ = ("number",)
    number: int


class Subscription:
    """See the drawing above.

    Made from the daemon's ``Subscribed``; raises ``ProtocolError`` where that makes no sense.
    """

    __slots__ = (
        "announced_s",
        "arrivals",
        "checksums",
        "counter",
        "ended",
        "fields",
        "handles",
        "leased",
        "lent",
        "number",
        "outstanding",
        "owner",
        "received",
        "refusal",
        "taken",
        "terms",
        "wait_reported_us",
        "wait_us",
        "window",
    )

    def __init__(self, claim: SubscriptionRequest, asked: Position, admitted: Subscribed) -> None:
        start = Position(admitted.epoch, admitted.step)
        if start < asked:
            raise ProtocolError(f"the daemon begins at {start}, before {asked} that was asked for")
        self.number = admitted.subscription
        self.window = admitted.window
        self.terms = _terms(admitted)
        self.counter = PositionCounter(
            start, claim.rank, claim.world_size, admitted.steps, admitted.rounds, admitted.first_rounds
        )
        self.fields: dict[str, FieldView] = field_views(self.terms.layout)
        self.checksums = RowChecksums(self.terms.layout)
        self.handles: deque[Handle | Parcel] = deque()
        self.arrivals = Arrivals(self.terms.layout.slot_bytes)
        self.received: deque[ReceiveBuffer] = deque()
        """What came with the parcels among ``handles``, in their order."""
        self.lent: dict[int, ReceiveBuffer] = {}
        """By sequence: the buffers of the batches that came as bytes and are not over."""
        self.owner: OwnerToken | None = None
        self.refusal: Refused | None = None
        self.taken = 0
        self.leased = 0
        self.outstanding: dict[int, LeaseToken] = {}
        """By sequence: the leases that were not forget_released back yet."""
        self.ended: deque[LeaseToken] = deque()
        """The leases that have ended.

        Appended to in any thread, at any moment, and sometimes twice.
        """
        self.wait_us = 0
        self.wait_reported_us = 0
        """How much of that the daemon was told."""
        self.announced_s = 0.0
        """When the daemon was last told that the trainer waits; 0 where it was not."""

    @property
    def position(self) -> Position:
        """The position of the next batch that the user's loop gets."""
        return self.counter.position(self.taken)

    @property
    def held(self) -> int:
        """How many batches, or arrays over batches, are alive in this program."""
        ended = {token.sequence for token in self.ended.copy()}
        return sum(sequence not in ended for sequence in self.outstanding)

    def watch(self, owner: object, forgotten: deque[OwnerToken]) -> None:
        """Have a token appended to ``forgotten`` when nobody has ``owner`` any more."""
        self.owner = OwnerToken(owner, forgotten.append)
        self.owner.number = self.number

    def add_part(self, parcel: Parcel) -> None:
        """A part of a batch is in its buffer.

        Keep what is whole now until the user's loop wants it.
        """
        for whole, buffer in self.arrivals.note(parcel):
            self.received.append(buffer)
            self.add_handle(whole)

    def add_handle(self, handle: Handle | Parcel) -> None:
        """Keep a handle that has arrived until the user's loop wants it."""
        if len(self.handles) >= HANDLES_MAX:
            raise ProtocolError(f"more than {HANDLES_MAX} batches that were never asked for")
        self.handles.append(handle)

    def add_lease(self, lease: Lease) -> None:
        """Take note of the lease of the next batch.

        Paired with ``forget_released``, some time after the lease has ended.
        """
        self.outstanding[self.leased] = lease.token
        self.leased += 1

    def pull(self, consumed: int, waited_us: int, *, waiting: bool) -> Pull:
        """Make the message with the position and the ended leases.

        Once sent, call ``forget_released``.
        """
        ended = self.ended  # other threads append at its end meanwhile, so it is read by index
        tokens = [ended[index] for index in range(min(len(ended), RELEASED_MAX))]
        released = [(token.sequence, token.generation) for token in tokens]
        return Pull(self.number, consumed, waiting, self.wait_us + waited_us, released)

    def let_go(self) -> None:
        """The session is over: keep nothing that has come.

        Batches that live have their memory themselves.
        """
        self.handles.clear()
        self.received.clear()
        self.lent.clear()
        self.arrivals = Arrivals(self.terms.layout.slot_bytes)

    def forget_released(self, pull: Pull) -> None:
        """Forget the leases that a pull gave back."""
        for sequence, _generation in pull.released:
            self.outstanding.pop(sequence, None)
            buffer = self.lent.pop(sequence, None)
            if buffer is not None:
                self.arrivals.buffers.give_back(buffer)
            self.ended.popleft()


def _terms(admitted: Subscribed) -> Terms:
    try:
        layout = layout_from_wire(admitted.layout)
    except ValueError as error:
        raise ProtocolError(f"the daemon describes its slots wrongly: {error}") from None
    return Terms(
        admitted.fingerprint,
        admitted.samples,
        admitted.batch_size,
        admitted.steps,
        admitted.rounds,
        tuple(admitted.classes),
        layout,
    )
