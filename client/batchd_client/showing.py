"""Batches for people: pictures, captions and cells of tables. Runs in the user's program.

Used by `batchd peek` and notebooks (``batchd_client.notebook``). A field has images if its samples
have three dimensions with one or three channels in the first or the last, or two dimensions of
uint8.

    a sample  --as_bytes-->  uint8  --as_rgb-->  uint8 [height, width, 3]  --overlaid-->  the same

What follows an image (``fields.Overlay``) is drawn over it after it was made as small as it is
shown, so lines are as wide as a pixel: masks half-transparent, boxes with the number of their
class, keypoints and points as dots. Each object has a color, by its row.

Invariant: texts, PNGs and sheets are copies, so none of them keeps a slot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batchd_wire.fields import Overlay
from batchd_wire.views import Array

CHANNELS = {1, 3}
GREY_DIMENSIONS, COLOUR_DIMENSIONS = 2, 3
VALUES_MAX = 6
"""Number of values of one field of one sample that a table shows."""
TEXT_CHARACTERS_MAX = 40

Picture = npt.NDArray[np.uint8]


def is_image(dtype: np.dtype[np.generic], shape: Sequence[int]) -> bool:
    """True if samples of this ``dtype`` and ``shape`` are images."""
    match tuple(shape):
        case (_, _):
            return dtype == np.uint8
        case (first, _, last):
            return (first in CHANNELS or last in CHANNELS) and dtype.kind in "uf"
        case _:
            return False


def is_series(dtype: np.dtype[np.generic], shape: Sequence[int]) -> bool:
    """True if samples are several images of one shape: views, frames of a video, or of clips."""
    is_more = COLOUR_DIMENSIONS < len(shape) <= COLOUR_DIMENSIONS + 2
    return is_more and is_image(dtype, shape[-COLOUR_DIMENSIONS:])


def has_channels_first(shape: Sequence[int]) -> bool:
    """True if images of this shape are [channels, height, width]."""
    return len(shape) == COLOUR_DIMENSIONS and shape[0] in CHANNELS and shape[2] not in CHANNELS


def range_of(images: Sequence[Array]) -> tuple[float, float]:
    """The values to draw as black and as white in all ``images``, numbers of any shape.

    They are the smallest and the largest value, or 0 and 1 if all values are between 0 and 1.
    """
    numbers = [image for image in images if image.size]
    low = min((float(np.nan_to_num(image).min()) for image in numbers), default=0.0)
    high = max((float(np.nan_to_num(image).max()) for image in numbers), default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def as_bytes(image: Array, low: float, high: float) -> Picture:
    """Convert an image of any shape and type of number to uint8 of the same shape.

    ``low`` becomes 0 (black) and ``high`` 255 (white). A uint8 image is returned unchanged.
    """
    if image.dtype == np.uint8:
        return image
    stretched = (image.astype(np.float32) - low) * (255 / (high - low or 1))
    return np.asarray(np.nan_to_num(stretched).clip(0, 255).round(), np.uint8)


def as_rgb(image: Picture, *, channels_first: bool) -> Picture:
    """Convert an image to uint8 ``[height, width, 3]``; the order of three channels stays.

    ``image``: uint8 ``[height, width]``, ``[height, width, channels]``, or with ``channels_first``
    ``[channels, height, width]``, of one or three channels.
    """
    if image.ndim == GREY_DIMENSIONS:
        image = image[:, :, np.newaxis]
    if channels_first:
        image = image.transpose(1, 2, 0)
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


COLORS = np.array(
    [
        [230, 25, 75],
        [60, 180, 75],
        [255, 225, 25],
        [0, 130, 200],
        [245, 130, 48],
        [145, 30, 180],
        [70, 240, 240],
        [240, 50, 230],
    ],
    np.uint8,
)
"""Of objects, in turn; red, green, blue."""
_FREE_NUMBERS = {0, 255}
"""Of a mask: the background, and what a loss ignores."""
_DIGITS = (0x7B6F, 0x2C97, 0x73E7, 0x73CF, 0x5BC9, 0x79CF, 0x79EF, 0x7249, 0x7BEF, 0x7BCF)
"""15 bits each: five rows of three pixels, from the top left."""
_MINUS = 0x01C0
_WITH_VISIBILITY = 3


def of_objects(overlays: Sequence[tuple[str, str, str, str, bool]]) -> set[str]:
    """The fields that are drawn over images, and are none themselves; a mask is one."""
    return {one.field for one in map(Overlay._make, overlays) if one.role != "mask"}


def overlaid(picture: Picture, size: Sequence[int], drawn: Sequence[tuple[Overlay, Array]]) -> Picture:
    """A copy of uint8 ``[height, width, 3]`` with what belongs to it drawn over it.

    ``size``: height and width of the image that the coordinates are of. ``drawn``: the values of
    the sample; those that have another shape than their role are left out.
    """
    picture = picture.copy()
    scale = np.array([picture.shape[1] / size[1], picture.shape[0] / size[0]])
    labels = next((value for one, value in drawn if one.role == "label" and value.ndim == 1), None)
    for overlay, value in drawn:
        match overlay.role, value.ndim:
            case "mask", 2:
                _blend(
                    picture, value, lambda numbers: ~np.isin(numbers, list(_FREE_NUMBERS)), COLORS[value % len(COLORS)]
                )
            case "masks", 3:
                for row, mask in enumerate(value):
                    _blend(picture, mask, lambda numbers: numbers > 0, COLORS[row % len(COLORS)])
    for overlay, value in drawn:
        match overlay.role, value.shape:
            case "boxes", (_, 4):
                _draw_boxes(picture, _corners(value.astype(np.float64), overlay, size) * np.tile(scale, 2), labels)
            case "points", (_, 2):
                _draw_dots(picture, value[:, np.newaxis] * scale)
            case "keypoints", (_, _, 2 | 3):
                _draw_dots(
                    picture, value[..., :2] * scale, value[..., 2] > 0 if value.shape[2] == _WITH_VISIBILITY else None
                )
    return picture


def _corners(boxes: Array, overlay: Overlay, size: Sequence[int]) -> Array:
    """Boxes, float64 [n, 4], as left, top, right, bottom in pixels."""
    if overlay.relative:
        boxes = boxes * (size[1], size[0], size[1], size[0])
    first, last = boxes[:, :2], boxes[:, 2:]
    if overlay.form == "cxcywh":
        first = first - last / 2
    return boxes if overlay.form == "xyxy" else np.concatenate([first, first + last], axis=1)


def _blend(picture: Picture, mask: Array, is_shown: Callable[[Array], Array], colors: Picture) -> None:
    """Mix the color with the picture where a mask, of any size, has a number."""
    if not mask.size:
        return
    rows, columns = (
        (np.arange(target) * 2 + 1) * source // (2 * target)
        for target, source in zip(picture.shape[:2], mask.shape, strict=True)
    )
    places = np.ix_(rows, columns)
    inside = is_shown(mask[places])
    color = colors if colors.ndim == 1 else colors[places][inside]
    picture[inside] = (picture[inside].astype(np.uint16) + color) // 2


def _draw_boxes(picture: Picture, boxes: Array, labels: Array | None) -> None:
    height, width = picture.shape[:2]
    for row, (left, top, right, bottom) in enumerate(boxes):
        if not (left < right and top < bottom):
            continue
        color = COLORS[row % len(COLORS)]
        across = slice(min(max(int(left), 0), width - 1), min(max(int(np.ceil(right)), 1), width))
        down = slice(min(max(int(top), 0), height - 1), min(max(int(np.ceil(bottom)), 1), height))
        for edge in (down.start, down.stop - 1):
            picture[edge, across] = color
        for edge in (across.start, across.stop - 1):
            picture[down, edge] = color
        if labels is not None and row < len(labels) and labels.dtype.kind in "iu":
            _write(picture, str(int(labels[row])), across.start, down.start)


def _draw_dots(picture: Picture, points: Array, is_seen: Array | None = None) -> None:
    """Dots of 3 x 3 pixels, white around a color; ``points``: [objects, points, 2]."""
    for row, of_object in enumerate(points):
        for number, (x, y) in enumerate(of_object):
            is_inside = 0 <= x < picture.shape[1] and 0 <= y < picture.shape[0]
            if is_inside and (is_seen is None or is_seen[row, number]):
                picture[max(0, int(y) - 1) : int(y) + 2, max(0, int(x) - 1) : int(x) + 2] = 255
                picture[int(y), int(x)] = COLORS[row % len(COLORS)]


def _write(picture: Picture, number: str, left: int, top: int) -> None:
    """Write a number in black digits of 6 x 10 pixels, on white, as far as there is room."""
    bits = [_MINUS if digit == "-" else _DIGITS[int(digit)] for digit in number]
    digits = [np.array([one >> 14 - pixel & 1 for pixel in range(15)]).reshape(5, 3) for one in bits]
    shape = np.pad(np.hstack([np.pad(digit, ((0, 0), (0, 1))) for digit in digits]), ((1, 1), (1, 0)))
    shape = shape.repeat(2, axis=0).repeat(2, axis=1)
    corner = picture[top : top + len(shape), left : left + shape.shape[1]]
    part = shape[: corner.shape[0], : corner.shape[1]] > 0
    corner[part], corner[~part] = 0, 255


def label_text(fields: Mapping[str, Any], classes: Sequence[str], row: int) -> str:
    """The label of the sample at ``row`` and its class name; its index if it has no single label.

    ``fields``: arrays ``[samples, ...]`` by name. The text of a masked sample begins with "bad".
    """
    text = _label(fields, classes, row)
    return f"bad, masked: {text}" if "valid" in fields and not fields["valid"][row] else text


def _label(fields: Mapping[str, Any], classes: Sequence[str], row: int) -> str:
    labels = fields.get("label")
    if not isinstance(labels, np.ndarray) or labels.ndim != 1:
        return f"#{fields['index'][row]}" if "index" in fields else f"row {row}"
    if labels.dtype.kind not in "iu":
        return number_text(labels[row])
    label = int(labels[row])
    name = classes[label] if 0 <= label < len(classes) else ""
    return f"{label} {name}".strip()


def cell_text(value: Array) -> str:
    """A sample's value, of any shape, in some forty characters: a text, or up to six numbers."""
    if value.ndim == 0:
        return number_text(value)
    if (text := _text(value)) is not None:
        short = text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 2] + ".."
        return f'"{short}"'
    shape = f"{list(value.shape)} " if value.ndim > 1 else ""
    more = f" .. ({value.size})" if value.size > VALUES_MAX else ""
    return f"{shape}{' '.join(number_text(one) for one in value.reshape(-1)[:VALUES_MAX])}{more}" or "(empty)"


def _text(value: Array) -> str | None:
    """The text in uint8 ``[bytes]``, without zeros at its end; None if it is not text."""
    if value.dtype != np.uint8 or value.ndim != 1:
        return None
    try:
        text = value.tobytes().rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
    return text if text and text.isprintable() else None


def number_text(value: Any) -> str:
    """A numpy scalar, or an array ``[]``, with up to six digits."""
    return f"{value:.6g}" if value.dtype.kind == "f" else str(value)
