"""The log or the output has no reader, or cannot be written: the daemon serves, commands say so."""

import os
import subprocess
import sys
from contextlib import closing, suppress

import pytest

import batchd_client
from support.commands import batchd
from support.daemon_process import DaemonProcess, clean_environment
from support.expected import Expected
from support.seen import see
from support.settings import folder_stream
from support.waiting import PATIENCE_S, wait_until


class UnloggedDaemon(DaemonProcess):
    """A daemon with other standard streams, which a redirection of the shell gives."""

    def logging_to(self, redirection, *, ready=True):
        """Start the daemon with this redirection; ``ready``: wait for its address."""
        self.through = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
        return self.start(ready=ready)


@pytest.fixture
def unlogged(daemons_folder, photos):
    with closing(UnloggedDaemon(daemons_folder, {"photos": folder_stream(photos)})) as daemon:
        yield daemon


@pytest.mark.thorough(after_first=True)
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


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "| true"], ids=["full", "closed", "no reader"])
def test_an_address_that_cannot_be_printed_ends_no_daemon(unlogged, redirection):
    """``batchd serve | head -1`` serves on: trainers find the address in the runtime directory."""
    unlogged.logging_to(redirection, ready=False)
    with (
        batchd_client.connect(unlogged.address, connect_timeout_s=PATIENCE_S) as connection,
        connection.stream("photos", epochs=1) as stream,
    ):
        assert see(stream) == Expected(unlogged.config).epoch(0)

    assert batchd("stop", address=unlogged.address)
    assert unlogged.wait() == 0
    assert unlogged.log_lines("stopped")


COMMANDS = ["--version", "--help", "config", "explain", "doctor", "check", "keys list", "status"]


@pytest.fixture(scope="module")
def asked(start_shared_daemon):
    """Return the environment and the folder in which every command has something to say."""
    daemon = start_shared_daemon()
    return {
        **clean_environment(),
        "BATCHD_ADDRESS": daemon.address,
        "BATCHD_TEST_CONFIG": str(daemon.config),
    }, daemon.config


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written_is_one_sentence(asked, command):
    """No command shows a traceback, and none ends as if it had been read."""
    environment, config = asked
    words = [*command.split(), *([str(config)] if command == "check" else [])]
    for redirection, status, said in ((">/dev/full", 1, "No space left on device"), ("| true", 0, "")):
        done = subprocess.run(
            ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "batchd", *words],
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
            cwd=config.parent,
            check=False,
        )
        assert done.returncode == status
        assert done.stderr.count("\n") <= 1
        assert done.stderr.startswith(f"batchd: standard output cannot be written: {said}" if said else "")
        assert said in done.stderr


@pytest.mark.thorough
def test_a_limit_of_file_sizes_is_one_sentence(asked, tmp_path):
    """As a full disk is: the text says which limit."""
    environment, config = asked
    with (tmp_path / "output").open("wb") as output:
        done = subprocess.run(
            ["prlimit", "--fsize=0", sys.executable, "-m", "batchd", "check", str(config)],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "batchd: standard output cannot be written: File too large; raise the limit of file sizes (ulimit -f, "
        "LimitFSIZE= in the unit); RLIMIT_FSIZE is 0 bytes, and holds for shared memory, too\n"
    )


@pytest.mark.thorough(after_first=True)
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
    environment = {**unlogged.environment}
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
