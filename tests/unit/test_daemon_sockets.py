"""Who may open the sockets in the runtime directory: those who may open the directory."""

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from batchd.daemon.descriptors import Watch
from batchd.daemon.sessions import Sessions
from batchd.daemon.speech import Desk
from batchd_wire.runtime import RuntimeDirectory

DIRECTORY_GROUP = 54_323


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    """A front end that nobody comes to."""
    with closing(Watch()) as watch:
        sessions = Sessions(watch, cast("Desk", SimpleNamespace(enqueue=print)), sessions_max=1)
        yield sessions
        sessions.close()


@pytest.fixture
def names(tmp_path: Path) -> RuntimeDirectory:
    """A runtime directory."""
    return RuntimeDirectory(tmp_path)


def access(path: Path) -> tuple[int, int]:
    """Group and mode."""
    status = path.stat()
    return status.st_gid, stat.S_IMODE(status.st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other groups")
def test_the_sockets_have_the_directorys_group(sessions: Sessions, names: RuntimeDirectory) -> None:
    """Which is not the daemon's own where the operator chose it."""
    os.chown(names.path, -1, DIRECTORY_GROUP)

    sessions.bind(names.lifeline_path, names.zmq_path)

    assert access(names.lifeline_path) == access(names.zmq_path) == (DIRECTORY_GROUP, 0o660)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other groups")
def test_a_group_that_the_daemon_cannot_give_is_said(sessions: Sessions, names: RuntimeDirectory, monkeypatch) -> None:
    """It is not a member; those who are would be refused without a word in the log."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.chown(names.path, -1, DIRECTORY_GROUP)
    monkeypatch.setattr(os, "chown", refuse)
    with capture_logs() as log:
        sessions.bind(names.lifeline_path, names.zmq_path)

    assert [(line["event"], line["log_level"]) for line in log] == [
        ("socket is not open to the directory's group", "warning")
    ] * 2
    assert access(names.lifeline_path)[1] == 0o660
