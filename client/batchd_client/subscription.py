"""One subscription in the trainer: its terms, handles and progress. Runs in the trainer.

    sequence   0 ........... taken ........... leased ........... leased + len(handles)
               | handed to the | at most one:   | received, not
               | user's loop   | leased, not    | checked yet
               |               | handed over    |

Invariant: ``taken`` alone is the position; it grows in the same instant in which the loop gets its
batch.
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
"""Limit on unread handles, above any window; a daemon that sends more is broken."""


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """The user's claim. ``window`` 0: the stream's. ``is_spectator``: see ``Subscribe``."""

    stream: str
    rank: int
    world_size: int
    window: int
    end_epoch: int | None
    is_spectator: bool = False

    def subscribe(self, request: int, position: Position, fingerprint: str | None) -> Subscribe:
        """Make the message that claims the stream from ``position`` on."""
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
    """The admitted stream. If its terms differ after a restart, the stream has changed."""

    fingerprint: str
    samples: int
    batch_size: int
    steps: int
    rounds: int
    classes: tuple[str, ...]
    layout: SlotLayout = field(compare=False)
    """Not compared: its fields follow from the fingerprint, and checksums may be switched."""


class OwnerToken(ref[object]):
    """What remains of a subscription's owner once it is gone: the subscription's number."""

    __slots__ = ("number",)
    number: int


class Subscription:
    """See the module. Made from ``Subscribed``; raises ``ProtocolError`` if that makes no sense."""

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
        """Buffers of the parcels among ``handles``, in order."""
        self.lent: dict[int, ReceiveBuffer] = {}
        """By sequence: buffers of living batches that were received as bytes."""
        self.owner: OwnerToken | None = None
        self.refusal: Refused | None = None
        self.taken = 0
        self.leased = 0
        self.outstanding: dict[int, LeaseToken] = {}
        """By sequence: leases whose end has not been reported."""
        self.ended: deque[LeaseToken] = deque()
        """Ended leases; appended to in any thread, at any time, and sometimes twice."""
        self.wait_us = 0
        self.wait_reported_us = 0
        """The part of ``wait_us`` that the daemon knows."""
        self.announced_s = 0.0
        """Time of the last report that the trainer waits; 0 if there was none."""

    @property
    def position(self) -> Position:
        """Position of the next batch that the user's loop gets."""
        return self.counter.position(self.taken)

    @property
    def held(self) -> int:
        """Number of batches that are alive, or have arrays that are."""
        ended = {token.sequence for token in self.ended.copy()}
        return sum(sequence not in ended for sequence in self.outstanding)

    def watch(self, owner: object, forgotten: deque[OwnerToken]) -> None:
        """Have a token appended to ``forgotten`` once ``owner`` is garbage."""
        self.owner = OwnerToken(owner, forgotten.append)
        self.owner.number = self.number

    def add_part(self, parcel: Parcel) -> None:
        """Note a received part; keep batches that are complete now."""
        for whole, buffer in self.arrivals.note(parcel):
            self.received.append(buffer)
            self.add_handle(whole)

    def add_handle(self, handle: Handle | Parcel) -> None:
        """Keep a received handle until the user's loop wants it."""
        if len(self.handles) >= HANDLES_MAX:
            raise ProtocolError(f"more than {HANDLES_MAX} batches that were never asked for")
        self.handles.append(handle)

    def add_lease(self, lease: Lease) -> None:
        """Note the next batch's lease, which ``forget_released`` forgets after its end."""
        self.outstanding[self.leased] = lease.token
        self.leased += 1

    def pull(self, consumed: int, waited_us: int, *, waiting: bool) -> Pull:
        """Make a ``Pull`` with the position and the ended leases. Then call ``forget_released``."""
        ended = self.ended  # other threads append at its end meanwhile, so it is read by index
        tokens = [ended[index] for index in range(min(len(ended), RELEASED_MAX))]
        released = [(token.sequence, token.generation) for token in tokens]
        return Pull(self.number, consumed, waiting, self.wait_us + waited_us, released)

    def let_go(self) -> None:
        """Drop everything received: the session is over. Living batches keep their memory."""
        self.handles.clear()
        self.received.clear()
        self.lent.clear()
        self.arrivals = Arrivals(self.terms.layout.slot_bytes)

    def forget_released(self, pull: Pull) -> None:
        """Forget the leases whose end a pull reported."""
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
