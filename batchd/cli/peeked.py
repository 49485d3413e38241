"""The copy of a batch that a command shows, also as text. Runs in the user's shell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isqrt

import click
import numpy as np

from batchd.cli.tables import fitted
from batchd.cli.text import aligned, width_of
from batchd_client.batch import WholeField
from batchd_client.showing import cell_text
from batchd_wire.fields import Varying, length_texts
from batchd_wire.views import row_views
from batchd_wire.wording import counted

ROWS_MAX = 8
"""Samples in the table of a batch."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""Of documents in a packed row, in turn."""


@dataclass(frozen=True, slots=True)
class PeekedBatch:
    """A copy of one batch. ``classes`` may be empty."""

    epoch: int
    step: int
    classes: Sequence[str]
    arrays: Mapping[str, np.ndarray]
    """By field, each ``[samples, ...]``, with the shape of the largest sample."""
    varying: Mapping[str, WholeField] = field(default_factory=dict)
    """Fields whose samples differ in shape."""
    bgr_fields: Sequence[str] = ()
    """Images with the channels blue, green, red."""
    overlays: Sequence[tuple[str, str, str, str, bool]] = ()
    """What is drawn over images: see ``fields.Overlay``."""

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(next(iter(self.arrays.values())))

    def samples(self, name: str) -> list[np.ndarray]:
        """The values of a field, one array for each sample, in its own shape."""
        array, room = self.arrays[name], self.varying.get(name)
        if room is None or room.varying is None or room.sizes is None:
            return [array[row, ...] for row in range(len(array))]
        return row_views(array, room.sizes, room.varying)

    def shape(self, name: str) -> tuple[int, ...]:
        """The largest lengths of a sample in a field."""
        return self.varying[name].shape if name in self.varying else self.arrays[name].shape[1:]

    def type_text(self, name: str) -> str:
        """Type and shape of one sample, for people."""
        array, room = self.arrays[name], self.varying.get(name)
        lengths = length_texts(array.shape[1:], room.varying if room else None)
        return f"{array.dtype}[{', '.join(lengths)}]" if lengths else str(array.dtype)


def joined_patches(batch: PeekedBatch) -> PeekedBatch:
    """Images of packed patches (see the steps ``patches`` and ``pack``) with a row for each.

    Return any other batch unchanged.
    """
    between = next((name for name in batch.arrays if f"{name}_segments" in batch.arrays), None)
    if between is not None and is_packed(batch):
        found, labels = _images_between(batch, between)
        return _of_images(batch, between, found, {"label": np.array(labels)})
    name = next((name for name in batch.arrays if f"{name}_grid" in batch.arrays), None)
    if name is None or batch.arrays["lengths"].ndim != 2:  # noqa: PLR2004  rows, documents
        return batch
    lengths, grids = batch.arrays["lengths"], batch.arrays[f"{name}_grid"]
    places = np.argwhere(lengths)
    images: list[np.ndarray] = []
    for (row, document), end in zip(places, np.cumsum(lengths, 1)[lengths > 0], strict=True):
        patches, (down, across) = batch.arrays[name][row, end - lengths[row, document] : end], grids[row, document]
        images.append(_joined(patches, np.indices((down, across)).reshape(2, -1).T))
    one_each = {key: array[lengths > 0] for key, array in batch.arrays.items() if array.shape == lengths.shape}
    return _of_images(batch, name, images, one_each)


def _images_between(batch: PeekedBatch, name: str) -> tuple[list[np.ndarray], list[str]]:
    """The images of the rows of ``interleave``, in their order, and where each is."""
    images, labels = list[np.ndarray](), list[str]()
    keys = name, f"{name}_positions", f"{name}_segments"
    for row, (patches, positions, segments) in enumerate(zip(*(batch.arrays[key] for key in keys), strict=True)):
        ends = np.searchsorted(segments[segments > 0], np.arange(1, segments.max() + 2)).tolist()
        images += [_joined(patches[first:end], positions[first:end]) for first, end in pairwise(ends)]
        labels += [f"row {row}, image {number}" for number in range(len(ends) - 1)]
    return images, labels


def _joined(patches: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The image of patches ``[patches, values]`` at these rows and columns."""
    channels = 3 if isqrt(patches.shape[1] // 3) ** 2 * 3 == patches.shape[1] else 1
    side = isqrt(patches.shape[1] // channels)
    down, across = positions.max(0) + 1
    tiles = np.zeros((down, side, across, side, channels), patches.dtype)
    tiles[positions[:, 0], :, positions[:, 1]] = patches.reshape(-1, side, side, channels)
    return tiles.reshape(down * side, across * side, channels)


def _of_images(
    batch: PeekedBatch, name: str, images: Sequence[np.ndarray], one_each: Mapping[str, np.ndarray]
) -> PeekedBatch:
    """A batch with a row for each of these images, in their own sizes."""
    if not images:
        return batch
    sizes = np.asarray([image.shape[:2] for image in images]).reshape(-1, 2)
    padded = np.zeros((len(images), *sizes.max(0, initial=1), images[0].shape[2]), batch.arrays[name].dtype)
    for room, image in zip(padded, images, strict=True):
        room[: image.shape[0], : image.shape[1]] = image
    room = WholeField(padded, sizes, Varying("padded", (0, 1)))
    return replace(batch, arrays={name: padded, **one_each}, varying={name: room})


def is_packed(batch: PeekedBatch) -> bool:
    """True if each row has several documents: see the step ``pack``."""
    return {"segment_ids", "lengths"} <= batch.arrays.keys() and batch.arrays["lengths"].ndim == 2  # noqa: PLR2004  rows, documents


def drawn_rows(batch: PeekedBatch, columns: int) -> list[str]:
    """The first packed rows as bars, ``columns`` wide: a letter and a color for each document."""
    length = batch.arrays["segment_ids"].shape[1]
    lines = [f"the rows, {counted(length, 'element')} each: a letter for each document, a dot where there is none"]
    rows = [[one for one in lengths if one] for lengths in batch.arrays["lengths"][:ROWS_MAX].tolist()]
    labels = [f" {counted(len(row), 'document')}, {1 - sum(row) / length:.1%} empty" for row in rows]
    width = max(10, columns - max(map(len, labels)) - 5)
    for row, documents in enumerate(rows):
        ends = (np.cumsum([0, *documents]) * width // length).tolist()
        bar = [
            click.style(LETTERS[number % len(LETTERS)] * (end - begin), fg=COLORS[number % len(COLORS)])
            for number, (begin, end) in enumerate(pairwise(ends))
            if end > begin
        ]
        lines.append(f"{row:3} {''.join(bar)}{'.' * (width - ends[-1])}{labels[row]}")
    return lines


def batch_table(batch: PeekedBatch, width: int) -> list[str]:
    """The fields of a batch with their types, and the values of its first samples."""
    fields = [[name, batch.type_text(name), *map(cell_text, batch.samples(name)[:ROWS_MAX])] for name in batch.arrays]
    lines = aligned(list(zip(*fields, strict=True)))
    if max(map(width_of, lines)) <= width:
        return lines
    titles = ["", "type", *(f"sample {row}" for row in range(min(batch.rows, ROWS_MAX)))]
    return fitted([titles, *fields], width)
