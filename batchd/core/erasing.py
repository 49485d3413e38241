"""Which parts of the rows of a batch are erased, by position. Pure code.

    seed, epoch, step, row, rectangle, attempt --> area, proportions, row and column of its corner

Z. Zhong and others, "Random Erasing Data Augmentation", AAAI 2020: ten attempts to draw a rectangle
that fits, as torchvision's ``RandomErasing``. A trainer fills them on its device, after it has
normalised the images (``batchd_client.erasing``).

Invariant: sums, products, quotients and roots of float64 and a table of decimals decide, so the
fields have the same bytes on any machine.
"""

from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Indices, mixed_each
from batchd_wire.fields import Field
from batchd_wire.position import Position
from batchd_wire.record import frozen

ATTEMPTS = 10
BITS = 24
WHOLE = 1 << BITS
TABLE_BITS = 10
_SALT = 0x657261
_EXACT = Context(prec=20)

EraseFill = Literal["mean", "color", "noise"]


class EraseNumbers(NamedTuple):
    """Boxes int32 ``[rows, count, 4]``: left, top, right, bottom in pixels; all 0 where none is.

    Keys of the noise, int32 ``[rows]``, or of colours, ``[rows, count]``.
    """

    erase_box: NDArray[np.int32]
    erase_key: NDArray[np.int32]


@frozen
class RowErasing:
    """How rows are erased; see ``config.tree.Erasing``. ``height`` and ``width``: of an image."""

    probability: float
    area: tuple[float, float]
    aspect: tuple[float, float]
    count: int
    fill: EraseFill
    height: int
    width: int

    def numbers(self, seed: int, position: Position, rows: int) -> EraseNumbers:
        """The numbers of all ``rows`` of the batch at ``position``."""
        every = np.arange(rows)
        acts = self._drawn(seed, position, every) >> np.uint64(64 - BITS) < round(self.probability * WHOLE)
        boxes = np.zeros((rows, self.count, 4), np.int32)
        boxes[acts] = self._boxes(seed, position, every[acts])
        keys = self._drawn(seed, position, every[:, None], np.arange(self.count if self.fill == "color" else 1))
        halves = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
        return EraseNumbers(boxes, halves if self.fill == "color" else halves[:, 0])

    def _boxes(self, seed: int, position: Position, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first rectangle of each that fits: ``[rows, count, 4]``."""
        places = rows[:, None, None], np.arange(self.count)[:, None], np.arange(ATTEMPTS)
        words = [self._drawn(seed, position, *places, np.array([number])) for number in range(2)]
        areas, across, aspects, down = (
            (word >> np.uint64(shift) & np.uint64(WHOLE - 1)).astype(np.int64)
            for word in words
            for shift in (64 - BITS, 64 - 2 * BITS)
        )
        low, high = self.area
        area = (low + (high - low) * (areas / WHOLE)) * (self.height * self.width)
        table = aspect_quantiles(*self.aspect)
        at, rest = aspects >> BITS - TABLE_BITS, aspects & (1 << BITS - TABLE_BITS) - 1
        aspect = table[at] + (table[at + 1] - table[at]) * (rest / (1 << BITS - TABLE_BITS))
        height = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        width = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        fits = (height > 0) & (height < self.height) & (width > 0) & (width < self.width)
        left, top = (self.width - width + 1) * across >> BITS, (self.height - height + 1) * down >> BITS
        boxes = np.stack([left, top, left + width, top + height], -1) * fits[..., None]
        first: NDArray[np.int64] = np.take_along_axis(boxes, fits.argmax(2)[:, :, None, None], 2)[:, :, 0]
        return first

    @staticmethod
    def _drawn(seed: int, position: Position, *places: NDArray[np.int64]) -> Indices:
        """64 random bits for each of some places."""
        return mixed_each((seed, _SALT, *position, *places))


@lru_cache(maxsize=64)
def aspect_quantiles(narrow: float, wide: float) -> NDArray[np.float64]:
    """Proportions at equal steps of their logarithm, from ``narrow`` to ``wide``: ``[1 + 2^10]``.

    Decimal numbers make them, so they are the same on every machine. Takes some 0.05 s.
    """
    with localcontext(_EXACT):
        low, high = (Decimal(end).ln() for end in (narrow, wide))
        steps = 1 << TABLE_BITS
        return np.array([float((low + (high - low) * step / steps).exp()) for step in range(steps + 1)])


def erase_fields(count: int, fill: EraseFill) -> tuple[Field, ...]:
    """The fields of ``EraseNumbers`` in a batch."""
    box, key = Field("erase_box", "int32", (count, 4)), Field("erase_key", "int32", (count,) if fill == "color" else ())
    return (box,) if fill == "mean" else (box, key)
