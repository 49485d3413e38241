"""The samples of a shard in tar format, and where their members lie in it. Daemon, in a scan.

    train-0001.tar   | cat/0017.jpg | cat/0017.cls | cat/0018.jpg | cat/0018.cls | ...
                       key.ending     members that follow each other and have the same key are one sample

The key of a member is its name up to the first dot of its last part, as WebDataset has it.

A shard ends with a block of zeros at least, so one that was cut between two members is told from a whole one.

Invariant: what is no plain tar file, or ends too soon, is refused with the shard's name and the member's.
"""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from batchd.errors import SourceInvalid
from batchd.sources.compression import compression_of
from batchd.storage.index import readable
from batchd.storage.paths import size_of

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
