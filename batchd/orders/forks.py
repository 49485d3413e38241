"""What the daemon and the process that forks its workers say to each other. Daemon and fork server; numbers never reused.

daemon                                   fork server                      worker
   |  -- Fork (+ fds: channel, note) -------> |                               .
   |                                          |  -- fork(2) ----------------> |
   |  <------------ Forked (+ fd: a pidfd) -- |                               |  Ready, on its own channel
   |                                          |                               x  the pidfd says that it has ended
   |  -- Reap ------------------------------> |
   |         end of file: the daemon is gone, and so is the fork server, and with it all of its workers
"""

from batchd_wire.codec import Message, Vocabulary, message


@message(57)
class Fork(Message):
    """Start ``worker``. Travels with two descriptors: its end of its channel, and its note, to write; see ``orders``."""

    worker: int


@message(58)
class Reap(Message):
    """The worker with process id ``pid`` has ended, and all is known of it: let it go."""

    pid: int


@message(59)
class Forked(Message):
    """``worker`` lives, as process ``pid``. Travels with one descriptor, of this process (pidfd_open(2))."""

    worker: int
    pid: int


@message(60)
class NotForked(Message):
    """There is no ``worker``, for a ``reason`` that the kernel gives: no memory, or too many processes."""

    worker: int
    reason: str


TO_FORKSERVER = Vocabulary(Fork, Reap)
TO_DAEMON_FROM_FORKSERVER = Vocabulary(Forked, NotForked)
