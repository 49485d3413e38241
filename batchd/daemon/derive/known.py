"""Indexes of definitions that came before, in memory. DERIVING process and its forks.

    fork: scan -> index, witnesses --memfds--> process: of this owner
    next fork of the same owner: no witness has changed -> the index, without a scan

What one may list, another may not: a fork has the indexes of its owner alone, with the same groups,
and the process itself reads none of them. A fork that is taken over can spoil its owner's only.

Invariant: they are at most ``SCANS_MAX``, with ``BYTES_MAX`` of memory; for more, the owner with
the most loses its oldest one.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import NamedTuple

from batchd.daemon.identity import Identity
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import SETTLED_NS, IndexCache, PlainSource, check_unchanged
from batchd.data.storage.survey import Survey

BYTES_MAX = 256 << 20
SCANS_MAX = 256
"""Each has two descriptors."""


class KnownScan(NamedTuple):
    """Memories with an index and its witnesses, in JSON: descriptors that belong to it."""

    samples: int
    witnesses: int

    @property
    def size_bytes(self) -> int:
        """The memory that both take."""
        return sum(os.fstat(descriptor).st_size for descriptor in self)

    def close(self) -> None:
        """Let go of both."""
        for descriptor in self:
            os.close(descriptor)


class KnownScans:
    """Those of all owners, the oldest of each first."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, KnownScan]] = {}

    def of(self, owner: str) -> dict[str, KnownScan]:
        """Those of an owner, by key."""
        return self._known.get(owner, {})

    def add(self, owner: str, key: str, scan: KnownScan) -> None:
        """Keep one, instead of an earlier one with this key."""
        own = self._known.setdefault(owner, {})
        if (former := own.pop(key, None)) is not None:
            former.close()
        own[key] = scan
        while sum((taken := {one: self._taken(one) for one in self._known}).values()) > 1.0:
            most = max(taken, key=lambda one: taken[one])
            oldest = next(iter(self._known[most]))
            self._known[most].pop(oldest).close()
            if not self._known[most]:
                del self._known[most]

    def _taken(self, owner: str) -> float:
        """The part of the room that an owner takes."""
        scans = self._known[owner].values()
        return max(len(scans) / SCANS_MAX, sum(scan.size_bytes for scan in scans) / BYTES_MAX)

    def close(self, but: str = "") -> None:
        """Forget those of all owners ``but`` one."""
        for owner in self._known.keys() - {but}:
            for scan in self._known.pop(owner).values():
                scan.close()


def owner_of(identity: Identity) -> str:
    """A name for all with the same rights, under which indexes are kept."""
    return f"{identity.owner} {identity.reader}"


class OwnScans(IndexCache):
    """What a fork knows, and finds."""

    def __init__(self, known: Mapping[str, KnownScan]) -> None:
        super().__init__(None)
        self._known = known
        self._found: tuple[str, SourceIndex, bytes] | None = None

    def load(self, source: PlainSource, storage: Storage) -> SourceIndex | None:
        """See ``IndexCache``."""
        scan = self._known.get(_key(source))
        if scan is None:
            return None
        with suppress(OSError, ValueError, TypeError):
            check_unchanged(os.pread(scan.witnesses, os.fstat(scan.witnesses).st_size, 0), storage)
            SourceIndex.from_descriptor(scan.samples)  # or it raises
            return SourceIndex.owning(os.dup(scan.samples))
        return None

    def keep(self, source: PlainSource, index: SourceIndex, survey: Survey) -> None:
        """See ``IndexCache``."""
        if survey.is_settled(SETTLED_NS):
            self._found = _key(source), index, json.dumps(survey.witnesses).encode("ascii")

    def found(self, served: int) -> tuple[str, KnownScan] | None:
        """The scan that was made, to be kept, and its key; None without one. Raises ``OSError``.

        ``served``: memory of the stream's index, which is often the same.
        """
        if self._found is None:
            return None
        key, index, seen = self._found
        is_same = SourceIndex.from_descriptor(served).digest == index.digest
        witnesses = os.memfd_create("batchd-witnesses", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(witnesses), "wb") as file:
            file.write(seen)
        return key, KnownScan(os.dup(served) if is_same else index.to_memfd(), witnesses)


def _key(source: PlainSource) -> str:
    # keys stay in their order, as in ``IndexCache``
    return sha256(json.dumps(source).encode()).hexdigest()
