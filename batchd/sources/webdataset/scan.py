"""Shards in tar format become an index: which bytes of which shard are a sample's image, and what its label is. Daemon.

Labels are read here; of images only the place is noted, and workers read them with one ``pread``
each, in any order.

Invariant: what is no plain tar file, ends too soon, or has samples without image or label is
refused here with the shard's name and the member's; what is changed after that is found by whoever
reads it.

The samples of a shard in tar format, and where their members lie in it. Daemon, in a scan.

    train-0001.tar   | cat/0017.jpg | cat/0017.cls | cat/0018.jpg | cat/0018.cls | ...
                       key.ending     members that follow each other and have the same key are one sample

The key of a member is its name up to the first dot of its last part, as WebDataset has it.

A shard ends with a block of zeros at least, so one that was cut between two members is told from a
whole one.

Invariant: what is no plain tar file, or ends too soon, is refused with the shard's name and the
member's.

Shards in tar format become an index of the members that fields come from. Daemon.

Numbers, arrays and texts that are short go into the digest with their content, everything else with
its place and its length.

Invariant: every field without a default has its member in one sample at least: a name that is
written wrong is said at the start.
"""

import json
import os
import tarfile
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.files.index import PROGRESS_EVERY, GrowingIndex, image_columns, path_columns
from batchd.sources.files.walk import Patterns, shards_of, shards_problems
from batchd.sources.interface import BuiltInKind
from batchd.sources.webdataset.index import BYTES_MAX, MISSING, PLACE, MemberField, endings_of, parts_of
from batchd.sources.webdataset.options import WebDatasetSource
from batchd.storage.access import Storage
from batchd.storage.compression import compression_of
from batchd.storage.index import NUMBER, SourceIndex, blob, readable
from batchd.storage.paths import size_of
from batchd.storage.survey import Survey

HEADER_BYTES_MAX = 1 << 20
"""Longest name or extended header that a member may have; others are read into memory as long as they say they are."""

MAGIC, MAGIC_AT = b"ustar", 257
"""What a tar file has there; at its start is the name of a member, which may be like the magic of another kind of file."""


class TarMember(NamedTuple):
    """One file in a shard."""

    name: str
    start: int
    size: int


class TarSample(NamedTuple):
    """Members that have a key in common, by what their names have behind it."""

    key: str
    members: dict[str, TarMember]


def samples_in(path: Path, stream: BinaryIO) -> Iterator[TarSample]:
    """The samples of a shard, each of which has a member. Raises ``SourceInvalid``."""
    sample: dict[str, TarMember] = {}
    former = ""
    for member in _members(path, stream):
        folder, slash, last = member.name.rpartition("/")
        stem, _, ending = last.partition(".")
        key = folder + slash + stem
        if key != former and sample:
            yield TarSample(former, sample)
            sample = {}
        if ending in sample:
            raise SourceInvalid(f"{path}: two members are called {readable(os.fsencode(member.name))}")
        sample[ending], former = member, key
    if sample:
        yield TarSample(former, sample)


def _members(path: Path, stream: BinaryIO) -> Iterator[TarMember]:
    """The files in a shard, in their order; what begins with a dot is left out."""
    start = stream.read(tarfile.BLOCKSIZE)
    found = compression_of(start)
    if found is not None and not start.startswith(MAGIC, MAGIC_AT):
        raise SourceInvalid(
            f"{path} is compressed ({found.name}), so its samples cannot be read one by one; images are compressed already: "
            f"unpack the shard: {found.unpack} < FILE > UNPACKED"
        )
    stream.seek(0)
    last = TarMember("", 0, 0)
    try:
        with tarfile.open(fileobj=_HeadersOnly(stream), mode="r:", errors="surrogateescape") as shard:  # type: ignore[call-overload]
            while (member := shard.next()) is not None:
                shard.members = []  # it would keep them all
                if member.isreg() and not member.name.rpartition("/")[2].startswith("."):
                    if member.issparse():
                        raise SourceInvalid(f"{path}: {member.name} is sparse, which no sample can be")
                    last = TarMember(member.name, member.offset_data, member.size)
                    yield last
            stream.seek(shard.offset)  # tarfile takes a broken header for the end
            block = stream.read(tarfile.BLOCKSIZE)
            if len(block) < tarfile.BLOCKSIZE:
                raise SourceInvalid(
                    f"{path}: no end-of-archive block at byte {shard.offset}: the shard is cut; copy it again"
                )
            if block.strip(b"\0"):
                raise SourceInvalid(f"{path} is damaged: no header of a member at byte {shard.offset}")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        size = size_of(stream)
        if size < last.start - -last.size // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE:
            name = readable(os.fsencode(last.name))
            raise SourceInvalid(f"{path} is cut: it ends at byte {size}, within {name}; copy it again") from None
        raise SourceInvalid(f"{path} is no tar file, or is damaged: {error}") from None


class _HeadersOnly:
    """A shard as tarfile sees it: it may jump over members, and reads no more at once than a header can have."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek = stream.seek
        self.tell = stream.tell
        self._stream = stream

    def read(self, count: int) -> bytes:
        """What tarfile reads: headers."""
        if count > HEADER_BYTES_MAX:
            raise ValueError(f"a header of {count} bytes")
        return self._stream.read(count)


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


LABEL_BYTES_MAX = 1 << 20
_LABEL_MAX = (1 << 63) - 1


def _scan(source: WebDatasetSource, survey: Survey) -> SourceIndex:
    """Find the samples of all shards, in the order of the shards' paths. Raises ``SourceInvalid``."""
    if source.fields:
        return scan_fields(source, survey)
    growing = GrowingIndex(survey.progress, source.path_bytes)
    shards = shards_of(Patterns(source.root, source.shards, "shards", source.allow_outside_root), survey)
    for number, shard in enumerate(shards):
        path = source.root / os.fsdecode(shard)
        found = len(growing)
        with survey.open(path) as stream:
            for _key, members in samples_in(path, stream):
                survey.looked()
                image, label = _image(source, path, members), _label(source, path, stream, members)
                growing.add(os.fsencode(image.name), label, (number, image.start, image.size))
        if len(growing) == found:
            raise SourceInvalid(f"{path} holds no sample; leave it out of the shards")
    return growing.finish(source.root, [], survey, shards)


def _image(source: WebDatasetSource, path: Path, members: dict[str, TarMember]) -> TarMember:
    for ending in source.image:
        member = members.get(ending)
        if member is not None:
            return member
    name = next(iter(members.values())).name
    raise SourceInvalid(
        f"{path}: the sample of {readable(os.fsencode(name))} has no image: its endings are {', '.join(members)}, and "
        f"image = {list(source.image)}"
    )


def _label(source: WebDatasetSource, path: Path, stream: BinaryIO, members: dict[str, TarMember]) -> int:
    ending, _, key = source.label.partition(":")
    if not ending:
        return 0
    member = members.get(ending)
    if member is None:
        name = next(iter(members.values())).name
        raise SourceInvalid(
            f"{path}: the sample of {readable(os.fsencode(name))} has no member .{ending} for its label; label = "
            f'"{source.label}" says that it has, and label = "" that there are no labels'
        )
    shown = readable(os.fsencode(member.name))
    if member.size > LABEL_BYTES_MAX:
        raise SourceInvalid(f"{path}: {shown} has {member.size} bytes, too many for a label")
    place = stream.tell()
    stream.seek(member.start)
    text = stream.read(member.size)
    stream.seek(place)
    try:
        found = json.loads(text)[key] if key else int(text.decode("ascii"))
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if type(found) is not int or not -_LABEL_MAX <= found <= _LABEL_MAX:
        what = f"JSON with a whole number under {key!r}" if key else "a whole number"
        raise SourceInvalid(f"{path}: {shown} is not {what}")
    return found


def _columns(source: WebDatasetSource, _storage: Storage) -> tuple[Column, ...]:
    if source.fields:
        return *source.columns, *path_columns(source.path_bytes)
    return image_columns(source.path_bytes)


KINDS = {
    WebDatasetSource: BuiltInKind(
        problems=lambda source, storage: shards_problems(source.root, source.shards, storage),
        columns=_columns,
        scan=_scan,
    )
}
