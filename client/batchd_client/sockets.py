"""The ZeroMQ context of one connection, and every socket in it. Runs in the trainer.

    Connection ---> Sockets ~~finalize~~> the context, all open sockets

pyzmq's context has weak references to its sockets, and the garbage collector clears weak references
before it calls a finalizer. A context that is destroyed there finds no socket to close, and waits
for ever until somebody closes them. So the references here are strong, and the registry of
finalizers holds them: a socket is never garbage before it has been closed.

Invariant: whatever is interrupted, and whenever, what was opened here is closed by the next
``close_all`` or ``destroy``, or by the finalizer: when nothing refers to the ``Sockets`` any more,
or when the program ends.
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

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

EXIT_WAIT_S = 1.0
"""How long the end of the program waits for a thread that uses the sockets."""
EXIT_QUIET_S = 5.0
"""How long a thread in the background is held up at the end of the program, which often is gone by then, without a word of it."""
TRIAL_MAX_S = 1.0
"""How long a thread that was started on trial stays at most."""
TRIAL_PAUSE_S = 0.0001
_SIGNALS = signal.valid_signals()


class Turn:
    """Whose turn it is to use a connection: the thread that has ``lock``.

    At the end of the program, ``is_over``, nobody's. The lock is free then, so that what comes
    later, and closes the connection, need not wait.
    """

    __slots__ = ("is_over", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_over = False

    def end(self) -> bool:
        """Wait until no thread uses the connection, and let none from now on.

        False where one goes on.
        """
        if not self.is_over and self.lock.acquire(timeout=EXIT_WAIT_S):
            self.is_over = True
            self.lock.release()
        return self.is_over

    def delay(self) -> None:
        """Let the program end before a thread in the background hears that its connection has ended."""
        if self.is_over and threading.current_thread() is not threading.main_thread():
            time.sleep(EXIT_QUIET_S)


class Sockets:
    """See above. Used by one thread at a time, by ``turn``."""

    def __init__(self, connections: int) -> None:
        """Start nothing yet: ZeroMQ starts its threads with the first socket, one for each TCP connection and one more."""
        self.turn = Turn()
        self._threads = connections + 1
        self._open: list[Socket] = []
        self._context: Context = zmq.Context.__new__(zmq.Context)  # the finalizer knows of it before it is one
        self._end = finalize(self, _destroy_at_last, self._context, self._open, ref(self), os.getpid())
        _begin(self._context, connections)

    @property
    def is_destroyed(self) -> bool:
        """Is there nothing left that could be used?"""
        return not self._end.alive

    def open(self, kind: int) -> Socket:
        """Make a socket. Whoever uses it may close it; what is still open is closed here.

        Raises ``ThreadsExhausted``.
        """
        if self._threads:
            _try_threads(self._threads)
            self._threads = 0
        socket = self._context.socket(kind, self._listed)
        socket.linger = 0
        return socket

    def monitor(self, socket: Socket, events: int) -> Socket:
        """Make the socket that tells what happens to another one."""
        monitor = self.open(zmq.PAIR)
        address = f"inproc://monitor-{socket.underlying}"
        socket.monitor(address, events)
        monitor.connect(address)
        return monitor

    def _listed(self, context: Context, kind: int) -> Socket:
        """Make a socket that is in the list before it is open.

        The traceback of an interrupt would keep it open, and unknown.
        """
        socket = zmq.Socket.__new__(zmq.Socket)
        self._open.append(socket)
        socket.__init__(context, kind)  # type: ignore[misc]
        return socket

    def close_all(self) -> None:
        """Close what is still open: what a session has left, or was interrupted with."""
        _close(self._open)

    def destroy(self) -> None:
        """Close all sockets and end ZeroMQ's threads.

        Where it is interrupted, it is done again: in another call, or at last.
        """
        _destroy(self._context, self._open)
        self._end.detach()


def _begin(context: Context, connections: int) -> None:
    """Make it a context, in a thread, where no signal is heard.

    Pyzmq loses one whose making is interrupted.
    """
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
    _wait_until_gone(started, 1)
    # ZeroMQ's threads never pre-empt the thread that wakes them. Otherwise, on a machine that is
    # busy decoding, each send waits until ZeroMQ and often the daemon had their turn on the
    # trainer's core: measured with every core busy, ``next()`` with a batch ready took 25 us
    # instead of 50 to 170 us (p50), and 0.1 ms instead of 2 to 5 ms (p90).
    context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)


def _try_threads(count: int) -> None:
    """Start so many threads and let them end.

    ZeroMQ aborts the whole program where it cannot start one of its own.
    """
    gate = threading.Lock()
    started: list[int] = []

    def stay() -> None:
        started.append(threading.get_native_id())
        if gate.acquire(timeout=TRIAL_MAX_S):
            gate.release()

    with gate:
        for number in range(count):
            try:
                start_new_thread(stay, ())
            except (RuntimeError, MemoryError):
                raise ThreadsExhausted(f"ZeroMQ needs {count} threads, and only {number} could be started") from None
    _wait_until_gone(started, count)


def _wait_until_gone(started: list[int], count: int) -> None:
    """Wait for the ends of threads: what has not gone yet counts against the limit."""
    deadline = time.monotonic() + TRIAL_MAX_S
    while time.monotonic() < deadline and (len(started) < count or any(map(_is_there, started))):
        time.sleep(TRIAL_PAUSE_S)


def _is_there(thread: int) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")  # noqa: PTH110  a tenth of Path's time, for each connection


def _close(sockets: list[Socket]) -> None:
    """Close sockets without waiting for what they were to send.

    Each stays in the list until it is closed.
    """
    while sockets:
        if not sockets[-1].closed:
            sockets[
                -1
            ].disable_monitor()  # else ZeroMQ would wait for ever until somebody reads how the socket was closed
            sockets[-1].close(linger=0)
        sockets.pop()


def _destroy(context: Context, sockets: list[Socket]) -> None:
    """Close the sockets and end the context, while signals wait.

    Pyzmq forgets a context whose end is interrupted by one.
    """
    _close(sockets)
    before = pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        context.destroy(linger=0)  # its sockets are closed already
    finally:
        pthread_sigmask(signal.SIG_SETMASK, before)


def _destroy_at_last(context: Context, sockets: list[Socket], user: ref[Sockets], process: int) -> None:
    """Free everything where nobody did.

    What a forked child has is a copy, whose descriptors are the parent's. A signal that comes
    meanwhile is handled in here, as in any finalizer: what its handler raises, such as
    ``KeyboardInterrupt``, Python writes to standard error and drops.
    """
    remaining = user()
    if os.getpid() != process:
        context.destroy()
    elif remaining is None or remaining.turn.end():
        _destroy(context, sockets)
