"""``batchd keys``: keys for access over TCP. Runs in the user's shell, as the daemon's user.

A running daemon reads the directory at each connection, so only a service with copies of the keys
needs a restart (``runtime.keys``).

Invariant: a secret is written only to the requested file, or to standard output; never to a log or
an argument.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import click

from batchd.cli import terminal
from batchd.cli.options import DEFAULT_CONFIG_FILE, CommandGroup, argument, as_command, option
from batchd.config.environment import DAEMON_VARIABLES
from batchd.config.load import load_config
from batchd.data.storage.paths import why_unwritable
from batchd.errors import ArgumentInvalid, BatchdError
from batchd.runtime.directories import SYSTEM_KEYS_DIRECTORY
from batchd.runtime.keys import FILE_MODE, RESTART, KeyDirectory, open_keys
from batchd_wire.keys import KEY_VARIABLE, ConnectionKey, Role, connection_file_text
from batchd_wire.runtime import ADDRESS_VARIABLE

KEYS_DIR_VARIABLE = DAEMON_VARIABLES["keys_dir"]
ROLE_WIDTH = max(map(len, Role))


KeysDirectory = Annotated[
    Path | None,
    option(
        f"The directory of the keys. Default: ${KEYS_DIR_VARIABLE}, the configuration's, then the user's own.",
        "--keys-dir",
        metavar="DIR",
    ),
]
KeysConfig = Annotated[
    Path | None,
    option(
        "The daemon's configuration, which says where its keys are. Default: batchd.toml, if it exists.",
        "-c",
        "--config",
    ),
]


@click.group("keys", cls=CommandGroup)
def command() -> None:
    """Make, list and revoke the keys of trainers and worker hosts on other machines.

    Each of them (or a group of them) has a connection file with its secret; the daemon keeps the
    public part. A trainer's key is accepted at the address tcp of [daemon], the key of a worker
    host at worker_address, and neither at the other one. Changes take effect at once, also in a
    running daemon; in a systemd service that has its keys as credentials, at its restart.
    """


@as_command("new", command)
def _new(
    *,
    name: Annotated[str, option("Who the key is for: letters, digits, dots, dashes and underscores.")],
    role: Annotated[
        str,
        option(
            "The key's holder: a trainer, which reads batches, or a worker host, which fills them.",
            type=click.Choice([role.value for role in Role]),
        ),
    ] = Role.TRAINER.value,
    streams: Annotated[
        tuple[str, ...], option("Limit the key to this stream. Repeatable.", "--stream", metavar="NAME")
    ],
    output: Annotated[Path | None, option("Write the connection file there, mode 0600.", "-o", "--output")],
    keys_dir: KeysDirectory,
    config_file: KeysConfig,
) -> None:
    """Make a key, and print the connection file for its holder (or write it with -o).

    The secret is stored nowhere else: if it is lost, make another key.
    """
    keys = named_keys(keys_dir, config_file)
    with nullcontext(terminal.emit) if output is None else _new_file(output) as write:
        key = keys.new(name, frozenset(streams) or None, Role(role))
        try:
            write(connection_file_text(key))
        except OSError as error:
            keys.revoke(name)
            text = (
                f"standard output cannot be written: {error.strerror}"
                if output is None
                else why_unwritable(output, error)
            )
            raise BatchdError(f"{text}; no key was made") from None
    _explain(key, output, keys)


@as_command("list", command)
def _list(
    *,
    as_json: Annotated[bool, option("Print a JSON list, for programs.", "--json")],
    keys_dir: KeysDirectory,
    config_file: KeysConfig,
) -> None:
    """List the accepted keys, with their roles, public parts and streams."""
    keys = named_keys(keys_dir, config_file)
    accepted = sorted((key for one in keys.roles for key in one.accepted()), key=attrgetter("name"))
    for reason in (reason for one in keys.roles for reason in one.damaged().values()):
        terminal.warn(f"this key is invalid: {reason}")
    if as_json:
        plain = [{**asdict(key), "streams": None if key.streams is None else sorted(key.streams)} for key in accepted]
        terminal.emit_json(plain)
        return
    if not accepted:
        terminal.say(f"no keys in {keys.path}; `{Role.TRAINER.command}` makes one")
        return
    width = max(len(key.name) for key in accepted)
    for key in accepted:
        streams = "every stream" if key.streams is None else ", ".join(sorted(key.streams))
        terminal.say(f"{key.name.ljust(width)}  {key.role.ljust(ROLE_WIDTH)}  {key.public}  {streams}")


@as_command("revoke", command)
def _revoke(*, name: Annotated[str, argument()], keys_dir: KeysDirectory, config_file: KeysConfig) -> None:
    """Revoke the key NAME."""
    keys = named_keys(keys_dir, config_file)
    keys.revoke(name)
    terminal.say(f"revoked {name} in {keys.path}")
    _say_when(keys)


def named_keys(keys_dir: Path | None, config_file: Path | None) -> KeyDirectory:
    """The directory that the options, the environment or the configuration name."""
    if keys_dir is not None and config_file is not None:
        raise click.UsageError("--keys-dir and --config both say where the keys are; give one of them")
    if keys_dir is None and (config_file is not None or DEFAULT_CONFIG_FILE.is_file()):
        keys_dir = load_config(config_file or DEFAULT_CONFIG_FILE).daemon.keys_dir
    elif keys_dir is None and (named := os.environ.get(KEYS_DIR_VARIABLE)):
        keys_dir = Path(os.path.expanduser(named))  # noqa: PTH111  as for the other paths of the environment
    return open_keys(keys_dir)


@contextmanager
def _new_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Create a file for a secret, and give the function that writes it. A failure removes it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except FileExistsError:
        raise ArgumentInvalid(f"{path} exists and is not overwritten; name another file, or remove it first") from None
    except OSError as error:
        raise BatchdError(why_unwritable(path, error)) from None
    with ExitStack() as where_it_fails:
        where_it_fails.callback(path.unlink, missing_ok=True)
        # unbuffered: its end writes nothing, so it cannot fail
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, FILE_MODE)  # whatever the umask

            def write(text: str) -> None:
                data = text.encode()
                while data:
                    data = data[file.write(data) :]
                os.fsync(descriptor)

            yield write
        where_it_fails.pop_all()


def _explain(key: ConnectionKey, output: Path | None, keys: KeyDirectory) -> None:
    file = output or Path("conn.key")
    if key.role is Role.WORKER:
        host = "the worker host"
        use = f"batchd worker tcp://HOST:7072 --key {file.name}"
    else:
        host = "the trainer's host"
        use = f"{ADDRESS_VARIABLE}=tcp://HOST:7070 {KEY_VARIABLE}={file.name} python train.py"
    where = f"Copy {file} to" if output else f"Keep the above as {file}, for its owner alone (chmod 600), on"
    terminal.note(f"made the key {key.name} in {keys.path}. {where} {host}, and there:")
    terminal.note(f"    {use}")
    _say_when(keys)


def _say_when(keys: KeyDirectory) -> None:
    if keys.path == SYSTEM_KEYS_DIRECTORY:
        text = f"A service that gets its keys as credentials knows of this once it starts again: {RESTART}"
        terminal.note(text)
