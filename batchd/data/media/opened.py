"""The open videos of one reader, whose scan has their frames, and what samples share. Workers.

Invariant: at most ``open_max`` files are open, as each may hold the memory of a decoder.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchd.data.media.frames import CHANGED, Pixels, VideoFrames
from batchd.data.media.indexed import IndexedFrames
from batchd.data.media.shared import SHARED_BYTES_MAX, SharedFrames, wants_of
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.storage.access import Storage
from batchd.data.storage.paths import blaming_the_sample, open_within

WantedFrames: TypeAlias = Iterable[tuple[int, Sequence[int]]]
"""The numbers of files, with the numbers of frames in them."""


class OpenLimits(NamedTuple):
    """Limits of the open files of one reader, and of each."""

    open_max: int
    max_pixels: int
    max_bytes: int
    bound: bytes | None
    """See ``storage.paths.bound_of``."""
    codecs: tuple[str, ...] = ()
    """Decoders that may be used; empty for all."""


def open_file(path: bytes, bound: bytes | None) -> int:
    """Open a regular file within ``bound``. Raises ``SampleUnreadable``."""
    with ExitStack() as where_it_fails:
        with blaming_the_sample():
            descriptor = open_within(path, bound)
        where_it_fails.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SampleUnreadable(f"is not a regular file: {CHANGED}")
        where_it_fails.pop_all()
    return descriptor


class OpenVideos:
    """The pixels of frames of indexed files. ``wanted``: those of a sample."""

    def __init__(
        self, index: IndexedFrames, pixels: Pixels, limits: OpenLimits, wanted: Callable[[int], WantedFrames]
    ) -> None:
        self._index = index
        self._limits = limits
        self._wanted = wanted
        self._shared = SharedFrames(pixels.of, lambda made: made.nbytes, SHARED_BYTES_MAX)
        self._announced: Counter[int] = Counter()
        """How often samples were announced, and not read since."""
        self._open: dict[int, VideoFrames] = {}
        """By the numbers of their files; those used lately last."""

    def announce(self, samples: Sequence[int], storage: Storage) -> None:
        """See ``interface.ReadsAhead``: what they have in common is decoded once."""
        for sample in samples:
            self._announce(sample)
        storage.requested.at_end(partial(self._forget, list(samples)))

    def begin(self, sample: int) -> None:
        """Begin with a sample, which may be announced. Paired with ``end``."""
        if not self._announced[sample]:
            self._announce(sample)

    def frame(self, file: int, number: int) -> NDArray[np.uint8]:
        """A frame of the sample; others that samples want of its group are decoded in the pass.

        Raises ``SampleUnreadable``.
        """
        return self._shared.frame(file, partial(self._video, file), number)

    def finish(self) -> None:
        """Finish the pass: the sample has all of its frames."""
        self._shared.finish()

    def end(self, sample: int) -> None:
        """Drop what the sample wanted."""
        self._forget([sample])

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def _announce(self, sample: int) -> None:
        self._announced[sample] += 1
        for file, numbers in self._wanted(sample):
            self._shared.add(file, wants_of(self._index.frames(file), numbers))

    def _forget(self, samples: Iterable[int]) -> None:
        """Drop what samples want that were announced: they were read, or will not be."""
        for sample in samples:
            if self._announced[sample] > 0:
                self._announced[sample] -= 1
                for file, numbers in self._wanted(sample):
                    self._shared.discard(file, wants_of(self._index.frames(file), numbers))

    def _video(self, file: int) -> VideoFrames:
        """An open file; the least recently used one is closed if there are too many."""
        video = self._open.pop(file, None)
        if video is None:
            limits = self._limits
            if len(self._open) >= limits.open_max:
                self._open.pop(next(iter(self._open))).close()
            descriptor = open_file(self._index.path(file), limits.bound)
            video = VideoFrames(descriptor, self._index.frames(file), limits.max_pixels, limits.max_bytes)
            if limits.codecs and video.codec not in limits.codecs:
                video.close()
                raise SampleUnreadable(f"is coded as {video.codec}, which is none of codecs = {[*limits.codecs]}")
        self._open[file] = video
        return video
