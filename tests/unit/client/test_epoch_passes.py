"""Passes for a framework that reads ahead, drops batches, and starts again."""

from typing import NamedTuple

import pytest

from batchd_client.batch import BatchRows
from batchd_client.epoch_passes import EpochPasses
from batchd_client.errors import BatchTimeout, PassOvertaken, ReportInvalid
from batchd_wire.position import Position

STEPS = 4


class Taken(NamedTuple):
    """A batch of eight rows."""

    epoch: int
    step: int

    @property
    def span(self):
        return BatchRows(*self, 0, 8)


class Stream:
    """Four batches in an epoch, for one of ``world_size`` ranks; a batch is its position."""

    name = "photos"

    def __init__(self, world_size=1):
        self.epoch = self.step = 0
        self.world_size = world_size
        self.seeks = 0
        self.error = None

    @property
    def position(self):
        return Position(self.epoch, self.step)

    @property
    def left(self):
        return -(-(STEPS - self.step) // self.world_size)

    def take(self, epoch):
        if self.epoch != epoch:
            return None
        batch = Taken(self.epoch, self.step)
        if isinstance(self.error, BatchTimeout):
            raise self.error
        self.step += self.world_size
        if self.step >= STEPS:
            self.epoch, self.step = self.epoch + 1, 0
        if self.error is not None:
            raise self.error
        return batch

    def seek(self, epoch, step=0):
        self.epoch, self.step = epoch, step

    def return_to(self, position):
        self.seeks += 1
        self.epoch, self.step = position

    def state_at(self, position):
        return {"stream": "photos", "fingerprint": "f", "epoch": position.epoch, "step": position.step}


def read(passes, batches=STEPS):
    """The steps of this many batches of a new pass, and its epoch."""
    turn = passes.begin()
    taken = [passes.take(turn) for _ in range(batches)]
    assert len({epoch for epoch, _ in taken}) <= 1
    return [step for _, step in taken]


def test_passes_are_epochs():
    """They follow each other without a seek."""
    passes = EpochPasses(Stream())
    for epoch in range(3):
        turn = passes.begin()
        assert [passes.take(turn) for _ in range(5)] == [*((epoch, step) for step in range(STEPS)), None]
        assert passes.is_over
    assert passes.stream.seeks == 0


@pytest.mark.parametrize("left_after", [0, 1, 3])
def test_an_abandoned_pass_starts_again(left_after):
    """The loop may have received any part of it."""
    passes = EpochPasses(Stream())
    read(passes)
    assert read(passes, left_after) == list(range(left_after))
    assert passes.present == ((1, 0), STEPS)
    assert read(passes) == [0, 1, 2, 3]
    assert passes.stream.epoch == 2


def test_all_readers_of_a_stream_share_its_passes():
    """Two data sets over one stream do not start in its middle."""
    stream = Stream()
    read(EpochPasses(stream), 2)
    assert read(EpochPasses(stream)) == [0, 1, 2, 3]


def test_a_resumed_pass_has_the_rest_of_its_epoch():
    """This holds after an abandoned pass, too; the next pass is a whole epoch."""
    stream = Stream()
    stream.seek(3, 1)
    passes = EpochPasses(stream)
    assert passes.present == ((3, 1), 3)
    assert read(passes, 2) == [1, 2]
    assert read(passes, 3) == [1, 2, 3]
    assert read(passes) == [0, 1, 2, 3]


def test_a_stream_that_the_program_has_moved_is_read_from_there():
    """The pass before may be finished or not."""
    stream = Stream()
    passes = EpochPasses(stream)
    read(passes, 2)
    stream.seek(5, 2)
    assert passes.present == ((5, 2), 2)
    assert read(passes, 2) == [2, 3]
    stream.seek(5, 3)
    assert read(passes, 1) == [3]


def test_an_older_pass_ends_when_a_newer_one_starts():
    """Otherwise each would get only some of the batches."""
    passes = EpochPasses(Stream())
    older = passes.begin()
    passes.take(older)
    newer = passes.begin()
    with pytest.raises(PassOvertaken, match="its own stream"):
        passes.take(older)
    assert passes.take(newer) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_state_follows_the_counted_batches(world_size):
    """Batches that were read ahead do not count."""
    stream = Stream(world_size)
    passes = EpochPasses(stream)
    rounds = stream.left
    expected = [(0, step) for step in range(0, STEPS, world_size)] + [(1, 0)]
    turn = passes.begin()
    for taken in range(rounds):
        passes.take(turn)
        for batches in range(taken + 2):
            state = passes.state_dict(batches)
            assert (state["epoch"], state["step"]) == expected[batches]


def test_the_rows_of_a_counted_batch_are_known_however_far_is_read_ahead():
    """A batch that was not taken, or not in this pass, is an error that says which were."""
    passes = EpochPasses(Stream(world_size=2))
    read(passes, 2)
    assert [passes.rows(number)[:2] for number in (1, 2)] == [(0, 0), (0, 2)]
    read(passes, 1)
    assert passes.rows(1)[:2] == (1, 0)
    for number in (0, 2):
        with pytest.raises(ReportInvalid, match=f"batch {number} is not among the last 1 of .*; 1 were taken"):
            passes.rows(number)


def test_the_rows_of_the_last_batches_are_known(monkeypatch):
    """A pass may have millions of batches."""
    monkeypatch.setattr("batchd_client.epoch_passes.BATCHES_KNOWN", 2)
    passes = EpochPasses(Stream())
    read(passes)
    assert [passes.rows(number).step for number in (3, 4)] == [2, 3]
    with pytest.raises(ReportInvalid):
        passes.rows(2)


def test_trained_batches_are_counted_from_zero_in_each_pass():
    """The framework reports them."""
    passes = EpochPasses(Stream())
    read(passes)
    passes.train(1)
    passes.train(4)  # the last execution of several batches has fewer
    assert passes.trained == passes.taken == STEPS
    passes.begin()
    assert passes.trained == passes.taken == 0


def test_the_same_pass_can_be_read_again_after_its_end():
    """A caller that only looked at it does this."""
    passes = EpochPasses(Stream())
    read(passes)
    passes.begin(same=True)
    assert passes.take() == (0, 0)


def test_a_pass_goes_back_to_an_earlier_batch():
    """It continues from that batch."""
    passes = EpochPasses(Stream())
    read(passes, 3)
    passes.rewind(1)
    assert [passes.take() for _ in range(4)] == [(0, 1), (0, 2), (0, 3), None]
    assert passes.is_over


@pytest.mark.parametrize("error", [BatchTimeout(), KeyboardInterrupt()])
def test_a_lost_batch_is_still_the_next_one(error):
    """If a taken batch was lost on its way, the stream is moved back."""
    stream = Stream()
    passes = EpochPasses(stream)
    turn = passes.begin()
    assert passes.take(turn) == (0, 0)
    stream.error = error
    with pytest.raises(type(error)):
        passes.take(turn)
    stream.error = None
    assert [passes.take(turn) for _ in range(4)] == [(0, 1), (0, 2), (0, 3), None]
