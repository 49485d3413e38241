"""Files of TFRecords, served: the same batches as from the same photographs in folders."""

import batchd_client
from support.seen import see
from support.settings import folder_stream
from support.tfrecords import photo_records
from support.waiting import wait_until


def test_records_give_the_batches_that_the_same_files_give_until_one_is_damaged(start_daemon, photos, tmp_path):
    """The batches are equal over epochs, with a worker killed meanwhile.

    The reason of a bad sample names the file, the record and its byte.
    """
    files = folder_stream(photos)
    damaged = {"source": photo_records(photos, tmp_path / "one", count=1), "max_bad_fraction": 1.0, "shuffle": False}
    records = {**files, "source": photo_records(photos, tmp_path)}
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
