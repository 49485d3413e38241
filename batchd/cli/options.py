"""Commands, read from signatures, and the options that several have. Runs in the user's shell.

    @as_command("bad")
    def command(*, stream: RunningStream, address: Address, as_json: JsonObject) -> None:

Each parameter is marked as an ``argument`` or an ``option``. Its type and default say the rest:
``X | None`` may be left out, ``bool`` is a flag, ``tuple`` takes several; a ``Path``, a ``Literal``
and the limits of a number are checked.

Invariant: an option that several commands have is one type, here or beside what it is about.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Literal, NamedTuple, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from batchd.errors import BatchdError
from batchd_wire.position import Position
from batchd_wire.runtime import TcpAddress, parse_address

DEFAULT_CONFIG_FILE = Path("batchd.toml")
UNREAD_FILE = click.Path(path_type=Path, readable=False)
"""A file whose reader says why it cannot be read."""
_POSITION = re.compile(r"\d{1,9}:\d{1,9}")


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
        return (click if group is None else group).command(name, params=made)(callback)

    return decorate


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


def _checked(kind: object, details: Mapping[str, object]) -> object:
    """The type of a value for click."""
    limits = details.get("limits")
    if isinstance(limits, tuple):
        return click.IntRange(*limits) if kind is int else click.FloatRange(*limits)
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    return click.Path(path_type=Path) if kind is Path else kind if kind is bool else str


def stream_unknown(name: str, names: Iterable[str]) -> BatchdError:
    """The error for a STREAM that is none of ``names``."""
    return BatchdError(f"there is no stream {name!r}; there are {', '.join(names)}")


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
    return context.get_parameter_source("config_file") is not ParameterSource.DEFAULT or bool(overrides)


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
