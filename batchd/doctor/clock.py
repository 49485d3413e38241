"""The clocks: the monotonic one measures, the wall clock dates the log and the files. Runs in the user's shell; pure."""

from collections.abc import Iterator
from datetime import UTC, datetime

from batchd.doctor.finding import Finding, note, ok, warning
from batchd.doctor.machine import Machine

SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SLOW_SOURCES = {"hpet", "acpi_pm", "jiffies", "refined-jiffies"}
"""Each look at these is a call of the kernel, or worse."""
TIMESYNC = "run/systemd/timesync"


def check_source(machine: Machine) -> Finding:
    """Every pull and every chunk looks at the clock."""
    source = machine.read(SOURCE)
    if source in SLOW_SOURCES:
        advice = "see `dmesg | grep -i clocksource` for why the kernel left tsc; in a virtual machine use kvm-clock"
        return warning("clock", f"{source}, which is slow to read", advice)
    return ok("clock", source) if source else note("clock", "of a source that the kernel does not name")


def check_date(machine: Machine, now_s: float, installed_s: float) -> Iterator[Finding]:
    """A date before this batchd was there is wrong, and certificates of s3 and https count as not yet valid."""
    date = datetime.fromtimestamp(now_s, UTC)
    if now_s < installed_s:
        found = f"{date:%Y-%m-%d %H:%M} UTC, before this batchd was installed"
        yield warning("date", found, "set the clock: timedatectl set-ntp true")
    elif not (machine.root / TIMESYNC).is_dir():
        yield ok("date", f"{date:%Y-%m-%d %H:%M} UTC")
    elif (machine.root / TIMESYNC / "synchronized").exists():
        yield ok("date", f"{date:%Y-%m-%d %H:%M} UTC, synchronised")
    else:
        yield note("date", f"{date:%Y-%m-%d %H:%M} UTC, not synchronised yet", "timedatectl timesync-status says why")
