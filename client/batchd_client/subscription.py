"""One subscription as the trainer sees it: its terms, what has arrived for it, how far it is. Runs in the trainer.

    sequence   0 ........... taken ........... leased ........... leased + len(handles)
               | handed to the | at most one:   | arrived, not
               | user's loop   | made, not yet  | looked at yet
               |               | handed over    |

Invariant: ``taken`` alone says where the subscription stands; it grows in the same instant in which the loop gets its batch.
"""

from collections import deque
from dataclasses import dataclass

from batchd_client.batch import FieldView, field_view
from batchd_client.course import Course, Position
from batchd_client.errors import ProtocolError
from batchd_wire.codec import ITEMS_MAX
from batchd_wire.fields import SlotLayout, layout_from_wire
from batchd_wire.messages import Handle, Pull, Refused, Subscribe, Subscribed

HANDLES_MAX = 1024
"""More handles than any window has; a daemon that sends more is broken."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the user asked for. ``window`` 0 is the stream's own; ``end_epoch`` None is never."""

    stream: str
    rank: int
    world_size: int
    window: int
    end_epoch: int | None

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
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """What a stream is, as the daemon admitted it; the same after every restart, or the stream has changed."""

    fingerprint: str
    samples: int
    batch_size: int
    steps: int
    rounds: int
    classes: tuple[str, ...]
    layout: SlotLayout


class Subscription:
    """See the drawing above. Made from the daemon's ``Subscribed``; raises ``ProtocolError`` where that makes no sense."""

    __slots__ = (
        "announced_s",
        "course",
        "ended",
        "fields",
        "given_back",
        "handles",
        "leased",
        "number",
        "refusal",
        "taken",
        "terms",
        "wait_us",
        "window",
    )

    def __init__(self, claim: Claim, start: Position, admitted: Subscribed) -> None:
        self.number = admitted.subscription
        self.window = admitted.window
        self.terms = _terms(admitted)
        self.course = Course(
            start, claim.rank, claim.world_size, admitted.steps, admitted.rounds, admitted.first_rounds
        )
        self.fields: dict[str, FieldView] = {field.name: field_view(field) for field in self.terms.layout.fields}
        self.handles: deque[Handle] = deque()
        self.refusal: Refused | None = None
        self.taken = 0
        self.leased = 0
        self.ended: deque[tuple[int, int]] = deque()
        """(sequence, generation) of leases that have ended and were not given back yet; finalizers append in any thread."""
        self.given_back = 0
        self.wait_us = 0
        self.announced_s = 0.0
        """When the daemon was last told that the trainer waits; 0 where it was not."""

    @property
    def position(self) -> Position:
        """The position of the next batch that the user's loop gets."""
        return self.course.position(self.taken)

    @property
    def held(self) -> int:
        """How many batches, or arrays over batches, are alive in this program."""
        return self.leased - self.given_back - len(self.ended)

    def add_handle(self, handle: Handle) -> None:
        """Keep a handle that has arrived until the user's loop wants it."""
        if len(self.handles) >= HANDLES_MAX:
            raise ProtocolError(f"more than {HANDLES_MAX} batches that were never asked for")
        self.handles.append(handle)

    def pull(self, consumed: int, waited_us: int, *, waiting: bool) -> Pull:
        """Make the message that says where we are and gives back what has ended; ``given`` must follow once it is sent."""
        ended = self.ended  # other threads append at its end meanwhile, so it is read by index
        released = [ended[index] for index in range(min(len(ended), ITEMS_MAX))]
        return Pull(self.number, consumed, waiting, self.wait_us + waited_us, released)

    def given(self, pull: Pull) -> None:
        """Forget the leases that a pull gave back."""
        for _ in pull.released:
            self.ended.popleft()
            self.given_back += 1


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
