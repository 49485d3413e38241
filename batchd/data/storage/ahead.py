"""Bytes of servers that are requested before samples need them. Workers and helpers.

    RequestBudget   how many bytes requests may hold together
    Requested       the requests for one order, or for one block: begun -> answered -> forgotten

Invariant: the bytes of a ``Requested`` count in its budget until they are forgotten: from before
their request begins, or, of whole objects, from their answer on.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from functools import partial
from math import inf
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from batchd.data.storage.values import ObjectUnreadable

if TYPE_CHECKING:
    from collections.abc import Callable

Answer: TypeAlias = Future[memoryview | ObjectUnreadable | None]
"""The bytes of an object, or why there are none; None if they were not asked for in the end."""


class RequestBudget:
    """Counts the bytes that are requested and not forgotten."""

    def __init__(self, bytes_max: int, *, is_sized: bool = False) -> None:
        """``is_sized``: it takes nothing of unknown size."""
        self.bytes_max = bytes_max
        self.is_sized = is_sized
        self._used_bytes = 0
        self._lock = Lock()
        """The threads of a ``RemoteClient`` count, too."""

    def count(self, size: int) -> None:
        """Count more bytes, or fewer."""
        with self._lock:
            self._used_bytes += size

    def has(self, size: int) -> bool:
        """Return whether there is room for ``size`` bytes more."""
        return self._used_bytes + size <= self.bytes_max


class Requested:
    """Requests that are forgotten together. ``until_s``: when their time ends (monotonic)."""

    def __init__(self, room: RequestBudget, until_s: float = inf) -> None:
        self._room = room
        self._until_s = until_s
        self.bytes = 0
        """Bytes that it counts."""
        self._answers: list[Answer] = []
        self._releases: list[Callable[[], None]] = []
        self.has_begun = False
        """True once there was a request."""
        self.has_failed = False
        """True once an answer was no bytes."""
        self.is_whole = True
        """False once there was no room, or no time, for something, or something does not fit."""
        self.is_fit = True
        """False once something did not fit that never will."""

    @property
    def left_s(self) -> float:
        """Seconds that its requests may still take; infinite, if each has its own limit alone."""
        return self._until_s - monotonic()

    def take(self, size: int | None) -> bool:
        """Count bytes, None: not known yet. False if there is no room or no time for them."""
        if size is None and self._room.is_sized:
            self.refuse()
            return False
        if not self._room.has(size or 1) or self.left_s <= 0:
            self.is_whole = False
            return False
        self._count(size or 0)
        return True

    def refuse(self) -> None:
        """Note that something has to be read when a sample needs it."""
        self.is_whole = self.is_fit = False

    def add(self, answer: Answer, size: int | None) -> None:
        """Note a request that has begun, for bytes that ``take`` took."""
        self.has_begun = True
        self._answers.append(answer)
        answer.add_done_callback(partial(self._answered, is_counted=size is not None))

    def at_end(self, release: Callable[[], None]) -> None:
        """Have ``forget`` call this, which drops the answers."""
        self._releases.append(release)

    def wait(self, timeout_s: float) -> bool:
        """Wait for all answers; return whether they are there."""
        self._answers = list(wait(self._answers, timeout_s).not_done)
        return not self._answers

    def forget(self) -> None:
        """Drop all answers, and requests that did not begin."""
        for release in self._releases:
            release()
        self._releases.clear()
        self._count(-self.bytes)

    def _count(self, size: int) -> None:
        self.bytes += size
        self._room.count(size)

    def _answered(self, answer: Answer, *, is_counted: bool) -> None:
        found = None if answer.cancelled() else answer.result()
        self.has_failed |= not isinstance(found, memoryview)
        if not is_counted and self._releases and isinstance(found, memoryview):
            self._count(len(found))
