"""``batchd reload``: have the daemon read its configuration again. In the user's shell."""

import sys
from math import inf
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, as_command, option
from batchd_wire.messages import AskReload, Reloaded


@as_command("reload")
def command(
    *,
    address: Address,
    dry_run: Annotated[bool, option("Change nothing: print what a reload would change, and which trainers would end.")],
    keep_trainers: Annotated[bool, option("Change nothing, and exit with 1, if a trainer would end.")],
) -> None:
    """Have the daemon read its configuration again, and print what has changed.

    Unchanged streams continue untouched. Waits until new sources are scanned. If anything is wrong,
    nothing changes, and every problem is printed, as by `batchd check`; the exit code is then 2, or
    5 if only the memory is too small. Only root and the daemon's own user may reload.
    """
    reload(address, dry_run=dry_run, keep_trainers=keep_trainers)


def reload(address: str | None, *, dry_run: bool = False, keep_trainers: bool = False) -> None:
    """Have the daemon at ``address`` reload, and print its answer; a refusal ends the command."""
    outcome = ask_reload(address, dry_run=dry_run, keep_trainers=keep_trainers)
    if outcome.exit_code:
        terminal.warn(outcome.text)
        sys.exit(outcome.exit_code)
    terminal.say(outcome.text)


def ask_reload(address: str | None, *, dry_run: bool, keep_trainers: bool = False) -> Reloaded:
    """Have the daemon at ``address`` reload, or say what a reload would change."""
    with running_daemon(address) as session:
        return session.request(lambda request: AskReload(request, dry_run, keep_trainers), Reloaded, inf)
