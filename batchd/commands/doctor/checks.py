"""Checks of memory, processors, limits, kernel and clocks. Runs in the user's shell.

Pure functions of the machine's files, but for ``try_features``.
"""

import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from math import floor

from batchd.commands.doctor.machine import (
    NOTHING_RUNS,
    UNLIMITED,
    Finding,
    Machine,
    Running,
    note,
    ok,
    problem,
    warning,
)
from batchd.config.tree import Config, StreamConfig
from batchd.data.pipeline.cache_split import KINDS_OF_FACTS, cropped_files
from batchd.data.pipeline.image.options import Normalize
from batchd.observe.diagnosis.demand import NETWORK_SHARE
from batchd.pool.wanted import interface_of
from batchd.runtime.addresses import parse_tcp
from batchd.runtime.available import available_bytes, shortage
from batchd.runtime.cpus import control_groups, cpu_quotas
from batchd.runtime.sizes import round_bytes
from batchd.runtime.slots import MADV_POPULATE_WRITE
from batchd.stream.rings import DescriptorPlan, RingSize, file_size_refusal
from batchd_wire.wording import counted

GIGABIT_10_BYTES = 10e9 / 8
"""Bytes per second of a network whose speed is not known."""
SHMEM_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
NODES = "sys/devices/system/node"
BUSY_SWAP = 0.25
"""Part of the swap in use above which memory has been short."""
FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq"
THROTTLED = 0.05
"""Part of a group's periods above which the quota slows workers down."""
SELF_REGULATING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" raises the clock on demand."""
DAEMON_THREADS = 16
"""The daemon and ZeroMQ's threads, with some reserve."""
WORKER_THREADS = 4
"""A worker and the threads of its libraries."""
USUAL_FILES = 65_536
UNLIMITED_ROOM = 1 << 40
PAGE_BYTES = mmap.PAGESIZE
WANTED = {"memfd", "sealing", "pidfd"}
"""Required features; "populate" is optional."""
SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SLOW_SOURCES = {"hpet", "acpi_pm", "jiffies", "refined-jiffies"}
"""Each read of these is a system call, or slower."""
TIMESYNC = "run/systemd/timesync"


def check_memory(machine: Machine, need_bytes: int, running: Running = NOTHING_RUNS) -> Finding:
    """Available memory against ``need_bytes``, the rings'; the tightest control group counts."""
    if not machine.read("/proc/meminfo"):
        return note("memory", "unknown: /proc/meminfo cannot be read")
    free = available_bytes(machine.root / "proc", machine.root / "sys/fs/cgroup")
    limited = free < machine.table("/proc/meminfo").get("MemAvailable", free)
    # the slots of the running daemon are available to its next start
    held = running.memory_bytes if not limited or running.shares_groups(machine) else 0
    have = free + held
    of_these = f" ({round_bytes(held)} of it in slots of the running daemon)" if held else ""
    reading = f"{round_bytes(have, floor)} available{of_these}, {round_bytes(need_bytes)} needed for the rings"
    where = " (a control group's limit)" if limited else ""
    if shortage(need_bytes, have) is None:
        return ok("memory", reading + where)
    bigger = "raise MemoryMax= in the unit, --memory of docker, or the pod's memory limit" if limited else "add memory"
    return problem("memory", reading + where, f"reduce memory = in [daemon], or {bigger}")


def check_locked_memory(machine: Machine, need_bytes: int) -> Finding:
    """Memory that a device reads is locked for some drivers. The trainer's limit is often equal."""
    limit = machine.limits["locked memory"]
    if limit in (UNLIMITED, -1):
        return ok("locked memory", "unlimited")
    reading = f"up to {round_bytes(limit, floor)}"
    if limit >= need_bytes:
        return ok("locked memory", reading)
    return note(
        "locked memory",
        f"{reading}, less than the rings",
        "trainers whose device reads the ring by itself (writable_slots) may need more: ulimit -l unlimited, "
        "LimitMEMLOCK=infinity in their unit, --ulimit memlock=-1 of docker",
    )


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Transparent huge pages for shared memory, and reserved ones, which batchd cannot use."""
    choice = machine.chosen(SHMEM_PAGES)
    if choice in {"never", "deny"}:
        yield note(
            "huge pages",
            f"{choice} for shared memory, so slots use small pages",
            f"for a fifth less time for copies out of large slots: echo advise > {SHMEM_PAGES}",
        )
    elif choice in {"always", "force"}:
        yield note("huge pages", f"{choice} for shared memory: each slot takes a multiple of 2 MiB")
    elif choice:
        asked = ", and the daemon asks" if choice == "advise" else ""
        yield ok("huge pages", f"{choice} for shared memory{asked}")
    facts = machine.table("/proc/meminfo")
    reserved = facts.get("HugePages_Total", 0) * facts.get("Hugepagesize", 0)
    if reserved:
        yield note(
            "reserved huge pages",
            f"{round_bytes(reserved)} are reserved, which batchd does not use",
            "if no other program uses them either: sysctl vm.nr_hugepages=0",
        )


def check_swap(machine: Machine) -> Finding:
    """Slots are shared memory, which the kernel may swap out."""
    facts = machine.table("/proc/meminfo")
    total, free = facts.get("SwapTotal", 0), facts.get("SwapFree", 0)
    if not total:
        return ok("swap", "none")
    reading = f"{round_bytes(total - free)} of {round_bytes(total)} in use"
    if total - free > BUSY_SWAP * total:
        advice = "memory has been short, and swapped-out batches are slow: reduce memory = in [daemon]"
        return warning("swap", reading, f"{advice}, or set MemorySwapMax=0 in the unit")
    return ok("swap", reading)


def check_nodes(machine: Machine) -> Finding:
    """Memory of another node is slower for workers and trainers."""
    count = len(list((machine.root / NODES).glob("node[0-9]*")))
    if count <= 1:
        return ok("NUMA", "one node")
    advice = (
        "workers and rings are placed by node (numa in [daemon]); bind trainers to the nodes of their GPUs, as numactl "
        "--cpunodebind does, so that theirs are known"
    )
    return note("NUMA", f"{count} nodes", advice)


def check_count(machine: Machine, workers: int) -> Iterator[Finding]:
    """The number of workers against the processors that they may use."""
    there = sum(line.startswith("processor") for line in machine.read("/proc/cpuinfo").splitlines())
    quota = min(cpu_quotas(machine.root), default=None)
    usable = float(machine.affinity)
    reading = f"{usable:g} of {there} CPUs usable" if there > usable else counted(machine.affinity, "CPU")
    if quota is not None and quota < usable:
        usable, reading = quota, f"{reading}, {quota:g} by the quota of the control group"
    reading = f"{reading}; {counted(workers, 'worker')}"
    if workers > usable + 1:
        advice = "more workers than CPUs help only if they wait for files (`batchd why`: storage-bound)"
        yield note("processors", reading, f'{advice}; otherwise set workers = "auto" in [daemon]')
    else:
        yield ok("processors", reading)
    for group in control_groups("cpu", machine.root):
        facts = machine.table(group.folder / "cpu.stat")
        periods, throttled = facts.get("nr_periods", 0), facts.get("nr_throttled", 0)
        if periods and throttled > THROTTLED * periods:
            yield warning(
                "CPU quota",
                f"this control group was throttled in {throttled / periods:.0%} of its periods so far",
                "raise CPUQuota= in the unit, --cpus of docker, or the pod's CPU limit; or set workers = to the quota",
            )
            break


def check_pool(config: Config, rings: Mapping[str, RingSize], cpus: int) -> Iterator[Finding]:
    """Judge for each stream that worker hosts may fill what helps before, and what rows cost."""
    address = config.daemon.worker_address
    if address is None:
        return
    interface, bytes_per_s = interface_of(parse_tcp(address)[0])
    for name, stream in config.streams.items():
        if stream.why_here:
            continue
        row_bytes = rings[name].layout.slot_bytes / stream.batch_size
        speed_bytes = bytes_per_s or GIGABIT_10_BYTES
        link = f"{interface or 'a network'} of {8 * speed_bytes / 1e9:g} Gbit/s"
        rows = f"{NETWORK_SHARE * speed_bytes / row_bytes:,.0f} of them a second"
        reading = f"rows of {round_bytes(round(row_bytes))}: {link} carries {rows}"
        advice = "; ".join(cheaper_than_hosts(config.daemon.worker_count(), cpus, stream))
        subject = f"worker hosts of {name}"
        yield note(subject, reading, f"try first: {advice}") if advice else ok(subject, reading)


def cheaper_than_hosts(workers: int, cpus: int, stream: StreamConfig) -> Iterator[str]:
    """What costs less than worker hosts and is not done yet."""
    if cpus > workers:
        yield f"workers = {cpus}, the CPUs of this host"
    if stream.cache_kind in {"off", *KINDS_OF_FACTS}:
        yield "a cache of samples (cache =)"
    if stream.cache == "off" and cropped_files(stream.pipeline):
        yield 'access points, if these are JPEGs (cache = "points")'
    if any(isinstance(step, Normalize) for step in stream.pipeline):
        yield "normalize on the GPU: uint8 is a quarter of the bytes"


def check_flags(machine: Machine) -> Finding:
    """The SIMD instructions that decoders use."""
    listed = re.search(r"^(?:flags|Features)\s*:(.*)", machine.read("/proc/cpuinfo"), re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    if flags & {"asimd", "neon"}:
        return ok("instructions", "NEON")
    if "avx2" in flags:
        return ok("instructions", "AVX2")
    if not flags:
        return note("instructions", "unknown: /proc/cpuinfo names none")
    best = "SSE4.2" if "sse4_2" in flags else "SSE2"
    advice = "in a virtual machine, use the host's CPU model (-cpu host); an older CPU decodes more slowly"
    return warning("instructions", f"{best}, without AVX2", advice)


def check_governor(machine: Machine) -> Finding:
    """The frequency governor: one that keeps the clock low slows decoding down."""
    governor, driver = machine.read(f"{FREQUENCY}/scaling_governor"), machine.read(f"{FREQUENCY}/scaling_driver")
    if not governor:
        return ok("frequency", "not set by this machine")
    if governor == "powersave" and driver not in SELF_REGULATING:
        return warning("frequency", "powersave: the lowest clock", "cpupower frequency-set -g performance")
    return ok("frequency", f"{governor} ({driver})" if driver else governor)


def check_files(machine: Machine, plan: DescriptorPlan | None, streams: int) -> Finding:
    """The hard limit against the plan of the configuration; ``plan`` is None without one."""
    limit = machine.limits["files"]
    reading = f"up to {limit:,}"
    if plan is None:
        return ok("open files", reading) if limit >= USUAL_FILES else note("open files", reading)
    reading += f", {plan.need:,} needed if all rings are full and all sessions are used"
    refusal, shortage = plan.refusal(streams), plan.shortage()
    if refusal is not None:
        return problem("open files", reading, refusal.message)
    return warning("open files", reading, shortage) if shortage else ok("open files", reading)


def check_file_size(machine: Machine, rings: Mapping[str, RingSize]) -> Finding:
    """The limit of file sizes against the largest slot; it holds for shared memory, too."""
    limit = machine.limits["file size"]
    if limit in (UNLIMITED, -1):
        return ok("file sizes", "unlimited")
    refusal, reading = file_size_refusal(rings, limit), f"up to {limit:,} bytes"
    return ok("file sizes", reading) if refusal is None else problem("file sizes", reading, refusal.message)


def check_processes(machine: Machine, workers: int, running: Running = NOTHING_RUNS) -> Finding:
    """Free processes against workers with their threads. The running daemon's count as free."""
    need = DAEMON_THREADS + WORKER_THREADS * workers
    room, why = min(
        [(_room_of_user(machine, running), "ulimit -u, LimitNPROC= in the unit"), *_rooms_of_groups(machine, running)]
    )
    if room >= UNLIMITED_ROOM:
        return ok("processes", "unlimited")
    reading = f"{room:,} more, {need} needed for {counted(workers, 'worker')}"
    return ok("processes", reading) if room >= need else problem("processes", reading, f"raise the limit: {why}")


def _room_of_user(machine: Machine, running: Running) -> int:
    """Threads that the limit leaves beside the user's visible ones: the kernel counts threads."""
    limit = machine.limits["processes"]
    if limit in (UNLIMITED, -1) or machine.user == 0:
        return UNLIMITED_ROOM
    processes = (machine.process(pid) for pid in machine.pids() if pid not in running.pids)
    return max(0, limit - sum(one.threads for one in processes if one.user == machine.user))


def _rooms_of_groups(machine: Machine, running: Running) -> Iterator[tuple[int, str]]:
    freed = sum(machine.process(pid).threads for pid in running.pids) if running.shares_groups(machine) else 0
    for group in control_groups("pids", machine.root):
        limit, current = machine.number(group.folder / "pids.max"), machine.number(group.folder / "pids.current")
        if limit is not None and current is not None:
            yield max(0, limit - current + freed), "TasksMax= in the unit, --pids-limit of docker"


def check_kernel(machine: Machine, features: Mapping[str, str]) -> Finding:
    """``features``: name to the reason why it is missing, "" if it works."""
    version = machine.read("/proc/sys/kernel/osrelease") or "unknown"
    missing = [f"{name} ({why})" for name, why in features.items() if why and name in WANTED]
    if missing:
        advice = "use Linux 5.4 or later; in a container, a seccomp profile that allows memfd_create and pidfd_open"
        return problem("kernel", f"{version}, without {', '.join(missing)}", advice)
    return ok("kernel", f"{version}: {', '.join(name for name, why in features.items() if not why)}")


def try_features() -> dict[str, str]:
    """Try each feature: name to the reason why it is missing, "" if it works."""
    tries = {"memfd": _try_memfd, "sealing": _try_sealing, "pidfd": _try_pidfd, "populate": _try_populate}
    reasons = dict.fromkeys(tries, "")
    for name, attempt in tries.items():
        try:
            attempt()
        except OSError as error:
            reasons[name] = error.strerror or str(error)
    return reasons


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


def check_source(machine: Machine) -> Finding:
    """The kernel's clock source: every pull and every chunk reads it."""
    source = machine.read(SOURCE)
    if source in SLOW_SOURCES:
        advice = "`dmesg | grep -i clocksource` shows why the kernel left tsc; in a virtual machine use kvm-clock"
        return warning("clock", f"{source}, which is slow to read", advice)
    return ok("clock", source) if source else note("clock", "unknown source")


def check_date(machine: Machine, now_s: float, installed_s: float) -> Iterator[Finding]:
    """The wall clock, in Unix time. One before the installation breaks certificates of https."""
    date = f"{datetime.fromtimestamp(now_s, UTC):%Y-%m-%d %H:%M} UTC"
    if now_s < installed_s:
        reading = f"{date}, before this batchd was installed"
        yield warning("date", reading, "set the clock: timedatectl set-ntp true")
    elif not (machine.root / TIMESYNC).is_dir():
        yield ok("date", date)
    elif (machine.root / TIMESYNC / "synchronized").exists():
        yield ok("date", f"{date}, synchronised")
    else:
        yield note("date", f"{date}, not synchronised yet", "timedatectl timesync-status shows why")
