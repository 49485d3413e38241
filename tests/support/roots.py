"""A small Debian to install into, for tests of packages.

Made once by debootstrap, under an overlay that a test discards.

    build/packages/bookworm     read-only: minbase, Python, make, libjpeg (for the Debian package)
    Root(folder)                a test's changes are in ``folder``, which is empty without any
        /mnt                    this tree, read-only, so that nothing can be left in it

Invariant: all of a command ends with it, it has no network, and its mounts are not visible outside.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
DEBIAN = TREE / "build/packages/bookworm"
WHEELHOUSE = TREE / "build/wheelhouse"
PYTHON = Path("/usr/bin/python3")
"""Debian's own Python, for which the wheels are collected."""
PHOTOS = "mkdir -p /tmp/photos && cp /mnt/docs/pictures/batch.png /tmp/photos/"
"""Makes a folder with an image, in a root."""
COMMAND_PATIENCE_S = 900
_INCLUDED = "python3,python3-venv,adduser,ca-certificates,make,libjpeg62-turbo"
_ENTER = """
set -e
mount -t overlay overlay -o lowerdir={lower},upperdir={upper},workdir={work} {merged}
mount --rbind {tree} {merged}/mnt
mount -o remount,bind,ro {merged}/mnt
mount -t proc proc {merged}/proc
mount --rbind /dev {merged}/dev
mount -t tmpfs -o mode=1777 tmpfs {merged}/tmp
mount -t tmpfs -o mode=755 tmpfs {merged}/run
cd {merged}
exec chroot . env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PIP_NO_CACHE_DIR=1 "$@"
"""


@dataclass(frozen=True)
class Root:
    """A Debian for one test, in a folder."""

    folder: Path

    def run(self, command: str, *, status: int = 0, user: int | None = None) -> str:
        """Run a line of shell inside, as root or as another user.

        Return its output with standard error.
        """
        for name in ("upper", "work", "merged"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        places = {name: self.folder / name for name in ("upper", "work", "merged")}
        script = _ENTER.format(lower=DEBIAN, tree=TREE, **places)
        become = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "sh",
                "-c",
                script,
                "root",
                *become,
                "sh",
                "-ec",
                command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_PATIENCE_S,
            check=False,
        )
        assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def changed(self) -> set[str]:
        """Return all paths that differ from the original Debian: new, changed and removed ones."""
        upper = self.folder / "upper"
        paths = (path.relative_to(upper) for path in upper.rglob("*"))
        return {
            f"/{path}"
            for path in paths
            if not _is_known_directory(upper / path, DEBIAN / path) and not _is_same(upper, path)
        }


def _is_known_directory(path: Path, before: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and before.is_dir()


def _is_same(upper: Path, path: Path) -> bool:
    """Return whether a rewritten file has the same content as before."""
    now, before = upper / path, DEBIAN / path
    return now.is_file() and before.is_file() and now.read_bytes() == before.read_bytes()


def need_debian() -> None:
    """Skip the test with the reason if there is no Debian to install into."""
    problem = _problem()
    if problem:
        pytest.skip(f"there is no Debian to install into: {problem}")


@cache
def _problem() -> str:
    if os.geteuid():
        return "only root can make one"
    missing = [name for name in ("unshare", "chroot", "debootstrap") if not shutil.which(name)]
    if missing and not (missing == ["debootstrap"] and DEBIAN.exists()):
        return f"{', '.join(missing)} is not installed (apt install {' '.join(missing)})"
    if DEBIAN.exists():
        return ""
    unfinished = DEBIAN.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", f"--include={_INCLUDED}", "bookworm", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"debootstrap ended with {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    unfinished.rename(DEBIAN)
    return ""


@cache
def collect_wheels() -> None:
    """Put everything into ``WHEELHOUSE`` that an installation without a network needs.

    With the extra ``lmdb``, whose wheel is the smallest one.

    Skips the test where the Pythons differ.
    """
    minor = subprocess.run([PYTHON, "--version"], capture_output=True, text=True, check=True).stdout.split(".")[1]
    if not (DEBIAN / f"usr/bin/python3.{minor}").exists():
        pytest.skip(f"{PYTHON} is 3.{minor}, and that of {DEBIAN} differs, so its wheels cannot be collected here")
    if not [*WHEELHOUSE.glob("lmdb-*.whl")]:
        make("wheelhouse", f"PYTHON={PYTHON}", "EXTRAS=lmdb")


def make(*arguments: str) -> str:
    """Run make in this tree, outside of any root, and return its output."""
    done = subprocess.run(
        ["make", "-C", TREE, *arguments], capture_output=True, text=True, timeout=COMMAND_PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
