"""LMDB databases, served: the batches of the same files in folders, and a truncated database."""

import os
import signal

import batchd_client
from support.lmdb_files import write_lmdb
from support.seen import samples, see
from support.settings import folder_stream
from support.waiting import wait_until


def records_of(photos, folder):
    """Return the photographs in a folder source's order, with their labels in digits."""
    classes = sorted(path.name for path in photos.iterdir())
    files = [path for name in classes for path in sorted((photos / name).glob("*.jpg"))]
    records = {}
    for number, path in enumerate(files):
        records[b"image-%06d" % number] = path.read_bytes()
        records[b"label-%06d" % number] = str(classes.index(path.parent.name)).encode()
    write_lmdb(folder, records)
    fields = {"image": "image", "label": "int64"}
    return {"type": "lmdb", "path": str(folder), "fields": fields, "key": "{field}-*", "format": "text"}


def test_records_give_the_batches_that_the_same_files_give(start_daemon, photos, tmp_path):
    """The test kills a worker meanwhile; two streams share the database."""
    files = folder_stream(photos)
    records = {**files, "source": records_of(photos, tmp_path / "db")}
    daemon = start_daemon({"files": files, "records": records, "again": records})
    with batchd_client.connect(daemon.address) as connection:
        streams = [connection.stream(name, epochs=2) for name in ("files", "records", "again")]
        one, *others = [see(stream) for stream in streams]
        assert others == [one, one]
        daemon.kill_a_worker()
        one, *others = [see(stream) for stream in streams]
        assert others == [one, one]


def test_a_database_that_is_cut_in_the_middle_of_a_sample_costs_a_worker_and_nothing_else(
    start_daemon, photos, tmp_path
):
    """SIGBUS ends the worker; the next one checks the length first, so the sample is bad."""
    source = records_of(photos, tmp_path / "db")
    stream = {**folder_stream(photos), "source": source, "max_bad_fraction": 1.0, "on_error": "mask", "shuffle": False}
    daemon = start_daemon({"photos": stream}, workers=1, faults={"worker.sample.read:9": "stop"})
    with batchd_client.connect(daemon.address) as connection:
        reads = connection.stream("photos", epochs=1)
        worker = daemon.wait_for_fault("worker.sample.read:9")
        os.truncate(tmp_path / "db/data.mdb", 8192)
        os.kill(worker, signal.SIGCONT)

        assert samples(see(reads)) == list(range(40))
        wait_until(lambda: connection.bad("photos").total > 0, "the samples are listed")
        bad = {one.sample: one for one in connection.bad("photos").samples}
    assert [line["how"] for line in daemon.log_lines("worker ended")] == ["signal 7 (SIGBUS)"]
    assert "the database is cut: it has 8192 bytes" in bad[9].reason
    assert bad[9].path == f"{tmp_path}/db: image-000009"
