"""A daemon and the terminal that started it: in the background, and after the terminal's end."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchd_client
from batchd_wire.runtime import RuntimeDirectory
from support.commands import batchd
from support.daemon_process import clean_environment
from support.kernel import is_alive
from support.settings import folder_stream, write_settings
from support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def config(tmp_path: Path, photos: Path) -> Iterator[Path]:
    """Write a configuration of one stream, whose daemon is stopped after the test."""
    settings = {"runtime_dir": str(tmp_path / "run"), "workers": 1, "memory": "16MiB", "http": "off"}
    yield write_settings(tmp_path / "batchd.toml", {"photos": folder_stream(photos, window=2)}, settings)
    lock = RuntimeDirectory(tmp_path / "run").lock_path
    if lock.is_file() and (pid := int(lock.read_text() or 0)) and is_alive(pid):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "the daemon has ended")


def test_a_detached_daemon_serves_until_it_is_stopped(config: Path) -> None:
    """The command prints pid and address once trainers can connect; the log is beside the file."""
    started = batchd("serve", "--detach", folder=config.parent)
    address = started.stdout.strip()
    with batchd_client.connect(address) as daemon:
        pid = daemon.status()["daemon"]["pid"]
        assert next(iter(daemon.stream("photos"))).step == 0
    assert started.stderr == f"starting the daemon (pid {pid}); its log: {config.parent}/batchd.log\n"
    assert os.getsid(pid) not in {pid, os.getsid(0)}
    stopped = batchd("stop", address=address)
    assert f"(pid {pid})" in stopped.stdout
    assert "info    stopped: drained=True" in (config.parent / "batchd.log").read_text()


def test_the_log_of_a_killed_daemon_says_what_killed_it(config: Path) -> None:
    """`batchd logs` reads the file that the last daemon wrote, from any folder."""
    address = batchd("serve", "--detach", "--log-file", "its.log", folder=config.parent).stdout.strip()
    with batchd_client.connect(address) as daemon:
        pid = daemon.status()["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    log = config.parent / "its.log"
    wait_until(lambda: "daemon ended" in log.read_text(), "the end is logged")

    shown = batchd("logs", "-n", 1, address=address)

    assert shown.stdout.split(maxsplit=1)[1] == f'error   daemon ended: pid={pid} how="signal 9 (SIGKILL)"\n'
    assert shown.stderr.startswith("no daemon runs; the last one wrote until ")
    assert shown.stderr.endswith(f", to {log}\n")
    assert batchd("logs", "-n", 0, address=address).stdout == ""
    log.unlink()
    assert "no process listens on it any more" in batchd("logs", address=address, status=3).stderr


def test_a_detached_daemon_that_does_not_start_gives_its_reason_and_its_exit_status(config: Path) -> None:
    """What an earlier daemon logged is not printed again."""
    (config.parent / "batchd.log").write_text("of an earlier daemon\n")
    failed = batchd("serve", "--detach", "--set", "daemon.workers=zero", folder=config.parent, status=2)
    assert failed.stdout == ""
    assert "daemon.workers: must be an integer" in failed.stderr
    assert "of an earlier daemon" not in failed.stderr
    _, line = (config.parent / "batchd.log").read_text().splitlines()
    # with its time: the log may be that of a daemon that runs
    assert "error   daemon not started: pid=" in line
    assert "daemon.workers: must be an integer" in line
    nowhere = batchd("serve", "--detach", "--log-file", "no/such.log", folder=config.parent, status=1)
    assert "no/such.log cannot be written: there is no folder " in nowhere.stderr
    assert "make it, or name another place with --log-file" in nowhere.stderr
    foreground = batchd("serve", "--log-file", "its.log", folder=config.parent, status=2)
    assert "--log-file goes with --detach" in foreground.stderr


def test_a_daemon_ends_with_its_terminal_and_reloads_before(config: Path) -> None:
    """SIGHUP is both: `kill -HUP`, and what the kernel sends when a terminal is closed."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(config.parent)
        os.execve(sys.executable, [sys.executable, "-m", "batchd", "serve"], clean_environment())
    try:
        _read(terminal, b"serving")
        os.kill(pid, signal.SIGHUP)
        _read(terminal, b"configuration reloaded")
    finally:
        os.close(terminal)
    ended = wait_until(lambda: [end for end in [os.waitpid(pid, os.WNOHANG)] if end[0]], "the daemon has ended")
    assert ended == [(pid, 0)]
    assert not RuntimeDirectory(config.parent / "run").lifeline_path.exists()


def _read(terminal: int, until: bytes) -> None:
    """Read what a program writes to its terminal."""
    said, deadline = b"", time.monotonic() + PATIENCE_S
    while until not in said:
        assert time.monotonic() < deadline, said
        if select.select([terminal], [], [], 0.1)[0]:
            said += os.read(terminal, 4096)
