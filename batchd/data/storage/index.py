"""The index of a source: facts, and numbers of each sample as flat arrays. Daemon and workers.

The daemon builds the index once and puts it into one sealed memfd; every worker maps that, so
1,280,000 paths cost a worker page-table entries and nothing else. All numbers little-endian, every
array at a multiple of 64 bytes:

    0        8              16              48      64
    +--------+--------------+---------------+-------+-----------------------+---------+---------+--
    | magic  | header bytes | sha256 digest | zeros | header, JSON in ASCII | array 1 | array 2 | ..
    +--------+--------------+---------------+-------+-----------------------+---------+---------+--

    header: {"samples": n, "facts": {...}, "place": {...},
             "arrays": [[name, dtype, shape, first byte], ...]}

Each kind of source gives the facts and the arrays their meaning. ``facts`` are the same wherever
the files are; the ``place`` is the rest, such as the folder of the files, and the notes of the
scan.

Invariant: an index never changes. The digest covers its facts and arrays, and neither the place nor
any time: the same files on another machine have the same digest.
"""

import fcntl
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from struct import Struct
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from typing import Any, BinaryIO, Self
from weakref import finalize

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchd_wire.views import Array

MAGIC = b"BATCHIX3"
"""Names the format and its version; another layout gets another magic."""
MEMORY_NAME = "batchd-index"
ALIGNMENT_BYTES = 64
PREFIX_BYTES = 64
HEADER_BYTES_MAX = 1 << 30
NUMBER = np.dtype("<i8")
_PREFIX = Struct("<8sQ32s")
assert _PREFIX.size == 48  # noqa: PLR2004  as drawn above
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

Arrays = Mapping[str, Array]


class IndexMalformed(ValueError):  # noqa: N818  names what is wrong
    """Memory that is no index of this version: it was not made by this daemon."""


@dataclass(frozen=True, eq=False)
class SourceIndex:
    """All that is known of ``samples`` samples.

    ``facts`` and ``place`` are as in JSON; ``digest`` is 64 hexadecimal digits.
    """

    samples: int
    facts: Mapping[str, Any]
    arrays: Arrays
    place: Mapping[str, Any]
    digest: str
    _sealed: int | None = field(default=None, init=False, repr=False)
    """The memfd that it views and owns, if any."""

    @classmethod
    def build(cls, samples: int, facts: Mapping[str, Any], arrays: Arrays, place: Mapping[str, Any]) -> Self:
        """Make an index of arrays that will not change any more, and compute its digest."""
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        digest = sha256(b"batchd source 2")
        shapes = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        digest.update(json.dumps([samples, facts, shapes], sort_keys=True).encode())
        for array in arrays.values():
            digest.update(_bytes_of(array))
        return cls(samples, facts, arrays, place, digest.hexdigest())

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Self:
        """Map the memfd of ``to_memfd``, read-only; the descriptor stays the caller's.

        Raises ``IndexMalformed`` for anything but a sealed index of this version.
        """
        _check_seals(descriptor)
        size = os.fstat(descriptor).st_size
        if size < PREFIX_BYTES:
            raise IndexMalformed(f"{size} bytes are less than the beginning of an index")
        return cls.from_memory(memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)))

    @classmethod
    def owning(cls, descriptor: int) -> Self:
        """Do the same, and close the descriptor with the index; ``to_memfd`` gives it out."""
        index = cls.from_descriptor(descriptor)
        object.__setattr__(index, "_sealed", descriptor)
        finalize(index, os.close, descriptor)
        return index

    @classmethod
    def from_memory(cls, memory: memoryview) -> Self:
        """View the bytes of an index; trust its digest. Raises ``IndexMalformed``."""
        try:
            magic, header_bytes, digest = _PREFIX.unpack_from(memory)
            if magic != MAGIC:
                raise IndexMalformed(f"not an index of this version: it starts with {magic!r} instead of {MAGIC!r}")
            header = json.loads(bytes(memory[PREFIX_BYTES : PREFIX_BYTES + min(header_bytes, HEADER_BYTES_MAX)]))
            arrays = {
                name: np.frombuffer(memory, dtype, int(np.prod(shape)), start).reshape(shape)
                for name, dtype, shape, start in header["arrays"]
            }
            index = cls(header["samples"], header["facts"], arrays, header["place"], digest.hex())
        except IndexMalformed:
            raise
        except (StructError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise IndexMalformed(f"a damaged index: {error}") from None
        end = index.sections()[1]
        if end != len(memory):
            raise IndexMalformed(f"{len(memory)} bytes: its header says that it has {end}")
        return index

    def sections(self) -> tuple[list[tuple[int, memoryview]], int]:
        """(First byte, bytes) of each section, and the total size in bytes with the gaps."""
        header, starts, end = self._header()
        prefix = _PREFIX.pack(MAGIC, len(header), bytes.fromhex(self.digest))
        arrays = zip(starts, map(_bytes_of, self.arrays.values()), strict=True)
        return [(0, memoryview(prefix)), (PREFIX_BYTES, memoryview(header)), *arrays], end

    def to_memfd(self) -> int:
        """Copy the index into a sealed memfd, the caller's. Raises ``OSError`` without memory.

        An index that owns one gives it out again.
        """
        if self._sealed is not None:
            return os.dup(self._sealed)
        sections, size = self.sections()
        descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as where_it_fails:
            where_it_fails.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size)
            for start, section in sections:
                write_all(descriptor, section, start)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            where_it_fails.pop_all()
        return descriptor

    def __len__(self) -> int:
        return self.samples

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the labels 0, 1, … as printable text; none if the source has no names."""
        return tuple(readable(name) for name in self.names("classes"))

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of its scan, and of those of its parts."""
        return tuple(_notes_in(self.place))

    def names(self, array: str) -> tuple[bytes, ...]:
        """The names in an array of bytes, each ended by a NUL; none without such an array."""
        return tuple(self.arrays[array].tobytes().split(b"\0")[:-1]) if array in self.arrays else ()

    def checked(self, sample: int) -> int:
        """Return ``sample`` if it is in range. Raises ``IndexError``."""
        if not 0 <= sample < self.samples:
            raise IndexError(f"sample {sample} of a source with {self.samples} samples")
        return sample

    def _header(self) -> tuple[bytes, list[int], int]:
        """The header, where each array starts, and where the last one ends."""
        layout: list[list[object]] = [[name, array.dtype.str, array.shape, 0] for name, array in self.arrays.items()]
        # the numbers that are 0 here may have 20 digits
        room = len(self._encoded(layout)) + 20 * len(layout)
        starts, end = [], aligned(PREFIX_BYTES + room)
        for entry, array in zip(layout, self.arrays.values(), strict=True):
            entry[3] = end
            starts.append(end)
            end = aligned(end + array.nbytes)
        return self._encoded(layout), starts, max(end, PREFIX_BYTES)

    def _encoded(self, layout: list[list[object]]) -> bytes:
        return json.dumps({"samples": self.samples, "facts": self.facts, "place": self.place, "arrays": layout}).encode(
            "ascii"
        )


def _notes_in(place: Mapping[str, Any]) -> Iterator[str]:
    yield from place.get("notes", ())
    for part in place.get("parts", ()):
        yield from _notes_in(part)


def blob(names: list[bytes] | tuple[bytes, ...]) -> NDArray[np.uint8]:
    """Names as one array, uint8 ``[bytes]``, each ended by a NUL; see ``SourceIndex.names``."""
    return np.frombuffer(b"".join(name + b"\0" for name in names), np.uint8)


def number_array(grown: ArrayLike) -> Array:
    """A complete growing array as an array of an index: same shape, little-endian, not copied."""
    numbers: Array = np.asarray(grown)
    return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)


def readable(raw: bytes) -> str:
    r"""Write any file name as printable text: odd bytes and characters become ``\x1b``."""
    text = raw.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def sealed_copy(file: BinaryIO, start: int) -> int:
    """Copy a file from byte ``start`` to its end into a sealed memfd, the caller's.

    Raises ``OSError`` without memory.
    """
    size = max(0, os.fstat(file.fileno()).st_size - start)
    descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with ExitStack() as where_it_fails:
        where_it_fails.callback(os.close, descriptor)
        copied = 0
        while copied < size and (count := os.sendfile(descriptor, file.fileno(), start + copied, size - copied)):
            copied += count
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        where_it_fails.pop_all()
    return descriptor


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the kernel takes at most 2 GiB at once."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def aligned(offset: int) -> int:
    """The next multiple of ``ALIGNMENT_BYTES``."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_seals(descriptor: int) -> None:
    """Raise ``IndexMalformed`` for memory that may shrink, which is a SIGBUS here, or change."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise IndexMalformed(f"not memory that can be sealed: {error.strerror}") from None
    if seals & SEALS != SEALS:
        raise IndexMalformed(f"its seals are {seals:#x} instead of {SEALS:#x}")
