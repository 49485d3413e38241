"""Sockets of peers that nobody trusts, and the limit of descriptors. DAEMON process.

A Unix socket carries descriptors, and the last holder of one waits for its release: as long as a
TCP socket with SO_LINGER asks for, or a hung file server. A peer that sends one and closes its own
makes whoever reads, or closes, the socket that last holder.

    kernel since 6.16   SO_PASSRIGHTS = 0 on the listener: sending a descriptor fails for the peer
    older ones          a look before each read; a peer that sends one is disconnected, and a thread
                        closes the peers' sockets with all that is in them

Invariant: the loop never reads, and never releases, a descriptor that a peer has sent.
"""

import os
import resource
import socket
from collections import deque
from contextlib import suppress
from threading import Lock, Thread

SO_PASSRIGHTS = 83
"""asm-generic/socket.h, since Linux 6.16; the socket module does not name it."""
CLOSING_THREADS_MAX = 8
"""A close that waits keeps one of them."""


class DescriptorSent(ConnectionError):  # noqa: N818  an event, not an error of ours
    """A peer has sent a descriptor, which no peer may."""


class PeerSockets:
    """Reads and closes sockets whose peers are not trusted. See the module."""

    def __init__(self) -> None:
        self.may_carry = False
        """Whether the kernel lets a peer put descriptors into some of the sockets."""
        self._closing: deque[int] = deque()
        self._lock = Lock()
        """Of the two attributes around it."""
        self._threads = 0

    def refuse_descriptors(self, peers: socket.socket) -> None:
        """Refuse descriptors over this socket, and over those that it will accept."""
        try:
            peers.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        except OSError:  # an older kernel
            self.may_carry = True

    def receive(self, peer: socket.socket, bytes_max: int) -> bytes:
        """Receive bytes. Raises ``DescriptorSent`` before it takes one, and ``OSError``."""
        # no byte behind those that were looked at: one with a descriptor may have come meanwhile
        return peer.recv(self.look(peer, bytes_max) if self.may_carry else bytes_max)

    def look(self, peer: socket.socket, bytes_max: int = 1) -> int:
        """Return how many bytes can be received. Raises ``DescriptorSent``, and ``OSError``."""
        try:
            data, _none, flags, _address = peer.recvmsg(bytes_max, 0, socket.MSG_PEEK)
        except ConnectionResetError:  # told once; what the peer sent before that is behind it
            data, _none, flags, _address = peer.recvmsg(bytes_max, 0, socket.MSG_PEEK)
        if flags & socket.MSG_CTRUNC:  # there was no room for it: no reference was taken
            raise DescriptorSent("a descriptor came with it")
        return len(data)

    def close(self, peer: socket.socket) -> None:
        """Close a socket without waiting for what is in it."""
        if not self.may_carry:
            peer.close()
            return
        with suppress(OSError):  # the other side has hung up already
            peer.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closing.append(peer.detach())
            if self._threads < min(len(self._closing), CLOSING_THREADS_MAX):
                with suppress(RuntimeError):  # no thread can be had now: the next close tries again
                    Thread(target=self._close_each, name="closing", daemon=True).start()
                    self._threads += 1

    def _close_each(self) -> None:
        """Close what waits for it. Runs in a thread of its own."""
        while True:
            with self._lock:
                if not self._closing:
                    self._threads -= 1
                    return
                descriptor = self._closing.popleft()
            os.close(descriptor)


def allow_descriptors() -> None:
    """Raise the soft limit to the hard one: slots soon take the usual 1024, meant for select()."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
