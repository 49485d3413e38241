"""Who asks over HTTP, and what he may see. OBSERVER process.

    Host header     names this machine, or the request came from a web page that only says so (DNS rebinding)
    details         for root, the daemon's user and the runtime directory's group, over loopback: who may connect to the daemon

On loopback both ends of a connection are in the kernel's table, each with the user who made it. Source: proc(5), /proc/net/tcp.
Invariant: in doubt a visitor is nobody.
"""

import os
import pwd
import socket
import struct
from collections.abc import Iterable, Iterator
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from batchd_wire.runtime import unmapped_id

_ESTABLISHED = "01"
"""A connection that is being closed may belong to nobody any more, which the table shows as user 0."""
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LOCALHOST = "localhost"

Place = tuple[IPv4Address | IPv6Address, int]


class Visitors:
    """``host`` is what the configuration calls us, ``directory`` the runtime directory, whose group may see details."""

    def __init__(self, directory: Path, host: str, *, details_for_all: bool = False) -> None:
        self._directory = directory
        self._names = {_LOCALHOST, host.lower(), socket.gethostname().lower()}
        self._details_for_all = details_for_all

    def knows_host(self, header: str) -> bool:
        """Is this what somebody who means us writes? An address cannot be made to mean another machine, as a name can."""
        written = header.strip().lower()
        in_brackets = written.startswith("[")
        name = written[1:].partition("]")[0] if in_brackets else written.partition(":")[0]
        try:
            ip_address(name)
        except ValueError:
            return not in_brackets and self._is_ours(name.removesuffix("."))
        return True

    def _is_ours(self, name: str) -> bool:
        """Is it a name of this machine? Its whole one is asked for only where no other will do, as that may take a moment."""
        return name in self._names or name == _whole_name()

    def may_see_details(self, connection: socket.socket) -> bool:
        """May who is at the other end see process ids, users and paths?"""
        if self._details_for_all:
            return True
        try:
            theirs, ours = _place(connection.getpeername()), _place(connection.getsockname())
        except OSError:
            return False
        if not theirs[0].is_loopback:
            return False
        user = user_of(theirs, ours)
        return user is not None and self._is_insider(user)

    def _is_insider(self, user: int) -> bool:
        if user == unmapped_id("uid"):
            return False
        if user in {0, os.geteuid()}:
            return True
        group = self._directory.stat().st_gid
        return group != unmapped_id("gid") and group in groups_of(user)


@cache
def _whole_name() -> str:
    """The name of this machine with its domain, as its own resolver has it: nobody else can choose that."""
    return socket.getfqdn().lower()


def user_of(theirs: Place, ours: Place, tables: Iterable[Path] = _TABLES) -> int | None:
    """Find who made the other end of a connection between two addresses of this machine; None where nobody is found."""
    wanted = set(zip(_written(theirs), _written(ours), strict=True))
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _number, local, remote, state, _queues, _timer, _retransmits, user, _timeout, inode, *_rest = line.split()
            if (local, remote) in wanted and state == _ESTABLISHED and inode != "0":
                return int(user)
    return None


def groups_of(user: int) -> frozenset[int]:
    """All groups of a user, as the system's databases have them."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return frozenset()
    return frozenset({*os.getgrouplist(entry.pw_name, entry.pw_gid)})


def _place(address: tuple[str, int]) -> Place:
    """An address as it is, also where an IPv6 socket shows an IPv4 one."""
    host = ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return mapped or host, address[1]


def _written(place: Place) -> Iterator[str]:
    """As the table has it: the words of the address as the machine's numbers; IPv4 in both ways."""
    host, port = place
    for packed in [host.packed] + ([b"\0" * 10 + b"\xff\xff" + host.packed] if host.version == 4 else [host.packed]):  # noqa: PLR2004  a version
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        yield "".join(f"{word:08X}" for word in words) + f":{port:04X}"
