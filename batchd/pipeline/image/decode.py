"""Bytes to pixels, into memory that is used again and again. Worker process.

A JPEG goes through the extension that decodes a box of it (``jpeg_box``), where that was built.
Other JPEGs (inks, unusual subsampling), and all without the extension, go through simplejpeg and
are cut; cv2 decodes the other formats, and the JPEGs that simplejpeg cannot. All give the same
pixels for the same JPEG at 1/1, 1/2, 1/4 and 1/8: all are libjpeg-turbo with its default settings,
and tests hold them to it. cv2 is never asked to apply EXIF: ``geometry`` turns images.

Before that, a file is held to what its bytes can hold and to what decoding may take of memory
(``check_limits``, ``probe``).

Invariant: the pixels returned are all this sample's. What a decoder had to invent (libjpeg fills
with grey, older cv2 with the image before) makes the sample ``SampleUndecodable``. cv2 does not
tell of its repairs, so with cv2 alone a JPEG with a hole in its middle passes, grey from there on;
one that is cut off does not. Where a box is decoded, only what is in front of its last row was
looked at (in a progressive file: everything), so only samples that reach a hole below it find it.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from batchd.pipeline.image import jpeg_box
from batchd.pipeline.image.containers import without_animation, without_padding
from batchd.pipeline.image.geometry import Cut, Move, kept_sizes
from batchd.pipeline.image.jpeg_box import EIGHTHS, BoxDecoder, FileMade, FileTask
from batchd.pipeline.image.opencv import Pixels, Scratch, cv2
from batchd.pipeline.image.options import Decode
from batchd.pipeline.image.probe import ImageHeader
from batchd.pipeline.image.resample import Scaling, cut_out
from batchd.samples.errors import SampleUndecodable
from batchd.samples.kept_files import DecodedFile, FilePart, KeptFiles, KnownFile

try:
    import simplejpeg
except ImportError:  # cv2 decodes JPEG too, in about 7 % more time
    simplejpeg = None

BYTES_PER_PIXEL_MAX = 8
"""Memory for each pixel of ``max_pixels`` that decoding one image may take. Most kinds take 3 to 6,
and GIF, WebP and progressive JPEGs without subsampling up to 10."""
_CMYK_CHANNELS = 4
_HARMLESS_WARNINGS = ("Invalid SOS parameters", "Unknown Adobe color transform")
"""What libjpeg mentions and then decodes every pixel all the same. (The extension also accepts
bytes between the segments of the header, which simplejpeg refuses in any case.) Bytes that are left
of a scan say that its blocks were decoded from wrong ones, unless they pad the file."""
_LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_UNUSUAL_SUBSAMPLING = "Could not determine subsampling"
_SIMPLEJPEG_COLORS = {"rgb": "RGB", "bgr": "BGR", "gray": "GRAY"}
_FACTORS = (1, 2, 4, 8)
_COLOR_FLAGS = (
    cv2.IMREAD_COLOR_BGR,
    cv2.IMREAD_REDUCED_COLOR_2,
    cv2.IMREAD_REDUCED_COLOR_4,
    cv2.IMREAD_REDUCED_COLOR_8,
)
_CV2_FLAGS = {
    "rgb": [flags & ~cv2.IMREAD_COLOR_BGR | cv2.IMREAD_COLOR_RGB for flags in _COLOR_FLAGS],
    "bgr": _COLOR_FLAGS,
    "gray": (
        cv2.IMREAD_GRAYSCALE,
        cv2.IMREAD_REDUCED_GRAYSCALE_2,
        cv2.IMREAD_REDUCED_GRAYSCALE_4,
        cv2.IMREAD_REDUCED_GRAYSCALE_8,
    ),
}


def decoder_versions() -> str:
    """The decoders and their versions, for users, in the order in which they are tried.

    "libjpeg-turbo 2.1.5 (decodes crops alone), simplejpeg 1.9.0 (libjpeg-turbo), OpenCV 5.0.0".
    """
    names = [f"libjpeg-turbo {jpeg_box.VERSION} (decodes crops alone)"] if jpeg_box.IS_BUILT else []
    if simplejpeg:
        names.append(f"simplejpeg {simplejpeg.__version__} (libjpeg-turbo)")
    return ", ".join([*names, f"OpenCV {cv2.__version__}"])


class Decoder:
    """Decodes the images of one pipeline, as its ``decode`` step says."""

    def __init__(self, step: Decode, scratch: Scratch, kept: KeptFiles | None = None) -> None:
        """``kept``: what a cache keeps of the sample's files. Without it each file is decoded."""
        kept = kept or KeptFiles()
        self._step = step
        self._scratch = scratch
        self._boxes = BoxDecoder(step.color, scratch, step.field, kept.points)
        self._decoded = kept.decoded
        self._color = _SIMPLEJPEG_COLORS[step.color]
        self._channels = 1 if step.color == "gray" else 3
        flags = (one | cv2.IMREAD_IGNORE_ORIENTATION for one in _CV2_FLAGS[step.color])
        self._flags = dict(zip(_FACTORS, flags, strict=True))

    def check_limits(self, data: memoryview, header: ImageHeader) -> None:
        """Raise ``SampleUndecodable`` where the image or its file is larger than allowed."""
        pixels = header.height * header.width
        if pixels > self._step.max_pixels:
            raise SampleUndecodable(
                f"a {header.format} of {header.width} x {header.height} = {pixels} pixels, "
                f"more than max_pixels = {self._step.max_pixels}"
            )
        if pixels > header.pixels_max:
            raise SampleUndecodable(
                f"a {header.format} of {len(data)} bytes that announces {header.width} x {header.height} = {pixels} pixels; "
                f"so few bytes are believed to hold {header.pixels_max} at most "
                "(a real image passes as a PNG of 8 bits per pixel)"
            )
        if len(data) > self._step.max_bytes:
            raise SampleUndecodable(f"a file of {len(data)} bytes, more than max_bytes = {self._step.max_bytes}")

    def decodes_boxes(self, header: ImageHeader) -> bool:
        """True if a box of such a file can be decoded alone, as far as its header tells."""
        return jpeg_box.IS_BUILT and header.format == "JPEG" and header.channels != _CMYK_CHANNELS

    def tiles(self, data: memoryview, header: ImageHeader, factor: int, box: Cut) -> tuple[int, int] | None:
        """Parts between restart markers that a box needs, and all of them; None without markers."""
        return self._boxes.tiles(data, header, factor, box) if self.decodes_boxes(header) else None

    def decode(  # noqa: PLR0913, PLR0917  each is one thing that decoding needs
        self,
        value: memoryview | DecodedFile | FilePart,
        header: ImageHeader,
        factor: int,
        box: Cut,
        moves: Sequence[Move] = (),
        scaling: Scaling | None = None,
    ) -> Pixels:
        """Decode a box of a file with this ``header``, as stored, at 1/``factor``.

        ``factor`` is 1, for JPEG also 2, 4 or 8. ``box`` is in pixels of the image at 1/``factor``,
        whose sides are rounded up; it has pixels, and all are the image's. ``moves``: those behind
        the crop. Returns uint8 [box.height, box.width, channels], valid until the next call; not
        writable if a cache has them. Or it returns the target of ``scaling``, if the decoder has
        resampled the box into it. Raises ``SampleUndecodable``; of a ``DecodedFile``
        ``SampleUnreadable``, of a part ``PartUnfit``.
        """
        if isinstance(value, FilePart):
            self._check_memory(header, box.height * box.width)
            pixels = self._boxes.decode(value, header, factor, box, scaling)
            assert pixels is not None, "a part is decoded by the extension"
            return pixels
        kept = value if isinstance(value, DecodedFile) else self._decoded_to_keep(value, header, factor, moves)
        if kept is not None and factor in kept.pixels:
            return cut_out(kept.pixels[factor], box)
        data = value.file() if isinstance(value, DecodedFile) else value
        return self._decode_box(data, header, factor, box, scaling)

    def file_task(
        self, file: KnownFile, header: ImageHeader, factor: int, box: Cut, scaling: Scaling
    ) -> FileTask | None:
        """Plan one file for ``make_rows``; None: ``decode`` decodes it, or says what is wrong.

        Raises ``SampleUndecodable``.
        """
        pixels = header.height * header.width
        if not self.decodes_boxes(header) or pixels > min(self._step.max_pixels, header.pixels_max):
            return None
        self._check_memory(header, box.height * box.width)
        folder, name, flags, bytes_max = file.place
        place = folder, name, flags, min(bytes_max, self._step.max_bytes)
        return FileTask(place, header, EIGHTHS // factor, box, file.points, *scaling)

    def make_rows(self, tasks: list[FileTask], file: memoryview, note: memoryview) -> list[FileMade]:
        """See ``BoxDecoder``."""
        return self._boxes.make_rows(tasks, file, note)

    @property
    def decoded_ns(self) -> int:
        """When the last box was decoded that was resampled in the same call; see ``BoxDecoder``."""
        return self._boxes.decoded_ns

    def _decoded_to_keep(
        self, data: memoryview, header: ImageHeader, factor: int, moves: Sequence[Move]
    ) -> DecodedFile | None:
        """Decode all of a file if the cache keeps it; None if not, or if it is damaged."""
        field = self._step.field
        if field not in self._decoded.fields:
            return None
        is_scaled = self._step.scale == "auto" and header.format == "JPEG"
        sizes = kept_sizes(moves, header.height, header.width, is_scaled=is_scaled)
        if factor not in sizes or not self._decoded.are_wanted(field, sum(map(prod, sizes.values())) * self._channels):
            return None
        try:
            images = {scale: self._lasting(data, header, scale, size) for scale, size in sizes.items()}
        except SampleUndecodable:
            return None
        made = DecodedFile(tuple(header), len(data), images, lambda: data)
        self._decoded.found[field] = made
        return made

    def _lasting(self, data: memoryview, header: ImageHeader, factor: int, size: tuple[int, int]) -> Pixels:
        pixels = self._decode_box(data, header, factor, Cut(0, 0, *size))
        return np.frombuffer(pixels.tobytes(), np.uint8).reshape(pixels.shape)

    def _decode_box(
        self, data: memoryview, header: ImageHeader, factor: int, box: Cut, scaling: Scaling | None = None
    ) -> Pixels:
        if self.decodes_boxes(header):
            self._check_memory(header, box.height * box.width)
            pixels = self._boxes.decode(data, header, factor, box, scaling)
            if pixels is not None:
                return pixels
        return cut_out(self._decode_whole(data, header, factor), box)

    def _check_memory(self, header: ImageHeader, pixels: int) -> None:
        """Raise ``SampleUndecodable`` for too much memory, the same whatever decodes a JPEG."""
        needed = header.held_bytes + self._channels * pixels
        if needed > BYTES_PER_PIXEL_MAX * self._step.max_pixels:
            raise SampleUndecodable(
                f"a {header.format} of {header.width} x {header.height} pixels that takes {needed} bytes of memory to decode, "
                f"more than {BYTES_PER_PIXEL_MAX} for each of max_pixels = {self._step.max_pixels}"
            )

    def _decode_whole(self, data: memoryview, header: ImageHeader, factor: int) -> Pixels:
        height, width = -(-header.height // factor), -(-header.width // factor)
        self._check_memory(header, height * width)
        if simplejpeg and header.format == "JPEG":
            pixels = self._decode_jpeg(data, header, (height, width, self._channels), factor)
        elif header.format == "APNG":
            pixels = self._decode_any(without_animation(data), factor)
        else:
            pixels = self._decode_any(data, factor)
        if pixels.shape != (height, width, self._channels):
            raise SampleUndecodable(
                f"a {header.format} whose header announces {header.width} x {header.height} pixels, "
                f"but which decodes to the shape {pixels.shape}"
            )
        return pixels

    def _decode_jpeg(self, data: memoryview, header: ImageHeader, shape: tuple[int, int, int], factor: int) -> Pixels:
        try:
            # simplejpeg would hand the inks out as if they were RGB
            if header.channels == _CMYK_CHANNELS:
                _decode_strictly(data, header.scan, "CMYK", {"min_height": 1, "min_width": 1, "min_factor": 8})
                return self._decode_any(data, factor)
            options: dict[str, Any] = {"buffer": self._scratch.bytes("decode", prod(shape))}
            if factor > 1:
                options |= {"min_height": shape[0], "min_width": shape[1], "min_factor": factor}
            return _decode_strictly(data, header.scan, self._color, options)
        except ValueError as error:
            if _UNUSUAL_SUBSAMPLING in str(error):
                return self._decode_any(data, factor)
            raise SampleUndecodable(f"a broken JPEG: {error}") from None

    def _decode_any(self, data: memoryview, factor: int) -> Pixels:
        try:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), self._flags[factor])
        except cv2.error as error:
            raise SampleUndecodable(f"OpenCV cannot decode it: {error.err}") from None
        if pixels is None:
            raise SampleUndecodable("OpenCV cannot decode it")
        return np.asarray(pixels, np.uint8).reshape(*pixels.shape[:2], self._channels)


def _decode_strictly(data: memoryview, scan: int, color: str, options: dict[str, Any]) -> Pixels:
    """Decode with simplejpeg. Raises ``ValueError`` if libjpeg had to make pixels up."""
    pixels: Pixels
    try:
        pixels = simplejpeg.decode_jpeg(data, color, **options)
    except ValueError as error:
        left_over = _LEFT_OVER.search(str(error))
        if left_over and (file := without_padding(data, scan, int(left_over[1]))):
            # it may have read some zeros ahead; now it counts them
            pixels = _decode_strictly(memoryview(file), scan, color, options)
        elif any(harmless in str(error) for harmless in _HARMLESS_WARNINGS):
            pixels = simplejpeg.decode_jpeg(data, color, **options, strict=False)
        else:
            raise
    return pixels
