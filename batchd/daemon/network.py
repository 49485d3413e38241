"""The sockets of the TCP side, and who answers on which: trainers, the end of their connections, keys. DAEMON process."""

from typing import Any

import zmq

from batchd.daemon.authenticator import Authenticator
from batchd.daemon.outbox import Outbox
from batchd.daemon.remote import RemoteSessions


class Network:
    """Everything that trainers on other hosts need. ``authenticator`` None: no keys, loopback alone."""

    def __init__(self, remote: RemoteSessions, outbox: Outbox, authenticator: Authenticator | None) -> None:
        self.remote = remote
        self._outbox = outbox
        self._authenticator = authenticator

    def register(self, poller: zmq.Poller) -> None:
        """Have the loop wait for these sockets too."""
        poller.register(self.remote.router, zmq.POLLIN)
        poller.register(self.remote.monitor, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)

    def receive(self, ready: dict[Any, int]) -> bool:
        """Take what has come; true where there may be more from trainers."""
        self.remote.audit()
        if self._authenticator is not None and self._authenticator.socket in ready:
            self._authenticator.answer()
        if self.remote.router in ready:
            return self.remote.receive()
        if self.remote.monitor in ready:
            self.remote.note_ends()
        return False

    def close(self) -> None:
        """End every remote session, then let go of what was being sent."""
        self.remote.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._outbox.close()
