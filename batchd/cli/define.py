"""``batchd define``: streams of a file for a running daemon. In the user's shell."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.asking import client_errors, running_daemon
from batchd.cli.options import Address, argument, as_command, option
from batchd.config.load import read_config
from batchd.errors import BatchdError, ConfigInvalid
from batchd_client.daemon import KEEP_MAX_S, KEEP_S, connect
from batchd_client.errors import DefinitionRefused
from batchd_wire.wording import counted


@as_command("define")
def command(
    *,
    file: Annotated[Path, argument()],
    keep: Annotated[bool, option("Keep the streams until `batchd streams remove`, or the daemon's end.")],
    keep_s: Annotated[
        float, option("How long they stay after their last trainer, in seconds.", "--keep-for", limits=(0, KEEP_MAX_S))
    ] = KEEP_S,
    address: Address,
) -> None:
    """Define the streams of FILE, a part of a batchd.toml, in the running daemon.

    They have the tables [streams.NAME]; other tables of FILE do not count. Who may define what is
    for the daemon's operator to say: [daemon.define] in its batchd.toml.
    """
    reading = read_config(file, environment={})
    if reading.config is None or reading.problems:
        raise ConfigInvalid(reading.located(reading.problems), str(file))
    tables = reading.data["streams"]
    assert isinstance(tables, Mapping), "it is valid"
    with running_daemon(address):  # which says what helps where there is none
        pass
    with client_errors(), connect(address) as daemon:
        for name, table in tables.items():
            try:
                with daemon.define(name, table, keep=keep, keep_s=keep_s) as stream:
                    terminal.say(f"{name}: {counted(stream.samples, 'sample')}, fingerprint {stream.fingerprint}")
            except DefinitionRefused as error:  # all its lines: they show the problems
                raise BatchdError(str(error).removeprefix("the daemon says: ")) from None
