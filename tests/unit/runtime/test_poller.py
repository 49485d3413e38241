"""What a loop waits for: descriptors, ZeroMQ's sockets, and timers with a clock of the tests."""

import os
from math import inf

import pytest
import zmq

from batchd.runtime import poller as module
from batchd.runtime.poller import Poller
from support.waiting import PATIENCE_S


@pytest.fixture
def poller():
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def pipes():
    """Reading ends of three pipes with a byte each; the fixture closes the open ones."""
    opened = [os.pipe() for _ in range(3)]
    for _reading, writing in opened:
        os.write(writing, b"x")
    yield [reading for reading, _writing in opened]
    for pair in opened:
        for descriptor in pair:
            os.close(descriptor)


def test_only_ready_descriptors_are_called(poller, pipes) -> None:
    """They are called again while there is more to read."""
    called = []
    for number, reading in enumerate(pipes):
        poller.watch(reading, lambda number=number: called.append(number))
    os.read(pipes[1], 1)

    poller.dispatch()
    poller.dispatch()

    assert sorted(called) == [0, 0, 2, 2]


def test_the_end_of_the_other_side_is_called_too(poller) -> None:
    """Lifelines depend on this."""
    called = []
    reading, writing = os.pipe()
    poller.watch(reading, lambda: called.append("end"))
    poller.dispatch()
    assert called == []
    os.close(writing)

    poller.dispatch()

    assert called == ["end"]
    poller.unwatch(reading)
    os.close(reading)


def test_a_callback_may_remove_itself_and_all_others(poller, pipes) -> None:
    """Callbacks that were ready at the same moment are skipped."""
    called = []

    def remove_all(number: int) -> None:
        called.append(number)
        for reading in pipes:
            poller.unwatch(reading)

    for number, reading in enumerate(pipes):
        poller.watch(reading, lambda number=number: remove_all(number))
    poller.dispatch()
    poller.dispatch()

    assert len(called) == 1


def test_a_new_descriptor_with_an_old_number_is_not_called_for_the_old_one(poller, pipes) -> None:
    """A callback closes another session and accepts a new one, which gets the same number."""
    called = []

    def replace_others(mine: int) -> None:
        called.append(mine)
        poller.unwatch(mine)
        for reading in set(pipes) - {mine}:
            poller.unwatch(reading)
            poller.watch(reading, lambda: called.append("successor"))

    for reading in pipes:
        poller.watch(reading, lambda mine=reading: replace_others(mine))
    poller.dispatch()
    assert len(called) == 1

    poller.dispatch()

    assert called.count("successor") == 2


def test_adding_twice_is_an_error_and_removing_twice_is_none(poller, pipes) -> None:
    """Several parts may report the end of the same object."""
    poller.watch(pipes[0], list)
    with pytest.raises(AssertionError, match="watched already"):
        poller.watch(pipes[0], list)
    poller.unwatch(pipes[0])
    poller.unwatch(pipes[0])

    poller.watch(pipes[0], list)


# --- ZeroMQ's sockets -----------------------------------------------------------------------------


@pytest.fixture
def pair():
    """Two connected sockets of ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://test")
        other.connect("inproc://test")
        yield one, other


def test_ready_sockets_are_returned_and_descriptors_are_called_beside_them(poller, pipes, pair) -> None:
    """Also while there is more to read, as a loop reads in portions."""
    called = []
    poller.watch_socket(pair[0])
    assert pair[0] not in poller.wait(is_busy=True)

    pair[1].send(b"one")
    pair[1].send(b"two")
    assert pair[0] in poller.wait()
    pair[0].recv()
    poller.watch(pipes[0], lambda: called.append("pipe"))
    assert pair[0] in poller.wait()
    pair[0].recv()

    assert pair[0] not in poller.wait()
    assert called == ["pipe", "pipe"]
    poller.unwatch_socket(pair[0])
    pair[1].send(b"three")
    assert pair[0] not in poller.wait()


# --- timers ---------------------------------------------------------------------------------------


class World:
    """A poller that nothing happens to; each wait ends ``late_s`` after it should."""

    def __init__(self, poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
        self.poller, self.now_s, self.late_s, self.waits = poller, 1000.0, 0.0, 0
        self.called: list[tuple[str, float]] = []
        monkeypatch.setattr(module, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(poller, "dispatch", self._pass)

    def _pass(self, timeout_s: float) -> None:
        self.waits += 1
        self.now_s = self.now_s + timeout_s + self.late_s if timeout_s >= 0 else 1e9

    def note(self, name: str, takes_s: float = 0.0) -> None:
        self.called.append((name, self.now_s - 1000.0))
        self.now_s += takes_s

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.poller.wait()


@pytest.fixture
def world(poller, monkeypatch) -> World:
    return World(poller, monkeypatch)


def test_a_timer_is_called_at_once_and_then_after_each_interval(world) -> None:
    """A loop may have a round for each message: not in each of them."""
    world.poller.every(0.5, lambda: world.note("tick"))
    for _ in range(100):
        world.poller.wait(is_busy=True)
    world.run(1.5)

    assert world.called == [("tick", 0.0), ("tick", 0.5), ("tick", 1.0), ("tick", 1.5)]


def test_timers_that_began_together_wake_the_loop_together(world) -> None:
    """Whatever their handlers take, and however late a wait ends."""
    world.late_s = 0.0007
    world.poller.every(0.5, lambda: world.note("half", takes_s=0.003))
    world.poller.every(0.5, lambda: world.note("other half"))
    world.poller.every(1.0, lambda: world.note("whole"))
    world.run(9.5)

    assert len(world.called) == 20 + 20 + 10
    assert world.waits == 20


def test_a_timer_that_was_missed_is_called_once(world) -> None:
    """The machine may have been paused; the next interval begins then."""
    world.poller.every(0.5, lambda: world.note("tick"))
    world.poller.wait()
    world.now_s += 60.2
    world.run(1.0)

    assert [at_s for _name, at_s in world.called] == pytest.approx([0.0, 60.2, 60.7, 61.2])


def test_a_hastened_timer_is_called_at_once(world) -> None:
    """The next interval begins then."""
    timer = world.poller.every(0.5, lambda: world.note("tick"))
    world.run(0.5)
    world.now_s += 0.2
    timer.hasten()
    world.run(0.5)

    assert [at_s for _name, at_s in world.called] == pytest.approx([0.0, 0.5, 0.7, 1.2])


def test_a_timer_that_nobody_needs_does_not_wake_the_loop(world) -> None:
    """It is called at once when it is needed again."""
    needed = []
    world.poller.every(0.1, lambda: world.note("audit"), only_if=needed.__len__)
    world.poller.every(5.0, lambda: world.note("tick"))
    world.run(10.0)
    assert world.waits == 3

    needed.append("a connection")
    world.run(0.15)

    assert [at_s for name, at_s in world.called if name == "audit"] == pytest.approx([10.0, 10.1, 10.2])


def test_a_timer_follows_the_state_that_it_depends_on(world) -> None:
    """It is moved and cancelled without a word to the poller."""
    due = [inf]

    def handler() -> None:
        world.note("due")
        due[0] = inf

    world.poller.at(lambda: due[0], handler)
    world.poller.every(1.0, list)
    world.run(2.0)
    due[0] = world.now_s + 0.75
    world.poller.wait(is_busy=True)
    due[0] = world.now_s + 0.25
    world.run(2.0)

    assert world.called == [("due", 2.25)]


def test_without_a_timer_a_wait_has_no_end(world) -> None:
    """Only a descriptor ends it."""
    world.poller.at(lambda: inf, lambda: world.note("never"))
    world.poller.wait()
    assert world.now_s == 1e9
    assert world.called == []


@pytest.mark.parametrize("has_sockets", [False, True])
def test_a_wait_ends_when_a_timer_is_due_and_not_before(poller, pair, has_sockets) -> None:
    """With the clock of the machine: a wait that ended early would be followed by another."""
    if has_sockets:
        poller.watch_socket(pair[0])
    called = []
    poller.every(0.02, lambda: called.append(module.monotonic()))
    waits = 0
    while len(called) < 6:
        poller.wait()
        waits += 1
    assert waits == 6
    assert 0.1 - 1e-6 <= called[-1] - called[0] < PATIENCE_S
