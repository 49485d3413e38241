"""``batchd streams``: the streams of a daemon, and whose they are. In the user's shell."""

from dataclasses import asdict
from time import monotonic

import click

from batchd.cli import terminal
from batchd.cli.asking import RunningStream, running_daemon
from batchd.cli.options import Address, CommandGroup, Json, as_command
from batchd.cli.tables import TableColumn, table
from batchd.cli.text import escaped
from batchd_client.asking import ANSWER_TIMEOUT_S, ask_status
from batchd_wire.messages import AskRemoval, Removed
from batchd_wire.status import StreamDescription, StreamStatus


@click.group("streams", cls=CommandGroup)
def command() -> None:
    """List the streams of the daemon, and remove those that were defined."""


@as_command("list", command)
def _list(*, address: Address, as_json: Json) -> None:
    """List all streams: the owner of those that were defined, their trainers, their source."""
    with running_daemon(address) as session:
        streams = ask_status(session).streams
    if as_json:
        terminal.emit_json(
            [{"name": one.name, "trainers": len(one.subscriptions), **asdict(_described(one))} for one in streams]
        )
        return
    columns: list[TableColumn[StreamStatus]] = [
        TableColumn("STREAM", 0, lambda one: escaped(one.name), is_text=True),
        TableColumn("OWNER", 0, lambda one: escaped(_described(one).owner or "file"), is_text=True),
        TableColumn("TRAINERS", 0, lambda one: str(len(one.subscriptions))),
        TableColumn("SOURCE", 60, lambda one: escaped(_described(one).source), is_text=True),
    ]
    terminal.draw([table(columns, streams, terminal.console_of().width)])


@as_command("remove", command)
def _remove(*, stream: RunningStream, address: Address) -> None:
    """Remove a STREAM that was defined; its trainers end.

    For its owner, root, and the daemon's own user. Trainers that wait for it define it again when
    they start again.
    """
    with running_daemon(address) as session:
        session.request(lambda request: AskRemoval(request, stream), Removed, monotonic() + ANSWER_TIMEOUT_S)


def _described(stream: StreamStatus) -> StreamDescription:
    return stream.description or StreamDescription()
