"""A contact sheet: the images of a batch with their labels, as one PNG. Runs in the user's shell.

Draws the pipeline's output: uint8 unchanged, floating-point numbers as 0 to 1, or from the smallest
to the largest of the sheet (normalising cannot be undone without knowing it), channels first or
last, colour or grey, each image in its own shape. ``batchd_client.showing`` says which fields have
images, and draws what follows them. Where a sample has several, as views, each sample is a row of
the sheet, with as many frames of each of its clips as fit.
"""

from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from batchd.cli.peeked import PeekedBatch, is_packed, joined_patches
from batchd.cli.sound_sheet import draw_sounds
from batchd.cli.token_texts import draw_texts, texts_of
from batchd.data.storage.paths import why_unwritable
from batchd.errors import BatchdError
from batchd.runtime.suggestions import suggestion
from batchd_client.erasing import ERASE_BOX, erased
from batchd_client.mixing import MIX_BOX, MIX_LAMBDA, MIX_ROW, Mixing, mixed
from batchd_client.showing import (
    as_bytes,
    as_rgb,
    has_channels_first,
    is_image,
    is_series,
    label_text,
    of_objects,
    overlaid,
    range_of,
)
from batchd_client.sounds import sounds_in
from batchd_client.token_texts import TokenText
from batchd_wire.fields import Overlay

IMAGES_MAX = 64
WHITE = 255
COLUMNS = 8
SERIES_MAX = 16
"""Images of one sample."""
TILE_PIXELS = 160
CAPTION_PIXELS = 22
MARGIN_PIXELS = 6
BACKGROUND, INK = (250, 250, 250), (40, 40, 40)
CHARACTER_PIXELS = 8.2
"""Mean width of a character of the caption's font."""
FONT_SCALE = 0.42
MEAN, DEVIATION = 0.449, 0.226
"""Of ImageNet's pixels, where white is 1: pixels of 8 bits are erased as if normalised by them."""

Image = np.ndarray


def image_fields(batch: PeekedBatch) -> list[str]:
    """The fields with images; "image" is first if it is one of them."""
    others = of_objects(batch.overlays) | {sound.field for sound in sounds_in(batch.overlays, batch.arrays)}
    found = [
        name for name in batch.arrays if (_has_one(batch, name) or _has_several(batch, name)) and name not in others
    ]
    return sorted(found, key=lambda name: name != "image")


def _has_one(batch: PeekedBatch, name: str) -> bool:
    return is_image(batch.arrays[name].dtype, batch.shape(name))


def _has_several(batch: PeekedBatch, name: str) -> bool:
    return is_series(batch.arrays[name].dtype, batch.shape(name))


def draw(batch: PeekedBatch, stream: str, path: Path, field: str | None, *, is_bgr: bool = False) -> None:
    """Draw ``field``, or else "image" or the first field with images. Raises ``BatchdError``.

    All fields with images are drawn if none was named, and a sample has several in one field, or
    none is called "image". The texts of tokens are drawn beside the images of their rows, or below,
    and sounds below.
    """
    texts = texts_of(batch) if field is None else []
    sounds = [one for one in sounds_in(batch.overlays, batch.arrays) if field in {None, one.field}]
    heard = [draw_sounds(batch, sounds)] if sounds else []
    whole, batch = batch, joined_patches(batch)
    images = image_fields(batch)
    words = [draw_texts(texts)] if texts else []
    if (heard or words) and (not images or (heard and field is not None)):
        write_png(_stacked([*heard, *words], axis=0), path)
        return
    drawn = field or next(iter(images), "image")
    if drawn not in images:
        helps = suggestion(drawn, images) if images else "it has none in any field"
        raise BatchdError(f"stream {stream!r} has no images in a field {drawn!r}, and no sound; {helps}")
    if texts and batch is whole and _has_one(batch, drawn) and not is_packed(batch):
        write_png(_beside(batch, drawn, texts, is_bgr=is_bgr), path)
        return
    is_all = field is None and (drawn != "image" or any(_has_several(batch, name) for name in images))
    sheet = draw_sheet(batch, *(images if is_all else [drawn]), is_bgr=is_bgr)
    write_png(_stacked([sheet, *heard, *words], axis=0), path)


def _beside(batch: PeekedBatch, field: str, texts: Sequence[TokenText], *, is_bgr: bool) -> Image:
    """The first images of a field, each with the texts of its row on the right."""
    images = batch.samples(field)
    layout = _Layout(*range_of(images), has_channels_first(batch.shape(field)), is_bgr or field in batch.bgr_fields)
    overlays, rows = _overlays(batch, field), []
    for row, of_row in groupby(texts, key=lambda text: text.row):
        caption = label_text(batch.arrays, batch.classes, row)
        tile = _grid([images[row]], [caption], layout, 1, overlays[row : row + 1])
        rows.append(_stacked([tile, draw_texts(list(of_row))], axis=1))
    return _stacked(rows, axis=0)


def _stacked(parts: Sequence[Image], axis: int) -> Image:
    """Sheets below each other (0) or side by side (1), on one background."""
    size = max(part.shape[1 - axis] for part in parts)
    room = [[(0, 0), (0, 0), (0, 0)] for _part in parts]
    for margins, part in zip(room, parts, strict=True):
        margins[1 - axis] = 0, size - part.shape[1 - axis]
    padded = [np.pad(part, margins, constant_values=BACKGROUND[0]) for part, margins in zip(parts, room, strict=True)]
    return np.concatenate(padded, axis)


def write_png(image: Image, path: Path) -> None:
    """Write a BGR image. Raises ``BatchdError``."""
    encoded = cv2.imencode(".png", image)[1]
    try:
        path.write_bytes(encoded.tobytes())
    except OSError as error:
        raise BatchdError(why_unwritable(path, error)) from None


def draw_sheet(batch: PeekedBatch, *fields: str, is_bgr: bool) -> Image:
    """The sheet as a BGR image, uint8 [height, width, 3]; without ``fields`` of "image".

    Images of a stream with ``mix`` or ``erase`` are drawn as they are, and below as a trainer makes
    them.
    """
    field, *others = fields or ("image",)
    if others or _has_several(batch, field):
        return _series_sheet(batch, fields, is_bgr=is_bgr)
    is_bgr = is_bgr or field in batch.bgr_fields
    images = batch.samples(field)[:IMAGES_MAX]
    captions = [label_text(batch.arrays, batch.classes, index) for index in range(len(images))]
    layout = _Layout(*range_of(images), has_channels_first(batch.shape(field)), is_bgr)
    sheet = _grid(images, captions, layout, overlays=_overlays(batch, field))
    made = dict(batch.arrays)
    if field not in batch.varying and {MIX_ROW, MIX_LAMBDA, MIX_BOX} <= made.keys():
        made[field] = mixed(made, 1, Mixing(image=field, label=MIX_ROW))[0]
        pairs = zip(made[MIX_ROW].tolist(), made[MIX_LAMBDA].tolist(), strict=True)
        captions = [
            f"{share:.0%} {captions[row]} + {label_text(made, batch.classes, partner % batch.rows)}"
            for row, (partner, share) in enumerate(islice(pairs, len(images)))
        ]
    if field not in batch.varying and ERASE_BOX in made:
        made[field] = _erased(made, field)
    if made[field] is batch.arrays[field]:
        return sheet
    return np.vstack([sheet, _grid(list(made[field][:IMAGES_MAX]), captions, layout)])


def _erased(arrays: dict[str, np.ndarray], field: str) -> np.ndarray:
    """The images of a field with what a trainer covers, of the same dtype."""
    images = arrays[field]
    if images.dtype != np.uint8:
        return np.asarray(erased(arrays, field))
    normalized = ((images / WHITE - MEAN) / DEVIATION).astype(np.float32)
    made = np.asarray(erased({**arrays, field: normalized}, field, in_place=True))
    return ((made * DEVIATION + MEAN) * WHITE).clip(0, WHITE).round().astype(np.uint8)


def _overlays(batch: PeekedBatch, field: str) -> list[list[tuple[Overlay, Image]]]:
    """What is drawn over each image of a field; for none, an empty list."""
    of_field = [one for one in map(Overlay._make, batch.overlays) if one.image == field and one.field in batch.arrays]
    values = [batch.samples(one.field)[:IMAGES_MAX] for one in of_field]
    return [list(zip(of_field, of_sample, strict=True)) for of_sample in zip(*values, strict=True)]


class _Layout(NamedTuple):
    """How images are drawn: the numbers that are black and white, and their channels."""

    low: float
    high: float
    channels_first: bool
    is_bgr: bool


def _series_sheet(batch: PeekedBatch, fields: Sequence[str], *, is_bgr: bool) -> Image:
    """A row for each sample, with its images of all fields."""
    parts = [_series(batch, name, is_bgr=is_bgr or name in batch.bgr_fields) for name in fields]
    samples = [[one for part in several for one in part][:SERIES_MAX] for several in zip(*parts, strict=True)]
    across = max(map(len, samples), default=1)
    shown = [one for sample in samples[: max(1, IMAGES_MAX // across)] for one in sample]
    captions = [
        name if number % across else label_text(batch.arrays, batch.classes, number // across)
        for number, (name, _picture) in enumerate(shown)
    ]
    return _grid([picture for _name, picture in shown], captions, _Layout(0, 255, False, False), across)


def _series(batch: PeekedBatch, name: str, *, is_bgr: bool) -> list[list[tuple[str, Image]]]:
    """The images of each sample in one field, red, green, blue, with their names."""
    values, front = batch.samples(name)[:IMAGES_MAX], len(batch.shape(name)) - 3 if _has_several(batch, name) else 0
    low, high = range_of(values)
    channels_first = has_channels_first(batch.shape(name)[front:])

    def picture(image: Image) -> Image:
        drawn = as_rgb(as_bytes(image, low, high), channels_first=channels_first) if image.size else image
        return drawn[:, :, ::-1] if is_bgr and image.size else drawn

    if not front:
        return [[(name, picture(value))] for value in values]
    if front == 1:
        return [[(f"{name}[{place}]", picture(image)) for place, image in enumerate(value)] for value in values]
    clips, frames = batch.shape(name)[:2]
    every = max(1, -(-frames * clips // SERIES_MAX))
    return [
        [
            (f"{name}[{clip},{frame}]", picture(value[clip, frame]))
            for clip in range(clips)
            for frame in range(0, frames, every)
        ]
        for value in values
    ]


def _grid(
    images: Sequence[np.ndarray],
    captions: Sequence[str],
    layout: _Layout,
    columns_max: int = COLUMNS,
    overlays: Sequence[Sequence[tuple[Overlay, Image]]] = (),
) -> Image:
    """Images in tiles, each above its caption, and under what is drawn over it."""
    columns = min(columns_max, max(1, len(images)))
    rows = max(1, -(-len(images) // columns))
    step_x, step_y = TILE_PIXELS + MARGIN_PIXELS, TILE_PIXELS + CAPTION_PIXELS + MARGIN_PIXELS
    sheet = np.full((rows * step_y + MARGIN_PIXELS, columns * step_x + MARGIN_PIXELS, 3), BACKGROUND, np.uint8)
    for index, image in enumerate(images):
        top = MARGIN_PIXELS + index // columns * step_y
        left = MARGIN_PIXELS + index % columns * step_x
        if image.size:  # a masked sample may have no pixels at all
            picture = as_rgb(as_bytes(image, layout.low, layout.high), channels_first=layout.channels_first)
            drawn = overlays[index] if overlays else ()
            tile = _tile(picture if layout.is_bgr else picture[:, :, ::-1], drawn)
            sheet[top : top + TILE_PIXELS, left : left + TILE_PIXELS] = tile
        caption = shortened_caption(captions[index])
        baseline = (left, top + TILE_PIXELS + CAPTION_PIXELS - 7)
        cv2.putText(sheet, caption, baseline, cv2.FONT_HERSHEY_SIMPLEX, FONT_SCALE, INK, 1, cv2.LINE_AA)
    return sheet


def _tile(image: Image, drawn: Sequence[tuple[Overlay, Image]]) -> Image:
    """Fit a BGR image into a square tile, uint8 [160, 160, 3]; the proportions stay."""
    height, width = image.shape[:2]
    scale = TILE_PIXELS / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = cv2.resize(np.ascontiguousarray(image), size, interpolation=cv2.INTER_AREA)
    if drawn:
        small = overlaid(np.asarray(small[:, :, ::-1], np.uint8), (height, width), drawn)[:, :, ::-1]
    tile = np.full((TILE_PIXELS, TILE_PIXELS, 3), BACKGROUND, np.uint8)
    top, left = (TILE_PIXELS - size[1]) // 2, (TILE_PIXELS - size[0]) // 2
    tile[top : top + size[1], left : left + size[0]] = small
    return tile


def shortened_caption(text: str) -> str:
    """The caption in ASCII, cut to the width of a tile with its end marked."""
    room = int(TILE_PIXELS / CHARACTER_PIXELS)
    plain = text.encode("ascii", "replace").decode()
    return plain if len(plain) <= room else plain[: room - 2] + ".."
