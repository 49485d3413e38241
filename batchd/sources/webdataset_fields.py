"""Shards in tar format become an index of the members that fields come from. Daemon.

    firsts    int64 [shards + 1]        the number of the first sample of each shard, and of all samples
    starts    int64 [n]                 first byte of the first member of each sample in its shard
    extents   uint32 [n, members, 2]    (blocks of 512 bytes from there on, bytes) of each member that is wanted
    endings   uint8 [n, members]        which of its possible endings it has; MISSING where there is none
    offsets   int64 [n + 1]             the key of sample i is keys[offsets[i]:offsets[i + 1]]
    keys      uint8 [bytes]             one key right after the other
    shards    uint8 [bytes]             the paths of the shards below the root, a NUL after each

Numbers, arrays and texts that are short go into the digest with their content, everything else with its place and its length.

Invariant: every field without a default has its member in one sample at least: a name that is written wrong is said at the start.
"""

import os
from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from batchd.config.file_sources import WebDatasetSource
from batchd.errors import SourceInvalid
from batchd.sources.files import PROGRESS_EVERY
from batchd.sources.tar_members import TarMember, TarSample, samples_in
from batchd.sources.walk import Patterns, shards_of
from batchd.sources.webdataset_reader import BYTES_MAX, MISSING, PLACE, MemberField, endings_of, parts_of
from batchd.storage.index import NUMBER, SourceIndex, blob, readable
from batchd.storage.survey import Survey

CONTENT_BYTES_MAX = 4096
"""Longer members are known to the digest by their lengths alone."""


def scan_fields(source: WebDatasetSource, survey: Survey) -> SourceIndex:
    """Find the samples of all shards, in the order of the shards' paths. Raises ``SourceInvalid``."""
    shards = shards_of(Patterns(source.root, source.shards, "shards", source.allow_outside_root), survey)
    parts = parts_of(source)
    found = _FoundMembers(parts, source.path_bytes)
    firsts = [0]
    for shard in shards:
        path = source.root / os.fsdecode(shard)
        with survey.open(path) as stream:
            for sample in samples_in(path, stream):
                survey.looked()
                found.add(path, stream, sample)
                if len(found.starts) % PROGRESS_EVERY == 0:
                    survey.progress(len(found.starts))
        if len(found.starts) == firsts[-1]:
            raise SourceInvalid(f"{path} holds no sample; leave it out of the shards")
        firsts.append(len(found.starts))
    survey.progress(firsts[-1])
    found.check_names(source)
    facts = {"fields": [part.fact for part in parts], "content": found.content.hexdigest()}
    arrays = {"firsts": np.array(firsts, NUMBER), **found.arrays(), "shards": blob(tuple(shards))}
    place = {"root": os.fsdecode(source.root.absolute()), **survey.place()}
    return SourceIndex.build(firsts[-1], facts, arrays, place)


class _FoundMembers:
    """What a scan finds: the places of the members of each sample."""

    def __init__(self, parts: Sequence[MemberField], path_bytes: int) -> None:
        self.starts = array("q")
        self.content = sha256()
        self._parts = parts
        self._path_bytes = path_bytes
        self._wanted = endings_of(parts)
        self._images = {part.slot for part in parts if part.coding == "image"}
        self._extents = array("I")
        self._endings = array("B")
        self._keys = bytearray()
        self._offsets = array("q", [0])
        self._seen = [False] * len(self._wanted)
        self._first = ""

    def add(self, path: Path, stream: BinaryIO, sample: TarSample) -> None:
        """Add one sample. Raises ``SourceInvalid``."""
        key = os.fsencode(sample.key)
        if self._path_bytes and len(key) > self._path_bytes:
            raise SourceInvalid(
                f"{path}: the name {readable(key)} has {len(key)} bytes, more than path_bytes = {self._path_bytes}"
            )
        if not self.starts:
            self._first = f"{readable(key)} of {path} has {_listed(sample.members)}"
        start = next(iter(sample.members.values())).start
        self.starts.append(start)
        self._keys += key
        self._offsets.append(len(self._keys))
        for slot, wanted in enumerate(self._wanted):
            number = next((number for number, ending in enumerate(wanted) if ending in sample.members), MISSING)
            self._endings.append(number)
            if number == MISSING:
                self._extents.extend((0, 0))
                continue
            member = sample.members[wanted[number]]
            blocks = (member.start - start) // BLOCKSIZE
            if blocks > BYTES_MAX:
                raise SourceInvalid(f"{path}: the members of {readable(key)} lie too far from each other")
            self._seen[slot] = True
            self._extents.extend((blocks, min(member.size, BYTES_MAX)))
            if slot not in self._images and member.size <= CONTENT_BYTES_MAX:
                self._digest(stream, member)

    def _digest(self, stream: BinaryIO, member: TarMember) -> None:
        place = stream.tell()
        stream.seek(member.start)
        content = stream.read(member.size)
        stream.seek(place)
        self.content.update(b"%d:%b" % (len(content), content))

    def check_names(self, source: WebDatasetSource) -> None:
        """Raise ``SourceInvalid`` for a field that no sample has."""
        for part in self._parts:
            if not self._seen[part.slot] and part.default is None:
                raise SourceInvalid(
                    f"{source.place}: no sample has a member {part.members} for the field {part.column.name}; the first, "
                    f"{self._first}; say in names where the field comes from, or in defaults what stands for it"
                )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The places as an index has them."""
        count = len(self._wanted)
        return {
            "starts": np.frombuffer(self.starts, np.int64).astype(NUMBER, copy=False),
            "extents": np.frombuffer(self._extents, np.uint32).astype(PLACE, copy=False).reshape(-1, count, 2),
            "endings": np.frombuffer(self._endings, np.uint8).reshape(-1, count),
            "offsets": np.frombuffer(self._offsets, np.int64).astype(NUMBER, copy=False),
            "keys": np.frombuffer(self._keys, np.uint8),
        }


def _listed(members: dict[str, TarMember]) -> str:
    shown = 12
    more = [f"{len(members) - shown} more"] if len(members) > shown else []
    return ", ".join(chain((readable(os.fsencode(f".{ending}")) for ending in list(members)[:shown]), more))
