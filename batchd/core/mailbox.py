"""Which place of a live stream's mailbox holds what: lent to a producer, queued, bound to a batch, or free. Nobody's process.

    free --lend--> lent --push--> queued --bind--> bound --(first trainer gets the batch)--> free
      ^             |               ^  |             |
      +-(withdrawn, +               |  |             +--(nobody wants the batch any more)--+
      |  or dead)                   |  +--(dropped: drop_oldest)--> free                   |
      |                             +------------------------------------------------------+
      +--- who waits for a place gets the next one that is free, in the order in which they asked

A sample is bound to a row of a batch when a worker is first ordered to fill it, and that binding stays, whatever workers do,
until some trainer has got the batch. Where nobody wants it any more before that, its samples go back to the head of the queue;
a spectator has had its look by then, and that uses nothing up.

Who does not wait for its batch (it is read ahead) leaves a batch's worth of places unbound, so that whoever does wait finds room
for its own: else what is ready for one rank could take every place, while it waits for another rank, and that one for samples.
Where the one that waited for a batch is gone, and was all that waited for it, the batch gives its samples back when that room
is needed (``Delivery``).

While there is plenty of room a producer is lent its next place with the word that the last one was taken, which saves it from
asking. "Plenty" leaves so much that producers who then never write cannot keep a batch from being filled.

Invariant: each place is exactly one of free, lent, queued and bound; nobody waits for a place while one is free.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from batchd.core.actions import Action, LendPlace, TakeSample
from batchd.core.statistics import LiveStatistics
from batchd_wire.position import Position

WhenFull = Literal["block", "drop_oldest", "drop_newest"]


@dataclass(frozen=True, slots=True)
class LiveSpec:
    """What the core must know of a stream that producers push into."""

    capacity: int
    when_full: WhenFull


class Mailbox:
    """See the drawing above. Producers are known by their sessions."""

    def __init__(self, stream: int, spec: LiveSpec, batch_size: int) -> None:
        self._stream = stream
        self._spec = spec
        self._batch_size = batch_size
        self._free = deque(range(spec.capacity))
        self._lent: dict[int, int] = {}
        """By session."""
        self._waiting: dict[int, int] = {}
        """By session, in the order in which they came: the request that is to be answered."""
        self._queued: deque[int] = deque()
        self._bound: dict[Position, list[int]] = {}
        self._bound_places = 0
        self._producers: set[int] = set()
        self.pushed = 0
        self.dropped_oldest = 0
        self.dropped_newest = 0
        self.refused = 0
        """Messages about places that the producer did not have."""

    # --- producers ----------------------------------------------------------------------------------------------------

    def admit(self, session: int) -> None:
        """A session becomes a producer; once is enough."""
        self._producers.add(session)

    def has(self, session: int) -> bool:
        """Is it a producer?"""
        return session in self._producers

    @property
    def has_producers(self) -> bool:
        """Is anybody a producer?"""
        return bool(self._producers)

    def ask(self, session: int, request: int, actions: list[Action]) -> None:
        """A producer wants a place: it is lent one, told that its sample is dropped, or waits its turn."""
        place = self._lent.get(session)
        if place is None and not self._waiting:
            place = self._take_free() if self._free else self._make_free()
        if place is not None:
            self._lend(session, request, place, actions)
        elif self._spec.when_full == "block":
            self._waiting[session] = request
        else:
            self.dropped_newest += 1
            actions.append(LendPlace(session, request, None))

    def withdraw(self, session: int, actions: list[Action]) -> None:
        """A producer wants no place, and will not write into the one that it may have."""
        self._waiting.pop(session, None)
        self._take_back(session, actions)

    def push(self, session: int, request: int, place: int, actions: list[Action]) -> bool:
        """A sample is in the place that its producer was lent; False where it was not."""
        if self._lent.get(session) != place:
            self.refused += 1
            return False
        del self._lent[session]
        self._queued.append(place)
        self.pushed += 1
        next_place = None
        if len(self._free) > self._spec.capacity // 2 + self._batch_size:
            next_place = self._lent[session] = self._take_free()
        actions.append(TakeSample(session, request, next_place))
        return True

    def dismiss(self, session: int) -> None:
        """A producer is not listened to any more. What it was lent it may still write into."""
        self._producers.discard(session)
        self._waiting.pop(session, None)

    def end(self, session: int, actions: list[Action]) -> None:
        """A producer is dead. What it pushed stays."""
        self.dismiss(session)
        self._take_back(session, actions)

    def forget_waiting(self) -> list[tuple[int, int]]:
        """Nothing will be free any more: who waits, as (session, request), is to be told so."""
        waiting = list(self._waiting.items())
        self._waiting.clear()
        return waiting

    # --- batches ------------------------------------------------------------------------------------------------------

    def may_bind(self, rows: int, *, waits: bool) -> bool:
        """Are there samples for a batch? ``waits``: a trainer stands still for it; else room is left for one that does."""
        if len(self._queued) < rows:
            return False
        return waits or self._bound_places + rows + self._batch_size <= self._spec.capacity

    def has_room_for_one(self) -> bool:
        """Could a batch get its samples beside all that are bound?"""
        return self._bound_places + self._batch_size <= self._spec.capacity

    def is_bound(self, position: Position) -> bool:
        """Has the batch its samples?"""
        return position in self._bound

    def bind(self, position: Position, rows: int) -> None:
        """The oldest samples of the queue become the rows of a batch. Paired with ``release`` or ``unbind``."""
        self._bound[position] = [self._queued.popleft() for _ in range(rows)]
        self._bound_places += rows

    def places(self, position: Position, first: int, rows: int) -> tuple[int, ...]:
        """Return where the samples of some rows of a batch are; none where the batch has no samples."""
        return tuple(self._bound.get(position, ())[first : first + rows])

    def release(self, position: Position, actions: list[Action]) -> None:
        """A trainer has got the batch: its samples are never read again."""
        places = self._bound.pop(position)
        self._bound_places -= len(places)
        self._free.extend(places)
        self._lend_to_waiting(actions)

    def unbind(self, position: Position) -> None:
        """Nobody has got the batch, and nobody will: its samples are the next ones again."""
        places = self._bound.pop(position, [])
        self._bound_places -= len(places)
        self._queued.extendleft(reversed(places))

    def statistics(self, lost_batches: int) -> LiveStatistics:
        """Everything that can be counted of the mailbox."""
        return LiveStatistics(
            capacity=self._spec.capacity,
            when_full=self._spec.when_full,
            producers=len(self._producers),
            waiting_producers=len(self._waiting),
            queued_samples=len(self._queued),
            bound_samples=self._bound_places,
            lent_places=len(self._lent),
            pushed_samples=self.pushed,
            dropped_oldest=self.dropped_oldest,
            dropped_newest=self.dropped_newest,
            refused_pushes=self.refused,
            lost_batches=lost_batches,
        )

    # --- the steps ----------------------------------------------------------------------------------------------------

    def _take_free(self) -> int:
        return self._free.popleft()

    def _make_free(self) -> int | None:
        """Drop the oldest sample where that is the policy; one that is part of a batch already is not dropped."""
        if self._spec.when_full != "drop_oldest" or not self._queued:
            return None
        self.dropped_oldest += 1
        return self._queued.popleft()

    def _lend(self, session: int, request: int, place: int, actions: list[Action]) -> None:
        self._waiting.pop(session, None)
        self._lent[session] = place
        actions.append(LendPlace(session, request, place))

    def _take_back(self, session: int, actions: list[Action]) -> None:
        place = self._lent.pop(session, None)
        if place is not None:
            self._free.append(place)
            self._lend_to_waiting(actions)

    def _lend_to_waiting(self, actions: list[Action]) -> None:
        while self._waiting and self._free:
            session, request = next(iter(self._waiting.items()))
            self._lend(session, request, self._take_free(), actions)
