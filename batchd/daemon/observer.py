"""The process that answers HTTP: its socket, session and restarts. DAEMON process; no HTTP code.

    bind, early: an address that was set and cannot be bound is reported before any scan
    start [-> first visitor] -> observer -> it ends -> growing pause -> observer -> ... -> close

At the default address the observer is started for its first visitor, since most daemons have none
there; where an address was set, from the beginning. If another program has the default address, the
daemon starts without HTTP, and listens as soon as the address is free.

Invariant: the observer has exactly its listening socket and its lifeline, and is enclosed, unless
the operator wants no sandbox. The daemon keeps the
socket open, so the next observer answers requests that arrive without one.
"""

import errno
import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic, sleep
from typing import Self

import structlog

from batchd.config.schema import problem_at
from batchd.config.tree import DaemonConfig
from batchd.errors import ConfigInvalid, ProblemKind, why_no_process
from batchd.runtime.addresses import EVERYWHERE, parse_http
from batchd.runtime.children import DEVNULL, PAUSE_FIRST_S, PAUSE_MAX_S, Child, start_linked
from batchd.runtime.poller import Poller
from batchd_wire.record import frozen
from batchd_wire.runtime import RuntimeDirectory

_log = structlog.get_logger()

Adopt = Callable[[socket.socket, int], None]
"""Takes the daemon's end of a lifeline, and the pid at the other end, as a session."""

BACKLOG = 128
END_TIMEOUT_S = 1.0
BIND_PATIENCE_S = 2.0
"""The observer of a killed daemon keeps the address until it notices the death."""
BIND_PAUSE_S = 0.05


@frozen
class HttpSocket:
    """A bound socket and the names of this machine; without a socket HTTP is disabled."""

    listener: socket.socket | None = None
    names: tuple[str, ...] = ()
    details_for_all: bool = False
    is_asked_for: bool = False
    """Whether the configuration sets the address."""
    later: tuple[str, int] | None = None
    """The host and port to listen on once another program does not."""

    @property
    def address(self) -> str | None:
        """The URL; None without a socket."""
        if self.listener is None:
            return None
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def close(self) -> None:
        """Let go of the address."""
        if self.listener is not None:
            self.listener.close()


def open_http(daemon: DaemonConfig, *, is_embedded: bool) -> HttpSocket:
    """Bind the configured address. Raises ``ConfigInvalid`` if one was set and cannot be bound.

    The result has no socket if HTTP is disabled. If the default address is taken, which is logged,
    nothing waits for it: ``ObserverProcess`` tries it again.
    """
    is_asked_for = "http" in daemon.model_fields_set
    place = parse_http(daemon.http) if is_asked_for or not is_embedded else None
    if place is None:
        return HttpSocket()
    names = place[0], *(daemon.http_names or ())
    try:
        listener = _bind_soon(*place) if is_asked_for else _bind(*place)
        return HttpSocket(listener, names, daemon.http_details, is_asked_for)
    except OSError as error:
        reason = f"cannot listen on {daemon.http}: {(error.strerror or str(error)).lower()}"
        advice = 'set http in [daemon] to another address, or to "off"'
        if is_asked_for:
            raise ConfigInvalid(
                [problem_at(("daemon", "http"), ProblemKind.UNUSABLE_ADDRESS, f"{reason}; {advice}")]
            ) from None
        _log.warning("HTTP disabled", reason=reason, advice=f"it is tried again; to use both, {advice}")
        return HttpSocket(None, names, daemon.http_details, later=place)


def _bind_soon(host: str, port: int) -> socket.socket:
    """Bind an address that another process may be about to release. Raises ``OSError``."""
    deadline_s = monotonic() + BIND_PATIENCE_S
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or monotonic() >= deadline_s:
                raise
            sleep(BIND_PAUSE_S)


def _bind(host: str, port: int) -> socket.socket:
    """Bind, and listen at once: two daemons can bind one address without it. Raises ``OSError``."""
    if host == EVERYWHERE:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104  the user wrote the star
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _name, address = found[0]
    with ExitStack() as where_it_fails:
        door = where_it_fails.enter_context(socket.socket(family, kind, protocol))
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        door.bind(address)
        door.listen(BACKLOG)
        where_it_fails.pop_all()
    return door


class ObserverProcess:
    """Keeps one observer alive, if HTTP is enabled. Use as a context manager."""

    _adopt: Adopt

    def __init__(
        self,
        poller: Poller,
        door: HttpSocket,
        place: RuntimeDirectory,
        may_read: Callable[[], Sequence[str] | None] = lambda: None,
    ) -> None:
        """``may_read``: what it reads besides its own if it is enclosed, or None if it is not."""
        self._may_read = may_read
        self._poller = poller
        self._door = door
        self._place = place
        self._child: Child | None = None
        self._started_s = 0.0
        self._pause_s = PAUSE_FIRST_S
        self._due_s: float | None = None

    @property
    def address(self) -> str | None:
        """The URL; None if HTTP is disabled."""
        return self._door.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the socket and end the observer, whose lifeline was closed before."""
        if self._door.listener is not None:
            self._poller.unwatch(self._door.listener.fileno())
        self._door.close()
        if self._child is not None:
            self._poller.unwatch(self._child.pidfd)
            self._child.end(END_TIMEOUT_S)
            self._child = None

    def start(self, adopt: Adopt) -> None:
        """Answer HTTP from now on: start the first observer, or wait for its first visitor."""
        self._adopt = adopt
        if self._door.listener is not None:
            self._await_visitors(self._door.listener)
        elif self._door.later is not None:
            self._due_s = monotonic() + self._pause_s

    def _await_visitors(self, listener: socket.socket) -> None:
        if self._door.is_asked_for:
            self._spawn()
        else:
            self._poller.watch(listener.fileno(), self._on_first_visitor)
        _log.info("observing", http=self.address)

    def _listen_again(self, host: str, port: int) -> None:
        """Listen on the address that was taken, or try it later."""
        try:
            listener = _bind(host, port)
        except OSError:
            self._due_s = monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            return
        self._pause_s = PAUSE_FIRST_S
        self._door = replace(self._door, listener=listener, later=None)
        self._await_visitors(listener)

    def _on_first_visitor(self) -> None:
        """Start the observer, which accepts the connection."""
        assert self._door.listener is not None
        self._poller.unwatch(self._door.listener.fileno())
        self._spawn()

    def tick(self) -> None:
        """Start another observer when it is due, or listen again."""
        if self._due_s is not None and monotonic() >= self._due_s:
            self._due_s = None
            if self._door.later is not None:
                self._listen_again(*self._door.later)
            else:
                self._spawn()

    def _spawn(self) -> None:
        self._started_s = monotonic()
        try:
            self._start()
        except OSError as error:
            self._put_off("observer not started", reason=why_no_process(error))

    def _start(self) -> None:
        """Start one with a lifeline. Raises ``OSError``, and then there is none."""
        assert self._door.listener is not None
        listener = self._door.listener.fileno()
        details = "all" if self._door.details_for_all else "insiders"
        may_read = json.dumps(self._may_read())
        arguments = [str(listener), os.fspath(self._place.path), details, may_read, *self._door.names]
        child, lifeline = start_linked(
            "batchd.observe.http",
            *arguments,
            descriptors=[listener],
            stdout=DEVNULL,
            # its threads do little, and would have an arena each
            environment={"MALLOC_ARENA_MAX": "1"},
        )
        with ExitStack() as where_it_fails:
            where_it_fails.enter_context(lifeline)
            where_it_fails.enter_context(child)
            self._poller.watch(child.pidfd, self._on_exit)
            where_it_fails.callback(self._poller.unwatch, child.pidfd)
            lifeline.setblocking(False)
            self._adopt(lifeline, child.pid)
            where_it_fails.pop_all()
        self._child = child

    def _on_exit(self) -> None:
        assert self._child is not None
        self._poller.unwatch(self._child.pidfd)
        pid, status = self._child.pid, self._child.reap()
        self._child = None
        self._put_off("observer ended", pid=pid, status=status)

    def _put_off(self, event: str, **facts: object) -> None:
        """Retry later; soon after an observer that lived for a while."""
        now = monotonic()
        if now - self._started_s > PAUSE_MAX_S:
            self._pause_s = PAUSE_FIRST_S
        self._due_s = now + self._pause_s
        _log.warning(event, **facts, again_in_s=self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
