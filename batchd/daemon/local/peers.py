"""Who may connect, by the kernel's word. DAEMON process.

The runtime directory's mode keeps strangers out; this is the second lock, for a directory whose
mode somebody has opened. Allowed are root, the daemon's own user, and members of the directory's
group. Source: unix(7), SO_PEERCRED and SO_PEERGROUPS.

The kernel translates all numbers into the daemon's namespaces. Root of a container with users of
its own is the user that started it. Where the daemon itself is in such a container, it sees many as
one number, by which nobody can be known.
"""

import errno
import os
import socket
import stat
import struct
from typing import NamedTuple

from batchd_wire.runtime import unmapped_id

SO_PEERGROUPS = 59
"""asm-generic/socket.h; the socket module does not name it."""
GROUPS_BYTES_MAX = 1024
"""The most that Python's ``getsockopt`` takes: 256 groups."""
_CREDENTIALS = struct.Struct("iII")
_GROUP_BYTES = 4


class Peer(NamedTuple):
    """Process, user and primary group at the other end, as they were when it connected.

    ``pid`` is None for a process that has none here: it is outside of the container in which the
    daemon runs.
    """

    pid: int | None
    user: int
    group: int


def peer_of(lifeline: socket.socket) -> Peer:
    """Ask the kernel who connected."""
    raw = lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(raw)
    return Peer(pid or None, user, group)


def may_connect(lifeline: socket.socket, peer: Peer, directory: os.stat_result) -> bool:
    """Is the peer root, the daemon's user, or in the runtime directory's group?

    Of a peer in more than 256 groups only the primary one counts. Where numbers do not tell who
    somebody is, the kernel's word counts, which let him into a directory that is closed to
    strangers.
    """
    nobody, no_group = unmapped_id("uid"), unmapped_id("gid")
    if is_ours(peer.user):
        return True
    if directory.st_gid != no_group and directory.st_gid in _groups(lifeline, peer):
        return True
    return (nobody == peer.user or no_group == directory.st_gid) and not directory.st_mode & stat.S_IRWXO


def is_ours(user: int) -> bool:
    """Is a peer's user root, or the daemon's own, as far as its number tells?"""
    return user in {0, os.geteuid()} and user != unmapped_id("uid")


def why_not(peer: Peer, directory: os.stat_result) -> str:
    """Say why a peer was not let in."""
    if unmapped_id("gid") == directory.st_gid or unmapped_id("uid") == peer.user:
        return (
            "user or group is not mapped into the daemon's user namespace, and the runtime directory is open to everybody, so "
            "the daemon cannot tell members of its group from others: close the directory (chmod o-rwx)"
        )
    return f"user {peer.user} is not in the group of the runtime directory"


def _groups(lifeline: socket.socket, peer: Peer) -> set[int]:
    try:
        raw = lifeline.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return {peer.group}
    return {peer.group, *struct.unpack(f"{len(raw) // _GROUP_BYTES}I", raw)}
