"""Parquet files, served: the same batches as from the same files in folders."""

import os
import signal
from contextlib import closing

from pyarrow import parquet

import batchd_client
from support.expected import Expected
from support.parquet_files import photo_rows
from support.seen import see
from support.settings import folder_stream
from support.waiting import wait_until


def test_rows_give_the_batches_that_the_same_files_give(start_daemon, photos, tmp_path):
    """Shuffled and cropped, with one worker and with two, of which one is killed meanwhile."""
    streams = {"files": folder_stream(photos)}
    for compression in ("none", "snappy"):
        source = photo_rows(photos, tmp_path / compression, compression=compression)
        streams[compression] = {**streams["files"], "source": source}
    for workers in (1, 2):
        daemon = start_daemon(streams, workers=workers)
        with batchd_client.connect(daemon.address) as connection:
            reads = [connection.stream(name, epochs=2) for name in streams]
            for _epoch in range(2):
                files, none, snappy = (see(each) for each in reads)
                assert files == none == snappy
                os.kill(daemon.status()["workers"][0]["pid"], signal.SIGKILL)


def test_a_damaged_page_makes_bad_samples_that_are_named(start_daemon, photos, tmp_path):
    """With file and row; others stand in for them."""
    source = photo_rows(photos, tmp_path, compression="snappy", write_page_checksum=True)
    file = tmp_path / "train-1.parquet"
    column = parquet.ParquetFile(file).metadata.row_group(0).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset - 20] ^= 0xFF
    file.write_bytes(data)
    daemon = start_daemon({"photos": {**folder_stream(photos), "source": source, "max_bad_fraction": 1.0}})

    with batchd_client.connect(daemon.address) as connection, closing(Expected(daemon.config)) as expected:
        assert see(connection.stream("photos", epochs=1)) == expected.epoch(0)
        wait_until(lambda: connection.bad("photos").total == 8, "the samples of the row group are listed")
        bad = {one.path: one.reason for one in connection.bad("photos").samples}
    assert bad.keys() == {f"{file}: row {row}" for row in range(8)}
    assert all("row group 0" in reason for reason in bad.values())
