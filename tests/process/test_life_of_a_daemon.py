"""A daemon's life: start, single instance, draining, immediate stop, remains of a killed daemon."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import batchd_client
from batchd.cli.stop import service_of
from support.commands import batchd
from support.expected import Expected
from support.kernel import is_alive, is_stopped
from support.seen import see
from support.waiting import wait_until

SIGNALS = [signal.SIGTERM, signal.SIGINT]
needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")


def test_a_second_daemon_is_refused_until_the_first_is_drained(start_daemon):
    """The message names the process that holds the directory; the exit status is 4.

    Trainers of a drained daemon wait for the next one, as after any end of a daemon.
    """
    daemon = start_daemon()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        seen = see(stream, 1)
        refused = batchd("serve", "--config", daemon.config, status=4)
        assert f"(pid {daemon.pid})" in refused.stderr
        assert str(daemon.runtime_dir) in refused.stderr
        seen += see(stream, 1)
        assert daemon.terminate() == 0
        assert daemon.files() == {"lock", "log"}
        daemon.start()
        seen += see(stream)

    assert seen == Expected(daemon.config).epoch(0)


def test_stop_ends_the_daemon_and_waits_until_it_is_gone(start_daemon):
    """A trainer's batch keeps it draining; `--timeout` ends the wait, and `--now` the daemon."""
    daemon = start_daemon()
    with batchd_client.connect(daemon.address) as connection:
        with next(iter(connection.stream("photos", epochs=1))):
            waited = batchd("stop", "--timeout", "0", address=daemon.address, status=1).stderr
        assert daemon.wait() == 0
        daemon.start()
        with next(iter(connection.stream("photos", epochs=1))):
            said = batchd("stop", "--now", address=daemon.address).stdout

    assert "has not ended within 0 s, and still drains" in waited
    assert said == f"stopped the daemon at {daemon.address} (pid {daemon.pid})\n"
    gone = batchd("stop", address=daemon.address, status=3).stderr
    assert "start one with `batchd serve`" in gone
    assert "batchd logs" not in gone
    daemon.wait()
    daemon.start()
    daemon.kill()
    killed = batchd("status", address=daemon.address, status=3).stderr
    assert "the daemon has ended; `batchd logs` shows the end of the last one; start one with" in killed


def test_a_daemon_of_a_service_is_not_stopped_behind_its_manager(start_daemon, monkeypatch):
    """The manager would restart it, or the service would be down without notice."""
    daemon = start_daemon()
    monkeypatch.setattr("batchd.cli.stop.service_of", lambda _pid: "batchd.service")

    said = batchd("stop", address=daemon.address, status=1).stderr

    assert (
        f"the daemon (pid {daemon.pid}) is a service, which may be started again: systemctl stop batchd.service" in said
    )


@pytest.mark.parametrize(("number", "is_main"), [("$$", True), ("1", False)])
def test_the_main_process_of_a_service_is_known_by_its_own_number(number, is_main):
    """A program that a service starts inherits the number of the main process."""
    script = f"SYSTEMD_EXEC_PID={number} exec sleep 60"
    with subprocess.Popen(["sh", "-c", script]) as process:
        try:
            environment = Path(f"/proc/{process.pid}/environ")
            wait_until(lambda: b"SYSTEMD_EXEC_PID=" in environment.read_bytes(), "it runs")
            assert bool(service_of(process.pid)) is is_main
        finally:
            process.kill()


def test_what_a_killed_daemon_leaves_does_not_matter(start_daemon):
    """The next daemon replaces stale sockets and other files, and serves."""
    daemon = start_daemon()
    sockets = {"batchd.sock", "lifeline.sock"}
    for text in (None, "left over"):
        daemon.kill()
        assert daemon.files() == {*sockets, "lock", "log"}
        with pytest.raises(batchd_client.errors.DaemonNotFound, match="no process listens on it any more"):
            batchd_client.connect(daemon.address, connect_timeout_s=0)
        if text:
            for name in sockets:
                (daemon.runtime_dir / name).unlink()
                (daemon.runtime_dir / name).write_text(text)

        daemon.start()

        with batchd_client.connect(daemon.address) as connection:
            assert see(connection.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
            assert connection.status()["daemon"]["pid"] == daemon.pid
        assert (daemon.runtime_dir.stat().st_mode & 0o777) == 0o750
    assert daemon.terminate() == 0
    assert daemon.files() == {"lock", "log"}


def test_a_removed_runtime_directory_is_logged_and_connected_trainers_read_on(start_daemon):
    """The log says it once. Another daemon may take the name, and keeps its sockets afterwards."""
    daemon = start_daemon()
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=1)
        seen = see(stream, 1)
        shutil.rmtree(daemon.runtime_dir)
        (line,) = wait_until(lambda: daemon.log_lines("sockets are gone from the runtime directory"), "the log says it")
        other = start_daemon(runtime_dir=str(daemon.runtime_dir), ready=False)
        wait_until((daemon.runtime_dir / "lifeline.sock").exists, "another daemon has taken the name")
        seen += see(stream)
    assert (line["level"], seen) == ("error", Expected(daemon.config).epoch(0))
    assert daemon.terminate() == 0
    with batchd_client.connect(daemon.address) as connection:
        assert connection.status()["daemon"]["pid"] == other.pid
    assert len(daemon.log_lines("sockets are gone from the runtime directory")) == 1


@pytest.mark.thorough(after_first=True)
@needs_mounts
@pytest.mark.parametrize("inodes", [1, 2, 3], ids=["no lock", "no socket", "one socket"])
def test_a_runtime_directory_without_inodes_is_refused_with_advice(start_daemon, inodes):
    """The root of the file system takes the first inode."""
    mount = f'mkdir -p run && mount -t tmpfs -o nr_inodes={inodes} none run && exec "$@"'
    daemon = start_daemon(through=("unshare", "--mount", "sh", "-c", mount, "sh"), ready=False)

    assert daemon.wait() == 1
    assert "its file system has no space or no inodes left (df, df -i): make room there" in daemon.log


@pytest.mark.parametrize("number", [SIGNALS[0], pytest.param(SIGNALS[1], marks=pytest.mark.slow)])
def test_the_first_signal_drains_and_ends_well(start_daemon, start_trainer, number):
    """Two trainers read; the workers finish their orders, and the exit status is 0."""
    daemon = start_daemon()
    trainers = [start_trainer(daemon.address, epochs=1000, connect={"reconnect_timeout_s": 0.2}) for _ in range(2)]
    for trainer in trainers:
        trainer.begin(do="take")
        trainer.next_seen()

    daemon.send(number)

    assert daemon.wait() == 0
    assert daemon.files() == {"lock", "log"}
    assert daemon.log_lines("stopped")[-1]["drained"] is True
    assert not daemon.log_lines("worker killed")


@pytest.mark.parametrize("number", [SIGNALS[0], pytest.param(SIGNALS[1], marks=pytest.mark.slow)])
def test_draining_admits_no_trainer_and_a_second_signal_ends_it(start_daemon, number):
    """A worker hangs in a sample, so draining would take its whole time.

    A new trainer waits for the next daemon; the old one answers queries until its end.
    """
    daemon = start_daemon(workers=2, faults={"worker.sample.read": "hang"}, drain_timeout_s=9.9)
    with batchd_client.connect(daemon.address) as connection:
        connection.stream("photos")
        daemon.wait_for_fault("worker.sample.read")
        daemon.send(number)
        wait_until(lambda: daemon.log_lines("draining"), "the first signal has arrived")
        assert daemon.status()["daemon"]["draining"] is True
        impatient = batchd_client.connect(daemon.address, reconnect_timeout_s=0.2)
        with impatient as late, pytest.raises(batchd_client.errors.DaemonUnavailable):
            late.stream("photos")
        daemon.send(number)
        assert daemon.wait() == 0

    assert daemon.log_lines("stopped")[-1]["drained"] is False


def test_draining_ends_when_its_time_is_over(start_daemon):
    """The daemon kills a worker that never finishes, and still exits with status 0."""
    daemon = start_daemon(workers=1, faults={"worker.sample.read": "hang"}, drain_timeout_s=0.2)
    with batchd_client.connect(daemon.address) as connection:
        connection.stream("photos")
        worker = daemon.wait_for_fault("worker.sample.read")
        assert daemon.terminate() == 0

    assert not is_alive(worker)
    assert daemon.files() == {"lock", "log"}


def test_a_daemon_whose_workers_are_all_stopped_still_ends(start_daemon):
    """Stopped workers see neither order nor end; the daemon does not wait for them one by one."""
    daemon = start_daemon(workers=4, drain_timeout_s=0.2)
    workers = daemon.worker_pids()
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    wait_until(lambda: all(map(is_stopped, workers)), "the workers are stopped")

    assert daemon.terminate() == 0
    assert not any(map(is_alive, workers))


@pytest.mark.parametrize("moment", ["starting", "just serving"])
def test_ctrl_c_ends_daemon_and_workers_without_a_traceback(start_daemon, moment):
    """A terminal sends SIGINT to the whole group, whose workers may just have been started."""
    daemon = start_daemon(
        ready=moment != "starting", faults={"daemon.starting": "stop"} if moment == "starting" else None
    )
    if moment == "starting":
        daemon.wait_for_fault("daemon.starting")
    os.killpg(daemon.pid, signal.SIGINT)
    daemon.send(signal.SIGCONT)

    assert daemon.wait() == (130 if moment == "starting" else 0)
    wait_until(lambda: not daemon.offspring(), "the workers have ended")


def test_workers_that_are_ready_before_the_source_is_scanned_wait(start_daemon):
    """Workers start before the scan ends; in either order the first batch arrives."""
    daemon = start_daemon(ready=False, faults={"daemon.starting": "stop", "worker.idle": "stop"})
    daemon.wait_for_fault("daemon.starting")
    worker = daemon.wait_for_fault("worker.idle")
    daemon.send(signal.SIGCONT)
    daemon.wait_ready()
    os.kill(worker, signal.SIGCONT)

    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)


def test_files_in_the_working_directory_are_not_taken_for_modules(start_daemon):
    """A worker imports installed modules, whatever files the daemon's start directory has."""
    daemon = start_daemon(ready=False, faults={"daemon.starting": "stop"})
    daemon.wait_for_fault("daemon.starting")
    (daemon.folder / "cv2.py").write_text("raise SystemExit('not the module that was meant')")
    (daemon.folder / "struct.py").write_text("raise SystemExit('not the module that was meant')")
    before = daemon.offspring()
    daemon.send(signal.SIGCONT)
    daemon.wait_ready()
    for worker in before:
        os.kill(worker, signal.SIGKILL)

    with batchd_client.connect(daemon.address) as connection:
        assert see(connection.stream("photos", epochs=1)) == Expected(daemon.config).epoch(0)
    assert "not the module that was meant" not in daemon.log


def test_sigterm_while_the_source_is_scanned_ends_everything(start_daemon):
    """There is nothing to drain yet; workers end with the daemon, and only the lock file stays."""
    daemon = start_daemon(ready=False, faults={"daemon.starting": "stop"})
    daemon.wait_for_fault("daemon.starting")
    daemon.send(signal.SIGTERM)
    daemon.send(signal.SIGCONT)

    assert daemon.wait() in {0, -signal.SIGTERM}
    wait_until(lambda: not daemon.offspring(), "the workers have ended")
    assert daemon.files() == {"lock", "log"}
