"""Shards in tar format, served: the same batches as from the same files in folders."""

import os
import signal

import batchd_client
from support.seen import see
from support.settings import folder_stream
from support.shards import photo_shards
from support.waiting import wait_until


def test_shards_give_the_batches_that_the_same_files_give(start_daemon, photos, tmp_path):
    """Shuffled and cropped, over epochs, with a worker killed meanwhile."""
    files = folder_stream(photos)
    daemon = start_daemon({"files": files, "shards": {**files, "source": photo_shards(photos, tmp_path)}})
    with batchd_client.connect(daemon.address) as connection:
        one, other = connection.stream("files", epochs=3), connection.stream("shards", epochs=3)
        assert see(one) == see(other)
        os.kill(daemon.status()["workers"][0]["pid"], signal.SIGKILL)
        for _ in range(2):
            assert see(one) == see(other)


def test_a_shard_that_is_cut_while_it_is_served_makes_bad_samples_that_are_named(start_daemon, photos, tmp_path):
    """With the shard, the member, and where the shard ends, or that it is another."""
    source = photo_shards(photos, tmp_path, count=1)
    stream = {**folder_stream(photos), "source": source, "on_error": "mask", "max_bad_fraction": 1.0}
    daemon = start_daemon({"photos": stream})
    shard = tmp_path / "train-00.tar"
    with batchd_client.connect(daemon.address) as connection:
        data = shard.read_bytes()
        shard.write_bytes(data[: len(data) * 3 // 4])
        reads = connection.stream("photos", epochs=1)
        assert sum(len(one.samples) for one in see(reads)) == 40
        wait_until(lambda: connection.bad("photos").total == 40, "the samples are listed")
        bad = connection.bad("photos").samples
    assert all(f"{shard}: " in one.path and ".jpg" in one.path for one in bad)
    assert any("the shard ends at byte" in one.reason for one in bad)
    assert any("its file has changed since the daemon read it" in one.reason for one in bad)
