"""Speed of decoding a JPEG, with SIMD and without. Runs in the user's shell, and in children.

    python -m batchd.commands.doctor.decoding      as workers decode -> JSON: ms by decoder
    the same with JSIMD_FORCENONE=1                without SIMD      -> the same

libjpeg-turbo obeys that variable, so the two differ exactly if SIMD is present and used.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import process_time
from timeit import Timer
from typing import NamedTuple

import numpy as np

from batchd.commands.doctor.machine import Finding, note, ok, problem, warning
from batchd.runtime.children import DEVNULL, PIPE, start

HEIGHT, WIDTH = 768, 1024
MEGAPIXEL = 1_000_000
QUALITY = 90
REPEATS = 15
SIMD_GAIN = 1.3
"""Minimum factor that counts as SIMD; libjpeg-turbo gains two to four."""
SLOW_MS = 25.0
"""For a megapixel: the time of a processor of ten years ago."""
CHILD_TIMEOUT_S = 60.0
ANSWER_BYTES_MAX = 4096
ROUNDS_MAX = 3
BY_BOX = "libjpeg-turbo"
"""Start of the name of batchd's own decoder."""
FORCE_NONE = "JSIMD_FORCENONE"


class DecoderSpeed(NamedTuple):
    """One decoder's times for a megapixel. ``plain_ms``: without SIMD, None if unknown."""

    name: str
    megapixel_ms: float
    plain_ms: float | None = None

    @property
    def has_simd(self) -> bool:
        """True if SIMD makes it faster."""
        return self.plain_ms is not None and self.plain_ms >= SIMD_GAIN * self.megapixel_ms


def check_decoding(speeds: Sequence[DecoderSpeed]) -> Iterator[Finding]:
    """Findings on each decoder; workers use the first for JPEG. ``speeds`` may be empty."""
    if not speeds:
        yield problem(
            "JPEG decoder",
            "no decoder could be loaded",
            "run: pip install --force-reinstall simplejpeg opencv-python-headless",
        )
        return
    first, *others = speeds
    yield _check_first(first)
    for speed in others:
        yield ok("other decoders", f"{_speed_text(speed)}; for other formats, and for JPEGs that the first cannot read")
    if first.name.startswith(BY_BOX):
        yield ok("decoding of crops", "only the crop of a JPEG is decoded")
    else:
        yield note(
            "decoding of crops",
            "every JPEG is decoded whole: batchd's extension for libjpeg-turbo was not built, or its libjpeg is missing",
            "the extension saves up to a third of the time: docs/install.md, Decoding of crops",
        )
    if not any(speed.name.startswith("simplejpeg") for speed in speeds):
        advice = "without it fewer broken JPEGs are detected: pip install simplejpeg"
        yield warning("JPEG decoder", "simplejpeg is not installed, or cannot be loaded", advice)


def check_resampling(*, is_built: bool) -> Finding:
    """Finding on the extension that resizes and rotates."""
    if is_built:
        return ok("resampling", "images are resized and rotated by batchd's extension")
    return warning(
        "resampling",
        "batchd's extension was not built, so numpy resizes and rotates: the same pixels in 20 to 50 times the time",
        "install a C compiler, then batchd again: docs/install.md, Resampling",
    )


def _speed_text(speed: DecoderSpeed) -> str:
    found = f"{speed.name}: {speed.megapixel_ms:.1f} ms for a megapixel"
    if speed.plain_ms is None:
        return found
    if not speed.has_simd:
        return f"{found}, without SIMD"
    return f"{found}, {speed.plain_ms / speed.megapixel_ms:.1f} times as fast as without SIMD"


def _check_first(speed: DecoderSpeed) -> Finding:
    found = _speed_text(speed)
    if speed.plain_ms is not None and not speed.has_simd:
        if speed.name.startswith(BY_BOX):
            advice = "the libjpeg-turbo of this system was built without SIMD: install that of the distribution"
        else:
            advice = "use PyPI's wheel, not a build of your own: pip install --force-reinstall --only-binary :all: simplejpeg"
        return warning("JPEG decoder", found, advice)
    if speed.megapixel_ms > SLOW_MS:
        advice = "more workers on more CPUs, or smaller files: `batchd prepare` resizes them once"
        return note("JPEG decoder", f"{found}; slow", advice)
    return ok("JPEG decoder", found)


def measure_decoders() -> list[DecoderSpeed]:
    """Decode in two children, with SIMD and without.

    Several rounds if the first shows no gain: other programs may have slowed it down.
    """
    plain: dict[str, float] = {}
    fast: dict[str, float] = {}
    speeds: list[DecoderSpeed] = []
    for _ in range(ROUNDS_MAX):
        for best, force_none in ((plain, "1"), (fast, None)):
            measured = measured_in_a_process({FORCE_NONE: force_none})
            best.update((name, min(ms, best.get(name, ms))) for name, ms in measured.items())
        speeds = [DecoderSpeed(name, ms, plain.get(name)) for name, ms in fast.items()]
        if not speeds or speeds[0].has_simd:
            break
    return speeds


def measured_in_a_process(environment: dict[str, str | None]) -> dict[str, float]:
    """Milliseconds of each decoder in a process of its own; empty if that one fails."""
    with start("batchd.commands.doctor.decoding", environment=environment, stdout=PIPE, stderr=DEVNULL) as child:
        said = child.read(CHILD_TIMEOUT_S, ANSWER_BYTES_MAX)
        if child.end() != 0:
            return {}
    measured: dict[str, float] = json.loads(said)
    return measured


def made_jpeg() -> bytes:
    """Encode a picture of 768 x 1024 with soft and sharp parts, the same every time."""
    from batchd.data.pipeline.image.opencv import cv2  # noqa: PLC0415  only the child decodes

    random = np.random.default_rng(1)
    small = random.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8)
    pixels = cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    pixels[::3] = 0
    _, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return bytes(data)


def _decoders() -> Iterator[tuple[str, Callable[[bytes], object]]]:
    """Names and functions of the decoders that workers use, in their order."""
    from batchd.data.pipeline.image import jpeg_box  # noqa: PLC0415  only the child decodes
    from batchd.data.pipeline.image.geometry import Cut  # noqa: PLC0415
    from batchd.data.pipeline.image.opencv import Scratch, cv2  # noqa: PLC0415
    from batchd.data.samples.image_header import ImageHeader  # noqa: PLC0415

    if jpeg_box.IS_BUILT:
        boxes, header = jpeg_box.BoxDecoder("rgb", Scratch()), ImageHeader("JPEG", HEIGHT, WIDTH, 1, 3)
        yield (
            f"{BY_BOX} {jpeg_box.VERSION}",
            lambda data: boxes.decode(memoryview(data), header, 1, Cut(0, 0, HEIGHT, WIDTH)),
        )
    with suppress(ImportError):
        import simplejpeg  # noqa: PLC0415  only the child decodes

        yield f"simplejpeg {simplejpeg.__version__}", lambda data: simplejpeg.decode_jpeg(data, "RGB")
    yield (
        f"opencv-python-headless {cv2.__version__}",
        lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
    )


def _best_ms(decode: Callable[[bytes], object], data: bytes) -> float:
    """Milliseconds of CPU time for a megapixel, so other programs do not count."""
    best_s = min(Timer(partial(decode, data), timer=process_time).repeat(REPEATS, number=1))
    return best_s * 1000 * MEGAPIXEL / (HEIGHT * WIDTH)


if __name__ == "__main__":
    jpeg = made_jpeg()
    sys.stdout.write(json.dumps({name: _best_ms(decode, jpeg) for name, decode in _decoders()}))
