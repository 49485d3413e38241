"""Shards in tar format become an index: which bytes of which shard are a sample's image, and what its label is. Daemon.

    train-0001.tar   | cat/0017.jpg | cat/0017.cls | cat/0018.jpg | cat/0018.cls | ...
                       key.ending     members that follow each other and have the same key are one sample

The key of a member is its name up to the first dot of its last part, as WebDataset has it. Labels are read here; of images only
the place is noted, and workers read them with one ``pread`` each, in any order.

Invariant: what is no plain tar file, ends too soon, or has samples without image or label is refused here with the shard's
name and the member's; what is changed after that is found by whoever reads it.
"""

import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchd.config.file_sources import WebDatasetSource
from batchd.errors import SourceInvalid
from batchd.sources.files import GrowingIndex
from batchd.sources.index import SourceIndex, readable
from batchd.sources.kinds import SourceKind
from batchd.sources.places import reading, size_of
from batchd.sources.reader import FilesReader, image_columns
from batchd.sources.survey import Survey
from batchd.sources.walk import Patterns, shards_of, shards_problems

HEADER_BYTES_MAX = 1 << 20
"""Longest name or extended header that a member may have; others are read into memory as long as they say they are."""
LABEL_BYTES_MAX = 1 << 20
_LABEL_MAX = (1 << 63) - 1
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class _Member(NamedTuple):
    """One file in a shard."""

    name: str
    start: int
    size: int


def _scan(source: WebDatasetSource, survey: Survey) -> SourceIndex:
    """Find the samples of all shards, in the order of the shards' paths. Raises ``SourceInvalid``."""
    growing = GrowingIndex(survey.progress, source.path_bytes)
    shards = shards_of(Patterns(source.root, source.shards, "shards", source.allow_outside_root), survey)
    for number, shard in enumerate(shards):
        path = source.root / os.fsdecode(shard)
        found = len(growing)
        with reading(path, survey) as stream:
            for members in _samples(path, stream):
                image, label = _image(source, path, members), _label(source, path, stream, members)
                growing.add(os.fsencode(image.name), label, (number, image.start, image.size))
        if len(growing) == found:
            raise SourceInvalid(f"{path} holds no sample; leave it out of the shards")
    return growing.finish(source.root, [], survey, shards)


def _samples(path: Path, stream: BinaryIO) -> Iterator[dict[str, _Member]]:
    """The samples of a shard: by ending, its members."""
    sample: dict[str, _Member] = {}
    former = ""
    for member in _members(path, stream):
        folder, slash, last = member.name.rpartition("/")
        stem, _, ending = last.partition(".")
        key = folder + slash + stem
        if key != former and sample:
            yield sample
            sample = {}
        if ending in sample:
            raise SourceInvalid(f"{path}: two members are called {readable(os.fsencode(member.name))}")
        sample[ending], former = member, key
    if sample:
        yield sample


def _members(path: Path, stream: BinaryIO) -> Iterator[_Member]:
    """The files in a shard, in their order; what begins with a dot is left out."""
    start = stream.read(8)
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise SourceInvalid(
                f"{path} is compressed ({kind}), so its samples cannot be read one by one; images are compressed already: "
                "unpack the shard"
            )
    stream.seek(0)
    last = _Member("", 0, 0)
    try:
        with tarfile.open(fileobj=_HeadersOnly(stream), mode="r:", errors="surrogateescape") as shard:  # type: ignore[call-overload]
            while (member := shard.next()) is not None:
                shard.members = []  # it would keep them all
                if member.isreg() and not member.name.rpartition("/")[2].startswith("."):
                    if member.issparse():
                        raise SourceInvalid(f"{path}: {member.name} is sparse, which no sample can be")
                    last = _Member(member.name, member.offset_data, member.size)
                    yield last
            stream.seek(shard.offset)  # tarfile takes a broken header for the end
            if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise SourceInvalid(f"{path} is damaged: no header of a member at byte {shard.offset}")
    except (tarfile.TarError, ValueError, OverflowError) as error:
        size = size_of(stream)
        if size < last.start + last.size:
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


def _image(source: WebDatasetSource, path: Path, members: dict[str, _Member]) -> _Member:
    for ending in source.image:
        member = members.get(ending)
        if member is not None:
            return member
    name = next(iter(members.values())).name
    raise SourceInvalid(
        f"{path}: the sample of {readable(os.fsencode(name))} has no image: its endings are {', '.join(members)}, and "
        f"image = {list(source.image)}"
    )


def _label(source: WebDatasetSource, path: Path, stream: BinaryIO, members: dict[str, _Member]) -> int:
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


def _problems(source: WebDatasetSource) -> list[str]:
    return shards_problems(source.root, source.shards)


KIND = SourceKind(
    problems=_problems,
    columns=lambda source: image_columns(source.path_bytes),
    scan=_scan,
    open=FilesReader.of,
)
