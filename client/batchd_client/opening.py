"""Open a session with a daemon, or say why none can be opened. Runs in the trainer.

    on this host   lifeline: Hello -> Welcome (secret) [AskWritable]   DEALER: Open -> Opened
    over TCP       DEALER: Greet -> Greeted (secret)     further DEALERs: Join (secret) -> Joined

ZeroMQ does not report why a CURVE connection failed. So a failed TCP session is diagnosed on
connections of its own:

    resolve the name -> connect -> exchange ZMTP greetings (64 bytes, RFC 37): which mechanism?
        CURVE, and a key is given -> ``_probe_curve``: one more handshake, counting received bytes

    DEALER --(unix socket)--> this process counts --(TCP)--> daemon
    greeting -> HELLO -> WELCOME: the daemon has the named key -> INITIATE -> its verdict on our key

A daemon with other keys hangs up in place of its WELCOME (RFC 26). A daemon whose authenticator
does not answer sends nothing after it.

Invariants: a returned session is open, and a failed attempt leaves nothing behind. ``KeyRefused``
ends all retries, so it needs a second connection that agrees with the first; every failure that the
network may have caused is an ``OSError``.
"""

import grp
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import zmq

from batchd_client.errors import ConnectTimeout, KeyRefused
from batchd_client.hints import log_once, shared_memory_hint
from batchd_client.lifeline import DaemonBusy, RemoteLink, SessionLost, open_lifeline, remote_socket
from batchd_client.session import Session
from batchd_client.sockets import Socket, Sockets
from batchd_wire.codec import MESSAGE_BYTES_MAX
from batchd_wire.keys import KEY_VARIABLE, ConnectionKey
from batchd_wire.runtime import RuntimeDirectory, TcpAddress, unmapped_id

RECONNECT_INTERVAL_MS = 20
RECONNECT_INTERVAL_MAX_MS = 500
ENDED = "the daemon has ended"
"""Of a socket in a runtime directory on which no process listens."""
DIAGNOSIS_S = 1.0
DIAGNOSIS_MAX_S = 3.0
"""Time limits for a diagnosis; the shorter one is granted even past the deadline."""

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(12, 32)
_GREETING_START = _SIGNATURE + b"\x03"
"""As much of a greeting as makes the peer send the whole of its own.

With the rest, a peer that wants another mechanism would hang up instead.
"""
_CUT = (
    "the connection was cut while it was made: by the network, or by a daemon that keeps this host out for some seconds"
)
_SILENT = "it took the connection, but did not answer in time: the daemon hangs, or has too much to do"
GREETING_BYTES = 64
WELCOMED_BYTES = GREETING_BYTES + 170
"""Length of a greeting and a WELCOME command, including the two bytes that frame it."""
_PART_BYTES = 4096
_ROOT = 0

Place = RuntimeDirectory | TcpAddress


class Target(NamedTuple):
    """A daemon and the options of a session with it, whose sockets ``sockets`` makes.

    ``name``: what the daemon shows for this program (``discovery.find_name``).
    ``key`` and ``connections`` apply over TCP only, ``writable_slots`` on this host only (see
    ``AskWritable``). ``lifeline``: a connected socket that the daemon gave to a child process, for
    one session.
    """

    sockets: Sockets
    name: str
    place: Place
    key: ConnectionKey | None = None
    connections: int = 1
    writable_slots: bool = False
    lifeline: socket.socket | None = None


def open_session(target: Target, deadline: float, look: Callable[[], None] | None = None) -> Session:
    """Open a session before ``deadline`` (``time.monotonic``); ``look`` is called during waits.

    Raises ``DaemonBusy`` or ``OSError`` where a retry may help, and a ``BatchdClientError`` where
    none does.
    """
    target.sockets.close_all()
    if isinstance(target.place, TcpAddress):
        return _open_remote(target, target.place, deadline, look)
    return _open_local(target, target.place, deadline, look)


def _open_local(
    target: Target, directory: RuntimeDirectory, deadline: float, look: Callable[[], None] | None
) -> Session:
    lifeline, secret = open_lifeline(
        directory.lifeline_path,
        deadline,
        look,
        target.sockets.turn,
        name=target.name,
        writable_slots=target.writable_slots,
        given=target.lifeline,
    )
    dealer = target.sockets.open(zmq.DEALER)
    dealer.immediate = True
    dealer.maxmsgsize = MESSAGE_BYTES_MAX
    dealer.reconnect_ivl = RECONNECT_INTERVAL_MS
    dealer.reconnect_ivl_max = RECONNECT_INTERVAL_MAX_MS
    dealer.connect(directory.zmq_endpoint)
    session = Session(dealer, lifeline, directory.zmq_endpoint)
    with ExitStack() as on_failure:
        on_failure.callback(session.close)
        try:
            session.open(secret, deadline, look)
        except SessionLost as lost:
            raise DaemonBusy(str(lost)) from None
        on_failure.pop_all()
    return session


def _open_remote(target: Target, address: TcpAddress, deadline: float, look: Callable[[], None] | None) -> Session:
    dealer, link = _remote_connection(target, address)
    session = Session(dealer, link, address.endpoint)
    with ExitStack() as on_failure:
        on_failure.callback(session.close)
        try:
            dealer.connect(address.endpoint)
            greeted = session.greet(target.name, deadline, look)
            for _ in range(target.connections - 1):
                session.join(*_remote_connection(target, address), greeted.secret, deadline)
        except (SessionLost, ConnectTimeout, zmq.ZMQError) as failure:
            raise _why_not(target, address, session, deadline, failure) from None
        on_failure.pop_all()
    if greeted.ipc_address:
        log_once(shared_memory_hint(address.address, greeted.ipc_address))
    return session


def _why_not(target: Target, address: TcpAddress, session: Session, deadline: float, failure: Exception) -> Exception:
    """Explain a session that did not open. Any of its connections may have received the reason."""
    if any(link.is_put_off for link in session.remote_links):
        return DaemonBusy(
            f"the daemon at {address.address} refuses this host for now: this host connects too often, or the daemon cannot "
            "read its keys; its log says which"
        )
    if target.key is not None and any(link.is_key_refused for link in session.remote_links):
        return KeyRefused(
            f"the daemon at {address.address} does not know the key {target.key.name!r}: it was revoked, or made for "
            "another daemon"
        )
    if session.daemon_version:
        return DaemonBusy(
            f"the daemon at {address.address} took the first of {target.connections} connections, but not all others: {failure}"
        )
    left_s = max(DIAGNOSIS_S, min(DIAGNOSIS_MAX_S, deadline - time.monotonic()))
    return diagnose(target.sockets, address, target.key, left_s, timed_out=isinstance(failure, ConnectTimeout))


def _remote_connection(target: Target, address: TcpAddress) -> tuple[Socket, RemoteLink]:
    dealer = remote_socket(target.sockets, target.key)
    return dealer, RemoteLink(target.sockets, dealer, address)


def diagnose(
    sockets: Sockets, address: TcpAddress, key: ConnectionKey | None, timeout_s: float, *, timed_out: bool
) -> Exception:
    """Diagnose a failed session: ``OSError`` where a retry may help, else ``KeyRefused``.

    ``timed_out``: the connection stayed open, but the daemon did not answer.
    """
    deadline = time.monotonic() + timeout_s
    try:
        mechanism = _mechanism(address, deadline)
        if mechanism == "CURVE" and key is not None:
            return _judge(_probe_curve(sockets, address, key, deadline), address, key, timed_out=timed_out)
    except socket.gaierror as error:
        return OSError(f"the host {address.host!r} is not known here ({error.strerror}): is the name right?")
    except ConnectionRefusedError:
        return OSError(
            f"the host answers, but nothing listens on port {address.port}: is the daemon running, with tcp = set?"
        )
    except TimeoutError:
        return OSError("no answer: the host is down or unreachable, or a firewall drops what is sent to the port")
    except OSError as error:
        return OSError(error.strerror or str(error))
    if mechanism == "CURVE":
        return KeyRefused(
            f"the daemon at {address.address} requires a key, and none was given in ${KEY_VARIABLE} or connect(key=...)"
        )
    if mechanism == "NULL" and key is not None:
        return KeyRefused(
            f"the daemon at {address.address} has no keys, and a key was given: unset ${KEY_VARIABLE} if that is the right daemon"
        )
    return OSError(_SILENT if timed_out else _CUT)


class _CurveProbe(NamedTuple):
    """Result of a probe. ``hung_up``: the daemon closed the connection before its verdict."""

    heard_bytes: int
    hung_up: bool


def _judge(seen: _CurveProbe, address: TcpAddress, key: ConnectionKey, *, timed_out: bool) -> Exception:
    if seen.hung_up and seen.heard_bytes == GREETING_BYTES and not timed_out:
        return KeyRefused(f"the daemon at {address.address} has other keys than those for which {key.name!r} was made")
    if seen.heard_bytes == WELCOMED_BYTES:  # also if ZeroMQ hangs up after its handshake time
        return OSError("the daemon did not say whether it knows the key: its authenticator hangs or is gone")
    if seen.hung_up:
        return OSError(_CUT)
    return OSError(_SILENT if timed_out or seen.heard_bytes < WELCOMED_BYTES else _CUT)


def _mechanism(address: TcpAddress, deadline: float) -> str:
    """Ask for the security mechanism: "CURVE", "NULL". Raises ``OSError`` without an answer."""
    with socket.create_connection((address.host, address.port), timeout=_left_s(deadline)) as connection:
        greeting = b""
        try:
            connection.sendall(_GREETING_START)
            while len(greeting) < GREETING_BYTES:
                connection.settimeout(_left_s(deadline))
                part = connection.recv(GREETING_BYTES - len(greeting))
                if not part:
                    break
                greeting += part
        except TimeoutError:
            if not greeting:
                raise OSError("it took the connection but says nothing: stopped, hung, or no batchd daemon") from None
        except ConnectionError:
            pass  # the peer has hung up
    if not greeting:
        raise OSError(
            "something listens there and hangs up at once: no batchd daemon, or one that keeps this host out for some "
            "seconds; its log says so"
        )
    ends = slice(None, len(_SIGNATURE), len(_SIGNATURE) - 1)
    if not _SIGNATURE[ends].startswith(greeting[ends]):
        raise OSError("something listens there, but it is no batchd daemon")
    if len(greeting) < GREETING_BYTES:
        raise OSError(_CUT)
    return greeting[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _probe_curve(sockets: Sockets, address: TcpAddress, key: ConnectionKey, deadline: float) -> _CurveProbe:
    """Do a CURVE handshake up to the verdict on the key. Raises ``OSError`` if none begins."""
    name = f"batchd-{os.urandom(16).hex()}"
    dealer = remote_socket(sockets, key)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(f"\0{name}")
            server.listen(1)
            dealer.connect(f"ipc://@{name}")
            server.settimeout(_left_s(deadline))
            ours, _ = server.accept()
        with ours, socket.create_connection((address.host, address.port), _left_s(deadline)) as daemon:
            return _pass_on(ours, daemon, deadline)
    finally:
        dealer.close()


def _pass_on(ours: socket.socket, daemon: socket.socket, deadline: float) -> _CurveProbe:
    heard_bytes = 0
    poll = select.poll()
    for end in (ours, daemon):
        poll.register(end, select.POLLIN)
    # what follows is the verdict
    while heard_bytes <= WELCOMED_BYTES and time.monotonic() < deadline:
        ready = {descriptor for descriptor, _ in poll.poll(_left_s(deadline) * 1000)}
        try:
            if daemon.fileno() in ready:
                data = daemon.recv(_PART_BYTES)
                if not data:
                    return _CurveProbe(heard_bytes, hung_up=True)
                heard_bytes += len(data)
                ours.sendall(data)
            if ours.fileno() in ready:
                data = ours.recv(_PART_BYTES)
                if not data:
                    break
                daemon.sendall(data)
        except ConnectionError:
            return _CurveProbe(heard_bytes, hung_up=True)
    return _CurveProbe(heard_bytes, hung_up=False)


def _left_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def reason_of(place: Place, error: Exception) -> str:
    """Say why a try to reach the daemon at ``place`` failed, in one line."""
    if isinstance(place, TcpAddress):
        return first_line(error)
    match error:
        case PermissionError():
            return f"permission denied{_group(place.path)}"
        case ConnectionRefusedError() if not place.lifeline_path.is_socket():
            return f"there is a {place.lifeline_path.name}, but it is no socket"
        case ConnectionRefusedError():
            return f"there is a socket, but no process listens on it any more: {ENDED}"
        case FileNotFoundError() if place.path.is_dir():
            return f"the directory exists, but has no {place.lifeline_path.name}: no daemon runs there"
        case FileNotFoundError():
            return "no such directory"
        case _:
            return first_line(error)


def first_line(error: BaseException) -> str:
    """First line of an error's message, to quote in another one."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def _group(path: Path) -> str:
    """Describe the directory's group, if visible. In a container its number may have no name."""
    try:
        number = path.stat().st_gid
    except OSError:
        return ""
    if number == _ROOT:
        return f" (its group is root, which is no group for trainers: chgrp GROUP {path})"
    if number == unmapped_id("gid"):
        return " (its group is one that is not mapped into this user namespace)"
    try:
        return f" (its group is {grp.getgrgid(number).gr_name!r}, gid {number})"
    except KeyError:
        return f" (its group has gid {number})"
