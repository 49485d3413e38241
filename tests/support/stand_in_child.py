"""Stands in for ``runtime.children.Child``: a process that ends when the test says so."""

import os
from typing import Self


class StandInChild:
    """Its ``pidfd`` is readable from ``end_now`` on, as that of a process that has ended."""

    pid = 77

    def __init__(self) -> None:
        self.pidfd = os.eventfd(0)
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.reap()

    def end_now(self) -> None:
        """The process ends."""
        self._has_ended = True
        os.eventfd_write(self.pidfd, 1)

    def has_ended(self) -> bool:
        """Tell whether it has ended."""
        return self._has_ended

    def reap(self) -> int:
        """Return the signal that ended it, as a status."""
        os.close(self.pidfd)
        return -9
