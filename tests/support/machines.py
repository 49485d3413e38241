"""Machines for tests: a folder with the kernel's files, and a few numbers."""

from pathlib import Path

from batchd.commands.doctor.machine import UNLIMITED, Machine

GIBIBYTE_KIB = 1 << 20
FINE = {
    "proc/meminfo": f"MemTotal: {64 * GIBIBYTE_KIB} kB\nMemAvailable: {32 * GIBIBYTE_KIB} kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "proc/cpuinfo": "".join(f"processor\t: {number}\nflags\t\t: fpu sse2 sse4_2 avx2\n\n" for number in range(8)),
    "proc/self/cgroup": "0::/system.slice/batchd.service\n",
    "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "proc/sys/kernel/osrelease": "6.8.0\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] advise never deny force\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
}
"""A machine without any problem."""
GROUP = "sys/fs/cgroup/system.slice/batchd.service"


def made_machine(root: Path, files: dict[str, str] | None = None, **given: object) -> Machine:
    """Make a good machine except for ``files`` and ``given``: limits, affinity, user."""
    for path, text in {**FINE, **(files or {})}.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    limits = {"files": 1 << 20, "locked memory": UNLIMITED, "file size": UNLIMITED, "processes": UNLIMITED}
    return Machine(**{"root": root, "limits": limits, "affinity": 8, "user": 1000, **given})
