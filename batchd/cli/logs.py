"""``batchd logs``: the last lines of the daemon's log. In the user's shell.

The daemon keeps its last lines in memory and gives them with its status, wherever it writes its
log. So they can be read without the rights to read the journal or a file.
"""

import sys
import time
from contextlib import suppress
from typing import Annotated

import click

from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, as_command, option
from batchd.cli.status import log_line
from batchd.cli.tables import echo, own_console
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_client.session import Session
from batchd_wire.messages import AskStatus, Status
from batchd_wire.status import DaemonStatus, read_status

LINES = 20
FOLLOW_S = 0.5


@as_command("logs")
def command(
    *,
    address: Address,
    lines: Annotated[int, option("Lines to begin with.", "-n", "--lines", limits=(0, None))] = LINES,
    follow: Annotated[bool, option("Print further lines as they come, until Ctrl-C.", "-f", "--follow")],
) -> None:
    """Print the last lines of the daemon's log, and say where all of it is.

    The daemon keeps its last 300 lines in memory, each of at most 400 characters, of the levels
    that it logs. The place of the whole log goes to standard error.
    """
    console = own_console()
    with running_daemon(address) as session:
        status = _ask(session, 0)
        if status.daemon.log:
            click.echo(f"the whole log: {status.daemon.log}", err=True)
        shown = status.log[max(0, len(status.log) - lines) :]
        last = status.log[-1].number if status.log else 0
        echo(console, (log_line(line, console.width) for line in shown))
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            while follow:
                time.sleep(FOLLOW_S)
                news = _ask(session, last).log
                echo(console, (log_line(line, console.width) for line in news))
                sys.stdout.flush()
                last = news[-1].number if news else last


def _ask(session: Session, after: int) -> DaemonStatus:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    answer = session.request(lambda request: AskStatus(request, after), Status, deadline)
    return read_status(answer.status)
