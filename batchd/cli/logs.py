"""``batchd logs``: the last lines of the daemon's log. In the user's shell.

The daemon keeps its last lines in memory and gives them with its status, wherever it writes its
log. So they can be read without the rights to read the journal or a file. A daemon that has ended
left a link to its log in the runtime directory, if that was a file.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from batchd.cli import terminal
from batchd.cli.asking import running_daemon
from batchd.cli.options import Address, as_command, option
from batchd.cli.status import log_line
from batchd.cli.text import escaped
from batchd.errors import DaemonUnreachable
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_client.session import Session
from batchd_wire.messages import AskStatus, Status
from batchd_wire.runtime import (
    ADDRESS_VARIABLE,
    RuntimeDirectory,
    candidate_directories,
    parse_address,
    runtime_directory,
)
from batchd_wire.status import DaemonStatus, LogLine, read_status

LINES = 20
TAIL_BYTES = 1 << 20
"""As much of the end of a file is read."""
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
    that it logs. The place of the whole log goes to standard error. Where no daemon runs, the lines
    are those of the last one that wrote its log to a file.
    """
    try:
        _print_log(address, lines, follow=follow)
    except DaemonUnreachable as error:
        log = _last_log(address)
        if log is None or follow:
            raise
        try:
            ended = datetime.fromtimestamp(log.stat().st_mtime, UTC).astimezone()
            last = _last_lines(log, lines)
        except OSError:
            raise error from None
        terminal.note(f"no daemon runs; the last one wrote until {ended:%Y-%m-%d %H:%M:%S}, to {log}")
        terminal.say(*map(escaped, last))


def _print_log(address: str | None, lines: int, *, follow: bool) -> None:
    with running_daemon(address) as session:
        status = _ask(session, 0)
        if status.daemon.log:
            terminal.note(f"the whole log: {status.daemon.log}")
        shown = status.log[max(0, len(status.log) - lines) :]
        last = status.log[-1].number if status.log else 0
        _draw(shown)
        with suppress(KeyboardInterrupt):
            while follow:
                time.sleep(FOLLOW_S)
                news = _ask(session, last).log
                _draw(news)
                last = news[-1].number if news else last


def _draw(lines: Sequence[LogLine]) -> None:
    terminal.draw(log_line(line, terminal.columns()) for line in lines)


def _last_log(address: str | None) -> Path | None:
    """The log that a daemon left in its runtime directory; of several, the newest."""
    given = address or os.environ.get(ADDRESS_VARIABLE)
    try:
        places = [runtime_directory(path) for path in candidate_directories()] if not given else [parse_address(given)]
    except ValueError:
        return None
    logs = []
    for place in places:
        if isinstance(place, RuntimeDirectory):
            with suppress(OSError):
                logs.append(place.log_path.readlink())
    return max((log for log in logs if log.is_file()), key=lambda log: log.stat().st_mtime, default=None)


def _last_lines(log: Path, lines: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read(TAIL_BYTES).decode(errors="replace")
    return text.splitlines()[-lines:] if lines else []


def _ask(session: Session, after: int) -> DaemonStatus:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    answer = session.request(lambda request: AskStatus(request, after), Status, deadline)
    return read_status(answer.status)
