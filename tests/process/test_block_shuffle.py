"""A shuffle of blocks gives the same bytes everywhere, and its positions keep them."""

import pytest

import batchd_client
from support.expected import Expected
from support.network import free_port
from support.pools import links, pool_keys, wait_serving
from support.seen import samples, see
from support.settings import STREAM, folder_stream, write_settings
from support.shards import photo_shards

BLOCKS = {"blocks": 2, "block_samples": 5}


@pytest.fixture
def stream(photos, tmp_path):
    """Forty photographs in three shards: three blocks in each, the last one shorter."""
    return {"source": photo_shards(photos, tmp_path / "shards"), **STREAM, "shuffle": BLOCKS}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("workers", "chunk_rows"), [(1, 256), (2, 3), (5, 1)])
def test_the_bytes_depend_on_neither_workers_nor_chunks(start_daemon, stream, workers, chunk_rows):
    """The test's own process computes two epochs; each has every sample once."""
    daemon = start_daemon({"photos": stream}, workers=workers, chunk_rows=chunk_rows)
    expected = Expected(daemon.config)

    with batchd_client.connect(daemon.address) as connection:
        batches = connection.stream("photos", epochs=2)
        first, second = see(batches), see(batches)

    assert (first, second) == (expected.epoch(0), expected.epoch(1))
    assert samples(first) == samples(second) == list(range(40))
    assert [one.samples for one in first] != [one.samples for one in second]


def test_the_first_batches_come_from_the_open_blocks(start_daemon, stream):
    """Two blocks of five samples are read before any other."""
    daemon = start_daemon({"photos": {**stream, "batch_size": 5}})
    order = Expected(daemon.config).plan.order
    starts = sorted(order.block_at(0, rank).start for rank in range(order.blocks))

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1), 1)

    (batch,) = seen
    blocks = {max(start for start in starts if start <= sample) for sample in batch.samples}
    assert starts == [0, 5, 10, 13, 18, 23, 26, 31, 36]
    assert len(blocks) <= 2


@pytest.mark.thorough
def test_local_and_remote_trainers_and_worker_hosts_have_the_same_bytes(start_daemon, start_host, stream):
    """A worker host makes the order from the index that it gets."""
    daemon = start_daemon({"photos": stream}, **pool_keys(), chunk_rows=2, tcp=f"127.0.0.1:{free_port()}")
    expected = Expected(daemon.config)
    start_host(daemon, "--name", "one")
    wait_serving(daemon, 1)

    with batchd_client.connect(daemon.address) as near, batchd_client.connect(daemon.tcp_address) as far:
        local, remote = near.stream("photos", epochs=4), far.stream("photos", epochs=4)
        for epoch in range(4):
            assert see(local) == see(remote) == expected.epoch(epoch)

    (link,) = links(daemon)
    assert link["samples"] > 0
    assert link["disagreements"] == 0


def test_other_ranks_resume_in_the_middle_of_a_window(start_daemon, stream):
    """One rank stops after two batches, three go on: together they have each sample once."""
    daemon = start_daemon({"photos": {**stream, "batch_size": 3}})

    with batchd_client.connect(daemon.address) as connection:
        alone = connection.stream("photos", epochs=1)
        seen = see(alone, 2)
        state = alone.state_dict()
        alone.close()
        ranks = [connection.stream("photos", rank, 3, epochs=1, state=state) for rank in range(3)]
        for rank in ranks:
            seen += see(rank)

    assert samples(seen) == list(range(40))


@pytest.mark.thorough
def test_a_stream_of_a_reload_has_its_order(start_daemon, photos, stream):
    """A new stream gets its order from its index, and other blocks are other batches."""
    daemon = start_daemon({"other": folder_stream(photos)})
    for shuffle in (BLOCKS, {"blocks": 3, "block_samples": 4}):
        streams = {"other": folder_stream(photos), "photos": {**stream, "shuffle": shuffle}}
        settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
        write_settings(daemon.config, streams, settings)
        daemon.reload(0)
        expected = Expected(daemon.config)
        with batchd_client.connect(daemon.address) as connection:
            assert see(connection.stream("photos", epochs=1)) == expected.epoch(0)
