"""The same position has the same bytes, whatever worker decodes it and whatever happened before."""

import json
import random

import pytest

import batchd_client
from support.expected import Expected
from support.seen import positions, samples, see
from support.settings import folder_stream

MANY = {"batch_size": 3}
"""Fourteen batches in an epoch, the last with one sample."""


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty samples in batches of three, and in the order of the source."""
    streams = {"photos": folder_stream(photos, **MANY), "in-order": folder_stream(photos, shuffle=False)}
    return start_shared_daemon(streams)


@pytest.fixture(scope="module")
def expected(daemon):
    """Compute the content of each position of that daemon's stream."""
    return Expected(daemon.config)


@pytest.mark.parametrize(
    ("workers", "chunk_rows"),
    [(1, 256), (5, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 1), (2, "auto"), (5, 256)])],
)
def test_the_bytes_depend_on_neither_workers_nor_chunks(start_daemon, workers, chunk_rows):
    """The test's own process computes two epochs from the files, one sample after the other."""
    daemon = start_daemon(workers=workers, chunk_rows=chunk_rows)
    expected = Expected(daemon.config)

    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        assert see(stream) == expected.epoch(0)
        assert see(stream) == expected.epoch(1)


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(daemon):
    """Shuffling loses and repeats no sample, and the next epoch has another order."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        first, second = see(stream), see(stream)

    assert samples(first) == samples(second) == list(range(40))
    assert [one.samples for one in first] != [one.samples for one in second]
    assert len(first[-1].samples) == 1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_state_resumes_exactly_three_times_in_a_row(daemon, expected, seed):
    """Each part of the training is another program that has only the last one's JSON state."""
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(1, 2 * expected.plan.steps), 3))
    state, seen = None, []
    for batches in [*cuts, 3 * expected.plan.steps]:
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("photos", epochs=3, state=state and json.loads(state))
            while len(seen) < batches and stream.epoch < 3:
                seen += see(stream, batches - len(seen))
            state = json.dumps(stream.state_dict())
            assert len(state) < 150

    assert seen == expected.epoch(0) + expected.epoch(1) + expected.epoch(2)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 5), (3, 1), (4, 2)])
def test_a_state_resumes_with_another_number_of_ranks(daemon, expected, before, after):
    """Ranks that stop at one step leave exactly the rest of the epoch to any number of ranks."""
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, before, epochs=1) for rank in range(before)]
        seen = [one for stream in streams for one in see(stream, 2)]
        states = [stream.state_dict() for stream in streams]
        for stream in streams:
            stream.close()
        assert all(state == states[0] for state in states)
        assert states[0]["step"] == 2 * before

        resumed = [connection.stream("photos", rank, after, epochs=1, state=states[0]) for rank in range(after)]
        rest = [see(stream) for stream in resumed]

    assert len({len(part) for part in rest}) == 1
    whole = [one for part in rest for one in part if one.samples == expected.batch(0, one.step).samples]
    assert all(one == expected.batch(0, one.step) for one in seen + whole)
    assert samples(seen + [one for part in rest for one in part]) == list(range(40))


def test_a_stream_without_shuffling_keeps_the_order_of_the_source(daemon):
    """Every epoch has the files in order, and only the random crops differ."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("in-order", epochs=2)
        first, second = see(stream), see(stream)

    assert [sample for one in first for sample in one.samples] == list(range(40))
    assert [one.samples for one in first] == [one.samples for one in second]
    assert [one.digest for one in first] != [one.digest for one in second]
    assert positions(first) == [(0, step) for step in range(5)]
