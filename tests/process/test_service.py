"""A real daemon and a fake service manager: the notifications that it gets, and when."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.daemon_process import DaemonProcess
from support.notify_socket import NotifySocket
from support.trainer_process import TrainerProcess
from support.waiting import wait_until

WATCHDOG_US = "3000000"


@pytest.fixture
def manager(daemons_folder: Path) -> Iterator[NotifySocket]:
    """Listen as a service manager does; the socket's path is short."""
    manager = NotifySocket(daemons_folder / "notify")
    yield manager
    manager.close()
    (daemons_folder / "notify").unlink(missing_ok=True)


def variables(manager: NotifySocket) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": WATCHDOG_US}


def feedings(manager: NotifySocket) -> int:
    """Return how often the daemon has fed the watchdog so far."""
    manager.heard()
    return sum(message == ["WATCHDOG=1"] for message in manager.history)


def test_a_daemon_tells_of_its_life(
    manager: NotifySocket, start_daemon: Callable[..., DaemonProcess], start_trainer: Callable[..., TrainerProcess]
) -> None:
    """The daemon reports in this order: scan, ready with all workers, serving, progress, end."""
    daemon = start_daemon(environment=variables(manager))
    wait_until(lambda: manager.has_heard("READY=1"), "it is ready")
    assert {worker["state"] for worker in daemon.status()["workers"]} == {"ready"}
    trainer = start_trainer(daemon.address)
    trainer.hold(1)
    wait_until(lambda: manager.has_heard("STATUS=1 stream, 2 workers, 1 trainer,"), "its status has the trainer")
    fed = feedings(manager)
    wait_until(lambda: feedings(manager) > fed, "the idle daemon feeds the watchdog")
    assert daemon.terminate() == 0
    manager.heard()
    kinds = [message[0].partition("=")[0] for message in manager.history]
    life = ["EXTEND_TIMEOUT_USEC", "READY", "STATUS", "STOPPING"]
    assert sorted(life, key=kinds.index) == life
    assert kinds.count("READY") == kinds.count("STOPPING") == 1
    (ready,) = (message for message in manager.history if message[0] == "READY=1")
    assert re.fullmatch(r"STATUS=1 stream, 2 workers, 0 trainers, 0 samples/s", ready[1])


@pytest.mark.thorough
def test_a_daemon_that_reserves_at_its_start_is_ready_when_it_has_all_memory(
    manager: NotifySocket, start_daemon: Callable[..., DaemonProcess], start_trainer: Callable[..., TrainerProcess]
) -> None:
    """The daemon reports progress before that; a trainer gets batches that were made ahead."""
    daemon = start_daemon(environment=variables(manager), reserve="start")
    wait_until(lambda: manager.has_heard("READY=1"), "it is ready")
    stream = daemon.stream_status()
    assert stream["slots"] == stream["slots_max"] > 2
    (line,) = daemon.log_lines("memory reserved")
    assert line["bytes"] == daemon.status()["daemon"]["memory_bytes"]
    assert manager.has_heard("STATUS=reserving memory: ")
    start_trainer(daemon.address).take(2)
    assert daemon.stream_status()["slots"] == stream["slots_max"]


@pytest.mark.thorough
def test_a_reload_tells_how_far_its_scan_is(
    manager: NotifySocket, start_daemon: Callable[..., DaemonProcess], start_trainer: Callable[..., TrainerProcess]
) -> None:
    """The manager extends the timeout, from the first stream on. Workers cannot send reports.

    Neither an unread socket nor a removed one delays a trainer.
    """
    daemon = start_daemon(environment=variables(manager))
    wait_until(lambda: manager.has_heard("READY=1"), "it is ready")
    for worker in daemon.worker_pids():
        names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")}
        assert b"PATH" in names
        assert not names & {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"}
    manager.history.clear()
    daemon.send(signal.SIGHUP)
    wait_until(lambda: manager.has_heard("READY=1"), "the reload is over")
    told = [message for message in manager.history if message != ["WATCHDOG=1"]]
    reloading = next(number for number, message in enumerate(told) if message[0] == "RELOADING=1")
    scanning = told.index(["EXTEND_TIMEOUT_USEC=60000000", "STATUS=scanning photos: 0 samples so far"])
    assert reloading < scanning < told.index(["READY=1", "STATUS=nothing has changed"])
    trainer = start_trainer(daemon.address)
    trainer.take(2)
    manager.close()
    trainer.take()
    assert daemon.terminate() == 0


def test_an_aborted_daemon_says_where_it_was(start_daemon: Callable[..., DaemonProcess]) -> None:
    """A watchdog aborts a daemon that hangs: its log has the stack of each thread."""
    daemon = start_daemon()
    daemon.status()  # an answer shows that it is in its loop
    daemon.send(signal.SIGABRT)
    assert daemon.wait() == -signal.SIGABRT
    assert "(most recent call first)" in daemon.log
    assert re.search(r'File ".*/batchd/daemon/loop.py", line \d+ in run', daemon.log)
