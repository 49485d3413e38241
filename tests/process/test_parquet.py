"""Scans of Parquet that end their process, and those that are ended."""

import signal
from pathlib import Path

import pytest

from batchd.errors import ExitCode
from support.parquet_files import FATAL_BYTES, write_fatal_parquet, write_parquet
from support.settings import STILL_PIPELINE


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
