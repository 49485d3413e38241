"""Members of samples in tar shards: which fields they are, and where an index has them. Daemon and workers.

    firsts    int64 [shards + 1]        the number of the first sample of each shard, and of all samples
    starts    int64 [n]                 first byte of the first member of each sample in its shard
    extents   uint32 [n, members, 2]    (blocks of 512 bytes from there on, bytes) of each member that is wanted
    endings   uint8 [n, members]        which of its possible endings it has; MISSING where there is none
    offsets   int64 [n + 1]             the key of sample i is keys[offsets[i]:offsets[i + 1]]
    keys      uint8 [bytes]             one key right after the other
    shards    uint8 [bytes]             the paths of the shards below the root, a NUL after each

An index of samples that are one image and one label each is one of ``files.index``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchd.samples.columns import Column
from batchd.samples.values import Value, default_value
from batchd.sources.webdataset.options import Coding, Member, WebDatasetSource, coding_of, member_of

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
