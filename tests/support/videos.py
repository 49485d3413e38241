"""Videos made for tests.

Every frame shows its own number in twelve blocks, which survive any codec.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from batchd.data.media.frames import VideoFrames

HEIGHT, WIDTH = 48, 64
ROWS, COLUMNS = 3, 4
RATE = 16_000
HEARD = np.random.default_rng(2).integers(-9000, 9000, (4 * RATE, 2)).astype(np.int16)
"""Two channels of noise, four seconds."""


@dataclass(frozen=True)
class Coding:
    """The coding of a video.

    ``times`` gives the time of a frame in units of 1 / ``units`` seconds.
    """

    codec: str = "libx264"
    options: Mapping[str, str] = field(default_factory=dict)
    muxer: Mapping[str, str] = field(default_factory=dict)
    units: int = 25
    times: Callable[[int], int] = lambda number: number
    gop: int = 12
    b_frames: int = 2
    pixels: str = "yuv420p"
    turn: int = 0


def picture(number: int, height: int = HEIGHT, width: int = WIDTH) -> NDArray[np.uint8]:
    """Draw frame ``number``: its bits as dark and bright blocks, and something that moves."""
    bits = np.array([(number >> bit) & 1 for bit in range(ROWS * COLUMNS)]).reshape(ROWS, COLUMNS)
    blocks = np.kron(40 + 160 * bits, np.ones((height // ROWS, width // COLUMNS), int))
    y, x = np.mgrid[:height, :width]
    return np.stack([blocks + (x + number) % 16, blocks + (y + 2 * number) % 16, blocks], -1).astype(np.uint8)


def number_in(image: NDArray[np.uint8]) -> int:
    """Return the number that a frame shows."""
    height, width = image.shape[:2]
    blocks = image[: height // ROWS * ROWS, : width // COLUMNS * COLUMNS]
    means = blocks.reshape(ROWS, height // ROWS, COLUMNS, width // COLUMNS, -1).mean((1, 3, 4)).ravel()
    return sum(int(mean > 120) << bit for bit, mean in enumerate(means))


def write_video(
    path: Path, frames: int = 60, coding: Coding = Coding(), first: int = 0, sound: str = "", delay_s: float = 0.0
) -> Path:
    """Write a video whose frames have the numbers from ``first`` on.

    ``sound``: the coder of the noise ``HEARD``, which may begin later; "" for none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(path, "w", container_options=dict(coding.muxer)) as container:
        stream = container.add_stream(coding.codec, rate=25, options=dict(coding.options))
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, coding.pixels
        context = stream.codec_context
        context.thread_count, context.gop_size, context.max_b_frames = 1, coding.gop, coding.b_frames
        context.time_base = stream.time_base = Fraction(1, coding.units)
        if coding.turn:
            stream.set_display_rotation(coding.turn)
        if sound:
            heard = container.add_stream(sound, rate=RATE)
            heard.layout = "stereo"
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(first + number), "rgb24").reformat(format=coding.pixels)
            frame.pts, frame.time_base = coding.times(number), Fraction(1, coding.units)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound:
            for begin in range(0, len(HEARD), 1000):
                wave = av.AudioFrame.from_ndarray(HEARD[begin : begin + 1000].reshape(1, -1), "s16", "stereo")
                wave.rate, wave.pts, wave.time_base = RATE, begin + round(delay_s * RATE), Fraction(1, RATE)
                container.mux(heard.encode(wave))
            container.mux(heard.encode(None))
    return path


def with_sound(path: Path, sound: str = "pcm_s16le", delay_s: float = 0.0) -> Path:
    """Write four seconds of video, and of the noise ``HEARD``, which may begin later."""
    return write_video(path, 100, Coding("mpeg4", b_frames=0), sound=sound, delay_s=delay_s)


def decoded_in_order(path: Path) -> list[av.VideoFrame]:
    """Return all frames of a video, as FFmpeg gives them from its first packet to its last."""
    with av.open(path) as container:
        container.streams.video[0].codec_context.thread_count = 1
        return list(container.decode(video=0))


def fed_packets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The packets that decoders get from now on, by their number in the file."""
    fed: list[int] = []
    packets = VideoFrames.packets

    def counted(self: VideoFrames, first: int, last: int) -> Iterator[tuple[int, av.Packet]]:
        for number, packet in packets(self, first, last):
            fed.append(number)
            yield number, packet

    monkeypatch.setattr(VideoFrames, "packets", counted)
    return fed
