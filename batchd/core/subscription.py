"""One trainer of a stream: where it is, what it wants, what it holds. Pure code.

    sequence   0 .... consumed ....... granted ....... granted + claims ....... consumed + window
               read   | handed over,   | being filled, | not claimed yet: no memory to
               before | not looked at  | or about to   | promise, or not wanted yet
                      | yet            | be            |

``usage`` = leases + claims is what the subscription takes of the ring. ``Claims`` keeps the sum of
all usages, each counted as at least its entitlement of two slots, within the ring. So every claim
has a slot, and no trainer waits for the slot of another one.
"""

from collections import deque
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice, takewhile
from typing import NamedTuple

from batchd.core.course import Course, Share
from batchd.core.measure import Spells, Waits
from batchd.core.ring import Slot
from batchd.core.tenants import Account, Tenant

ENTITLEMENT_SLOTS = 2
"""One to read, one being filled: with them a subscription continues whatever the others do."""


class Blocked(StrEnum):
    """Why a subscription has less than it wants. ``delivery`` says when each is retried."""

    NO_SLOT = "a claim has no slot: none is idle"
    NO_MEMORY = "the ring cannot promise one more slot"
    RESERVED = "a ready batch is reserved: its lease would leave a newcomer no room"
    AHEAD = "the next position is too far ahead of the slowest trainer, or of what the ring can hold"


@dataclass(slots=True)
class Claim:
    """A position that will be handed out later; ``slot`` is None until a slot is idle for it."""

    sequence: int
    share: Share
    slot: Slot | None = None


class Lease(NamedTuple):
    """A trainer's right to read one slot."""

    slot: Slot
    generation: int


@dataclass(slots=True, eq=False)
class Subscription:
    """See the drawing above. ``served_s``: worker time spent for it, in seconds, for fairness."""

    number: int
    session: int
    account: Account
    tenant: Tenant
    course: Course
    window: int
    waits: Waits
    short_of_memory: Spells
    """While it wants more ahead than the ring has room for."""
    is_spectator: bool = False
    """It only looks: nothing waits for it or is kept for it, and its batches count as unread."""
    is_remote: bool = False
    """Its leases last until its batches are sent, so two at a time keep its connection busy."""
    node: int | None = None
    """The memory node on which the trainer runs."""
    served_s: float = 0.0
    consumed: int = 0
    granted: int = 0
    waiting: bool = False
    """Whether it waits for a batch that it has not been handed yet."""
    awaited: int | None = None
    """The sequence of a batch that it waits for while it is being sent."""
    wait_us: int = 0
    released: int = 0
    delivered_samples: int = 0
    claims: deque[Claim] = field(default_factory=deque)
    leases: dict[int, Lease] = field(default_factory=dict)
    """By sequence."""
    blocked: set[Blocked] = field(default_factory=set)
    ended: bool = False
    """The trainer wants no more; only its leases are left."""
    exhausted: int = 0
    """No claim before this sequence has rows for a worker: the nearest claims are filled first."""
    counted: tuple[int, int] = (0, 0)
    """How much of ``committed`` and ``promised`` is in the sums that ``Claims`` keeps."""

    @property
    def usage(self) -> int:
        """Slots that it takes of the ring; a shared one counts as its own."""
        return len(self.leases) + len(self.claims)

    @property
    def owed(self) -> tuple[int, int]:
        """Slots that the ring owes it at this moment, and those that it cannot take back.

        These are its entitlement, and what it holds beyond.
        """
        leases = len(self.leases)  # few calls: this is asked several times for each batch
        if self.ended:
            return leases, leases
        usage = leases + len(self.claims)
        leases = max(leases, ENTITLEMENT_SLOTS)
        return max(leases, usage), leases

    @property
    def ready_claims(self) -> int:
        """The number of batches, next to be handed over, that are ready."""
        return sum(1 for _claim in takewhile(lambda claim: claim.slot is not None and claim.slot.is_ready, self.claims))

    @property
    def next_sequence(self) -> int:
        """The first place of its course without a claim."""
        return self.granted + len(self.claims)

    def distance(self, sequence: int) -> int:
        """Return how far it is from a batch of its course; 0 if it waits for that one."""
        return 0 if self.waiting and sequence == self.granted else 1 + sequence - self.consumed

    def unfilled(self, pending: Container[int], *, is_every: bool = True) -> Iterator[tuple[int, Slot]]:
        """Yield the claims on ``pending`` slots, nearest first: (its sequence, its slot).

        ``is_every``: there are no others with rows for a worker.
        """
        is_first = is_every
        for claim in islice(self.claims, max(0, self.exhausted - self.granted), None):
            slot = claim.slot
            if slot is not None and slot.number in pending:
                if is_first:
                    is_first, self.exhausted = False, claim.sequence
                yield claim.sequence, slot
        if is_first:
            self.exhausted = self.next_sequence

    def first_unfilled(self, pending: Container[int], *, is_every: bool) -> tuple[int, Slot] | None:
        """Return the first that ``unfilled`` yields: this is done for each trainer and order."""
        known = max(0, self.exhausted - self.granted)
        for claim in islice(self.claims, known, None) if known else self.claims:
            slot = claim.slot
            if slot is not None and slot.number in pending:
                if is_every:
                    self.exhausted = claim.sequence
                return claim.sequence, slot
        if is_every:
            self.exhausted = self.next_sequence
        return None

    def has_rows(self, sequence: int) -> None:
        """Note that a claim from ``sequence`` on may have rows for a worker now."""
        self.exhausted = min(self.exhausted, sequence)
