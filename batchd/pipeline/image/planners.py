"""What each step does to the geometry of an image, on paper. Worker process; standard library only.

Random numbers are drawn in the order of the steps, and within a step in the order that its
docstring in ``config`` names. A step that has nothing to choose from draws none.
"""

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Literal, TypeAlias

from batchd.pipeline.image.geometry import Geometry
from batchd.pipeline.image.options import CenterCrop, Pad, RandomCrop, RandomFlip, RandomResizedCrop, Resize, Rotate
from batchd.pipeline.options import Size, StepOptions
from batchd.samples.errors import SampleUndecodable

RandomNumber: TypeAlias = Callable[[], float]
"""Draws from [0, 1)."""

CROP_ATTEMPTS = 10

Planner: TypeAlias = Callable[[Geometry, RandomNumber], None]


@singledispatch
def planner_for(_step: StepOptions) -> Planner | None:
    """Make the function that applies a step on paper; None for steps that change no geometry."""
    return None


@planner_for.register
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


@planner_for.register
def _plan_center_crop(step: CenterCrop) -> Planner:
    def plan(geometry: Geometry, _random: RandomNumber) -> None:
        height, width = min(geometry.height, step.size[0]), min(geometry.width, step.size[1])
        geometry.cut(round((geometry.height - height) / 2), round((geometry.width - width) / 2), height, width)
        if (height, width) != step.size:
            geometry.pad((step.size[0] - height) // 2, (step.size[1] - width) // 2, *step.size)

    return plan


@planner_for.register
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


@planner_for.register
def _plan_random_flip(step: RandomFlip) -> Planner:
    directions: tuple[Literal["horizontal", "vertical"], ...]
    directions = ("horizontal", "vertical") if step.direction == "both" else (step.direction,)

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        for direction in directions:
            if random() < step.probability:
                geometry.flip(direction)

    return plan


@planner_for.register
def _plan_random_crop(step: RandomCrop) -> Planner:
    def first(inner: int, outer: int, draw: float) -> int:
        """Where the box begins, of all places at which it lies within the padded side; else the side is in its middle."""
        free = inner + 2 * step.padding - outer
        return (int((free + 1) * draw) if free > 0 else -(-free // 2)) - step.padding

    def plan(geometry: Geometry, random: RandomNumber) -> None:
        height, width = step.size
        top = first(geometry.height, height, random())
        left = first(geometry.width, width, random())
        geometry.window(top, left, height, width, step.fill)

    return plan


@planner_for.register
def _plan_pad(step: Pad) -> Planner:
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
def _plan_rotate(step: Rotate) -> Planner:
    if step.quarter_turns is not None:
        choices = step.quarter_turns

        def plan_quarters(geometry: Geometry, random: RandomNumber) -> None:
            geometry.turn_quarters(choices[int(len(choices) * random())] if len(choices) > 1 else choices[0])

        return plan_quarters
    assert step.degrees is not None
    low, high = step.degrees

    def plan_degrees(geometry: Geometry, random: RandomNumber) -> None:
        degrees = low + (high - low) * random() if high > low else low
        geometry.rotate(degrees, step.interpolation, step.fill)

    return plan_degrees
