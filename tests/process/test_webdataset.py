"""Fields of shards in tar format, served."""

import batchd_client
from support.expected import Expected
from support.images import encode, photo
from support.seen import see
from support.shards import write_shard


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
