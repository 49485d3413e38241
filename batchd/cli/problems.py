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
import textwrap
from collections.abc import Sequence
from dataclasses import replace

import click

from batchd.cli.text import escaped
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, Problem, ProblemKind
from batchd_wire.wording import counted

LINE_CHARACTERS_MAX = 66
"""Longest excerpt of a line: 80 columns with its number."""
NARROWEST = 40


def echo_error(error: BatchdError) -> None:
    """Write an error to standard error: in colours on a terminal, unless NO_COLOR is set."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    color = False if not is_terminal or os.environ.get("NO_COLOR") else None
    text = _problems_text(error, _columns() if is_terminal else None) if _has_problems(error) else str(error)
    click.echo(f"{click.style('batchd:', fg='red', bold=True)} {text}", err=True, color=color)


def echo_unknown_variables() -> None:
    """Warn on standard error of variables that look like batchd's, and that nothing reads."""
    from batchd.config.environment import unknown_variables  # noqa: PLC0415  most errors have no use for pydantic

    for variable, advice in unknown_variables(os.environ).items():
        click.echo(f"batchd: {escaped(variable)} is none of batchd's variables, so it does nothing; {advice}", err=True)


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


def _problems_text(error: BatchdError, columns: int | None) -> str:
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


def _lines(problem: Problem, file: str, columns: int | None) -> list[str]:
    """One problem; ``columns``: width of the terminal, None for lines of any length."""
    place = f"{file}:{problem.line}: " if file and problem.line is not None else ""
    key = f"{problem.path}: " if problem.path else ""
    number = str(problem.line) if problem.source else ""
    margin = " " * len(number)
    lines = [f"{click.style(f'{place}{key}', bold=True)}{problem.what} {click.style(f'[{problem.kind}]', dim=True)}"]
    if problem.source:
        shown, caret = _excerpt(problem.source, problem.column or 1, problem.length)
        bar = click.style("|", fg="blue")
        lines += [f"{margin} {bar}", f"{click.style(number, fg='blue')} {bar} {shown}"]
        lines.append(f"{margin} {bar} {click.style(caret, fg='red', bold=True)}")
    for word, color, text in (("help", "green", problem.remedy), ("note", "blue", problem.meaning)):
        if text:
            lines += _wrapped(f"{margin} = ", click.style(f"{word}:", fg=color), len(word) + 1, text, columns)
    return lines


def _excerpt(source: str, column: int, length: int) -> tuple[str, str]:
    """A line of the file without what is far from ``column``, and carets under the key."""
    before, key, behind = source[: column - 1], source[column - 1 : column - 1 + length], source[column - 1 + length :]
    before, key, behind = (escaped(part.replace("\t", " ")) for part in (before, key, behind))
    room = LINE_CHARACTERS_MAX - len(key)
    if len(before) + len(behind) > room:
        before_max = max(room // 2, room - len(behind))
        before = before if len(before) <= before_max else "..." + before[-max(1, before_max - 3) :]
        behind_max = max(0, room - len(before))
        behind = behind if len(behind) <= behind_max else behind[: max(0, behind_max - 3)] + "..."
    return f"{before}{key}{behind}".rstrip(), " " * len(before) + "^" * max(1, len(key))


def _wrapped(margin: str, label: str, label_length: int, text: str, columns: int | None) -> Sequence[str]:
    indent = " " * (len(margin) + label_length + 1)
    if columns is None:
        return [f"{margin}{label} {text}"]
    width = max(NARROWEST, columns - len(indent))
    first, *others = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{margin}{label} {first}", *(indent + other for other in others)]


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80
