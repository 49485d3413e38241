"""The positions that a rank reads, compared with a plain count; states of checkpoints."""

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd_client.errors import PositionInvalid, ProtocolError, StateMismatch
from batchd_client.subscription import Beginning, PositionCounter, checked_position, checked_sample, read_state
from batchd_wire.messages import Subscribe
from batchd_wire.position import Position
from support.fake_stream import FakeStream

STATE = {"stream": "photos", "fingerprint": "ab" * 32, "epoch": 3, "step": 14}


def counter(stream: FakeStream, rank: int, world_size: int, epoch: int = 0, base: int = 0) -> PositionCounter:
    return PositionCounter(
        Position(epoch, base),
        rank,
        world_size,
        stream.steps,
        stream.rounds(0, world_size),
        stream.rounds(base, world_size),
    )


def counted_out(stream: FakeStream, rank: int, world_size: int, epoch: int, base: int) -> list[tuple[int, int]]:
    asked = Subscribe(1, "photos", rank, world_size, 0, epoch, base, epoch + 4, None, is_spectator=False)
    return list(islice(stream.positions(asked), 200))


streams_and_ranks = st.tuples(
    st.integers(1, 25), st.integers(1, 6), st.booleans(), st.integers(0, 25), st.integers(0, 5)
).filter(lambda case: (case[0] >= case[1] or not case[2]) and case[3] <= case[0] and case[4] < case[1])


@given(streams_and_ranks)
def test_a_counter_expects_exactly_the_positions_that_are_counted_out(case) -> None:
    """This holds for every rank, start and rest of a round, over several epochs."""
    steps, world_size, drop_last, base, rank = case
    stream = FakeStream(steps=steps, drop_last=drop_last)
    it = counter(stream, rank, world_size, 2, base)

    for taken, (epoch, step) in enumerate(counted_out(stream, rank, world_size, 2, base)):
        assert it.expects(taken, epoch, step)
        assert not it.expects(taken, epoch + 1, step)
        assert not it.expects(taken, epoch, step + steps)


@given(streams_and_ranks, st.integers(1, 6), st.data())
def test_state_of_one_world_resumes_in_another_without_loss_or_repetition(case, other_world, data) -> None:
    """All ranks stop after the same round.

    Another number of ranks continues with exactly the remaining steps.
    """
    steps, world_size, _, base, _ = case
    stream = FakeStream(steps=steps)
    rounds = stream.rounds(base, world_size)
    taken = data.draw(st.integers(0, rounds))
    ranks = [counted_out(stream, rank, world_size, 0, base) for rank in range(world_size)]
    before = {position for rank in ranks for position in rank[:taken]}

    epoch, step = counter(stream, 0, world_size, 0, base).position(taken)
    others = [counted_out(stream, rank, other_world, epoch, step) for rank in range(other_world)]
    after = {position for rank in others for position in rank if position[0] == 0}

    assert before | after == {(0, step) for step in range(base, steps)}
    assert not before & after


def test_end_of_an_epoch_is_the_beginning_of_the_next() -> None:
    """Positions are normalised, also if the last round is incomplete."""
    it = counter(FakeStream(steps=5), rank=1, world_size=2)

    assert [it.position(taken) for taken in range(5)] == [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2)]


def test_a_counter_that_starts_at_the_end_of_an_epoch_is_in_the_next() -> None:
    """A start after the last step has no round left in its epoch."""
    assert counter(FakeStream(steps=5), 0, 2, epoch=7, base=5).position(0) == (8, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("world_size", "base"), [(1, 0), (1, 3), (2, 0), (2, 3), (3, 5), (4, 2)])
def test_the_rest_of_an_epoch_is_counted_to_its_end(drop_last, world_size, base) -> None:
    """This holds for a first epoch with any start, and for whole epochs."""
    it = counter(FakeStream(steps=5, drop_last=drop_last), 0, world_size, epoch=0, base=base)

    for taken in range(12):
        epoch, left = it.position(taken).epoch, it.left(taken)
        assert {it.position(taken + ahead).epoch for ahead in range(left)} == {epoch}
        assert it.position(taken + left).epoch == epoch + 1


@pytest.mark.parametrize(("rounds", "first_rounds"), [(4, 3), (1, 3), (3, 4), (3, 1), (0, 0)])
def test_impossible_rounds_are_refused(rounds: int, first_rounds: int) -> None:
    """The client does not trust a daemon whose counts contradict each other."""
    with pytest.raises(ProtocolError):
        PositionCounter(Position(0, 0), 0, 2, 5, rounds, first_rounds)


def test_start_behind_the_end_is_refused() -> None:
    """The client does not trust a daemon that admits a step beyond every epoch."""
    with pytest.raises(ProtocolError):
        PositionCounter(Position(0, 6), 0, 1, 5, 5, 0)


def test_state_survives_json() -> None:
    """A checkpoint may be a text file."""
    begin = Beginning(Position(3, 14), None, "ab" * 32)
    assert read_state(json.loads(json.dumps(STATE)), "photos") == begin
    within = {**STATE, "parts": "1-2", "sample": 9}
    assert read_state(within, "photos", converts=True) == begin._replace(sample=9, parts="1-2", converts=True)


def test_state_of_another_stream_is_refused_by_name() -> None:
    """This detects a mixture of train and validation."""
    with pytest.raises(StateMismatch, match=r"'photos'.*'val'"):
        read_state(STATE, "val")


@pytest.mark.parametrize("state", [{}, {**STATE, "epoch": "3"}, {**STATE, "fingerprint": None}])
def test_values_that_are_no_state_are_refused(state: dict[str, object]) -> None:
    """The error shows the value that was passed."""
    with pytest.raises(StateMismatch, match="state_dict"):
        read_state(state, "photos")


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (0, -1), (True, 0), (0, 1.5), (1 << 63, 0)])
def test_values_that_are_no_position_are_refused(epoch: int, step: int) -> None:
    """A position has whole numbers from 0 on."""
    with pytest.raises(PositionInvalid):
        checked_position(epoch, step)
    with pytest.raises(PositionInvalid):
        checked_sample(epoch, step)
