"""Files of TFRecords, served: the same batches as from the same photographs in folders."""

import batchd_client
from support.seen import see
from support.settings import folder_stream
from support.tfrecords import example, write_records
from support.waiting import wait_until


def records_of(photos, folder, count=3):
    """Write the photographs as records, in the order of a folder source."""
    classes = sorted(path.name for path in photos.iterdir())
    files = [path for name in classes for path in sorted((photos / name).glob("*.jpg"))]
    records = [
        example(image__encoded=path.read_bytes(), image__class__label=[classes.index(path.parent.name)])
        for path in files
    ]
    for number in range(count):
        part = records[number * len(files) // count : (number + 1) * len(files) // count]
        write_records(folder / f"train-{number:05}-of-{count:05}", part)
    return {
        "type": "tfrecord",
        "root": str(folder),
        "shards": [f"train-{{00000..{count - 1:05}}}-of-{count:05}"],
        "fields": {"image": "image", "label": "int64"},
        "names": {"image": "image/encoded", "label": "image/class/label"},
    }


def test_records_give_the_batches_that_the_same_files_give_until_one_is_damaged(start_daemon, photos, tmp_path):
    """The batches are equal over epochs, with a worker killed meanwhile.

    The reason of a bad sample names the file, the record and its byte.
    """
    files = folder_stream(photos)
    damaged = {"source": records_of(photos, tmp_path / "one", count=1), "max_bad_fraction": 1.0, "shuffle": False}
    records = {**files, "source": records_of(photos, tmp_path)}
    daemon = start_daemon({"files": files, "records": records, "damaged": {**files, **damaged}})
    file = tmp_path / "one" / "train-00000-of-00001"
    with batchd_client.connect(daemon.address) as connection:
        one, other = connection.stream("files", epochs=3), connection.stream("records", epochs=3)
        assert see(one) == see(other)
        daemon.kill_a_worker()
        for _ in range(2):
            assert see(one) == see(other)
        data = bytearray(file.read_bytes())
        data[200] ^= 1
        file.write_bytes(data)
        assert sum(len(one.samples) for one in see(connection.stream("damaged", epochs=1))) == 40
        wait_until(lambda: connection.bad("damaged").total > 0, "the sample is listed")
        (bad,) = connection.bad("damaged").samples
    assert bad.path == f"{file}: record 0 (byte 0)"
    assert bad.reason == "does not match its checksum: its data is damaged"
