"""Facts that each worker knows: sent once, before its first order, and again to a new worker."""

import pytest

from batchd.worker.interface import WorkerBook


@pytest.fixture
def book():
    """Two workers: the first knows two streams and three slots, the second one of each."""
    book = WorkerBook()
    for worker, streams, slots in ((1, (7, 8), (1, 2, 3)), (2, (7,), (3,))):
        assert all(book.enter_stream(worker, stream) for stream in streams)
        assert all(book.enter_slot(worker, slot) for slot in slots)
    return book


def test_a_worker_is_told_once(book):
    """Each stream and slot is sent once, however often orders name it."""
    assert not book.enter_stream(1, 7)
    assert not book.enter_slot(2, 3)
    assert book.enter_stream(2, 8)


def test_a_stream_that_ends_is_said_to_those_that_know_it(book):
    """A later stream of the same number is sent again."""
    assert book.workers_of(8) == [1]
    assert book.drop_stream(7) == [1, 2]
    assert book.drop_stream(7) == []
    assert book.enter_stream(1, 7)


def test_slots_that_go_are_said_to_those_that_know_some(book):
    """Workers that know none of the slots get no message."""
    assert book.drop_slots((2, 3, 4)) == {1: [2, 3], 2: [3]}
    assert book.drop_slots((2, 3, 4)) == {}
    assert not book.enter_slot(1, 1)


def test_nothing_is_kept_of_a_worker_that_is_gone(book):
    """Its number is never used again, and its slots are not reported to other workers."""
    book.drop_worker(1)
    book.drop_worker(9)
    assert book.workers_of(7) == [2]
    assert book.drop_slots((1, 2, 3)) == {2: [3]}
