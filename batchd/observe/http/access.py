"""Decides which HTTP requests get an answer, and which see details. OBSERVER process.

    Host header     must name this machine: any other name may be DNS rebinding by a web page
    details         for users who may connect to the daemon (root, its user, the runtime directory's
                    group), over loopback

Over loopback the kernel knows the user at the other end of a connection. It is asked for the one
socket by its addresses (sock_diag(7), some microseconds); where it does not support that, as in
some sandboxes, its whole table is read (proc(5), /proc/net/tcp, some milliseconds). The user of a
proxy says nothing about the client behind it, so a forwarded request sees no details.

Invariant: only an established connection with exactly these two ends counts; in doubt a client is
unknown and sees no details.
"""

import os
import pwd
import socket
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from threading import Event, Thread

from batchd_wire.runtime import unmapped_id

LOCALHOST = "localhost"
RETRY_S = 60.0
"""Between two questions to the resolver."""
Endpoint = tuple[IPv4Address | IPv6Address, int]
"""Address and port."""

_PROXY_HEADERS = {"forwarded", "via", "x-real-ip"}
_PROXY_PREFIX = "x-forwarded-"
_ESTABLISHED = 1
"""TCP state. The kernel may show a connection that is being closed as user 0."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))

NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST = 1
_ANY_COOKIE = (0xFFFF_FFFF, 0xFFFF_FFFF)
_HEADER = struct.Struct("=IHHII")
"""``nlmsghdr``: length, type, flags, sequence, port."""
_ENDS = "HH16s16sIII"
"""``inet_diag_sockid``: ports and addresses in network order, interface, cookie."""
_QUESTION = struct.Struct(f"=BBBBI{_ENDS}")
"""``inet_diag_req_v2``: family, protocol, extensions, padding, states."""
_ANSWER = struct.Struct(f"=BBBB{_ENDS}IIIII")
"""``inet_diag_msg``: family, state, timer, retransmits, ends, expiry, two queues, user, inode."""
_ANSWER_BYTES_MAX = 4096


class HostNames:
    """Names of this machine for the Host header. ``configured``: ``http_names``.

    A thread asks the resolver for the fully qualified name until it answers, which may take seconds
    or, at boot, longer; requests use the names known by then.
    """

    def __init__(self, configured: Iterable[str]) -> None:
        self._names = frozenset({LOCALHOST, socket.gethostname().lower(), *(name.lower() for name in configured)})
        self._closed = Event()

    def start(self) -> None:
        """Begin to ask for the fully qualified name. Paired with ``close``."""
        Thread(target=self._resolve, name="names", daemon=True).start()

    def close(self) -> None:
        """Ask no more, without waiting for a resolver that has not answered yet."""
        self._closed.set()

    def match(self, header: str) -> bool:
        """True if a Host header names this machine. Never blocks; for any thread.

        Every IP address matches: unlike a name, an address cannot be made to mean another machine.
        """
        written = header.strip().lower()
        in_brackets = written.startswith("[")
        name = written[1:].partition("]")[0] if in_brackets else written.partition(":")[0]
        try:
            ip_address(name)
        except ValueError:
            return not in_brackets and name.removesuffix(".") in self._names
        return True

    def _resolve(self) -> None:
        while not self._closed.is_set():
            name = full_name()
            self._names |= {name}
            if "." in name:
                return
            self._closed.wait(RETRY_S)


def full_name() -> str:
    """This machine's name with its domain, by its own resolver: no client can influence that."""
    return socket.getfqdn().lower()


class AccessRules:
    """Decides which connections see process ids, users and paths. ``directory``: the runtime's."""

    def __init__(self, directory: Path, *, details_for_all: bool = False) -> None:
        self._directory = directory
        self._details_for_all = details_for_all

    def may_see_details(self, connection: socket.socket, headers: Iterable[str]) -> bool:
        """True if the client may see details. ``headers``: the names of the request's headers."""
        if self._details_for_all:
            return True
        if is_forwarded(headers):
            return False
        try:
            theirs, ours = endpoint(connection.getpeername()), endpoint(connection.getsockname())
        except OSError:
            return False
        if not theirs[0].is_loopback:
            return False
        user = user_of(theirs, ours)
        return user is not None and self.is_insider(user)

    def is_insider(self, user: int) -> bool:
        """True for root, the daemon's own user, and members of its directory's group."""
        if user == unmapped_id("uid"):
            return False
        if user in {0, os.geteuid()}:
            return True
        group = self._directory.stat().st_gid
        return group != unmapped_id("gid") and group in groups_of(user)


def is_forwarded(headers: Iterable[str]) -> bool:
    """True if the names of a request's headers include one that a proxy adds."""
    names = {name.lower() for name in headers}
    return bool(names & _PROXY_HEADERS) or any(name.startswith(_PROXY_PREFIX) for name in names)


def groups_of(user: int) -> frozenset[int]:
    """All groups of a user in the system's databases; empty for a user without an entry."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return frozenset()
    return frozenset({*os.getgrouplist(entry.pw_name, entry.pw_gid)})


# --- the user at the other end of a connection ----------------------------------------------------


def endpoint(address: tuple[str, int]) -> Endpoint:
    """Parse the address of a socket. An IPv4 address mapped into IPv6 counts as IPv4."""
    host = ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return mapped or host, address[1]


def user_of(theirs: Endpoint, ours: Endpoint) -> int | None:
    """User id at the other end of a connection between two addresses of this machine, or None."""
    user = user_by_question(theirs, ours)
    return user if user is not None else user_by_table(theirs, ours)


def user_by_question(theirs: Endpoint, ours: Endpoint) -> int | None:
    """Ask the kernel for this one socket. None if it has none, or has no sock_diag."""
    family = socket.AF_INET if theirs[0].version == 4 else socket.AF_INET6  # noqa: PLR2004  a version
    ports = socket.htons(theirs[1]), socket.htons(ours[1])
    hosts = [host.packed.ljust(16, b"\0") for host, _port in (theirs, ours)]
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED, *ports, *hosts, 0, *_ANY_COOKIE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(0)  # the answer is there when ``sendto`` returns
            header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0)
            kernel.sendto(header + question, (0, 0))
            answer = kernel.recv(_ANSWER_BYTES_MAX)
    except OSError:
        return None
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    family, state, _, _, *found, _, _, _, _, _, _, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    if family == socket.AF_INET6:  # an IPv6 socket, possibly with IPv4 addresses
        hosts = [_as_ipv6(host) for host, _port in (theirs, ours)]
    is_it = found == [*ports, *hosts] and state == _ESTABLISHED and inode
    return int(user) if is_it else None


def user_by_table(theirs: Endpoint, ours: Endpoint, tables: Iterable[Path] = _TABLES) -> int | None:
    """Search the kernel's tables of all TCP sockets. None if the connection is in none of them."""
    wanted = set(zip(_table_forms(theirs), _table_forms(ours), strict=True))
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _number, local, remote, state, _queues, _timer, _retransmits, user, _timeout, inode, *_rest = line.split()
            if (local, remote) in wanted and int(state, 16) == _ESTABLISHED and inode != "0":
                return int(user)
    return None


def _as_ipv6(host: IPv4Address | IPv6Address) -> bytes:
    """The 16 bytes of an address, IPv4 mapped into IPv6."""
    return host.packed if isinstance(host, IPv6Address) else b"\0" * 10 + b"\xff\xff" + host.packed


def _table_forms(endpoint: Endpoint) -> Iterator[str]:
    """The forms in both tables, IPv4 and IPv6: 32-bit words in the machine's order, in hex."""
    host, port = endpoint
    for packed in (host.packed, _as_ipv6(host)):
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        yield "".join(f"{word:08X}" for word in words) + f":{port:04X}"
