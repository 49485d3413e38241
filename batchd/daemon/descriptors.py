"""The descriptors that the loop waits for, except ZeroMQ's, in one epoll. DAEMON process.

The loop's ``zmq.Poller`` holds this one epoll for all of them, so waiting costs the same with two
trainers and with two hundred.
"""

import resource
import select
from collections.abc import Callable

EVENTS_AT_ONCE = 256


class Selector:
    """Calls back for each descriptor that is readable, or closed by its peer, or writable again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def fileno(self) -> int:
        """The epoll's own descriptor, readable when a watched one is."""
        return self._epoll.fileno()

    def add(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Watch a descriptor. Paired with ``remove``, before it is closed. Raises ``OSError``."""
        assert descriptor not in self._callbacks, f"descriptor {descriptor} is watched already"
        self._epoll.register(descriptor, select.EPOLLIN)
        self._callbacks[descriptor] = callback

    def wait_to_write(self, descriptor: int, *, wanted: bool) -> None:
        """Call back, too, when a watched descriptor takes something again; or no more."""
        self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT if wanted else select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Stop watching; no matter if it was not watched."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def dispatch(self) -> None:
        """Call back for each ready descriptor, unless a callback has removed or replaced it."""
        ready = [(number, self._callbacks.get(number)) for number, _events in self._epoll.poll(0, EVENTS_AT_ONCE)]
        for descriptor, callback in ready:
            if callback is not None and self._callbacks.get(descriptor) is callback:
                callback()

    def close(self) -> None:
        """Stop watching everything."""
        self._epoll.close()
        self._callbacks.clear()


def allow_descriptors() -> None:
    """Raise the soft limit to the hard one: slots soon take the usual 1024, meant for select()."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
