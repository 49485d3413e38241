"""What a shell offers after Tab where the name of a stream belongs. Runs in the user's shell, once for each Tab.

Invariant: whatever is wrong, with the daemon or with the file, offers nothing and says nothing: the
line that the user is writing is no place for messages. The command itself says it when it is run.
"""

import click
from click.shell_completion import CompletionItem

from batchd.cli.asking import running_daemon
from batchd.cli.options import DEFAULT_CONFIG_FILE
from batchd.errors import BatchdError
from batchd_client.asking import ask_status

ANSWER_TIMEOUT_S = 1.0
"""A daemon that does not answer soon is not waited for: the user's line stands still meanwhile."""


def running_streams(context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Name the streams of the daemon that the line means."""
    try:
        with running_daemon(context.params.get("address"), ANSWER_TIMEOUT_S) as session:
            streams = ask_status(session, ANSWER_TIMEOUT_S).streams
    except BatchdError:
        return []
    return _items([stream.name for stream in streams], incomplete)


def configured_streams(context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Name the streams in the configuration that the line means; those that are right, where others are wrong."""
    from batchd.config.load import read_config  # noqa: PLC0415  other commands that name a stream read no configuration

    try:
        streams = read_config(context.params.get("config_file") or DEFAULT_CONFIG_FILE).data.get("streams")
    except BatchdError:
        return []
    return _items(list(streams) if isinstance(streams, dict) else [], incomplete)


def _items(names: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
