"""Threads are there before libzmq wants them, or it is said that they are not."""

import threading

import pytest

from batchd import threads
from batchd.errors import BatchdError
from batchd.threads import check_threads


def test_threads_that_can_be_had_end_again() -> None:
    """None is left."""
    before = threading.active_count()
    check_threads(3)
    assert threading.active_count() == before


@pytest.fixture
def one_thread(monkeypatch) -> None:
    """One more can be started, and then none."""
    left = [1]

    class Scarce(threading.Thread):
        def start(self) -> None:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            super().start()

    monkeypatch.setattr(threads, "Thread", Scarce)


@pytest.mark.usefixtures("one_thread")
def test_threads_that_cannot_be_had_are_said_with_what_helps() -> None:
    """How many are needed, and where the limit is."""
    before = threading.active_count()
    with pytest.raises(BatchdError, match="can't start new thread, of 3 that are needed: raise the limit"):
        check_threads(3)
    assert threading.active_count() == before
