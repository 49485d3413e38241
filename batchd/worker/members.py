"""The values of one sample as members of a shard in WebDataset format. WORKER process.

    image, uint8 [h, w, 1 or 3]    .jpg, .png or .webp     undecoded file      as it was: .jpg, .png
    its access points, if any      .jpg.points
    label, one whole number        .cls                    other numbers, all together     .json
    text                           NAME.txt                other arrays                    NAME.npy
    images of a list               NAME.0.jpg, NAME.1.jpg, ...
    a video with short groups      NAME.bin, and what was done: NAME.groups.json

The image called "image", or else the first one, has its ending alone, others their name in front. A
``webdataset`` source looks for fields of these names and types there. A progressive JPEG becomes a
sequential one, so that it has access points.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchd.data.pipeline.image.decode import Decoder
from batchd.data.pipeline.image.jpeg_box import found_points, in_one_scan
from batchd.data.pipeline.image.opencv import Scratch, cv2
from batchd.data.pipeline.image.options import Decode
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.media.options import DecodeVideo
from batchd.data.samples.columns import LISTS, Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.kept_files import has_points
from batchd.data.samples.values import MediaFile, Value
from batchd.data.sources.webdataset import options as webdataset

if TYPE_CHECKING:
    from batchd.data.media.short_groups import Regrouped

try:
    import simplejpeg
except ImportError:  # cv2 encodes JPEG too
    simplejpeg = None

_IMAGE_CHANNELS = (1, 3)
_IMAGE_DIMENSIONS = 3
_ENDINGS = {"JPEG": "jpg", "PNG": "png", "APNG": "png", "WebP": "webp", "BMP": "bmp", "GIF": "gif"}
LOSSLESS = 100
"""The quality that is lossless, if the format can be."""
GROUPS_ENDING = ".groups.json"
_LIMITS = DecodeVideo(frames=1)
_WEBP_LOSSLESS = 101
"""OpenCV's value for a lossless WebP: 100 is not quite lossless."""


class MemberEncoder:
    """Encodes samples. ``image_format``: jpg, png or webp; ``quality``: 1 to 100, for jpg and webp.

    ``is_bgr``: pixels are BGR. ``short_groups``: of videos, see ``PrepareStream``.
    """

    def __init__(
        self, columns: Mapping[str, Column], image_format: str, quality: int, *, is_bgr: bool, short_groups: int = 0
    ) -> None:
        self._columns = columns
        self._format = image_format
        self._quality = quality
        self._is_bgr = is_bgr
        self._limits = Decoder(Decode(), Scratch())
        self._main_image = main_image(columns)
        self._short_groups = short_groups
        self._regrouped: tuple[object, Regrouped | None] = None, None
        """Name of the last video, and what was made of it: the next sample may be of the same."""

    def members(self, values: Mapping[str, Value]) -> Iterator[tuple[str, bytes]]:
        """Ending and content of each member. Raises ``SampleUndecodable`` for unfit pixels."""
        numbers = {}
        for name, column in self._columns.items():
            value = values[name]
            if is_image(column):
                yield from self._images("" if name == self._main_image else f"{name}.", column, [value])
            elif is_image_list(column):
                yield from self._images(f"{name}.{{}}.", column.item, value)  # type: ignore[arg-type]  # a list
            elif column.kind == "text":
                yield f"{name}.{webdataset.TEXT_ENDING}", str(value).encode()
            elif column.kind == "bytes" or column.is_file:
                yield from self._file(column, value)
            elif column.kind != "array":
                yield f"{name}.{webdataset.JSON_ENDING}", json.dumps(value).encode()
            elif column.shape:
                yield f"{name}.{webdataset.ARRAY_ENDING}", _npy(np.asarray(value, column.dtype))
            elif webdataset.is_label(column):
                yield webdataset.LABEL_ENDING, str(int(np.asarray(value))).encode()
            else:
                numbers[name] = np.asarray(value, column.dtype).item()
        if numbers:
            yield webdataset.JSON_ENDING, json.dumps(numbers).encode()

    def _file(self, column: Column, value: Value) -> Iterator[tuple[str, bytes]]:
        """A file as it is, or a video with short groups, and what was done to it."""
        assert isinstance(value, MediaFile | memoryview | bytes), "bytes, or a file"
        ending = f"{column.name}.{webdataset.BYTES_ENDING}"
        if column.kind != "video" or not self._short_groups:
            yield ending, bytes(value.whole() if isinstance(value, MediaFile) else value)
            return
        from batchd.data.media.short_groups import with_short_groups  # noqa: PLC0415  needs an extra

        file = value if isinstance(value, MediaFile) else MediaFile.of(memoryview(value))
        name, made = self._regrouped
        if made is None or name is None or name != file.name:
            made = with_short_groups(file, self._short_groups, _LIMITS.max_pixels, _LIMITS.max_bytes)
            self._regrouped = file.name, made
        yield ending, made.content
        yield f"{column.name}{GROUPS_ENDING}", json.dumps(made.facts()).encode()

    def _images(self, name: str, column: Column, images: Iterable[Value]) -> Iterator[tuple[str, bytes]]:
        """Each image, and its access points; ``name`` is in front of the ending."""
        for place, image in enumerate(images):
            ending, content = self._image(column, image)
            ending = f"{name.format(place)}{ending}"
            yield ending, content
            points = found_points(memoryview(content), probe_image(memoryview(content)))
            if has_points(points):
                yield f"{ending}.{webdataset.POINTS_ENDING}", points

    def _image(self, column: Column, value: Value) -> tuple[str, bytes]:
        if column.kind != "encoded":
            return self._format, self._encode(np.asarray(value))
        assert isinstance(value, memoryview), "the bytes of a file"
        header, content = probe_image(value), None
        with suppress(SampleUndecodable):  # larger files stay: all coefficients take memory
            self._limits.check_limits(value, header)
            content = in_one_scan(value, header)
        return _ENDINGS[header.format], content or bytes(value)

    def _encode(self, pixels: npt.NDArray[np.uint8]) -> bytes:
        height, width, channels = pixels.shape
        try:
            if not pixels.size:
                raise ValueError("there are none")
            return self._encode_any(np.ascontiguousarray(pixels), is_gray=channels == 1)
        except (ValueError, cv2.error) as error:
            why = error.err if isinstance(error, cv2.error) else error
            raise SampleUndecodable(f"{width} x {height} pixels cannot be encoded: {why}") from None

    def _encode_any(self, pixels: npt.NDArray[np.uint8], *, is_gray: bool) -> bytes:
        """Encode uint8 ``[height, width, 1 or 3]``. Raises ``ValueError`` or ``cv2.error``."""
        if self._format == "jpg" and simplejpeg is not None:
            color = "GRAY" if is_gray else "BGR" if self._is_bgr else "RGB"
            encoded: bytes = simplejpeg.encode_jpeg(pixels, self._quality, color, "Gray" if is_gray else "420")
            return encoded
        if not is_gray and not self._is_bgr:
            pixels = np.ascontiguousarray(pixels[:, :, ::-1])
        options = {
            "jpg": [cv2.IMWRITE_JPEG_QUALITY, self._quality],
            "png": [],
            "webp": [cv2.IMWRITE_WEBP_QUALITY, self._quality if self._quality < LOSSLESS else _WEBP_LOSSLESS],
        }
        return cv2.imencode(f".{self._format}", pixels, options[self._format])[1].tobytes()


def main_image(columns: Mapping[str, Column]) -> str:
    """The image of a ``webdataset`` sample that is called "image", else the first, else ""."""
    images = [name for name, column in columns.items() if is_image(column)]
    return webdataset.IMAGE if webdataset.IMAGE in images else next(iter(images), "")


def is_image(column: Column) -> bool:
    """True for the bytes of an image file, and for pixels that can be encoded as one."""
    is_pixels = column.kind == "array" and column.dtype == "uint8" and len(column.shape) == _IMAGE_DIMENSIONS
    return column.kind == "encoded" or (is_pixels and not column.channels_first and column.shape[2] in _IMAGE_CHANNELS)


def is_image_list(column: Column) -> bool:
    """True for a list of such images."""
    return column.kind in LISTS and is_image(column.item)


def _npy(array: npt.NDArray[np.generic]) -> bytes:
    array = np.ascontiguousarray(array)
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
    return stream.getvalue() + array.tobytes()
