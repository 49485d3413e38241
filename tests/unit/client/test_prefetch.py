"""The prefetcher: batches, their order, and the content of a checkpoint, after any interrupt."""

from collections import deque

import pytest

from batchd_client.errors import BatchTimeout, PositionInvalid
from batchd_client.prefetch import Prefetcher
from batchd_client.stream import StreamStatistics
from batchd_wire.position import Position

STEPS = 4
EPOCHS = 3
ALL = [(epoch, step) for epoch in range(EPOCHS) for step in range(STEPS)]


class Cut:
    """An interrupt: ``KeyboardInterrupt`` in one of the calls, before or after its effect."""

    def __init__(self, at=None, *, after=False):
        self.calls = 0
        self._at = at
        self._after = after

    def __call__(self, effect):
        self.calls += 1
        if self.calls == self._at and not self._after:
            raise KeyboardInterrupt
        result = effect()
        if self.calls == self._at and self._after:
            raise KeyboardInterrupt
        return result


class Stream:
    """Four batches in each of three epochs; ``come`` of them have arrived ahead of the loop."""

    def __init__(self, cut=None, come=99):
        self.epoch = self.step = 0
        self.last_taken = None
        self.waits = 0
        self.come = come
        self.error = None
        self.closed = False
        self.held = 2
        self._cut = cut or Cut()

    @property
    def position(self):
        return Position(self.epoch, self.step)

    def statistics(self):
        return StreamStatistics(0, 0, 0.0, self.held, 0, 0)

    def take(self, epoch, *, wait=True):
        return self._cut(lambda: self._take(epoch, wait=wait))

    def _take(self, epoch, *, wait):
        if self.error is not None and (wait or self.error[1]):
            raise self.error[0]
        if (self.epoch, self.step) == (EPOCHS, 0) or epoch != self.epoch:
            return None
        if wait:
            self.waits += 1
        elif self.come == 0:
            return None
        else:
            self.come -= 1
        batch = self.last_taken = self.epoch, self.step
        self.epoch, self.step = divmod(self.epoch * STEPS + self.step + 1, STEPS)
        return batch

    def seek(self, epoch, step=0, *, sample=None):
        self._cut(lambda: self._seek(epoch, step))
        self.sought = sample

    def return_to(self, position):
        self._cut(lambda: self._seek(*position))

    def _seek(self, epoch, step):
        if step > STEPS:
            raise PositionInvalid
        self.epoch, self.step = epoch, step

    def state_at(self, position, *, card=False):
        state = {"stream": "fake", "fingerprint": "f", "epoch": position.epoch, "step": position.step}
        return {**state, "card": {}} if card else state

    def load_state_dict(self, state, **_options):
        self.seek(state["epoch"], state["step"])

    def when_lost(self, let_go):
        self.let_go = let_go

    def close(self):
        self.closed = True


class Clock:
    """A clock that moves only by the set duration of each action."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def during(self, action, seconds):
        """Return the action with this duration."""

        def timed(*arguments, **options):
            self.now_s += seconds
            return action(*arguments, **options)

        return timed


class Placement:
    """A placement that keeps its copies in progress and finishes each on request."""

    def __init__(self, cut=None):
        self.begun = deque()
        self.sweeps = self.waits = self.closed = 0
        self._cut = cut or Cut()

    def begin(self, batch):
        return self._cut(lambda: self._begin(batch))

    def _begin(self, batch):
        self.begun.append(batch)
        return Transfer(batch, self._cut)

    def sweep(self, *, wait=False):
        self._cut(lambda: None)
        self.sweeps += not wait
        self.waits += wait

    def close(self):
        self.closed += 1


class Transfer:
    def __init__(self, batch, cut):
        self._batch = batch
        self._cut = cut

    def finish(self):
        return self._cut(lambda: self._batch)


def epoch_of(prefetcher):
    """Return the rest of the epoch."""
    epoch, taken = prefetcher.position.epoch, []
    while (batch := prefetcher.take(epoch)) is not None:
        taken.append(batch)
    return taken


@pytest.mark.parametrize("prefetch", [0, 2, 7])
def test_a_report_is_about_the_batch_that_the_loop_has(prefetch) -> None:
    """Not about those in transit; a seek alone changes nothing."""
    prefetcher = Prefetcher(Stream(), Placement(), prefetch)
    reported = []
    for epoch in range(EPOCHS):
        while prefetcher.take(epoch) is not None:
            reported.append(prefetcher.rows)

    assert reported == ALL
    prefetcher.seek(1, 2)
    assert prefetcher.rows == ALL[-1]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7, 50])
def test_the_loop_gets_every_batch_once_and_in_order(prefetch):
    """This holds for any number of batches in progress, also across the ends of epochs."""
    prefetcher = Prefetcher(Stream(), Placement(), prefetch)
    assert [epoch_of(prefetcher) for _ in range(EPOCHS + 1)] == [ALL[:4], ALL[4:8], ALL[8:], []]


def test_so_many_are_under_way_and_no_more():
    """The number excludes the batch that the loop receives."""
    stream, placement = Stream(), Placement()
    prefetcher = Prefetcher(stream, placement, 2)
    assert prefetcher.take(0) == (0, 0)
    assert list(placement.begun) == ALL[:3]
    assert (stream.waits, prefetcher.position) == (0, (0, 1))
    for _ in range(3):
        prefetcher.take(0)
    assert list(placement.begun) == ALL[:6]
    assert stream.waits == 0


def test_no_call_waits_for_what_the_loop_does_not_want_yet():
    """The loop waits for its own batch alone; a batch that has not arrived is not started."""
    stream, placement = Stream(come=0), Placement()
    prefetcher = Prefetcher(stream, placement, 2)
    assert [prefetcher.take(0), prefetcher.take(0)] == ALL[:2]
    assert (stream.waits, list(placement.begun)) == (2, ALL[:2])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("held", "waits"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_copies_are_waited_for_only_where_the_next_batch_may_need_their_memory(prefetch, held, waits):
    """The next batch is missing, and the held slots may be what delays it."""
    stream, placement = Stream(come=3), Placement()
    stream.held = held
    prefetcher = Prefetcher(stream, placement, prefetch)
    assert [prefetcher.take(0) for _ in range(3)] == ALL[:3]
    assert (placement.waits, stream.waits) == (0, 0)
    assert prefetcher.take(0) == ALL[3]
    assert (placement.waits, stream.waits) == (waits, 1)


@pytest.mark.parametrize(
    "move",
    [lambda prefetcher: prefetcher.seek(1), lambda prefetcher: prefetcher.load_state_dict({"epoch": 1, "step": 0})],
)
def test_what_is_read_is_given_back_before_the_stream_is_moved(move):
    """A ring of two slots has no slot for another claim while the former claim holds both."""
    stream, placement = Stream(), Placement()
    prefetcher = Prefetcher(stream, placement, 2)
    prefetcher.take(0)
    waits_then = []
    stream.seek = lambda *_position, **_options: waits_then.append(placement.waits)
    move(prefetcher)
    assert waits_then == [1]


def test_the_state_is_about_what_the_loop_has_got():
    """Batches in progress are not part of the state."""
    prefetcher = Prefetcher(Stream(), Placement(), 5)
    assert prefetcher.state_dict() == {"stream": "fake", "fingerprint": "f", "epoch": 0, "step": 0}
    for epoch, step in ALL[1:]:
        prefetcher.take(prefetcher.position.epoch)
        assert prefetcher.state_dict() == {"stream": "fake", "fingerprint": "f", "epoch": epoch, "step": step}


def test_seeking_drops_what_is_under_way():
    """Seeking works by position or by state, and an invalid position changes nothing."""
    prefetcher = Prefetcher(Stream(), Placement(), 3)
    prefetcher.take(0)
    prefetcher.seek(1, 2)
    assert epoch_of(prefetcher) == ALL[6:8]
    prefetcher.load_state_dict({"epoch": 0, "step": 3})
    assert (prefetcher.take(0), prefetcher.position) == ((0, 3), (1, 0))
    with pytest.raises(PositionInvalid):
        prefetcher.seek(0, 99)
    assert epoch_of(prefetcher) == ALL[4:8]


def test_an_error_ahead_is_told_when_the_loop_gets_there():
    """After the error, the loop continues with that batch."""
    stream = Stream()
    prefetcher = Prefetcher(stream, Placement(), 2)
    prefetcher.take(0)
    stream.error = BatchTimeout("late"), True
    assert [prefetcher.take(0), prefetcher.take(0)] == ALL[1:3]
    with pytest.raises(BatchTimeout, match="late"):
        prefetcher.take(0)
    stream.error = None
    assert epoch_of(prefetcher) == ALL[3:4]


def test_it_counts_how_long_the_loop_was_inside_next():
    """The time includes stream, copy and the end of the epoch, but not the loop's own work."""
    clock, stream, placement = Clock(), Stream(come=2), Placement()
    stream.take = clock.during(stream.take, 1.0)
    placement.begin = clock.during(placement.begin, 0.25)
    prefetcher = Prefetcher(stream, placement, 0, clock)
    prefetcher.take(0)
    assert prefetcher.next_s == 1.25
    clock.now_s += 50
    prefetcher.take(0)
    assert prefetcher.next_s == 2.5


def test_what_is_begun_ahead_is_counted_where_it_is_begun():
    """A start counts in the ``next`` that starts the batch, a finish in the one that needs it."""
    clock, placement = Clock(), Placement()
    begin = clock.during(placement.begin, 0.25)

    def begin_slow_transfer(batch):
        transfer = begin(batch)
        transfer.finish = clock.during(transfer.finish, 2.0)
        return transfer

    placement.begin = begin_slow_transfer
    prefetcher = Prefetcher(Stream(come=2), placement, 1, clock)
    prefetcher.take(0)
    assert prefetcher.next_s == 2.5
    prefetcher.take(0)
    assert prefetcher.next_s == 4.5


def test_a_next_that_gives_nothing_is_not_counted():
    """A ``next`` that fails or ends the epoch belongs to no batch, as in ``wait_s``."""
    clock, stream = Clock(), Stream()
    prefetcher = Prefetcher(stream, Placement(), 0, clock)
    epoch_of(prefetcher)
    stream.error = BatchTimeout("late"), True
    stream.take = clock.during(stream.take, 60.0)
    assert prefetcher.take(0) is None
    with pytest.raises(BatchTimeout):
        prefetcher.take(1)
    assert prefetcher.next_s == 0


def interrupted_calls(prefetch, come):
    """Return the number of calls in a whole run."""
    cut = Cut()
    run_to_the_end(cut, prefetch, come)
    return cut.calls


def run_to_the_end(cut, prefetch, come):
    """Return all batches that the loop gets, with the state before and after each."""
    prefetcher = Prefetcher(Stream(cut, come), Placement(cut), prefetch, clock=lambda: cut(lambda: 0.0))
    got = []
    while prefetcher.position.epoch < EPOCHS:
        before = prefetcher.position
        try:
            batch = prefetcher.take(before.epoch)
        except KeyboardInterrupt:
            assert prefetcher.position == before
            continue
        if batch is not None:
            assert batch == before
            got.append(batch)
    return got


@pytest.mark.parametrize("come", [0, 5, 99])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_anywhere_loses_and_repeats_nothing(prefetch, come, after):
    """Interrupt each call before and after its effect: the loop continues as if uninterrupted."""
    for at in range(1, interrupted_calls(prefetch, come) + 1):
        assert run_to_the_end(Cut(at, after=after), prefetch, come) == ALL


def test_a_stream_is_closed_even_if_its_device_is_broken():
    """The error of the device is raised after that."""
    stream, placement = Stream(), Placement()
    placement.close = lambda: Cut(1)(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        Prefetcher(stream, placement, 0).close()
    assert stream.closed


def test_closing_gives_back_what_is_under_way():
    """This holds for each call, since a placement allows a second finish."""
    placement = Placement()
    prefetcher = Prefetcher(Stream(), placement, 2)
    prefetcher.take(0)
    prefetcher.close()
    prefetcher.close()
    assert placement.closed == 2
    assert placement.sweeps == 1
