"""A scripted daemon, and a connection that waits for it for a while. A module may have its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import batchd_client
from batchd_client.daemon import Daemon
from support.fake_daemon import FakeDaemon


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeDaemon]:
    """Start a fake daemon with the usual stream."""
    with FakeDaemon(tmp_path / "run") as fake:
        yield fake


@pytest.fixture
def daemon(fake: FakeDaemon) -> Iterator[Daemon]:
    """Connect to the fake daemon."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=20, batch_timeout_s=20) as daemon:
        yield daemon
