"""The streams that worker hosts may fill, and their indexes. GATEWAY process.

    ServeStream + fd -> mapped, its digest unknown -> digested in portions -> HostServe to hosts
                                                                           -> parts, on request

A large index takes seconds to digest, so it is digested in portions between rows of hosts. Streams
over the same source share its index: its memory has the same inode.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256

from batchd.pool.messages import INDEX_PART_BYTES, HostQuarantine, HostServe
from batchd.worker.messages import QUARANTINED_AT_ONCE, SampleRecipe, ServeStream
from batchd_wire.codec import Message
from batchd_wire.fields import SlotLayout, layout_from_wire

DIGESTED_AT_ONCE = 16 << 20
"""Bytes of an index between two rounds of the loop: some 20 ms."""


def map_memory(descriptor: int, length: int, protection: int) -> memoryview:
    """Map a memfd of the daemon (uint8 ``[length]``, not in core files); close its descriptor."""
    try:
        memory = mmap.mmap(descriptor, length, mmap.MAP_SHARED, protection)
    finally:
        os.close(descriptor)
    memory.madvise(mmap.MADV_DONTDUMP)
    return memoryview(memory)


class IndexMemory:
    """The mapped index of a source; the mapping ends when the last part of it is sent."""

    def __init__(self, descriptor: int) -> None:
        """Own ``descriptor``. Raises ``OSError`` or ``ValueError``."""
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        self.bytes = map_memory(descriptor, status.st_size, mmap.PROT_READ)
        self.digest = ""
        """SHA-256 of all bytes, 64 hexadecimal digits; empty until all are read."""
        self._hash = sha256()
        self._done = 0

    def digest_some(self) -> bool:
        """Digest the next portion; true when the digest is known."""
        self._hash.update(self.bytes[self._done : self._done + DIGESTED_AT_ONCE])
        self._done += DIGESTED_AT_ONCE
        if self._done >= len(self.bytes):
            self.digest = self._hash.hexdigest()
        return bool(self.digest)

    def part(self, offset: int) -> memoryview:
        """The part at ``offset``. Raises ``ValueError`` if no part begins there."""
        if offset % INDEX_PART_BYTES or offset >= len(self.bytes):
            raise ValueError(f"an index of {len(self.bytes)} bytes has no part at {offset}")
        return self.bytes[offset : offset + INDEX_PART_BYTES]


@dataclass(slots=True, eq=False)
class HostStream:
    """A stream as worker hosts get it."""

    number: int
    name: str
    layout: SlotLayout
    index: IndexMemory
    serve: ServeStream
    record_bytes_max: int
    quarantined: list[int] = field(default_factory=list)

    def messages(self, link: int) -> Iterator[Message]:
        """Yield the messages that announce the stream to a worker host."""
        portions = [*self._quarantined_portions()] or [[]]
        yield HostServe(link, self.serve.encode(), self.index.digest, len(self.index.bytes), portions[0])
        for portion in portions[1:]:
            yield HostQuarantine(link, self.number, portion)

    def _quarantined_portions(self) -> Iterator[list[int]]:
        for first in range(0, len(self.quarantined), QUARANTINED_AT_ONCE):
            yield self.quarantined[first : first + QUARANTINED_AT_ONCE]


class HostStreams:
    """All streams by number. ``ready`` ones have a digest, so they can be announced to hosts."""

    def __init__(self) -> None:
        self._streams: dict[int, HostStream] = {}
        self._undigested: deque[IndexMemory] = deque()

    def add(self, message: ServeStream, descriptor: int) -> HostStream | None:
        """Add a stream; return it if its index was digested before, so it is ready at once."""
        index = IndexMemory(descriptor)
        known = next((one.index for one in self._streams.values() if one.index.inode == index.inode), None)
        if known is None:
            self._undigested.append(index)
        stream = HostStream(
            message.stream,
            message.name,
            layout_from_wire(message.layout),
            known or index,
            message,
            SampleRecipe(*message.recipe).record_bytes_max,
        )
        self._streams[message.stream] = stream
        return stream if stream.index.digest else None

    def forget(self, number: int) -> None:
        """Forget a stream. Its orders in flight keep the parts of it that they need."""
        stream = self._streams.pop(number)
        if stream.index in self._undigested and stream.index not in [one.index for one in self._streams.values()]:
            self._undigested.remove(stream.index)

    def use_storage(self, storage: tuple[int, int, int]) -> None:
        """Send these limits for file servers to worker hosts that register from now on."""
        for stream in self._streams.values():
            stream.serve = replace(stream.serve, storage=storage)

    def __getitem__(self, number: int) -> HostStream:
        return self._streams[number]

    def __contains__(self, number: int) -> bool:
        return number in self._streams

    def ready(self) -> list[HostStream]:
        """The streams that can be announced to hosts."""
        return [stream for stream in self._streams.values() if stream.index.digest]

    @property
    def is_digesting(self) -> bool:
        """True while the digest of an index is unknown."""
        return bool(self._undigested)

    def digest_some(self) -> list[HostStream]:
        """Digest the next portion of an index; return the streams that this makes ready."""
        index = self._undigested[0]
        if not index.digest_some():
            return []
        self._undigested.popleft()
        return [stream for stream in self._streams.values() if stream.index is index]

    def index(self, digest: str) -> IndexMemory | None:
        """The index with this digest; None if no stream has it."""
        return next((one.index for one in self._streams.values() if one.index.digest == digest), None)
