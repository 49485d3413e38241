"""``batchd usage``: who has had how much of the daemon. In the user's shell."""

from dataclasses import asdict
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, as_command, option
from batchd.cli.tables import observed
from batchd.observe.columns import USAGE
from batchd.observe.diagnosis.overview import overview_between
from batchd_client.asking import ask_status


@as_command("usage")
def command(
    *,
    address: Address,
    as_json: Annotated[bool, option("Print everything as JSON, for programs.", "--json")],
) -> None:
    """Show what each user and key has had of each stream, and what it holds now.

    The worker time of a batch counts for the trainer that needed it first. Totals count from the
    daemon's start. Exit code 3 if no daemon answers.
    """
    with running_daemon(address) as session:
        status = ask_status(session)
    if as_json:
        terminal.emit_json([asdict(one) for one in status.usage])
        return
    usage = overview_between(status, status).usage
    if not usage:
        terminal.say("no trainer has subscribed yet")
        return
    terminal.draw([observed(USAGE, "status", usage, terminal.console_of().width)])
    if status.left_out.usage:
        terminal.say(f"and {status.left_out.usage:,} more")
