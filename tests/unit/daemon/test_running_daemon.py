"""Finding a running daemon as any user and in any state, and checks of a directory without one."""

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from batchd.config import directories as places
from batchd.config.load import load_config
from batchd.config.tree import DaemonConfig
from batchd.daemon import config_checks
from batchd.daemon.config_checks import preview as looked_at
from batchd.daemon.runtime import directory_problem, has_daemon, hold
from batchd.data.storage.access import LocalFiles, Storage
from batchd.errors import BatchdError
from batchd.stream.cache_file import folder_problem
from batchd.stream.rings import plan_rings
from batchd_wire import runtime, threads
from batchd_wire.runtime import RuntimeDirectory
from support.network import free_port

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def stranger() -> Iterator[None]:
    """Become another user."""
    os.setresuid(STRANGER, STRANGER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeDirectory:
    """Make the system's runtime directory, which comes before the user's own."""
    names = RuntimeDirectory(tmp_path / "system")
    names.path.mkdir()
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(runtime, "SYSTEM_DIRECTORY", names.path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    return names


@contextmanager
def listening(names: RuntimeDirectory) -> Iterator[socket.socket]:
    """Open the lifeline socket of a daemon during the context."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(os.fspath(names.lifeline_path))
        door.listen(0)
        yield door


def _hangs(_number: int, _frame: object) -> None:
    raise AssertionError("it hangs")


def is_running(folder: Path, daemon: str = "") -> bool:
    """Return whether `batchd check` finds a running daemon on the machine."""
    file = folder / "batchd.toml"
    source = 'source = { type = "push", fields = { x = "int64" } }'
    file.write_text(f'[daemon]\nhttp = "off"\n{daemon}\n[streams.a]\n{source}\nbatch_size = 1\n')
    config = load_config(file)
    return "[daemon]" in dict(looked_at(config, plan_rings(config, Storage()), Storage()).unseen)


def test_a_daemon_of_the_system_is_found_by_a_user_with_a_directory_of_his_own(
    system: RuntimeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user that cannot write to the system's directory uses another; one in the file wins."""
    monkeypatch.setattr(places, "is_usable", lambda directory: directory != system.path)
    assert not is_running(tmp_path)
    with listening(system):
        assert is_running(tmp_path)
        assert not is_running(tmp_path, f'runtime_dir = "{tmp_path}/other"')
        monkeypatch.setattr(places, "is_usable", lambda _directory: False)
        assert is_running(tmp_path)
    (system.lifeline_path).unlink()


@as_root
def test_a_daemon_behind_a_directory_that_is_closed_to_us_is_taken_to_run(system: RuntimeDirectory) -> None:
    """The directory of a service looks like this to users outside its group."""
    assert not has_daemon(system)
    with stranger():
        assert has_daemon(system)


def test_a_daemon_that_accepts_no_connection_is_found(system: RuntimeDirectory, tmp_path: Path) -> None:
    """A stopped daemon has a full queue, on which a blocking socket would wait for ever."""
    with listening(system):
        waiting = []
        while True:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            waiting.append(one)
            if one.connect_ex(os.fspath(system.lifeline_path)) == errno.EAGAIN:
                break
        former = signal.signal(signal.SIGALRM, _hangs)
        signal.alarm(10)
        try:
            assert is_running(tmp_path)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, former)
            for one in waiting:
                one.close()


def test_a_daemon_that_still_scans_is_found_by_its_lock(system: RuntimeDirectory, tmp_path: Path) -> None:
    """Its sockets come later. The check does not take the lock, so a starting daemon succeeds."""
    with hold(system.path):
        assert not system.lifeline_path.exists()
        assert is_running(tmp_path)
    assert not is_running(tmp_path)
    with system.lock_path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert is_running(tmp_path)


@as_root
def test_a_directory_that_may_not_be_looked_into_is_refused_with_what_helps(
    system: RuntimeDirectory, tmp_path: Path
) -> None:
    """Daemon and check both report it; without a configured directory, the next one is tried."""
    names = RuntimeDirectory(tmp_path / "further" / "run")
    says = "cannot be used: Permission denied; make it writable for this user"
    with stranger():
        problem = directory_problem(names)
        with pytest.raises(BatchdError, match=says):
            hold(names.path).__enter__()
        with pytest.raises(BatchdError, match=f"uid {STRANGER} may not write {system.path}"):
            hold(None).__enter__()
    assert problem is not None
    assert says in problem.message


def test_a_directory_that_cannot_be_asked_about_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This covers any error of the file system."""

    def fail(_path: object) -> None:
        raise OSError(errno.EIO, "of the disk")

    monkeypatch.setattr(os, "statvfs", fail)
    problem = directory_problem(RuntimeDirectory(tmp_path))
    assert problem is not None
    assert "cannot be used: Input/output error" in problem.message


@pytest.mark.parametrize("key", ["tcp", "worker_address"])
def test_an_address_is_not_tried_without_threads(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """ZeroMQ would end the process, so the check reports the daemon's own error."""

    def refuse(_function: object, _arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start_new_thread", refuse)

    (problem,) = config_checks.address_problems(DaemonConfig(**{key: "127.0.0.1:7070"}))

    assert problem.path == f"daemon.{key}"
    assert "ZeroMQ needs 6 threads, and only 0 could be started: raise the limit" in problem.message


def test_an_address_without_descriptors_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has too few descriptors for the socket."""

    def fail(_context: object, _kind: int) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", fail)

    (problem,) = config_checks.address_problems(DaemonConfig(tcp="127.0.0.1:7070"))

    assert "Too many open files" in problem.message


def test_trainers_and_worker_hosts_need_two_addresses() -> None:
    """Each of the two addresses alone could be used."""
    one = f"127.0.0.1:{free_port()}"
    (problem,) = config_checks.address_problems(DaemonConfig(tcp=one, worker_address=one))
    assert problem.path == "daemon.worker_address"
    assert "Address already in use" in problem.message


@as_root
def test_places_behind_a_folder_that_is_closed_to_us_are_refused(tmp_path: Path) -> None:
    """This covers places of a source and of a cache, about which nothing more is known."""
    place, files = tmp_path / "x", LocalFiles()
    with stranger():
        problems = [*files.folder_problems(place), *files.file_problems(place, "the list"), folder_problem(place)]
    assert [
        problem for problem in problems if f"{place} cannot be reached: Permission denied" in str(problem)
    ] == problems
