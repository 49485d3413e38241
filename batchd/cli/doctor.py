"""``batchd doctor``: check the machine and name fixes. Runs in the user's shell, without a daemon.

Invariant: each finding is one line, with its remedy below it, and is printed at once.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, ConfigFile, JsonObject, Overrides, as_command, is_config_given, running_file
from batchd.cli.text import escaped, wrapped
from batchd.commands.doctor.examine import DoctorTarget, check_daemon, examine
from batchd.commands.doctor.machine import Finding, Level, Machine, Running
from batchd.config.load import load_config
from batchd.errors import BatchdError, ConfigInvalid, ExitCode
from batchd.observe.columns import MIDDLE
from batchd.runtime import __version__
from batchd_client.asking import ask_status
from batchd_wire.wording import counted

ANSWER_TIMEOUT_S = 5.0
STYLES: dict[Level, dict[str, Any]] = {
    Level.OK: {"fg": "green"},
    Level.NOTE: {"fg": "cyan"},
    Level.WARNING: {"fg": "yellow", "bold": True},
    Level.PROBLEM: {"fg": "red", "bold": True},
}
LEVEL_WIDTH = max(map(len, Level))
SUBJECT_WIDTH = 20


@as_command("doctor")
def command(
    context: click.Context, *, config_file: ConfigFile, overrides: Overrides, address: Address, as_json: JsonObject
) -> None:
    """Check this machine: memory, processors, decoders, limits, kernel, clocks, storage, daemon.

    Prints each finding, and below it what helps. With a configuration, also checks its memory,
    workers, descriptors and sources, and reads a few files of each source for a second or two.
    Changes nothing. Exit code 1 if there is a problem, 0 with or without warnings.
    """
    counts = dict.fromkeys(Level, 0)
    shown = []
    for finding in _findings(_target(config_file, overrides, is_given=is_config_given(context)), address):
        counts[finding.level] += 1
        shown.append(asdict(finding))
        if not as_json:
            _show(finding)
    if as_json:
        terminal.emit_json({"version": __version__, "findings": shown, "counts": counts})
    else:
        terminal.say("", _summary(counts))
    if counts[Level.PROBLEM]:
        sys.exit(ExitCode.FAILED)


def _findings(target: DoctorTarget, address: str | None) -> Iterator[Finding]:
    """Ask a running daemon first: the memory that it uses is not missing."""
    try:
        with running_daemon(address) as session:
            status = ask_status(session, ANSWER_TIMEOUT_S)
    except BatchdError as error:
        yield from examine(target)
        yield check_daemon(None, str(error), __version__)
        return
    pids = {status.daemon.pid, *(worker.pid for worker in status.workers if worker.pid is not None)}
    yield from examine(replace(target, running=Running(status.daemon.memory_bytes, frozenset(pids))))
    yield check_daemon(status.daemon, "", __version__)


def _target(file: Path, overrides: dict[str, str], *, is_given: bool) -> DoctorTarget:
    """The default configuration may be missing; any existing one must be valid."""
    machine = Machine()
    if not is_given and not file.exists():
        running = running_file()
        used = (
            "" if running is None else f"; the daemon at {running[0]} uses {running[1]}: `batchd doctor {running[1]}`"
        )
        return DoctorTarget(machine, file, None, f"there is no {file} here, so only the machine is looked at{used}")
    try:
        return DoctorTarget(machine, file, load_config(file, overrides))
    except ConfigInvalid as error:
        why = f"{file} has {counted(len(error.problems), 'problem')}"
        return DoctorTarget(machine, file, None, why, is_broken=True)


def _show(finding: Finding) -> None:
    """The subject, what was found, and below it what helps."""
    width = terminal.columns()
    level = click.style(f"{finding.level:<{LEVEL_WIDTH}}", **STYLES[finding.level])
    subject = click.style(f"{finding.subject:<{SUBJECT_WIDTH}}", bold=True)
    blank = " " * (LEVEL_WIDTH + 2)
    below = blank + (" " * (SUBJECT_WIDTH + 2) if width >= MIDDLE else "")
    terminal.say(*wrapped(escaped(finding.found), width, f"{level}  {subject}  ", below))
    if finding.advice:
        lines = wrapped(f"-> {escaped(finding.advice)}", width, blank, f"{blank}   ")
        terminal.say(*(click.style(line, dim=True) if finding.level is Level.NOTE else line for line in lines))


def _summary(counts: dict[Level, int]) -> str:
    if not counts[Level.PROBLEM] and not counts[Level.WARNING]:
        return "This machine is fit for batchd."
    problems, warnings = counted(counts[Level.PROBLEM], "problem"), counted(counts[Level.WARNING], "warning")
    return f"{problems}, {warnings}: each with what helps below it."
