"""Open videos, and the frames of their groups of pictures that samples have in common. Workers.

    announced  samples --> the frames that they want, once their file is known
    asked      key frame -> frames that others want before it, kept -> the frame that is asked for
    finished   -> the frames that others want behind it, kept: the group is left
    later      taken; dropped when no sample wants them

Invariants: frames that have no room are decoded again by the samples that want them. So what is
shared decides about time, and never about pixels. At most ``open_max`` files are open, as each may
hold the memory of a decoder.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import av

from batchd.data.media.frames import VideoFrames
from batchd.data.media.packets import FileFrames
from batchd.data.samples.errors import SampleUnreadable

SHARED_BYTES_MAX = 64 << 20
"""Of what one worker keeps of frames for samples which it will read, of one stream."""

Kept = TypeVar("Kept")
"""What is kept of a frame."""
Numbers: TypeAlias = Callable[[FileFrames], Iterable[int]]
"""The numbers of the frames that a sample wants of a file."""
_Wants: TypeAlias = list[tuple[Hashable, int, int]]
"""The frames that a sample wants: the file of each, the key frame of its group, and its number."""


@dataclass(slots=True)
class _Ahead:
    """A sample that will be made, and how often it was announced.

    ``wants``: of files that were known since.
    """

    wanted: Mapping[Hashable, Numbers]
    times: int = 0
    wants: _Wants = field(default_factory=list)


class OpenVideos(Generic[Kept]):
    """The videos of a reader or a step, each under a name, and what ``make`` makes of their frames.

    ``bytes_of``: the memory of that, of which at most one is kept beyond ``bytes_max``. ``codecs``:
    decoders that may be used; empty for all.
    """

    def __init__(
        self,
        make: Callable[[av.VideoFrame], Kept],
        bytes_of: Callable[[Kept], int],
        open_max: int,
        codecs: tuple[str, ...] = (),
    ) -> None:
        self._make = make
        self._bytes_of = bytes_of
        self._open_max = open_max
        self._codecs = codecs
        self.bytes_max = SHARED_BYTES_MAX
        self.kept_bytes = 0
        self.kept: dict[tuple[Hashable, int], Kept] = {}
        """By the file, and the number of the frame in it."""
        self.wanted: dict[tuple[Hashable, int], Counter[int]] = {}
        """How many samples want a frame, by the file and the key frame of its group."""
        self.ahead: dict[Hashable, _Ahead] = {}
        self._unknown: dict[Hashable, set[Hashable]] = {}
        """Samples ahead, by those of their files that were not known since."""
        self._current: _Wants = []
        self._open: dict[Hashable, VideoFrames] = {}
        """Those used lately last."""
        self._group: tuple[Hashable, int, VideoFrames] | None = None
        """The group that is being decoded."""

    def open(self, file: Hashable, opened: Callable[[], VideoFrames]) -> VideoFrames:
        """A file, which ``opened`` opens if it is not open. Raises ``SampleUnreadable``."""
        video = self._open.pop(file, None)
        if video is None:
            while len(self._open) >= self._open_max:
                self.close(next(iter(self._open)))
            video = opened()
        self._open[file] = video
        if self._codecs and video.codec not in self._codecs:
            raise SampleUnreadable(f"is coded as {video.codec}, which is none of codecs = {[*self._codecs]}")
        return video

    def close(self, file: Hashable) -> None:
        """Close a file, if it is open."""
        video = self._open.pop(file, None)
        if video is not None:
            video.close()

    def close_all(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def announce(self, sample: Hashable, wanted: Mapping[Hashable, Numbers]) -> None:
        """A sample will be made, of frames of these files. Paired with ``forget``."""
        ahead = self.ahead.setdefault(sample, _Ahead(wanted))
        ahead.times += 1
        if ahead.times == 1:
            for file in wanted:
                self._unknown.setdefault(file, set()).add(sample)

    def forget(self, sample: Hashable) -> None:
        """A sample that was announced was made, or will not be."""
        ahead = self.ahead.get(sample)
        if ahead is not None:
            ahead.times -= 1
            if not ahead.times:
                self._drop(sample)

    def begin(self, sample: Hashable, wanted: Mapping[Hashable, tuple[FileFrames, Iterable[int]]]) -> None:
        """Begin with a sample, of frames of known files: ``end`` follows, or the next sample."""
        self.end()
        for file, (frames, numbers) in wanted.items():
            for other in self._unknown.pop(file, ()):
                ahead = self.ahead[other]
                self._add(ahead.wants, file, frames, ahead.wanted[file](frames))
            self._add(self._current, file, frames, numbers)
        self.forget(sample)

    def end(self) -> None:
        """Drop what the current sample wanted."""
        self._discard(self._current)
        self._current, self._group = [], None

    def frame(self, file: Hashable, opened: Callable[[], VideoFrames], number: int) -> Kept:
        """A frame that the current sample wants. Raises ``SampleUnreadable``."""
        known = self.kept.get((file, number))
        if known is not None:
            return known
        if self._group is not None and self._group[0] != file:
            self.finish()  # this file may be closed for the other one
        video = self.open(file, opened)
        key = int(video.frames.keys[number])
        if self._group is not None and self._group[1] != key:
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

    def _drop(self, sample: Hashable) -> None:
        ahead = self.ahead.pop(sample)
        for file in self._unknown.keys() & ahead.wanted.keys():
            self._unknown[file].discard(sample)
            if not self._unknown[file]:
                del self._unknown[file]
        self._discard(ahead.wants)

    def _add(self, wants: _Wants, file: Hashable, frames: FileFrames, numbers: Iterable[int]) -> None:
        for number in numbers:
            key = int(frames.keys[number])
            wants.append((file, key, number))
            self.wanted.setdefault((file, key), Counter())[number] += 1

    def _discard(self, wants: _Wants) -> None:
        for file, key, number in wants:
            wanted = self.wanted[file, key]
            wanted[number] -= 1
            if not wanted[number]:
                del wanted[number]
                kept = self.kept.pop((file, number), None)
                if kept is not None:
                    self.kept_bytes -= self._bytes_of(kept)
            if not wanted:
                del self.wanted[file, key]

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
