"""Requests to a running daemon of this host. Runs in commands and the observer; loads no numpy.

    with asking(address) as session:
        session.request(AskReload, Reloaded, deadline)          waits for the answer
        session.begin(AskStatus); ...; session.answer()         without waiting

Invariant: leaving the context ends the session and ZeroMQ's threads.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from batchd_client.discovery import find_daemon, program
from batchd_client.errors import AddressInvalid
from batchd_client.opening import Target, open_session
from batchd_client.session import Session
from batchd_client.sockets import Sockets
from batchd_wire.messages import AskStatus, Status
from batchd_wire.runtime import RuntimeDirectory
from batchd_wire.status import DaemonStatus, ReportPage, read_status

ANSWER_TIMEOUT_S = 10.0


def asking(address: str | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> AbstractContextManager[Session]:
    """Open a session with a running local daemon. Raises as ``connect``, and ``AddressInvalid``."""

    def find(sockets: Sockets) -> Session:
        target_at = partial(Target, sockets, program())
        return find_daemon(target_at, address, timeout_s, is_patient=False, not_local=AddressInvalid)[1]

    return _open(find)


def asking_parent(
    place: RuntimeDirectory, lifeline: socket.socket, timeout_s: float
) -> AbstractContextManager[Session]:
    """Open a session with the parent daemon over its ``lifeline``. Raises as ``asking``."""

    def open_given(sockets: Sockets) -> Session:
        return open_session(Target(sockets, program(), place, lifeline=lifeline), time.monotonic() + timeout_s)

    return _open(open_given)


@contextmanager
def _open(open_with: Callable[[Sockets], Session]) -> Iterator[Session]:
    with ExitStack() as stack:
        sockets = Sockets(1)
        stack.callback(sockets.destroy)
        session = open_with(sockets)
        stack.callback(session.close)
        yield session


def ask_status(session: Session, timeout_s: float = ANSWER_TIMEOUT_S) -> DaemonStatus:
    """Ask for the daemon's status. Raises ``ConnectTimeout`` and ``SessionLost``."""
    return read_status(session.request(AskStatus, Status, time.monotonic() + timeout_s).status)


def ask_reports(session: Session, stream: str) -> Iterator[ReportPage]:
    """Yield pages of the reports about a stream; none without reports or such a stream.

    Raises as ``ask_status``.
    """
    after = 0
    while True:
        ask = partial(AskStatus, reports_of=stream, reports_after=after)
        page = read_status(session.request(ask, Status, time.monotonic() + ANSWER_TIMEOUT_S).status).reports
        if page is None or not page.heads:
            return
        yield page
        after = page.last
