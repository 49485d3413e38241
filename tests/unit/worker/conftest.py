"""Streams of workers without their processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.worker_streams import WorkerStreams, worker_streams


@pytest.fixture
def streams(tmp_path: Path) -> Iterator[WorkerStreams]:
    """Start streams of a worker; they end with the test."""
    with worker_streams(tmp_path) as made:
        yield made
