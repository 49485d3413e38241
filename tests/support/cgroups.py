"""Memory groups (cgroups, version 1) for tests of processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from support.keeper import cleared_by
from support.waiting import wait_until

CONTROLLER = Path("/sys/fs/cgroup/memory")
_numbers = count(1)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Create a group with this limit; skip the test if that is impossible.

    The processes in it must have ended before the block does.
    """
    group = CONTROLLER / f"batchd-test-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a memory cgroup: {error}")
    with cleared_by("rmdir", str(group)):
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            yield group
        finally:
            wait_until(lambda: _removed(group), f"{group} is empty")


def _removed(group: Path) -> bool:
    """Remove the group; return False if the kernel still has its last processes."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def into(group: Path) -> list[str]:
    """The words before a command that run it in the group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
