"""Frames of groups of pictures that samples have in common, each decoded in one pass. Workers.

    wanted    samples --> the frames of each group that they want
    asked     key frame -> frames that others want before it, kept -> the frame that is asked for
    finished  -> the frames that others want behind it, kept: the group is left
    later     taken; dropped when no sample wants them

Invariant: frames that have no room are decoded again by the samples that want them. So what is
shared decides about time, and never about pixels.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

import av

from batchd.data.media.frames import FileFrames, VideoFrames
from batchd.data.samples.errors import SampleUnreadable

SHARED_BYTES_MAX = 64 << 20
"""Of what one worker keeps of frames for samples which it will read, of one stream."""

Kept = TypeVar("Kept")
"""What is kept of a frame."""
Wants: TypeAlias = Sequence[tuple[int, int]]
"""The frames that a sample wants of a file: the key frame of the group of each, and its number."""


def wants_of(frames: FileFrames, numbers: Iterable[int]) -> Wants:
    """The frames of a file with these numbers, as ``SharedFrames.add`` takes them."""
    return [(int(frames.keys[number]), number) for number in numbers]


class SharedFrames(Generic[Kept]):
    """Keeps what ``make`` makes of frames, which has so many bytes; see the module.

    At most one of them is beyond ``bytes_max``.
    """

    def __init__(self, make: Callable[[av.VideoFrame], Kept], bytes_of: Callable[[Kept], int], bytes_max: int) -> None:
        self._make = make
        self._bytes_of = bytes_of
        self.bytes_max = bytes_max
        self.kept_bytes = 0
        self.wanted: dict[tuple[Hashable, int], Counter[int]] = {}
        """How many samples want a frame, by the file and the key frame of its group."""
        self.kept: dict[tuple[Hashable, int], Kept] = {}
        """By the file, and the number of the frame in it."""
        self._group: tuple[Hashable, int, VideoFrames] | None = None
        """The group that is being decoded."""

    def add(self, file: Hashable, wants: Wants) -> None:
        """A sample wants these frames. Paired with ``discard``."""
        for key, number in wants:
            self.wanted.setdefault((file, key), Counter())[number] += 1

    def discard(self, file: Hashable, wants: Wants) -> None:
        """The sample was made, or will not be."""
        for key, number in wants:
            wanted = self.wanted[file, key]
            wanted[number] -= 1
            if not wanted[number]:
                del wanted[number]
                kept = self.kept.pop((file, number), None)
                if kept is not None:
                    self.kept_bytes -= self._bytes_of(kept)
            if not wanted:
                del self.wanted[file, key]

    def frame(self, file: Hashable, opened: Callable[[], VideoFrames], number: int) -> Kept:
        """A frame that the current sample wants. Raises ``SampleUnreadable``."""
        known = self.kept.get((file, number))
        if known is not None:
            return known
        video = opened()
        key = int(video.frames.keys[number])
        if self._group is not None and self._group[:2] != (file, key):
            self.finish()
        self._group = file, key, video
        is_further = video.is_further(number)
        self._keep_some(lambda other: other < number and (not is_further or video.is_further(other)))
        made = self._make(video.frame(number))
        if self.wanted[file, key][number] > 1 and self._has_room:
            self._keep(file, number, made)
        return made

    def finish(self) -> None:
        """Decode what others want of the current group; the current sample has its frames."""
        if self._group is not None:
            self._keep_some(self._group[2].is_further)
            self._group = None

    def _keep_some(self, is_next: Callable[[int], bool]) -> None:
        """Keep wanted frames while there is room; the samples that want a damaged one say so."""
        assert self._group is not None, "a group is decoded"
        file, key, video = self._group
        numbers = sorted(number for number in self.wanted.get((file, key), ()) if (file, number) not in self.kept)
        with suppress(SampleUnreadable):
            for number in numbers:
                if not is_next(number):
                    continue
                if not self._has_room:
                    return
                self._keep(file, number, self._make(video.frame(number)))

    @property
    def _has_room(self) -> bool:
        return self.kept_bytes < self.bytes_max

    def _keep(self, file: Hashable, number: int, made: Kept) -> None:
        self.kept[file, number] = made
        self.kept_bytes += self._bytes_of(made)
