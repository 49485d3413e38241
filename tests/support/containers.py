"""Containers without an engine: namespaces and a file system, by ``unshare``.

For tests of processes.

    outside                                     inside
    Container(shares={run: "/run/batchd"})      /  a tmpfs: interpreter, packages, tests, read-only;
                                                   own /proc, /tmp and /dev/shm, and the shares

Invariant: a container ends with the process that ``command`` starts, and its mounts are
never visible outside.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

import batchd
import batchd_client
from support.kernel import children_of
from support.waiting import wait_until

RUNTIME_DIRECTORY = "/run/batchd"
_SYSTEM = ("/bin", "/sbin", "/usr", "/lib", "/lib64", "/etc")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts")
_FOREVER = ("--fork", "--kill-child=KILL")


@dataclass(frozen=True)
class Container:
    """A container for one process.

    ``shares``: paths outside and their paths inside; ``shm_kib`` 0: no /dev/shm.

    ``identity``: user, group and further groups, instead of root. ``user_map``: arguments of
    ``unshare --user``, for a separate user namespace. ``network``: None for a separate network
    without any interface, else the words that run a command in a network. ``environment`` is added
    to that of the process.
    """

    root: Path
    shares: Mapping[Path, str] = field(default_factory=dict)
    shm_kib: int = 64
    identity: tuple[int, ...] = ()
    user_map: Sequence[str] | None = None
    network: Sequence[str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The words before a command that run it inside."""
        namespaces = [*_NAMESPACES, *(() if self.network is not None else ("--net",)), *_FOREVER]
        script = "\n".join([*self._mounts(), f'exec {shlex.join(self._become())} "$@"'])
        return [*(self.network or ()), "unshare", *namespaces, "sh", "-c", script, "container"]

    def _mounts(self) -> list[str]:
        """Build the tree, and make it the root of the namespace."""
        root = self.root
        lines = ["set -e", f"mount -t tmpfs -o mode=755 tmpfs {root}", f"mkdir {root}/proc {root}/dev"]
        lines += [f"mkdir -m 1777 {root}/tmp", f"mount -t proc proc {root}/proc"]
        for path in (*_SYSTEM, *_ours()):
            if Path(path).is_symlink():
                lines.append(f"ln -s {Path(path).readlink()} {root}{path}")
            elif Path(path).exists():
                lines += [*self._bind(path, path), f"mount -o remount,bind,ro {root}{path}"]
        for device in _DEVICES:
            lines += self._bind(device, device)
        if self.shm_kib:
            lines += [f"mkdir {root}/dev/shm", f"mount -t tmpfs -o mode=1777,size={self.shm_kib}k tmpfs {root}/dev/shm"]
        for outside, inside in self.shares.items():
            lines += self._bind(outside, inside)
        return [*lines, f"cd {root}", "pivot_root . .", "umount -l .", "cd /", "hostname container"]

    def _bind(self, outside: str | Path, inside: str) -> list[str]:
        place = f"{self.root}{inside}"
        make = f"mkdir -p {place}" if Path(outside).is_dir() else f"mkdir -p {Path(place).parent} && touch {place}"
        return [make, f"mount --rbind {outside} {place}"]

    def _become(self) -> list[str]:
        words = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        if self.identity:
            user, group, *others = map(str, self.identity)
            groups = [f"--groups={','.join(others)}"] if others else ["--clear-groups"]
            words += ["setpriv", f"--reuid={user}", f"--regid={group}", *groups]
        if self.user_map is not None:
            words += ["unshare", "--user", *self.user_map]
        return words


def process_inside(pid: int) -> int:
    """The process inside a container, by its id outside, from that of ``Container.command``."""
    return next(iter(wait_until(lambda: children_of(pid), "the container runs its process")))


def need_containers() -> None:
    """Skip the test with a reason if no namespaces can be created."""
    problem = _problem()
    if problem:
        pytest.skip(f"cannot create namespaces (root and util-linux 2.38 are needed): {problem}")


@cache
def _problem() -> str:
    attempt = "mount -t tmpfs tmpfs /mnt && exec unshare --user true"
    with suppress(FileNotFoundError):
        done = subprocess.run(
            ["unshare", *_NAMESPACES, "--net", *_FOREVER, "sh", "-c", attempt],
            check=False,
            capture_output=True,
            text=True,
        )
        return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
    return "there is no unshare"


def _ours() -> list[str]:
    """Folders of the interpreter, of its imports and of the tests, without nested ones."""
    imported = (Path(folder) for folder in sys.path if Path(folder).is_dir() and Path(folder).is_absolute())
    packages = (Path(str(package.__file__)).parents[1] for package in (batchd, batchd_client))
    folders = {Path(sys.prefix), Path(sys.base_prefix), *packages, *imported, Path(__file__).parents[1]}
    return sorted(str(folder) for folder in folders if folders.isdisjoint(folder.parents))
