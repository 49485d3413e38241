"""`repeats`: each sample in several rows of an epoch, with other random numbers, on other ranks."""

import json
from collections import Counter

import numpy as np
import pytest

import batchd
import batchd_client
from batchd_client.errors import StateMismatch
from support.commands import batchd as command
from support.expected import Expected
from support.images import write_photos
from support.seen import joined, rows_of, rows_read, see
from support.settings import folder_stream

SAMPLES, SIZE, REPEATS = 40, 6, 3
ROWS = SAMPLES * REPEATS
STEPS = 7 * REPEATS


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty photographs, each three times: batches of six, and three with four at the end."""
    streams = {
        "photos": folder_stream(photos, batch_size=SIZE, repeats=REPEATS),
        "once": folder_stream(photos, batch_size=SIZE),
        "whole": folder_stream(photos, batch_size=SIZE, repeats=REPEATS, drop_last=True),
    }
    return start_shared_daemon(streams, workers=2, chunk_rows=2)


@pytest.fixture(scope="module")
def expected(daemon):
    found = Expected(daemon.config)
    yield found
    found.close()


@pytest.fixture(scope="module")
def orders(expected):
    """All rows of two epochs, in order: the sample of each and a digest of its bytes."""
    return [expected.all_rows(epoch) for epoch in range(2)]


def test_each_sample_is_in_three_rows_with_other_crops(daemon, expected):
    """Three consecutive batches have the same samples; the first is that of a stream without."""
    with batchd_client.connect(daemon.address) as connection:
        stream, once = connection.stream("photos", epochs=2), connection.stream("once", epochs=2)
        assert (len(stream), stream.steps, stream.samples, stream.repeats) == (STEPS, STEPS, SAMPLES, REPEATS)
        assert (len(once), once.repeats) == (7, 1)
        for epoch in range(2):
            seen, single = see(stream), see(once)
            assert seen == expected.epoch(epoch)
            assert Counter(sample for one in seen for sample in one.samples) == dict.fromkeys(range(SAMPLES), REPEATS)
            assert [one.digest for one in seen[::REPEATS]] == [one.digest for one in single]
            assert len({one.digest for one in seen}) == STEPS
        assert stream.statistics().samples == 2 * ROWS


def test_without_a_last_batch_that_is_not_full_each_other_sample_is_there_three_times(daemon):
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("whole", epochs=1)
        assert len(stream) == 6 * REPEATS
        counts = Counter(sample for one in see(stream) for sample in one.samples)
        own = connection.stream("whole", batch_size=5, epochs=1)
        assert len(own) == 36 * REPEATS // 5
        assert joined(rows_read(own)) == Expected(daemon.config, "whole").all_rows(0)[: 5 * len(own)]
    assert sorted(counts.values()) == [REPEATS] * 36


def test_three_ranks_get_one_copy_each_and_a_run_resumes_among_copies(daemon, orders):
    """Two ranks stop after four batches, among copies; three go on, and lose nothing."""
    with batchd_client.connect(daemon.address) as connection:
        ranks = [connection.stream("photos", rank, REPEATS, epochs=1) for rank in range(REPEATS)]
        found = [joined(rows_read(stream)) for stream in ranks]
        assert [sorted(sample for sample, _digest in rows) for rows in found] == [list(range(SAMPLES))] * REPEATS
        assert sorted(joined(found)) == sorted(orders[0])

        pair = [connection.stream("photos", rank, 2, epochs=2) for rank in range(2)]
        seen = joined(joined(rows_read(stream, 2)) for stream in pair)
        state = json.loads(json.dumps(pair[0].state_dict()))
        assert state["step"] % REPEATS == 1
        others = [connection.stream("photos", rank, 3, epochs=2, state=state) for rank in range(3)]
        seen += joined(joined(rows_read(stream)) for stream in others)
        assert sorted(seen) == sorted(orders[0])
        assert sorted(joined(joined(rows_read(stream)) for stream in others)) == sorted(orders[1])


@pytest.mark.parametrize("sample", [0, 17, 18, 107, 108, 113, ROWS - 1])
def test_it_seeks_to_any_row_of_an_epoch(daemon, orders, sample):
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        stream.seek(1, sample=sample)
        assert joined(rows_read(stream)) == orders[1][sample:]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 4, SIZE, 7, 18, ROWS])
def test_own_batches_are_cut_of_all_rows(daemon, orders, size, ranks):
    """Copies are rows as others are, also those of the last batches, which are not full."""
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, ranks, batch_size=size, epochs=2) for rank in range(ranks)]
        assert {stream.steps for stream in streams} == {-(-ROWS // size)}
        for order in orders:
            found = [rows_read(stream) for stream in streams]
            assert {len(batches) for batches in found} == {len(streams[0])}
            whole = ROWS // (size * ranks)
            for turn, rank in ((turn, rank) for turn in range(whole) for rank in range(ranks)):
                at = (turn * ranks + rank) * size
                assert found[rank][turn] == order[at : at + size]
            assert set(joined(map(joined, found))) == set(order)
        assert streams[0].statistics().mismatches == 0


@pytest.mark.parametrize(("before", "after"), [(4, 7), (7, None), (None, 5)])
@pytest.mark.parametrize("taken", [1, 4, 16])
def test_a_state_goes_on_in_own_batches_of_any_size(daemon, orders, before, after, taken):
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=before, epochs=2)
        seen = joined(rows_read(stream, taken))
        state = json.loads(json.dumps(stream.state_dict()))
        other = connection.stream("photos", batch_size=after, epochs=2, state=state)
        assert seen + joined(rows_read(other)) == orders[0]
        assert joined(rows_read(other)) == orders[1]


@pytest.mark.thorough
def test_a_replay_makes_each_copy_again_and_seen_names_its_rows(daemon, tmp_path):
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos")
        for step in (9, 10, 11, STEPS - 1):
            with stream.at(1, step) as batch:
                made = batchd.replay(daemon.config, "photos", (1, step))
                assert made.crc32 == batch.crc32()
                np.testing.assert_array_equal(made.fields["image"], batch["image"])
        rows = {
            (batch.epoch, batch.step, row)
            for _epoch in range(2)
            for batch in stream
            for row, sample in enumerate(batch["index"].tolist())
            if sample == 7
        }
        seen = batchd.seen(daemon.config, "photos", stream.state_dict(), index=7)
    assert {place[1:4] for place in seen.places()} == rows
    assert (seen.times, dict(seen.by_epoch), seen.never) == (2 * REPEATS, {0: REPEATS, 1: REPEATS}, 0)
    told = command("check", daemon.config, "--explain").stdout
    assert "photos: each row is in 3 batches of an epoch, which follow each other" in told
    card = tmp_path / "card.json"
    command("card", "photos", "--config", daemon.config, "-o", card)
    other = tmp_path / "other.json"
    command("card", "photos", "--config", daemon.config, "--set", "streams.photos.repeats=2", "-o", other)
    told = command("diff", card, other, status=1).stdout
    assert "repeats: 3 became 2" in told
    assert "0:2" in told


def test_a_bad_sample_is_one_bad_sample_and_its_rows_are_reported(start_daemon, tmp_path):
    """Another stands in for it in all copies; reports of each copy are kept."""
    paths = write_photos(tmp_path / "photos", {"cat": 12})
    paths[4].write_bytes(b"no image")
    stream = folder_stream(tmp_path / "photos", batch_size=4, repeats=3, max_bad_fraction=1.0)
    daemon = start_daemon({"photos": stream}, workers=2)
    expected = Expected(daemon.config)
    with batchd_client.connect(daemon.address) as connection:
        reads = connection.stream("photos", epochs=1)
        found = []
        for batch in reads:
            with batch:
                found.append(rows_of(batch.items()))
                reads.report(np.arange(batch.samples) + 1.0)
        reads.close()
        assert found == [expected.rows(0, step) for step in range(9)]
        bad = connection.bad("photos")
        assert (bad.total, [one.sample for one in bad.samples]) == (1, [4])
    assert daemon.stream_status("photos")["reports"]["values"] == 36
    told = command("blame", "photos", address=daemon.address).stdout
    assert "9 reports" in told
    told = command("status", "photos", address=daemon.address).stdout
    assert "12, each 3 times, in 9 batches of 4 an epoch" in told


def test_another_batch_size_is_converted_where_both_have_had_the_same_samples(start_daemon, photos):
    """Else the refusal says after how many rows it is."""
    first = start_daemon({"photos": folder_stream(photos, batch_size=4, repeats=2)})
    states = {}
    with batchd_client.connect(first.address) as connection:
        stream = connection.stream("photos", epochs=2)
        for step in (5, 6):
            stream.seek(0, step)
            states[step] = stream.state_dict()
        stream.seek(0)
        had = Counter(sample for one in see(stream, 6) for sample in one.samples)
    second = start_daemon({"photos": folder_stream(photos, batch_size=6, repeats=2)})
    with batchd_client.connect(second.address) as connection:
        stream = connection.stream("photos", epochs=2)
        with pytest.raises(StateMismatch, match="only at multiples of 24 samples, and it is at 20"):
            stream.load_state_dict(states[5], convert=True)
        stream.load_state_dict(states[6], convert=True)
        assert stream.position == (0, 4)
        had += Counter(sample for one in see(stream) for sample in one.samples)
    assert had == dict.fromkeys(range(SAMPLES), 2)
