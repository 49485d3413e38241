"""The sounds of a batch as a picture with axes: seconds, and Hz. Runs in the user's shell."""

from collections.abc import Sequence

import numpy as np

from batchd.cli.peeked import PeekedBatch
from batchd_client.showing import label_text
from batchd_client.sounds import WAVEFORM, SoundField

SAMPLES_MAX = 8
WIDTH_PIXELS, WAVE_PIXELS, BANDS_PIXELS = 640, 72, 128
LEFT_PIXELS, RIGHT_PIXELS, LINE_PIXELS, TICK_PIXELS, GAP_PIXELS = 76, 20, 18, 4, 6
TICKS_MAX = 8
FONT_SCALE = 0.4
BACKGROUND, INK = (250, 250, 250), (40, 40, 40)
_STEPS = (1, 2, 5)


def draw_sounds(batch: PeekedBatch, sounds: Sequence[SoundField]) -> np.ndarray:
    """The first samples of a batch with their sounds: a BGR image, uint8 [height, width, 3]."""
    values = {sound.field: batch.samples(sound.field) for sound in sounds}
    parts = []
    for row in range(min(SAMPLES_MAX, batch.rows)):
        title = label_text(batch.arrays, batch.classes, row)
        parts += [
            _strip(sound, values[sound.field][row], f"{title}   {sound.field}" if sounds[0] is sound else sound.field)
            for sound in sounds
        ]
    return np.concatenate(parts)


def _strip(sound: SoundField, value: np.ndarray, title: str) -> np.ndarray:
    """One sound: its title, its picture, and below the times."""
    height = WAVE_PIXELS if sound.role == WAVEFORM else BANDS_PIXELS
    top, bottom = LINE_PIXELS, LINE_PIXELS + height
    strip = np.full(
        (bottom + TICK_PIXELS + LINE_PIXELS + GAP_PIXELS, LEFT_PIXELS + WIDTH_PIXELS + RIGHT_PIXELS, 3),
        BACKGROUND,
        np.uint8,
    )
    strip[top:bottom, LEFT_PIXELS : LEFT_PIXELS + WIDTH_PIXELS] = sound.picture(value, height, WIDTH_PIXELS)[:, :, ::-1]
    _write(strip, f"{title}, {sound.range_text(value)}", LEFT_PIXELS, top - 5)
    if sound.high_hz:
        _write(strip, f"{sound.high_hz:,.0f} Hz", 4, top + 10)
        _write(strip, f"{sound.low_hz:,.0f} Hz", 4, bottom - 2)
    length = sound.seconds(value)
    for tick in ticks(length):
        at = LEFT_PIXELS + round(tick / length * (WIDTH_PIXELS - 1))
        strip[bottom : bottom + TICK_PIXELS, at] = INK
        text = f"{tick:.3g} s" if sound.per_s else f"{tick:,.0f}"
        _write(strip, text, at - 8, bottom + TICK_PIXELS + 12)
    return strip


def ticks(length: float) -> list[float]:
    """Round numbers from 0 to ``length``, in equal steps of 1, 2 or 5 tens, at most eight."""
    if length <= 0:
        return []
    step = next(
        one * 10.0**power for power in range(-4, 12) for one in _STEPS if length / (one * 10.0**power) < TICKS_MAX
    )
    return [number * step for number in range(int(length / step) + 1)]


def _write(strip: np.ndarray, text: str, left: int, base: int) -> None:
    import cv2  # noqa: PLC0415  it takes longer to load than the rest together

    plain = text.encode("ascii", "replace").decode()
    cv2.putText(strip, plain, (left, base), cv2.FONT_HERSHEY_SIMPLEX, FONT_SCALE, INK, 1, cv2.LINE_AA)
