"""Threads are tried before libzmq needs them, so the process can report that it gets none."""

import threading

import pytest

from batchd_wire import threads
from batchd_wire.threads import TooFewThreads, check_threads


def test_threads_that_can_be_had_end_again() -> None:
    """No thread of the check is left."""
    before = threading.active_count()
    check_threads(3)
    assert threading.active_count() == before


def test_threads_that_cannot_be_had_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread can be started, and no further one."""
    left, start = [1], threads.start_new_thread

    def scarce(function, arguments):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        return start(function, arguments)

    monkeypatch.setattr(threads, "start_new_thread", scarce)
    with pytest.raises(TooFewThreads, match="needs 3 threads, and only 1 could be started"):
        check_threads(3)
