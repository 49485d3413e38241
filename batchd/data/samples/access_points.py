"""The access points of one sample's JPEGs, between a cache and the decoder. Workers.

An access point is a place in a file at which decoding can begin (``pipeline/_jpeg_scan.h``). A
cache keeps the record of a file's points with the sample or alone; a shard of ``batchd prepare``
has the records of its files, too:

    cache, shard --known--> decoder --found--> cache

Invariant: the decoder checks a record's version and checksum, and that it was made from the bytes
that a crop reads, so a damaged record, or one of another file, does no harm. A file without points
has a record, too: its length.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

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

    header: tuple[Any, ...]
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
        self.headers: dict[str, tuple[Any, ...]] = {}
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
