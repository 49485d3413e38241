"""The steps on paper: box, size and orientation, decided from a header before any pixel.

Worker process; standard library only. A step describes the image as a viewer sees it; the pixels in
memory are as stored. The two differ by a turn (transpose first, then flips), which EXIF
and random flips only note down. So an image is turned at most once, at the end, when it is
smallest, and a crop is known early enough to decode no more detail than it needs.

    as stored  --cut, scale, pad, warp (moves, in stored coordinates)-->  --turn-->  as looked at

Fields that follow the image (a mask, boxes, points) are moved step by step: ``trail`` has
the same moves and the turns in their places, all in coordinates as looked at.

Random numbers are drawn in the order of the steps, and within a step in the order that its options
name, the one for its ``probability`` first. A step that has nothing to choose from draws none, and
one that does not act draws what it would have drawn.

Invariant: applying the moves and then the turn gives what applying the steps one by one to the
upright image would.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from batchd.data.pipeline.image import options
from batchd.data.pipeline.options import SIDE_PIXELS_MAX, Interpolation, Size, StepOptions
from batchd.data.samples.errors import SampleUndecodable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DECODE_FACTORS = (8, 4, 2)
"""3/8, 5/8, 6/8 and 7/8 have no vector code, so they take longer than decoding a JPEG whole."""

HALF = 2
"""The one smaller scale at which a cache keeps an image, too: see ``kept_sizes``."""

DECODE_SIDE_PIXELS_MIN = 64
"""Below this nothing is gained, and the sizes of different scales round to the same number."""


class Orientation(NamedTuple):
    """How the stored image becomes the viewer's: transposed first, then flipped."""

    transpose: bool
    vertical: bool
    horizontal: bool


UPRIGHT = Orientation(transpose=False, vertical=False, horizontal=False)

BLACK: options.Fill = (0,)
WARPED_SIDE_PIXELS_MAX = (1 << 15) - 2
"""Places in 1/2**32 of a pixel stay within 64 bits, with much room."""

_MIRRORED = Orientation(transpose=False, vertical=False, horizontal=True)
_ROTATED = Orientation(transpose=False, vertical=True, horizontal=True)
_UPSIDE_DOWN = Orientation(transpose=False, vertical=True, horizontal=False)

_FLIPS = (UPRIGHT, _MIRRORED, _ROTATED, _UPSIDE_DOWN)
TURN_OF_ORIENTATION = dict(enumerate([*_FLIPS, *(turn._replace(transpose=True) for turn in _FLIPS)], 1))
"""By the number that EXIF has for it, 1 to 8."""

QUARTER_TURNS = (UPRIGHT, _UPSIDE_DOWN._replace(transpose=True), _ROTATED, _MIRRORED._replace(transpose=True))
"""By their number, counter-clockwise."""


class Cut(NamedTuple):
    """Keep this box, in pixels from the top left."""

    top: int
    left: int
    height: int
    width: int

    def within(self, outer: "Cut") -> "Cut":
        """The same box, in pixels from the top left of ``outer``."""
        return self._replace(top=self.top - outer.top, left=self.left - outer.left)


def box_around(boxes: Sequence[Cut]) -> Cut:
    """The smallest box with all of these in it."""
    top, left = min(box.top for box in boxes), min(box.left for box in boxes)
    bottom, right = max(box.top + box.height for box in boxes), max(box.left + box.width for box in boxes)
    return Cut(top, left, bottom - top, right - left)


Mirrored: TypeAlias = tuple[bool, bool]
"""Whether rows, and columns, are looked at the other way round than they are stored; "nearest"
wants to know it, as a centre that lies between two pixels is the further one's, as the image is
looked at."""


class Resampling(NamedTuple):
    """Resample to this size."""

    height: int
    width: int
    interpolation: Interpolation
    mirrored: Mirrored = (False, False)
    transposed: bool = False
    """Whether the rows that are looked at are columns as stored; "lanczos" wants to know it, as it
    weighs one side before the other."""


class Padding(NamedTuple):
    """Put the image into ``fill`` of this size, so far from the top left."""

    top: int
    left: int
    height: int
    width: int
    fill: options.Fill = BLACK


class Warp(NamedTuple):
    """Rotate the image about its middle, counter-clockwise, on a canvas of its own size."""

    height: int
    width: int
    degrees: float
    interpolation: Literal["nearest", "linear"]
    fill: options.Fill
    mirrored: Mirrored = (False, False)


Move: TypeAlias = Cut | Resampling | Padding | Warp


class Motion(ABC):
    """The move of a step that moves pixels by itself, and knows how to move what follows them."""

    height: int
    width: int
    """The size of the image afterwards."""

    @abstractmethod
    def moved(self, points: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
        """The points, x and y in ``[..., 2]``, afterwards; the first pixel is from 0 to 1."""

    @abstractmethod
    def move_mask(self, mask: "npt.NDArray[np.uint8]", into: "npt.NDArray[np.uint8]", fill: options.Fill) -> None:
        """Write masks, uint8 ``[height, width, up to 4]``, elsewhere; no number is invented."""


TrailPart: TypeAlias = Move | Orientation | Motion


class Geometry:
    """An image being planned: ``height`` and ``width`` for the viewer, ``moves`` as stored."""

    __slots__ = ("bucket_size", "drawn", "height", "moves", "pixels_max", "trail", "turn", "width")

    def __init__(
        self, height: int, width: int, orientation: int, pixels_max: int, *, is_followed: bool = False
    ) -> None:
        self.turn = TURN_OF_ORIENTATION[orientation]
        """The rest when all moves are made."""
        self.height, self.width = (width, height) if self.turn.transpose else (height, width)
        self.moves: list[Move] = []
        self.trail: list[TrailPart] | None = [] if is_followed else None
        self.pixels_max = pixels_max
        self.bucket_size: Size | None = None
        """Height and width of the images of the batch; None where no batch is made."""
        self.drawn = 0
        """The number of the size that the batch has drawn."""

    def copy(self) -> "Geometry":
        """The same plan, for a step that does not act on this image, and draws its numbers."""
        other = Geometry(self.height, self.width, 1, self.pixels_max, is_followed=self.trail is not None)
        other.turn, other.moves = self.turn, self.moves.copy()
        return other

    def cut(self, top: int, left: int, height: int, width: int) -> None:
        """Keep a box of the image."""
        box = Cut(top, left, height, width)
        self.moves.append(box if self.turn == UPRIGHT else self._stored_box(box, self.height, self.width))
        self.height, self.width = height, width
        if self.trail is not None:
            self.trail.append(box)

    def pad(self, top: int, left: int, height: int, width: int, fill: options.Fill = BLACK) -> None:
        """Put the image into ``fill`` of ``height`` by ``width``."""
        place = self._stored_box(Cut(top, left, self.height, self.width), height, width)
        self.moves.append(Padding(place.top, place.left, *self._stored_size(height, width), fill))
        self.height, self.width = height, width
        if self.trail is not None:
            self.trail.append(Padding(top, left, height, width, fill))

    def window(self, top: int, left: int, height: int, width: int, fill: options.Fill) -> None:
        """Keep a box that may reach beyond the image, with ``fill`` there; nothing is enlarged."""
        first_row, first_column = min(max(top, 0), self.height), min(max(left, 0), self.width)
        rows = max(0, min(top + height, self.height) - first_row)
        columns = max(0, min(left + width, self.width) - first_column)
        if (rows, columns) != (self.height, self.width):
            self.cut(first_row, first_column, rows, columns)
        if (rows, columns) != (height, width):
            above, before = min(max(-top, 0), height - rows), min(max(-left, 0), width - columns)
            self.pad(above, before, height, width, fill)

    def scale(self, height: int, width: int, interpolation: Interpolation) -> None:
        """Resample the image. Raises ``SampleUndecodable`` above ``pixels_max``."""
        if height * width > self.pixels_max:
            raise SampleUndecodable(
                f"{self.width} x {self.height} pixels would be resized to {width} x {height}, "
                f"more than the {self.pixels_max} pixels of max_pixels"
            )
        mirrored, transposed = self._mirrored(interpolation), interpolation == "lanczos" and self.turn.transpose
        self.moves.append(Resampling(*self._stored_size(height, width), interpolation, mirrored, transposed))
        self.height, self.width = height, width
        if self.trail is not None:
            self.trail.append(Resampling(height, width, interpolation))

    def turn_further(self, further: Orientation) -> None:
        """Mirror the image, or turn it by quarters."""
        transpose, vertical, horizontal = self.turn
        if further.transpose:
            vertical, horizontal = horizontal, vertical
            self.height, self.width = self.width, self.height
        self.turn = Orientation(
            transpose != further.transpose, vertical != further.vertical, horizontal != further.horizontal
        )
        if self.trail is not None:
            self.trail.append(further)

    def rotate(self, degrees: float, interpolation: Literal["nearest", "linear"], fill: options.Fill) -> None:
        """Rotate the image about its middle. Raises ``SampleUndecodable`` if it is too large."""
        if max(self.height, self.width) > WARPED_SIDE_PIXELS_MAX:
            raise SampleUndecodable(
                f"{self.width} x {self.height} pixels cannot be rotated: sides of {WARPED_SIDE_PIXELS_MAX} pixels at most; "
                'a "resize" in front makes it fit'
            )
        is_mirrored = sum(self.turn) % 2 == 1
        stored_degrees = -degrees if is_mirrored else degrees
        size, mirrored = self._stored_size(self.height, self.width), self._mirrored(interpolation)
        self.moves.append(Warp(*size, stored_degrees, interpolation, fill, mirrored))
        if self.trail is not None:
            self.trail.append(Warp(self.height, self.width, degrees, interpolation, fill))

    def _stored_box(self, box: Cut, outer_height: int, outer_width: int) -> Cut:
        """Translate a box inside an outer image from the viewer's coordinates to stored ones."""
        top, left, height, width = box
        if self.turn.vertical:
            top = outer_height - top - height
        if self.turn.horizontal:
            left = outer_width - left - width
        return Cut(left, top, width, height) if self.turn.transpose else Cut(top, left, height, width)

    def _mirrored(self, interpolation: Interpolation) -> Mirrored:
        if interpolation != "nearest":
            return (False, False)
        transpose, vertical, horizontal = self.turn
        return (horizontal, vertical) if transpose else (vertical, horizontal)

    def _stored_size(self, height: int, width: int) -> Size:
        return (width, height) if self.turn.transpose else (height, width)


class DecodePlan(NamedTuple):
    """The part of a stored image to decode: a box, at 1/``factor``, and the remaining moves."""

    factor: int
    box: Cut
    """In pixels of the image at 1/``factor``."""
    moves: list[Move]


def plan_decoding(
    moves: list[Move], height: int, width: int, *, is_scaled: bool, smallest: Size | None = None
) -> DecodePlan:
    """Plan to decode no more of a stored image, nor larger (``is_scaled``), than its moves need.

    ``smallest``: of a crop in front of the others, if the scale is to be that of the smallest crop.
    """
    factor = decode_factor(moves, height, width, smallest) if is_scaled else 1
    decoded = -(-height // factor), -(-width // factor)
    cut = moves[0] if moves else None
    if not isinstance(cut, Cut) or not cut.height or not cut.width:
        return DecodePlan(factor, Cut(0, 0, *decoded), moves)
    return DecodePlan(factor, scaled_cut(cut, (height, width), decoded) if factor > 1 else cut, moves[1:])


def decode_factor(moves: Sequence[Move], height: int, width: int, smallest: Size | None = None) -> int:
    """Choose 1, 2, 4 or 8: how far a stored image may shrink in decoding; see ``plan_decoding``.

    The first scaling then starts from no less than its result, so it never enlarges needlessly.
    """
    first = moves[0] if moves else None
    if isinstance(first, Cut) and len(moves) > 1:
        height, width = min(first.height, (smallest or first[2:])[0]), min(first.width, (smallest or first[2:])[1])
        first = moves[1]
    if not isinstance(first, Resampling) or min(height, width) < DECODE_SIDE_PIXELS_MIN:
        return 1
    for factor in DECODE_FACTORS:
        if height >= first.height * factor and width >= first.width * factor:
            return factor
    return 1


def kept_sizes(moves: Sequence[Move], height: int, width: int, *, is_scaled: bool) -> dict[int, Size]:
    """The sizes in which a cache keeps a stored image as decoded, by the factor: whole, and at 1/2.

    ``moves``: those after its crop. At 1/2 it is kept if its largest crops are decoded so. If some
    are decoded even smaller, few are decoded whole, so three scales would take memory for nothing.
    """
    sizes = {1: (height, width)}
    if is_scaled and decode_factor(moves, height, width) == HALF:
        sizes[HALF] = -(-height // HALF), -(-width // HALF)
    return sizes


def scaled_cut(cut: Cut, whole: Size, decoded: Size) -> Cut:
    """Translate a box of a ``whole`` image to the smaller decoded one, to the nearest pixel."""
    down, across = decoded[0] / whole[0], decoded[1] / whole[1]
    height, width = max(1, round(cut.height * down)), max(1, round(cut.width * across))
    top, left = min(round(cut.top * down), decoded[0] - height), min(round(cut.left * across), decoded[1] - width)
    return Cut(top, left, height, width)


RandomNumber: TypeAlias = Callable[[], float]
"""Draws from [0, 1)."""

CROP_ATTEMPTS = 10

Planner: TypeAlias = Callable[[Geometry, RandomNumber], None]


@singledispatch
def planner_for(_step: StepOptions) -> Planner | None:
    """Make the function that applies a step on paper; None for steps that change no geometry."""
    return None


@planner_for.register
def _plan_resize(step: options.Resize) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        height, width = geometry.height, geometry.width
        if step.size is not None or step.sizes:
            geometry.scale(*(step.size or step.sizes[geometry.drawn]), step.interpolation)
            return
        if step.max_pixels is not None:
            geometry.scale(*_within_pixels(step, step.max_pixels, height, width), step.interpolation)
            return
        geometry.scale(*_proportional(step, height, width, geometry.drawn), step.interpolation)

    return plan


def _proportional(step: options.Resize, height: int, width: int, drawn: int) -> Size:
    """The size of an image whose proportions are kept: torchvision's, in whole numbers."""
    shorter, longer = sorted((height, width))
    if step.longer_side is not None:
        short, long = max(1, step.longer_side * shorter // longer), step.longer_side
    else:
        short = step.shorter_side or step.shorter_sides[drawn]
        long = short * longer // shorter
        if step.max_longer_side is not None and long > step.max_longer_side:
            short, long = max(1, step.max_longer_side * short // long), step.max_longer_side
    if (unit := step.multiple_of) is not None:
        most = (step.max_longer_side or SIDE_PIXELS_MAX) // unit * unit
        short, long = (min(max(unit, (side + unit // 2) // unit * unit), most) for side in (short, long))
    return (short, long) if height <= width else (long, short)


def _within_pixels(step: options.Resize, pixels_max: int, height: int, width: int) -> Size:
    """The size of an image between two numbers of pixels: that of Qwen2-VL's smart_resize.

    Each operation is one of IEEE 754, so the size is the same everywhere.
    """
    unit = step.multiple_of or 1
    high, wide = (round(side / unit) * unit for side in (height, width))
    if high * wide > pixels_max:
        shrink = math.sqrt((height * width) / pixels_max)
        high, wide = (math.floor(side / shrink / unit) * unit for side in (height, width))
    elif high * wide < (step.min_pixels or 1):
        grow = math.sqrt((step.min_pixels or 1) / (height * width))
        high, wide = (math.ceil(side * grow / unit) * unit for side in (height, width))
    most = SIDE_PIXELS_MAX // unit * unit
    return min(max(unit, high), most), min(max(unit, wide), most)


@planner_for.register
def _plan_letterbox(step: options.Letterbox) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        high, wide = step.size or step.sizes[geometry.drawn]
        height, width = geometry.height, geometry.width
        if step.enlarge or height > high or width > wide:
            if high * width <= wide * height:
                height, width = high, max(1, (2 * width * high + height) // (2 * height))
            else:
                height, width = max(1, (2 * height * wide + width) // (2 * width)), wide
            geometry.scale(height, width, step.interpolation)
        top, left = ((high - height) // 2, (wide - width) // 2) if step.place == "center" else (0, 0)
        geometry.window(-top, -left, high, wide, step.fill)

    return plan


@planner_for.register
def _plan_center_crop(step: options.CenterCrop) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        height, width = min(geometry.height, step.size[0]), min(geometry.width, step.size[1])
        top, left = ((geometry.height - height) * step.place[0], (geometry.width - width) * step.place[1])
        geometry.cut(round(top), round(left), height, width)
        if (height, width) != step.size:
            geometry.pad((step.size[0] - height) // 2, (step.size[1] - width) // 2, *step.size)

    return plan


@planner_for.register
def _plan_random_resized_crop(step: options.RandomResizedCrop) -> Planner:
    """Draw as torchvision: uniform in area, log-uniform in proportions; after ten, the middle."""
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


@planner_for.register
def _plan_crop_to_bucket(step: options.CropToBucket) -> Planner:
    sizes = step.bucket_sizes

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        high, wide = geometry.bucket_size or nearest_size(sizes, geometry.height, geometry.width)
        height, width = geometry.height, geometry.width
        if width * high >= height * wide:
            width = max(1, (2 * height * wide + high) // (2 * high))
        else:
            height = max(1, (2 * width * high + wide) // (2 * wide))
        down, across = geometry.height - height, geometry.width - width
        if step.random:
            geometry.cut(int((down + 1) * random()), int((across + 1) * random()), height, width)
        else:
            geometry.cut(down // 2, across // 2, height, width)
        geometry.scale(high, wide, step.interpolation)

    return plan


def nearest_size(sizes: Sequence[Size], height: int, width: int) -> Size:
    """The size whose proportions are nearest to those of an image, as a ratio."""
    return min(sizes, key=lambda size: abs(math.log(size[1] * height / (size[0] * width))))


def smallest_crop(step: options.RandomResizedCrop, height: int, width: int) -> Size:
    """The lowest height and width that a crop may have, so far as proportions find room."""
    area = step.scale[0] * height * width
    return max(1, int(math.sqrt(area / step.ratio[1]))), max(1, int(math.sqrt(area * step.ratio[0])))


def _largest_box(height: int, width: int, ratio: tuple[float, float]) -> Size:
    """Find the largest box in ``height`` by ``width`` with proportions in range."""
    if width < height * ratio[0]:
        return max(1, min(height, round(width / ratio[0]))), width
    if width > height * ratio[1]:
        return height, max(1, min(width, round(height * ratio[1])))
    return height, width


@planner_for.register
def _plan_random_flip(step: options.RandomFlip) -> Planner:
    flips = {"horizontal": (_MIRRORED,), "vertical": (_UPSIDE_DOWN,), "both": (_MIRRORED, _UPSIDE_DOWN)}[step.direction]

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        for flip in flips:
            if random() < step.probability:
                geometry.turn_further(flip)

    return plan


@planner_for.register
def _plan_random_crop(step: options.RandomCrop) -> Planner:
    def first(inner: int, outer: int, draw: float) -> int:
        """Draw where the box begins inside the padded side; a shorter side is centred in it."""
        free = inner + 2 * step.padding - outer
        return (int((free + 1) * draw) if free > 0 else -(-free // 2)) - step.padding

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        height, width = step.size
        top = first(geometry.height, height, random())
        left = first(geometry.width, width, random())
        geometry.window(top, left, height, width, step.fill)

    return plan


@planner_for.register
def _plan_pad(step: options.Pad) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        height, width = geometry.height, geometry.width
        if step.border is not None:
            above, below, before, behind = step.border
            whole = above + height + below, before + width + behind
            if whole[0] * whole[1] > geometry.pixels_max:
                raise SampleUndecodable(
                    f"{width} x {height} pixels would be padded to {whole[1]} x {whole[0]}, "
                    f"more than the {geometry.pixels_max} pixels of max_pixels"
                )
            geometry.window(-above, -before, *whole, step.fill)
            return
        assert step.size is not None
        down, across = step.size[0] - height, step.size[1] - width
        if min(down, across) < 0:
            raise SampleUndecodable(
                f'{width} x {height} pixels do not fit into the {step.size[1]} x {step.size[0]} of "pad"; '
                'a "resize" or a crop in front makes them fit'
            )
        top, left = (down // 2, across // 2) if step.place == "center" else (0, 0)
        geometry.window(-top, -left, *step.size, step.fill)

    return plan


@planner_for.register
def _plan_rotate(step: options.Rotate) -> Planner:
    if step.quarter_turns is not None:
        choices = [QUARTER_TURNS[count] for count in step.quarter_turns]

        def plan_quarters(geometry: Geometry, random: RandomNumber) -> None:
            geometry.turn_further(choices[int(len(choices) * random())] if len(choices) > 1 else choices[0])

        return plan_quarters
    assert step.degrees is not None
    low, high = step.degrees

    def plan_degrees(geometry: Geometry, random: RandomNumber) -> None:
        degrees = low + (high - low) * random() if high > low else low
        geometry.rotate(degrees, step.interpolation, step.fill)

    return plan_degrees


SKIPPED: dict[str, object] = {"acts": False}
"""The draws of a step that does not act on an image."""


def acts(step: StepOptions, random: RandomNumber) -> bool:
    """Draw whether a step acts, before its own numbers; of one that always does, nothing."""
    return not isinstance(step, options.ChanceStep) or step.probability == 1 or random() < step.probability


def perhaps(step: StepOptions, planner: Planner) -> Planner:
    """Make a planner that acts as often as the step says."""
    if not isinstance(step, options.ChanceStep) or step.probability == 1:
        return planner

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        planner(geometry if acts(step, random) else geometry.copy(), random)

    return plan


def noting(step: StepOptions, planner: Planner, draws: list[dict[str, object]]) -> Planner:
    """Make the planner of ``perhaps`` note in ``draws`` what the step draws; it draws no more."""

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        assert geometry.trail is not None, "what is noted is followed"
        known, whole = len(geometry.trail), (geometry.height, geometry.width)
        is_done = acts(step, random)
        planner(geometry if is_done else geometry.copy(), random)
        draws.append(drawn_by(step, geometry.trail[known:], whole) if is_done else SKIPPED)

    return plan


def drawn_by(step: StepOptions, trail: Sequence[TrailPart], size: Sequence[int]) -> dict[str, object]:
    """What a random step chose, by what it did to an image of a size; boxes as the viewer sees."""
    if isinstance(step, options.SizedStep):
        sizes = [(one.height, one.width) for one in trail if not isinstance(one, Orientation)]
        return {"size": [*sizes[-1]] if sizes else [*size[:2]]}
    if isinstance(step, options.RandomFlip):
        return {"flips": ["horizontal" if one == _MIRRORED else "vertical" for one in trail]}
    if isinstance(step, options.Rotate):
        (turn,) = trail
        if isinstance(turn, Orientation):
            return {"degrees": 90 * QUARTER_TURNS.index(turn)}
        assert isinstance(turn, Warp), "what a rotation does"
        return {"degrees": turn.degrees}
    cut = next((one for one in trail if isinstance(one, Cut)), Cut(0, 0, *size[:2]))
    padded = next((one for one in trail if isinstance(one, Padding)), None)
    return {"crop": cut._asdict(), **({"padded": {"top": padded.top, "left": padded.left}} if padded else {})}
