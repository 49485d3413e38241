"""A trainer's own batch size: the samples of a stream in its order, cut otherwise."""

import json
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest

import batchd_client
from batchd_client.errors import BatchSizeInvalid, BatchTimeout, PositionInvalid, TooFewBatches
from support.expected import Expected
from support.network import free_port
from support.seen import joined, rows_of, rows_read
from support.settings import STILL_PIPELINE, folder_stream

SAMPLES, SIZE = 40, 6


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos):
    """Serve forty photographs in batches of six, the last with four, or without it."""
    own = [{"op": "decode"}, {"op": "ragged", "max_shape": [96, 128, 3]}]
    streams = {
        "photos": folder_stream(photos, batch_size=SIZE, verify=True),
        "whole": folder_stream(photos, batch_size=SIZE, drop_last=True),
        "ragged": folder_stream(photos, batch_size=SIZE, pipeline=own),
        "budget": folder_stream(
            photos, batch_size=SIZE, pipeline=own, bucket={"field": "image", "by": "pixels", "budget": 1 << 20}
        ),
    }
    streams["fixed"] = streams["budget"] | {"pipeline": STILL_PIPELINE}
    return start_shared_daemon(streams, tcp=f"127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def orders(daemon):
    """All rows of two epochs, in order: the sample of each and a digest of its bytes."""
    expected = Expected(daemon.config)
    return [expected.all_rows(epoch) for epoch in range(2)]


@pytest.mark.parametrize("size", [1, 2, 4, 5, SIZE, 7, 13, SAMPLES, 64])
def test_an_epoch_is_cut_at_multiples_of_the_own_size(daemon, orders, size):
    """Each sample comes once, with the bytes and in the order of the stream, in each epoch."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=size, epochs=2)
        assert (stream.batch_size, len(stream), stream.steps) == (size, -(-SAMPLES // size), -(-SAMPLES // size))
        for epoch, order in enumerate(orders):
            assert stream.position == (epoch, 0)
            assert rows_read(stream) == [order[at : at + size] for at in range(0, SAMPLES, size)]
        assert rows_read(stream) == []
        assert stream.statistics().samples == 2 * SAMPLES


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_ranks_share_an_epoch(daemon, orders, size, ranks):
    """Each takes equally many batches; the rest that makes no whole round is split by samples."""
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, ranks, batch_size=size, epochs=2) for rank in range(ranks)]
        for order in orders:
            found = [rows_read(stream) for stream in streams]
            assert {len(batches) for batches in found} == {len(streams[0])}
            assert sorted(joined(map(joined, found))) == sorted(order) or set(joined(map(joined, found))) == set(order)
            assert all(len(batch) <= size for batches in found for batch in batches)
            whole = SAMPLES // (size * ranks)
            for turn, rank in ((turn, rank) for turn in range(whole) for rank in range(ranks)):
                at = (turn * ranks + rank) * size
                assert found[rank][turn] == order[at : at + size]


def test_drop_last_leaves_out_what_is_no_whole_batch(daemon):
    """Of the 36 samples that the stream serves, ranks get whole rounds of whole batches."""
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("whole", rank, 2, batch_size=5, epochs=1) for rank in range(2)]
        assert [len(stream) for stream in streams] == [3, 3]
        found = [rows_read(stream) for stream in streams]
        assert [[len(batch) for batch in batches] for batches in found] == [[5] * 3] * 2
        with pytest.raises(TooFewBatches, match="36 samples"):
            connection.stream("whole", 0, 2, batch_size=20)


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 7), (7, None), (None, 5), (13, 2)])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_a_state_goes_on_in_batches_of_any_size(daemon, orders, before, after, taken):
    """It is one of the stream: it says how many samples were delivered, in less than 200 bytes."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=before, epochs=2)
        seen = joined(rows_read(stream, taken))
        state = json.dumps(stream.state_dict())
        assert len(state) < 200
        other = connection.stream("photos", batch_size=after, epochs=2, state=json.loads(state))
        assert seen + joined(rows_read(other)) == orders[0]
        assert joined(rows_read(other)) == orders[1]
        stream.load_state_dict(json.loads(state))
        assert seen + joined(rows_read(stream)) == orders[0]


def test_a_batch_is_a_view_where_it_lies_in_one_of_the_streams(daemon):
    """Three batches of two rows are of one slot, and keep it; copies are read-only as well."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=2, epochs=1)
        parts = list(islice(stream, 3))
        assert len({part.memory.address for part in parts}) == 1
        parts[0].release()
        assert [part.released for part in parts] == [True, False, False]
        held = np.array(parts[1]["image"])
        rest = rows_read(stream)
        assert len(rest) == 17
        assert (parts[1]["image"] == held).all()
        larger = next(iter(connection.stream("photos", batch_size=8, epochs=1)))
        assert not larger["image"].flags.writeable
        assert larger["image"].shape[0] == 8
        assert larger.crc32() == larger.detached().crc32()


def test_it_seeks_in_own_steps_and_to_samples(daemon, orders):
    """The position is in own steps, also within a batch; the end of an epoch is the next one."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=4, epochs=2)
        stream.seek(1, 3)
        assert stream.position == (1, 3)
        assert stream.left == 7
        assert rows_read(stream, 1) == [orders[1][12:16]]
        stream.seek(0, sample=9)
        assert stream.position == (0, 2)
        assert rows_read(stream, 2) == [orders[0][9:12], orders[0][12:16]]
        stream.seek(0, 10)
        assert stream.position == (1, 0)
        for wrong in ({"step": 11}, {"sample": 41}):
            with pytest.raises(PositionInvalid):
                stream.seek(0, **wrong)


@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("taken", range(5))
def test_a_batch_that_an_interrupt_lost_is_fetched_again(daemon, orders, size, taken):
    """It was taken from the daemon, and the loop stopped before it was kept."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=size, epochs=1)
        seen = rows_read(stream, taken)
        stream._reader._whole.take(0).release()
        assert joined(seen + rows_read(stream)) == orders[0]


def test_samples_of_their_own_shape_are_copied_with_it(daemon):
    """A batch of several of the stream's has the images of a batch that is none."""
    with batchd_client.connect(daemon.address) as connection:
        one = [np.array(image) for batch in connection.stream("ragged", epochs=1) for image in batch["image"]]
        other = [
            np.array(image) for batch in connection.stream("ragged", batch_size=9, epochs=1) for image in batch["image"]
        ]
    assert [image.shape for image in one] == [image.shape for image in other]
    assert all((image == same).all() for image, same in zip(one, other, strict=True))


def test_it_works_over_tcp_and_over_a_killed_daemon(start_daemon, photos):
    """The trainer goes on where it stands, within a batch of the stream as well."""
    daemon = start_daemon({"photos": folder_stream(photos, batch_size=SIZE)}, tcp=f"127.0.0.1:{free_port()}")
    order = Expected(daemon.config).all_rows(0)
    for address in (daemon.address, daemon.tcp_address):
        with batchd_client.connect(address) as connection:
            stream = connection.stream("photos", batch_size=4, epochs=1)
            seen = rows_read(stream, 2)
            daemon.kill()
            daemon.start()
            assert joined(seen + rows_read(stream)) == order


def test_reports_are_about_the_streams_positions(daemon):
    """A value for each row is kept with the row of the stream's batch that it is about."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=8, epochs=1)
        for batch in islice(stream, 2):
            stream.report(np.arange(batch.samples) + 10.0 * batch.step)
        stream.close()
        status = daemon.stream_status("photos")
        assert status["reports"]["values"] >= 16


def test_a_stream_that_decides_its_batches_is_refused(daemon):
    """The error says why, also where samples have one size; a number that is no size is refused."""
    with batchd_client.connect(daemon.address) as connection:
        for budgeted in ("budget", "fixed"):
            with pytest.raises(BatchSizeInvalid, match="a budget decides"):
                connection.stream(budgeted, batch_size=4)
        for wrong in (0, -1, 65_537):
            with pytest.raises(BatchSizeInvalid, match="1 to 65536"):
                connection.stream("photos", batch_size=wrong)


def test_a_batch_that_has_not_arrived_is_not_waited_for(daemon, orders):
    """What has come of it is kept; nothing is lost by a wait that is over."""
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", batch_size=9, epochs=1)
        found = []
        while stream.epoch == 0:
            with suppress(BatchTimeout):
                batch = stream.take(0, wait=False)
                if batch is not None:
                    with batch:
                        found += rows_of(batch.items())
        assert found == orders[0]
