"""``batchd stop``: end the daemon of this host, and wait until it is gone. In the user's shell.

Invariant: only the process that has answered gets the signal: it is held by a descriptor, so a new
process of the same number is never hit.
"""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, as_command, option
from batchd.errors import BatchdError, DaemonUnreachable
from batchd_client.asking import ask_status

SAID_AFTER_S = 1.0
"""A daemon that takes longer is said to be draining."""


@as_command("stop")
def command(
    *,
    address: Address,
    timeout_s: Annotated[
        float,
        option(
            "How long to wait for its end. Afterwards it still finishes and ends.",
            "--timeout",
            limits=(0, None),
            metavar="SECONDS",
        ),
    ] = 60.0,
    now: Annotated[bool, option("Do not wait until trainers have what they were granted.")],
) -> None:
    """Stop the daemon of this host: it finishes work in progress, and ends.

    Trainers wait up to 4 hours for the next daemon, and continue where they were.
    """
    with running_daemon(address) as session:
        pid, found = ask_status(session).daemon.pid, session.address
        if not found.startswith("ipc:"):
            raise BatchdError(f"the daemon at {found} is on another host: stop it there")
        process = _open(pid)
    try:
        _signal(process, pid, signal.SIGTERM)
        if now:
            # Not SIGTERM again: the kernel may deliver two equal signals as one.
            _signal(process, pid, signal.SIGINT)
        if not _has_ended(process, min(timeout_s, SAID_AFTER_S)):
            terminal.note(f"draining (pid {pid}); kill -INT {pid} ends it at once")
            if not _has_ended(process, timeout_s - SAID_AFTER_S):
                raise BatchdError(f"the daemon (pid {pid}) has not ended within {timeout_s:g} s, and still drains")
    finally:
        os.close(process)
    terminal.say(f"stopped the daemon at {found} (pid {pid})")


def _open(pid: int) -> int:
    """A descriptor of the process. Raises ``BatchdError``."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        raise DaemonUnreachable(f"the daemon (pid {pid}) has just ended, or is in another container") from None
    unit = service_of(pid)
    if unit:
        os.close(process)
        raise BatchdError(f"the daemon (pid {pid}) is a service, which may be started again: systemctl stop {unit}")
    return process


def service_of(pid: int) -> str:
    """The unit of systemd whose main process this is; "" if it is none."""
    with suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        # a program that a service starts inherits the variable, with the number of the main process
        if f"SYSTEMD_EXEC_PID={pid}".encode() in environment:
            from batchd.cli.log_lines import unit_of  # noqa: PLC0415  services only, as it loads structlog

            return unit_of(Path(f"/proc/{pid}/cgroup")) or "batchd"
    return ""


def _signal(process: int, pid: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(process, number)
    except PermissionError:
        owner = Path(f"/proc/{pid}").stat().st_uid
        raise BatchdError(
            f"the daemon (pid {pid}) belongs to user {owner}: only that user and root may stop it"
        ) from None
    except ProcessLookupError:
        return  # it has ended already


def _has_ended(process: int, within_s: float) -> bool:
    """Wait for the end of the process: its descriptor becomes readable."""
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    return bool(waiting.poll(max(0.0, within_s) * 1000))
