"""The bytes of samples that servers hold, and those of a whole chunk fetched at once. Workers only.

    extents of one shard   | a | gap | b |        | c |      a and b are one request where the gap is short

Waiting for an answer takes longer than its bytes, so a reader is told what comes next, and asks for
all of it at once.

Invariant: what was fetched ahead and is not wanted any more is forgotten with the next chunk; it is
never more than ``FETCHED_BYTES_MAX`` and the answers that were under way when that was reached.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from os import fsdecode
from typing import Any, NamedTuple

from batchd.storage.access import Storage
from batchd.storage.location import is_url
from batchd.storage.values import ObjectTooLong, ObjectUnreadable, Wanted, versions_in

FETCHED_BYTES_MAX = 32 << 20
WHOLE_BYTES_MAX = 4 << 20
"""What is longer is read when it is wanted, not ahead."""
JOINED_BYTES_MAX = 4 << 20
GAP_BYTES_MAX = 64 << 10


class Extent(NamedTuple):
    """Some bytes of a file, or of an object: all of them where ``size`` is None."""

    path: bytes
    start: int
    size: int | None


class RemoteBytes:
    """Reads objects for one reader. ``place``: of the index, with the versions that objects have to be.

    ``root``: where the reader's files are; nothing is read ahead of files of this machine.
    """

    def __init__(self, storage: Storage, root: bytes, place: Mapping[str, Any]) -> None:
        self.reads_ahead = is_url(root)
        self.versions = versions_in(place)
        self._storage = storage
        self._fetched: dict[Extent, memoryview | ObjectUnreadable] = {}

    def read(self, extent: Extent, bytes_max: int) -> memoryview:
        """The bytes, fewer where the object ends before. Raises ``ObjectUnreadable``, also for more than ``bytes_max``."""
        found = self._fetched.get(extent)
        if isinstance(found, ObjectUnreadable):
            raise found
        if found is not None:
            return found
        deadline_s = self._storage.sample_s
        if deadline_s <= 0:
            raise ObjectUnreadable(f"it was not read within {self._storage.limits.deadline_s:g} s")
        return self._storage.client.read(self._wanted(extent, bytes_max), deadline_s)

    def fetch(self, extents: Iterable[Extent], *, further: bool = False) -> None:
        """Read ahead what is wanted next, and forget what was before, unless this is ``further`` to it."""
        if not self.reads_ahead:
            return
        if not further:
            self._fetched.clear()
        room_bytes = FETCHED_BYTES_MAX - sum(len(one) for one in self._fetched.values() if isinstance(one, memoryview))
        groups = []
        short = {one for one in extents if one.size is None or one.size <= WHOLE_BYTES_MAX}
        for group in _joined(sorted(short, key=lambda one: (one.path, one.start))):
            try:
                groups.append((group, self._wanted(_around(group), WHOLE_BYTES_MAX)))
            except ObjectUnreadable as reason:
                self._fetched.update(dict.fromkeys(group, reason))
        deadline_s = self._storage.ahead_s
        if not groups or deadline_s <= 0 or room_bytes <= 0:
            return
        asked = [wanted for _, wanted in groups]
        answers = self._storage.client.fetch(asked, deadline_s, room_bytes)
        for (group, wanted), answer in zip(groups, answers, strict=True):
            if answer is None or isinstance(answer, ObjectTooLong):
                continue
            if isinstance(answer, ObjectUnreadable):
                self._fetched.update(dict.fromkeys(group, answer))
                continue
            for one in group:
                start = one.start - wanted.start
                self._fetched[one] = answer[start : None if one.size is None else start + one.size]

    def _wanted(self, extent: Extent, bytes_max: int) -> Wanted:
        url = fsdecode(extent.path)
        if url.encode(errors="replace").decode() != url:
            raise ObjectUnreadable("its name is not UTF-8, so no server has it")
        return Wanted(url, extent.start, extent.size, self.versions.get(url), bytes_max)


def _joined(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Those that one request is for. They come sorted."""
    for _path, those in groupby(extents, key=lambda one: one.path):
        group: list[Extent] = []
        for one in those:
            if group and not _is_near(group, one):
                yield group
                group = []
            group.append(one)
        yield group


def _is_near(group: list[Extent], one: Extent) -> bool:
    around = _around(group)
    if around.size is None or one.size is None:
        return False
    gap = one.start - (around.start + around.size)
    return gap <= GAP_BYTES_MAX and one.start + one.size - around.start <= JOINED_BYTES_MAX


def _around(group: list[Extent]) -> Extent:
    """The bytes from the first to the last."""
    first = group[0]
    if first.size is None:
        return first
    return Extent(first.path, first.start, max(one.start + (one.size or 0) for one in group) - first.start)
