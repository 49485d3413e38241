"""Members of a sample in a tar shard become its fields. Workers only.

    coding     member                    field
    image      any                       its bytes
    text       any                       str, from UTF-8
    json       a JSON object, one key    a text, a number, or a list of them, or any value
    json       JSON, all of it           any value, a list of texts
    npy        an array of numpy         numbers, in the shape that they have there
    written    cls, txt, ...             numbers in digits, with white space between several
    bytes      any other                 little-endian numbers, or the bytes

Each member is read with one ``pread``, also if several fields are in it.

Invariant: a value has the dtype and shape of its column, and nothing of a member is executed: of an
array only the header is parsed, arrays of objects, which need pickle, are refused, and JSON is
data.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from tarfile import BLOCKSIZE
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import MediaFile, Value, converted, default_value, from_bytes, images_from, nested
from batchd.data.sources.arrays.index import StoredArray, read_header
from batchd.data.sources.csv.values import cell_reader
from batchd.data.sources.files.reader import FilesReader, padded_text
from batchd.data.sources.interface import Reader
from batchd.data.sources.jsonl.values import fitting, json_object, value_at, value_in_json
from batchd.data.sources.webdataset.options import (
    MEDIA_ENDINGS,
    MEMBER_BYTES_MAX,
    MISSING,
    Coding,
    MemberField,
    WebDatasetSource,
)
from batchd.data.storage.access import Storage
from batchd.data.storage.index import IndexMalformed, SourceIndex, readable
from batchd.data.storage.paths import bound_of
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes
from batchd.errors import SourceInvalid
from batchd_wire.views import Array

_MAGIC = npy_format.magic(1, 0)
"""The first bytes of an array; behind them, two bytes have the length of its header."""
HEAD_BYTES = 128
"""With them numpy writes the header of an array of few dimensions."""


def value_of(column: Column, coding: Coding, content: memoryview, max_bytes: int) -> Value:
    """The value of a column that is a whole member. Raises ``SampleUnreadable``."""
    if coding == "npy":
        return fitting(column, converted(column, _array(column, content)))
    if coding != "written":
        return from_bytes(column, content, max_bytes)
    try:
        return cell_reader(column)(str(content, "utf-8"))
    except UnicodeDecodeError as error:
        raise SampleUnreadable(f"{column.name} is no UTF-8: byte {error.start} of {content.nbytes}") from None
    except ValueError as error:
        raise SampleUnreadable(f"{column.name} {error}") from None


def _array(column: Column, content: memoryview) -> Array:
    try:
        stored = _header(column.name, content)
        stored.check_end(column.name, len(content))
    except SourceInvalid as error:
        raise SampleUnreadable(str(error)) from None
    return stored.numbers(column.name, content)


def _header(name: str, content: memoryview) -> StoredArray:
    """As ``read_header``; it parses equal headers once, since numpy takes longer than reading."""
    if content[: len(_MAGIC)] != _MAGIC:
        return read_header(name, BytesIO(content))
    length = int.from_bytes(content[len(_MAGIC) : len(_MAGIC) + 2], "little")
    return _parsed(name, bytes(content[: len(_MAGIC) + 2 + length]))


@lru_cache(maxsize=4096)
def _parsed(name: str, head: bytes) -> StoredArray:
    return read_header(name, BytesIO(head))


def _length(column: Column, head: memoryview, size: int) -> int:
    """The length of an array of ``size`` bytes with its header; 0 if the numbers may not fit.

    Raises ``SourceInvalid``.
    """
    stored = _header(column.name, head)
    stored.check_end(column.name, size)
    fits = column.takes(stored.shape) and stored.dtype.kind != "b" and np.can_cast(stored.dtype, column.dtype)
    return stored.shape[0] if fits else 0


class _Found(NamedTuple):
    """A member of a sample. ``points``: (end of itself, begin and end of its access points)."""

    ending: str
    extent: Extent
    points: tuple[int, int, int] | None = None

    @property
    def head(self) -> "_Found":
        """Its first bytes."""
        return self._replace(extent=self.extent._replace(size=min(self.extent.size or 0, HEAD_BYTES)))


class MembersReader:
    """Reads the fields of any sample. Belongs to one worker and one stream."""

    def __init__(self, source: WebDatasetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._index = index
        self._max_bytes = max_bytes
        self._path_bytes = source.path_bytes
        self._parts = source.parts
        self._wanted = source.wanted
        slots = [part.slot for part in source.parts]
        images = [part.slot for part in source.parts if part.column.name == "image" and part.coding == "image"]
        self._image = next((slot for slot in images if slots.count(slot) == 1), None)
        """The slot of the member that is the field ``image``, and no other one."""
        kinds = {slot: {one.column.kind for one in source.parts if one.slot == slot} for slot in slots}
        self._media = {slot for slot in slots if kinds[slot] <= MEDIA_ENDINGS.keys()}
        """The slots of members of which a part may be read."""
        self._defaults = {
            column.name: default_value(column, source.defaults[column.name])
            for column in source.columns
            if column.name in source.defaults
        }
        self._firsts: list[int] = index.arrays["firsts"].tolist()
        self._starts: NDArray[np.int64] = index.arrays["starts"]
        self._extents: NDArray[np.uint32] = index.arrays["extents"]
        self._endings: NDArray[np.uint8] = index.arrays["endings"]
        self._points_at: NDArray[np.uint32] | None = None
        self.points: dict[str, memoryview] = {}
        self._offsets: NDArray[np.int64] = index.arrays["offsets"]
        self._keys = index.arrays["keys"]
        root = os.fsencode(index.place["root"])
        self._files = [os.path.join(root, name) for name in index.names("shards")]  # noqa: PTH118  bytes
        shape = (len(index), len(self._wanted))
        points = index.arrays.get("points", self._extents)
        if self._endings.shape != shape or {self._extents.shape, points.shape} != {(*shape, 2)}:
            raise IndexMalformed(f"members of {self._endings.shape} instead of {shape}")
        bound = bound_of(root, allow_outside_root=source.allow_outside_root)
        self._bytes = BytesReader(RemoteBytes(storage, root, index.place), max_bytes, bound=bound)
        self.close = self._bytes.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        return self._read(sample, self._found(sample))

    def read_points(self) -> bool:
        """See ``interface.ReadsPoints``."""
        self._points_at = self._index.arrays.get("points")
        return self._points_at is not None

    def reads_parts(self) -> bool:
        """See ``interface.ReadsParts``: a part of a local member saves nothing."""
        return self._image is not None and self._bytes.reads_ahead

    def read_part(self, sample: int, first: int, end: int) -> Mapping[str, Value]:
        """See ``interface.ReadsParts``."""
        return self._read(sample, self._found(sample, (first, end)))

    def _read(self, sample: int, members: list[_Found | None]) -> Mapping[str, Value]:
        return {**self._values(members, self._contents(members), self._parts), **self.known(sample)}

    def lengths(self, samples: Sequence[int], field: str) -> NDArray[np.int64]:
        """See ``interface.ReadsLengths``: of an array, by its header; other members are read."""
        lengths = np.zeros(len(samples), np.int64)
        part = next(part for part in self._parts if part.column.name == field)
        others = [one for one in self._parts if one.slot != part.slot]
        if part.coding != "npy" or len(others) < len(self._parts) - 1:
            return lengths
        found = [self._found(sample) for sample in samples]
        arrays = [members[part.slot] for members in found]
        for members, array in zip(found, arrays, strict=True):
            members[part.slot] = None if array is None else array.head
        self._bytes.prefetch(member.extent for members in found for member in members if member is not None)
        for place, (members, array) in enumerate(zip(found, arrays, strict=True)):
            with suppress(SampleUnreadable, SourceInvalid):
                contents = self._contents(members)
                content, size = contents[part.slot], 0 if array is None else array.extent.size or 0
                if isinstance(content, memoryview) and content and size <= self._max_bytes:
                    length = _length(part.column, content, size)
                    self._values(members, contents, others)
                    lengths[place] = length
        return lengths

    def _contents(self, members: list[_Found | None]) -> list[memoryview | MediaFile | None]:
        contents: list[memoryview | MediaFile | None] = [
            self._content(member, is_last=member is members[-1], is_media=slot in self._media)
            for slot, member in enumerate(members)
        ]
        self.points = {}
        for slot, (member, content) in enumerate(zip(members, contents, strict=True)):
            if member is not None and member.points is not None and isinstance(content, memoryview):
                size, first, end = member.points
                names = (part.column.name for part in self._parts if part.slot == slot)
                self.points |= dict.fromkeys(names, content[first:end])
                contents[slot] = content[:size]
        return contents

    def _values(
        self, members: list[_Found | None], contents: list[memoryview | MediaFile | None], parts: Iterable[MemberField]
    ) -> dict[str, Value]:
        """The values of some fields. Raises ``SampleUnreadable``."""
        objects: dict[int, Mapping[str, object]] = {}
        values: dict[str, Value] = {}
        for part in parts:
            if part.slots:
                values[part.column.name] = self._list(part, members, contents)
                continue
            member, content = members[part.slot], contents[part.slot]
            if member is None or content is None:
                values[part.column.name] = self._default(part, f"there is no member {part.members}")
                continue
            if isinstance(content, MediaFile):
                values[part.column.name] = content
                continue
            place = member.ending
            try:
                if part.member.key:
                    if part.slot not in objects:
                        objects[part.slot] = json_object(bytes(content))
                    place = f"{place}:{part.member.key}"
                values[part.column.name] = self._value(part, content, objects)
            except SampleUnreadable as error:
                raise SampleUnreadable(f"{place}: {error}") from None
        return values

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request the members of all these samples from servers at once."""
        self.prefetch_with(samples, {})

    def prefetch_with(self, samples: Sequence[int], parts: Mapping[int, tuple[int, int]]) -> None:
        """See ``interface.ReadsParts``."""
        wanted = (member for sample in samples for member in self._found(sample, parts.get(sample)))
        self._bytes.prefetch(member.extent for member in wanted if member is not None)

    def known(self, sample: int) -> Mapping[str, Value]:
        """The key, as ``path``; the index has no other values."""
        key = self._key(sample)
        return {"path": padded_text(key, self._path_bytes)} if self._path_bytes else {}

    def name(self, sample: int) -> str:
        """The shard, and the key of the sample in it."""
        return f"{readable(self.file(sample))}: {readable(self._key(sample))}"

    def _key(self, sample: int) -> bytes:
        start, end = self._offsets[self._index.checked(sample) : sample + 2].tolist()
        return self._keys[start:end].tobytes()

    def file(self, sample: int) -> bytes:
        """See ``interface.NamesFiles``."""
        return self._files[bisect_right(self._firsts, self._index.checked(sample)) - 1]

    def _found(self, sample: int, part: tuple[int, int] | None = None) -> list[_Found | None]:
        """The wanted members of a sample; None for an absent one. ``part``: bytes of its image."""
        file, start = self.file(sample), int(self._starts[sample])
        members = [
            None if number == MISSING else _Found(endings[number], Extent(file, start + blocks * BLOCKSIZE, size))
            for endings, number, (blocks, size) in zip(
                self._wanted, self._endings[sample].tolist(), self._extents[sample].tolist(), strict=True
            )
        ]
        if self._points_at is not None:
            members = [
                self._with_points(member, *points)
                for member, points in zip(members, self._points_at[sample].tolist(), strict=True)
            ]
        if part is not None and self._image is not None and (image := members[self._image]) is not None:
            extent = Extent(file, image.extent.start + part[0], part[1] - part[0])
            members[self._image] = image._replace(extent=extent, points=None)
        return members

    def _with_points(self, member: _Found | None, first: int, count: int) -> _Found | None:
        """The member with the access points behind it, if it has some."""
        if member is None or not count or first + count > self._max_bytes:
            return member
        size = member.extent.size or 0
        extent = member.extent._replace(size=first + count)
        return member._replace(extent=extent, points=(size, first, first + count))

    def _content(self, member: _Found | None, *, is_last: bool, is_media: bool) -> memoryview | MediaFile | None:
        """The bytes of a member. All but the last are copied: the next read reuses the buffer."""
        if member is None:
            return None
        path, start, size = member.extent
        if not size:
            return memoryview(b"")
        try:
            if size == MEMBER_BYTES_MAX:
                raise SampleUnreadable(f"has {size} bytes or more, more than max_bytes = {self._max_bytes}")
            assert size is not None, "the index has it"
            content = (
                self._bytes.open_extent(path, start, size) if is_media else self._bytes.read_extent(path, start, size)
            )
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{member.ending}: {error}") from None
        return content if is_last or isinstance(content, MediaFile) else memoryview(bytes(content))

    def _value(self, part: MemberField, content: memoryview, objects: Mapping[int, Mapping[str, object]]) -> Value:
        if not part.member.key:
            return value_of(part.column, part.coding, content, self._max_bytes)
        value = value_at(objects[part.slot], part.member.key)
        if value is None:
            there = ", ".join(map(repr, list(objects[part.slot])[:20]))
            return self._default(part, f"there is no {part.member.key!r}; there are {there or 'none'}")
        return value_in_json(part.column, value)

    def _list(
        self, part: MemberField, members: list[_Found | None], contents: list[memoryview | MediaFile | None]
    ) -> Value:
        """The texts or images that are members of their own, as many as there are."""
        found: list[object] = []
        for member, content in ((members[slot], contents[slot]) for slot in part.slots):
            if member is not None and isinstance(content, memoryview):
                found.append(from_bytes(replace(part.column.item, name=member.ending), content, self._max_bytes))
        if not found:
            return self._default(part, f"there is no member {part.members}")
        return images_from(part.column, found) if part.coding == "image" else nested(part.column, found)

    def _default(self, part: MemberField, problem: str) -> Value:
        """The default of a field. Raises ``SampleUnreadable`` if it has none."""
        if part.column.name not in self._defaults:
            raise SampleUnreadable(f"{problem}, which the field {part.column.name} comes from")
        return self._defaults[part.column.name]


def _open(source: WebDatasetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> Reader:
    return (MembersReader if source.fields else FilesReader)(source, index, max_bytes, storage)


READERS = {WebDatasetSource: _open}
