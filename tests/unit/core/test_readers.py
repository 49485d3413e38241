"""The nearest reader of a position, compared with a search of all courses.

The idle slot that is needed last is compared with a search of all slots.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd.core.course import Course, Readers, readers_of
from batchd.core.plan import Plan
from batchd.core.ring import Idle
from batchd_wire.position import Position
from support.core_course import sequence_of
from support.core_eviction import NEVER, next_use

EPOCHS = 5
EXAMPLES_MIN = 100
"""Starts in mid-epoch beside others are rare, and an example costs a few milliseconds."""

many_examples = settings(max_examples=max(EXAMPLES_MIN, settings.default.max_examples))


@st.composite
def courses(draw, plan: Plan) -> Course:
    """Draw any start, also in mid-epoch and at its end; most courses are endless."""
    world_size = draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4, 7, 15]))
    base = draw(st.sampled_from([0, draw(st.integers(0, plan.steps))]))
    end_epoch = draw(st.none() | st.integers(0, EPOCHS))
    return Course(plan, draw(st.integers(0, world_size - 1)), world_size, draw(st.integers(0, 3)), base, end_epoch)


@st.composite
def streams(draw) -> tuple[Plan, bool, list[Course]]:
    """Draw a plan of 1 to 24 batches per epoch, equal epochs or not, and its readers' courses."""
    plan = Plan(draw(st.integers(2, 24)), draw(st.integers(1, 2)), 0, shuffle=False, drop_last=draw(st.booleans()))
    chosen = draw(st.lists(courses(plan), min_size=1, max_size=8))
    return plan, draw(st.booleans()), [course for course in chosen if course.rounds]


def all_keys(plan: Plan, *, equal_epochs: bool) -> list[Position]:
    """Return all keys that a slot of the first epochs may hold."""
    return [Position(epoch, step) for epoch in range(1 if equal_epochs else EPOCHS + 1) for step in range(plan.steps)]


@many_examples
@given(stream=streams(), data=st.data())
def test_the_nearest_reader_is_the_one_that_asking_all_of_them_finds(stream, data):
    """This holds for every position of the readers, also after they advance, seek or disconnect."""
    plan, equal_epochs, chosen = stream
    readers = Readers(plan, equal_epochs=equal_epochs)
    places: dict[int, tuple[Course, int]] = {}
    for number, course in enumerate(chosen):
        for _ in range(data.draw(st.integers(1, 2))):
            places[number] = course, data.draw(st.integers(0, 3) | st.integers(0, 3 * plan.steps))
            readers.move(number, *places[number])
        if data.draw(st.integers(0, 5)) == 0:
            readers.forget(number)
            del places[number]
    for key in all_keys(plan, equal_epochs=equal_epochs):
        reading = readers.nearest(key)
        assert (reading.batches if reading else NEVER) == next_use(places.values(), key, equal_epochs=equal_epochs)
        if reading is not None:
            assert next_use([places[reading.reader]], key, equal_epochs=equal_epochs) == reading.batches


@given(stream=streams())
def test_the_ranks_that_read_a_step_are_those_whose_courses_have_it(stream):
    """A whole round has one, a shared last round has some, and a dropped last round has none."""
    plan, _repeats, chosen = stream
    for course in chosen:
        ranks = [Course(plan, rank, course.world_size, 0, course.base, None) for rank in range(course.world_size)]
        for step in range(plan.steps):
            found = {
                rank: turn
                for rank, one in enumerate(ranks)
                if (turn := sequence_of(one, Position(0, step))) is not None
            }
            read = readers_of(plan, course.world_size, course.base, step)
            assert found == ({} if read is None else dict.fromkeys(read[1], read[0]))


@pytest.mark.thorough
@many_examples
@given(stream=streams(), data=st.data())
def test_the_idle_slot_that_is_needed_last_is_found_while_readers_come_and_go(stream, data):
    """Slots become idle and used, readers move, new readers connect nearer, and others leave."""
    plan, equal_epochs, chosen = stream
    readers = Readers(plan, equal_epochs=equal_epochs)
    idle = Idle(readers)
    keys = all_keys(plan, equal_epochs=equal_epochs)
    held: dict[int, Position] = {}
    places: dict[int, tuple[Course, int]] = {}
    for move in data.draw(st.lists(st.integers(0, 7), min_size=10, max_size=60)):
        slot = data.draw(st.integers(0, len(keys) - 1))
        reader = data.draw(st.integers(0, len(chosen)))
        if move < 3:
            idle.put(slot, keys[slot])
            held[slot] = keys[slot]
        elif reader == len(chosen):
            continue
        elif reader not in places:
            places[reader] = chosen[reader], data.draw(st.integers(0, 3) | st.integers(0, 2 * plan.steps))
            readers.move(reader, *places[reader])
        elif move == 7:
            del places[reader]
            readers.forget(reader)
            idle.forget(reader)
        else:
            course, sequence = places[reader]
            back = move == 6 and sequence > 0
            share = course.at(sequence - back)
            if share is not None:
                places[reader] = course, sequence + (-1 if back else 1)
                readers.move(reader, *places[reader])
                taken = Position(0, share.position.step) if equal_epochs else share.position
                for number in [number for number, key in held.items() if key == taken]:
                    del held[number]
                    idle.remove(number)
        assert idle.slots == set(held)
        check(idle, held, places, equal_epochs=equal_epochs)


def check(idle: Idle, held: dict[int, Position], places: dict[int, tuple[Course, int]], *, equal_epochs: bool) -> None:
    """Check that the slot found is as good as the best of all."""
    uses = {slot: next_use(places.values(), key, equal_epochs=equal_epochs) for slot, key in held.items()}
    unneeded = idle.unneeded()
    if NEVER in uses.values():
        assert unneeded is not None
        assert uses[unneeded] == NEVER
        return
    assert unneeded is None
    last = idle.needed_last()
    assert (None if last is None else uses[last]) == max(uses.values(), default=None)
