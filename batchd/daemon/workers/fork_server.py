"""The process that the workers are forked from, as the daemon has it. DAEMON process.

    first fork -> started -> [ fork -> Forked, or NotForked ]*, reap*
    it ends -> its workers end, by the kernel -> the next fork starts another one

Invariant: whoever was asked for is heard of: ``forked``, or ``failed``.
"""

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

import structlog

from batchd.children import Child, Grandchild, Linked, describe, start_linked
from batchd.daemon.descriptors import Watch
from batchd.daemon.memory.held_descriptors import ADVICE
from batchd.orders.forks import TO_DAEMON_FROM_FORKSERVER, Fork, Forked, NotForked, Reap
from batchd_wire.channel import SEND_BUFFER_BYTES, ChannelClosed, receive_message, send_message
from batchd_wire.codec import MalformedMessage, Message

_log = structlog.get_logger()


class ForkServer:
    """Forks workers. Tells whoever asked that a worker is ``forked``, or that it has ``failed`` and why."""

    def __init__(
        self,
        watch: Watch,
        forked: Callable[[int, Grandchild], None],
        failed: Callable[[int, str], None],
        launched: Linked | None = None,
    ) -> None:
        """``launched``: the first one, which was started already, and is ours from now on."""
        self._watch = watch
        self._forked = forked
        self._failed = failed
        self._child: Child | None = None
        self._channel: socket.socket
        self._asked: dict[int, list[int]] = {}
        """Workers of which nothing was heard yet, in the order in which they were asked for, which is that of the answers; each
        with descriptors that are closed to make room for those of its answer."""
        self._children: set[int] = set()
        """Those of the one that there is now."""
        if launched is not None:
            self._adopt(launched)

    @property
    def pid(self) -> int | None:
        """Its process id; None where there is none at present."""
        return self._child.pid if self._child is not None else None

    def fork(self, worker: int, channel: int, note: int) -> None:
        """Start a worker with these two descriptors. Raises ``OSError``, and then nothing is heard of it."""
        if self._child is None:
            self._adopt(start_linked("batchd.worker"))
        with ExitStack() as where_it_fails:
            spare = [os.dup(channel), os.dup(note)]
            where_it_fails.callback(_close, spare)
            with suppress(ChannelClosed):  # it has just ended, which its pidfd will tell
                send_message(self._channel, Fork(worker), [channel, note])
            where_it_fails.pop_all()
        self._asked[worker] = spare

    def reap(self, pid: int) -> None:
        """A worker has ended, and all is known of it. One that has outlived its fork server is reaped by others."""
        if pid in self._children:
            self._children.remove(pid)
            with suppress(ChannelClosed, BlockingIOError):  # whoever is not reaped now is when the fork server ends
                send_message(self._channel, Reap(pid))

    def kill(self, reason: str) -> None:
        """Have it end, and all of its workers with it: it does not do what it should."""
        if self._child is not None:
            _log.warning("fork server killed", pid=self._child.pid, reason=reason)
            self._child.kill()

    def close(self) -> None:
        """End it, whatever it does. Its workers have ended, or end with it."""
        if self._child is not None:
            self._child.kill()
            self._forget(self._child)
            for spare in self._asked.values():
                _close(spare)
            self._asked.clear()

    def _adopt(self, launched: Linked) -> None:
        """It is ours from now on. Raises ``OSError``, and then it has ended."""
        self._child, self._channel = launched
        with ExitStack() as where_it_fails:
            where_it_fails.callback(self.close)
            self._channel.setblocking(False)
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._watch.add(self._channel.fileno(), self._hear)
            self._watch.add(self._child.pidfd, self._bury)
            where_it_fails.pop_all()

    def _hear(self) -> None:
        self._receive()

    def _receive(self) -> bool:
        """Hear what became of the first of those who were asked for; False where nothing was said."""
        spare = next(iter(self._asked.values()), [])
        _close(spare)
        spare.clear()
        try:
            message, descriptors = receive_message(self._channel, TO_DAEMON_FROM_FORKSERVER)
        except BlockingIOError:
            return False
        except ChannelClosed:
            self._watch.remove(self._channel.fileno())
            return False
        except MalformedMessage as error:
            self._watch.remove(self._channel.fileno())
            self.kill(f"its answer cannot be read: {error}. If there are no descriptors left: {ADVICE}")
            return False
        self._take(message, descriptors)
        return True

    def _take(self, message: Message, descriptors: list[int]) -> None:
        assert isinstance(message, Forked | NotForked)
        del self._asked[message.worker]
        if isinstance(message, NotForked):
            self._failed(message.worker, message.reason)
            return
        (pidfd,) = descriptors
        self._children.add(message.pid)
        self._forked(message.worker, Grandchild(message.pid, pidfd))

    def _bury(self) -> None:
        """The kernel says that it has ended. What it reported before still counts."""
        assert self._child is not None
        while self._receive():
            pass
        pid, how = self._child.pid, describe(self._forget(self._child))
        _log.warning("fork server ended", pid=pid, how=how, advice="its workers end with it; others are started")
        asked, self._asked = self._asked, {}
        for worker, spare in asked.items():
            _close(spare)
            self._failed(worker, f"the fork server ended ({how})")

    def _forget(self, child: Child) -> int:
        """Reap it; its exit status."""
        for descriptor in (child.pidfd, self._channel.fileno()):
            self._watch.remove(descriptor)
        self._channel.close()
        self._child = None
        self._children.clear()
        return child.reap()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
