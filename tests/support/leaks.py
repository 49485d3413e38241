"""The leak check: the resources of this test process and its descendants, before and after a test.

It runs for every test.

It counts the processes that the test started, whatever their parents are now; this process's
threads (ZeroMQ's too), its descriptors except those of files, its mappings of slots, the
blocked signals of its main thread, because children inherit these; and the files in the directory
of the tests' daemons. The descriptors of files are counted after each module, since what several of
its tests share may keep some.

A daemon that several tests share existed before; its workers may be replaced meanwhile.
"""

import gc
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from support.kernel import RUN_VARIABLE, carries, descriptors_of, mapped_slots, parent_of, process_ids

_strangers: set[int] = set()
"""Processes that were found not to belong to the tests, and never will.

To check each of them again would take a third of most tests.
"""

_KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:")


@dataclass(frozen=True, slots=True)
class Possessions:
    """The resources that a test can leave behind."""

    processes: frozenset[int]
    threads: dict[int, str]
    """All threads of this process by the kernel's number, with Python's name or the kernel's."""
    descriptors: frozenset[str]
    slots: int
    files: frozenset[str]
    blocked: frozenset[int]
    """Blocked signals."""

    def beyond(self, before: "Possessions") -> list[str]:
        """Describe new resources, apart from those of processes that existed before."""
        left = [
            f"process {pid}: {_command(pid)}"
            for pid in sorted(self.processes - before.processes)
            if not _descends(pid, before.processes)
        ]
        left += [f"thread {name}" for number, name in self.threads.items() if number not in before.threads and name]
        left += [f"descriptor {name}" for name in sorted(self.descriptors - before.descriptors)]
        left += [f"file {name}" for name in sorted(self.files - before.files)]
        left += [f"blocked signal {number}" for number in sorted(self.blocked - before.blocked)]
        if self.slots > before.slots:
            left.append(f"{self.slots - before.slots} mapped slots")
        return left


def look(directory: Path) -> Possessions:
    """Collect the present resources; ``directory`` is where the tests' daemons have their own."""
    return Possessions(
        processes=frozenset(_our_processes()),
        threads=_threads(),
        descriptors=frozenset(
            f"{number} -> {name}" for number, name in descriptors_of("self").items() if name.startswith(_KINDS)
        ),
        slots=mapped_slots("self"),
        files=frozenset(_files(directory)),
        blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    )


def left_since(before: Possessions, directory: Path) -> list[str]:
    """Return what a test has left behind by now.

    Objects that only wait for the garbage collector do not count.
    """
    left = look(directory).beyond(before)
    if left:
        gc.collect()
        left = look(directory).beyond(before)
    return left


def open_files() -> frozenset[str]:
    """Return this process's descriptors of files and folders."""
    gc.collect()
    return frozenset(
        f"{number} -> {name}"
        for number, name in descriptors_of("self").items()
        if name.startswith("/") and not name.startswith(("/dev/", "/proc/", *_KINDS))
    )


def _our_processes() -> set[int]:
    """Return living processes that have the tests' mark, or are children without it."""
    present = set(process_ids()) - {os.getpid()}
    _strangers.intersection_update(present)
    marker, ours = f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}", set()
    for pid in present - _strangers:
        parent = parent_of(pid)
        if parent == os.getpid() or carries(pid, marker):
            ours.update(() if parent is None else (pid,))
        else:
            _strangers.add(pid)
    return ours


def _files(directory: Path) -> list[str]:
    return [str(path) for path in directory.rglob("*")] if directory.exists() else []


def _threads() -> dict[int, str]:
    """Return the threads. Those of libraries have no name, except ZeroMQ's, which get one later."""
    names = {int(task): "" for task in os.listdir("/proc/self/task")}  # noqa: PTH208  as in kernel._read
    names |= {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
    for number in [number for number, name in names.items() if not name]:
        with suppress(OSError):
            comm = Path(f"/proc/self/task/{number}/comm").read_text().strip()
            names[number] = f"{comm} ({number})" if comm.startswith("ZMQ") else ""
    return names


def _descends(pid: int, ancestors: frozenset[int]) -> bool:
    """Return whether the process or one of its parents is in ``ancestors``."""
    at: int | None = pid
    while at is not None and at not in {0, 1, os.getpid()}:
        if at in ancestors:
            return True
        at = parent_of(at)
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone meanwhile"
