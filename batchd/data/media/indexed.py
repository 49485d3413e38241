"""Video files in the index of a source: its scan adds files, and workers read their frames.

    names       uint8 [bytes]         the paths of the files below the root, joined
    units       int64 [files, 2]      a time of the file is so many numerator / denominator seconds
    digests     uint8 [files, 32]     of the file, as the scan gives it
    order, keys, times, checksums     of all files: see ``packets``

Frames and packets are counted within their file. The source keeps ``ends``, beside its own.

Invariant: no decoder runs in the scan.
"""

import os
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.media.containers import PlainFile, VideoUnreadable, open_video
from batchd.data.media.frames import CHANGED, PixelOptions, Pixels, VideoFrames
from batchd.data.media.opened import OpenVideos
from batchd.data.media.packets import FileFrames, frames_of
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, number_array
from batchd.data.storage.paths import blaming_the_sample, open_within
from batchd.data.storage.values import fingerprint
from batchd_wire.views import Array

DIGEST_BYTES = 32


class GrowingFrames:
    """The arrays while they are built."""

    def __init__(self) -> None:
        self._ends = array("q", [0, 0, 0])
        self._names = bytearray()
        self._units = array("q")
        self._digests = bytearray()
        self._order = array("I")
        self._keys = array("I")
        self._times = array("q")
        self._checksums = array("I")

    def __len__(self) -> int:
        return len(self._units) // 2

    def add(self, name: bytes, file: BinaryIO, progress: Callable[[], None]) -> tuple[FileFrames, str]:
        """Add a file, whose packets are read. The second is why it has no frames, if it is none."""
        digest, reason = fingerprint(file, os.fstat(file.fileno()).st_size)[1], ""
        try:
            container, stream = open_video(PlainFile(file.fileno()))
            with container:
                frames = frames_of(container, stream, progress)
        except VideoUnreadable as error:
            none = np.zeros(0, np.uint32)
            frames, reason = FileFrames(none, none, none.astype(np.int64), none, (1, 1)), str(error)
        self._names += name
        self._order.frombytes(frames.order.tobytes())
        self._keys.frombytes(frames.keys.tobytes())
        self._times.frombytes(frames.times.tobytes())
        self._checksums.frombytes(frames.checksums.tobytes())
        self._digests += bytes.fromhex(digest)
        self._units.extend(frames.unit)
        self._ends.extend((len(self._names), len(self._order), len(self._times)))
        return frames, reason

    @property
    def ends(self) -> NDArray[np.int64]:
        """Where each file begins in names, frames and packets, and the end: ``[3, files + 1]``."""
        return np.ascontiguousarray(number_array(self._ends).reshape(-1, 3).T)

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


class OpenLimits(NamedTuple):
    """Limits of the open files of one reader, and of each."""

    open_max: int
    max_pixels: int
    max_bytes: int
    bound: bytes | None
    """See ``storage.paths.bound_of``."""
    codecs: tuple[str, ...] = ()
    """Decoders that may be used; empty for all."""


class IndexedVideos:
    """The videos of an index, as workers see them. ``ends``: int64 ``[3, files + 1]``.

    ``wanted``: the files of a sample, and the numbers of the frames that it has of each.
    """

    def __init__(  # noqa: PLR0913, PLR0917  what pixels are, and of which files
        self,
        index: SourceIndex,
        ends: NDArray[np.int64],
        wanted: Callable[[int], Mapping[int, Sequence[int]]],
        options: PixelOptions,
        limits: OpenLimits,
        storage: Storage,
    ) -> None:
        self._arrays = index.arrays
        self._root = os.fsencode(index.place["root"])
        self._names, self._frames, self._packets = ends
        self._wanted = wanted
        self._limits = limits
        self._storage = storage
        self.videos = OpenVideos(Pixels(options).of, lambda made: made.nbytes, limits.open_max, limits.codecs)
        self.close = self.videos.close_all

    def prefetch(self, samples: Sequence[int]) -> None:
        """See ``interface.ReadsAhead``: what they have in common is decoded once."""
        for sample in samples:
            wanted = self._wanted(sample)
            self.videos.announce(sample, {file: partial(_these, numbers) for file, numbers in wanted.items()})
        self._storage.requested.at_end(partial(self._forget, tuple(samples)))

    @contextmanager
    def making(self, sample: int) -> Iterator[Callable[[int, int], NDArray[np.uint8]]]:
        """What gives pixels of a sample by file and number. Raises ``SampleUnreadable``."""
        wanted = self._wanted(sample)
        self.videos.begin(sample, {file: (self.frames(file), numbers) for file, numbers in wanted.items()})
        try:
            yield lambda file, number: self.videos.frame(file, partial(self._opened, file), number)
            self.videos.finish()
        finally:
            self.videos.end()

    def frames(self, file: int) -> FileFrames:
        """The frames of a file."""
        frames, packets = _part(self._frames, file), _part(self._packets, file)
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
        return self._arrays["names"][_part(self._names, file)].tobytes()

    def path(self, file: int) -> bytes:
        """The path of a file as the kernel takes it."""
        return os.path.join(self._root, self.name(file))  # noqa: PTH118  bytes

    def _forget(self, samples: Iterable[int]) -> None:
        for sample in samples:
            self.videos.forget(sample)

    def _opened(self, file: int) -> VideoFrames:
        with ExitStack() as where_it_fails:
            with blaming_the_sample():
                descriptor = open_within(self.path(file), self._limits.bound)
            where_it_fails.callback(os.close, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SampleUnreadable(f"is not a regular file: {CHANGED}")
            where_it_fails.pop_all()
        return VideoFrames(descriptor, self.frames(file), self._limits.max_pixels, self._limits.max_bytes)


def _part(ends: NDArray[np.int64], file: int) -> slice:
    return slice(*ends[file : file + 2].tolist())


def _these(numbers: Sequence[int], _frames: FileFrames) -> Sequence[int]:
    return numbers
