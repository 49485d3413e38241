"""The places of a live stream's mailbox, and what is in each. Pure code.

    free --lend--> lent --push--> queued --bind--> bound --(first trainer gets the batch)--> free
      ^             |               ^  |             |
      +-(withdrawn, +               |  |             +--(no trainer wants it any more)-----+
      |  or dead)                   |  +--(dropped: drop_oldest)--> free                   |
      |                             +------------------------------------------------------+
      +--- waiting producers get the next free place, in the order in which they asked

A sample is bound to a row of a batch when a worker is first ordered to fill it. The binding stays,
whatever workers do, until a trainer gets the batch. If no trainer wants the batch any more before
that, its samples go back to the head of the queue; a spectator may have seen them, which uses
nothing up.

A batch that no trainer waits for (it is read ahead) takes no samples that an earlier batch needs
(``Claims.wanted``): a producer that waits for all ranks may push no more. It also leaves a batch's
worth of places unbound, so that a trainer that waits finds room for its own. Otherwise the ready
batches of one rank could take every place, while that rank waits for another one, and that one for
samples. When the only trainer that waited for a batch is gone, the batch gives its samples back as
soon as that room is needed (``Claims.reclaim_samples``).

While more than half of the places and a batch are free, a producer is lent its next place with the
answer to its last sample, which saves a question. Producers that then never write cannot keep a
batch from being filled.

Invariant: each place is exactly one of free, lent, queued and bound; no producer waits for a place
while one is free.
"""

from collections import deque
from typing import Literal

from batchd.core.actions import Action, LendPlace, TakeSample
from batchd.core.rows import Rows
from batchd_wire.position import Position
from batchd_wire.record import frozen
from batchd_wire.status import LiveStatistics

WhenFull = Literal["block", "drop_oldest", "drop_newest"]


@frozen
class LiveSpec:
    """The mailbox of a live stream: its places, and what happens to a sample when all are taken."""

    capacity: int
    when_full: WhenFull
    has_journal: bool = False
    """Whether the content of each batch that a trainer gets is noted."""


class MailboxPlaces:
    """See the drawing above. Producers are known by their sessions."""

    def __init__(self, stream: int, spec: LiveSpec, batch_size: int) -> None:
        self._stream = stream
        self._spec = spec
        self._batch_size = batch_size
        self._free = deque(range(spec.capacity))
        self._lent: dict[int, int] = {}
        """By session."""
        self._waiting: dict[int, int] = {}
        """By session, in the order of arrival: the request to answer."""
        self._queued: deque[int] = deque()
        self._numbers = [0] * spec.capacity
        """By place: the number of its sample among all that were pushed."""
        self._bound: dict[Position, list[int]] = {}
        self._bound_places = 0
        self.producers: set[int] = set()
        """Sessions that may push."""
        self.pushed = 0
        self.dropped_oldest = 0
        self.dropped_newest = 0
        self.refused = 0
        """Messages about places that the producer had not been lent."""

    # --- producers --------------------------------------------------------------------------------

    def ask(self, session: int, request: int, actions: list[Action]) -> None:
        """Lend a producer a place, tell it that its sample is dropped, or let it wait its turn."""
        place = self._lent.get(session)
        if place is None and not self._waiting:
            if self._free:
                place = self._free.popleft()
            elif self._spec.when_full == "drop_oldest" and self._queued:
                self.dropped_oldest += 1
                place = self._queued.popleft()
        if place is not None:
            self._lend(session, request, place, actions)
        elif self._spec.when_full == "block":
            self._waiting[session] = request
        else:
            self.dropped_newest += 1
            actions.append(LendPlace(session, request, None))

    def withdraw(self, session: int, actions: list[Action]) -> None:
        """Take back the place of a producer that does not write now, or its wait for one."""
        self._waiting.pop(session, None)
        self._take_back(session, actions)

    def push(self, session: int, request: int, place: int, actions: list[Action]) -> bool:
        """Queue the sample in a place; return False where its producer was not lent that place."""
        if self._lent.get(session) != place:
            self.refused += 1
            return False
        del self._lent[session]
        self._queued.append(place)
        self._numbers[place] = self.pushed
        self.pushed += 1
        next_place = None
        if len(self._free) > self._spec.capacity // 2 + self._batch_size:
            next_place = self._lent[session] = self._free.popleft()
        actions.append(TakeSample(session, request, next_place))
        return True

    def dismiss(self, session: int) -> None:
        """Ignore a producer from now on. It may still write into the place that it was lent."""
        self.producers.discard(session)
        self._waiting.pop(session, None)

    def end(self, session: int, actions: list[Action]) -> None:
        """Free the place of a dead producer. The samples that it pushed stay."""
        self.dismiss(session)
        self._take_back(session, actions)

    def forget_waiting(self) -> list[tuple[int, int]]:
        """Return the waiting producers as (session, request): no place will be free any more."""
        waiting = list(self._waiting.items())
        self._waiting.clear()
        return waiting

    # --- batches ----------------------------------------------------------------------------------

    def may_bind(self, rows: int, *, waits: bool) -> bool:
        """Return whether a batch can get its samples; unless it ``waits``, it leaves places."""
        if len(self._queued) < rows:
            return False
        return waits or self._bound_places + rows + self._batch_size <= self._spec.capacity

    @property
    def queued(self) -> int:
        """The samples that no batch has."""
        return len(self._queued)

    def has_room_for_one(self) -> bool:
        """Return whether another batch could get its samples beside all that are bound."""
        return self._bound_places + self._batch_size <= self._spec.capacity

    def is_bound(self, position: Position) -> bool:
        """Return whether the batch has its samples."""
        return position in self._bound

    def bind(self, position: Position, rows: int) -> None:
        """Make the oldest samples the rows of a batch. Paired with ``release`` or ``unbind``."""
        self._bound[position] = [self._queued.popleft() for _ in range(rows)]
        self._bound_places += rows

    def places(self, position: Position, rows: Rows) -> tuple[int, ...]:
        """Return the places of some rows of a batch; none where the batch has no samples."""
        bound = self._bound.get(position)
        return tuple([bound[row] for row in rows]) if bound else ()

    def numbers(self, position: Position) -> tuple[int, ...]:
        """Return the number of each row's sample among all that were pushed."""
        return tuple([self._numbers[place] for place in self._bound[position]])

    def release(self, position: Position, actions: list[Action]) -> None:
        """Free the places of a batch that a trainer got: its samples are never read again."""
        places = self._bound.pop(position)
        self._bound_places -= len(places)
        self._free.extend(places)
        self._lend_to_waiting(actions)

    def unbind(self, position: Position) -> None:
        """Put the samples of a batch that no trainer will get back to the head of the queue."""
        places = self._bound.pop(position, [])
        self._bound_places -= len(places)
        self._queued.extendleft(reversed(places))

    def statistics(self, lost_batches: int) -> LiveStatistics:
        """Return the counters of the mailbox."""
        return LiveStatistics(
            capacity=self._spec.capacity,
            when_full=self._spec.when_full,
            producers=len(self.producers),
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

    # --- the steps --------------------------------------------------------------------------------

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
            self._lend(session, request, self._free.popleft(), actions)
