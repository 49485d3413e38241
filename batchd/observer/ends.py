"""Who made the other end of a connection between two addresses of this machine: the kernel says. OBSERVER process.

It is asked for the one socket by its addresses (sock_diag(7), some microseconds); where it does not
answer that, as in some sandboxes, its whole table is read (proc(5), /proc/net/tcp, some
milliseconds).

Invariant: only an established connection with exactly these two ends counts; in doubt it is
nobody's.
"""

import socket
import struct
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

Place = tuple[IPv4Address | IPv6Address, int]
"""Address and port."""

_ESTABLISHED = 1
"""A connection that is being closed may belong to nobody any more, which is shown as user 0."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))

_NETLINK_SOCK_DIAG = 4
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
"""``inet_diag_msg``: family, state, timer, retransmits; after the ends: expiry, two queues, user, inode."""
_ANSWER_BYTES_MAX = 4096


def place_of(address: tuple[str, int]) -> Place:
    """An address as it is, also where an IPv6 socket shows an IPv4 one."""
    host = ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return mapped or host, address[1]


def user_of(theirs: Place, ours: Place) -> int | None:
    """Find who made the other end of a connection; None where nobody is found."""
    user = user_by_question(theirs, ours)
    return user if user is not None else user_by_table(theirs, ours)


def user_by_question(theirs: Place, ours: Place) -> int | None:
    """Ask for this one socket; None where the kernel has no such one, or answers no such questions."""
    family = socket.AF_INET if theirs[0].version == 4 else socket.AF_INET6  # noqa: PLR2004  a version
    ports = socket.htons(theirs[1]), socket.htons(ours[1])
    hosts = [host.packed.ljust(16, b"\0") for host, _port in (theirs, ours)]
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED, *ports, *hosts, 0, *_ANY_COOKIE)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(0)  # it has answered when the question is sent
            kernel.sendto(
                _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST, 0, 0) + question, (0, 0)
            )
            answer = kernel.recv(_ANSWER_BYTES_MAX)
    except OSError:
        return None
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    family, state, _, _, *found, _, _, _, _, _, _, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    if family == socket.AF_INET6:  # it made a socket of version 6, though it may have named addresses of version 4
        hosts = [_mapped(host) for host, _port in (theirs, ours)]
    is_it = found == [*ports, *hosts] and state == _ESTABLISHED and inode
    return int(user) if is_it else None


def user_by_table(theirs: Place, ours: Place, tables: Iterable[Path] = _TABLES) -> int | None:
    """Look through all sockets that there are."""
    wanted = set(zip(_written(theirs), _written(ours), strict=True))
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


def _mapped(host: IPv4Address | IPv6Address) -> bytes:
    """An address as one of version 6."""
    return host.packed if isinstance(host, IPv6Address) else b"\0" * 10 + b"\xff\xff" + host.packed


def _written(place: Place) -> Iterator[str]:
    """As the table has it: the words of the address as the machine's numbers; IPv4 in both ways."""
    host, port = place
    for packed in (host.packed, _mapped(host)):
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        yield "".join(f"{word:08X}" for word in words) + f":{port:04X}"
