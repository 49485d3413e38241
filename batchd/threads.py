"""Sees that there are threads before libzmq wants them: it ends the process where it cannot start one.

DAEMON and OBSERVER.
"""

from threading import Event, Thread

from batchd.errors import BatchdError

MORE_THREADS = "raise the limit (TasksMax= in the unit, ulimit -Hu, --pids-limit of docker)"
CONTEXT_THREADS = 2
"""What a context of ZeroMQ has besides those that send: its reaper, and the one of pyzmq that frees messages."""


def check_threads(count: int) -> None:
    """Start so many threads at once, and end them. Raises ``BatchdError`` where that cannot be."""
    over = Event()
    started: list[Thread] = []
    try:
        for _ in range(count):
            thread = Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise BatchdError(f"{error}, of {count} that are needed: {MORE_THREADS}") from None
    finally:
        over.set()
        for thread in started:
            thread.join()
