"""Memory groups (cgroups, version 1) that a test makes. For tests of processes."""

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
    """Make a group that may take so much; skips the test where that cannot be.

    Whoever is in it must have ended at its end.
    """
    group = CONTROLLER / f"batchd-test-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    with cleared_by("rmdir", str(group)):
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
            yield group
        finally:
            wait_until(lambda: _removed(group), f"{group} is empty")


def _removed(group: Path) -> bool:
    """Remove it; False where the kernel has not done with its last processes."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def into(group: Path) -> list[str]:
    """Words before a command that run it in the group."""
    return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
