"""Small file systems that a test mounts, to fill them. For tests of processes, as root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.keeper import cleared_by


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[None]:
    """Mount one in memory at ``folder``, which is created; skip the test without permission."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder.mkdir()
    unmount = ["umount", "-l", str(folder)]
    with cleared_by(*unmount):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(unmount, check=True)
