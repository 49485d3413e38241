"""Batches for people: pictures, captions and cells of tables. Runs in the user's program.

Used by `batchd peek` and notebooks (``batchd_client.notebook``). A field has images if its samples
have three dimensions with one or three channels in the first or the last, or two dimensions of
uint8.

    a sample  --as_bytes-->  uint8  --as_rgb-->  uint8 [height, width, 3]

Invariant: texts, PNGs and sheets are copies, so none of them keeps a slot.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """True if samples are several images of one shape: views, or frames of a video."""
    return len(shape) == COLOUR_DIMENSIONS + 1 and is_image(dtype, shape[1:])


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
