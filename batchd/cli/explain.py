"""``batchd explain``: manuals of configuration problems and of log events. In the user's shell."""

import re
import shutil
from typing import Annotated

import click
from click.shell_completion import CompletionItem

from batchd.cli import terminal
from batchd.cli.log_events import EVENTS, LogEvent
from batchd.cli.options import argument, as_command, completions
from batchd.config.manual import MANUAL, Entry
from batchd.errors import ArgumentInvalid, ProblemKind
from batchd.runtime.suggestions import suggestion

COLUMNS_MAX = 100


_EVENTS = {name: event for events in EVENTS.values() for name, event in events.items()}
_NAMES = [*ProblemKind, *_EVENTS]


def _names(_context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return completions(_NAMES, incomplete)


@as_command("explain")
def command(*, name: Annotated[str | None, argument(shell_complete=_names)]) -> None:
    """Explain a problem of a configuration, or an event of the log, by its NAME.

    That of a problem is what `batchd check` prints in brackets, that of an event the text of its
    line: `batchd explain 'worker ended'`. Without NAME, list all names.
    """
    if name is None:
        terminal.say(*_NAMES)
        return
    word = name.strip("[]")
    if word not in _NAMES:
        raise ArgumentInvalid(f"there is no problem or event {name!r}; {suggestion(word, _NAMES)}")
    width = min(COLUMNS_MAX, shutil.get_terminal_size().columns)
    event = _EVENTS.get(word)
    terminal.say(explanation(MANUAL[ProblemKind(word)], width) if event is None else _event_explained(event, width))


def _event_explained(event: LogEvent, width: int) -> str:
    """The cells of an event in docs/logs.md, without links."""
    parts = [f"{event.level}: {event.meaning}", *([f"What to do: {event.remedy}"] if event.remedy else [])]
    return "\n\n".join(click.wrap_text(re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", part), width) for part in parts)


def explanation(entry: Entry, width: int) -> str:
    """The text of an entry, wrapped, and its examples."""
    parts = [click.wrap_text(entry.text, width)]
    for title, example in (("Wrong:", entry.wrong), ("Right:", entry.right)):
        if example:
            parts.append("\n".join([title, "", *(f"    {line}" for line in example.splitlines())]))
    return "\n\n".join(parts)
