"""The log has no reader, or cannot be written: the daemon serves."""

import os
import subprocess
import sys
from contextlib import closing, suppress

import pytest

import batchd_client
from support.daemon_process import DaemonProcess
from support.expected import Expected
from support.seen import see
from support.settings import folder_stream
from support.waiting import PATIENCE_S, wait_until


class UnloggedDaemon(DaemonProcess):
    """A daemon with another standard error, which a redirection of the shell gives."""

    def logging_to(self, redirection):
        """Start the daemon with this redirection."""
        self.through = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
        return self.start()


@pytest.fixture
def unlogged(daemons_folder, photos):
    with closing(UnloggedDaemon(daemons_folder, {"photos": folder_stream(photos)})) as daemon:
        yield daemon


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&- <&-"], ids=["full", "closed", "no input either"])
def test_a_log_that_cannot_be_written_stops_no_process(unlogged, redirection):
    """A worker's death, which would be logged, and the daemon's end work as well."""
    unlogged.logging_to(redirection)
    expected = Expected(unlogged.config)
    with batchd_client.connect(unlogged.address) as connection:
        with connection.stream("photos", epochs=1) as stream:
            assert see(stream) == expected.epoch(0)
        unlogged.kill_a_worker()
        wait_until(lambda: connection.status()["daemon"]["worker_deaths"] == 1, "the daemon knows of the death")
        with connection.stream("photos", epochs=1) as stream:
            assert see(stream) == expected.epoch(0)

    assert not unlogged.log
    assert unlogged.terminate() == 0


@pytest.mark.parametrize("ending", ["sleeps", "goes"])
def test_a_reader_of_the_log_that_sleeps_or_ends_stops_no_process(unlogged, ending):
    """``batchd serve 2>&1 | less`` fills its pipe after a while; here the pipe is full at once."""
    reader, written = os.pipe()
    os.set_blocking(written, False)
    with suppress(BlockingIOError):
        while True:
            os.write(written, b"\n" * 4096)
    os.set_blocking(written, True)
    if ending == "goes":
        os.close(reader)
    environment = {**unlogged._environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "batchd", "serve", "-c", str(unlogged.config), "--log-level", "debug"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=written,
        env=environment,
        cwd=unlogged.folder,
    )
    os.close(written)
    try:
        assert process.stdout.readline().decode().strip() == unlogged.address
        with batchd_client.connect(unlogged.address) as connection, connection.stream("photos", epochs=1) as stream:
            assert see(stream) == Expected(unlogged.config).epoch(0)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if ending == "sleeps":
            os.close(reader)


def test_each_part_of_a_life_is_said_once(start_daemon):
    """The log has start, trainer, a worker's death and end, once each."""
    daemon = start_daemon()
    with batchd_client.connect(daemon.address) as connection:
        with connection.stream("photos", epochs=1) as stream:
            see(stream)
        daemon.kill_a_worker()
        wait_until(lambda: daemon.log_lines("worker started"), "another worker is ready")
    wait_until(lambda: daemon.log_lines("trainer left"), "the trainer has left")
    assert daemon.terminate() == 0

    events = [
        (name, len(daemon.log_lines(name)))
        for name in (
            "serving",
            "trainer subscribed",
            "trainer left",
            "worker ended",
            "worker started",
            "draining",
            "stopped",
        )
    ]
    assert events == [(name, 1) for name, _ in events]
    (subscribed,) = daemon.log_lines("trainer subscribed")
    assert subscribed["stream"] == "photos"
