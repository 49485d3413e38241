"""The stages of the steps that make one sample of several. Worker process.

    mosaic     +-----------+-----------+   four images around a point; each is moved there with its
               |    sample |  other    |   boxes, masks and points as by a crop and a padding, and
               +-----------*-----------+   the objects of all are one list, the sample's first
               |   other   |  other    |
               +-----------+-----------+

``execute.Pipeline`` draws the others and makes them by the steps before.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.image.followers import Followers
from batchd.data.pipeline.image.geometry import Geometry
from batchd.data.pipeline.image.opencv import Pixels, Scratch
from batchd.data.pipeline.join import options
from batchd.data.pipeline.options import PIXELS_MAX
from batchd.data.pipeline.stages import JoinStage, make_stage
from batchd.data.samples.columns import Column
from batchd.data.samples.values import Value, array_of
from batchd_wire.views import Array


class _Objects:
    """The rows of the objects of several samples, which become one list."""

    def __init__(self, lead: Column, columns: Mapping[str, Column]) -> None:
        self._columns = [columns[name] for role, name in lead.followers if role != "mask"]
        self._rows: dict[str, list[Array]] = {}

    def begin(self) -> None:
        """Begin without an object."""
        self._rows = {column.name: [] for column in self._columns}

    def add(self, values: Mapping[str, Value]) -> None:
        """Add those of a sample, whose values may be gone afterwards."""
        for column in self._columns:
            self._rows[column.name].append(np.array(array_of(column, values[column.name])))

    def joined(self) -> dict[str, Array]:
        """The rows of all, by field."""
        return {name: np.concatenate(rows) for name, rows in self._rows.items()}


@make_stage.register(options.Mosaic)
class _Mosaic(JoinStage):
    numbers = 2

    def __init__(self, step: options.Mosaic, before: Columns, after: Columns) -> None:
        super().__init__(step)
        self._size, self._fill, self._channels = step.size, step.fill, after[step.field].shape[2]
        lead = after[step.field]
        self._followers = Followers(lead, before, after, frozenset(), None) if lead.followers else None
        self._objects = _Objects(lead, after)
        self._mask = next((after[name] for role, name in lead.followers if role == "mask"), None)
        self._scratch = Scratch()

    def join(
        self, values: dict[str, Value], others: Iterable[dict[str, Value]], numbers: Sequence[float]
    ) -> dict[str, object]:
        """See ``JoinStage``."""
        down, across = (int(half / 2 + number * half) for half, number in zip(self._size, numbers, strict=True))
        canvas, mask = self._begun()
        for place, one in enumerate(_first_of(values, others)):
            height, width = np.asarray(one[self.step.field]).shape[:2]
            top, left = down - height * (place < 2), across - width * (place % 2 == 0)  # noqa: PLR2004  the upper row
            self._put(one, canvas, mask, top, left)
        self._end(values, canvas, mask)
        return {"centre": [across, down]}

    def alone(self, values: dict[str, Value]) -> None:
        """See ``JoinStage``."""
        canvas, mask = self._begun()
        height, width = np.asarray(values[self.step.field]).shape[:2]
        self._put(values, canvas, mask, self._size[0] - height // 2, self._size[1] - width // 2)
        self._end(values, canvas, mask)

    def _begun(self) -> tuple[Pixels, Array | None]:
        size = 2 * self._size[0], 2 * self._size[1]
        assert self._channels is not None, "an image of known channels"
        canvas = self._scratch.image("canvas", (*size, self._channels))
        canvas[:] = self._fill
        self._objects.begin()
        return canvas, None if self._mask is None else np.full(size, self._mask.fill, self._mask.dtype)

    def _put(self, values: dict[str, Value], canvas: Pixels, mask: Array | None, top: int, left: int) -> None:
        """Put the image of a sample there, and what follows it."""
        pixels = np.asarray(values[self.step.field])
        height, width = pixels.shape[:2]
        geometry = Geometry(height, width, 1, PIXELS_MAX, is_followed=True)
        geometry.window(-top, -left, canvas.shape[0], canvas.shape[1], self._fill)
        rows, columns = slice(max(top, 0), max(top + height, 0)), slice(max(left, 0), max(left + width, 0))
        seen = canvas[rows, columns]
        above, before = max(-top, 0), max(-left, 0)
        np.copyto(seen, pixels.reshape(height, width, -1)[above : above + len(seen), before : before + seen.shape[1]])
        if self._followers is None:
            return
        moved = dict(values)
        assert geometry.trail is not None, "it is followed"
        self._followers.run(moved, {}, (height, width), geometry.trail)
        self._objects.add(moved)
        if mask is not None and self._mask is not None:
            mask[rows, columns] = np.asarray(moved[self._mask.name])[rows, columns]

    def _end(self, values: dict[str, Value], canvas: Pixels, mask: Array | None) -> None:
        values |= self._objects.joined()
        values[self.step.field] = canvas
        if mask is not None and self._mask is not None:
            values[self._mask.name] = mask


def _first_of(first: dict[str, Value], others: Iterable[dict[str, Value]]) -> Iterable[dict[str, Value]]:
    yield first
    yield from others
