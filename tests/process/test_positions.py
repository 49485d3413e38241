"""The same position has the same bytes, whatever worker decodes it and whatever happened before."""

import json
import random
from itertools import islice

import pytest

import batchd_client
from batchd_client.errors import PositionInvalid, RingTooSmall, StateMismatch, StreamChanged, StreamClosed
from support.expected import Expected
from support.seen import look_at, positions, rows_of, samples, see
from support.settings import folder_stream
from support.waiting import wait_until

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
            assert len(state) < 200

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


def rows_read(stream):
    """The rows of the rest of the epoch: the sample of each, and a digest of its bytes."""
    rows = []
    for batch in stream:
        with batch:
            rows += rows_of(batch.items())
    return rows


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("sample", [0, 1, 6, 20, 38, 39, 40])
def test_a_stream_goes_on_with_any_sample_of_an_epoch(daemon, expected, sample, ranks):
    """The first batch is the rest of the one that has it; what comes before is not delivered."""
    order = expected.all_rows(0)
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, ranks, epochs=1) for rank in range(ranks)]
        for stream in streams:
            stream.seek(0, sample=sample)
        states = [stream.state_dict() for stream in streams]
        assert all(state == states[0] for state in states)
        assert len(json.dumps(states[0])) < 200
        resumed = [connection.stream("photos", rank, ranks, epochs=1, state=states[0]) for rank in range(ranks)]
        for way in (streams, resumed):
            assert {row for stream in way for row in rows_read(stream)} == set(order[sample:])

        alone = connection.stream("photos", epochs=1, state=states[0])
        assert rows_read(alone) == order[sample:]
        for wrong in ({"sample": 41}, {"sample": -1}, {"sample": 1.5}, {"step": 1, "sample": 3}):
            with pytest.raises(PositionInvalid):
                alone.seek(0, **wrong)


def test_a_trainer_keeps_its_sample_over_a_killed_daemon(start_daemon):
    """It has read nothing yet, so only the trainer knows where it is."""
    daemon = start_daemon()
    expected = Expected(daemon.config)
    order = expected.all_rows(0)
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        stream.seek(0, sample=13)
        daemon.kill()
        daemon.start()
        assert rows_read(stream) == order[13:]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("before", "after", "ranks"), [(3, 8, 1), (8, 3, 2), (7, 40, 1)])
def test_a_run_goes_on_with_another_batch_size(start_daemon, photos, before, after, ranks):
    """The state is refused with what has changed, and converted where that loses nothing."""
    first = start_daemon({"photos": folder_stream(photos, batch_size=before)})
    with batchd_client.connect(first.address) as connection:
        stream = connection.stream("photos", epochs=2)
        seen = [row for batch in islice(stream, 4) for row in rows_of(batch.items())]
        state = json.loads(json.dumps(stream.state_dict()))
    second = start_daemon({"photos": folder_stream(photos, batch_size=after)})
    rest = set(Expected(first.config).all_rows(0)) - set(seen)
    with batchd_client.connect(second.address) as connection:
        with pytest.raises(StateMismatch, match=f"state: batch_size: {before} became {after} "):
            connection.stream("photos", epochs=2, state=state)
        streams = [connection.stream("photos", rank, ranks, epochs=2) for rank in range(ranks)]
        for stream in streams:
            with pytest.raises(StateMismatch, match="convert=True"):
                stream.load_state_dict(state)
            assert stream.position == (0, 0)
            stream.load_state_dict(state, convert=True)
        assert sorted(row for stream in streams for row in rows_read(stream)) == sorted(rest)
        assert len({row for stream in streams for row in rows_read(stream)}) == 40

        changed = state | {"fingerprint": "0" * 32}
        with pytest.raises(StateMismatch):
            connection.stream("photos", state=changed, convert=True)


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("keys", "step", "there"),
    [
        ({"batch_size": 6}, 3, (0, 3)),
        ({"batch_size": 6, "repeats": 2}, 5, (0, 5)),
        ({"batch_size": 6, "repeats": 2}, 13, (1, 0)),
        ({"batch_size": 6, "bucket": {"field": "image", "by": "pixels", "budget": 3 * 72 * 96}}, 4, (0, 4)),
    ],
    ids=["full batches", "repeats", "repeats left out", "a budget of three rows"],
)
def test_a_run_goes_on_without_its_last_batches(start_daemon, photos, keys, step, there):
    """The state is converted to the same step, whatever the rows of its batches are."""
    first = start_daemon({"photos": folder_stream(photos, **keys)})
    with batchd_client.connect(first.address) as connection:
        stream = connection.stream("photos", epochs=2)
        stream.seek(0, step)
        state = json.loads(json.dumps(stream.state_dict()))
    second = start_daemon({"photos": folder_stream(photos, drop_last=True, **keys)})
    expected = Expected(second.config)
    with batchd_client.connect(second.address) as connection:
        stream = connection.stream("photos", epochs=2, state=state, convert=True)
        assert stream.position == there
        assert see(stream, 2) == [expected.batch(there[0], there[1] + number) for number in range(2)]


def test_a_stream_without_shuffling_keeps_the_order_of_the_source(daemon):
    """Every epoch has the files in order, and only the random crops differ."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("in-order", epochs=2)
        first, second = see(stream), see(stream)

    assert [sample for one in first for sample in one.samples] == list(range(40))
    assert [one.samples for one in first] == [one.samples for one in second]
    assert [one.digest for one in first] != [one.digest for one in second]
    assert positions(first) == [(0, step) for step in range(5)]


# --- a batch by its position ----------------------------------------------------------------------


def test_any_batch_can_be_looked_at_while_trainers_read(daemon, expected):
    """Trainers get what they would have got; states, slots and claims are as before."""
    looks = [(0, 0), (0, 13), (7, 5), (1, 4), (0, 5)]
    with batchd_client.connect(daemon.address) as connection, batchd_client.connect(daemon.address) as other:
        ranks = [connection.stream("photos", rank, 2) for rank in range(2)]
        watched = other.stream("photos")
        found, kept, seen = [], [], [[], []]
        for look in looks:
            for rank, stream in enumerate(ranks):
                seen[rank] += see(stream, 1)
            before = watched.state_dict(), [stream.state_dict() for stream in ranks]
            batch = watched.at(*look)
            found.append(look_at(batch))
            kept.append(batch)
            assert (watched.state_dict(), [stream.state_dict() for stream in ranks]) == before
        assert found == [expected.batch(*look) for look in looks]
        assert sorted(one for rank in seen for one in rank) == sorted(expected.epoch(0)[:10])
        for stream in (*ranks, watched):
            stream.close()
        wait_until(lambda: daemon.status()["streams"][0]["leased_slots"] == 0, "copies hold no slot")
        assert '<img alt="image"' in kept[0]._repr_html_()
        assert [kept[1].crc32(), kept[4].crc32()] == [other.stream("photos").at(*looks[one]).crc32() for one in (1, 4)]
        kept[0].release()
        assert kept[0].released
    assert look_at(kept[2]) == found[2], "a copy outlives the connection"


def test_a_batch_is_made_for_a_look_and_none_behind_it(start_daemon, photos):
    """A look costs one batch of work, at the end of an epoch, too."""
    daemon = start_daemon({"photos": folder_stream(photos, **MANY, window=1)})
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos")
        see(stream, 1)
        wait_until(lambda: daemon.status()["streams"][0]["decoded_batches"] == 2, "the next one is ready")
        for number, (epoch, step) in enumerate([(5, 3), (2, 13)], 1):
            stream.at(epoch, step).release()
            assert daemon.status()["streams"][0]["decoded_batches"] == 2 + number
        assert positions(see(stream, 2)) == [(0, 1), (0, 2)]


def test_a_look_that_the_ring_cannot_spare_is_refused_with_the_reason(start_daemon, photos):
    """Trainers go on; a position that does not exist is refused, too."""
    stream = folder_stream(photos, memory=str(2 * 32 * 1024))
    daemon = start_daemon({"photos": stream})
    with batchd_client.connect(daemon.address) as connection:
        reading = connection.stream("photos")
        with pytest.raises(RingTooSmall, match="has 2 slots and 1 trainer, and each needs 2"):
            reading.at(0, 1)
        with pytest.raises(PositionInvalid, match="step 5: an epoch of stream 'photos' has steps 0 to 4"):
            reading.at(0, 5)
        with pytest.raises(PositionInvalid):
            reading.at(-1, 0)
        assert len(see(reading)) == 5
        reading.close()
        with pytest.raises(StreamClosed):
            reading.at(0, 0)


def test_a_look_at_a_stream_that_a_reload_has_changed_is_an_error(start_daemon, photos):
    """The position would be another batch."""
    daemon = start_daemon({"photos": folder_stream(photos)})
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos")
        stream.at(0, 0).release()
        daemon.config.write_text(daemon.config.read_text().replace("window = 4", "window = 4\nseed = 5"))
        daemon.reload()
        with pytest.raises(StreamChanged, match="seed: 0 became 5"):
            stream.at(0, 0)


def test_a_live_stream_has_no_batch_to_be_asked_for_by_position(start_daemon):
    """The error names the command that shows the present one."""
    source = {"type": "push", "fields": {"x": "float32"}, "capacity": 8}
    daemon = start_daemon({"live": {"source": source, "batch_size": 2}})
    with (
        batchd_client.connect(daemon.address) as connection,
        pytest.raises(PositionInvalid, match="`batchd peek` shows the present one"),
    ):
        connection.stream("live").at(0, 0)
