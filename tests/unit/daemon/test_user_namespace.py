"""The overflow id of this process's user namespace, from /proc."""

from pathlib import Path

import pytest

from batchd_wire.runtime import unmapped_id


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc whose files about users are still missing."""
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/overflowuid").write_text("65534\n")
    (tmp_path / "sys/kernel/overflowgid").write_text("65533\n")
    return tmp_path


def test_on_a_host_every_number_is_a_user(proc: Path) -> None:
    """This includes 65534."""
    (proc / "self/uid_map").write_text("         0          0 4294967295\n")

    assert unmapped_id("uid", proc) is None


@pytest.mark.parametrize("lines", ["0 1000 1\n", "0 1000 1\n1 100000 65535\n", ""])
def test_in_a_container_with_users_of_its_own_one_number_is_no_user(proc: Path, lines: str) -> None:
    """This holds even if the number is mapped, because it stands for unmapped users, too."""
    (proc / "self/gid_map").write_text(lines)

    assert unmapped_id("gid", proc) == 65533


def test_a_kernel_without_user_namespaces_knows_every_user(proc: Path) -> None:
    """Such a kernel has no such file."""
    assert unmapped_id("uid", proc) is None
