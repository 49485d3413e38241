"""The choice of the slot to evict, computed slowly: each slot is compared with each reader.

Tests only.
"""

from collections.abc import Iterable

from batchd.core.course import Course
from batchd.core.delivery import Delivery
from batchd.core.ring import Slot
from batchd_wire.position import Position
from support.core_course import sequence_of

NEVER = float("inf")


def next_use(readers: Iterable[tuple[Course, int]], key: Position, *, equal_epochs: bool) -> float:
    """The number of batches until one of ``readers`` (course, next sequence) reads ``key``.

    ``NEVER`` if none will read it.
    """
    nearest = NEVER
    for course, sequence in readers:
        share = course.at(sequence)
        if share is None:
            continue
        epochs = range(share.position.epoch, share.position.epoch + 3) if equal_epochs else (key.epoch,)
        for epoch in epochs:
            place = sequence_of(course, Position(epoch, key.step))
            if place is not None and place >= sequence:
                nearest = min(nearest, place - sequence)
    return nearest


def next_use_of_slot(delivery: Delivery, slot: Slot) -> float:
    """The distance of the next read of a slot; no trainer can use an incomplete slot."""
    if slot.position is None or slot.fill is not None:
        return NEVER
    trainers = [one for one in delivery.subscriptions.values() if not one.ended and not one.is_spectator]
    readers = [(one.course, one.next_sequence) for one in trainers]
    return next_use(readers, slot.position, equal_epochs=delivery.spec.equal_epochs)


def check_choice(delivery: Delivery, chosen: Slot | None) -> None:
    """Assert that the chosen slot is not needed, or needed last while the ring cannot grow."""
    uses = [next_use_of_slot(delivery, slot) for slot in delivery.ring.slots.values() if slot.is_idle]
    latest = max(uses, default=None)
    kept_ahead = NEVER if delivery.spec.kept_ahead is None else delivery.spec.kept_ahead
    if latest is None or (latest != NEVER and latest <= kept_ahead and delivery.ring.can_grow):
        assert chosen is None, "a slot is evicted that is needed or in use"
    else:
        assert chosen is not None, "no slot is found although there is one"
        assert chosen.is_idle
        assert next_use_of_slot(delivery, chosen) == latest, "a slot is evicted before one that is needed later"
