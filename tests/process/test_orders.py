"""Every order of samples has the same bytes everywhere, and its positions keep them."""

import numpy as np
import pytest

import batchd_client
from support.expected import Expected
from support.images import write_aspects
from support.network import free_port
from support.pools import links, pool_keys, wait_serving
from support.seen import samples, see
from support.settings import MEMORY, STREAM, folder_stream, write_settings
from support.shards import photo_shards

BUDGET = {"field": "image", "by": "pixels", "bounds": [1900, 2450], "budget": 7500}
"""Of 2,500 pixels three fit, of 1,800 four."""
ONCE = {"blocks", "buckets", "budget"}
"""Streams whose epochs have each sample once."""
OTHER = {
    "blocks": {"shuffle": {"blocks": 3, "block_samples": 4}},
    "buckets": {"bucket": {"field": "image", "by": "aspect", "count": 2}},
    "budget": {"bucket": BUDGET | {"bounds": [2450]}},
    "repeats": {"repeats": 2},
}
"""Keys that change an order; for other streams, the seed."""


@pytest.fixture(scope="module")
def streams(photos, tmp_path_factory):
    """One stream of each order, of forty samples."""
    folder = tmp_path_factory.mktemp("orders")
    whole, pictures = folder_stream(photos), folder_stream(write_aspects(folder / "pictures"))
    weights = {"0": [1, 0], "6": [1, 1], "epoch 1": [0, 1]}
    few = {"type": "subset", "stop": 8, "of": whole["source"]}
    mix = {"type": "mix", "weights": weights, "sources": [whole["source"], few], "source_field": "origin"}
    np.save(folder / "weights.npy", np.repeat([6.0, 1.0, 0.0], [10, 20, 10]))
    shards = photo_shards(photos, folder / "shards")
    return {
        # three blocks in each of three shards, the last one shorter
        "blocks": {**whole, "source": shards, "shuffle": {"blocks": 2, "block_samples": 5}},
        "buckets": {**pictures, "batch_size": 5, "bucket": {"field": "image", "by": "aspect", "count": 4}},
        "budget": {**pictures, "batch_size": 6, "bucket": BUDGET},
        # all photographs, then these and the first eight in equal parts, then the eight alone
        "changing": {**STREAM, "source": mix, "batch_size": 4},
        # the first ten have three quarters of the rows, and the last ten none
        "weighted": {**whole, "batch_size": 4, "weights": {"file": str(folder / "weights.npy")}},
        "repeats": {**whole, "batch_size": 6, "repeats": 3},
    }


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("workers", "chunk_rows"), [(2, 3), (1, 256), (5, 1)])
def test_the_bytes_depend_on_neither_workers_nor_chunks(start_daemon, streams, workers, chunk_rows):
    """The test's own process computes two epochs of each."""
    daemon = start_daemon(streams, workers=workers, chunk_rows=chunk_rows, memory=MEMORY)
    with batchd_client.connect(daemon.address) as connection:
        for name in streams:
            batches, expected = connection.stream(name, epochs=2), Expected(daemon.config, name)
            first, second = see(batches), see(batches)
            assert (first, second) == (expected.epoch(0), expected.epoch(1)), name
            assert [one.samples for one in first] != [one.samples for one in second]
            assert name not in ONCE or samples(first) == samples(second) == list(range(40))
            if name == "budget":
                assert len(first) == 13
                assert [len(one.samples) for one in first] != sorted(len(one.samples) for one in first)


def test_near_and_far_trainers_and_worker_hosts_have_the_same_bytes(start_daemon, start_host, streams):
    """A worker host makes each order from the index that it gets."""
    daemon = start_daemon(streams, **pool_keys(), chunk_rows=2, memory=MEMORY, tcp=f"127.0.0.1:{free_port()}")
    start_host(daemon, "--name", "one")
    wait_serving(daemon, 1, *streams)
    with batchd_client.connect(daemon.address) as near, batchd_client.connect(daemon.tcp_address) as far:
        for name in streams:
            local, remote = near.stream(name, epochs=2), far.stream(name, epochs=2)
            expected = Expected(daemon.config, name)
            for epoch in range(2):
                assert see(local) == see(remote) == expected.epoch(epoch), name

    (link,) = links(daemon)
    assert link["samples"] > 0
    assert link["disagreements"] == 0


@pytest.mark.thorough
def test_a_stream_of_a_reload_has_its_order(start_daemon, photos, streams):
    """The daemon makes it from the index that the reload gives it; another order, other batches."""
    other = {"other": folder_stream(photos, memory="1MiB")}
    daemon = start_daemon(other)
    for changes in ({}, OTHER):
        changed = {name: stream | changes.get(name, {"seed": len(changes)}) for name, stream in streams.items()}
        settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": MEMORY, "http": "off"}
        write_settings(daemon.config, other | changed, settings)
        daemon.reload(0)
        with batchd_client.connect(daemon.address) as connection:
            for name in streams:
                assert see(connection.stream(name, epochs=1)) == Expected(daemon.config, name).epoch(0), name


def test_the_first_batches_come_from_the_open_blocks(start_daemon, streams):
    """Two blocks of five samples are read before any other."""
    daemon = start_daemon({"photos": {**streams["blocks"], "batch_size": 5}})
    order = Expected(daemon.config).plan.order
    starts = sorted(order.block_at(0, rank).start for rank in range(order.blocks))

    with batchd_client.connect(daemon.address) as connection:
        seen = see(connection.stream("photos", epochs=1), 1)

    (batch,) = seen
    blocks = {max(start for start in starts if start <= sample) for sample in batch.samples}
    assert starts == [0, 5, 10, 13, 18, 23, 26, 31, 36]
    assert len(blocks) <= 2


def test_other_ranks_resume_in_the_middle_of_a_window(start_daemon, streams):
    """One rank stops after two batches, three go on: together they have each sample once."""
    daemon = start_daemon({"photos": {**streams["blocks"], "batch_size": 3}})

    with batchd_client.connect(daemon.address) as connection:
        alone = connection.stream("photos", epochs=1)
        seen = see(alone, 2)
        state = alone.state_dict()
        alone.close()
        ranks = [connection.stream("photos", rank, 3, epochs=1, state=state) for rank in range(3)]
        for rank in ranks:
            seen += see(rank)

    assert samples(seen) == list(range(40))


def test_rows_are_drawn_by_weight(start_daemon, streams):
    """An epoch has as many rows as the source has samples."""
    daemon = start_daemon({"photos": streams["weighted"]})

    with batchd_client.connect(daemon.address) as connection:
        drawn = np.concatenate([one.samples for one in see(connection.stream("photos", epochs=1))])

    assert len(drawn) == 40
    assert abs(int((drawn < 10).sum()) - 30) <= 1
    assert drawn.max() < 30


def test_ranks_change_their_shares_at_the_same_batch(start_daemon, streams):
    """With two ranks, batch 6 of the run is step 3 of each; a resumed rank is in the same place."""
    daemon = start_daemon({"photos": streams["changing"]})
    with batchd_client.connect(daemon.address) as connection:
        ranks = [connection.stream("photos", rank=rank, world_size=2, epochs=2) for rank in range(2)]
        origins = [[batch["origin"].tolist() for _ in range(2) for batch in rank] for rank in ranks]
        resumed = connection.stream("photos", epochs=2)
        resumed.seek(0, 6)
        assert next(iter(resumed))["origin"].tolist() == origins[0][3]

    steps = len(ranks[0])
    for rank in origins:
        assert not np.any(rank[:3])
        assert np.all(rank[steps:])
    mixed = np.asarray([rank[3:steps] for rank in origins])
    assert (mixed.size, mixed.sum()) == (24, 12)
