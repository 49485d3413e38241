"""What the service manager is told of the daemon: systemd's notification protocol. DAEMON process.

    NOTIFY_SOCKET   <- READY=1, STATUS=, WATCHDOG=1, RELOADING=1, STOPPING=1, EXTEND_TIMEOUT_USEC=   (sd_notify(3))

Each message is one datagram. Without a service manager nothing is sent. The variables are taken out
of the environment, so that neither workers nor people's own functions in them speak for the daemon.

Invariant: telling never waits and never fails: what a full or vanished socket does not take is
lost, and whoever watches the daemon then acts as if it had been silent.
"""

import os
import socket
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from time import monotonic_ns
from typing import Self

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"
EXTENSION_S = 60.0
"""How long the service manager waits for the next word of a start that makes progress, once its own time-out is over."""
MICROSECONDS_IN_S = 1_000_000
NANOSECONDS_IN_MICROSECOND = 1_000


class Notifier:
    """The way to the service manager. ``watchdog_s``: it acts when it hears of no progress for so long; None: never."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address is not None and address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """Take the service manager's variables out of the environment; another process's watchdog is not ours."""
        address = environment.pop(SOCKET_VARIABLE, None)
        interval_us = environment.pop(WATCHDOG_VARIABLE, "")
        watched = environment.pop(WATCHDOG_PID_VARIABLE, "") in {"", str(os.getpid())}
        if not address or address[0] not in "/@":
            return cls()
        is_watched = watched and interval_us.isdecimal() and int(interval_us) > 0
        return cls(address, int(interval_us) / MICROSECONDS_IN_S if is_watched else None)

    @property
    def is_heard(self) -> bool:
        """Is there anybody to tell?"""
        return self._socket is not None

    def ready(self, status: str) -> None:
        """Trainers may come, or a reload is over."""
        self._tell(["READY=1", _status(status)])

    def status(self, text: str) -> None:
        """Say in a line how things are, for ``systemctl status``."""
        self._tell([_status(text)])

    def reloading(self, status: str) -> None:
        """The configuration is being read again; ``ready`` follows, whatever comes of it."""
        now_us = monotonic_ns() // NANOSECONDS_IN_MICROSECOND
        self._tell(["RELOADING=1", f"MONOTONIC_USEC={now_us}", _status(status)])

    def stopping(self, status: str) -> None:
        """Nothing new is begun any more."""
        self._tell(["STOPPING=1", _status(status)])

    def progressed(self) -> None:
        """Feed the watchdog. For whoever has just got on, and for nobody else."""
        if self.watchdog_s is not None:
            self._tell(["WATCHDOG=1"])

    def scanning(self, status: str) -> None:
        """A scan gets on: a start, or a reload, may take longer than it usually does.

        sd_notify(3) speaks of starting and stopping alone, but the service manager moves the
        time-out of whatever it is waiting for, ``ExecReload=`` among it, and with it the
        watchdog's.
        """
        self._tell([f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * MICROSECONDS_IN_S)}", _status(status)])

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, lines: Iterable[str]) -> None:
        if self._socket is None:
            return
        assert self._address is not None
        with suppress(OSError):  # full or gone: whoever waits for it must not hold the daemon up
            self._socket.sendto("\n".join(lines).encode(errors="replace"), self._address)


def _status(text: str) -> str:
    """One line whatever is in the text: a second one would be a message of its own."""
    return f"STATUS={' '.join(text.split())}"
