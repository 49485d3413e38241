"""``batchd reload``: have the daemon read its configuration again, and wait for what comes of it. Runs in the user's shell."""

import sys
from math import inf

import click

from batchd.cli.asking import running_daemon
from batchd.cli.options import address_option
from batchd_wire.messages import AskReload, Reloaded


@click.command("reload")
@address_option
def command(address: str | None) -> None:
    """Have the daemon read its configuration again, and say what has changed.

    Streams that are the same go on untouched. Waits until new sources are scanned. If anything is wrong, nothing changes, and
    all of it is printed, as `batchd check` does; the exit code is then 2, or 5 where only the memory is too small. Only root and
    the daemon's own user may.
    """
    with running_daemon(address) as session:
        outcome = session.request(AskReload, Reloaded, inf)
    if outcome.exit_code:
        click.echo(f"batchd: {outcome.text}", err=True)
        sys.exit(outcome.exit_code)
    click.echo(outcome.text)
