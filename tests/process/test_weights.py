"""Weights and mixes that change: the same bytes everywhere, and the shares asked for."""

import numpy as np
import pytest

import batchd_client
from support.expected import Expected
from support.network import free_port
from support.pools import links, pool_keys, wait_serving
from support.seen import see
from support.settings import STREAM, folder_stream, write_settings

FEW = {"type": "subset", "stop": 8}


@pytest.fixture
def changing(photos):
    """Forty photographs, then these and the first eight in equal parts, then the eight alone."""
    whole = folder_stream(photos)["source"]
    weights = {"0": [1, 0], "6": [1, 1], "epoch 1": [0, 1]}
    mix = {"type": "mix", "weights": weights, "sources": [whole, {**FEW, "of": whole}], "source_field": "origin"}
    return {"source": mix, **STREAM, "batch_size": 4}


@pytest.fixture
def weighted(photos, tmp_path):
    """The first ten photographs have three quarters of the rows, and the last ten none."""
    np.save(tmp_path / "weights.npy", np.repeat([6.0, 1.0, 0.0], [10, 20, 10]))
    return {**folder_stream(photos), "weights": {"file": str(tmp_path / "weights.npy")}, "batch_size": 4}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(("workers", "chunk_rows"), [(1, 256), (2, 3), (5, 1)])
def test_the_bytes_depend_on_neither_workers_nor_chunks(start_daemon, weighted, changing, workers, chunk_rows):
    """The test's own process computes two epochs of each."""
    daemon = start_daemon({"weighted": weighted, "changing": changing}, workers=workers, chunk_rows=chunk_rows)

    with batchd_client.connect(daemon.address) as connection:
        for name in ("weighted", "changing"):
            batches, expected = connection.stream(name, epochs=2), Expected(daemon.config, name)
            assert (see(batches), see(batches)) == (expected.epoch(0), expected.epoch(1))


def test_a_stream_of_a_reload_has_its_weights(start_daemon, weighted, changing):
    """The daemon makes draws and order again, from the index that the reload gives it."""
    daemon = start_daemon({"changing": changing})
    settings = {"runtime_dir": str(daemon.runtime_dir), "workers": 2, "memory": "64MiB", "http": "off"}
    write_settings(daemon.config, {"weighted": weighted, "changing": {**changing, "seed": 1}}, settings)
    daemon.reload(0)

    with batchd_client.connect(daemon.address) as connection:
        for name in ("weighted", "changing"):
            assert see(connection.stream(name, epochs=1)) == Expected(daemon.config, name).epoch(0)


def test_rows_are_drawn_by_weight(start_daemon, weighted):
    """An epoch has as many rows as the source has samples."""
    daemon = start_daemon({"photos": weighted})

    with batchd_client.connect(daemon.address) as connection:
        drawn = np.concatenate([one.samples for one in see(connection.stream("photos", epochs=1))])

    assert len(drawn) == 40
    assert abs(int((drawn < 10).sum()) - 30) <= 1
    assert drawn.max() < 30


def test_ranks_change_their_shares_at_the_same_batch(start_daemon, changing):
    """With two ranks, batch 6 of the run is step 3 of each; a resumed rank is in the same place."""
    daemon = start_daemon({"photos": changing})
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


@pytest.mark.thorough
def test_trainers_and_worker_hosts_elsewhere_have_the_same_bytes(start_daemon, start_host, weighted, changing):
    """A worker host makes draws and shares from the index that it gets."""
    streams = {"photos": weighted, "changing": changing}
    daemon = start_daemon(streams, **pool_keys(), chunk_rows=2, tcp=f"127.0.0.1:{free_port()}")
    start_host(daemon, "--name", "one")
    wait_serving(daemon, 1)

    with batchd_client.connect(daemon.tcp_address) as far:
        for name in streams:
            remote, expected = far.stream(name, epochs=3), Expected(daemon.config, name)
            for epoch in range(3):
                assert see(remote) == expected.epoch(epoch)

    (link,) = links(daemon)
    assert link["samples"] > 0
