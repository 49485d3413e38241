"""``batchd top``: a live view of the daemon in a terminal. Runs in the user's shell.

    draw what has changed --> wait for an answer, the next poll, a key, or a resize

If the daemon ends, its last numbers stay with a note until there is a daemon again.

Invariant: at any end the terminal is restored.
"""

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Annotated

import click
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from batchd.cli import terminal
from batchd.cli.asking import client_errors, running_daemon
from batchd.cli.frame import ESCAPE, EVERYTHING, SORTS, TopView, frame
from batchd.cli.options import Address, as_command, option
from batchd.cli.tables import NAME_CHARACTERS_MAX
from batchd.errors import BatchdError, DaemonUnreachable
from batchd.observe.diagnosis.overview import StatusWindow
from batchd_client.asking import ANSWER_TIMEOUT_S, ask_status
from batchd_client.lifeline import SessionLost
from batchd_client.session import Session
from batchd_wire.messages import AskStatus, Status
from batchd_wire.status import read_status
from batchd_wire.wording import duration

INTERVAL_S = 1.0
SILENT_S = 2.0
"""An answer takes milliseconds; without one for so long, the frame says so."""


@as_command("top")
def command(
    *,
    address: Address,
    interval_s: Annotated[float, option("Seconds between two updates.", "--interval", limits=(0.1, 3600))] = INTERVAL_S,
    once: Annotated[bool, option("Print one frame and exit; the default if the output is not a terminal.")],
    sort: Annotated[str | None, option("Order of the trainers; the key s changes it.", type=click.Choice(SORTS[1:]))],
    text_filter: Annotated[
        str, option("Only trainers and streams with it in a name; the key /.", "--filter", metavar="TEXT")
    ] = "",
) -> None:
    """Watch streams, trainers and workers, live.

    Keys: s sorts the trainers, / filters by name (Enter ends it, Esc clears it), p pauses, q quits.
    """
    view = TopView(sort or "", text_filter[:NAME_CHARACTERS_MAX])
    if once or not terminal.can_ask():
        _print_once(address, interval_s, view)
        return
    with closing(Source(address)) as source:
        source.open()
        with _terminal() as wake, Live(console=terminal.console_of(), screen=True, auto_refresh=False) as live:
            watch(source, live, wake, interval_s, view)


class Source:
    """The connection to the daemon, its last status, and the error since then, if any."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._stack = ExitStack()
        self._session: Session | None = None
        self._asked_s: float | None = None
        self._repeats = 1
        self.window = StatusWindow()
        self.notice = ""

    def open(self) -> None:
        """Open a session. Raises ``DaemonUnreachable``."""
        self._session = self._stack.enter_context(running_daemon(self._address))
        self.ask()

    def ask(self) -> None:
        """Request the status, unless a request is pending; reconnect if the daemon has ended."""
        if self._session is None:
            try:
                self.open()
            except DaemonUnreachable:
                return
            except BatchdError as error:
                self.notice = str(error)
        elif self._asked_s is None:
            self._asked_s, self._repeats = monotonic(), 1
            with suppress(SessionLost):  # which `take` meets again
                self._session.begin(AskStatus)
        elif (silent_s := monotonic() - self._asked_s) >= SILENT_S:
            self.notice = f"no answer for {duration(silent_s)}: these are its last numbers"
            if silent_s >= self._repeats * ANSWER_TIMEOUT_S:  # the answer may be lost
                self._repeats += 1
                with suppress(SessionLost):
                    self._session.begin(AskStatus)

    @property
    def descriptors(self) -> list[int]:
        """Readable when a message has arrived."""
        return self._session.descriptors if self._session is not None else []

    def take(self) -> bool:
        """Receive messages. Returns True if the status changed."""
        if self._session is None:
            return False
        try:
            with client_errors():
                reply = self._session.answer()
        except DaemonUnreachable:
            self.close()
            self.notice = "the daemon has gone: these are its last numbers, and it is looked for"
            return True
        if not isinstance(reply, Status):
            return False
        self._asked_s, self.notice = None, ""
        self.window.add(read_status(reply.status))
        return True

    def close(self) -> None:
        """End the session; ``open`` may follow."""
        self._stack.close()
        self._session = self._asked_s = None


def _print_once(address: str | None, interval_s: float, view: TopView) -> None:
    window = StatusWindow()
    with running_daemon(address) as session:
        window.add(ask_status(session))
        select.select([], [], [], interval_s)
        window.add(ask_status(session))
    terminal.draw([_drawn(window, terminal.console_of().width, None, "", view)])


def watch(source: Source, live: Live, wake: int, interval_s: float, view: TopView = EVERYTHING) -> None:
    """Draw and wait until the user quits. A paused view does not ask the daemon."""
    due_s, shown = monotonic(), None
    while True:
        now = monotonic()
        if now >= due_s:
            if not view.is_paused:
                source.ask()
            due_s = now + interval_s
        is_news, size = source.take(), live.console.size
        if (is_news and not view.is_paused) or shown != (source.notice, size, view):
            live.update(_drawn(source.window, size.width, size.height, source.notice, view), refresh=True)
            shown = source.notice, size, view
        ready = select.select([sys.stdin, wake, *source.descriptors], [], [], max(0.0, due_s - monotonic()))[0]
        if wake in ready:
            os.eventfd_read(wake)
        if sys.stdin in ready:
            keys = os.read(sys.stdin.fileno(), 1024).decode("utf-8", "ignore")
            is_arrow = len(keys) > 1 and keys.startswith(ESCAPE)
            for key in "" if is_arrow else keys:
                next_view = view.pressed(key)
                if next_view is None:
                    return
                view = next_view
            if not keys:
                return


def _drawn(window: StatusWindow, width: int, height: int | None, notice: str, view: TopView) -> RenderableType:
    overview = window.overview()
    if overview is None:
        return Text(notice or "asking the daemon")
    return frame(overview, width, height, notice=notice, view=view)


@contextmanager
def _terminal() -> Iterator[int]:
    """Set the terminal to pass on each key; gives a descriptor that is readable after a resize."""
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    before = termios.tcgetattr(sys.stdin)

    def changed(_number: int, _frame: FrameType | None) -> None:
        os.eventfd_write(wake, 1)

    actions = {signal.SIGWINCH: changed, signal.SIGTERM: _end}
    former = {number: signal.signal(number, action) for number, action in actions.items()}
    try:
        tty.setcbreak(sys.stdin)
        yield wake
    except KeyboardInterrupt:
        pass
    finally:
        for number, action in former.items():
            signal.signal(number, action)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        os.close(wake)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)
