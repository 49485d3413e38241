"""The bytes of a sound file as libraries read them, and its samples. Worker process.

Invariant: what a header announces takes no memory, and no library sees an error of the storage.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import MediaFile

Wave = NDArray[np.float32]
"""Samples, [samples, channels], from -1 to 1."""

INT16_STEP: Final = np.float32(1 / 32768)
"""Of samples of 16 bits, as numbers from -1 to 1, exactly."""
SAMPLES_OF_A_BYTE: Final = 8192
"""More than any format can store: the longest silence that FLAC has takes 1/5,461 byte for each."""
_BLOCK_BYTES: Final = 64 << 10
_BLOCKS_MAX: Final = 16

SHOWN = {
    "wav": "WAV",
    "flac": "FLAC",
    "aiff": "AIFF",
    "mp3": "MP3",
    "ogg": "Ogg",
    "aac": "AAC",
    "mp4": "MP4",
    "matroska": "Matroska",
    "avi": "AVI",
}


class Counted(NamedTuple):
    """What reading a file through has told: its samples, and where some of its packets are.

    ``places``: int64 ``[packets, 2]``, the number of a packet's first sample, and its first byte.
    """

    samples: int
    places: NDArray[np.int64]

    def to_bytes(self) -> bytes:
        """All of it, for ``from_bytes``."""
        return np.append(self.places.ravel(), self.samples).astype(np.int64).tobytes()

    @classmethod
    def from_bytes(cls, record: memoryview, size: int) -> "Counted | None":
        """Copy a record of a file of this size; None for a damaged one."""
        if len(record) % 16 != 8:  # noqa: PLR2004  bytes of pairs of numbers, and of one more
            return None
        numbers = np.frombuffer(bytes(record), np.int64)
        places = numbers[:-1].reshape(-1, 2)
        is_ascending = not (np.diff(places, axis=0) <= 0).any()
        is_within = not len(places) or (places[0].min() >= 0 and places[-1, 1] < size)
        return cls(int(numbers[-1]), places) if is_ascending and is_within else None


class SoundMissing(SampleUndecodable):
    """A file whose container has no sound."""


class ByteStream:
    """The bytes of a file as an open file, for libraries. Belongs to one thread.

    An error is kept in ``error``, as it may not pass through a library.
    """

    def __init__(self, value: memoryview | MediaFile) -> None:
        self.error: SampleUnreadable | None = None
        self._data = value if isinstance(value, memoryview) else None
        self._file = value if isinstance(value, MediaFile) else None
        self.descriptor = None if self._file is None else self._file.descriptor
        self.size = value.size if isinstance(value, MediaFile) else value.nbytes
        self._blocks: dict[int, memoryview] = {}
        self._place = 0

    def bytes_at(self, start: int, count: int) -> bytes:
        """Some bytes, fewer at the end of the file."""
        count = min(count, self.size - start)
        if count <= 0 or start < 0:
            return b""
        if self._data is not None:
            return bytes(self._data[start : start + count])
        return b"".join(self._parts(start, count))

    def read(self, count: int = -1) -> bytes:
        """The next bytes; none at the end, and from an error on."""
        found = self.bytes_at(self._place, self.size if count < 0 else count)
        self._place += len(found)
        return found

    def readinto(self, buffer: memoryview) -> int:
        """The next bytes, into memory; how many these are."""
        room, done = memoryview(buffer), 0
        while done < len(room) and 0 <= self._place < self.size:
            number, first = divmod(self._place, _BLOCK_BYTES)
            around = self._block(number)[first:] if self._data is None else self._data[self._place :]
            part = around[: len(room) - done]
            if not part:
                break
            room[done : done + len(part)] = part
            done += len(part)
            self._place += len(part)
        return done

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go anywhere, as ``lseek``."""
        self._place = offset + (0, self._place, self.size)[whence]
        return self._place

    def tell(self) -> int:
        """The number of the next byte."""
        return self._place

    def behind(self, first: int) -> "ByteStream":
        """The file from a byte on, as a file of its own."""
        return ByteStream(MediaFile(self.size - first, lambda at, count: self.bytes_at(first + at, count), None))

    def write(self, _data: bytes) -> int:
        """Libraries ask whether it is there; nothing is written."""
        return 0

    def check(self) -> None:
        """Raise the error of a read, if there was one."""
        if self.error is not None:
            raise self.error

    def _parts(self, start: int, count: int) -> Iterator[memoryview]:
        while count > 0:
            number, first = divmod(start, _BLOCK_BYTES)
            part = self._block(number)[first : first + count]
            if not part:
                return
            yield part
            start, count = start + len(part), count - len(part)

    def _block(self, number: int) -> memoryview:
        block = self._blocks.pop(number, None)
        if block is None:
            assert self._file is not None, "it is read in parts"
            try:
                block = memoryview(self._file.read(number * _BLOCK_BYTES, _BLOCK_BYTES))
            except SampleUnreadable as error:
                self.error = self.error or error
                return memoryview(b"")
            if len(self._blocks) >= _BLOCKS_MAX:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = block
        return block


def tag_bytes(stream: ByteStream) -> int:
    """The length of the tag (ID3) that a file begins with; 0 without one."""
    head = stream.bytes_at(0, 10)
    if not head.startswith(b"ID3") or len(head) < 10:  # noqa: PLR2004  bytes of its header
        return 0
    return 10 + sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))


def announced(samples: int, stream: ByteStream) -> int:
    """The samples that a header announces. Raises ``SampleUndecodable`` if no file has so many."""
    if not 0 <= samples <= SAMPLES_OF_A_BYTE * stream.size:
        raise SampleUndecodable(f"announces {samples} samples, which its {stream.size} bytes cannot hold")
    return samples


def mixed(wave: NDArray[np.float64] | NDArray[np.int16] | Wave) -> Wave:
    """The mean of all channels, [samples, 1]: the sum in their order, in float64, rounded once.

    Samples of several channels may be int16, too.
    """
    if wave.shape[1] == 1:
        return wave.astype(np.float32, copy=False)
    total = wave[:, 0].astype(np.float64)
    for channel in range(1, wave.shape[1]):
        total += wave[:, channel]
    total /= wave.shape[1]
    if wave.dtype == np.int16:
        total *= INT16_STEP
    return total.astype(np.float32)[:, np.newaxis]
