"""The steps that draw other changes: which, and how strong. Worker process.

    share of the strength, from 0 to 1  --a space-->  a number  --PolicyChanges.of-->  a Change

A space has for each change the function that makes a number of a share; those of changes that go
in two directions get a share from -1 to 1. ``rand_augment`` has timm's, the others torchvision's.
What a change does to pixels stands in ``tone``, ``warp`` and ``image.recolor``, once.

Invariant: each step draws the same number of random numbers for every image.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Final, TypeAlias

import numpy as np

from batchd.data.pipeline.augment import options, tone, warp
from batchd.data.pipeline.augment.exact import normal
from batchd.data.pipeline.image.geometry import Geometry, Planner, RandomNumber, acts, drawn_by, planner_for
from batchd.data.pipeline.image.opencv import Pixels, Scratch
from batchd.data.pipeline.image.options import ImageStep
from batchd.data.pipeline.image.recolor import (
    BRIGHTNESS,
    CONTRAST,
    PILLOW_SATURATION,
    Change,
    Colors,
    Recolor,
    recolor_for,
)
from batchd.data.pipeline.image.resample import make_moves
from batchd.data.samples.image_header import PIXELS_MAX

Shape: TypeAlias = tuple[int, ...]
Space: TypeAlias = Mapping[str, Callable[[float, Shape], float]]
"""By the name of a change, the number of a share, for an image of a shape."""

WHITE: Final = 255.0
DARK: Final = 128
"""``solarize_add`` adds to the levels below."""
SIGNED: Final = frozenset(
    {"shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast", "sharpness"}
)
_MIX_BITS = 16


# --- what a change does ---------------------------------------------------------------------------


class PolicyChanges:
    """The changes of one step, by name and number."""

    def __init__(self, step: options.PolicyStep, scratch: Scratch, *, is_bgr: bool) -> None:
        self._step, self._scratch = step, scratch
        self._colors = Colors(scratch, is_bgr=is_bgr)

    def of(self, name: str, number: float, shape: Shape) -> Change:  # noqa: C901, PLR0912  a case for each
        """The change ``name``. ``number``: pixels, degrees, levels or a factor, as it takes."""
        match name:
            case "identity":
                return Change(lambda pixels, _out: pixels)
            case "shear_x":
                return self._moved(shape, (1.0, number, 0.0, 0.0, 1.0, 0.0))
            case "shear_y":
                return self._moved(shape, (1.0, 0.0, 0.0, number, 1.0, 0.0))
            case "translate_x":
                return self._moved(shape, (1.0, 0.0, -number, 0.0, 1.0, 0.0))
            case "translate_y":
                return self._moved(shape, (1.0, 0.0, 0.0, 0.0, 1.0, -number))
            case "rotate":
                return self._moved(shape, warp.matrix_about_middle(shape, degrees=number))
            case "brightness":
                return self._recolored(BRIGHTNESS, number)
            case "color":
                return self._recolored(PILLOW_SATURATION, number)
            case "contrast":
                return self._recolored(CONTRAST, number)
            case "sharpness":
                room = partial(tone.room_beside, scratch=self._scratch)
                return Change(lambda pixels, out: tone.sharpened(pixels, number, room(pixels, out=out)))
            case "posterize":
                return self._looked_up(tone.posterized(round(number)))
            case "solarize":
                return self._looked_up(tone.solarized(number))
            case "solarize_add":
                return self._looked_up(tone.brightened_below(DARK, round(number)))
            case "invert":
                return self._looked_up(tone.INVERTED)
            case "autocontrast":
                return Change(lambda pixels, _out: tone.replace_levels(pixels, tone.stretched(pixels)))
            case "equalize":
                return Change(lambda pixels, _out: tone.replace_levels(pixels, tone.equalized(pixels)))
        raise AssertionError(name)

    def _moved(self, shape: Shape, matrix: warp.Matrix) -> Change:
        return warp.change_of(warp.AffineMotion(shape, matrix), self._step, self._scratch)

    def _recolored(self, kind: int, factor: float) -> Change:
        return Change(lambda pixels, _out: self._colors.change(pixels, [(kind, factor)]))

    @staticmethod
    def _looked_up(levels: tone.Levels) -> Change:
        return Change(lambda pixels, _out: tone.replace_levels(pixels, levels))


def _one_by_one(named: Sequence[tuple[str, float, Change]]) -> Change:
    """All changes, one after the other."""

    def make(pixels: Pixels, out: Pixels | None) -> Pixels:
        for _name, _number, change in named:
            pixels = change.make(pixels, out)
        return pixels

    drew = {"operations": [[name, round(number, 4)] for name, number, _change in named]}
    return Change(make, drew, [part for _name, _number, change in named for part in change.trail])


def _drawn_from(choices: Sequence[str], random: RandomNumber) -> str:
    return choices[int(len(choices) * random())]


# --- rand_augment ---------------------------------------------------------------------------------


def _strength(share: float, _shape: Shape) -> float:
    return max(0.1, 1 + 0.9 * share)


RAND_AUGMENT: Final[Space] = {
    "autocontrast": lambda _share, _shape: 0.0,
    "equalize": lambda _share, _shape: 0.0,
    "invert": lambda _share, _shape: 0.0,
    "rotate": lambda share, _shape: 30 * share,
    "posterize": lambda share, _shape: 4 - int(4 * share),
    "solarize": lambda share, _shape: 256 - min(256, int(256 * share)),
    "solarize_add": lambda share, _shape: min(128, int(110 * share)),
    "color": _strength,
    "contrast": _strength,
    "brightness": _strength,
    "sharpness": _strength,
    "shear_x": lambda share, _shape: 0.3 * share,
    "shear_y": lambda share, _shape: 0.3 * share,
    "translate_x": lambda share, shape: 0.45 * share * shape[1],
    "translate_y": lambda share, shape: 0.45 * share * shape[0],
}
"""timm's increasing transforms, by the tenth part of the magnitude."""
_MAGNITUDE_MAX = 10


@recolor_for.register
def _rand_augment(step: options.RandAugment, scratch: Scratch, *, is_bgr: bool) -> Recolor:
    changes, names = PolicyChanges(step, scratch, is_bgr=is_bgr), tuple(RAND_AUGMENT)

    def draw(random: RandomNumber, shape: Shape) -> Change:
        done = []
        for _ in range(step.count):
            name, is_done = _drawn_from(names, random), random() < step.operation_probability
            magnitude = step.magnitude + step.deviation * normal(random)
            share = min(max(magnitude, 0.0), _MAGNITUDE_MAX) / _MAGNITUDE_MAX
            is_opposite = random() < 0.5 and name in SIGNED  # noqa: PLR2004  half of the time
            if is_done:
                number = RAND_AUGMENT[name](-share if is_opposite else share, shape)
                done.append((name, number, changes.of(name, number, shape)))
        return _one_by_one(done)

    return draw


# --- trivial_augment, auto_augment, augmix --------------------------------------------------------


def _space(*, shear: float, ways: Callable[[int], float], rotate: float, factor: float, bits: tuple[int, int]) -> Space:
    """A space of torchvision. ``ways``: the longest of a translation along a side in pixels."""
    most, least = bits
    return {
        "identity": lambda _share, _shape: 0.0,
        "shear_x": lambda share, _shape: shear * share,
        "shear_y": lambda share, _shape: shear * share,
        "translate_x": lambda share, shape: int(ways(shape[1]) * share),
        "translate_y": lambda share, shape: int(ways(shape[0]) * share),
        "rotate": lambda share, _shape: rotate * share,
        "brightness": lambda share, _shape: 1 + factor * share,
        "color": lambda share, _shape: 1 + factor * share,
        "contrast": lambda share, _shape: 1 + factor * share,
        "sharpness": lambda share, _shape: 1 + factor * share,
        "posterize": lambda share, _shape: round(most - (most - least) * share),
        "solarize": lambda share, _shape: round(WHITE * (1 - share), 6),  # a whole number stays one
        "autocontrast": lambda _share, _shape: 0.0,
        "equalize": lambda _share, _shape: 0.0,
        "invert": lambda _share, _shape: 0.0,
    }


TRIVIAL_AUGMENT: Final = _space(shear=0.99, ways=lambda _side: 32.0, rotate=135.0, factor=0.99, bits=(8, 2))
AUTO_AUGMENT: Final = _space(shear=0.3, ways=lambda side: side * 150 / 331, rotate=30.0, factor=0.9, bits=(8, 4))
AUGMIX: Final = _space(shear=0.3, ways=lambda side: side / 3, rotate=30.0, factor=0.9, bits=(4, 0))
_TRIVIAL_STRENGTHS, _STRENGTHS = 31, 10
_CHAIN_MAX = 3


@recolor_for.register
def _trivial_augment(step: options.TrivialAugment, scratch: Scratch, *, is_bgr: bool) -> Recolor:
    changes = PolicyChanges(step, scratch, is_bgr=is_bgr)
    names = tuple(name for name in TRIVIAL_AUGMENT if name != "invert")

    def draw(random: RandomNumber, shape: Shape) -> Change:
        drawn = _drawn_change(TRIVIAL_AUGMENT, names, _TRIVIAL_STRENGTHS, _TRIVIAL_STRENGTHS, random)
        return _one_by_one([_made(changes, TRIVIAL_AUGMENT, drawn, shape)])

    return draw


def _drawn_change(
    space: Space, names: Sequence[str], strengths: int, of_them: int, random: RandomNumber
) -> tuple[str, float]:
    """Draw a change, one of the first ``of_them`` strengths, and its direction: (name, share)."""
    assert space.keys() >= set(names), "all have numbers"
    name, share = _drawn_from(names, random), int(of_them * random()) / (strengths - 1)
    is_opposite = random() < 0.5 and name in SIGNED  # noqa: PLR2004  half of the time
    return name, -share if is_opposite else share


def _made(changes: PolicyChanges, space: Space, drawn: tuple[str, float], shape: Shape) -> tuple[str, float, Change]:
    name, share = drawn
    number = space[name](share, shape)
    return name, number, changes.of(name, number, shape)


@recolor_for.register
def _auto_augment(step: options.AutoAugment, scratch: Scratch, *, is_bgr: bool) -> Recolor:
    changes, policies = PolicyChanges(step, scratch, is_bgr=is_bgr), POLICIES[step.policy]

    def draw(random: RandomNumber, shape: Shape) -> Change:
        done = []
        for name, chance, strength in policies[int(len(policies) * random())]:
            is_done, is_opposite = random() < chance, random() < 0.5  # noqa: PLR2004  half of the time
            share = strength / (_STRENGTHS - 1) * (-1 if is_opposite and name in SIGNED else 1)
            if is_done:
                done.append(_made(changes, AUTO_AUGMENT, (name, share), shape))
        return _one_by_one(done)

    return draw


@recolor_for.register
def _augmix(step: options.AugMix, scratch: Scratch, *, is_bgr: bool) -> Recolor:
    changes = PolicyChanges(step, scratch, is_bgr=is_bgr)
    names = tuple(name for name in AUGMIX if name not in {"invert", "identity"})

    def draw(random: RandomNumber, shape: Shape) -> Change:
        share = random()
        # of even numbers, the gaps are what Dirichlet's distribution with alpha = 1 draws
        bounds = [0.0, *sorted(random() for _ in range(step.width - 1)), 1.0]
        weights = [share * (end - start) for start, end in pairwise(bounds)]
        chains = []
        for _ in range(step.width):
            depth = step.depth or 1 + int(_CHAIN_MAX * random())
            drawn = [_drawn_change(AUGMIX, names, _STRENGTHS, step.severity, random) for _ in range(_CHAIN_MAX)]
            chains.append(_one_by_one([_made(changes, AUGMIX, one, shape) for one in drawn[:depth]]))

        def mix(pixels: Pixels, _out: Pixels | None) -> Pixels:
            return mixed(pixels, [chain.make(pixels.copy(), None) for chain in chains], weights)

        drew = {
            "weights": [round(weight, 4) for weight in weights],
            "chains": [chain.drew["operations"] for chain in chains],
        }
        return Change(mix, drew)

    return draw


def mixed(pixels: Pixels, others: Sequence[Pixels], weights: Sequence[float]) -> Pixels:
    """Mix images in place, in whole numbers: the first gets what the others' weights leave of 1."""
    parts = [round(weight * (1 << _MIX_BITS)) for weight in weights]
    total = pixels * np.int32((1 << _MIX_BITS) - sum(parts))
    for other, part in zip(others, parts, strict=True):
        total += other * np.int32(part)
    total += 1 << _MIX_BITS - 1
    total >>= _MIX_BITS
    np.copyto(pixels, total, casting="unsafe")
    return pixels


# --- choose ---------------------------------------------------------------------------------------


@recolor_for.register
def _choose(step: options.Choose, scratch: Scratch, *, is_bgr: bool) -> Recolor:
    steps = step.steps
    makers = [_recolor_of(choice, scratch, is_bgr=is_bgr) for choice in steps]
    ends = list(accumulate(step.weights or [1.0] * len(steps)))

    def draw(random: RandomNumber, shape: Shape) -> Change:
        at = ends[-1] * random() if len(steps) > 1 else 0.0
        chosen = next(place for place, end in enumerate(ends) if at < end)
        drawn = [(acts(choice, random), make(random, shape)) for choice, make in zip(steps, makers, strict=True)]
        is_done, change = drawn[chosen]
        done = change if is_done else Change(lambda pixels, _out: pixels, {"acts": False})
        return done._replace(drew={"chosen": steps[chosen].op, **done.drew})

    return draw


def _recolor_of(step: ImageStep, scratch: Scratch, *, is_bgr: bool) -> Recolor:
    """What a step does to pixels; a move is made on the upright image."""
    planner = planner_for(step)
    recolor = recolor_for(step, scratch, is_bgr=is_bgr) if planner is None else _moving(step, planner)
    assert recolor is not None, "a step that moves or changes pixels"
    return recolor


def _moving(step: ImageStep, planner: Planner) -> Recolor:
    scratch = Scratch()

    def draw(random: RandomNumber, shape: Shape) -> Change:
        geometry = Geometry(shape[0], shape[1], 1, PIXELS_MAX, is_followed=True)
        planner(geometry, random)
        assert geometry.trail is not None, "it is followed"

        def move(pixels: Pixels, _out: Pixels | None) -> Pixels:
            return make_moves(pixels, geometry.moves, geometry.turn, scratch, None)

        drew = drawn_by(step, geometry.trail, shape) if step.is_random else {}
        return Change(move, drew, geometry.trail)

    return draw


Policy: TypeAlias = tuple[tuple[str, float, int], tuple[str, float, int]]

POLICIES: Final[dict[str, tuple[Policy, ...]]] = {
    "imagenet": (
        (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
        (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
        (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
        (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
        (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
        (("equalize", 0.4, 0), ("rotate", 0.8, 8)),
        (("solarize", 0.6, 3), ("equalize", 0.6, 0)),
        (("posterize", 0.8, 5), ("equalize", 1.0, 0)),
        (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
        (("equalize", 0.6, 0), ("posterize", 0.4, 6)),
        (("rotate", 0.8, 8), ("color", 0.4, 0)),
        (("rotate", 0.4, 9), ("equalize", 0.6, 0)),
        (("equalize", 0.0, 0), ("equalize", 0.8, 0)),
        (("invert", 0.6, 0), ("equalize", 1.0, 0)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("rotate", 0.8, 8), ("color", 1.0, 2)),
        (("color", 0.8, 8), ("solarize", 0.8, 7)),
        (("sharpness", 0.4, 7), ("invert", 0.6, 0)),
        (("shear_x", 0.6, 5), ("equalize", 1.0, 0)),
        (("color", 0.4, 0), ("equalize", 0.6, 0)),
        (("equalize", 0.4, 0), ("solarize", 0.2, 4)),
        (("solarize", 0.6, 5), ("autocontrast", 0.6, 0)),
        (("invert", 0.6, 0), ("equalize", 1.0, 0)),
        (("color", 0.6, 4), ("contrast", 1.0, 8)),
        (("equalize", 0.8, 0), ("equalize", 0.6, 0)),
    ),
    "cifar10": (
        (("invert", 0.1, 0), ("contrast", 0.2, 6)),
        (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
        (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
        (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.5, 0), ("equalize", 0.9, 0)),
        (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
        (("color", 0.4, 3), ("brightness", 0.6, 7)),
        (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
        (("equalize", 0.6, 0), ("equalize", 0.5, 0)),
        (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
        (("color", 0.7, 7), ("translate_x", 0.5, 8)),
        (("equalize", 0.3, 0), ("autocontrast", 0.4, 0)),
        (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
        (("brightness", 0.9, 6), ("color", 0.2, 8)),
        (("solarize", 0.5, 2), ("invert", 0.0, 0)),
        (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
        (("equalize", 0.2, 0), ("equalize", 0.6, 0)),
        (("color", 0.9, 9), ("equalize", 0.6, 0)),
        (("autocontrast", 0.8, 0), ("solarize", 0.2, 8)),
        (("brightness", 0.1, 3), ("color", 0.7, 0)),
        (("solarize", 0.4, 5), ("autocontrast", 0.9, 0)),
        (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
        (("autocontrast", 0.9, 0), ("solarize", 0.8, 3)),
        (("equalize", 0.8, 0), ("invert", 0.1, 0)),
        (("translate_y", 0.7, 9), ("autocontrast", 0.9, 0)),
    ),
    "svhn": (
        (("shear_x", 0.9, 4), ("invert", 0.2, 0)),
        (("shear_y", 0.9, 8), ("invert", 0.7, 0)),
        (("equalize", 0.6, 0), ("solarize", 0.6, 6)),
        (("invert", 0.9, 0), ("equalize", 0.6, 0)),
        (("equalize", 0.6, 0), ("rotate", 0.9, 3)),
        (("shear_x", 0.9, 4), ("autocontrast", 0.8, 0)),
        (("shear_y", 0.9, 8), ("invert", 0.4, 0)),
        (("shear_y", 0.9, 5), ("solarize", 0.2, 6)),
        (("invert", 0.9, 0), ("autocontrast", 0.8, 0)),
        (("equalize", 0.6, 0), ("rotate", 0.9, 3)),
        (("shear_x", 0.9, 4), ("solarize", 0.3, 3)),
        (("shear_y", 0.8, 8), ("invert", 0.7, 0)),
        (("equalize", 0.9, 0), ("translate_y", 0.6, 6)),
        (("invert", 0.9, 0), ("equalize", 0.6, 0)),
        (("contrast", 0.3, 3), ("rotate", 0.8, 4)),
        (("invert", 0.8, 0), ("translate_y", 0.0, 2)),
        (("shear_y", 0.7, 6), ("solarize", 0.4, 8)),
        (("invert", 0.6, 0), ("rotate", 0.8, 4)),
        (("shear_y", 0.3, 7), ("translate_x", 0.9, 3)),
        (("shear_x", 0.1, 6), ("invert", 0.6, 0)),
        (("solarize", 0.7, 2), ("translate_y", 0.6, 7)),
        (("shear_y", 0.8, 4), ("invert", 0.8, 0)),
        (("shear_x", 0.7, 9), ("translate_y", 0.8, 3)),
        (("shear_y", 0.8, 5), ("autocontrast", 0.7, 0)),
        (("shear_x", 0.7, 2), ("invert", 0.1, 0)),
    ),
}
"""As AutoAugment's authors learned them: Cubuk et al., AutoAugment: Learning Augmentation
Strategies from Data (2019), tables 7, 8 and 9. Each policy is two changes: which, how often it
acts, and which of ten strengths, from 0.
"""
