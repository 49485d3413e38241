"""How a session with a daemon is begun: on this host, and over TCP. Runs in the trainer.

    on this host   lifeline: Hello -> Welcome (secret) [AskWritable]   DEALER: Open (secret) -> Opened
    over TCP       DEALER: Greet -> Greeted (secret)     further DEALERs: Join (secret) -> Joined

Invariant: a session that is given is open, and one that could not be opened has left nothing
behind.
"""

import socket
import time
from typing import NamedTuple

import zmq

from batchd_client.diagnosis import explain, unknown_key
from batchd_client.errors import ConnectTimeout
from batchd_client.hints import nearer_way, tell_once
from batchd_client.lifeline import DaemonBusy, SessionLost, open_lifeline
from batchd_client.remote import RemoteLink, remote_socket
from batchd_client.session import Session
from batchd_client.sockets import Socket, Sockets
from batchd_wire.codec import MESSAGE_BYTES_MAX
from batchd_wire.keys import ConnectionKey
from batchd_wire.runtime import RuntimeDirectory, TcpAddress

RECONNECT_INTERVAL_MS = 20
RECONNECT_INTERVAL_MAX_MS = 500
DIAGNOSIS_S = 1.0
DIAGNOSIS_MAX_S = 3.0
"""How long finding out why there is no session may take; the shorter one also past the deadline."""

Place = RuntimeDirectory | TcpAddress


class Target(NamedTuple):
    """Which daemon, and what is asked of it. ``sockets`` is where it gets its sockets from.

    ``key`` and ``connections`` count over TCP alone, ``writable_slots`` on this host alone: see
    ``AskWritable``. ``lifeline``: a connected socket from the daemon, for one session of a process
    that it has started.
    """

    sockets: Sockets
    place: Place
    key: ConnectionKey | None = None
    connections: int = 1
    writable_slots: bool = False
    lifeline: socket.socket | None = None


def open_session(target: Target, deadline: float) -> Session:
    """Begin a session. ``DaemonBusy`` and ``OSError`` are worth another try; what else is raised says why not."""
    target.sockets.close_all()
    if isinstance(target.place, TcpAddress):
        return _open_remote(target, target.place, deadline)
    return _open_local(target, target.place, deadline)


def _open_local(target: Target, directory: RuntimeDirectory, deadline: float) -> Session:
    """On this host. Raises what ``open_lifeline`` raises."""
    lifeline, secret = open_lifeline(
        directory.lifeline_path,
        deadline,
        target.sockets.turn,
        writable_slots=target.writable_slots,
        given=target.lifeline,
    )
    session = Session(_dealer(target.sockets, directory.zmq_endpoint), lifeline, directory.zmq_endpoint)
    opened = False
    try:
        session.open(secret, deadline)
        opened = True
    except SessionLost as lost:
        raise DaemonBusy(str(lost)) from None
    finally:
        if not opened:
            session.close()
    return session


def _open_remote(target: Target, address: TcpAddress, deadline: float) -> Session:
    """On another host. Raises ``PermissionDenied`` where keys do not fit, and ``OSError`` saying what stands in the way."""
    dealer, link = _remote_connection(target, address)
    session = Session(dealer, link, address.endpoint)
    opened = False
    try:
        dealer.connect(address.endpoint)
        greeted = session.greet(deadline)
        for _ in range(target.connections - 1):
            session.join(*_remote_connection(target, address), greeted.secret, deadline)
        opened = True
    except (SessionLost, ConnectTimeout, zmq.ZMQError) as failure:
        raise _why_not(target, address, session, deadline, failure) from None
    finally:
        if not opened:
            session.close()
    if greeted.ipc_address:
        tell_once(nearer_way(address.address, greeted.ipc_address))
    return session


def _why_not(target: Target, address: TcpAddress, session: Session, deadline: float, failure: Exception) -> Exception:
    """What to say of a session that did not open. Each of its connections may have been told the reason."""
    if any(link.is_put_off for link in session.remote_links):
        return DaemonBusy(
            f"the daemon at {address.address} lets nobody in from here just now: this host connects too often, or the daemon "
            "cannot read its keys; its log says which"
        )
    if target.key is not None and any(link.is_key_refused for link in session.remote_links):
        return unknown_key(address, target.key)
    if session.daemon_version:
        return DaemonBusy(
            f"the daemon at {address.address} took the first of {target.connections} connections, but not all others: {failure}"
        )
    left_s = max(DIAGNOSIS_S, min(DIAGNOSIS_MAX_S, deadline - time.monotonic()))
    return explain(target.sockets, address, target.key, left_s, timed_out=isinstance(failure, ConnectTimeout))


def _remote_connection(target: Target, address: TcpAddress) -> tuple[Socket, RemoteLink]:
    dealer = remote_socket(target.sockets, target.key)
    return dealer, RemoteLink(target.sockets, dealer, address)


def _dealer(sockets: Sockets, endpoint: str) -> Socket:
    dealer = sockets.open(zmq.DEALER)
    dealer.immediate = True
    dealer.maxmsgsize = MESSAGE_BYTES_MAX
    dealer.reconnect_ivl = RECONNECT_INTERVAL_MS
    dealer.reconnect_ivl_max = RECONNECT_INTERVAL_MAX_MS
    dealer.connect(endpoint)
    return dealer
