"""The memory of one live stream's mailbox. DAEMON process, which makes it and hands it out, and never looks into it.

    made -> memfd, every page reserved, sealed against shrinking and growing, mode 0600
    writable_anew -> for a producer         readable -> the same memory opened read-only, for workers

Invariant: nobody can take back the memory under a worker that reads it.
"""

import fcntl
import os
from typing import Self

from batchd.daemon.memory.slots import SEALS
from batchd.errors import MemoryTooSmall, Problem

MEMORY_NAME = "batchd-mailbox"


class MailboxMemory:
    """Raises ``MemoryTooSmall`` where the kernel has none for it."""

    def __init__(self, mailbox_bytes: int) -> None:
        self.mailbox_bytes = mailbox_bytes
        self.writable = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.readable = -1
        try:
            os.fchmod(self.writable, 0o600)
            os.posix_fallocate(self.writable, 0, mailbox_bytes)
            fcntl.fcntl(self.writable, fcntl.F_ADD_SEALS, SEALS)
            self.readable = os.open(f"/proc/self/fd/{self.writable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            problem = f"no memory for a mailbox of {mailbox_bytes} bytes: {error.strerror}; lower capacity or sample_bytes_max"
            raise MemoryTooSmall([Problem("daemon.memory", problem)]) from None

    @classmethod
    def adopt(cls, descriptor: int, mailbox_bytes: int) -> Self:
        """One that another process of ours has made, by the descriptor that writes. Raises ``OSError``, and then closes it."""
        mailbox = cls.__new__(cls)
        mailbox.mailbox_bytes, mailbox.writable, mailbox.readable = mailbox_bytes, descriptor, -1
        try:
            mailbox.readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            mailbox.close()
            raise
        return mailbox

    def writable_anew(self) -> int:
        """A further descriptor that writes, for a producer; it belongs to the caller. Raises ``OSError``.

        Opened for each anew, since descriptors that are copies of each other share their flags:
        with ``O_APPEND`` set by one producer, all others could write nothing any more.
        """
        return os.open(f"/proc/self/fd/{self.writable}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of it. Who has a descriptor keeps the memory until it is closed."""
        for descriptor in (self.writable, self.readable):
            if descriptor >= 0:
                os.close(descriptor)
        self.writable = self.readable = -1
