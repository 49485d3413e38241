"""Shards in tar format, served: the same batches as from the same files in folders."""

import batchd_client
from support.expected import Expected
from support.images import encode, photo
from support.seen import see
from support.settings import folder_stream
from support.shards import photo_shards, write_shard
from support.waiting import wait_until


def test_shards_give_the_batches_that_the_same_files_give_until_one_is_cut(start_daemon, photos, tmp_path):
    """Samples are shuffled and cropped, over epochs, with a worker killed meanwhile.

    A bad sample's reason names shard and member, and the shard's length, or its change.
    """
    files = folder_stream(photos)
    cut = {"source": photo_shards(photos, tmp_path / "cut", count=1), "on_error": "mask", "max_bad_fraction": 1.0}
    streams = {"files": files, "shards": {**files, "source": photo_shards(photos, tmp_path)}, "cut": {**files, **cut}}
    daemon = start_daemon(streams)
    shard = tmp_path / "cut" / "train-00.tar"
    with batchd_client.connect(daemon.address) as connection:
        one, other = connection.stream("files", epochs=3), connection.stream("shards", epochs=3)
        assert see(one) == see(other)
        daemon.kill_a_worker()
        for _ in range(2):
            assert see(one) == see(other)
        data = shard.read_bytes()
        shard.write_bytes(data[: len(data) * 3 // 4])
        assert sum(len(one.samples) for one in see(connection.stream("cut", epochs=1))) == 40
        wait_until(lambda: connection.bad("cut").total == 40, "the samples are listed")
        bad = connection.bad("cut").samples
    assert all(f"{shard}: " in one.path and ".jpg" in one.path for one in bad)
    assert any("the shard ends at byte" in one.reason for one in bad)
    assert any("its file has changed since the daemon read it" in one.reason for one in bad)


def test_fields_are_the_same_whichever_worker_reads_them(start_daemon, photos, tmp_path):
    """A worker is killed meanwhile; a sample without its mask is bad, and is named."""
    files = sorted(photos.rglob("*.jpg"))
    mask = encode(photo(8, 8)[:, :, 0] // 128, ".png")
    members = [
        (f"{number:02}.{ending}", data)
        for number, file in enumerate(files)
        for ending, data in (
            ("jpg", file.read_bytes()),
            ("json", b'{"width": %d, "caption": "number %d"}' % (number, number)),
            ("seg.png", mask),
        )
        if (number, ending) != (7, "seg.png")
    ]
    write_shard(tmp_path / "a.tar", members)
    source = {
        "type": "webdataset",
        "root": str(tmp_path),
        "shards": ["a.tar"],
        "fields": {"image": "image", "mask": "image", "width": "int32", "caption": "text"},
        "names": {"mask": "seg.png", "caption": "json:caption"},
    }
    steps = [
        *({"op": "decode"}, {"op": "random_resized_crop", "size": [16, 16]}, {"op": "decode", "field": "mask"}),
        *(
            {"op": "center_crop", "field": "mask", "size": [8, 8]},
            {"op": "text_bytes", "field": "caption", "length": 16},
        ),
    ]
    stream = {"source": source, "batch_size": 8, "pipeline": steps, "max_bad_fraction": 0.5}
    daemon = start_daemon({"photos": stream})
    with batchd_client.connect(daemon.address) as connection:
        reads = connection.stream("photos", epochs=1)
        first = see(reads, batches=1)
        daemon.kill_a_worker()
        assert first + see(reads) == Expected(daemon.config).epoch(0)
        (bad,) = connection.bad("photos").samples
    assert bad.path == f"{tmp_path}/a.tar: 07"
    assert bad.reason == "there is no member .seg.png, which the field mask comes from"
