"""The frames of video files in the index of a source: its scan adds files, workers read them.

    names       uint8 [bytes]         the paths of the files below the root, joined
    units       int64 [files, 2]      a time of the file is so many numerator / denominator seconds
    digests     uint8 [files, 32]     of the file, as the scan gives it
    order       uint32 [frames]       the packet of each frame, in display order
    keys        uint32 [frames]       the packet at which decoding begins that gives the frame
    times       int64 [packets]       when a packet's frame is shown; packets are in decoding order
    checksums   uint32 [packets]      CRC-32 of the data

    packets     I0  P3  B1  B2  I4  P7  B5  B6
    order        0   2   3   1   4   6   7   5
    keys         0   0   0   0   4   4   4   4

Frames and packets are counted within their file. The source keeps, beside its own, the array
``ends`` of ``GrowingFrames``: where each file begins in names, frames and packets.

Invariants: no decoder runs in the scan. Within a file, frames are in the order of their times, and
no two times are the same.
"""

import os
from array import array
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from batchd.data.media.containers import PlainFile, open_video
from batchd.data.media.frames import FileFrames, frames_of
from batchd.data.storage.index import number_array
from batchd_wire.views import Array

DIGEST_BYTES = 32


class GrowingFrames:
    """The arrays while they are built."""

    def __init__(self) -> None:
        self.ends = array("q", [0, 0, 0])
        self._names = bytearray()
        self._units = array("q")
        self._digests = bytearray()
        self._order = array("I")
        self._keys = array("I")
        self._times = array("q")
        self._checksums = array("I")

    def __len__(self) -> int:
        return len(self._units) // 2

    def add(self, name: bytes, file: BinaryIO, digest: str, progress: Callable[[], None]) -> FileFrames:
        """Add a file, whose packets are read. Raises ``VideoUnreadable``."""
        container, stream = open_video(PlainFile(file.fileno()))
        with container:
            frames = frames_of(container, stream, progress)
        self._add(name, digest, frames)
        return frames

    def add_unreadable(self, name: bytes, digest: str) -> FileFrames:
        """Add a file without frames, which is no video."""
        frames = FileFrames(
            np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.uint32), (1, 1)
        )
        self._add(name, digest, frames)
        return frames

    def arrays(self) -> dict[str, Array]:
        """The arrays, apart from ``ends``; nothing may be added afterwards."""
        return {
            "names": np.frombuffer(self._names, np.uint8),
            "units": number_array(self._units).reshape(-1, 2),
            "digests": np.frombuffer(self._digests, np.uint8).reshape(-1, DIGEST_BYTES),
            "order": number_array(self._order),
            "keys": number_array(self._keys),
            "times": number_array(self._times),
            "checksums": number_array(self._checksums),
        }

    def _add(self, name: bytes, digest: str, frames: FileFrames) -> None:
        self._names += name
        self._order.frombytes(frames.order.tobytes())
        self._keys.frombytes(frames.keys.tobytes())
        self._times.frombytes(frames.times.tobytes())
        self._checksums.frombytes(frames.checksums.tobytes())
        self._digests += bytes.fromhex(digest)
        self._units.extend(frames.unit)
        self.ends.extend((len(self._names), len(self._order), len(self._times)))


class IndexedFrames:
    """The arrays as workers see them. ``ends``: int64 ``[3, files + 1]``."""

    def __init__(self, arrays: Mapping[str, Array], ends: NDArray[np.int64], root: bytes) -> None:
        self._arrays = arrays
        self._names, self._frames, self._packets = ends
        self._root = root

    def frames(self, file: int) -> FileFrames:
        """The frames of a file."""
        frames, packets = self._part(self._frames, file), self._part(self._packets, file)
        numerator, denominator = self._arrays["units"][file].tolist()
        return FileFrames(
            self._arrays["order"][frames],
            self._arrays["keys"][frames],
            self._arrays["times"][packets],
            self._arrays["checksums"][packets],
            (numerator, denominator),
        )

    def name(self, file: int) -> bytes:
        """The path of a file below the root."""
        return self._arrays["names"][self._part(self._names, file)].tobytes()

    def path(self, file: int) -> bytes:
        """The path of a file as the kernel takes it."""
        return os.path.join(self._root, self.name(file))  # noqa: PTH118  bytes

    @staticmethod
    def _part(ends: NDArray[np.int64], file: int) -> slice:
        return slice(*ends[file : file + 2].tolist())
