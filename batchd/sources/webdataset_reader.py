"""Members of a sample in a tar shard become its fields. Workers; what a source's fields are, in the daemon too.

    coding     member                    field
    image      any                       its bytes
    text       any                       str, from UTF-8
    json       a JSON object, one key    a text, a number, or a list of them
    npy        an array of numpy         numbers, in the shape that they have there
    written    cls, txt, ...             numbers in digits, with white space between several
    bytes      any other                 little-endian numbers

Each member is read with one ``pread``, also where several fields come from it.

Invariant: nothing of a member is ever executed; a value is what its column says, in dtype and shape.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from tarfile import BLOCKSIZE
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.config.columns import Column
from batchd.config.file_sources import WebDatasetSource
from batchd.config.members import Coding, Member, coding_of, member_of
from batchd.config.values import Value
from batchd.samples.errors import SampleUnreadable
from batchd.sources.conversion import default_value
from batchd.sources.member_values import json_object, value_in_json, value_of
from batchd.sources.reader import padded_text
from batchd.storage.access import Storage
from batchd.storage.index import IndexMalformed, SourceIndex, readable
from batchd.storage.paths import bound_of
from batchd.storage.reader import BytesReader
from batchd.storage.remote_reader import Extent, RemoteBytes

PLACE = np.dtype("<u4")
BYTES_MAX = (1 << 32) - 1
"""A member that says so many bytes has as many or more: none can be read that is so long."""
MISSING = 255
"""Stands for the ending of a member that is not there."""


@dataclass(frozen=True, slots=True)
class MemberField:
    """A field of a sample: the member that it comes from, which is number ``slot`` of those that are read."""

    column: Column
    member: Member
    slot: int
    coding: Coding
    default: Value | None

    @property
    def members(self) -> str:
        """Its member, for people, or those that it may come from."""
        return " or ".join(f".{ending}" for ending in self.member.endings)

    @property
    def fact(self) -> list[str | None]:
        """What decides bytes, however it was written."""
        default = self.default.tobytes().hex() if isinstance(self.default, np.ndarray) else self.default
        assert default is None or isinstance(default, str)
        return [self.column.text, self.member.text, default]


def parts_of(source: WebDatasetSource) -> tuple[MemberField, ...]:
    """The fields of a source, in their order."""
    slots: dict[tuple[str, ...], int] = {}
    parts = []
    for column in source.columns:
        member = member_of(column, source.names)
        slot = slots.setdefault(member.endings, len(slots))
        given = column.name in source.defaults
        default = default_value(column, source.defaults[column.name]) if given else None
        parts.append(MemberField(column, member, slot, coding_of(column, member), default))
    return tuple(parts)


def endings_of(parts: Sequence[MemberField]) -> list[tuple[str, ...]]:
    """Of each member that is read, the endings that it may have."""
    return list(dict.fromkeys(part.member.endings for part in parts))


def fields_columns(source: WebDatasetSource) -> tuple[Column, ...]:
    """What a sample consists of, where the source says it."""
    path = (Column("path", shape=(source.path_bytes,)),) if source.path_bytes else ()
    return *source.columns, *path


class _Found(NamedTuple):
    """A member of a sample."""

    ending: str
    extent: Extent


class MembersReader:
    """Reads the fields of any sample; see ``kinds.Reader``. Belongs to one worker and one stream."""

    def __init__(self, source: WebDatasetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._index = index
        self._max_bytes = max_bytes
        self._path_bytes = source.path_bytes
        self._parts = parts_of(source)
        self._wanted = endings_of(self._parts)
        self._firsts: list[int] = index.arrays["firsts"].tolist()
        self._starts: NDArray[np.int64] = index.arrays["starts"]
        self._extents: NDArray[np.uint32] = index.arrays["extents"]
        self._endings: NDArray[np.uint8] = index.arrays["endings"]
        self._offsets: NDArray[np.int64] = index.arrays["offsets"]
        self._keys = index.arrays["keys"]
        root = os.fsencode(index.place["root"])
        self._files = [os.path.join(root, name) for name in index.names("shards")]  # noqa: PTH118  bytes
        shape = (len(index), len(self._wanted))
        if self._endings.shape != shape or self._extents.shape != (*shape, 2):
            raise IndexMalformed(f"members of {self._endings.shape} instead of {shape}")
        bound = bound_of(root, allow_outside_root=source.allow_outside_root)
        self._bytes = BytesReader(RemoteBytes(storage, root, index.place), max_bytes, bound=bound)
        self.close = self._bytes.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        found = self._found(sample)
        contents = [self._content(one, is_last=one is found[-1]) for one in found]
        objects: dict[int, Mapping[str, Any]] = {}
        values: dict[str, Value] = {}
        for part in self._parts:
            member, content = found[part.slot], contents[part.slot]
            if member is None or content is None:
                values[part.column.name] = _default(part, f"there is no member {part.members}")
                continue
            place = member.ending
            try:
                if part.coding == "json":
                    if part.slot not in objects:
                        objects[part.slot] = json_object(content)
                    place = f"{place}:{part.member.key}"
                values[part.column.name] = self._value(part, content, objects)
            except SampleUnreadable as error:
                raise SampleUnreadable(f"{place}: {error}") from None
        return {**values, **self.known(sample)}

    def prefetch(self, samples: Sequence[int]) -> None:
        """Ask servers for the members of all these samples at once."""
        self._bytes.prefetch(self._extents_of(samples))

    def known(self, sample: int) -> Mapping[str, Value]:
        """Nothing stands in the index but where members are, and the key."""
        key = self._key(sample)
        return {"path": padded_text(key, self._path_bytes)} if self._path_bytes else {}

    def name(self, sample: int) -> str:
        """The shard, and the key of the sample in it."""
        return f"{readable(self._file(sample))}: {readable(self._key(sample))}"

    def _key(self, sample: int) -> bytes:
        start, end = self._offsets[self._index.checked(sample) : sample + 2].tolist()
        return self._keys[start:end].tobytes()

    def _file(self, sample: int) -> bytes:
        return self._files[bisect_right(self._firsts, self._index.checked(sample)) - 1]

    def _found(self, sample: int) -> list[_Found | None]:
        """The members of a sample that are wanted; None for one that is missing."""
        file, start = self._file(sample), int(self._starts[sample])
        return [
            None if number == MISSING else _Found(endings[number], Extent(file, start + blocks * BLOCKSIZE, size))
            for endings, number, (blocks, size) in zip(
                self._wanted, self._endings[sample].tolist(), self._extents[sample].tolist(), strict=True
            )
        ]

    def _extents_of(self, samples: Sequence[int]) -> Iterator[Extent]:
        for sample in samples:
            yield from (one.extent for one in self._found(sample) if one is not None)

    def _content(self, found: _Found | None, *, is_last: bool) -> memoryview | None:
        """The bytes of a member. The buffer that they are read into is used again for the next, so all but the last move."""
        if found is None:
            return None
        path, start, size = found.extent
        if not size:
            return memoryview(b"")
        try:
            if size == BYTES_MAX:
                raise SampleUnreadable(f"has {size} bytes or more, more than max_bytes = {self._max_bytes}")
            assert size is not None, "the index has it"
            content = self._bytes.read_extent(path, start, size)
        except SampleUnreadable as error:
            raise SampleUnreadable(f"{found.ending}: {error}") from None
        return content if is_last else memoryview(bytes(content))

    def _value(self, part: MemberField, content: memoryview, objects: Mapping[int, Mapping[str, Any]]) -> Value:
        if part.coding != "json":
            return value_of(part.column, part.coding, content, self._max_bytes)
        value = objects[part.slot].get(part.member.key)
        if value is None:
            there = ", ".join(map(repr, list(objects[part.slot])[:20]))
            return _default(part, f"there is no {part.member.key!r}; there are {there or 'none'}")
        return value_in_json(part.column, value)


def _default(part: MemberField, problem: str) -> Value:
    """What stands for what is missing. Raises ``SampleUnreadable``."""
    if part.default is None:
        raise SampleUnreadable(f"{problem}, which the field {part.column.name} comes from")
    return part.default
