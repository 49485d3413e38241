"""The small parts of the daemon: log limits, the held directory."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from batchd.daemon.runtime import hold
from batchd.errors import AlreadyRunning, BatchdError, ConfigInvalid, ExitCode
from batchd.runtime import limits
from batchd.runtime.limits import PERIOD_S, SUBJECTS_MAX, OncePerMinute
from support.waiting import PATIENCE_S

# --- OncePerMinute --------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The present time in seconds: a list of one number that a test changes."""
    now = [1000.0]
    monkeypatch.setattr(limits, "monotonic", lambda: now[0])
    return now


def test_the_same_message_is_logged_once_a_minute(clock) -> None:
    """Attempts in between do not postpone the next line."""
    limit = OncePerMinute()

    assert limit.allows("accept")
    clock[0] += PERIOD_S / 2
    assert not limit.allows("accept")
    clock[0] += PERIOD_S / 2
    assert limit.allows("accept")
    assert not limit.allows("accept")


def test_different_messages_do_not_hide_each_other(clock) -> None:
    """Each key has its own minute."""
    limit = OncePerMinute()

    assert [limit.allows(kind) for kind in ("a", "b", "a", "b", "c")] == [True, True, False, False, True]
    clock[0] += PERIOD_S
    assert limit.allows("b")


@pytest.mark.usefixtures("clock")
def test_an_endless_number_of_keys_takes_limited_memory() -> None:
    """A peer that chooses the keys cannot fill the memory; the price is a repeated line."""
    limit = OncePerMinute()
    for number in range(10 * SUBJECTS_MAX):
        limit.allows("kind", f"peer {number}")

    assert len(limit._by_subject) <= SUBJECTS_MAX
    assert not limit.allows("kind", f"peer {10 * SUBJECTS_MAX - 1}")


# --- runtime.hold ---------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from batchd.daemon.runtime import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def usual_umask():
    """Group and others have no write permission."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_the_directory_is_created_for_owner_and_group(tmp_path, umask) -> None:
    """Its mode is 0750 for any umask: members of its group may connect."""
    os.umask(umask)
    with hold(tmp_path / "a" / "run") as names:
        assert mode(names.path) == 0o750


@pytest.mark.usefixtures("usual_umask")
def test_the_lock_names_its_holder(tmp_path) -> None:
    """Owner and group may read it, other users may not."""
    with hold(tmp_path / "a" / "run") as names:
        assert mode(names.lock_path) == 0o640
        assert names.lock_path.read_text() == f"{os.getpid()}\n"


@pytest.mark.usefixtures("usual_umask")
def test_an_existing_directory_keeps_its_mode(tmp_path) -> None:
    """Systemd or the operator chose that mode."""
    (tmp_path / "run").mkdir(mode=0o755)

    with hold(tmp_path / "run"):
        assert mode(tmp_path / "run") == 0o755


def test_a_second_holder_is_refused_with_the_pid_of_the_first(tmp_path) -> None:
    """The error has a remedy; its exit code is that of a daemon that already runs."""
    with hold(tmp_path / "run"):
        with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}\).*{tmp_path}/run; use it, stop it") as caught:
            hold(tmp_path / "run").__enter__()
        assert caught.value.exit_code == ExitCode.ALREADY_RUNNING
        with hold(tmp_path / "other"):
            pass
    with hold(tmp_path / "run"):
        pass


def test_a_killed_holder_leaves_sockets_but_no_lock(tmp_path) -> None:
    """The kernel releases the lock; the next daemon takes the files over and writes its pid."""
    run = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        (run / "batchd.sock").touch()
        with pytest.raises(AlreadyRunning, match=rf"pid {process.pid}\)"):
            hold(run).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)

    with hold(run) as names:
        assert names.lock_path.read_text() == f"{os.getpid()}\n"
    assert sorted(os.listdir(run)) == ["lock"]  # noqa: PTH208  names are enough


def test_the_end_removes_the_sockets_and_keeps_the_lock_file(tmp_path) -> None:
    """Without the file, two daemons could hold two locks of one name."""
    with hold(tmp_path / "run") as names:
        for path in (names.lifeline_path, names.zmq_path, names.path / "notes"):
            path.touch()

    assert {path.name for path in (tmp_path / "run").iterdir()} == {"lock", "notes"}


def test_a_private_directory_is_removed_at_the_end(tmp_path) -> None:
    """It stays if another program has put a file there."""
    with hold(tmp_path / "run", is_private=True) as names:
        names.zmq_path.touch()
    assert not (tmp_path / "run").exists()
    with hold(tmp_path / "run", is_private=True) as names:
        (names.path / "notes").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes"]


def test_a_lock_file_of_another_boot_is_no_lock(tmp_path) -> None:
    """Its text is for people; only ``flock`` counts. The new text replaces a longer one."""
    (tmp_path / "lock").write_text("1234567890123\nand more\n")

    with hold(tmp_path) as names:
        assert names.lock_path.read_text() == f"{os.getpid()}\n"


def test_a_child_neither_keeps_nor_releases_the_lock(tmp_path) -> None:
    """Programs that the daemon starts do not inherit it, even if they inherit all else."""
    with hold(tmp_path):
        subprocess.run(["/bin/true"], close_fds=False, check=True)
        with pytest.raises(AlreadyRunning):
            hold(tmp_path).__enter__()
        survivor = subprocess.Popen(["/bin/cat"], close_fds=False, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        survivor.stdin.write(b"x")
        survivor.stdin.flush()
        assert survivor.stdout.read(1) == b"x"  # it has started, with its descriptors closed
    with hold(tmp_path):
        assert survivor.poll() is None
    survivor.communicate()


def test_a_refused_holder_leaves_no_descriptor(tmp_path) -> None:
    """The text of the first holder stays unchanged."""
    with hold(tmp_path) as names:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
        for _again in range(3):
            with pytest.raises(AlreadyRunning):
                hold(tmp_path).__enter__()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  the same
        assert names.lock_path.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("kind", ["file", "in a file", "lock is a link", "lock is a directory"])
def test_an_unusable_directory_is_refused_with_a_remedy(tmp_path, kind) -> None:
    """A link in place of the lock could make the daemon overwrite another file."""
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.write_text("keep")
    match kind:
        case "file":
            run.touch()
        case "in a file":
            run = precious / "run"
        case "lock is a link":
            run.mkdir()
            (run / "lock").symlink_to(precious)
        case "lock is a directory":
            (run / "lock").mkdir(parents=True)

    with pytest.raises(BatchdError, match=r"cannot be used: .*set runtime_dir in \[daemon\]"):
        hold(run).__enter__()
    assert precious.read_text() == "keep"


def test_a_path_too_long_for_sockets_is_a_configuration_error(tmp_path) -> None:
    """No directory is created."""
    with pytest.raises(ConfigInvalid, match="choose a shorter one"):
        hold(tmp_path / ("d" * 100)).__enter__()
    assert list(tmp_path.iterdir()) == []
