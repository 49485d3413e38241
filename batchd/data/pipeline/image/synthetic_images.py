"""Photo-like images for the demo and the benchmarks. Not run by daemon or workers.

Detail is what takes a decoder time, so each image is a picture that a viewer can recognise (a
pattern for its class, two colours, a number) under a texture whose detail falls off with its
frequency, as that of photographs does. At quality 90 a file has 70 to 110 KB, and decodes in about
the time of a photograph of its size.

Invariant: the same seed gives the same files, with the same versions of numpy and OpenCV; a larger
count adds to them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image.opencv import Pixels, cv2
from batchd_wire.views import Array

SIZES = ((375, 500), (375, 500), (500, 375), (333, 500))
"""Height and width, in pixels; drawn with equal probability for each entry."""
QUALITY = 90
PROGRESS_IMAGES = 16
"""Images from one report to the next."""
_TEXTURE_SIDE_PIXELS = 1024
_TEXTURE_STRENGTH = 20.0

_Floats: TypeAlias = npt.NDArray[np.float32]
_Pattern: TypeAlias = Callable[[np.random.Generator, _Floats, _Floats], _Floats]


def make_photos(folder: Path, count: int, seed: int, progress: Callable[[int], None]) -> None:
    """Write ``count`` JPEGs of some 500 x 375 pixels to ``folder``/class/number.jpg.

    Classes take turns; ``progress`` gets the number so far. 8 ms each. Raises ``OSError``.
    """
    texture = _texture(np.random.default_rng((1, seed)))
    for name in PATTERNS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = list(PATTERNS)[number % len(PATTERNS)]
        photo = _paint(np.random.default_rng((2, seed, number)), PATTERNS[name], texture, f"{name} {number}")
        _, encoded = cv2.imencode(".jpg", photo, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        (folder / name / f"{number:06}.jpg").write_bytes(encoded.tobytes())
        if (number + 1) % PROGRESS_IMAGES == 0 or number + 1 == count:
            progress(number + 1)


def _paint(random: np.random.Generator, pattern: _Pattern, texture: _Floats, caption: str) -> Pixels:
    height, width = SIZES[random.integers(len(SIZES))]
    down, across = np.meshgrid(
        np.linspace(0, height / width, height, dtype=np.float32),
        np.linspace(0, 1, width, dtype=np.float32),
        indexing="ij",
    )
    mixture = pattern(random, down, across)[:, :, np.newaxis]
    first, second = random.uniform(20, 235, (2, 3)).astype(np.float32)
    top, left = random.integers(0, _TEXTURE_SIDE_PIXELS - max(height, width), 2)
    grain = texture[top : top + height, left : left + width] * np.float32(_TEXTURE_STRENGTH * random.uniform(0.7, 1.1))
    photo: Pixels = np.clip(first + (second - first) * mixture + grain, 0, 255).astype(np.uint8)
    for color, thickness in (((0, 0, 0), 5), ((255, 255, 255), 2)):
        cv2.putText(photo, caption, (14, height - 16), cv2.FONT_HERSHEY_SIMPLEX, 1.1, color, thickness, cv2.LINE_AA)
    return photo


def _texture(random: np.random.Generator) -> _Floats:
    """Make noise that falls with frequency: float32 [side, side, 3], mean 0, similar channels."""
    side = _TEXTURE_SIDE_PIXELS
    frequency = np.hypot(np.fft.fftfreq(side)[:, np.newaxis], np.fft.rfftfreq(side)[np.newaxis, :])
    frequency[0, 0] = 1
    layers = []
    for _ in range(4):
        noise = np.fft.irfft2(np.fft.rfft2(random.standard_normal((side, side))) / frequency**0.75, s=(side, side))
        layers.append((noise - noise.mean()) / noise.std())
    shared = layers[3]
    return np.stack([shared + 0.35 * layer for layer in layers[:3]], axis=2).astype(np.float32)


def _gradient(random: np.random.Generator, down: _Floats, across: _Floats) -> _Floats:
    slope = _slope(random, down, across)
    return _floats((slope - slope.min()) / np.ptp(slope))


def _stripes(random: np.random.Generator, down: _Floats, across: _Floats) -> _Floats:
    return _wave(_slope(random, down, across) * random.uniform(30, 70))


def _rings(random: np.random.Generator, down: _Floats, across: _Floats) -> _Floats:
    middle = random.uniform(0.2, 0.8, 2).astype(np.float32)
    return _wave(np.hypot(down - middle[0], across - middle[1]) * random.uniform(30, 70))


def _waves(random: np.random.Generator, down: _Floats, across: _Floats) -> _Floats:
    return _wave(random.uniform(20, 45) * down + 3 * np.sin(random.uniform(10, 25) * across))


def _checks(random: np.random.Generator, down: _Floats, across: _Floats) -> _Floats:
    cells = random.uniform(5, 12)
    return _floats((np.floor(down * cells) + np.floor(across * cells)) % 2)


def _slope(random: np.random.Generator, down: _Floats, across: _Floats) -> _Floats:
    angle = random.uniform(0, 2 * np.pi)
    return _floats(np.sin(angle) * down + np.cos(angle) * across)


def _wave(phase: _Floats) -> _Floats:
    return _floats(0.5 + 0.5 * np.sin(phase))


def _floats(values: Array) -> _Floats:
    return values.astype(np.float32, copy=False)


def _clouds(random: np.random.Generator, down: _Floats, _across: _Floats) -> _Floats:
    return _enlarged(random, down.shape, 7, cv2.INTER_CUBIC)


def _mosaic(random: np.random.Generator, down: _Floats, _across: _Floats) -> _Floats:
    return _enlarged(random, down.shape, 14, cv2.INTER_NEAREST)


def _spots(random: np.random.Generator, down: _Floats, _across: _Floats) -> _Floats:
    canvas = np.zeros(down.shape, np.float32)
    height, width = down.shape
    for _ in range(int(random.integers(6, 14))):
        middle = int(random.integers(0, width)), int(random.integers(0, height))
        cv2.circle(canvas, middle, int(random.integers(15, 70)), float(random.uniform(0.4, 1)), -1, cv2.LINE_AA)
    return canvas


def _enlarged(random: np.random.Generator, shape: tuple[int, ...], cells: int, method: int) -> _Floats:
    small = random.uniform(0, 1, (cells, cells)).astype(np.float32)
    return _floats(cv2.resize(small, (shape[1], shape[0]), interpolation=method))


PATTERNS: dict[str, _Pattern] = {
    "checks": _checks,
    "clouds": _clouds,
    "gradient": _gradient,
    "mosaic": _mosaic,
    "rings": _rings,
    "spots": _spots,
    "stripes": _stripes,
    "waves": _waves,
}
"""The classes, by their names."""
