"""Which slot may be given up, spelled out slowly: each reader is asked about each slot.

Tests only.
"""

from collections.abc import Iterable

from batchd.core.course import Course
from batchd.core.delivery import Delivery
from batchd.core.ring import Slot
from batchd_wire.position import Position
from support.core_course import sequence_of

NEVER = float("inf")


def next_use(readers: Iterable[tuple[Course, int]], key: Position, *, repeats: bool) -> float:
    """How many batches until one of ``readers`` (course, next sequence) reads ``key``.

    ``NEVER`` where none will.
    """
    nearest = NEVER
    for course, sequence in readers:
        share = course.at(sequence)
        if share is None:
            continue
        epochs = range(share.position.epoch, share.position.epoch + 3) if repeats else (key.epoch,)
        for epoch in epochs:
            place = sequence_of(course, Position(epoch, key.step))
            if place is not None and place >= sequence:
                nearest = min(nearest, place - sequence)
    return nearest


def next_use_of_slot(delivery: Delivery, slot: Slot) -> float:
    """How far away the next reading of a slot is; what is not whole is of no use to anybody."""
    if slot.position is None or slot.fill is not None:
        return NEVER
    trainers = [one for one in delivery.subscriptions.values() if not one.ended and not one.is_spectator]
    readers = [(one.course, one.next_sequence) for one in trainers]
    return next_use(readers, slot.position, repeats=delivery.spec.repeats)


def check_choice(delivery: Delivery, chosen: Slot | None) -> None:
    """The chosen slot is not needed, or needed later than all others, and the ring cannot grow."""
    uses = [next_use_of_slot(delivery, slot) for slot in delivery.ring.slots.values() if slot.is_idle]
    latest = max(uses, default=None)
    kept_ahead = NEVER if delivery.spec.kept_ahead is None else delivery.spec.kept_ahead
    if latest is None or (latest != NEVER and latest <= kept_ahead and delivery.ring.can_grow):
        assert chosen is None, "a slot is given up that somebody needs, or uses"
    else:
        assert chosen is not None, "no slot is found where there is one"
        assert chosen.is_idle
        assert next_use_of_slot(delivery, chosen) == latest, "a slot is given up before one that is needed later"
