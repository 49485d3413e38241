"""The extension ``_jpeg``, where it was built: decode a box of a JPEG, make files for that.

Workers, and writers of ``batchd prepare``. A box: rows below it are not read, and pixels around it
are entropy-decoded only. Half of a photograph takes some two thirds of the time.

A baseline JPEG can only be read from its start, from an access point (``_jpeg_scan.h``), or from a
restart marker, where nothing depends on what was before: then what is above and beside a box is not
even entropy-decoded. The decoder finds markers by searching, which takes 1 to 2 % of the time of
decoding the crop. A progressive file is read whole.

Invariant: at each of the scales the pixels are those of decoding the whole image and cutting it,
bit for bit.
"""

from math import prod
from typing import NamedTuple

import numpy as np

from batchd.data.pipeline.image import resample
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.opencv import Pixels, Scratch
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.image.resample import Scaling
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.image_header import ImageHeader
from batchd.data.samples.kept_files import AccessPoints, FileHead, FilePart, PartUnfit, has_points, without_points
from batchd.data.storage import rows

try:
    from batchd.data.pipeline import _jpeg
except ImportError:  # not built, or without its libjpeg; `decoder_versions` tells users
    IS_BUILT, VERSION = False, ""
else:
    IS_BUILT, VERSION = True, _jpeg.LIBJPEG_TURBO_VERSION

EIGHTHS = 8
_MARKER_BYTES = 2
STEP_PIXELS = 32
"""Between two access points. Half of it saves 3 % of the time of a crop, and takes 1.9 times the
memory; twice as much saves 5 % less, and takes half of the memory."""
SCANNED_NS, DECODED_NS, CALL_NS = 4.5, 2.0, 20_000.0
"""To read the bits of a pixel, to make one, and to begin: fitted to random boxes of photographs of
500 x 375 in baseline JPEGs, on one CPU. Only their proportions decide."""
MARGIN_PIXELS = 44
"""Beside each row of a box, from the access point before it on; fitted likewise."""
PIXELS_MIN = 1 << 14
"""Smaller images are not walked: there is little to leave out."""


MAKES_ROWS = IS_BUILT and resample.IS_BUILT and rows.IS_BUILT
"""True if one call can read, decode and resample several files."""


class FileTask(NamedTuple):
    """How to make one row of a file, as ``_jpeg.make_rows`` takes it; paired with ``FileMade``.

    The last three are for the worker's note.
    """

    place: tuple[int, bytes, int, int, int]
    header: ImageHeader
    eighths: int
    box: Cut
    points: memoryview | bytes | None
    target: Pixels
    is_area: bool
    is_upside_down: bool
    is_mirrored: bool
    order: int = 0
    row: int = 0
    sample: int = 0


class FileMade(NamedTuple):
    """What became of a task. If no row was made, the file has another header, or needs more care.

    Times are in ns; those called CPU are of this thread alone.
    """

    is_made: int
    file_bytes: int
    read_ns: int
    read_cpu_ns: int
    decoded_ns: int
    resampled_ns: int
    cpu_ns: int
    """Of decoding and resampling."""


class BoxDecoder:
    """Decodes boxes of JPEGs in one ``color``: rgb, bgr or gray."""

    def __init__(self, color: str, scratch: Scratch, field: str = "image", points: AccessPoints | None = None) -> None:
        """``points``: of the sample's files; that of ``field`` is decoded."""
        self._field = field
        self._points = points if points is not None and field in points.fields else None
        self._color = color
        self._channels = 1 if color == "gray" else 3
        self._scratch = scratch
        self.decoded_ns = 0
        """When the last box was decoded and not yet resampled, as of ``time.perf_counter_ns``."""

    def decode(
        self, file: memoryview | FilePart, header: ImageHeader, factor: int, box: Cut, scaling: Scaling | None = None
    ) -> Pixels | None:
        """Decode ``box``, in pixels of the image at 1/``factor``; not empty, and inside of it.

        Returns uint8 ``[box.height, box.width, channels]``, valid until the next call, or the
        target of ``scaling`` with the box resampled into it; None: another decoder has to decode
        this file. Raises ``SampleUndecodable`` if the file is broken above the box's last row, and
        ``PartUnfit`` if a part of a file is not enough.
        """
        if is_part := isinstance(file, FilePart):
            assert self._points is not None, "the reader has planned the part by them"
            data, points = file.data, self._points.known.get(self._field)
        else:
            data, points = file, self._points_of(file, header)
        memory = self._scratch.bytes("decode", self.bytes_max(header, factor, box))
        size, eighths = (header.height, header.width), EIGHTHS // factor
        try:
            made = _jpeg.decode(data, memory.data, self._color, eighths, size, box, points, is_part, *(scaling or ()))
        except _jpeg.JpegError as error:
            raise SampleUndecodable(f"a broken JPEG: {error}") from None
        if made is None:
            if is_part:
                raise PartUnfit
            return None
        columns, before, fits, self.decoded_ns = made
        if not is_part and self._points is not None:
            if not fits:
                self._find_points(self._points, data, header)
            elif points is not None and self._field in self._points.unkept:
                self._keep(self._points, bytes(points), data, header)
        if scaling is not None:
            return scaling.target
        shape, strides = (box.height, box.width, self._channels), (columns * self._channels, self._channels, 1)
        return np.ndarray(shape, np.uint8, memory, offset=before * self._channels, strides=strides)

    @property
    def has_points(self) -> bool:
        """True if the access points of the current sample's file are known."""
        return self._points is not None and has_points(self._points.known.get(self._field))

    def bytes_max(self, header: ImageHeader, factor: int, box: Cut) -> int:
        """Bytes that the extension needs for the pixels of a box, with those beside it."""
        columns_max = min(-(-header.width // factor), box.width + _jpeg.COLUMNS_BESIDE_MAX)
        return box.height * columns_max * self._channels

    def _points_of(self, data: memoryview, header: ImageHeader) -> memoryview | bytes | None:
        """The access points of a file, found now if they are to be kept; None: it has none."""
        if self._points is None:
            return None
        known = self._points.found.get(self._field, self._points.known.get(self._field))
        if known is None or (not has_points(known) and known != without_points(data)):
            known = self._find_points(self._points, data, header)
        return known if has_points(known) else None

    def _find_points(self, points: AccessPoints, data: memoryview, header: ImageHeader) -> bytes | None:
        """Find the points of a file, if they are to be kept and there is memory for that."""
        if not points.are_wanted(self._field):
            return None
        try:
            found = found_points(data, header)
        except MemoryError:
            return None
        self._keep(points, found, data, header)
        return found

    def _keep(self, points: AccessPoints, record: bytes, data: memoryview, header: ImageHeader) -> None:
        """Have a cache keep the record of a file, its header, and its head."""
        points.found[self._field] = record
        if header == _jpeg.probe(data):
            points.headers[self._field] = header
        if points.wants_heads and has_points(record):
            head_bytes = header.scan + _MARKER_BYTES + int.from_bytes(data[header.scan + _MARKER_BYTES :][:2], "big")
            points.heads[self._field] = FileHead(header, len(data), bytes(data[:head_bytes]))

    def make_rows(self, tasks: list[FileTask], file: memoryview, note: memoryview) -> list[FileMade]:
        """Read, decode and resample files into their rows; ``file`` is the memory for one of them.

        The worker's ``note`` names each row while it is made.
        """
        needed = max(self.bytes_max(task.header, EIGHTHS // task.eighths, task.box) for task in tasks)
        made = np.empty((len(tasks), len(FileMade._fields)), np.int64)
        _jpeg.make_rows(tasks, self._color, file, self._scratch.bytes("decode", needed).data, note, made.data)
        return list(map(FileMade._make, made.tolist()))

    def tiles(self, data: memoryview, header: ImageHeader, factor: int, box: Cut) -> tuple[int, int] | None:
        """Parts between restart markers that ``decode`` reads, and all; None without markers."""
        try:
            return _jpeg.tiles(data, EIGHTHS // factor, (header.height, header.width), box)
        except _jpeg.JpegError:
            return None  # decoding says what is wrong


def probe_file(data: memoryview) -> ImageHeader:
    """As ``probe_image``, in one call for a usual JPEG."""
    found = _jpeg.probe(data) if IS_BUILT else None
    return probe_image(data) if found is None else ImageHeader(*found)


def found_points(data: memoryview, header: ImageHeader) -> bytes:
    """The record of a JPEG's access points. Small images have none. Raises ``MemoryError``."""
    size = header.height, header.width
    if not IS_BUILT or header.format != "JPEG" or prod(size) < PIXELS_MIN:
        return without_points(data)
    return _jpeg.access_points(data, size, STEP_PIXELS) or without_points(data)


def part_of(head: FileHead, points: memoryview | bytes, factor: int, box: Cut) -> tuple[int, int] | None:
    """The first byte of a file, and that behind the last, that ``BoxDecoder`` needs for a box.

    None: all of the file.
    """
    size = head.header.height, head.header.width
    return _jpeg.part(head.data, EIGHTHS // factor, size, box, points)


def in_one_scan(data: memoryview, header: ImageHeader) -> bytes | None:
    """A progressive JPEG as a sequential one: same coefficients, so same pixels; EXIF and colours.

    None: it has one scan, is of an unusual kind, or broken; or the extension is not built.
    """
    if not IS_BUILT or header.format != "JPEG":
        return None
    try:
        return _jpeg.transcode(data, (header.height, header.width))
    except _jpeg.JpegError:
        return None


def decoding_ns(header: ImageHeader, factor: int, box: Cut, *, cuts: bool, has_points: bool) -> float:
    """Estimate what decoding a box at 1/``factor`` takes.

    ``cuts``: a box of the file can be decoded alone. ``has_points``: decoding can begin near it.
    """
    whole = header.height * header.width
    if not cuts:
        return whole * (SCANNED_NS + DECODED_NS / factor**2)
    scanned = header.width * (box.top + box.height) * factor
    if has_points:
        scanned = (box.width * factor + MARGIN_PIXELS) * box.height * factor
    return CALL_NS + SCANNED_NS * (scanned if not header.held_bytes else whole) + DECODED_NS * box.height * box.width
