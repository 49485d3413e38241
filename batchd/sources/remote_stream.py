"""An object of a server as a file that can be read and sought in. Daemon.

    read here and there    blocks of 64 KiB: headers of a tar file with large members, the directory of a zip archive
    read on and on         blocks up to 32 MiB, in parts that are asked for at once; a gap shorter than 1 MiB is read through,
                           as waiting for an answer takes longer than its bytes

Invariant: all bytes are of one version of the object; where they are not any more, or cannot be read, the scan is refused.
"""

from collections.abc import Callable
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from typing import TYPE_CHECKING

from batchd.errors import SourceInvalid
from batchd.sources.storage import ObjectUnreadable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FIRST_BYTES = 64 << 10
LENGTH_MAX = 32 << 20
GROWTH = 4
GAP_BYTES_MAX = 1 << 20

ReadRange = Callable[[int, int], memoryview]
"""Reads (start, size) of the object. Raises ``ObjectUnreadable``."""


class ObjectStream(RawIOBase):
    """Reads an object of ``size`` bytes, which people know as ``name``, through a window."""

    def __init__(self, name: str, size: int, read: ReadRange) -> None:
        self._name = name
        self._size = size
        self._read = read
        self._place = 0
        self._window = memoryview(b"")
        self._first = 0
        self._length = FIRST_BYTES // GROWTH

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Go to a byte, also behind the end; nothing is read."""
        place = offset + {SEEK_SET: 0, SEEK_CUR: self._place, SEEK_END: self._size}[whence]
        if place < 0:
            raise OSError("before the first byte")
        self._place = place
        return place

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read what the window has from here on, or move it. Raises ``SourceInvalid``."""
        room = memoryview(buffer).cast("B")
        if self._place >= self._size or not room:
            return 0
        if not self._first <= self._place < self._first + len(self._window):
            self._move(len(room))
        start = self._place - self._first
        count = min(len(room), len(self._window) - start)
        room[:count] = self._window[start : start + count]
        self._place += count
        return count

    def _move(self, need: int) -> None:
        gap = self._place - (self._first + len(self._window))
        self._length = min(self._length * GROWTH, LENGTH_MAX) if 0 <= gap <= GAP_BYTES_MAX else FIRST_BYTES
        size = min(max(self._length, min(need, LENGTH_MAX)), self._size - self._place)
        self._window = memoryview(b"")  # it is not wanted any more, and may be large
        try:
            window = self._read(self._place, size)
        except ObjectUnreadable as reason:
            raise SourceInvalid(f"{self._name} cannot be read at byte {self._place}: {reason}") from None
        if len(window) != size:
            raise SourceInvalid(
                f"{self._name} ends at byte {self._place + len(window)} of {self._size}: it has changed"
            )
        self._window, self._first = window, self._place
