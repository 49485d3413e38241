"""How fast this machine decodes a JPEG, and whether decoders have their SIMD parts. Runs in the user's shell, and in children.

    python -m batchd.doctor.decoding                       as workers decode         -> JSON: each decoder, ms for a megapixel
    JSIMD_FORCENONE=1 python -m batchd.doctor.decoding     without libjpeg's SIMD    -> the same

libjpeg-turbo obeys that variable, so the two differ exactly where SIMD is there and is used. Each
decoder that a worker may use is one row of ``_decoders``.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from batchd.children import DEVNULL, PIPE, start
from batchd.doctor.finding import Finding, note, ok, problem, warning

HEIGHT, WIDTH = 768, 1024
MEGAPIXEL = 1_000_000
QUALITY = 90
REPEATS = 15
SIMD_GAIN = 1.3
"""With SIMD libjpeg-turbo is two to four times as fast; less than this is none."""
SLOW_MS = 25.0
"""For a megapixel: what a processor of ten years ago takes."""
CHILD_TIMEOUT_S = 60.0
ANSWER_BYTES_MAX = 4096
ROUNDS_MAX = 3
BY_BOX = "libjpeg-turbo"
"""How the name of the decoder begins that is batchd's own."""
FORCE_NONE = "JSIMD_FORCENONE"


class DecoderSpeed(NamedTuple):
    """What was measured of one decoder; ``plain_ms`` is without SIMD, None where it cannot be told."""

    name: str
    megapixel_ms: float
    plain_ms: float | None = None

    @property
    def has_simd(self) -> bool:
        """Does it decode faster than without?"""
        return self.plain_ms is not None and self.plain_ms >= SIMD_GAIN * self.megapixel_ms


def check_decoding(speeds: Sequence[DecoderSpeed]) -> Iterator[Finding]:
    """Each decoder, the first of which workers use for JPEG; none where it could not be tried."""
    if not speeds:
        yield problem("JPEG decoder", "no decoder could be loaded", "run: pip install --force-reinstall batchd")
    for speed in speeds[:1]:
        yield _check_first(speed)
    for speed in speeds[1:]:
        yield ok("other decoders", f"{_told(speed)}; for other formats, and for JPEGs that the first cannot read")
    if speeds:
        yield _check_crops(speeds[0])
    if speeds and not any(speed.name.startswith("simplejpeg") for speed in speeds):
        advice = "without it a broken JPEG is noticed less well: pip install simplejpeg"
        yield warning("JPEG decoder", "simplejpeg is not installed, or cannot be loaded", advice)


def _check_crops(first: DecoderSpeed) -> Finding:
    if first.name.startswith(BY_BOX):
        return ok("decoding of crops", "of a JPEG that is cropped, the crop alone is decoded")
    return note(
        "decoding of crops",
        "every JPEG is decoded whole: batchd's extension for libjpeg-turbo was not built, or its libjpeg is gone",
        "it saves up to a third of the time: docs/install.md, Decoding of crops",
    )


def check_resampling(*, is_built: bool) -> Finding:
    """Whether the extension that resizes and rotates is there."""
    if is_built:
        return ok("resampling", "images are resized and rotated by batchd's extension")
    return warning(
        "resampling",
        "batchd's extension was not built, so numpy resizes and rotates, of the same pixels, in ten times the time",
        "install a C compiler, then batchd again: docs/install.md, Resampling",
    )


def _told(speed: DecoderSpeed) -> str:
    found = f"{speed.name}: {speed.megapixel_ms:.1f} ms for a megapixel"
    if speed.plain_ms is None:
        return found
    if not speed.has_simd:
        return f"{found}, without SIMD"
    return f"{found}, {speed.plain_ms / speed.megapixel_ms:.1f} times as fast as without SIMD"


def _check_first(speed: DecoderSpeed) -> Finding:
    found = _told(speed)
    if speed.plain_ms is not None and not speed.has_simd:
        if speed.name.startswith(BY_BOX):
            advice = (
                "the libjpeg-turbo of this system is built without its SIMD parts: install that of the distribution"
            )
        else:
            advice = "use PyPI's wheel, not a build of your own: pip install --force-reinstall --only-binary :all: simplejpeg"
        return warning("JPEG decoder", found, advice)
    if speed.megapixel_ms > SLOW_MS:
        return note(
            "JPEG decoder",
            f"{found}; slow",
            "more workers on more CPUs, or smaller files: `batchd prepare` resizes them once",
        )
    return ok("JPEG decoder", found)


def measure_decoders() -> list[DecoderSpeed]:
    """Decode in two children, with SIMD and without; the best of several rounds, where the first shows no difference.

    A core that is shared with others computes more slowly for a moment, and no decoder shall be
    blamed for that.
    """
    plain: dict[str, float] = {}
    fast: dict[str, float] = {}
    speeds: list[DecoderSpeed] = []
    for _ in range(ROUNDS_MAX):
        _keep_best(plain, _measured({FORCE_NONE: "1"}))
        _keep_best(fast, _measured({FORCE_NONE: None}))
        speeds = [DecoderSpeed(name, ms, plain.get(name)) for name, ms in fast.items()]
        if not speeds or speeds[0].has_simd:
            break
    return speeds


def _keep_best(best: dict[str, float], measured: dict[str, float]) -> None:
    best.update((name, min(ms, best.get(name, ms))) for name, ms in measured.items())


def _measured(environment: dict[str, str | None]) -> dict[str, float]:
    with start("batchd.doctor.decoding", environment=environment, stdout=PIPE, stderr=DEVNULL) as child:
        said = child.read(CHILD_TIMEOUT_S, ANSWER_BYTES_MAX)
        if child.end() != 0:
            return {}
    measured: dict[str, float] = json.loads(said)
    return measured


def made_jpeg() -> bytes:
    """A picture with soft and sharp parts, the same every time."""
    from batchd.pipeline.image.vision import cv2  # noqa: PLC0415  the child alone decodes

    random = np.random.default_rng(1)
    small = random.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8)
    pixels = cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    pixels[::3] = 0
    _, data = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
    return bytes(data)


def _decoders() -> Iterator[tuple[str, Callable[[bytes], Any]]]:
    """Those that workers use, in their order."""
    from batchd.pipeline.image import jpeg_box  # noqa: PLC0415  the child alone decodes
    from batchd.pipeline.image.geometry import Cut  # noqa: PLC0415
    from batchd.pipeline.image.probe import ImageHeader  # noqa: PLC0415
    from batchd.pipeline.image.vision import Scratch, cv2  # noqa: PLC0415

    if jpeg_box.IS_BUILT:
        boxes, header = jpeg_box.BoxDecoder("rgb", Scratch()), ImageHeader("JPEG", HEIGHT, WIDTH, 1, 3)
        yield (
            f"{BY_BOX} {jpeg_box.VERSION}",
            lambda data: boxes.decode(memoryview(data), header, 1, Cut(0, 0, HEIGHT, WIDTH)),
        )
    with suppress(ImportError):
        import simplejpeg  # noqa: PLC0415  the child alone decodes

        yield f"simplejpeg {simplejpeg.__version__}", lambda data: simplejpeg.decode_jpeg(data, "RGB")
    yield (
        f"opencv-python-headless {cv2.__version__}",
        lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
    )


def _best_ms(decode: Callable[[bytes], Any], data: bytes) -> float:
    times = []  # of the CPU: others on this machine are no fault of the decoder
    for _ in range(REPEATS):
        began = process_time()
        decode(data)
        times.append(process_time() - began)
    return min(times) * 1000 * MEGAPIXEL / (HEIGHT * WIDTH)


if __name__ == "__main__":
    jpeg = made_jpeg()
    sys.stdout.write(json.dumps({name: _best_ms(decode, jpeg) for name, decode in _decoders()}))
