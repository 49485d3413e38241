"""The frames of clips, on paper: from the times at which a file shows its frames. Worker process.

    times    0     1     2  3     4        5        (seconds of the file, in its own unit)
    fps      |-----x-----x-----x-----x|              the frame shown at each time: 1 2 3 4
    stride 2 |-----x-----------x-----x               every second frame: 1 3 5

A frame is shown until the next one; the last one as long as frames are on average. A clip of
``fps`` lasts ``frames / fps`` seconds, so that much is left behind the last start.

Invariant: the frames of a clip ascend, and are a function of (step, times, starts drawn).
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.media.options import CLIP_PLACES, DecodeVideo
from batchd.data.samples.errors import SampleUndecodable


def frames_of_clips(
    step: DecodeVideo, ticks: NDArray[np.int64], unit: Fraction, places: Sequence[float]
) -> list[NDArray[np.int64]]:
    """The numbers of the frames of each clip, int64 ``[frames]``.

    ``ticks``: when each frame is shown, ascending, in ``unit`` seconds. ``places``: for each clip a
    number from 0 to 1 of where it is, or its seconds if ``step`` has a start. Raises
    ``SampleUndecodable``.
    """
    length = length_of(ticks)
    is_said = step.start not in CLIP_PLACES
    at = [_start(ticks, unit, seconds, length) for seconds in places] if is_said else places
    clips = [_frames(step, ticks, float(unit), length, place) for place in at]
    if step.short == "bad" and any(is_short for _clip, is_short in clips):
        raise SampleUndecodable(f"its {length * float(unit):.3f} s are too short for a clip of {step.frames} frames")
    return [clip for clip, _is_short in clips]


def seconds_of_clips(
    step: DecodeVideo, ticks: NDArray[np.int64], unit: Fraction, places: Sequence[float]
) -> list[float]:
    """The seconds of the file at which each clip of ``fps`` begins; as ``frames_of_clips``."""
    assert step.fps is not None, "the step says so"
    if step.start not in CLIP_PLACES:
        return list(places)
    distance, length = 1 / (step.fps * float(unit)), length_of(ticks)
    return [_begin(step, ticks, distance, length, place) * float(unit) for place in places]


def length_of(ticks: NDArray[np.int64]) -> float:
    """How long a file lasts, in ticks."""
    count = len(ticks)
    return (int(ticks[-1]) - int(ticks[0])) * count / (count - 1) if count > 1 else 1.0


def _frames(
    step: DecodeVideo, ticks: NDArray[np.int64], unit_s: float, length: float, place: float
) -> tuple[NDArray[np.int64], bool]:
    """The frames of one clip, and whether the video ends before it. ``length``: of it, in ticks."""
    count, each, first = len(ticks), np.arange(step.frames), int(ticks[0])
    is_said = step.start not in CLIP_PLACES
    if step.stride is not None:
        free = max(0, count - (step.frames - 1) * step.stride - 1)
        begin = min(free, int((free + 1) * place)) if step.is_random else round(free * place)
        if is_said:
            begin = int(_at(ticks, np.array([place]), length)[0])
        wanted: NDArray[np.int64] = begin + each * step.stride
        return np.minimum(wanted, count - 1), int(wanted[-1]) >= count
    if step.fps is None:
        return _at(ticks, first + (each + place) * (length / step.frames), length), count < step.frames
    distance = 1 / (step.fps * unit_s)
    times = _begin(step, ticks, distance, length, place) + each * distance
    return _at(ticks, times, length), float(times[-1]) >= first + length


def _begin(step: DecodeVideo, ticks: NDArray[np.int64], distance: float, length: float, place: float) -> float:
    """Where a clip of ``fps`` begins, in ticks; ``distance``: of its frames, in ticks."""
    if step.start not in CLIP_PLACES:
        return place
    return int(ticks[0]) + max(0.0, length - step.frames * distance) * place


def _at(ticks: NDArray[np.int64], times: NDArray[np.floating[Any]], length: float) -> NDArray[np.int64]:
    """The frames shown at these times, in ticks. Files round theirs, by half a tick at most."""
    rounded = min(0.5, length / len(ticks) / 20)
    return np.clip(np.searchsorted(ticks, times + rounded, "right") - 1, 0, len(ticks) - 1)


def _start(ticks: NDArray[np.int64], unit: Fraction, seconds: float, length: float) -> float:
    """The ticks of a start in seconds. Raises ``SampleUndecodable`` outside of the video."""
    start = seconds / float(unit)
    first, end = int(ticks[0]), int(ticks[0]) + length
    if not first - 1 < start < end:
        raise SampleUndecodable(
            f"a clip would start at {seconds:g} s, and the video is from {first * float(unit):.3f} to "
            f"{end * float(unit):.3f} s"
        )
    return start
