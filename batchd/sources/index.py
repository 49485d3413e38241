"""What a source holds: the path and the label of each sample, as flat arrays. Daemon and workers.

The daemon builds the index once and puts it into one sealed memfd; every worker maps that, so 1,280,000 paths cost a
worker page-table entries and nothing else. All numbers little-endian, every section at a multiple of 64 bytes:

    0          8            16           24           32           40           48           56             88
    +----------+------------+------------+------------+------------+------------+------------+--------------+
    | magic    | samples n  | path bytes | classes    | class bytes| root bytes | shard bytes| sha256 digest|  zeros up to 128
    +----------+------------+------------+------------+------------+------------+------------+--------------+
    128
    +---------------------+------------------+--------------------+------+------------------+------------------+-----------------+
    | offsets, int64[n+1] | labels, int64[n] | extents, int64[n,3]| root | class names,     | shards,          | paths, one right|
    |                     |                  | where there are    |      | a NUL after each | a NUL after each | after the other |
    |                     |                  | shards             |      |                  |                  |                 |
    +---------------------+------------------+--------------------+------+------------------+------------------+-----------------+

Sample i has labels[i] and paths[offsets[i]:offsets[i + 1]], which is a file, relative to the root unless it starts with a slash.
Where there are shards, extents[i] is (shard, first byte, bytes), and the path is a name within that shard.

Invariant: an index never changes. The digest names its content (relative paths, labels, class names) and neither the
root nor any time: the same files on another machine have the same digest.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from struct import Struct
from typing import Self

import numpy as np
from numpy.typing import NDArray

MAGIC = b"BATCHIX2"
"""Names the format and its version; another layout gets another magic."""
MEMORY_NAME = "batchd-index"
ALIGNMENT_BYTES = 64
HEADER_BYTES = 128
NUMBER = np.dtype("<i8")
NO_EXTENTS = np.empty((0, 3), NUMBER)
_HEADER = Struct("<8sQQQQQQ32s")
assert _HEADER.size == 88  # noqa: PLR2004  as drawn above
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class IndexMalformed(ValueError):  # noqa: N818  names what is wrong
    """A descriptor whose memory is no index of this version: it was not made by this daemon."""


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """Paths and labels of all samples of a source.

    ``offsets`` is int64 [n + 1] and ``labels`` int64 [n]; ``paths`` is one blob of bytes; ``class_blob`` holds the class
    names and ``shards`` the paths of shards, each ended by a NUL. ``extents`` is int64 [n, 3], or [0, 3] where each sample is a
    file. ``digest`` is 64 hexadecimal digits.
    """

    root: bytes
    class_blob: bytes
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    paths: memoryview
    digest: str
    shard_blob: bytes
    extents: NDArray[np.int64]

    @classmethod
    def build(  # noqa: PLR0913  each is one section
        cls,
        root: bytes,
        class_names: Sequence[bytes],
        offsets: NDArray[np.int64],
        labels: NDArray[np.int64],
        paths: memoryview,
        *,
        shards: Sequence[bytes] = (),
        extents: NDArray[np.int64] = NO_EXTENTS,
    ) -> Self:
        """Make an index of arrays that will not change any more, and compute its digest."""
        class_blob, shard_blob = (b"".join(name + b"\0" for name in names) for names in (class_names, shards))
        digest = sha256(b"batchd source 1")
        digest.update(np.array([len(labels), len(class_names)], NUMBER).tobytes())
        for part in (class_blob, offsets.data, labels.data, paths):
            digest.update(part)
        if shards:
            digest.update(shard_blob)
            digest.update(extents.data)
        return cls(root, class_blob, offsets, labels, paths, digest.hexdigest(), shard_blob, extents)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Self:
        """Map what ``to_memfd`` made, read-only, and view it without copying. The descriptor stays the caller's.

        Raises ``IndexMalformed`` for anything but a sealed index of this version.
        """
        size = os.fstat(descriptor).st_size
        if size < HEADER_BYTES:
            raise IndexMalformed(f"{size} bytes are less than the header of an index")
        _check_seals(descriptor)
        memory = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
        magic, *counts, digest = _HEADER.unpack_from(memory)
        if magic != MAGIC:
            raise IndexMalformed(f"not an index of this version: it starts with {magic!r} instead of {MAGIC!r}")
        samples, path_bytes, _classes, class_bytes, root_bytes, shard_bytes = counts
        starts = _section_starts(_section_bytes(samples, root_bytes, class_bytes, shard_bytes, path_bytes))
        if samples == 0 or starts[-1] != size:
            raise IndexMalformed(f"{samples} samples in {size} bytes: its header says that it has {starts[-1]} bytes")
        offsets = np.frombuffer(memory, NUMBER, samples + 1, starts[0])
        if offsets[0] != 0 or offsets[-1] != path_bytes:
            raise IndexMalformed(f"its paths span {offsets[0]} to {offsets[-1]}, but its header says 0 to {path_bytes}")
        extents = np.frombuffer(memory, NUMBER, 3 * samples * (shard_bytes > 0), starts[2]).reshape(-1, 3)
        return cls(
            root=bytes(memory[starts[3] : starts[3] + root_bytes]),
            class_blob=bytes(memory[starts[4] : starts[4] + class_bytes]),
            offsets=offsets,
            labels=np.frombuffer(memory, NUMBER, samples, starts[1]),
            paths=memory[starts[6] : starts[6] + path_bytes],
            digest=digest.hex(),
            shard_blob=bytes(memory[starts[5] : starts[5] + shard_bytes]),
            extents=extents,
        )

    def to_memfd(self) -> int:
        """Copy the index into a new sealed memfd. The descriptor (close-on-exec) is the caller's.

        Raises ``OSError`` where the kernel has no memory for it.
        """
        numbers = [array.reshape(-1).view(np.uint8).data for array in (self.offsets, self.labels, self.extents)]
        blobs = [memoryview(blob) for blob in (self.root, self.class_blob, self.shard_blob)]
        sections = [*numbers, *blobs, self.paths]
        lengths = [section.nbytes for section in sections]
        starts = _section_starts(lengths)
        classes = self.class_blob.count(b"\0")
        counts = (len(self), len(self.paths), classes, len(self.class_blob), len(self.root), len(self.shard_blob))
        descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, starts[-1])
            _write(descriptor, memoryview(_HEADER.pack(MAGIC, *counts, bytes.fromhex(self.digest))), 0)
            for section, start in zip(sections, starts, strict=False):
                _write(descriptor, section, start)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the labels 0, 1, … as people can read them; none where the source has no names."""
        return tuple(readable(name) for name in self.class_blob.split(b"\0")[:-1])

    def label(self, sample: int) -> int:
        """The label of a sample. Raises ``IndexError`` where there is no such sample."""
        return int(self.labels[self._checked(sample)])

    @cached_property
    def shards(self) -> tuple[bytes, ...]:
        """The paths of the shards that samples lie in; none where each sample is a file."""
        return tuple(self.shard_blob.split(b"\0")[:-1])

    def path(self, sample: int) -> str:
        """Where a sample is, as people can read it and as every message can carry it. Raises ``IndexError``."""
        file = readable(self.file(sample))
        return f"{file}: {readable(self.name(sample))}" if self.shard_blob else file

    def file(self, sample: int) -> bytes:
        """The path of a sample's file as the kernel takes it, absolute where the root is. Raises ``IndexError``."""
        sample = self._checked(sample)
        name = self.shards[int(self.extents[sample, 0])] if self.shard_blob else self.name(sample)
        return os.path.join(self.root, name)  # noqa: PTH118  bytes, because names need not be text

    def extent(self, sample: int) -> tuple[int, int] | None:
        """(first byte, bytes) of a sample in its shard; None where it is a file. Raises ``IndexError``."""
        if not self.shard_blob:
            return None
        _shard, start, count = self.extents[self._checked(sample)].tolist()
        return start, count

    def name(self, sample: int) -> bytes:
        """The path of a sample as it was found: relative to the root, absolute, or within its shard. Raises ``IndexError``."""
        sample = self._checked(sample)
        start, end = int(self.offsets[sample]), int(self.offsets[sample + 1])
        if not 0 <= start <= end <= len(self.paths):
            raise IndexMalformed(f"sample {sample} has its path at bytes {start} to {end} of {len(self.paths)}")
        return bytes(self.paths[start:end])

    def _checked(self, sample: int) -> int:
        if not 0 <= sample < len(self.labels):
            raise IndexError(f"sample {sample} of a source with {len(self.labels)} samples")
        return sample


def readable(raw: bytes) -> str:
    r"""Write any file name so that a terminal, a log and a message can carry it: odd bytes and characters as ``\x1b``."""
    text = raw.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _section_bytes(samples: int, root_bytes: int, class_bytes: int, shard_bytes: int, path_bytes: int) -> list[int]:
    extents = 3 * samples if shard_bytes else 0
    numbers = [count * NUMBER.itemsize for count in (samples + 1, samples, extents)]
    return [*numbers, root_bytes, class_bytes, shard_bytes, path_bytes]


def _section_starts(lengths: Sequence[int]) -> list[int]:
    """Where each section starts, and at the end where the memory ends."""
    padded = (-(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for length in lengths)
    return list(accumulate(padded, initial=HEADER_BYTES))


def _check_seals(descriptor: int) -> None:
    """Memory that nobody can shrink any more cannot end this process with SIGBUS; what nobody can write stays checked."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise IndexMalformed(f"not memory that can be sealed: {error.strerror}") from None
    if seals & _SEALS != _SEALS:
        raise IndexMalformed(f"its seals are {seals:#x} instead of {_SEALS:#x}")


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the kernel takes at most 2 GiB at once."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
