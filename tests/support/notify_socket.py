"""A service manager's notification socket for tests: receives the daemon's messages."""

import socket
from pathlib import Path


class NotifySocket:
    """A bound datagram socket.

    ``address`` as in ``NOTIFY_SOCKET``: a path, or an abstract name that begins with @.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.address[1:] if self.address.startswith("@") else self.address)
        self.history: list[list[str]] = []
        """The lines of all messages so far."""

    def heard(self) -> list[list[str]]:
        """Return the lines of each message since the last call."""
        new = []
        while True:
            try:
                new.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                self.history += new
                return new

    def has_heard(self, line: str) -> bool:
        """Return whether any line so far starts with this text."""
        self.heard()
        return any(told.startswith(line) for message in self.history for told in message)

    def close(self) -> None:
        """Close the socket, so that no process listens on it."""
        self._socket.close()
