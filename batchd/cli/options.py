"""Options that several commands share. Runs in the user's shell.

Invariant: ``--config`` and ``--set`` mean the same in every command, and reach it as
``config_file`` and ``overrides``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from batchd.errors import BatchdError
from batchd_wire.position import Position
from batchd_wire.runtime import TcpAddress, parse_address

Command = TypeVar("Command", bound=Callable[..., object])

DEFAULT_CONFIG_FILE = Path("batchd.toml")
_POSITION = re.compile(r"\d{1,9}:\d{1,9}")


def stream_unknown(name: str, names: Iterable[str]) -> BatchdError:
    """The error for a STREAM that is none of ``names``."""
    return BatchdError(f"there is no stream {name!r}; there are {', '.join(names)}")


def path_option(
    *names: str,
    help: str,  # noqa: A002  click's word
    metavar: str = "FILE",
    required: bool = False,
    multiple: bool = False,
    envvar: str | None = None,
) -> Callable[[Command], Command]:
    """Make an option that is passed as ``Path | None``, with ``multiple`` as a tuple of paths."""
    path = click.Path(path_type=Path)
    return click.option(
        *names, metavar=metavar, type=path, required=required, multiple=multiple, envvar=envvar, help=help
    )


def parse_position(value: str) -> Position:
    """Parse EPOCH:STEP. Raises ``click.BadParameter``."""
    if not _POSITION.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a position: EPOCH:STEP, as in 3:117, both counted from 0")
    epoch, step = value.split(":")
    return Position(int(epoch), int(step))


def position_callback(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Position | None:
    """Parse an optional EPOCH:STEP, for ``click``."""
    return None if value is None else parse_position(value)


def set_option(command: Command) -> Command:
    """Add ``--set PATH=VALUE``, repeatable, passed as ``overrides: dict[str, str]``."""
    return click.option(
        "--set",
        "overrides",
        metavar="PATH=VALUE",
        multiple=True,
        callback=_split,
        help="Set one key, over the file and the environment: --set streams.photos.batch_size=64. Items of lists go by their "
        "numbers, from 0: --set streams.photos.pipeline.1.size=[64,64]. Repeatable.",
    )(command)


def config_options(command: Command) -> Command:
    """Add ``--config FILE`` and ``--set``, passed as ``config_file: Path`` and ``overrides``."""
    return click.option(
        "-c",
        "--config",
        "config_file",
        metavar="FILE",
        type=click.Path(path_type=Path, readable=False),
        default=DEFAULT_CONFIG_FILE,
        show_default=True,
        help="The configuration, as `batchd init` writes it and `batchd config` explains it.",
    )(set_option(command))


def card_option(command: Command) -> Command:
    """Add ``--card FILE``, passed as ``card_file: Path | None``."""
    return path_option(
        "--card",
        "card_file",
        help="The card of the run, from `batchd card`: its configuration is used, unless --config or --running is given.",
    )(command)


def is_config_given(context: click.Context, overrides: Mapping[str, str]) -> bool:
    """True if the user named the configuration, or changed it with ``--set``."""
    return context.get_parameter_source("config_file") is not ParameterSource.DEFAULT or bool(overrides)


def address_option(command: Command) -> Command:
    """Add ``--address``, passed as ``address: str | None`` for ``running_daemon``."""
    return click.option(
        "--address",
        metavar="ADDRESS",
        help="The daemon's, such as ipc:///run/batchd. Default: $BATCHD_ADDRESS, then where it usually is.",
    )(command)


def log_options(command: Command) -> Command:
    """Add ``--log-level`` and ``--log-format``, passed as ``log_level`` and ``log_format``."""
    with_level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="Minimum log level.",
    )
    with_format = click.option(
        "--log-format",
        type=click.Choice(["auto", "text", "json"]),
        default="auto",
        show_default=True,
        help="Format of the log. auto is text on a terminal and in the journal (with its levels), JSON otherwise.",
    )
    return with_level(with_format(command))


def worker_address(text: str) -> TcpAddress:
    """Parse an ADDRESS for worker hosts. Raises ``click.BadParameter``."""
    try:
        address = parse_address(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ADDRESS") from None
    if not isinstance(address, TcpAddress):
        raise click.BadParameter("worker hosts need a network address, such as tcp://gpu1:7072", param_hint="ADDRESS")
    return address


def _split(_context: click.Context, _option: click.Parameter, settings: tuple[str, ...]) -> dict[str, str]:
    overrides = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals or not path.strip():
            raise click.BadParameter(f"{setting!r} is not PATH=VALUE, such as streams.photos.batch_size=64")
        overrides[path.strip()] = value.strip()
    return overrides


def completions(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """The names that a shell offers after Tab, sorted."""
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
