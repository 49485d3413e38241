"""Pictures of sound for people: waveforms, and spectra over time. Runs in the user's program.

    waveform       from its least to its greatest value at each time, one channel below the other
    spectrogram    a color for each value, low frequencies at the bottom

Used by `batchd peek` and notebooks. The subscription says which fields are sound, and of which rate
(``fields.Overlay``); the pictures have no text, and ``SoundField`` has that of their axes.

Invariant: pictures are copies, so none of them keeps a slot.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Self

import numpy as np

from batchd_client.showing import Picture
from batchd_wire.fields import Overlay
from batchd_wire.views import Array

WAVEFORM, SPECTROGRAM = "waveform", "spectrogram"
PARTS_MAX = 4
"""Channels, or clips, that are drawn."""
DECADES = 8
"""Powers further below the greatest are drawn as dark as one so far below."""
_PAPER, _LINE, _WAVE = (255, 255, 255), (210, 210, 210), (0, 90, 170)
_COLORS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float64)
"""From the smallest to the greatest value, as in matplotlib's viridis: their order is visible also
without color."""


class SoundField(NamedTuple):
    """A field with sound. ``per_s``: numbers or frames in a second, 0 if that is unknown.

    ``low_hz`` and ``high_hz``: of a spectrogram, both 0 if it has no frequencies. ``is_power``: its
    values are no logarithms.
    """

    field: str
    role: str
    per_s: float
    low_hz: float = 0.0
    high_hz: float = 0.0
    is_power: bool = False

    @classmethod
    def of(cls, overlay: Overlay) -> Self:
        """The sound that an overlay tells of."""
        per_s, low, high, *power = *overlay.form.split(), "0", "0"
        return cls(overlay.image, overlay.role, float(per_s), float(low), float(high), power[:1] == ["power"])

    def seconds(self, value: Array) -> float:
        """Seconds of ``value``, ``[samples, ...]`` or ``[frames, ...]``; frames without a rate."""
        length: int = value.shape[0] if self.role == SPECTROGRAM else max(value.shape)
        return length / (self.per_s or 1.0)

    def time_text(self, value: Array) -> str:
        """``10 s``, or ``1,000 frames``, of ``value``, ``[samples, ...]`` or ``[frames, ...]``."""
        seconds = self.seconds(value)
        return f"{seconds:.3g} s" if self.per_s else f"{seconds:,.0f} frames"

    def range_text(self, value: Array) -> str:
        """``0 to 8,000 Hz``; of a waveform, ``value`` is ``[samples, ...]``, ``up to 0.31``."""
        if self.role == WAVEFORM:
            return f"up to {_peak(value):.3g}"
        return f"{self.low_hz:,.0f} to {self.high_hz:,.0f} Hz" if self.high_hz else f"{value.shape[1]} coefficients"

    def picture(self, value: Array, height: int, width: int) -> Picture:
        """A sample's value as uint8 ``[height, width, 3]``, red, green, blue."""
        if not value.size:
            return np.full((height, width, 3), _PAPER, np.uint8)
        parts = np.nan_to_num(_time_first(value, self.role)[..., :PARTS_MAX].astype(np.float64))
        edges = np.linspace(0, height, parts.shape[-1] + 1).astype(int)
        draw = self._waveform if self.role == WAVEFORM else self._spectrogram
        drawn = [draw(parts[..., part], edges[part + 1] - edges[part], width) for part in range(parts.shape[-1])]
        return np.concatenate(drawn)

    def _waveform(self, samples: Array, height: int, width: int) -> Picture:
        """``samples``: float64 [samples]."""
        firsts = np.arange(width) * len(samples) // width
        least, greatest = (reduce.reduceat(samples, firsts) for reduce in (np.minimum, np.maximum))
        scale = (height - 1) / 2 / (np.abs(samples).max() or 1.0)
        top, bottom = (np.rint((height - 1) / 2 - values * scale) for values in (greatest, least))
        rows = np.arange(height)[:, None]
        picture = np.full((height, width, 3), _PAPER, np.uint8)
        picture[height // 2] = _LINE
        picture[(top <= rows) & (rows <= bottom)] = _WAVE
        return picture

    def _spectrogram(self, values: Array, height: int, width: int) -> Picture:
        """``values``: float64 [frames, bands]."""
        if self.is_power:
            greatest = values.max()
            values = np.log10(np.maximum(values, greatest * 10.0**-DECADES)) if greatest > 0 else values * 0
        frames = (np.arange(width) * 2 + 1) * values.shape[0] // (2 * width)
        bands = (np.arange(height)[::-1] * 2 + 1) * values.shape[1] // (2 * height)
        shares = (values - values.min()) / (np.ptp(values) or 1.0) * (len(_COLORS) - 1)
        shown = shares[np.ix_(frames, bands)].T
        levels = [np.interp(shown, np.arange(len(_COLORS)), _COLORS[:, channel]) for channel in range(3)]
        return np.asarray(np.rint(np.stack(levels, axis=-1)), np.uint8)


def sounds_in(overlays: Sequence[tuple[str, str, str, str, bool]], names: Collection[str]) -> list[SoundField]:
    """The sounds among the fields with these names, in their order."""
    return [
        SoundField.of(one)
        for one in map(Overlay._make, overlays)
        if one.role in {WAVEFORM, SPECTROGRAM} and one.image in names
    ]


def _time_first(value: Array, role: str) -> Array:
    """[samples, parts] of a waveform, [frames, bands, parts] of a spectrogram."""
    if role == SPECTROGRAM:
        return value.reshape(*value.shape[:2], -1)
    longest = int(np.argmax(value.shape))  # [samples, channels], or [clips, samples] of a video
    return np.moveaxis(value, longest, 0).reshape(value.shape[longest], -1)


def _peak(value: Array) -> float:
    return float(np.abs(np.nan_to_num(value.astype(np.float64))).max(initial=0.0))
