"""What this machine is called, for the Host header. OBSERVER process.

Only a resolver knows the machine's whole name, and it may take seconds or know nothing yet at boot,
so a thread asks it, again and again until it has said one; requests read what is known by then.
"""

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from threading import Event, Thread

LOCALHOST = "localhost"
AGAIN_S = 60.0


class Names:
    """``given`` is what the configuration calls us. Use ``know`` from any thread; nothing waits there."""

    def __init__(self, given: Iterable[str]) -> None:
        self._names = frozenset({LOCALHOST, socket.gethostname().lower(), *(name.lower() for name in given)})
        self._closed = Event()

    def start(self) -> None:
        """Begin to ask for the whole name. Paired with ``close``."""
        Thread(target=self._find, name="names", daemon=True).start()

    def close(self) -> None:
        """Ask no more; a resolver that has not answered yet is not waited for."""
        self._closed.set()

    def know(self, header: str) -> bool:
        """Is this what somebody who means us writes? An address cannot be made to mean another machine, as a name can."""
        written = header.strip().lower()
        in_brackets = written.startswith("[")
        name = written[1:].partition("]")[0] if in_brackets else written.partition(":")[0]
        try:
            ip_address(name)
        except ValueError:
            return not in_brackets and name.removesuffix(".") in self._names
        return True

    def _find(self) -> None:
        while not self._closed.is_set():
            name = whole_name()
            self._names |= {name}
            if "." in name:
                return
            self._closed.wait(AGAIN_S)


def whole_name() -> str:
    """The name of this machine with its domain, as its own resolver has it: nobody else can choose that."""
    return socket.getfqdn().lower()
