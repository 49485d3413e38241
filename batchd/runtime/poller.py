"""Waits for descriptors, ZeroMQ's sockets, timers and signals; calls their handlers. Every loop.

    zmq.Poller( ZeroMQ's sockets | epoll( all other descriptors ) ), until the next timer is due
                      |                            |                              |
             returned by ``wait``      ``watch``: their handlers     ``every``, ``at``: the same

One epoll has all descriptors, so waiting costs the same with two trainers and with two hundred. A
loop reads ZeroMQ's sockets itself, in portions.

The time of a timer that depends on other state is a function of that state. ``wait`` calls it each
time, so no one has to set, move or cancel such a timer.

Invariant: handlers run in the thread that waits, and in a wait a timer runs once at most.
"""

import os
import select
import signal
import socket
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

import zmq

EVENTS_AT_ONCE = 256
SIGNALS_AT_ONCE = 64
"""Signals read at once; more stay in the socket."""


@dataclass(slots=True, eq=False)
class Timer:
    """A handler that is due every ``period_s`` seconds, first at once; see ``Poller.every``."""

    period_s: float
    handler: Callable[[], object]
    only_if: Callable[[], object]
    _next_s: float = -inf

    def due_s(self) -> float:
        """The time at which it is due; never while ``only_if`` says no."""
        return self._next_s if self.only_if() else inf

    def run(self, now_s: float) -> None:
        """Call the handler, which is due. Timers that began together stay due together."""
        next_s = self._next_s + self.period_s
        # rounded, as half a second twice shall be a second
        self._next_s = round(next_s if next_s > now_s else now_s + self.period_s, 6)
        self.handler()

    def hasten(self) -> None:
        """Be due at once; the next period begins then."""
        self._next_s = -inf


class Poller:
    """Calls handlers: of each descriptor that is readable or hung up, and of each due timer."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._sockets = zmq.Poller()
        self._timers: list[tuple[Callable[[], float], Callable[[], object]]] = []
        """Each with the function that says when it is due."""
        self._now_s = -inf
        """The time of the last ``run_due``, the same for all timers."""

    def fileno(self) -> int:
        """The epoll's own descriptor, readable when a watched one is."""
        return self._epoll.fileno()

    def watch(self, descriptor: int, handler: Callable[[], object]) -> None:
        """Watch a descriptor. Paired with ``unwatch``, before it is closed. Raises ``OSError``."""
        assert descriptor not in self._handlers, f"descriptor {descriptor} is watched already"
        self._epoll.register(descriptor, select.EPOLLIN)
        self._handlers[descriptor] = handler

    def wait_to_write(self, descriptor: int, *, wanted: bool) -> None:
        """Call its handler, too, when a watched descriptor takes something again; or no more."""
        self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching; no matter if it was not watched."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def watch_socket(self, peers: "zmq.Socket[bytes]") -> None:
        """Have ``wait`` return a socket of ZeroMQ when it is readable. See ``unwatch_socket``."""
        if not self._sockets.sockets:
            self._sockets.register(self._epoll.fileno(), zmq.POLLIN)
        self._sockets.register(peers, zmq.POLLIN)

    def unwatch_socket(self, peers: "zmq.Socket[bytes]") -> None:
        """Stop watching a socket, before it is closed."""
        self._sockets.unregister(peers)

    def every(
        self, seconds: float, handler: Callable[[], object], only_if: Callable[[], object] = lambda: True
    ) -> Timer:
        """Call ``handler`` at once, and then every ``seconds`` while ``only_if`` is true."""
        timer = Timer(seconds, handler, only_if)
        self.at(timer.due_s, lambda: timer.run(self._now_s))
        return timer

    def at(self, due_s: Callable[[], float], handler: Callable[[], object]) -> None:
        """Call ``handler`` at the time that ``due_s`` returns, of the monotonic clock; inf: never.

        What the handler does has to lead to a later time.
        """
        self._timers.append((due_s, handler))

    def wait(self, *, is_busy: bool = False) -> Container[object]:
        """Wait until something is ready or due, then call handlers; return ZeroMQ's ready sockets.

        ``is_busy``: only look, as the caller has more to do.
        """
        due_s = -inf if is_busy else min((due_s() for due_s, _handler in self._timers), default=inf)
        timeout_s = -1 if due_s == inf else max(0.0, due_s - monotonic())
        if not self._sockets.sockets:
            self.dispatch(timeout_s)
            self.run_due()
            return ()
        ready = dict(self._sockets.poll(ceil(1000 * timeout_s)))
        self.dispatch()
        self.run_due()
        return ready

    def dispatch(self, timeout_s: float = 0.0) -> None:
        """Call the handler of each ready descriptor, unless one has removed or replaced it."""
        events = self._epoll.poll(timeout_s, EVENTS_AT_ONCE)
        for descriptor, handler in [(number, self._handlers.get(number)) for number, _events in events]:
            if handler is not None and self._handlers.get(descriptor) is handler:
                handler()

    def run_due(self) -> None:
        """Call the handlers of the timers that are due."""
        self._now_s = monotonic()
        for due_s, handler in self._timers:
            if due_s() <= self._now_s:
                handler()

    def close(self) -> None:
        """Stop watching everything."""
        self._epoll.close()
        self._handlers.clear()
        self._timers.clear()


class Signals:
    """Signals through a descriptor, which the loop reads.

    Calls ``received`` from the loop for each of some signals, until it is closed.
    """

    def __init__(
        self, poller: Poller, numbers: Sequence[signal.Signals], received: Callable[[signal.Signals], None]
    ) -> None:
        self._poller = poller
        self._received = received
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        # The descriptor is set before the handlers: a signal between the two would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        # The handlers do nothing: the interpreter writes the signal's number to the descriptor.
        self._before = {number: signal.signal(number, lambda _number, _frame: None) for number in numbers}
        poller.watch(self._ours.fileno(), self._read)

    def close(self) -> None:
        """Put everything back as it was."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._poller.unwatch(self._ours.fileno())
        self._ours.close()
        self._theirs.close()

    def _read(self) -> None:
        for number in os.read(self._ours.fileno(), SIGNALS_AT_ONCE):
            self._received(signal.Signals(number))
