"""Writes manual pages into a folder, from the command line itself: ``make install`` runs it.

    batchd.1, and a page for each command: batchd-serve.1, batchd-keys-new.1, ...

The words are those that ``--help`` prints. Invariant: nothing but click's own objects is read, so
a page says what can be typed, and the same tree makes the same bytes.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from batchd import __version__
from batchd.cli.main import COMMANDS, ENVIRONMENT, cli
from batchd.errors import EXIT_CODE_MEANINGS

_PARAGRAPH = re.compile(r"\n\s*\n")
DESCRIPTION = "decodes training batches once, into shared memory, for every trainer on the machine"
ELSEWHERE = "batchd config prints all keys of the configuration. The guides are in share/doc/batchd."


def manual_pages() -> Iterator[tuple[str, str]]:
    """Each page: its file name and its text in roff."""
    context = click.Context(cli, info_name="batchd", **cli.context_settings)
    yield "batchd.1", _page(context, cli, DESCRIPTION, _overview())
    yield from _below(cli, context)


def _below(group: click.Group, context: click.Context) -> Iterator[tuple[str, str]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{name} is listed and is not there"
        inner = click.Context(command, info_name=name, parent=context)
        summary = COMMANDS.get(name) if group is cli else None
        yield f"{_name(inner)}.1", _page(inner, command, summary or command.get_short_help_str(200), ())
        if isinstance(command, click.Group):
            yield from _below(command, inner)


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _page(context: click.Context, command: click.Command, summary: str, more: Iterator[str] | tuple[()]) -> str:
    name = _name(context)
    summary = summary.rstrip(".")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f'.TH {_quoted(name.upper())} 1 "" "batchd {__version__}" "batchd"']
    lines += [".SH NAME", f"{_text(name)} \\- {_text(summary[:1].lower() + summary[1:])}"]
    lines += [".SH SYNOPSIS", f".B {_text(context.command_path)}", _text(usage), ".SH DESCRIPTION"]
    paragraphs = _PARAGRAPH.split(inspect.cleandoc(command.help or ""))
    lines.append("\n.PP\n".join(_text(" ".join(paragraph.split())) for paragraph in paragraphs))
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    records = [record for option in options if (record := option.get_help_record(context))]
    if records:
        lines.append(".SH OPTIONS")
        for names, meaning in records:
            lines += [".TP", f".B {_text(names)}", _text(" ".join(meaning.split()))]
    lines += more
    others = [] if command is cli else [".BR batchd (1)", ".PP"]
    return "\n".join([*lines, ".SH SEE ALSO", *others, ELSEWHERE, ""])


def _overview() -> Iterator[str]:
    yield ".SH COMMANDS"
    for name, meaning in COMMANDS.items():
        yield from (".TP", f".BR batchd-{_text(name)} (1)", _text(meaning))
    yield ".SH ENVIRONMENT"
    for name, meaning in ENVIRONMENT.items():
        yield from (".TP", f".B {_text(name)}", _text(meaning))
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_CODE_MEANINGS.items():
        yield from (".TP", f".B {int(code)}", _text(meaning))


def _text(text: str) -> str:
    """Text as roff takes it: nothing in it is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    text = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in text)
    return f"\\&{text}" if text[:1] in (".", "'") else text


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'


def main(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in manual_pages():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
