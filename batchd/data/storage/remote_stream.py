"""An object of a server as a file that can be read and sought in. Daemon and workers.

    read here and there    blocks of 64 KiB: headers of a tar file, the directory of a zip archive
    read on and on         blocks up to 32 MiB, in parts that are requested at once; a gap shorter
                           than 1 MiB is read, too: waiting for an answer takes longer

Invariant: all bytes are of one version of the object. ``SourceInvalid`` reports an object that has
changed or cannot be read.
"""

from bisect import bisect_right
from collections.abc import Callable
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from batchd.data.storage.values import ObjectUnreadable
from batchd.errors import SourceInvalid

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FIRST_BYTES = 64 << 10
LENGTH_MAX = 32 << 20
GROWTH = 4
GAP_BYTES_MAX = 1 << 20
BLOCKS_MAX = 16

ReadRange = Callable[[int, int], memoryview]
"""Reads (start, size) of the object. Raises ``ObjectUnreadable``."""


class _Block(NamedTuple):
    """Bytes of the object from ``start`` to ``end``."""

    start: int
    data: memoryview

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        return self.start + len(self.data)


class ObjectStream(RawIOBase):
    """Reads an object of ``size`` bytes, called ``name`` in messages, in blocks."""

    def __init__(self, name: str, size: int, read: ReadRange) -> None:
        self._name = name
        self._size = size
        self._read = read
        self._place = 0
        self._blocks: list[_Block] = []
        """The blocks that were read last, the most recent first."""
        self._kept_bytes = 0
        self._until = 0

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
        """Read the rest of the present block, or fetch another one. Raises ``SourceInvalid``."""
        room = memoryview(buffer).cast("B")
        if self._place >= self._size or not room:
            return 0
        block = next((one for one in self._blocks if one.start <= self._place < one.end), None)
        block = block or self._next_block(len(room))
        start = self._place - block.start
        count = min(len(room), len(block.data) - start)
        room[:count] = block.data[start : start + count]
        self._place += count
        return count

    def expect(self, until: int, kept_bytes: int) -> None:
        """Keep ``kept_bytes`` beside the last block: the bytes to ``until`` are read twice."""
        self._until, self._kept_bytes = until, kept_bytes

    def hold(self, start: int, data: memoryview) -> None:
        """Use these bytes, which the caller has read already, in the place of all blocks."""
        self._blocks = [_Block(start, data)]

    def _next_block(self, need: int) -> _Block:
        """Fetch the block that begins here, longer than the one that it continues."""
        before = next((one for one in self._blocks if 0 <= self._place - one.end <= GAP_BYTES_MAX), None)
        length = FIRST_BYTES if before is None else max(FIRST_BYTES, min(len(before.data) * GROWTH, LENGTH_MAX))
        end = self._until + FIRST_BYTES if self._place < self._until else self._size
        size = min(max(length, min(need, LENGTH_MAX)), min(end, self._size) - self._place)
        kept_bytes = [*accumulate(len(one.data) for one in self._blocks)]
        self._blocks = self._blocks[: min(BLOCKS_MAX - 1, bisect_right(kept_bytes, self._kept_bytes))]
        try:
            data = self._read(self._place, size)
        except ObjectUnreadable as reason:
            raise SourceInvalid(f"{self._name} cannot be read at byte {self._place}: {reason}") from None
        if len(data) != size:
            raise SourceInvalid(f"{self._name} ends at byte {self._place + len(data)} of {self._size}: it has changed")
        self._blocks.insert(0, _Block(self._place, data))
        return self._blocks[0]
