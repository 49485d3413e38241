"""Bytes to pixels, into memory that is used again and again. Worker process.

A JPEG goes through the extension that decodes a box of it (``jpeg_box``), where that was built.
Other JPEGs (inks, unusual subsampling, arithmetic codes), and all without the extension, go through
simplejpeg and are cut; cv2 decodes the other formats, and the JPEGs that simplejpeg cannot. All
give the same pixels for the same JPEG at 1/1, 1/2, 1/4 and 1/8: all are libjpeg-turbo with its
default settings, and tests hold them to it. cv2 never applies EXIF: ``geometry`` turns images.

Before that, a file is held to what its bytes can hold and to what decoding may take of memory
(``check_limits``, ``probe``).

Alpha is dropped, in all formats: a pixel has the colour that the file stores, however transparent
it is. Grey is the luma of a JPEG, and of the others what the ``gray`` step makes of their colours.

Invariant: the pixels returned are all this sample's. What a decoder had to invent (libjpeg fills
with grey, or guesses; older cv2 with the image before) makes the sample ``SampleUndecodable``. Of
libjpeg in cv2, only the text that it prints tells. Where a box is decoded, only what is in front of
its last row was looked at (in a progressive file: everything), so only samples that reach a hole
below it find it.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from batchd.data.pipeline.image import containers, jpeg_box
from batchd.data.pipeline.image.geometry import Cut, Move, box_around, kept_sizes
from batchd.data.pipeline.image.jpeg_box import EIGHTHS, BoxDecoder, FileMade, FileTask, decoding_ns
from batchd.data.pipeline.image.opencv import Pixels, Scratch, cv2, decode_file
from batchd.data.pipeline.image.options import Decode
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.image.resample import Scaling, cut_out
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.image_header import ImageHeader
from batchd.data.samples.kept_files import DecodedFile, FilePart, KeptFiles, KnownFile
from batchd.data.samples.shared_boxes import Sibling

try:
    import simplejpeg
except ImportError:  # cv2 decodes JPEG too, in about 7 % more time
    simplejpeg = None

BYTES_PER_PIXEL_MAX = 8
"""Memory for each pixel of ``max_pixels`` that decoding one image may take. Most kinds take 3 to 6,
and GIF, WebP and progressive JPEGs without subsampling up to 10."""
_COLORS = 3
_CMYK_CHANNELS = 4
_LEFT_OVER = re.compile(r"(\d+) extraneous bytes before marker 0x([0-9a-f]{2})")
"""Bytes that are left of a scan say that its blocks were decoded from wrong ones, unless they pad
the file."""
_END_OF_IMAGE = "d9"
_ZEROS_READ_MAX = 24
"""Bytes that an arithmetic decoder may read behind its data: encoders leave out zeros at the end.
Photographs need 1 to 4; of 1,268 pictures of flat areas, patterns and noise none needed more than
17. A cut needs about as many as it took."""
_WEBP_BYTES_MIN = 32
"""cv2 looks at no shorter file; the shortest image has 26 bytes."""
_ROWS_AT_ONCE_PIXELS = 1 << 16
_LEVEL_BITS_MAX = 16
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
        self._kept = kept
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

    @property
    def has_points(self) -> bool:
        """True if a box of the current sample's file can be decoded from an access point."""
        return self._boxes.has_points

    @property
    def keeps_pixels(self) -> bool:
        """True if a cache keeps decoded files."""
        return self._step.field in self._decoded.fields

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
        kept = value if isinstance(value, DecodedFile) else self._decoded.found.get(self._step.field)
        if kept is None and not isinstance(value, DecodedFile):
            kept = self._decoded_to_keep(value, header, factor, moves)
        if kept is not None and factor in kept.pixels:
            return cut_out(kept.pixels[factor], box)
        data = value.file() if isinstance(value, DecodedFile) else value
        sibling = self._kept.sibling
        if sibling is not None and sibling.is_open and sibling.field == self._step.field:
            pixels = self._decode_shared(sibling, data, header, factor, box)
            if pixels is not None:
                return pixels
        return self.decode_box(data, header, factor, box, scaling)

    def _decode_shared(
        self, sibling: Sibling, data: memoryview, header: ImageHeader, factor: int, box: Cut
    ) -> Pixels | None:
        """Cut the box of what was decoded for several streams, or decode it with theirs.

        None: it is decoded alone.
        """
        found = sibling.find(len(data), factor, box)
        if found is not None:
            return cut_out(found[1], box.within(Cut(*found[0])))
        cuts, has_points = self.decodes_boxes(header), self.has_points

        def cost_ns(one: Cut) -> float:
            return decoding_ns(header, factor, one, cuts=cuts, has_points=has_points)

        around, together_ns, joined = box, cost_ns(box), 0
        for other in sibling.others(header, factor):
            both = box_around([around, Cut(*other)])
            both_ns = cost_ns(both)
            if both_ns <= together_ns + cost_ns(Cut(*other)):
                around, together_ns, joined = both, both_ns, joined + 1
        if not joined:
            return None
        try:
            pixels = self.decode_box(data, header, factor, around)
        except SampleUndecodable:
            return None  # what is wrong may be outside of this crop
        sibling.keep(len(data), factor, around, pixels)
        return cut_out(pixels, box.within(around))

    def file_task(self, file: KnownFile, factor: int, box: Cut, scaling: Scaling) -> FileTask | None:
        """Plan one file for ``make_rows``; None: ``decode`` decodes it, or says what is wrong.

        Raises ``SampleUndecodable``.
        """
        header = file.header
        pixels = header.height * header.width
        if not self.decodes_boxes(header) or pixels > min(self._step.max_pixels, header.pixels_max):
            return None
        self._check_memory(header, box.height * box.width)
        folder, name, flags, bytes_max, as_of_ns = file.place
        place = folder, name, flags, min(bytes_max, self._step.max_bytes), as_of_ns
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
        made = DecodedFile(header, len(data), images, lambda: data)
        self._decoded.found[field] = made
        return made

    def _lasting(self, data: memoryview, header: ImageHeader, factor: int, size: tuple[int, int]) -> Pixels:
        pixels = self.decode_box(data, header, factor, Cut(0, 0, *size))
        return np.frombuffer(pixels.tobytes(), np.uint8).reshape(pixels.shape)

    def decode_box(
        self, data: memoryview, header: ImageHeader, factor: int, box: Cut, scaling: Scaling | None = None
    ) -> Pixels:
        """Decode one box of the image at 1 / ``factor``: height x width x channels, uint8."""
        if self.decodes_boxes(header):
            self._check_memory(header, box.height * box.width)
            pixels = self._boxes.decode(data, header, factor, box, scaling)
            if pixels is not None:
                return pixels
        return cut_out(self.decode_whole(data, header, factor), box)

    def _check_memory(self, header: ImageHeader, pixels: int) -> None:
        """Raise ``SampleUndecodable`` for too much memory, the same whatever decodes a JPEG."""
        needed = header.held_bytes + (self._channels if header.format == "JPEG" else _COLORS) * pixels
        if needed > BYTES_PER_PIXEL_MAX * self._step.max_pixels:
            raise SampleUndecodable(
                f"a {header.format} of {header.width} x {header.height} pixels that takes {needed} bytes of memory to decode, "
                f"more than {BYTES_PER_PIXEL_MAX} for each of max_pixels = {self._step.max_pixels}"
            )

    def decode_whole(self, data: memoryview, header: ImageHeader, factor: int) -> Pixels:
        """Decode the whole image at 1 / ``factor``: height x width x channels, uint8."""
        height, width = -(-header.height // factor), -(-header.width // factor)
        self._check_memory(header, height * width)
        if header.format == "JPEG":
            pixels = self._decode_jpeg(data, header, (height, width, self._channels), factor)
        elif self._step.color != "gray" or header.channels == 1:
            pixels = _decode_any(data, header, self._step.color)
        else:
            color = _decode_any(data, header, "rgb")
            pixels = np.asarray(cv2.cvtColor(color, cv2.COLOR_RGB2GRAY), np.uint8)[:, :, np.newaxis]
        if pixels.shape != (height, width, self._channels):
            raise SampleUndecodable(
                f"a {header.format} whose header announces {header.width} x {header.height} pixels, "
                f"but which decodes to the shape {pixels.shape}"
            )
        return pixels

    def _decode_jpeg(self, data: memoryview, header: ImageHeader, shape: tuple[int, int, int], factor: int) -> Pixels:
        def by_simplejpeg(file: memoryview) -> Pixels:
            options: dict[str, Any] = {"buffer": self._scratch.bytes("decode", prod(shape))}
            if factor > 1:
                options |= {"min_height": shape[0], "min_width": shape[1], "min_factor": factor}
            pixels: Pixels = simplejpeg.decode_jpeg(file, self._color, **options, strict=True)
            return pixels

        def by_cv2(file: memoryview) -> Pixels:
            pixels, said = decode_file(file, self._flags[factor])
            if pixels is None or said:
                raise ValueError(said or "OpenCV cannot decode it")
            return pixels.reshape(*pixels.shape[:2], self._channels)

        try:
            # simplejpeg would hand the inks out as if they were RGB
            if simplejpeg and header.channels != _CMYK_CHANNELS:
                try:
                    return _decode_strictly(data, header, by_simplejpeg)
                except ValueError as error:
                    if _UNUSUAL_SUBSAMPLING not in str(error):
                        raise
            return _decode_strictly(data, header, by_cv2)
        except ValueError as error:
            raise SampleUndecodable(f"a broken JPEG: {error}") from None


JpegDecoder: TypeAlias = Callable[[memoryview], Pixels]
"""Decodes a file, or raises ``ValueError`` with the first thing that libjpeg says."""


def _decode_strictly(data: memoryview, header: ImageHeader, decode: JpegDecoder) -> Pixels:
    """Decode a JPEG. Raises ``ValueError`` if libjpeg had to make pixels up."""
    scan = header.scan
    try:
        if containers.is_arithmetic(data, scan):
            _check_arithmetic(data, scan, decode)
        return decode(data)
    except ValueError as error:
        left_over = _LEFT_OVER.search(str(error))
        if left_over and left_over[2] == _END_OF_IMAGE:
            # of the padding it may have read some zeros ahead; now it counts them
            file = containers.without_padding(data, scan, int(left_over[1]))
        elif left_over:
            file = containers.without_bytes_between(data, scan)
            header = header._replace(scan=scan + len(file or data) - len(data))
        else:
            file = containers.with_usual_numbers(data, header.channels)
        if file is None:
            raise
    return _decode_strictly(memoryview(file), header, decode)


def _check_arithmetic(data: memoryview, scan: int, decode: JpegDecoder) -> None:
    """Raise ``ValueError`` if arithmetic image data break off: libjpeg reads zeros, and is silent.

    It counts the zeros that are left of those that are put there.
    """
    end = containers.end_of_image(data, scan)
    try:
        decode(memoryview(b"".join((data[:end], bytes(2 * _ZEROS_READ_MAX), data[end:]))))
    except ValueError as error:
        left_over = _LEFT_OVER.search(str(error))
        if not left_over or left_over[2] != _END_OF_IMAGE:
            raise
        if int(left_over[1]) >= _ZEROS_READ_MAX:
            return
    raise ValueError(f"arithmetic image data that break off: more than {_ZEROS_READ_MAX} bytes are missing")


def _decode_any(data: memoryview, header: ImageHeader, color: str) -> Pixels:
    """Decode a file of another format than JPEG. A colour file has to be decoded in colour."""
    left = top = 0
    if header.format == "APNG":
        data = containers.without_animation(data)
    elif header.format == "GIF":
        data = containers.without_transparency(data)
    elif header.format == "BMP" and (layout := containers.bitmap_layout(data)):
        return _decode_bitmap(data, header, layout)[:, :, :: -1 if color == "bgr" else 1]
    elif header.format == "WebP":
        left, top, data = _still(data, header)
    pixels, said = decode_file(data, _CV2_FLAGS[color][0] | cv2.IMREAD_IGNORE_ORIENTATION)
    if pixels is None:
        raise SampleUndecodable(f"OpenCV cannot decode it{': ' if said else ''}{said}")
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    if header.format != "WebP" or pixels.shape[:2] == (header.height, header.width):
        return pixels
    canvas = np.zeros((header.height, header.width, pixels.shape[2]), np.uint8)
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


def _still(data: memoryview, header: ImageHeader) -> tuple[int, int, memoryview]:
    """Where the image of a WebP, or the first one of an animation, is in its canvas; and its file.

    libwebp makes transparent pixels of an animation black, and leaves those of a still one.
    """
    frame = containers.first_webp_frame(data)
    if frame is None:
        return 0, 0, memoryview(bytes(data).ljust(_WEBP_BYTES_MIN, b"\0")) if len(data) < _WEBP_BYTES_MIN else data
    still = probe_image(memoryview(frame.file))
    if frame.top + still.height > header.height or frame.left + still.width > header.width:
        raise SampleUndecodable("a WebP with a frame larger than its canvas")
    return frame.left, frame.top, memoryview(frame.file.ljust(_WEBP_BYTES_MIN, b"\0"))


def _decode_bitmap(data: memoryview, header: ImageHeader, layout: containers.BitmapLayout) -> Pixels:
    """Decode a BMP of 16 or 32 bits to RGB. cv2 knows few masks, and makes white of 5 bits 248."""
    row_bytes = (header.width * layout.bits + 31) // 32 * 4
    size, strides = (header.height, header.width), (row_bytes, layout.bits // 8)
    stored = np.ndarray(size, f"<u{layout.bits // 8}", data, layout.pixels_at, strides)
    if not layout.is_top_down:
        stored = stored[::-1]
    made = np.empty((*size, _COLORS), np.uint8)
    portion = max(1, _ROWS_AT_ONCE_PIXELS // header.width)
    for channel, mask in enumerate(layout.masks):
        shift, levels = _levels(mask)
        for row in range(0, header.height, portion):
            made[row : row + portion, :, channel] = levels[(stored[row : row + portion] & mask) >> shift]
    return made


@lru_cache(maxsize=32)
def _levels(mask: int) -> tuple[int, Pixels]:
    """Where the number under a mask begins, without more than 16 bits; and each number's level."""
    bits = min(mask.bit_count(), _LEVEL_BITS_MAX)
    most = (1 << bits) - 1
    numbers = np.arange(most + 1, dtype=np.int64)
    return mask.bit_length() - bits, ((numbers * 255 + most // 2) // max(1, most)).astype(np.uint8)
