"""`digest = true`: the daemon's digest of what it delivered, to any ranks, with any faults."""

import json

import numpy as np
import pytest

import batchd_client
from batchd.core.digests import digest_text, rows_lanes
from batchd_wire.slot import rows_crc32
from support.commands import batchd
from support.images import write_photos
from support.network import free_port
from support.pools import links, pool_keys, wait_serving, worker_hosts
from support.seen import see
from support.settings import folder_stream

SAMPLES, BATCH_SIZE = 40, 3


def _digests(daemon, tmp_path, name="card"):
    """Return the digests of the daemon's card by epoch: (rows, digest), and the card's file."""
    file = tmp_path / f"{name}.json"
    batchd("card", "photos", "--running", "-o", file, address=daemon.address)
    return {one["epoch"]: (one["rows"], one["digest"]) for one in json.loads(file.read_text())["digests"]}, file


@pytest.fixture(scope="module")
def expected(start_shared_daemon, photos):
    """Compute the digests of two epochs from the batches that a trainer gets."""
    daemon = start_shared_daemon({"photos": folder_stream(photos, batch_size=BATCH_SIZE)})
    found = {}
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        for epoch in range(2):
            sums = []
            for batch in stream:
                with batch:
                    covered = [(field.offset, field.row_bytes) for field in batch._fields.values()]
                    page = batch.memory.page
                    sums += [rows_crc32(page, covered, range(row, row + 1)) for row in range(batch.samples)]
            found[epoch] = SAMPLES, digest_text(rows_lanes(np.arange(SAMPLES), np.array(sums, np.uint32)))
    return found


def _digested(photos, **changes):
    return {"photos": folder_stream(photos, batch_size=BATCH_SIZE, digest=True, **changes)}


@pytest.mark.parametrize(("workers", "world_size"), [(1, 1), (4, 3)])
def test_the_digest_is_that_of_the_rows_whatever_workers_and_ranks_there_are(
    start_daemon, photos, tmp_path, expected, workers, world_size
):
    """Three ranks share the last round of fourteen batches by rows. Looks do not count."""
    daemon = start_daemon(_digested(photos), workers=workers, tcp=f"127.0.0.1:{free_port()}")
    with batchd_client.connect(daemon.address) as local, batchd_client.connect(daemon.tcp_address) as remote:
        for rank in range(world_size):
            stream = (remote if rank == 1 else local).stream("photos", rank, world_size, epochs=2)
            stream.at(9, 0).release()
            for _epoch in range(2):
                see(stream)
            if rank + 1 < world_size:
                rows, _digest = _digests(daemon, tmp_path)[0][0]
                assert rows < SAMPLES, "a rank is missing"

    assert _digests(daemon, tmp_path)[0] == expected


def test_kills_a_resume_with_other_ranks_and_a_reload_change_no_digest(start_daemon, photos, tmp_path, expected):
    """Rows that are delivered again count once, and a second job adds nothing."""
    daemon = start_daemon(_digested(photos), workers=2)
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, 2, epochs=2) for rank in range(2)]
        for stream in streams:
            see(stream, 2)
        state = streams[0].state_dict()
        for stream in streams:
            see(stream, 1)
        daemon.kill_a_worker()
    daemon.config.write_text(daemon.config.read_text().replace("window = 4", "window = 2"))
    daemon.reload()
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream("photos", rank, 3, state=state, epochs=2) for rank in range(3)]
        for stream in streams:
            see(stream)
            see(stream)
        see(connection.stream("photos", epochs=1))

    assert _digests(daemon, tmp_path)[0] == expected


@pytest.mark.thorough
def test_rows_of_worker_hosts_have_the_same_digest(start_daemon, photos, tmp_path, expected):
    """The checksum of a row comes with it."""
    daemon = start_daemon(_digested(photos), **pool_keys(), chunk_rows=1)
    with worker_hosts(tmp_path) as start_host:
        start_host(daemon)
        wait_serving(daemon, 1)
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("photos", epochs=2)
            for _epoch in range(2):
                see(stream)
        assert sum(link["samples"] for link in links(daemon)) > 0

    found = _digests(daemon, tmp_path)[0]  # also of what it took to prove the host
    assert {epoch: found[epoch] for epoch in expected} == expected


def test_cards_of_two_hosts_that_shared_the_ranks_join_to_the_whole(start_daemon, photos, tmp_path, expected):
    """Each host has a daemon, and one rank of two. Rows that both cards have are refused."""
    cards = []
    for rank in range(2):
        daemon = start_daemon(_digested(photos))
        with batchd_client.connect(daemon.address) as connection:
            stream = connection.stream("photos", rank, 2, epochs=2)
            for _epoch in range(2):
                see(stream)
        join = ["--join", cards[0]] if cards else []
        cards.append(tmp_path / f"{rank}.json")
        batchd("card", "photos", "--running", "-o", cards[rank], *join, address=daemon.address)

    whole = json.loads(cards[1].read_text())["digests"]
    assert {one["epoch"]: (one["rows"], one["digest"]) for one in whole} == expected
    again = batchd("card", "photos", "--running", "--join", cards[1], address=daemon.address, status=1)
    assert "1.json: epoch 0 has 40 rows, and both cards together 59" in again.stderr


def test_files_that_have_changed_under_the_same_names_are_found_by_their_digest(start_daemon, tmp_path):
    """The fingerprints are equal, as names are, but the model saw something else."""
    folder = tmp_path / "photos"
    paths = write_photos(folder, {"cat": 9})
    cards = []
    for name in ("a", "b", "c"):
        daemon = start_daemon(_digested(folder))
        with batchd_client.connect(daemon.address) as connection:
            see(connection.stream("photos", epochs=1))
        cards.append(_digests(daemon, tmp_path, name)[1])
        daemon.terminate()
        if name == "b":
            paths[4].write_bytes(paths[5].read_bytes())

    same = batchd("diff", cards[0], cards[1]).stdout
    assert same == "the same batch at each position\nthe same 9 rows delivered in 1 epoch\n"
    other = batchd("diff", cards[0], cards[2], status=1).stdout
    assert other.startswith("the same batch at each position\nepoch 0: other rows were delivered, digest ")
