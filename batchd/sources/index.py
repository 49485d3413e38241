"""What a source holds: the path and the label of each sample, as flat arrays. Daemon and workers.

The daemon builds the index once and puts it into one sealed memfd; every worker maps that, so 1,280,000 paths cost a
worker page-table entries and nothing else. All numbers little-endian, every section at a multiple of 64 bytes:

    0          8            16           24           32           40           48              80
    +----------+------------+------------+------------+------------+------------+---------------+
    | magic    | samples n  | path bytes | classes    | class bytes| root bytes | sha256 digest |  zeros up to 128
    +----------+------------+------------+------------+------------+------------+---------------+
    128
    +---------------------+------------------+------+------------------+------------------+
    | offsets, int64[n+1] | labels, int64[n] | root | class names,     | paths, one right |
    |                     |                  |      | a NUL after each | after the other  |
    +---------------------+------------------+------+------------------+------------------+

Sample i has labels[i] and paths[offsets[i]:offsets[i + 1]], relative to the root unless it starts with a slash.

Invariant: an index never changes. The digest names its content (relative paths, labels, class names) and neither the
root nor any time: the same files on another machine have the same digest.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from struct import Struct
from typing import Self

import numpy as np
from numpy.typing import NDArray

MAGIC = b"BATCHIX1"
"""Names the format and its version; another layout gets another magic."""
MEMORY_NAME = "batchd-index"
ALIGNMENT_BYTES = 64
HEADER_BYTES = 128
NUMBER = np.dtype("<i8")
_HEADER = Struct("<8sQQQQQ32s")
assert _HEADER.size == 80  # noqa: PLR2004  as drawn above
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class IndexMalformed(ValueError):  # noqa: N818  names what is wrong
    """A descriptor whose memory is no index of this version: it was not made by this daemon."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceIndex:
    """Paths and labels of all samples of a source.

    ``offsets`` is int64 [n + 1] and ``labels`` int64 [n]; ``paths`` is one blob of bytes; ``class_blob`` holds the class
    names, each ended by a NUL. ``digest`` is 64 hexadecimal digits.
    """

    root: bytes
    class_blob: bytes
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    paths: memoryview
    digest: str

    @classmethod
    def build(
        cls,
        root: bytes,
        class_names: Sequence[bytes],
        offsets: NDArray[np.int64],
        labels: NDArray[np.int64],
        paths: memoryview,
    ) -> Self:
        """Make an index of arrays that will not change any more, and compute its digest."""
        class_blob = b"".join(name + b"\0" for name in class_names)
        digest = sha256(b"batchd source 1")
        digest.update(np.array([len(labels), len(class_names)], NUMBER).tobytes())
        for part in (class_blob, offsets.data, labels.data, paths):
            digest.update(part)
        return cls(root, class_blob, offsets, labels, paths, digest.hexdigest())

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
        samples, path_bytes, _classes, class_bytes, root_bytes = counts
        starts = _section_starts(_section_bytes(samples, root_bytes, class_bytes, path_bytes))
        if samples == 0 or starts[-1] != size:
            raise IndexMalformed(f"{samples} samples in {size} bytes: its header says that it has {starts[-1]} bytes")
        offsets = np.frombuffer(memory, NUMBER, samples + 1, starts[0])
        if offsets[0] != 0 or offsets[-1] != path_bytes:
            raise IndexMalformed(f"its paths span {offsets[0]} to {offsets[-1]}, but its header says 0 to {path_bytes}")
        return cls(
            root=bytes(memory[starts[2] : starts[2] + root_bytes]),
            class_blob=bytes(memory[starts[3] : starts[3] + class_bytes]),
            offsets=offsets,
            labels=np.frombuffer(memory, NUMBER, samples, starts[1]),
            paths=memory[starts[4] : starts[4] + path_bytes],
            digest=digest.hex(),
        )

    def to_memfd(self) -> int:
        """Copy the index into a new sealed memfd. The descriptor (close-on-exec) is the caller's.

        Raises ``OSError`` where the kernel has no memory for it.
        """
        sections = [self.offsets.data, self.labels.data, memoryview(self.root), memoryview(self.class_blob), self.paths]
        lengths = [section.nbytes for section in sections]
        starts = _section_starts(lengths)
        counts = (len(self), len(self.paths), self.class_blob.count(b"\0"), len(self.class_blob), len(self.root))
        descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, starts[-1])
            _write(descriptor, memoryview(_HEADER.pack(MAGIC, *counts, bytes.fromhex(self.digest))), 0)
            for section, start in zip(sections, starts, strict=False):
                _write(descriptor, section.cast("B"), start)
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

    def path(self, sample: int) -> str:
        """The path of a sample, as people can read it and as every message can carry it. Raises ``IndexError``."""
        return readable(self.file(sample))

    def file(self, sample: int) -> bytes:
        """The path of a sample as the kernel takes it, absolute where the root is. Raises ``IndexError``."""
        return os.path.join(self.root, self.name(sample))  # noqa: PTH118  bytes, because names need not be text

    def name(self, sample: int) -> bytes:
        """The path of a sample as it was found: relative to the root, or absolute. Raises ``IndexError``."""
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


def _section_bytes(samples: int, root_bytes: int, class_bytes: int, path_bytes: int) -> list[int]:
    return [(samples + 1) * NUMBER.itemsize, samples * NUMBER.itemsize, root_bytes, class_bytes, path_bytes]


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
