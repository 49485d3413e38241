"""What a worker decodes for several streams of one order at once. WORKER process.

    A  plans its crop, and those of B and C --> decodes the box around them --> cuts its crop
                                                         |kept
    B                                                    +--> cuts its crop
    C                                                    +--> cuts its crop; then it is forgotten

Siblings are streams with the same samples in the same order, and the same "decode". The first of
them at a sample decodes for those that come to it soon: they are behind it, and by fewer rows than
can be kept. So a box that no one takes is rare, and pushed out by later ones.

Invariant: a box is kept at the scale that its crop has anyway, and a crop of it is what decoding
that crop alone gives, bit for bit. So siblings decide about time, and never about bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.image_header import ImageHeader

KEPT_BYTES_MAX = 32 << 20
"""Of all boxes that a worker keeps."""
BOX_BYTES_USUAL = 1 << 19
"""Of a sample, before any was kept."""
BOX_PART_MAX = 8
"""A box takes at most this part of the room."""
SMOOTHING = 0.1
"""Weight of the newest box in the usual size."""

Box: TypeAlias = tuple[int, int, int, int]
"""Top, left, height and width, in pixels at the scale of the box."""
ScaledBox: TypeAlias = tuple[int, Box]
"""1/scale, and the box."""
PlanBoxes: TypeAlias = Callable[[ImageHeader, int, int], Sequence[ScaledBox]]
"""The boxes that a stream decodes of a file with this header in an epoch, for a sample."""
Pixels: TypeAlias = NDArray[np.uint8]
_Key: TypeAlias = tuple[str, int, int]


@dataclass(slots=True)
class _Kept:
    """Boxes of the file of one sample. ``waiting``: the siblings that have not come to it."""

    file_bytes: int
    boxes: list[tuple[int, Box, Pixels]]
    waiting: set["Sibling"]


class SharedBoxes:
    """The boxes that one worker keeps, the oldest first."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.kept_bytes = 0
        self.usual_bytes = float(BOX_BYTES_USUAL)
        self.kept: dict[_Key, _Kept] = {}
        self._siblings: dict[str, list[Sibling]] = {}

    def join(self, order: str, field: str, plan: PlanBoxes) -> "Sibling":
        """Add a stream with this digest of its order. Paired with ``Sibling.leave``.

        ``field``: whose files are decoded together.
        """
        sibling = Sibling(self, order, field, plan)
        self._siblings.setdefault(order, []).append(sibling)
        return sibling

    def of(self, order: str) -> list["Sibling"]:
        """The streams of an order."""
        return self._siblings.get(order, [])

    def add(self, key: _Key, kept: _Kept, one: tuple[int, Box, Pixels]) -> None:
        """Keep a box, and make room for it."""
        kept.boxes.append(one)
        self.kept[key] = kept
        self.kept_bytes += one[2].nbytes
        while self.kept_bytes > self.bytes_max:
            self.forget(next(iter(self.kept)))

    def taken(self, key: _Key, sibling: "Sibling") -> None:
        """Forget the boxes of a sample if no other sibling waits for them."""
        kept = self.kept[key]
        kept.waiting.discard(sibling)
        if not kept.waiting:
            self.forget(key)

    def forget(self, key: _Key) -> None:
        """Forget the boxes of a sample."""
        self.kept_bytes -= sum(pixels.nbytes for _factor, _box, pixels in self.kept.pop(key).boxes)


class Sibling:
    """One stream of an order, at one sample after the other."""

    def __init__(self, shared: SharedBoxes, order: str, field: str, plan: PlanBoxes) -> None:
        self.field = field
        self._shared = shared
        self._order = order
        self.plan = plan
        self.place: int | None = None
        """Of its latest row, among all rows of all epochs."""
        self._key: _Key | None = None
        self._reach = 0
        self.has_found = False
        """True if pixels of this row were those that another stream had decoded."""
        self._planned: list[tuple[Sibling, ScaledBox]] | None = None
        """The boxes of other siblings for this sample, once they are asked for."""

    def begin(self, place: int, epoch: int, sample: int, workers: int) -> None:
        """Begin a row; so many ``workers`` divide the rows of this order."""
        self.end()
        self.place = place
        self._key = self._order, epoch, sample
        self._reach = int(self._shared.bytes_max / self._shared.usual_bytes) * workers

    def end(self) -> None:
        """This stream needs nothing more of the latest sample."""
        key, self._key, self._planned, self.has_found = self._key, None, None, False
        if key in self._shared.kept:
            self._shared.taken(key, self)

    def leave(self) -> None:
        """The stream has ended. Paired with ``SharedBoxes.join``."""
        self.end()
        self._shared.of(self._order).remove(self)
        for key in list(self._shared.kept):
            self._shared.taken(key, self)

    @property
    def has_others(self) -> bool:
        """True if another stream of this order is there."""
        return len(self._shared.of(self._order)) > 1

    @property
    def is_open(self) -> bool:
        """True if the current row may be decoded with those of others."""
        return self._key is not None

    def find(self, file_bytes: int, factor: int, box: Box) -> tuple[Box, Pixels] | None:
        """A kept box with ``box`` in it, at 1/``factor``, and its pixels, not writable."""
        kept = self._shared.kept.get(self._key) if self._key is not None else None
        if kept is None or kept.file_bytes != file_bytes:
            return None
        found = next((one[1:] for one in kept.boxes if one[0] == factor and _is_inside(box, one[1])), None)
        self.has_found |= found is not None
        return found

    def others(self, header: ImageHeader, factor: int) -> list[Box]:
        """What siblings that come here soon will decode of this file at 1/``factor``."""
        if self._planned is None:
            self._planned = list(self._plan_others(header))
        return [box for _sibling, (scale, box) in self._planned if scale == factor]

    def _plan_others(self, header: ImageHeader) -> Iterator[tuple["Sibling", ScaledBox]]:
        assert self._key is not None, "it has begun a row"
        assert self.place is not None, "it has begun a row"
        _order, epoch, sample = self._key
        for other in self._shared.of(self._order):
            if other.place is not None and 0 < self.place - other.place <= self._reach:
                yield from ((other, box) for box in other.plan(header, epoch, sample))

    def keep(self, file_bytes: int, factor: int, box: Box, pixels: Pixels) -> None:
        """Keep a box for the siblings whose boxes are in it, if it is not too large."""
        shared, key = self._shared, self._key
        assert key is not None, "it has begun a row"
        planned = self._planned or ()
        waiting = {other for other, (scale, one) in planned if scale == factor and _is_inside(one, box)}
        if not waiting or pixels.nbytes * BOX_PART_MAX > shared.bytes_max:
            return
        shared.usual_bytes += (pixels.nbytes - shared.usual_bytes) * SMOOTHING
        own = pixels.copy()
        own.flags.writeable = False
        kept = shared.kept.pop(key, None)
        if kept is None or kept.file_bytes != file_bytes:
            if kept is not None:
                shared.kept_bytes -= sum(one[2].nbytes for one in kept.boxes)
            kept = _Kept(file_bytes, [], set())
        kept.waiting |= waiting
        shared.add(key, kept, (factor, box, own))


def _is_inside(box: Box, outer: Box) -> bool:
    top, left, height, width = box
    return (
        outer[0] <= top
        and outer[1] <= left
        and top + height <= outer[0] + outer[2]
        and left + width <= outer[1] + outer[3]
    )
