"""Sounds made for tests: every coder, of a tone whose pitch says where in the file it is."""

import io
from fractions import Fraction

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 44_100
SECONDS = 4


def sweep(rate: int = RATE, seconds: float = SECONDS, channels: int = 2) -> NDArray[np.float64]:
    """A tone that rises, [samples, channels], weaker in each further channel."""
    time = np.arange(round(rate * seconds)) / rate
    tone = 0.5 * np.sin(2 * np.pi * (200 * time + 60 * time * time))
    return np.stack([tone / (channel + 1) for channel in range(channels)], axis=1)


def stored(kind: str, coding: str | None, wave: NDArray[np.float64], rate: int = RATE) -> bytes:
    """A file that libsndfile writes."""
    made = io.BytesIO()
    soundfile.write(made, wave, rate, format=kind, subtype=coding)
    return made.getvalue()


def coded(container: str, codec: str, wave: NDArray[np.float64], rate: int = RATE) -> bytes:
    """A file that FFmpeg writes, of two channels."""
    made = io.BytesIO()
    with av.open(made, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, options={"strict": "experimental"})
        stream.layout = "stereo"
        for first in range(0, len(wave), 1024):
            part = np.ascontiguousarray(wave[first : first + 1024].T.astype(np.float32))
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
            frame.rate, frame.pts, frame.time_base = rate, first, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return made.getvalue()


def without_table(mp3: bytes) -> bytes:
    """An MP3 without the frame that says how long it is."""
    table = max(mp3.find(b"Xing"), mp3.find(b"Info"))
    return mp3[mp3.index(b"\xff\xfb", table) :]
