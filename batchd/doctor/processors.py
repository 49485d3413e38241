"""How many processors there are, of which kind, and how much of them this process may use. Runs in the user's shell; pure."""

from collections.abc import Iterator

from batchd.config.cpus import control_groups, cpu_quotas
from batchd.doctor.finding import Finding, note, ok, warning
from batchd.doctor.machine import Machine
from batchd_wire.wording import counted

FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq"
THROTTLED = 0.05
"""Of a group's periods: more than that, and workers stand still for a part of their time."""
SELF_REGULATING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" goes as fast as is wanted."""


def check_count(machine: Machine, workers: int) -> Iterator[Finding]:
    """Workers against the processors that they may use."""
    there = sum(line.startswith("processor") for line in machine.read("/proc/cpuinfo").splitlines())
    quota = min(cpu_quotas(machine.root), default=None)
    found = (
        f"{machine.affinity} of {there} may be used" if there > machine.affinity else counted(machine.affinity, "CPU")
    )
    usable = float(machine.affinity)
    if quota is not None and quota < usable:
        usable, found = quota, f"{found}, {quota:g} by the control group's quota"
    found = f"{found}; {counted(workers, 'worker')}"
    if workers > usable + 1:
        advice = "more workers than CPUs help only where they wait for files (`batchd why` says storage-bound)"
        yield note("processors", found, f'{advice}; else set workers = "auto" in [daemon]')
    else:
        yield ok("processors", found)
    yield from _check_throttling(machine)


def _check_throttling(machine: Machine) -> Iterator[Finding]:
    for group in control_groups("cpu", machine.root):
        facts = machine.table(group.folder / "cpu.stat")
        periods, throttled = facts.get("nr_periods", 0), facts.get("nr_throttled", 0)
        if periods and throttled > THROTTLED * periods:
            yield warning(
                "CPU quota",
                f"this control group was stopped in {throttled / periods:.0%} of its periods until now",
                "raise CPUQuota= in the unit, --cpus of docker, or the pod's CPU limit; or set workers = to the quota",
            )
            return


def check_flags(machine: Machine) -> Finding:
    """What the decoders' fast ways need."""
    lines = (line.partition(":") for line in machine.read("/proc/cpuinfo").splitlines())
    flags = next((set(value.split()) for name, _, value in lines if name.strip() in {"flags", "Features"}), set())
    if flags & {"asimd", "neon"}:
        return ok("instructions", "NEON")
    if "avx2" in flags:
        return ok("instructions", "AVX2")
    if not flags:
        return note("instructions", "unknown: /proc/cpuinfo names none")
    best = "SSE4.2" if "sse4_2" in flags else "SSE2"
    advice = "in a virtual machine give it the host's CPU model (-cpu host); an older machine decodes so much slower"
    return warning("instructions", f"{best}, without AVX2", advice)


def check_governor(machine: Machine) -> Finding:
    """A governor that keeps the clock low costs as much as it saves."""
    governor, driver = machine.read(f"{FREQUENCY}/scaling_governor"), machine.read(f"{FREQUENCY}/scaling_driver")
    if not governor:
        return ok("frequency", "not this machine's to choose")
    if governor == "powersave" and driver not in SELF_REGULATING:
        return warning("frequency", "powersave: the lowest clock", "cpupower frequency-set -g performance")
    return ok("frequency", f"{governor} ({driver})" if driver else governor)
