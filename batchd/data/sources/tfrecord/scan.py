"""Scans TFRecord files: where each record starts, and the checksum of its data. Daemon.

Lengths are checked here, each with its CRC. Data is skipped: the CRC behind it is kept in the
index, so a worker that reads a record finds damage, and the digest identifies the content.

    firsts     int64 [shards + 1]   the number of the first sample of each file, and of all samples
    sizes      int64 [shards]       bytes of each file
    starts     int64 [n]            first byte of each record in its file
    checksums  uint32 [n]           the masked CRC of its data, as the file has it
    shards     uint8 [bytes]        the paths of the files below the root, a NUL after each

Invariant: the records of a file follow each other without a gap, from its first byte to its last;
otherwise the file is refused with the record and the byte.
"""

import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from batchd.data.sources.files.index import PROGRESS_EVERY
from batchd.data.sources.files.walk import shards_of, shards_problems
from batchd.data.sources.finding import find_in_shards
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import in_files
from batchd.data.sources.tfrecord.frames import FOOTER, HEADER, LENGTH_BYTES, masked_crc, parts_of
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.storage.index import SourceIndex, blob, number_array
from batchd.data.storage.paths import size_of
from batchd.data.storage.survey import ZLIB, Survey, compression_of
from batchd.errors import SourceInvalid

RECORD_BYTES_MAX = (1 << 31) - 4096
"""Linux reads no more at once, and no protobuf message has more than 2 GiB."""
BLOCK_BYTES = 1 << 20
"""Shorter records are read in blocks of this size: one call for many, and the system reads
ahead."""
HEAD_BYTES = 4096
"""Read at once behind a record that is longer than a block."""
_ZLIB_METHOD, _ZLIB_METHOD_BITS, _ZLIB_DIVISOR = 8, 15, 31


def _scan(source: TFRecordSource, survey: Survey) -> SourceIndex:
    """Find the records of all files, in the order of the files' paths. Raises ``SourceInvalid``."""
    shards = shards_of(source, survey)
    starts, checksums, firsts, sizes = array("q"), array("I"), array("q", [0]), array("q")
    for shard in shards:
        path = source.root / os.fsdecode(shard)
        with survey.open(path) as stream:
            sizes.append(size_of(stream))
            for start, checksum in records_in(path, stream, sizes[-1], survey.looked):
                starts.append(start)
                checksums.append(checksum)
                if len(starts) % PROGRESS_EVERY == 0:
                    survey.progress(len(starts))
        firsts.append(len(starts))
    survey.progress(len(starts))
    facts = {"parts": [part.fact for part in parts_of(source)], "sequence": source.sequence}
    arrays = {
        "firsts": number_array(firsts),
        "sizes": number_array(sizes),
        "starts": number_array(starts),
        "checksums": number_array(checksums),
        "shards": blob(shards),
    }
    place = {"root": os.fsdecode(source.root.absolute()), **survey.place()}
    return SourceIndex.build(len(starts), facts, arrays, place)


def records_in(path: Path, stream: BinaryIO, size: int, looked: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """The first byte and the checksum of each record of a file. Raises ``SourceInvalid``."""
    if size == 0:
        raise SourceInvalid(f"{path} is empty; leave it out of the shards")
    first, block = 0, stream.read(BLOCK_BYTES)  # the part of the file that was read last
    start = number = 0
    while start < size:
        place = start - first
        if len(block) - place < HEADER.size:
            raise _cut(path, number, start, min(size, first + len(block)))
        length, checksum = HEADER.unpack_from(block, place)
        if masked_crc(block[place : place + LENGTH_BYTES]) != checksum:
            raise _astray(path, number, start, block[place:])
        if length > RECORD_BYTES_MAX:
            raise SourceInvalid(
                f"{path}: record {number} at byte {start} says that it has {length} bytes, and no record may have more than "
                f"{RECORD_BYTES_MAX}; write the file again"
            )
        footer = start + HEADER.size + length
        if first + len(block) < min(size, footer + FOOTER.size + HEADER.size):
            looked()
            is_near = footer - first - len(block) < BLOCK_BYTES
            stream.seek(footer)
            first, block = footer, stream.read(BLOCK_BYTES if is_near else HEAD_BYTES)
        end = footer + FOOTER.size
        # the file may have become shorter since it was opened
        if end > min(size, first + len(block)):
            raise _cut(path, number, start, min(size, first + len(block)))
        yield start, FOOTER.unpack_from(block, footer - first)[0]
        start, number = end, number + 1


def _cut(path: Path, number: int, start: int, end: int) -> SourceInvalid:
    return SourceInvalid(
        f"{path} is cut: it ends at byte {end}, within record {number}, which begins at byte {start}; copy it again"
    )


def _astray(path: Path, number: int, start: int, data: bytes) -> SourceInvalid:
    """The error for bytes that are no record: in compressed, foreign and damaged files."""
    if number == 0:
        found = compression_of(data) or (ZLIB if _is_zlib(data) else None)
        if found is not None:
            return SourceInvalid(
                f"{path} is compressed ({found.name}), so its records cannot be read one by one; unpack it: "
                f"{found.unpack} < FILE > UNPACKED"
            )
    return SourceInvalid(
        f"{path}: the length of record {number} at byte {start} does not match its checksum: "
        + ("the file is damaged there; copy it again" if number else "this is no TFRecord file, or it is damaged")
    )


def _is_zlib(data: bytes) -> bool:
    return data[0] & _ZLIB_METHOD_BITS == _ZLIB_METHOD and int.from_bytes(data[:2], "big") % _ZLIB_DIVISOR == 0


KINDS = {
    TFRecordSource: BuiltInKind(
        problems=shards_problems,
        scan=_scan,
        neighbours=lambda _source, index: in_files(index.arrays["firsts"], len(index), begins=index.arrays["starts"]),
        find=lambda _source, index, pattern: find_in_shards(pattern, index),
    )
}
