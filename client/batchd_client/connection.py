"""The connection to one daemon, across its restarts. Runs in the trainer.

    run(operation):  lock -> usable session, else reopen with back-off -> operation(session)
                                                                       -> SessionLost: once more

There is one session at a time, and one thread in it at a time. Threads may share a connection, but
they take turns: an operation has the session to itself, and only waits run outside (a waiting
thread looks again after ``TURN_S`` at the latest). Two threads at full speed need two connections.

The next daemon needs the memory of the dead one's slots. So a trainer that waits for a daemon keeps
only the memory of living batches, and drops that of the program's other, idle connections, too.
Memory registered with a device is the exception: only the thread that used a connection last can
unregister it.

Invariant: after any outcome of ``operation``, the connection is usable or opens a new session at
its next use. Positions are in the streams, so nothing is lost with a session.
"""

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from weakref import WeakMethod, WeakValueDictionary

import zmq

from batchd_client import errors
from batchd_client.hints import Absence
from batchd_client.lifeline import DaemonBusy, SessionLost
from batchd_client.opening import Target, open_session, reason_of
from batchd_client.session import M, Session
from batchd_wire.codec import Message
from batchd_wire.record import frozen
from batchd_wire.runtime import RuntimeDirectory

PAUSE_S = 0.02
PAUSE_MAX_S = 1.0
PAUSES_PER_WAIT = 10
"""Part of the total wait that a pause may last on this host, where a failed try takes 0.1 ms.

So a daemon that is back after half a second is found within 0.05 s.
"""
TURN_S = 0.05
"""Interval at which a waiting thread checks what other threads released or received."""

_WORTH_WAITING = (OSError, DaemonBusy, errors.DaemonFull, errors.ConnectTimeout, errors.PermissionDenied)
"""Errors to retry after a lost session: the daemon is away, or its operator changes keys."""
_OF_A_SESSION = (OSError, MemoryError, RuntimeError, zmq.ZMQError, errors.BatchdClientError, SessionLost)
"""Errors that a dead session may raise: of the system, of ZeroMQ, or of a device (RuntimeError)."""

T = TypeVar("T")
V = TypeVar("V")

_connections: "WeakValueDictionary[int, Connection]" = WeakValueDictionary()
"""The program's connections by ``id``; a dictionary, as threads add some while others iterate."""


@frozen
class Deadlines:
    """Timeouts of each kind of wait, in seconds."""

    connect_timeout_s: float
    reconnect_timeout_s: float
    batch_timeout_s: float

    def request_deadline(self) -> float:
        """Deadline of a request that is sent now, by ``time.monotonic``."""
        return time.monotonic() + self.connect_timeout_s


class Connection:
    """See the module. Takes over ``session`` and the target's sockets."""

    def __init__(self, target: Target, session: Session, deadlines: Deadlines) -> None:
        self.place = target.place
        self._target = target
        self.deadlines = deadlines
        self.reconnects = 0
        self._lost_s: float | None = None
        """Time (``time.monotonic``) at which the daemon was lost; None while it is connected."""
        self._session: Session | None = session
        self._is_closed = False
        self._turn = target.sockets.turn
        self._lock = self._turn.lock
        self._owner = 0
        self._user = threading.get_ident()
        """The thread that used the connection last."""
        self._process = os.getpid()
        self._callbacks: list[WeakMethod[Callable[[], None]]] = []
        _connections[id(self)] = self
        Absence.returned(self.place.address)  # another connection may have missed it

    def run(self, operation: Callable[[Session], T]) -> T:
        """Run an operation on the session; repeat it on a new session if the daemon goes away.

        Raises ``DaemonClosed``, ``ForkedConnection``, ``ReentrantCall``, ``ReconnectTimeout`` and
        what ``operation`` raises.
        """
        try:
            return self._in_turn(self._run, operation)
        except errors.DaemonClosed:
            self._turn.delay()
            raise

    def request(self, make: Callable[[int], Message], answer: type[M]) -> M:
        """Return the answer to a request. Raises what ``run`` and ``Session.request`` raise."""
        return self.run(lambda session: session.request(make, answer, self.deadlines.request_deadline()))

    def run_if_usable(self, operation: Callable[[Session], None]) -> None:
        """Run an operation if there is a session, for closing. Does nothing in a forked child."""
        if os.getpid() == self._process:
            self._in_turn(self._run_if_usable, operation)

    def wait(self, seconds: float) -> None:
        """Wait for something to receive, at most ``TURN_S``; other threads may use the session."""
        session = self.session
        if session is not None and session.is_usable:
            session.wait(min(seconds, TURN_S))

    def close(self) -> None:
        """End the session. Living batches stay readable; their leases end with the last of them.

        After an interrupt, another ``close`` or the finalizer repeats it.
        """
        if os.getpid() == self._process:
            self._in_turn(self._close, None)
        else:  # a copy of the parent's connection: drop it, and say nothing to the daemon
            self._session = None

    @property
    def session(self) -> Session | None:
        """The present session; None once the connection is closed.

        The garbage collector may close it before other objects that use it, and the end of the
        program before other code runs.
        """
        return None if self._is_closed or self._has_ended else self._session

    @property
    def _has_ended(self) -> bool:
        return self._turn.is_over or self._target.sockets.is_destroyed

    def _in_turn(self, operation: Callable[[V], T], argument: V) -> T:
        if os.getpid() != self._process:
            raise errors.ForkedConnection
        caller = threading.get_ident()
        if self._owner == caller and self._lock.locked():
            raise errors.ReentrantCall
        with self._lock:
            self._owner = self._user = caller
            try:
                return operation(argument)
            finally:
                self._owner = 0

    def _run(self, operation: Callable[[Session], T]) -> T:
        give_up = None
        while True:
            session = self.session
            if session is None:
                raise errors.DaemonClosed
            if not session.is_usable:
                give_up = give_up or time.monotonic() + self.deadlines.reconnect_timeout_s
                session = self._reopen(session, give_up)
            try:
                return operation(session)
            except SessionLost:
                continue
            except errors.ProtocolError:
                session.leave()
                raise

    def _run_if_usable(self, operation: Callable[[Session], None]) -> None:
        session = self.session
        if session is None or not session.is_usable:
            return
        try:
            operation(session)
        except SessionLost:
            return  # what was to be ended has ended with the session

    def when_lost(self, let_go: Callable[[], None]) -> None:
        """Have a method called whenever the daemon is gone, to drop references to its slots."""
        self._in_turn(self._remember, WeakMethod(let_go))

    def _remember(self, let_go: "WeakMethod[Callable[[], None]]") -> None:
        self._callbacks = [one for one in self._callbacks if one() is not None] + [let_go]

    def drop_dead_session(self) -> None:
        """Drop a session that ended while no thread used it. Never waits for another thread.

        Errors do not concern the caller, which uses another connection: the next use of this
        connection meets them again, or opens a new session.
        """
        if os.getpid() != self._process or not self._lock.acquire(blocking=False):
            return
        self._owner = threading.get_ident()
        try:
            session = self.session
            if session is not None:
                self._drop_if_dead(session)
        finally:
            self._owner = 0
            self._lock.release()

    def _drop_if_dead(self, session: Session) -> None:
        if session.is_usable:
            try:
                session.check_link()
            except _OF_A_SESSION:
                session.is_interrupted = True
        if not session.is_usable:
            with suppress(*_OF_A_SESSION):
                self._let_go(session)

    def _let_go(self, session: Session) -> None:
        """Leave the session, and run the callbacks if this thread used the connection last."""
        session.leave()
        for method in [one() for one in self._callbacks] if self._owner == self._user else []:
            if method is not None:
                method()

    def _reopen(self, session: Session, give_up: float) -> Session:
        self._let_go(session)
        address = self.place.address
        since_s = self._lost_s = self._lost_s or time.monotonic()
        limit_s = self.deadlines.reconnect_timeout_s
        try:
            with Absence(address, since_s, give_up, f"reconnect_timeout_s={limit_s:g}") as absence:
                self._session = patiently_open(self._target, give_up, self.deadlines.connect_timeout_s, absence)
        except _WORTH_WAITING as error:
            raise errors.ReconnectTimeout(
                f"the daemon at {address} went away and did not come back within {limit_s:g} s; the last try ended with: "
                f"{reason_of(self.place, error)}"
            ) from error
        self.reconnects += 1
        self._lost_s = None
        return self._session

    def _close(self, _: None) -> None:
        self._is_closed = True
        if self._session is not None and self._has_ended:
            self._session.close()  # what could have been said can be said no more
        elif self._session is not None:
            self._session.leave()
        self._session = None
        self._target.sockets.destroy()


def patiently_open(
    target: Target,
    give_up: float,
    attempt_s: float,
    absence: Absence,
    may_pass: Callable[[Exception], bool] = lambda error: isinstance(error, _WORTH_WAITING),
) -> Session:
    """Retry until a session opens or ``give_up`` (``time.monotonic``) is near.

    Pauses grow, and are random. ``absence`` is logged meanwhile. ``may_pass`` tells whether a retry
    may help after an error. Raises the error of the last try that ``give_up`` did not cut off.
    """
    began_s, pause = time.monotonic(), PAUSE_S
    reason: Exception | None = None
    while True:
        try:
            session = open_session(target, min(give_up, time.monotonic() + attempt_s), absence.look)
        except (OSError, errors.BatchdClientError) as error:
            # A try that ``give_up`` cut off has the less helpful error, whatever it is over TCP.
            passes, now_s = may_pass(error), time.monotonic()
            if reason is None or not (isinstance(error, errors.ConnectTimeout) or (passes and now_s >= give_up)):
                reason = error
            if not passes or now_s + pause >= give_up:
                raise reason from reason.__cause__
        else:
            Absence.returned(target.place.address)
            return session
        for found in _connections.valuerefs():
            if (connection := found()) is not None:
                connection.drop_dead_session()
        absence.reason = reason_of(target.place, reason)
        absence.look()
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311  so that a thousand trainers do not come back at once
        is_near = isinstance(target.place, RuntimeDirectory)
        longer = (time.monotonic() - began_s) / PAUSES_PER_WAIT if is_near else 2 * pause
        pause = min(max(PAUSE_S, longer), PAUSE_MAX_S)
