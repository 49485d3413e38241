"""The steps on paper: which box, which size, which way up, decided from a header before any pixel is touched. Worker process.

A step speaks of the image as it is looked at; the pixels lie in memory as they were stored. The two differ by a turn
(transpose first, then flips), which EXIF and random flips only note down. So an image is turned at most once, at the end,
when it is smallest, and a crop is known early enough to decode no more detail than it needs.

    as stored  --cut, scale, pad (moves, in stored coordinates)-->  --turn-->  as looked at

Invariant: applying the moves and then the turn gives what applying the steps one by one to the upright image would.
Standard library only.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from batchd.config.image_steps import CenterCrop, RandomFlip, RandomResizedCrop, Resize
from batchd.config.step import Interpolation, Size
from batchd.config.steps import Step
from batchd.pipeline.errors import SampleUndecodable

RandomNumber: TypeAlias = Callable[[], float]
"""Draws from [0, 1)."""

CROP_ATTEMPTS = 10
DECODE_FACTORS = (8, 4, 2)
"""A JPEG decodes at 1/2, 1/4 and 1/8 in less time than whole; 3/8, 5/8, 6/8 and 7/8 take longer, having no vector code."""

DECODE_SIDE_PIXELS_MIN = 64
"""Below this nothing is gained, and the sizes of different scales round to the same number."""


class Turn(NamedTuple):
    """How the stored image becomes the one looked at: transposed first, then flipped."""

    transpose: bool
    vertical: bool
    horizontal: bool


UPRIGHT = Turn(transpose=False, vertical=False, horizontal=False)

_MIRRORED = Turn(transpose=False, vertical=False, horizontal=True)
_ROTATED = Turn(transpose=False, vertical=True, horizontal=True)
_UPSIDE_DOWN = Turn(transpose=False, vertical=True, horizontal=False)

TURN_OF_ORIENTATION: dict[int, Turn] = {
    1: UPRIGHT,
    2: _MIRRORED,
    3: _ROTATED,
    4: _UPSIDE_DOWN,
    5: UPRIGHT._replace(transpose=True),
    6: _MIRRORED._replace(transpose=True),
    7: _ROTATED._replace(transpose=True),
    8: _UPSIDE_DOWN._replace(transpose=True),
}
"""By the number that EXIF has for it."""


class Cut(NamedTuple):
    """Keep this box, in pixels from the top left."""

    top: int
    left: int
    height: int
    width: int


class Scale(NamedTuple):
    """Resample to this size."""

    height: int
    width: int
    interpolation: Interpolation


class Pad(NamedTuple):
    """Put the image into black of this size, so far from the top left."""

    top: int
    left: int
    height: int
    width: int


Move: TypeAlias = Cut | Scale | Pad


class Geometry:
    """One image on its way through the steps. ``height`` and ``width`` are as looked at; ``moves`` are as stored."""

    __slots__ = ("height", "moves", "pixels_max", "turn", "width")

    def __init__(self, height: int, width: int, orientation: int, pixels_max: int) -> None:
        self.turn = TURN_OF_ORIENTATION[orientation]
        """What is left to do when all moves are made."""
        self.height, self.width = (width, height) if self.turn.transpose else (height, width)
        self.moves: list[Move] = []
        self.pixels_max = pixels_max

    def cut(self, top: int, left: int, height: int, width: int) -> None:
        """Keep a box of the image."""
        box = Cut(top, left, height, width)
        self.moves.append(box if self.turn == UPRIGHT else self._stored_box(box, self.height, self.width))
        self.height, self.width = height, width

    def pad(self, top: int, left: int, height: int, width: int) -> None:
        """Put the image into black of ``height`` by ``width``."""
        place = self._stored_box(Cut(top, left, self.height, self.width), height, width)
        self.moves.append(Pad(place.top, place.left, *self._stored_size(height, width)))
        self.height, self.width = height, width

    def scale(self, height: int, width: int, interpolation: Interpolation) -> None:
        """Resample the image. Raises ``SampleUndecodable`` where the result would be larger than an image may be."""
        if height * width > self.pixels_max:
            raise SampleUndecodable(
                f"{self.width} x {self.height} pixels would be resized to {width} x {height}, "
                f"more than the {self.pixels_max} pixels of max_pixels"
            )
        self.moves.append(Scale(*self._stored_size(height, width), interpolation))
        self.height, self.width = height, width

    def flip(self, direction: Literal["horizontal", "vertical"]) -> None:
        """Mirror the image."""
        transpose, vertical, horizontal = self.turn
        if direction == "horizontal":
            self.turn = Turn(transpose, vertical, not horizontal)
        else:
            self.turn = Turn(transpose, not vertical, horizontal)

    def _stored_box(self, box: Cut, outer_height: int, outer_width: int) -> Cut:
        """Translate a box inside an outer image from how it is looked at to how it is stored."""
        top, left, height, width = box
        if self.turn.vertical:
            top = outer_height - top - height
        if self.turn.horizontal:
            left = outer_width - left - width
        return Cut(left, top, width, height) if self.turn.transpose else Cut(top, left, height, width)

    def _stored_size(self, height: int, width: int) -> Size:
        return (width, height) if self.turn.transpose else (height, width)


def decode_factor(moves: list[Move], height: int, width: int) -> int:
    """Choose 1, 2, 4 or 8: the most that a stored ``height`` by ``width`` image may shrink while it is decoded.

    What the first scaling starts from then still has at least the size that it results in, so nothing is ever enlarged
    that needed not to be.
    """
    first = moves[0] if moves else None
    if isinstance(first, Cut) and len(moves) > 1:
        height, width = first.height, first.width
        first = moves[1]
    if not isinstance(first, Scale) or min(height, width) < DECODE_SIDE_PIXELS_MIN:
        return 1
    for factor in DECODE_FACTORS:
        if height >= first.height * factor and width >= first.width * factor:
            return factor
    return 1


def scaled_cut(cut: Cut, whole: Size, decoded: Size) -> Cut:
    """Translate a box in an image of size ``whole`` to the same image decoded smaller, to the nearest pixel."""
    down, across = decoded[0] / whole[0], decoded[1] / whole[1]
    height, width = max(1, round(cut.height * down)), max(1, round(cut.width * across))
    top, left = min(round(cut.top * down), decoded[0] - height), min(round(cut.left * across), decoded[1] - width)
    return Cut(top, left, height, width)


Planner: TypeAlias = Callable[[Geometry, RandomNumber], None]


def planner_for(step: Step) -> Planner | None:
    """Make the function that applies ``step`` on paper; None for steps that change no geometry."""
    match step:
        case Resize():
            return _plan_resize(step)
        case CenterCrop():
            return _plan_center_crop(step)
        case RandomResizedCrop():
            return _plan_random_resized_crop(step)
        case RandomFlip():
            return _plan_random_flip(step)
        case _:
            return None


def _plan_resize(step: Resize) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        height, width = geometry.height, geometry.width
        if step.size is not None:
            geometry.scale(*step.size, step.interpolation)
            return
        assert step.shorter_side is not None
        shorter = min(height, width)
        geometry.scale(step.shorter_side * height // shorter, step.shorter_side * width // shorter, step.interpolation)

    return plan


def _plan_center_crop(step: CenterCrop) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        height, width = min(geometry.height, step.size[0]), min(geometry.width, step.size[1])
        geometry.cut(round((geometry.height - height) / 2), round((geometry.width - width) / 2), height, width)
        if (height, width) != step.size:
            geometry.pad((step.size[0] - height) // 2, (step.size[1] - width) // 2, *step.size)

    return plan


def _plan_random_resized_crop(step: RandomResizedCrop) -> Planner:
    """Draw as torchvision documents it: uniform in area, log-uniform in proportions, ten attempts, then the middle."""
    smallest, area_range = step.scale[0], step.scale[1] - step.scale[0]
    log_narrowest, log_range = math.log(step.ratio[0]), math.log(step.ratio[1]) - math.log(step.ratio[0])
    target_height, target_width = step.size

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        full_height, full_width = geometry.height, geometry.width
        for _ in range(CROP_ATTEMPTS):
            area = full_height * full_width * (smallest + area_range * random())
            ratio = math.exp(log_narrowest + log_range * random())
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= full_width and 0 < height <= full_height:
                top = int((full_height - height + 1) * random())
                left = int((full_width - width + 1) * random())
                break
        else:
            height, width = _largest_box(full_height, full_width, step.ratio)
            top, left = (full_height - height) // 2, (full_width - width) // 2
        geometry.cut(top, left, height, width)
        geometry.scale(target_height, target_width, step.interpolation)

    return plan


def _largest_box(height: int, width: int, ratio: tuple[float, float]) -> Size:
    """Find the largest box in ``height`` by ``width`` whose proportions are in range."""
    if width < height * ratio[0]:
        return max(1, min(height, round(width / ratio[0]))), width
    if width > height * ratio[1]:
        return height, max(1, min(width, round(height * ratio[1])))
    return height, width


def _plan_random_flip(step: RandomFlip) -> Planner:
    def plan(geometry: Geometry, random: RandomNumber) -> None:
        if random() < step.probability:
            geometry.flip(step.direction)

    return plan
