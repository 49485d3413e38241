"""Records, served: the same batches as from the same photographs in folders, until damage."""

import os
import signal
from contextlib import closing

from pyarrow import parquet

import batchd_client
from support.expected import Expected
from support.lmdb_files import write_lmdb
from support.parquet_files import photo_rows
from support.seen import samples, see
from support.settings import folder_stream
from support.shards import photo_shards
from support.tfrecords import photo_records
from support.waiting import wait_until


def photo_database(photos, folder):
    """Write the photographs in a folder source's order, with their labels in digits."""
    classes = sorted(path.name for path in photos.iterdir())
    files = [path for name in classes for path in sorted((photos / name).glob("*.jpg"))]
    records = {}
    for number, path in enumerate(files):
        records[b"image-%06d" % number] = path.read_bytes()
        records[b"label-%06d" % number] = str(classes.index(path.parent.name)).encode()
    write_lmdb(folder, records)
    fields = {"image": "image", "label": "int64"}
    return {"type": "lmdb", "path": str(folder), "fields": fields, "key": "{field}-*", "format": "text"}


def test_every_form_of_records_gives_the_batches_that_the_same_files_give(start_daemon, photos, tmp_path):
    """Samples are shuffled and cropped, and workers are killed; two streams share the database."""
    database = photo_database(photos, tmp_path / "db")
    sources = {
        "shards": photo_shards(photos, tmp_path / "tar"),
        "tfrecords": photo_records(photos, tmp_path / "tfrecord"),
        "database": database,
        "again": database,
        **{name: photo_rows(photos, tmp_path / name, compression=name) for name in ("none", "snappy")},
    }
    files = folder_stream(photos)
    daemon = start_daemon({"files": files, **{name: files | {"source": source} for name, source in sources.items()}})
    with batchd_client.connect(daemon.address) as connection:
        reads = [connection.stream(name, epochs=3) for name in ("files", *sources)]
        for _epoch in range(3):
            expected, *others = map(see, reads)
            assert others == [expected] * len(sources)
            daemon.kill_a_worker()


def test_damaged_records_are_bad_samples_that_name_their_place(start_daemon, photos, tmp_path):
    """A page of Parquet and a record with another byte, and a shard that is cut."""
    files = {**folder_stream(photos), "max_bad_fraction": 1.0}
    page = photo_rows(photos, tmp_path / "page", compression="snappy", write_page_checksum=True)
    rows, records, shard = (
        tmp_path / name for name in ("page/train-1.parquet", "record/train-00000-of-00001", "cut/train-00.tar")
    )
    change(rows, parquet.ParquetFile(rows).metadata.row_group(0).column(0).data_page_offset - 20)
    streams = {
        "page": {**files, "source": page},
        "record": {**files, "source": photo_records(photos, tmp_path / "record", count=1), "shuffle": False},
        "cut": {**files, "source": photo_shards(photos, tmp_path / "cut", count=1), "on_error": "mask"},
    }
    daemon = start_daemon(streams)
    change(records, 200)
    os.truncate(shard, shard.stat().st_size * 3 // 4)
    with batchd_client.connect(daemon.address) as connection, closing(Expected(daemon.config, "page")) as expected:
        seen = {name: see(connection.stream(name, epochs=1)) for name in streams}
        assert seen["page"] == expected.epoch(0)
        totals = {"page": 8, "record": 1, "cut": 40}
        wait_until(lambda: {name: connection.bad(name).total for name in streams} == totals, "the samples are listed")
        bad = {name: [(one.path, one.reason) for one in connection.bad(name).samples] for name in streams}
    assert [sum(len(one.samples) for one in batches) for batches in seen.values()] == [40] * 3
    assert {path for path, _reason in bad["page"]} == {f"{rows}: row {row}" for row in range(8)}
    assert all("row group 0" in reason for _path, reason in bad["page"])
    assert bad["record"] == [(f"{records}: record 0 (byte 0)", "does not match its checksum: its data is damaged")]
    assert all(f"{shard}: " in path and ".jpg" in path for path, _reason in bad["cut"])
    for words in ("the shard ends at byte", "its file has changed since the daemon read it"):
        assert any(words in reason for _path, reason in bad["cut"])


def change(file, place):
    """Change a byte of a file."""
    data = bytearray(file.read_bytes())
    data[place] ^= 0xFF
    file.write_bytes(data)


def test_a_database_that_is_cut_in_the_middle_of_a_sample_costs_a_worker_and_nothing_else(
    start_daemon, photos, tmp_path
):
    """SIGBUS ends the worker; the next one checks the length first, so the sample is bad."""
    source = photo_database(photos, tmp_path / "db")
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
