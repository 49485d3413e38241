"""Writes docs/commands.md to standard output, from the command line itself: ``make docs``.

Every command is found in ``batchd.cli.main.COMMANDS``, and every argument, option and default in
click's own objects, with the words that ``--help`` prints. Invariant: what is on the page can be
typed, and what can be typed is on the page.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from batchd.cli.config import wrap_prose
from batchd.cli.main import COMMANDS, cli
from batchd.errors import EXIT_CODE_MEANINGS

HEAD = """# Commands

*Made by `make docs` from the command line itself; do not edit.*

All commands of `batchd`. `batchd COMMAND --help` prints the same.

| command | what it does |
|---|---|"""
TAIL = """
What each key of the environment overrides is in [configuration.md](configuration.md); `BATCHD_ADDRESS` says where the daemon
is, such as `ipc:///run/batchd`. [install.md](install.md#completion) describes completion for shells.
"""
_PARAGRAPH = re.compile(r"\n\s*\n")


def commands_markdown() -> str:
    """The page ``docs/commands.md``."""
    lines = [HEAD]
    lines += (f"| [`batchd {name}`](#batchd-{name}) | {_cell(meaning)} |" for name, meaning in COMMANDS.items())
    lines += ["", "## Exit codes\n", "| code | meaning |", "|---|---|"]
    lines += (f"| {int(code)} | {meaning} |" for code, meaning in EXIT_CODE_MEANINGS.items())
    lines += ["", "Which errors end with which, and what helps: [errors.md](errors.md#exit-codes).", TAIL]
    for name, command in _commands(cli, click.Context(cli, info_name="batchd", **cli.context_settings)):
        lines += _section(name, command)
    return wrap_prose("\n".join(lines).rstrip() + "\n")


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Context, click.Command]]:
    """Each command below a group with its context; a group is before its commands."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{name} is listed and is not there"
        below = click.Context(command, info_name=name, parent=context)
        yield below, command
        if isinstance(command, click.Group):
            yield from _commands(command, below)


def _section(context: click.Context, command: click.Command) -> Iterator[str]:
    depth = context.command_path.count(" ") + 1
    yield f"{'#' * depth} `{context.command_path}`\n"
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```\n"
    for paragraph in _PARAGRAPH.split(inspect.cleandoc(command.help or "")):
        yield " ".join(paragraph.split()) + "\n"
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    if options:
        yield from ["| option | default | meaning |", "|---|---|---|"]
        yield from (_row(option, context) for option in options)
        yield ""


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    taken = "" if option.is_flag else f" {_taken(option, context)}"
    return f"| {names}{taken} | {_default(option)} | {_cell(option.help or '')} |"


def _taken(option: click.Option, context: click.Context) -> str:
    """What has to stand behind the option."""
    if isinstance(option.type, click.Choice):
        return "*" + " or ".join(str(choice) for choice in option.type.choices) + "*"
    if isinstance(option.type, (click.IntRange, click.FloatRange)):
        kind = "whole number" if isinstance(option.type, click.IntRange) else "number"
        limits = f"to {option.type.max:,}" if option.type.max is not None else "or more"
        return f"*{kind}, {option.type.min:,} {limits}*"
    return f"*{option.make_metavar(context)}*"


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    default = option.default
    has_none = default is None or option.is_flag or option.multiple or not isinstance(default, (str, int, float, Path))
    return "" if has_none else f"`{default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    sys.stdout.write(commands_markdown())
