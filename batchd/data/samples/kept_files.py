"""One sample's files between the cache and the decoder: their pixels or access points. Workers.

A cache keeps all pixels of a decoded file, or its access points: the places in it at which decoding
can begin (``pipeline/_jpeg_scan.h``). The record of a file's points is with the sample or alone; a
shard of ``batchd prepare`` has the records of its files, too.

    first   cache --is there room?--> decoder --found--> cache
    later   cache --a ``DecodedFile`` instead of the bytes--> decoder
    or      cache, shard --known points--> decoder --found points--> cache
    or      cache --plans by the points what a crop needs--> source --a ``FilePart``--> decoder

Invariant: a box of the kept pixels is what decoding that box of the file at the same scale gives,
bit for bit. So a position has the same bytes whether a file is kept or not. Invariant: the decoder
checks a record's version and checksum, and that it was made from the bytes that a crop reads, so a
damaged record, or one of another file, does no harm. A file without points has a record, too: its
length.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.image_header import ImageHeader
from batchd.data.samples.shared_boxes import Sibling

POINTS_VERSION = 2
"""Of the records of access points: another layout needs another number (``_jpeg_scan.c``,
``data.sources.cache.record``)."""
_LENGTH_BYTES = 8
_NONE: Mapping[str, memoryview | bytes] = MappingProxyType({})


def without_points(data: memoryview) -> bytes:
    """The record of a file that has no access points."""
    return len(data).to_bytes(_LENGTH_BYTES, "little")


def has_points(record: memoryview | bytes | None) -> bool:
    """True if there is a record, and it has points."""
    return record is not None and len(record) > _LENGTH_BYTES


class FileHead(NamedTuple):
    """The beginning of a file with points, so that a part of the file can be read without it.

    ``header``: as its decoder has read it. ``file_bytes``: the length of the file. ``data``: all in
    front of its image data.
    """

    header: ImageHeader
    file_bytes: int
    data: memoryview | bytes


class AccessPoints:
    """Records of the current sample, by field. Belongs to one stream of one worker.

    ``fields``: the fields whose files are decoded for a crop.
    """

    def __init__(self, fields: Iterable[str]) -> None:
        self.fields = frozenset(fields)
        self.known = _NONE
        """Records from the cache, or from beside the file."""
        self.found: dict[str, bytes] = {}
        """Records that decoding this sample has made."""
        self.headers: dict[str, ImageHeader] = {}
        """The headers of these files that the extension reads by itself."""
        self.heads: dict[str, FileHead] = {}
        """The heads of these files, if ``wants_heads``."""
        self.wants_heads = False
        """True if parts of files can be read."""
        self.unkept: Collection[str] = ()
        """Those of ``known`` that the cache should keep, with the heads of their files."""
        self._is_kept = False

    def begin(
        self, known: Mapping[str, memoryview | bytes] = _NONE, *, is_kept: bool, unkept: Collection[str] = ()
    ) -> None:
        """Begin a sample. ``is_kept``: the cache has room for new records."""
        self.known = known
        self.unkept = unkept if is_kept and self.wants_heads else ()
        self.found.clear()
        self.headers.clear()
        self.heads.clear()
        self._is_kept = is_kept

    def are_wanted(self, field: str) -> bool:
        """True if a file without a record should be walked for one."""
        return self._is_kept and field not in self.found


class DecodedFile(NamedTuple):
    """The value of an ``encoded`` column whose file was decoded before.

    ``header``: of the file, as its decoder has read it. ``pixels``: all of them, as decoded at
    1/factor, by the factor: uint8 [height, width, channels], as stored, not writable. ``reread``:
    reads the file from its source.
    """

    header: ImageHeader
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

    header: ImageHeader
    data: memoryview
    read_bytes: int


class KnownFile(NamedTuple):
    """A file of this host whose crop is planned before it is read, by what a cache knows of it.

    ``place``: see ``data.sources.interface.FilePlace``. ``header``: as its decoder has read it.
    ``points``: its access points; None if it has none.
    """

    place: tuple[int, bytes, int, int, int]
    header: ImageHeader
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


class FileFacts(Protocol):
    """What is known of files of sound and video: see ``data.sources.cache.keyed``."""

    def find(self, key: bytes) -> memoryview | None:
        """The record of a key, valid until the next call; None if there is none."""

    def keep(self, key: bytes, record: bytes) -> None:
        """Keep a record, if there is room for it."""


class KeptFiles:
    """Access points and pixels of the current sample. Belongs to one stream of one worker.

    ``sibling``: the stream among those of its order, whose boxes are decoded together; None: alone.
    ``facts``: of all files of sound and video; None: nothing is kept of them.
    """

    def __init__(self, points: Iterable[str] = (), decoded: Iterable[str] = ()) -> None:
        """``points``, ``decoded``: the fields for whose files a cache keeps points, or pixels."""
        self.points = AccessPoints(points)
        self.decoded = DecodedFiles(decoded)
        self.sibling: Sibling | None = None
        self.facts: FileFacts | None = None
