"""``batchd explain``: the manual of one problem of a configuration. Runs in the user's shell."""

import shutil
from typing import Annotated

import click
from click.shell_completion import CompletionItem

from batchd.cli import terminal
from batchd.cli.options import argument, as_command, completions
from batchd.config.manual import MANUAL, Entry
from batchd.errors import ArgumentInvalid, ProblemKind
from batchd.runtime.suggestions import suggestion

COLUMNS_MAX = 100


def _names(_context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return completions(list(ProblemKind), incomplete)


@as_command("explain")
def command(*, name: Annotated[str | None, argument(shell_complete=_names)]) -> None:
    """Explain a problem of a configuration, by the NAME that `batchd check` prints in brackets.

    Without NAME, list all names.
    """
    if name is None:
        terminal.say(*ProblemKind)
        return
    word = name.strip("[]")
    if word not in list(ProblemKind):
        raise ArgumentInvalid(f"there is no problem {name!r}; {suggestion(word, list(ProblemKind))}")
    width = min(COLUMNS_MAX, shutil.get_terminal_size().columns)
    terminal.say(explanation(MANUAL[ProblemKind(word)], width))


def explanation(entry: Entry, width: int) -> str:
    """The text of an entry, wrapped, and its examples."""
    parts = [click.wrap_text(entry.text, width)]
    for title, example in (("Wrong:", entry.wrong), ("Right:", entry.right)):
        if example:
            parts.append("\n".join([title, "", *(f"    {line}" for line in example.splitlines())]))
    return "\n\n".join(parts)
