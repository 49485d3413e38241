"""Who may connect, by the kernel's word. DAEMON process.

The runtime directory's mode keeps strangers out; this is the second lock, for a directory whose mode somebody has opened. Allowed
are root, the daemon's own user, and members of the directory's group. Source: unix(7), SO_PEERCRED and SO_PEERGROUPS.
"""

import errno
import os
import socket
import struct
from typing import NamedTuple

SO_PEERGROUPS = 59
"""asm-generic/socket.h; the socket module does not name it."""
GROUPS_BYTES_MAX = 1024
"""The most that Python's ``getsockopt`` takes: 256 groups."""
_CREDENTIALS = struct.Struct("3i")
_GROUP_BYTES = 4


class Peer(NamedTuple):
    """Process, user and primary group at the other end, as they were when it connected."""

    pid: int
    user: int
    group: int


def peer_of(lifeline: socket.socket) -> Peer:
    """Ask the kernel who connected."""
    return Peer(*_CREDENTIALS.unpack(lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def may_connect(lifeline: socket.socket, peer: Peer, directory_group: int) -> bool:
    """Is the peer root, the daemon's user, or in the runtime directory's group?

    Of a peer in more than 256 groups only the primary one counts.
    """
    if peer.user in {0, os.geteuid()} or peer.group == directory_group:
        return True
    try:
        raw = lifeline.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return False
    return directory_group in struct.unpack(f"{len(raw) // _GROUP_BYTES}I", raw)
