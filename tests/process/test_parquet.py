"""Parquet files, served: the same batches as from the same files in folders."""

from contextlib import closing

from pyarrow import parquet

import batchd_client
from support.expected import Expected
from support.parquet_files import photo_rows
from support.seen import see
from support.settings import folder_stream
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
