"""Is there enough memory, and of which kind? Runs in the user's shell; pure but for reading the machine's files."""

from collections.abc import Iterator
from math import floor

from batchd.daemon.memory.available import available_bytes, shortage
from batchd.doctor.finding import Finding, note, ok, problem, warning
from batchd.doctor.machine import NOTHING_RUNS, UNLIMITED, Machine, Running
from batchd.samples.sizes import round_bytes

SHMEM_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
NODES = "sys/devices/system/node"
BUSY_SWAP = 0.25
"""Of all swap: so much in use means that memory has been short."""


def check_memory(machine: Machine, need_bytes: int, running: Running = NOTHING_RUNS) -> Finding:
    """Against what the rings of the configuration come to; the tightest control group counts.

    What the slots of a daemon that runs take is there for its next start.
    """
    if not machine.read("/proc/meminfo"):
        return note("memory", "unknown: /proc/meminfo cannot be read")
    free = available_bytes(machine.root / "proc", machine.root / "sys/fs/cgroup")
    limited = free < machine.table("/proc/meminfo").get("MemAvailable", free)
    held = running.memory_bytes if not limited or running.shares_groups(machine) else 0
    have = free + held
    of_these = f" ({round_bytes(held)} of it in the slots of the daemon that runs)" if held else ""
    found = f"{round_bytes(have, floor)} available{of_these}, {round_bytes(need_bytes)} wanted for the rings"
    where = " (a control group's limit)" if limited else ""
    text = shortage(need_bytes, have)
    if text is None:
        return ok("memory", found + where)
    bigger = "raise MemoryMax= in the unit, --memory of docker, or the pod's memory limit" if limited else "add memory"
    return problem("memory", found + where, f"set memory = in [daemon] to less, or {bigger}")


def check_locked_memory(machine: Machine, need_bytes: int) -> Finding:
    """Some drivers count what a device reads by itself. It is the trainer's limit that matters, which is often the same."""
    limit = machine.limits["locked memory"]
    if limit in (UNLIMITED, -1):
        return ok("locked memory", "unlimited")
    found = f"up to {round_bytes(limit, floor)}"
    if limit >= need_bytes:
        return ok("locked memory", found)
    return note(
        "locked memory",
        f"{found}, less than the rings",
        "trainers that have a device read the ring by itself (writable_slots) may need more: ulimit -l unlimited, "
        "LimitMEMLOCK=infinity in their unit, --ulimit memlock=-1 of docker",
    )


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Transparent ones for shared memory, and those that are set aside, which batchd cannot use."""
    choice = machine.chosen(SHMEM_PAGES)
    if choice in {"never", "deny", "advise"}:
        why = ", and batchd does not ask for them" if choice == "advise" else ""
        yield note(
            "huge pages",
            f"{choice} for shared memory{why}, so slots are made of small pages",
            f"copying out of large slots takes a fifth less time with: echo within_size > {SHMEM_PAGES}",
        )
    elif choice in {"always", "force"}:
        yield note("huge pages", f"{choice} for shared memory: each slot takes a multiple of 2 MiB")
    elif choice:
        yield ok("huge pages", f"{choice} for shared memory")
    facts = machine.table("/proc/meminfo")
    reserved = facts.get("HugePages_Total", 0) * facts.get("Hugepagesize", 0)
    if reserved:
        yield note(
            "reserved huge pages",
            f"{round_bytes(reserved)} are set aside, which batchd does not use",
            "if nobody else does either: sysctl vm.nr_hugepages=0",
        )


def check_swap(machine: Machine) -> Finding:
    """Slots are shared memory, which is swapped like any other."""
    facts = machine.table("/proc/meminfo")
    total, free = facts.get("SwapTotal", 0), facts.get("SwapFree", 0)
    if not total:
        return ok("swap", "none")
    found = f"{round_bytes(total - free)} of {round_bytes(total)} in use"
    if total - free > BUSY_SWAP * total:
        advice = "memory has been short; batches that are swapped out come slowly: set memory = in [daemon] to less, or"
        return warning("swap", found, f"{advice} MemorySwapMax=0 in the unit")
    return ok("swap", found)


def check_nodes(machine: Machine) -> Finding:
    """Memory of another node is slower for workers and trainers."""
    count = len(list((machine.root / NODES).glob("node[0-9]*")))
    if count <= 1:
        return ok("NUMA", "one node")
    return note(
        "NUMA",
        f"{count} nodes",
        "one daemon on each node, or on that of the GPUs, saves the way between them: CPUAffinity= and NUMAMask= in the unit, "
        "or numactl --cpunodebind=0 --preferred=0 batchd serve",
    )
