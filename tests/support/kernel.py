"""The kernel's view of processes: liveness, parents, and open resources.

For tests of processes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

RUN_VARIABLE = "BATCHD_TEST_RUN"
"""A mark in the environment of every process of a test, which identifies orphans."""

_READ_BYTES = 1 << 16


def _read(path: str) -> bytes:
    """Read a whole file of ``/proc``.

    Every test lists all processes twice: ``Path.read_bytes`` takes four times as long.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(descriptor, _READ_BYTES)]
        while parts[-1]:
            parts.append(os.read(descriptor, _READ_BYTES))
    finally:
        os.close(descriptor)
    return b"".join(parts)


def watched_by(epoll: int) -> int:
    """Return the number of descriptors that an epoll of this process watches."""
    return _read(f"/proc/self/fdinfo/{epoll}").count(b"tfd:")


def process_ids() -> Iterator[int]:
    """Return every visible process of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  a hundred times a second


def _stat(pid: int) -> list[bytes]:
    """Return the facts behind the name in a process's ``stat``; none if it has ended."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int | None:
    """Return the parent's process id, or None for an ended process or a zombie."""
    stat = _stat(pid)
    return None if not stat or stat[0] in b"ZX" else int(stat[1])


def started_at(pid: int) -> int | None:
    """Return the start time in ticks since boot, or None for an ended process.

    Process id and start time identify a process uniquely.
    """
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def processor_s(pid: int) -> float:
    """Return the processor time that the main thread of a process has had, in seconds."""
    return int(_read(f"/proc/{pid}/task/{pid}/schedstat").split()[0]) / 1e9


def is_alive(pid: int) -> bool:
    """Return whether the process still runs. A zombie does not."""
    return parent_of(pid) is not None


def is_stopped(pid: int) -> bool:
    """Return whether every thread of the process has stopped after SIGSTOP."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks} == {"T"}


def children_of(pid: int) -> set[int]:
    """Return the living children of a process."""
    return {child for child in process_ids() if parent_of(child) == pid}


def fork_servers_of(daemon: int) -> set[int]:
    """Return the living fork server of a daemon's workers, or no process."""
    return children_called(daemon, b"batchd.worker")


def observers_of(daemon: int) -> set[int]:
    """Return the living observer of a daemon, or no process."""
    return children_called(daemon, b"batchd.observe.http")


def deriving_of(daemon: int) -> set[int]:
    """Return the living process that works out streams for trainers, or no process."""
    return children_called(daemon, b"batchd.daemon.derive.process")


def gateways_of(daemon: int) -> set[int]:
    """Return the living gateways of a daemon."""
    return children_called(daemon, b"batchd.pool.gateway")


def reloads_of(daemon: int) -> set[int]:
    """Return the living process that reads a daemon's configuration again, or no process."""
    return children_called(daemon, b"batchd.daemon.reload.rescan")


def workers_of(daemon: int) -> set[int]:
    """Return the living workers of a daemon."""
    return {worker for server in fork_servers_of(daemon) for worker in children_of(server)}


def children_called(daemon: int, module: bytes) -> set[int]:
    """Return the living children that run a module, or are called like it by ``launcher``."""
    return {child for child in children_of(daemon) if module in _command_line(child).split(b"\0")}


def _command_line(pid: int) -> bytes:
    try:
        return _read(f"/proc/{pid}/cmdline") + _read(f"/proc/{pid}/comm").strip()
    except OSError:
        return b""


def members_of(session: int) -> set[int]:
    """Return the living processes of a session of this test run, except its leader."""
    marker = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}"  # another session may get the number
    stats = {pid: _stat(pid) for pid in process_ids() if pid != session}
    found = {pid for pid, stat in stats.items() if stat and stat[0] not in b"ZX" and int(stat[3]) == session}
    return {pid for pid in found if carries(pid, marker)}


def carries(pid: int, marker: str) -> bool:
    """Return whether ``marker`` (NAME=VALUE) is in the environment of the process or a parent."""
    try:
        environment = _read(f"/proc/{pid}/environ")
    except OSError:
        return False
    return marker.encode() in environment.split(b"\0")


def carriers(marker: str) -> set[int]:
    """Return every living process except this one with ``marker``."""
    return {pid for pid in process_ids() if pid != os.getpid() and carries(pid, marker) and is_alive(pid)}


def descriptors_of(pid: int | str) -> dict[int, str]:
    """Return the kernel's name for each open descriptor of a process."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  as in _read
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:  # the descriptor that listed the directory
            continue
    return found


def mapped_slots(pid: int | str) -> int:
    """Return how many of batchd's memories, without caches, a process has mapped and used."""
    if b"\nRssShmem:\t       0 kB\n" in _read(f"/proc/{pid}/status"):
        return 0  # with torch there are a thousand mappings, which take the kernel 2 ms to list
    maps = _read(f"/proc/{pid}/maps")
    return maps.count(b"/memfd:batchd") - maps.count(b"/memfd:batchd-cache")
