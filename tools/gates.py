"""Runs every make target that needs root, packages or an environment of its own: `make gates`.

    python tools/gates.py [--only name,name]

First it lists what each gate needs and what of that is missing here. Then it runs the gates one
after the other, and goes on after a failure. Each has its log in ``build/gates/NAME.log`` and, once
it has ended, its row in the table of CONTRIBUTING.md: date, revision, counts, and what was skipped
and why. The exit status is 1 if a gate failed or could not run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "gates"
TABLE = ROOT / "CONTRIBUTING.md"
HEAD = "| gate | date | revision | minutes | result |\n|---|---|---|---|---|\n"
COUNTS = re.compile(r"^(?:=+ )?(?P<counts>(?:\d+ [a-z]+(?:, )?)+) in [\d.]+s\b", re.MULTILINE)
"""The last line of pytest."""
SKIPPED = re.compile(r"^SKIPPED \[(?P<count>\d+)\] (?P<place>\S+): (?P<reason>.*)$", re.MULTILINE)
SHOWN_REASONS_MAX = 4
SHOWN_CHARACTERS_MAX = 160


class Gate(NamedTuple):
    """A make target.

    ``programs`` are Debian's packages by a program of each; ``files`` those by a file, from the
    root or below the compiler's folders of this machine; ``minutes_max`` ends it.
    """

    name: str
    minutes_max: int
    root: bool = False
    programs: dict[str, str] = {}  # noqa: RUF012  never changed
    files: dict[str, str] = {}  # noqa: RUF012

    def missing(self) -> list[str]:
        """Return what this machine lacks."""
        packages = [package for program, package in self.programs.items() if not shutil.which(program)]
        packages += [package for pattern, package in self.files.items() if not any(Path("/").glob(pattern))]
        lacks = [f"apt-get install {' '.join(packages)}"] if packages else []
        return [*(["root"] if self.root and os.geteuid() else []), *lacks]

    def needs(self) -> str:
        """Describe what it needs, for people."""
        return ", ".join([*(["root"] if self.root else []), *self.programs.values(), *self.files.values()]) or "-"


JPEG = {"usr/include/jpeglib.h": "libjpeg62-turbo-dev"}
DEBIAN = {"debootstrap": "debootstrap"}
GATES = (
    Gate("check", 10),
    Gate("site", 10),
    Gate("smoke", 10),
    Gate("dist", 20),
    Gate("fuzz-jpeg", 10, programs={"gcc": "gcc"}, files=JPEG),
    Gate("fuzz-pixels", 10, programs={"gcc": "gcc"}),
    Gate("chaos", 10),
    Gate("classics", 30),
    Gate("test-ends", 60),
    Gate("test-torch", 60),
    Gate("test-page", 20, programs={"chromium": "chromium"}),
    Gate("test-systemd", 30, root=True, programs={"systemd-nspawn": "systemd-container", **DEBIAN}),
    Gate(
        "test-packages",
        60,
        root=True,
        programs={
            **DEBIAN,
            "dpkg-deb": "dpkg-dev",
            "strip": "binutils",
            "shellcheck": "shellcheck",
            "mandoc": "mandoc",
            "lintian": "lintian",
            "munged": "munge",
            "slurmctld": "slurmctld",
            "slurmd": "slurmd",
            "sbatch": "slurm-client",
        },
    ),
    Gate("test-image", 60, root=True, programs={"podman": "podman", "runc": "runc", **DEBIAN}),
    Gate("test-wheels", 60),
    Gate("test-ray", 30, root=True, programs={"ip": "iproute2"}),
    Gate("demo-cluster", 15),
    Gate(
        "test-moving",
        60,
        programs={"g++": "g++", "pkg-config": "pkg-config"},
        files={
            "usr/include/opencv4/opencv2/core.hpp": "libopencv-dev",
            "usr/include/turbojpeg.h": "libturbojpeg0-dev",
        },
    ),
    Gate("test-frameworks", 90),
    Gate("test-slow", 120),
    Gate("exhaust", 120, programs={"strace": "strace"}),
    Gate("pictures", 20, programs={"chromium": "chromium", "unshare": "util-linux"}),
)
"""In the order in which they run: those that end soon before the others."""


def main() -> int:
    """Run the gates that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of gates, with commas between them")
    names = [name for name in parser.parse_args().only.split(",") if name]
    unknown = set(names) - {gate.name for gate in GATES}
    if unknown:
        parser.error(f"no gate is named {', '.join(sorted(unknown))}; there are {', '.join(g.name for g in GATES)}")
    gates = [gate for gate in GATES if not names or gate.name in names]
    for gate in gates:
        lacks = ", ".join(gate.missing())
        print(f"{gate.name:16} needs {gate.needs()}" + (f"; MISSING HERE: {lacks}" if lacks else ""))
    failed = [gate.name for gate in gates if not _run(gate, _revision())]
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(gates)} passed", flush=True)
    return bool(failed)


def _revision() -> str:
    """Return the revision, marked if files are changed; the table of former gates is no change."""
    git = ["git", "-C", str(ROOT)]
    changed = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", f":(exclude,top){TABLE.name}"]
    revision, changes = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for command in ([*git, "rev-parse", "--short=8", "HEAD"], changed)
    )
    return f"{revision}-dirty" if changes else revision


def _run(gate: Gate, revision: str) -> bool:
    """Run a gate, and write its row. Return whether it passed with nothing missing."""
    started = time.monotonic()
    print(f"{gate.name:16} …", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{gate.name}.log"
    lacks = gate.missing()
    status: int | None = None
    if not lacks:
        with log.open("wb") as file:
            status = _make(gate, file)
    said = f"not run: needs {', '.join(lacks)}" if lacks else result(status, log.read_text(errors="replace"))
    minutes = (time.monotonic() - started) / 60
    write_row(gate.name, f"{datetime.now(UTC):%Y-%m-%d} | {revision} | {minutes:.0f} | {said}")
    print(f"{gate.name:16} {minutes:.0f} min: {said}", flush=True)
    return status == 0


def _make(gate: Gate, log: BinaryIO) -> int | None:
    """Return the exit status of make, or None if it took too long."""
    environment = {**os.environ, "PYTEST_ADDOPTS": "-rs"}
    process = subprocess.Popen(
        ["make", "-C", str(ROOT), gate.name],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(gate.minutes_max * 60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        return None


def result(status: int | None, log: str) -> str:
    """Say in a line how a gate ended, from its exit status and what pytest printed."""
    counts: Counter[str] = Counter()
    for found in COUNTS.finditer(log):
        for part in found["counts"].split(", "):
            count, word = part.split()
            counts[word] += int(count)
    ended = {0: "passed", None: "ended by its time limit"}.get(status, f"FAILED with {status}")
    tests = ", ".join(f"{count} {word}" for word, count in counts.items() if word != "warnings")
    skipped = Counter[str]()
    for found in SKIPPED.finditer(log):
        skipped[found["reason"].replace("|", "/")[:SHOWN_CHARACTERS_MAX]] += int(found["count"])
    reasons = [f"{count} skipped: {reason}" for reason, count in skipped.most_common(SHOWN_REASONS_MAX)]
    if len(skipped) > SHOWN_REASONS_MAX:
        reasons.append(f"{sum(skipped.values())} skipped in all")
    return "; ".join(filter(None, [f"{ended} ({tests})" if tests else ended, *reasons]))


def write_row(name: str, cells: str) -> None:
    """Put the row of a gate into the table, in the order of ``GATES``."""
    before, head, rest = TABLE.read_text().partition(HEAD)
    old = list(takewhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    rows = {row.split("|")[1].strip(): row for row in old} | {name: f"| {name} | {cells} |\n"}
    kept = "".join(rows[gate.name] for gate in GATES if gate.name in rows)
    TABLE.write_text(before + head + kept + rest.removeprefix("".join(old)))


if __name__ == "__main__":
    sys.exit(main())
