"""A daemon that runs is found, whoever asks, and whatever it does at that moment; and a directory without one is judged."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchd.daemon.runtime import directory_problem, hold
from batchd.errors import BatchdError
from batchd_wire import runtime
from batchd_wire.runtime import RuntimeDirectory

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def stranger() -> Iterator[None]:
    """Be another user."""
    os.setresuid(STRANGER, STRANGER, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RuntimeDirectory:
    """The system's runtime directory, and one of the user that is there, too, and comes behind it."""
    names = RuntimeDirectory(tmp_path / "system")
    names.path.mkdir()
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(runtime, "SYSTEM_DIRECTORY", names.path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    return names


@as_root
def test_a_directory_that_may_not_be_looked_into_is_refused_with_what_helps(
    system: RuntimeDirectory, tmp_path: Path
) -> None:
    """By the daemon and by the check; where none is configured, the next one is taken."""
    names = RuntimeDirectory(tmp_path / "further" / "run")
    says = "cannot be used: Permission denied; make it writable for this user"
    with stranger():
        problem = directory_problem(names)
        with pytest.raises(BatchdError, match=says):
            hold(names.path)
        with pytest.raises(BatchdError, match=f"uid {STRANGER} may not write {system.path}"):
            hold(None)
    assert problem is not None
    assert says in problem.message


def test_a_directory_that_cannot_be_asked_about_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel says of its file system."""

    def fail(_path: object) -> None:
        raise OSError(errno.EIO, "of the disk")

    monkeypatch.setattr(os, "statvfs", fail)
    problem = directory_problem(RuntimeDirectory(tmp_path))
    assert problem is not None
    assert "cannot be used: Input/output error" in problem.message
