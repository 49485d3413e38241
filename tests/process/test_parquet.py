"""Parquet files, served: the same batches as from the same files in folders."""

import signal
from contextlib import closing
from pathlib import Path

import pytest
from pyarrow import parquet

import batchd_client
from batchd.errors import ExitCode
from support.expected import Expected
from support.parquet_files import FATAL_BYTES, photo_rows, write_fatal_parquet, write_parquet
from support.seen import see
from support.settings import STILL_PIPELINE, folder_stream
from support.waiting import wait_until


def damaged_rows(photos, folder):
    """Return a stream of rows with a damaged page, and its file."""
    source = photo_rows(photos, folder, compression="snappy", write_page_checksum=True)
    file = folder / "train-1.parquet"
    column = parquet.ParquetFile(file).metadata.row_group(0).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset - 20] ^= 0xFF
    file.write_bytes(data)
    return {**folder_stream(photos), "source": source, "max_bad_fraction": 1.0}, file


def test_rows_give_the_batches_that_the_same_files_give_until_a_page_is_damaged(start_daemon, photos, tmp_path):
    """Rows are shuffled and cropped, and a worker is killed meanwhile.

    A bad sample is named with file and row, and another sample replaces it.
    """
    streams = {"files": folder_stream(photos)}
    for compression in ("none", "snappy"):
        source = photo_rows(photos, tmp_path / compression, compression=compression)
        streams[compression] = {**streams["files"], "source": source}
    damaged, file = damaged_rows(photos, tmp_path / "damaged")
    daemon = start_daemon({**streams, "damaged": damaged})
    with batchd_client.connect(daemon.address) as connection, closing(Expected(daemon.config, "damaged")) as expected:
        reads = [connection.stream(name, epochs=2) for name in streams]
        for _epoch in range(2):
            files, none, snappy = (see(each) for each in reads)
            assert files == none == snappy
            daemon.kill_a_worker()
        assert see(connection.stream("damaged", epochs=1)) == expected.epoch(0)
        wait_until(lambda: connection.bad("damaged").total == 8, "the samples of the row group are listed")
        bad = {one.path: one.reason for one in connection.bad("damaged").samples}
    assert bad.keys() == {f"{file}: row {row}" for row in range(8)}
    assert all("row group 0" in reason for reason in bad.values())


def rows(folder):
    """Return a stream of the images in a folder's Parquet files."""
    source = {"type": "parquet", "root": str(folder), "shards": ["*.parquet"], "fields": {"image": "image"}}
    return {"rows": {"source": source, "batch_size": 2, "pipeline": STILL_PIPELINE}}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("wrong", FATAL_BYTES)
def test_a_daemon_reports_a_footer_that_ends_pyarrows_process(start_daemon, tmp_path, wrong):
    """The daemon ends with the exit status of a wrong source, and its log has no other words."""
    file = write_fatal_parquet(tmp_path / "a.parquet", wrong)

    daemon = start_daemon(rows(tmp_path), ready=False)

    assert daemon.wait() == ExitCode.USAGE
    assert f"{file} is damaged, or was changed while it was scanned" in daemon.log
    assert "terminate called" not in daemon.log


def test_a_scan_that_is_killed_or_interrupted_ends_the_start(start_daemon, tmp_path):
    """No process is left; after a kill, the file is named."""
    write_parquet(tmp_path / "a.parquet", {"image": [b"one"]})

    killed = start_daemon(rows(tmp_path), ready=False, faults={"scan.parquet.opening": "kill"})
    hanging = start_daemon(rows(tmp_path), ready=False, faults={"scan.parquet.opening": "hang"})

    assert killed.wait() == ExitCode.USAGE
    assert f"{tmp_path}/a.parquet was not scanned to its end: the process was killed by signal 9" in killed.log
    scanner = hanging.wait_for_fault("scan.parquet.opening")
    hanging.send(signal.SIGINT)
    assert hanging.wait() == ExitCode.INTERRUPTED
    assert not Path(f"/proc/{scanner}").exists()
