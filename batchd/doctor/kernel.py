"""What batchd needs of the kernel: tried out, and judged. Runs in the user's shell."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

from batchd.doctor.finding import Finding, ok, problem
from batchd.doctor.machine import Machine

PAGE_BYTES = mmap.PAGESIZE
MADV_POPULATE_WRITE = 23
"""Of madvise(2), since Linux 5.14; the standard library does not name it."""
WANTED = {"memfd", "sealing", "pidfd"}
"""What nothing works without; "populate" is good to have."""


def check_kernel(machine: Machine, features: Mapping[str, str]) -> Finding:
    """``features``: why each is not to be had, "" where it is."""
    version = machine.read("/proc/sys/kernel/osrelease") or "unknown"
    missing = [f"{name} ({why})" for name, why in features.items() if why and name in WANTED]
    if missing:
        advice = (
            "use Linux 5.4 or later; in a container, a seccomp profile that lets memfd_create and pidfd_open through"
        )
        return problem("kernel", f"{version}, without {', '.join(missing)}", advice)
    return ok("kernel", f"{version}: {', '.join(name for name, why in features.items() if not why)}")


def try_features() -> dict[str, str]:
    """Try each: why it cannot be had, "" where it can."""
    tries: dict[str, Callable[[], None]] = {
        "memfd": _try_memfd,
        "sealing": _try_sealing,
        "pidfd": _try_pidfd,
        "populate": _try_populate,
    }
    return {name: _why_not(attempt) for name, attempt in tries.items()}


def _why_not(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextmanager
def _memory() -> Iterator[int]:
    descriptor = os.memfd_create("batchd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, PAGE_BYTES)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_memfd() -> None:
    with _memory():
        return


def _try_sealing() -> None:
    with _memory() as descriptor:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_populate() -> None:
    with _memory() as descriptor, closing(mmap.mmap(descriptor, PAGE_BYTES)) as mapped:
        mapped.madvise(MADV_POPULATE_WRITE)
