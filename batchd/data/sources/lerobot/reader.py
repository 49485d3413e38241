"""Samples of a LeRobot data set: numbers of the index, frames of videos, pictures of rows. Workers.

    sample -> episode, frame --times--> frames, clamped to the episode -> values and padding

Invariant: at most ``OPEN_MAX`` videos are open in one worker for one stream.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.media import SAMPLE_BYTES_MAX
from batchd.data.media.frames import PixelOptions
from batchd.data.media.indexed import IndexedVideos, OpenLimits
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.interface import part_of
from batchd.data.sources.lerobot.options import PADDING, TASK, LeRobotSource
from batchd.data.sources.parquet.reader import ParquetReader
from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.paths import bound_of
from batchd_wire.views import Array

OPEN_MAX = 16
"""A sample of eight cameras is of eight files; the next one may be of eight others."""


class _Window(NamedTuple):
    """A field, and its times in frames; None for the sample's own frame alone."""

    name: str
    steps: NDArray[np.int64] | None


class LeRobotReader:
    """Reads any sample; see ``interface.Reader``."""

    def __init__(self, source: LeRobotSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._index = index
        self._root = Path(index.place["root"])
        arrays: Mapping[str, Array] = dict(index.arrays)
        self._arrays = arrays
        self._firsts: NDArray[np.int64] = arrays["firsts"]
        if self._firsts[-1] != len(index):
            raise IndexMalformed(f"{self._firsts[-1]} samples of {len(index)}")
        facts = index.facts
        self._numbers = [_window(name, steps) for name, steps in facts["numbers"]]
        self._cameras = [_window(name, steps) for name, steps, _shape in facts["videos"]]
        self._shapes = [tuple(shape) for _name, _steps, shape in facts["videos"]]
        self._images = [_window(name, steps) for name, _key, steps in facts["images"]]
        self._unreadable: Mapping[str, str] = facts["unreadable"]
        self._tasks = list(index.names("tasks")) if facts["task"] else []
        bound = bound_of(source.root, allow_outside_root=source.allow_outside_root)
        self._videos = IndexedVideos(
            index,
            arrays["ends"],
            self._wanted,
            PixelOptions(1, "rgb", "apply"),
            OpenLimits(OPEN_MAX, source.max_pixels, max_bytes, bound, source.codecs),
            storage,
        )
        self.prefetch = self._videos.prefetch
        self._rows: ParquetReader | None = None
        if self._images:
            pictures = source.pictures(facts["files"], {name: key for name, key, _steps in facts["images"]})
            self._rows = ParquetReader(pictures, part_of(index, 0), max_bytes, storage)

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        values: dict[str, Value] = {}
        with self._videos.making(sample) as pixels:
            for number, camera in enumerate(self._cameras):
                values[camera.name] = self._clip(number, camera, sample, pixels)
        for image in self._images:
            values[image.name] = self._pictures(image, sample)
        return {**values, **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """The index holds all values but the pixels."""
        values: dict[str, Value] = {}
        for field in self._numbers:
            found = self._arrays[f"numbers.{field.name}"][self._at(field, sample)]
            scale = self._arrays.get(f"scale.{field.name}")
            if scale is not None:
                found = ((found.astype(np.float64) - scale[0]) / scale[1] - scale[2]).astype(np.float32)
            values[field.name] = found if found.ndim else found[()]
        for field in (*self._cameras, *self._images, *self._numbers):
            if field.steps is not None:
                values[field.name + PADDING] = self._is_outside(field.steps, sample)
        if self._tasks:
            values[TASK] = self._task(sample)
        return values

    def name(self, sample: int) -> str:
        """See ``interface.Reader``. Frames are counted from 0 in their episode."""
        episode = self._episode(sample)
        frame, second = sample - int(self._firsts[episode]), float(self._arrays["seconds"][sample])
        return f"{self._root}: episode {self._arrays['episodes'][episode]}, frame {frame} at {second:.3f} s"

    def close(self) -> None:
        """Close all files."""
        self._videos.close()
        if self._rows is not None:
            self._rows.close()

    def _episode(self, sample: int) -> int:
        return int(np.searchsorted(self._firsts, self._index.checked(sample), "right")) - 1

    def _task(self, sample: int) -> str:
        number = int(self._arrays["task_index"][sample])
        if not 0 <= number < len(self._tasks):
            raise SampleUnreadable(f"is of task {number}, and there are {len(self._tasks)}")
        return self._tasks[number].decode()

    def _at(self, field: _Window, sample: int) -> NDArray[np.int64] | int:
        """The samples whose values a field has: int64 ``[times]``, or the sample."""
        if field.steps is None:
            return sample
        episode = self._episode(sample)
        first, end = self._firsts[episode : episode + 2].tolist()
        return np.clip(sample + field.steps, first, end - 1)

    def _is_outside(self, steps: NDArray[np.int64], sample: int) -> NDArray[np.bool_]:
        episode = self._episode(sample)
        first, end = self._firsts[episode : episode + 2].tolist()
        outside: NDArray[np.bool_] = (sample + steps < first) | (sample + steps >= end)
        return outside

    def _wanted(self, sample: int) -> dict[int, list[int]]:
        """The frames of each video that a sample has, each once."""
        wanted: dict[int, set[int]] = {}
        places = self._arrays["places"][self._episode(sample)].tolist()
        for number, (place, camera) in enumerate(zip(places, self._cameras, strict=True)):
            frames = np.atleast_1d(self._arrays["frames"][self._at(camera, sample), number])
            wanted.setdefault(place, set()).update(frame for frame in frames.tolist() if frame >= 0)
        return {place: sorted(frames) for place, frames in wanted.items()}

    def _clip(
        self, number: int, camera: _Window, sample: int, pixels_of: Callable[[int, int], NDArray[np.uint8]]
    ) -> NDArray[np.uint8]:
        """The frames of a camera, uint8 ``[times, height, width, 3]``; decoded in their order."""
        file = int(self._arrays["places"][self._episode(sample), number])
        at = np.atleast_1d(self._at(camera, sample))
        frames = self._arrays["frames"][at, number]
        made = np.empty((len(at), *self._shapes[number]), np.uint8)
        if made.nbytes > SAMPLE_BYTES_MAX:
            raise SampleUnreadable(f"{camera.name} has more than {SAMPLE_BYTES_MAX} bytes")
        for place in np.argsort(at, kind="stable").tolist():
            frame = int(frames[place])
            try:
                if frame < 0:
                    raise SampleUnreadable(self._why_none(file, number, int(at[place])))
                pixels = pixels_of(file, frame)
            except SampleUnreadable as error:
                second = float(self._arrays["seconds"][at[place]])
                where = readable(self._videos.name(file))
                raise SampleUnreadable(f"{camera.name} at {second:.3f} s, {where}: {error}") from None
            if pixels.shape != made.shape[1:]:
                raise SampleUnreadable(
                    f"{camera.name} has frames of {pixels.shape[0]} x {pixels.shape[1]} pixels, and meta/info.json says "
                    f"{made.shape[1]} x {made.shape[2]}"
                )
            made[place] = pixels
        return made[0] if camera.steps is None else made

    def _why_none(self, file: int, number: int, sample: int) -> str:
        """Why a video has no frame for a sample."""
        reason = self._unreadable.get(str(file))
        if reason is not None:
            return f"the video {reason}"
        frames = self._videos.frames(file)
        start = float(self._arrays["starts"][self._episode(sample), number])
        wanted, last = start + float(self._arrays["seconds"][sample]), len(frames.order) - 1
        return (
            f"the video shows no frame within tolerance_s of its second {wanted:.6f}: it has frames from "
            f"{frames.seconds(0):.3f} s to {frames.seconds(last):.3f} s"
        )

    def _pictures(self, image: _Window, sample: int) -> Value:
        """The file of a picture, or those of several times."""
        assert self._rows is not None, "there are images"
        rows = self._arrays["rows"]
        if image.steps is None:
            return self._rows.read(int(rows[sample]))[image.name]
        found: dict[int, object] = {}
        at = np.asarray(self._at(image, sample)).tolist()
        for one in at:
            if one not in found:
                value = self._rows.read(int(rows[one]))[image.name]
                assert isinstance(value, memoryview), "the file of an image"
                found[one] = memoryview(bytes(value))
        return [found[one] for one in at]


def _window(name: str, steps: Sequence[int] | None) -> _Window:
    return _Window(name, None if steps is None else np.array(steps, np.int64))


READERS = {LeRobotSource: LeRobotReader}
