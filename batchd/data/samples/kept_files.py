"""One sample's files between the cache and the decoder: their pixels or access points. Workers.

A cache keeps all pixels of a decoded file, or its access points (``data.samples.access_points``).

    first   cache --is there room?--> decoder --found--> cache
    later   cache --a ``DecodedFile`` instead of the bytes--> decoder
    or      cache --plans by the points what a crop needs--> source --a ``FilePart``--> decoder

Invariant: a box of the kept pixels is what decoding that box of the file at the same scale gives,
bit for bit. So a position has the same bytes whether a file is kept or not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.access_points import AccessPoints
from batchd.data.samples.errors import SampleUnreadable


class DecodedFile(NamedTuple):
    """The value of an ``encoded`` column whose file was decoded before.

    ``header``: of the file, as its decoder has read it. ``pixels``: all of them, as decoded at
    1/factor, by the factor: uint8 [height, width, channels], as stored, not writable. ``reread``:
    reads the file from its source.
    """

    header: tuple[Any, ...]
    file_bytes: int
    pixels: Mapping[int, NDArray[np.uint8]]
    reread: Callable[[], memoryview]

    def file(self) -> memoryview:
        """The file, uint8 ``[file_bytes]``. Raises ``SampleUnreadable`` if its length differs."""
        data = self.reread()
        if len(data) != self.file_bytes:
            raise SampleUnreadable(
                f"the file has {len(data)} bytes, but had {self.file_bytes} when its pixels were cached; restart the daemon"
            )
        return data


class FilePart(NamedTuple):
    """The value of an ``encoded`` column, read only as far as one crop needs it.

    ``header``: of the file, as its decoder has read it. ``data``: as long as the file, zeros where
    nothing was read. ``read_bytes``: how many bytes of it were read now.
    """

    header: tuple[Any, ...]
    data: memoryview
    read_bytes: int


class KnownFile(NamedTuple):
    """A file of this host whose crop is planned before it is read, by what a cache knows of it.

    ``place``: see ``data.sources.interface.FilePlace``. ``header``: as its decoder has read it.
    ``points``: its access points; None if it has none.
    """

    place: tuple[int, bytes, int, int, int]
    header: Sequence[Any]
    points: memoryview | bytes | None


class PartUnfit(Exception):  # noqa: N818  names what is wrong
    """A part is of another file by now, or of another crop: all of the file has to be read."""


class DecodedFiles:
    """The files of the current sample that are kept as pixels. For one stream of one worker."""

    def __init__(self, fields: Iterable[str]) -> None:
        """``fields``: those that only a ``decode`` step reads."""
        self.fields = frozenset(fields)
        self.found: dict[str, DecodedFile] = {}
        """Files that were decoded for the cache."""
        self._has_room: Callable[[int], bool] | None = None

    def begin(self, has_room: Callable[[int], bool] | None = None) -> None:
        """Begin a sample. ``has_room``: whether the cache has room for so many bytes, or None."""
        self.found.clear()
        self._has_room = has_room

    def are_wanted(self, field: str, size: int) -> bool:
        """True if a file with ``size`` bytes of pixels should be decoded whole."""
        return field in self.fields and self._has_room is not None and self._has_room(size)


class KeptFiles:
    """Access points and pixels of the current sample. Belongs to one stream of one worker."""

    def __init__(self, points: Iterable[str] = (), decoded: Iterable[str] = ()) -> None:
        """``points``, ``decoded``: the fields for whose files a cache keeps points, or pixels."""
        self.points = AccessPoints(points)
        self.decoded = DecodedFiles(decoded)
