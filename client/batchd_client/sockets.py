"""The ZeroMQ context of one connection, and every socket in it. Runs in the trainer.

    Connection ---> Sockets ~~finalize~~> the context, all open sockets

pyzmq's context has weak references to its sockets, and the garbage collector clears weak references
before it calls a finalizer. So a context that is destroyed there finds no socket to close, and
waits forever for their end. Therefore the references here are strong, and the registry of
finalizers holds them: a socket is never garbage before it is closed.

Invariant: after any interrupt, the next ``close_all`` or ``destroy`` closes what was opened here,
or the finalizer does: at the last reference to ``Sockets``, or at the end of the program.
"""

import os
import signal
import threading
import time
from _signal import pthread_sigmask  # type: ignore[import-not-found]  # signal's own is Python: a handler may end it first
from _thread import start_new_thread
from weakref import finalize, ref

import zmq

from batchd_client.errors import ThreadsExhausted
from batchd_wire.threads import TooFewThreads, await_ends, check_threads

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

EXIT_WAIT_S = 1.0
"""Wait of the program's end for a thread that uses the sockets."""
EXIT_QUIET_S = 5.0
"""Delay of a background thread at the program's end, which usually comes first."""
_SIGNALS = signal.valid_signals()


class Turn:
    """The right to use a connection: of the thread that has ``lock``; of none once ``is_over``.

    At the program's end the lock is free, so that a later close of the connection does not wait.
    """

    __slots__ = ("is_over", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_over = False

    def end(self) -> bool:
        """Wait until no thread uses the connection, then let none in. False on timeout."""
        if not self.is_over and self.lock.acquire(timeout=EXIT_WAIT_S):
            self.is_over = True
            self.lock.release()
        return self.is_over

    def delay(self) -> None:
        """Let the program end before a background thread learns that its connection ended."""
        if self.is_over and threading.current_thread() is not threading.main_thread():
            time.sleep(EXIT_QUIET_S)


class Sockets:
    """See the module. For one thread at a time, by ``turn``."""

    def __init__(self, connections: int) -> None:
        """Starts no thread: ZeroMQ starts its threads with the first socket."""
        self.turn = Turn()
        self._threads = connections + 1
        self._open: list[Socket] = []
        # the finalizer knows of it before it is one
        self._context: Context = zmq.Context.__new__(zmq.Context)
        self._end = finalize(self, _destroy_at_last, self._context, self._open, ref(self), os.getpid())
        _begin(self._context, connections)

    @property
    def is_destroyed(self) -> bool:
        """True once everything is closed."""
        return not self._end.alive

    def open(self, kind: int) -> Socket:
        """Make a socket; the caller or ``close_all`` closes it. Raises ``ThreadsExhausted``."""
        if self._threads:
            try:
                check_threads(self._threads)
            except TooFewThreads as error:
                raise ThreadsExhausted(f"ZeroMQ {error}") from None
            self._threads = 0
        socket = self._context.socket(kind, self._listed)
        socket.linger = 0
        return socket

    def monitor(self, socket: Socket, events: int) -> Socket:
        """Make a socket that receives the events of another one."""
        monitor = self.open(zmq.PAIR)
        address = f"inproc://monitor-{socket.underlying}"
        socket.monitor(address, events)
        monitor.connect(address)
        return monitor

    def _listed(self, context: Context, kind: int) -> Socket:
        """Make a socket, listed before it is open: an interrupt would leave it unlisted."""
        socket = zmq.Socket.__new__(zmq.Socket)
        self._open.append(socket)
        socket.__init__(context, kind)  # type: ignore[misc]
        return socket

    def close_all(self) -> None:
        """Close all open sockets, for example those of an interrupted session."""
        _close(self._open)

    def destroy(self) -> None:
        """Close all sockets and end ZeroMQ's threads. May be repeated after an interrupt."""
        _destroy(self._context, self._open)
        self._end.detach()


def _begin(context: Context, connections: int) -> None:
    """Initialise the context in a new thread, where no signal interrupts: pyzmq would lose it."""
    made = threading.Lock()
    made.acquire()
    started: list[int] = []

    def make() -> None:
        started.append(threading.get_native_id())
        try:
            context.__init__(connections)  # type: ignore[misc]
        finally:
            made.release()

    try:
        start_new_thread(make, ())
    except (RuntimeError, MemoryError):
        raise ThreadsExhausted(f"ZeroMQ needs {connections + 1} threads, and only 0 could be started") from None
    made.acquire()
    await_ends(started, 1)
    # ZeroMQ's threads never pre-empt the thread that wakes them. Otherwise, on a machine that is
    # busy decoding, each send waits until ZeroMQ and often the daemon had their turn on the
    # trainer's core: measured with every core busy, ``next()`` with a batch ready took 25 us
    # instead of 50 to 170 us (p50), and 0.1 ms instead of 2 to 5 ms (p90).
    context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)


def _close(sockets: list[Socket]) -> None:
    """Close sockets without lingering. Each is listed until it is closed."""
    while sockets:
        if not sockets[-1].closed:
            # otherwise ZeroMQ waits until its event of the close is read
            sockets[-1].disable_monitor()
            sockets[-1].close(linger=0)
        sockets.pop()


def _destroy(context: Context, sockets: list[Socket]) -> None:
    """Close the sockets and end the context, with signals blocked: pyzmq forgets it otherwise."""
    _close(sockets)
    before = pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        context.destroy(linger=0)  # its sockets are closed already
    finally:
        pthread_sigmask(signal.SIG_SETMASK, before)


def _destroy_at_last(context: Context, sockets: list[Socket], user: ref[Sockets], process: int) -> None:
    """Finalizer: close everything. A forked child only drops its copy.

    A signal that arrives here is handled as in any finalizer: Python writes an exception of its
    handler, such as ``KeyboardInterrupt``, to standard error and drops it.
    """
    remaining = user()
    if os.getpid() != process:
        context.destroy()
    elif remaining is None or remaining.turn.end():
        _destroy(context, sockets)
