"""A contact sheet: the images of a batch with their labels, as one PNG. Runs in the user's shell.

Draws the pipeline's output: uint8 as it is, floating-point numbers as 0 to 1, or from the smallest
to the largest of the sheet (normalising cannot be undone without knowing it), channels first or
last, colour or grey, each image in its own shape.

A field has images if its samples have three dimensions, and one or three channels in the first or
the last, or two dimensions of 8 bits.
"""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from batchd.cli.peek import PeekedBatch
from batchd.errors import BatchdError

IMAGES_MAX = 64
COLUMNS = 8
TILE_PIXELS = 160
CAPTION_PIXELS = 22
MARGIN_PIXELS = 6
BACKGROUND, INK = (250, 250, 250), (40, 40, 40)
CHARACTER_PIXELS = 8.2
"""Mean width of a character of the caption's font."""
FONT_SCALE = 0.42

CHANNELS = {1, 3}
GREY_DIMENSIONS, COLOUR_DIMENSIONS = 2, 3

Image = np.ndarray


def image_fields(batch: PeekedBatch) -> list[str]:
    """The fields with images; "image" is first if it is one of them."""
    found = [name for name, array in batch.arrays.items() if _is_image(array)]
    return sorted(found, key=lambda name: name != "image")


def write_sheet(batch: PeekedBatch, path: Path, field: str = "image", *, is_bgr: bool = False) -> None:
    """Write up to 64 images with their labels as PNG. Raises ``BatchdError``."""
    encoded = cv2.imencode(".png", draw_sheet(batch, field, is_bgr=is_bgr))[1]
    try:
        path.write_bytes(encoded.tobytes())
    except OSError as error:
        raise BatchdError(f"{path} cannot be written: {error.strerror}") from None


def draw_sheet(batch: PeekedBatch, field: str = "image", *, is_bgr: bool) -> Image:
    """The sheet as a BGR image: uint8 [height, width, 3]."""
    images = batch.samples(field)[:IMAGES_MAX]
    low, high = _range_of(images)
    shape = batch.arrays[field].shape[1:]
    channels_first = len(shape) == COLOUR_DIMENSIONS and shape[0] in CHANNELS and shape[2] not in CHANNELS
    columns = min(COLUMNS, max(1, len(images)))
    rows = max(1, -(-len(images) // columns))
    step_x, step_y = TILE_PIXELS + MARGIN_PIXELS, TILE_PIXELS + CAPTION_PIXELS + MARGIN_PIXELS
    sheet = np.full((rows * step_y + MARGIN_PIXELS, columns * step_x + MARGIN_PIXELS, 3), BACKGROUND, np.uint8)
    for index, image in enumerate(images):
        top = MARGIN_PIXELS + index // columns * step_y
        left = MARGIN_PIXELS + index % columns * step_x
        if image.size:  # a masked sample may have no pixels at all
            sheet[top : top + TILE_PIXELS, left : left + TILE_PIXELS] = _tile(
                _as_bgr(_as_bytes(image, low, high), channels_first=channels_first, is_bgr=is_bgr)
            )
        caption = _caption(batch, index)
        baseline = (left, top + TILE_PIXELS + CAPTION_PIXELS - 7)
        cv2.putText(sheet, caption, baseline, cv2.FONT_HERSHEY_SIMPLEX, FONT_SCALE, INK, 1, cv2.LINE_AA)
    return sheet


def _is_image(array: Image) -> bool:
    """True if a field ``[samples, ...]`` has the shape of images."""
    match array.shape[1:]:
        case (_, _):
            return array.dtype == np.uint8
        case (first, _, last):
            return (first in CHANNELS or last in CHANNELS) and array.dtype.kind in "uf"
        case _:
            return False


def _range_of(images: Sequence[Image]) -> tuple[float, float]:
    """The values of black and white for all images; 0 and 1 if all values are between them."""
    numbers = [image for image in images if image.size]
    low = min((float(np.nan_to_num(image).min()) for image in numbers), default=0.0)
    high = max((float(np.nan_to_num(image).max()) for image in numbers), default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _as_bytes(image: Image, low: float, high: float) -> Image:
    """The image as uint8: other numbers are stretched from ``low`` (black) to ``high`` (white)."""
    if image.dtype == np.uint8:
        return image
    stretched = (image.astype(np.float32) - low) * (255 / (high - low or 1))
    return np.asarray(np.nan_to_num(stretched).clip(0, 255).round(), np.uint8)


def _as_bgr(image: Image, *, channels_first: bool, is_bgr: bool) -> Image:
    """One image as uint8 [height, width, 3] in OpenCV's order."""
    if image.ndim == GREY_DIMENSIONS:
        image = image[:, :, np.newaxis]
    if channels_first:
        image = image.transpose(1, 2, 0)
    if image.shape[2] == 1:
        return np.repeat(image, 3, axis=2)
    return image if is_bgr else image[:, :, ::-1]


def _tile(image: Image) -> Image:
    """Fit a BGR image into a square tile, uint8 [160, 160, 3]; the proportions stay."""
    height, width = image.shape[:2]
    scale = TILE_PIXELS / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = cv2.resize(np.ascontiguousarray(image), size, interpolation=cv2.INTER_AREA)
    tile = np.full((TILE_PIXELS, TILE_PIXELS, 3), BACKGROUND, np.uint8)
    top, left = (TILE_PIXELS - size[1]) // 2, (TILE_PIXELS - size[0]) // 2
    tile[top : top + size[1], left : left + size[0]] = small
    return tile


def _caption(batch: PeekedBatch, index: int) -> str:
    text = _label(batch, index)
    if "valid" in batch.arrays and not batch.arrays["valid"][index]:
        text = f"bad, masked: {text}"
    room = int(TILE_PIXELS / CHARACTER_PIXELS)
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= room else plain[: room - 2] + ".."


def _label(batch: PeekedBatch, index: int) -> str:
    """The label with its name; the sample's index if there is no label of one number."""
    labels = batch.arrays.get("label")
    if labels is None or labels.ndim != 1:
        return f"#{batch.arrays['index'][index]}"
    if labels.dtype.kind not in "iu":
        return f"{labels[index]:.6g}" if labels.dtype.kind == "f" else str(labels[index])
    label = int(labels[index])
    name = batch.classes[label] if 0 <= label < len(batch.classes) else ""
    return f"{label} {name}".strip()
