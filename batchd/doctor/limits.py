"""Open files and processes. Runs in the user's shell; pure but for reading the machine's files."""

from collections.abc import Iterator

from batchd.config.cpus import control_groups
from batchd.daemon.memory.held_descriptors import DescriptorPlan
from batchd.doctor.finding import Finding, note, ok, problem, warning
from batchd.doctor.machine import NOTHING_RUNS, UNLIMITED, Machine, Running
from batchd_wire.wording import counted

DAEMON_THREADS = 16
"""The daemon itself and ZeroMQ's threads, with some room."""
WORKER_THREADS = 4
"""A worker and what libraries start in it."""
USUAL_FILES = 65_536


def check_files(machine: Machine, plan: DescriptorPlan | None, streams: int) -> Finding:
    """Against what the configuration may come to; ``plan`` is None where nobody knows."""
    limit = machine.limits["files"]
    found = f"up to {limit:,}"
    if plan is None:
        return ok("open files", found) if limit >= USUAL_FILES else note("open files", found)
    refusal, shortage = plan.refusal(streams), plan.shortage()
    if refusal is not None:
        return problem("open files", found, refusal.message)
    return warning("open files", found, shortage) if shortage else ok("open files", found)


def check_processes(machine: Machine, workers: int, running: Running = NOTHING_RUNS) -> Finding:
    """Against the workers, with their threads; what a daemon that runs has of these would be free without it."""
    need = DAEMON_THREADS + WORKER_THREADS * workers
    room, why = min(
        [(_room_of_user(machine, running), "ulimit -u, LimitNPROC= in the unit"), *_rooms_of_groups(machine, running)]
    )
    if room >= UNLIMITED_ROOM:
        return ok("processes", "unlimited")
    found = f"{room:,} more, {need} wanted for {counted(workers, 'worker')}"
    return ok("processes", found) if room >= need else problem("processes", found, f"raise the limit: {why}")


UNLIMITED_ROOM = 1 << 40


def _room_of_user(machine: Machine, running: Running) -> int:
    """What the limit leaves beside the user's tasks, as far as they can be seen here: the kernel counts threads."""
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
