"""Problems of a configuration for people, with their lines, and for programs. In the user's shell.

    batchd.toml:9: streams.photos.pipeline[1].sise: unknown key
      |
    9 |     { op = "resize", sise = [224, 224] },
      |                      ^^^^
      = help: did you mean size?

Invariant: text from the file goes through ``escaped``, so it cannot change the terminal.
"""

import os
import sys
from dataclasses import replace

import click

from batchd.cli import terminal
from batchd.cli.text import escaped, width_of, wrapped
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, Problem, ProblemKind
from batchd_wire.wording import counted

LINE_CHARACTERS_MAX = 66
"""Longest excerpt of a line: 80 columns with its number."""


def show_error(error: BatchdError) -> None:
    """Print an error on standard error."""
    terminal.warn(_problems_text(error, terminal.columns(sys.stderr)) if _has_problems(error) else str(error))


def warn_of_unknown_variables() -> None:
    """Warn of variables that look like batchd's, and that nothing reads."""
    from batchd.config.environment import unknown_variables  # noqa: PLC0415  most errors have no use for pydantic

    for variable, advice in unknown_variables(os.environ).items():
        terminal.warn(f"{escaped(variable)} is none of batchd's variables, so it does nothing; {advice}")


def plain_problems(error: BatchdError, file: str) -> list[dict[str, object]]:
    """The problems for editors and CI: JSON-able, each with the same keys."""
    problems = (
        error.problems
        if isinstance(error, (ConfigInvalid, MemoryTooSmall))
        else [Problem("", ProblemKind.UNUSABLE_SOURCE, str(error))]
    )
    return [
        {
            "path": file,
            "line": problem.line,
            "column": problem.column,
            "key": problem.path,
            "name": problem.kind,
            "problem": problem.what,
            "help": problem.remedy,
            "meaning": problem.meaning,
        }
        for problem in problems
    ]


def _has_problems(error: BatchdError) -> bool:
    return isinstance(error, (ConfigInvalid, MemoryTooSmall))


def _problems_text(error: BatchdError, columns: int) -> str:
    assert isinstance(error, (ConfigInvalid, MemoryTooSmall))
    name = error.file or "the configuration"
    parts = [f"{name} has {counted(len(error.problems), 'problem')}:"]
    more = f"`batchd explain {error.problems[0].kind}` tells more, with examples"
    explained: set[str] = set()
    for problem in error.problems:
        # a key that is wrong in several streams is explained once
        shown = replace(problem, meaning="") if problem.meaning in explained else problem
        explained.add(problem.meaning)
        parts.append("\n".join(_lines(shown, error.file, columns)))
    return "\n\n".join([*parts, more])


def _lines(problem: Problem, file: str, columns: int) -> list[str]:
    """One problem, for a terminal of ``columns``."""
    place = f"{file}:{problem.line}: " if file and problem.line is not None else ""
    key = f"{problem.path}: " if problem.path else ""
    number = str(problem.line) if problem.source else ""
    margin = " " * len(number)
    lines = [f"{click.style(f'{place}{key}', bold=True)}{problem.what} {click.style(f'[{problem.kind}]', dim=True)}"]
    if problem.source:
        room = min(LINE_CHARACTERS_MAX, columns - len(margin) - len(" | "))
        shown, caret = _excerpt(problem.source, problem.column or 1, problem.length, room)
        bar = click.style("|", fg="blue")
        lines += [f"{margin} {bar}", f"{click.style(number, fg='blue')} {bar} {shown}"]
        lines.append(f"{margin} {bar} {click.style(caret, fg='red', bold=True)}")
    for word, color, text in (("help", "green", problem.remedy), ("note", "blue", problem.meaning)):
        if text:
            first = f"{margin} = {click.style(f'{word}:', fg=color)} "
            lines += wrapped(text, columns, first, " " * width_of(first))
    return lines


def _excerpt(source: str, column: int, length: int, line_max: int) -> tuple[str, str]:
    """A line of the file without what is far from ``column``, and carets under the key."""
    before, key, behind = source[: column - 1], source[column - 1 : column - 1 + length], source[column - 1 + length :]
    before, key, behind = (escaped(part.replace("\t", " ")) for part in (before, key, behind))
    room = line_max - len(key)
    if len(before) + len(behind) > room:
        before_max = max(room // 2, room - len(behind))
        before = before if len(before) <= before_max else "..." + before[-max(1, before_max - 3) :]
        behind_max = max(0, room - len(before))
        behind = behind if len(behind) <= behind_max else behind[: max(0, behind_max - 3)] + "..."
    return f"{before}{key}{behind}".rstrip(), " " * len(before) + "^" * max(1, len(key))
