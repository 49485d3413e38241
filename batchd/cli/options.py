"""Commands, read from signatures, and the options that several have. Runs in the user's shell.

    @as_command("bad")
    def command(*, stream: RunningStream, address: Address, as_json: JsonObject) -> None:

Each parameter is marked as an ``argument`` or an ``option``. Its type and default say the rest:
``X | None`` may be left out, ``bool`` is a flag, ``tuple`` takes several; a ``Path``, a ``Literal``
and the limits of a number are checked. A command with ``--config`` takes the same file as its first
argument, CONFIG.

Invariant: an option that several commands have is one type, here or beside what it is about.
Invariant: ``is_config_file`` alone decides whether a first word is CONFIG, or what the command has
there otherwise, such as STREAM.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter, signature
from math import isnan, nan
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from batchd.cli.text import wrapped
from batchd.errors import REMEDY, BatchdError, ConfigInvalid
from batchd.runtime.suggestions import suggestion
from batchd_wire.position import Position
from batchd_wire.runtime import TcpAddress, parse_address

DEFAULT_CONFIG_FILE = Path("batchd.toml")
SENTENCE_MAX = 200
"""Characters of a command in the list of its group."""
UNREAD_FILE = click.Path(path_type=Path, readable=False)
"""A file whose reader says why it cannot be read."""
_POSITION = re.compile(r"\d{1,9}:\d{1,9}")
CONFIG_OPTION, CONFIG_ARGUMENT = "config_file", "config_argument"
"""The parameters of ``--config`` and of CONFIG. A command's function has the first one alone."""
_WORDS, _IS_LEFT_OUT = "batchd.words", "batchd.config_argument_left_out"
"""Keys of a context: what the user typed, and whether the first word is not CONFIG."""
_USED_FILE_TIMEOUT_S = 1.0
"""For a daemon whose configuration a message names: the message can do without."""


class _Mark(NamedTuple):
    """How users give a parameter. ``text``: the help of an option; None for an argument."""

    text: str | None
    names: tuple[str, ...]
    parse: Callable[..., object] | None
    details: Mapping[str, object]


def argument(*, parse: Callable[..., object] | None = None, **details: object) -> _Mark:
    """Mark a parameter that users give by its place; the rest is as for an ``option``."""
    return _Mark(None, (), parse, details)


def option(text: str, *names: str, parse: Callable[..., object] | None = None, **details: object) -> _Mark:
    """Mark a parameter that users give by a name: ``--max-age`` for ``max_age`` if none is here.

    ``parse`` makes the value of what users write, or raises ``click.BadParameter``; then they write
    the default, too. ``limits`` are those of a number; further ``details`` are click's.
    """
    return _Mark(text, names, parse, details)


class _HelpText(click.HelpFormatter):
    """Help without a broken word."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write names, such as those of options, with their meanings beside or below them."""
        rows = list(rows)
        column = min(max(len(name) for name, _meaning in rows), col_max) + col_spacing
        blank = " " * (self.current_indent + column)
        for name, meaning in rows:
            head = f"{'':>{self.current_indent}}{name:<{column}}"
            has_room = len(name) <= column - col_spacing
            lines = wrapped(meaning, self.width, head if has_room else blank, blank)
            self.write("".join(f"{line}\n" for line in (lines if has_room else [head, *lines])))


class _Context(click.Context):
    formatter_class = _HelpText


class _Command(click.Command):
    context_class = _Context


class CommandGroup(click.Group):
    """Commands of which the one that was probably meant is suggested."""

    context_class = _Context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that ``args`` begin with."""
        names = self.list_commands(ctx)
        if args[0] not in names and not ctx.resilient_parsing:
            what = "option" if args[0].startswith("-") else "command"
            ctx.fail(f"there is no {what} {args[0]!r}; {suggestion(args[0], names)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the whole first sentence of each."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(SENTENCE_MAX)) for name, one in found if one is not None])


def as_command(name: str, group: click.Group | None = None) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function; the help has its parameters in their order."""

    def decorate(function: Callable[..., None]) -> click.Command:
        hints = get_type_hints(function, include_extras=True)
        made = [
            _parameter(mark, given, get_args(hints[given.name])[0])
            for given in signature(function).parameters.values()
            for mark in getattr(hints[given.name], "__metadata__", ())
        ]
        callback = click.pass_context(function) if click.Context in hints.values() else function
        kind = _ConfigCommand if CONFIG_OPTION in hints else _Command
        return (click if group is None else group).command(name, cls=kind, params=made)(callback)

    return decorate


def is_config_file(word: str) -> bool:
    """True for a name that ends in .toml and for a path with a slash; an address is no path."""
    return word.endswith(".toml") or ("/" in word and "://" not in word)


class _ConfigCommand(_Command):
    """A command with ``--config``, whose first argument may be that file instead."""

    def __init__(self, *, params: list[click.Parameter], **details: Any) -> None:
        self.others = [one for one in params if isinstance(one, click.Argument)]
        rule = ": the first argument, if it ends in .toml or is a path with a slash" if self.others else ""
        for given in params:
            if isinstance(given, click.Option) and given.name == CONFIG_OPTION:
                given.help = f"{given.help} CONFIG is the same{rule}."
        file = _ConfigArgument([CONFIG_ARGUMENT], required=False, metavar="[CONFIG]", type=UNREAD_FILE)
        super().__init__(params=[file, *params], **details)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give CONFIG to the function as the file of ``--config``."""
        ctx.meta[_WORDS], ctx.meta[_IS_LEFT_OUT] = list(args), False
        first = self.make_parser(ctx).parse_args(list(args))[0].get(CONFIG_ARGUMENT)
        has_words = isinstance(first, str)
        ctx.meta[_IS_LEFT_OUT] = isinstance(first, str) and bool(self.others) and not is_config_file(first)
        rest = super().parse_args(ctx, args)
        named, given = ctx.params.pop(CONFIG_ARGUMENT), ctx.params.get(CONFIG_OPTION)
        is_given = is_config_given(ctx)
        if named is not None:
            if is_given and given != named and not ctx.resilient_parsing:
                raise click.UsageError(f"two configurations: {named} and --config {given}; name one of them", ctx)
            ctx.params[CONFIG_OPTION] = named
            ctx.set_parameter_source(CONFIG_OPTION, ParameterSource.COMMANDLINE)
        elif has_words or is_given:  # completions go on with the next argument
            ctx.set_parameter_source(CONFIG_ARGUMENT, ParameterSource.COMMANDLINE)
        return rest

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Without batchd.toml, the error names the file of the running daemon."""
        try:
            return super().invoke(ctx)
        except ConfigInvalid as error:
            raise with_running_file(ctx, error) from None


class _ConfigArgument(click.Argument):
    """CONFIG, which is left out if the first word is another argument."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Take the first word, unless it is another argument."""
        if not ctx.meta[_IS_LEFT_OUT]:
            super().add_to_parser(parser, ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer what else may stand there, such as streams, or files."""
        others = ctx.command.others if isinstance(ctx.command, _ConfigCommand) else ()
        found = [item for one in others[:1] for item in one.shell_complete(ctx, incomplete)]
        return found or super().shell_complete(ctx, incomplete)


def running_file() -> tuple[str, str] | None:
    """The address of this host's daemon, and its configuration; None if none has one."""
    from batchd_client.asking import ask_status, asking  # noqa: PLC0415  few commands need it
    from batchd_client.errors import BatchdClientError  # noqa: PLC0415  the same
    from batchd_client.lifeline import SessionLost  # noqa: PLC0415  the same

    try:
        with asking(None, _USED_FILE_TIMEOUT_S) as session:
            address, file = session.address, ask_status(session, _USED_FILE_TIMEOUT_S).daemon.config_file
    except (BatchdClientError, SessionLost):
        return None
    return (address, file) if file else None


def with_running_file(context: click.Context, error: ConfigInvalid) -> ConfigInvalid:
    """The error of a command, with the file of the running daemon if the user named no other."""
    if is_config_given(context):
        return error
    command = context.command_path.split() if context.info_name != "serve" else []
    return naming_running_file(error, command, context.meta[_WORDS])


def naming_running_file(error: ConfigInvalid, before: Sequence[str], after: Sequence[str]) -> ConfigInvalid:
    """The error of a missing batchd.toml, with the file that a running daemon uses.

    ``before`` and ``after``: the words of the command around that file; none to name the file only.
    """
    is_missing = error.file == str(DEFAULT_CONFIG_FILE) and not DEFAULT_CONFIG_FILE.exists()
    running = running_file() if is_missing else None
    if running is None:
        return error
    address, file = running
    hint = f"the daemon at {address} uses {file}" + (f": `{shlex.join([*before, file, *after])}`" if before else "")
    told = [replace(one, message=f"{one.what}{REMEDY}{hint}{REMEDY}{one.remedy}") for one in error.problems]
    return ConfigInvalid(told, error.file)


def _parameter(mark: _Mark, given: Parameter, hint: object) -> click.Parameter:
    """A parameter for click. ``hint``: its type."""
    may_lack = NoneType in get_args(hint)
    kind = get_args(hint)[0] if may_lack else hint
    is_several = get_origin(kind) is tuple
    one = get_args(kind)[0] if is_several else kind
    details: dict[str, object] = {"type": _checked(one, mark.details), **mark.details}
    details.pop("limits", None)
    if given.default is not Parameter.empty:
        details["default"] = given.default
    is_free = may_lack or is_several or one is bool or not details.keys().isdisjoint(("default", "multiple"))
    details["required"] = not is_free
    parse = mark.parse
    if parse is not None:
        details["callback"] = lambda _context, _parameter, text: None if text is None else parse(text)
    if mark.text is None:
        return _make(click.Argument, [given.name], details | {"nargs": -1 if is_several else 1})
    usual: dict[str, object] = {"multiple": is_several, "show_default": details.get("default", "") != ""}
    usual |= {"metavar": "FILE"} if one is Path else {"is_flag": True} if one is bool else {}
    names = mark.names or (f"--{given.name.replace('_', '-')}",)
    return _make(click.Option, [*names, given.name], {"help": mark.text} | usual | details)


def _make(kind: Callable[..., click.Parameter], names: Sequence[str], details: Mapping[str, object]) -> click.Parameter:
    return kind(names, **details)


class _Number(click.ParamType):  # type: ignore[type-arg]
    """A number within limits, whose error says them in words."""

    def __init__(self, within: click.IntRange | click.FloatRange) -> None:
        self.within, self.name = within, within.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number that a text has."""
        number = nan
        with suppress(click.BadParameter):
            number = self.within.convert(value, param, ctx)
        if isnan(number):
            least, most = (None if limit is None else f"{limit:,}" for limit in (self.within.min, self.within.max))
            what = "whole number" if isinstance(self.within, click.IntRange) else "number"
            limits = f"from {least} to {most}" if most is not None else f"of {least} or more"
            self.fail(f"{value!r} is not a {what} {limits}", param, ctx)
        return number


def _checked(kind: object, details: Mapping[str, object]) -> object:
    """The type of a value for click."""
    limits = details.get("limits")
    if isinstance(limits, tuple):
        return _Number(click.IntRange(*limits) if kind is int else click.FloatRange(*limits))
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    return click.Path(path_type=Path) if kind is Path else kind if kind is bool else str


def stream_unknown(name: str, names: Iterable[str]) -> BatchdError:
    """The error for a STREAM that is none of ``names``."""
    return BatchdError(f"there is no stream {name!r}; {suggestion(name, list(names))}")


def parse_position(value: str) -> Position:
    """Parse EPOCH:STEP. Raises ``click.BadParameter``."""
    if not _POSITION.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a position: EPOCH:STEP, as in 3:117, both counted from 0")
    epoch, step = value.split(":")
    return Position(int(epoch), int(step))


def _overrides(settings: tuple[str, ...]) -> dict[str, str]:
    overrides = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not path.strip():
            raise click.BadParameter(f"{setting!r} is not PATH=VALUE, such as streams.photos.batch_size=64")
        overrides[path.strip()] = value.strip()
    return overrides


PositionArgument = Annotated[Position | None, argument(parse=parse_position, metavar="[EPOCH:STEP]")]
ConfigFile = Annotated[
    Path,
    option(
        "The configuration, as `batchd init` writes it and `batchd config` explains it.",
        "-c",
        "--config",
        type=UNREAD_FILE,
        default=DEFAULT_CONFIG_FILE,
    ),
]
Overrides = Annotated[
    dict[str, str],
    option(
        "Set one key, over the file and the environment: --set streams.photos.batch_size=64. Items of lists go by their "
        "numbers, from 0: --set streams.photos.pipeline.1.size=[64,64]. Repeatable.",
        "--set",
        metavar="PATH=VALUE",
        multiple=True,
        parse=_overrides,
    ),
]
CardFile = Annotated[
    Path | None,
    option(
        "The card of the run, from `batchd card`: its configuration is used, unless --config or --running is given.",
        "--card",
    ),
]
Address = Annotated[
    str | None,
    option(
        "The daemon's, such as ipc:///run/batchd. Default: $BATCHD_ADDRESS, then where it usually is.",
        metavar="ADDRESS",
    ),
]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], option("Minimum log level.", default="info")]
LogFormat = Annotated[
    Literal["auto", "text", "json"],
    option(
        "Format of the log. auto is text on a terminal and in the journal (with its levels), JSON otherwise.",
        default="auto",
    ),
]
JsonObject = Annotated[bool, option("Print a JSON object, for programs.", "--json")]
Json = Annotated[bool, option("Print JSON.", "--json")]
DrawnField = Annotated[str | None, option("The field to draw. [default: image, or else the first one with images]")]


def is_config_given(context: click.Context, overrides: Mapping[str, str] | None = None) -> bool:
    """True if the user named the configuration, or changed it with ``--set``."""
    return context.get_parameter_source(CONFIG_OPTION) is not ParameterSource.DEFAULT or bool(overrides)


def worker_address(text: str) -> TcpAddress:
    """Parse an ADDRESS for worker hosts. Raises ``click.BadParameter``."""
    try:
        address = parse_address(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ADDRESS") from None
    if not isinstance(address, TcpAddress):
        raise click.BadParameter("worker hosts need a network address, such as tcp://gpu1:7072", param_hint="ADDRESS")
    return address


def completions(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """The names that a shell offers after Tab, sorted."""
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
