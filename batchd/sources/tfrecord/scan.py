"""Files of TFRecords become an index: where each record starts, and which checksum its data has. Daemon.

Lengths are checked here, each with its CRC. Data is only stepped over: the CRC that stands behind
it goes into the index, so that whoever reads a record finds damage, and the digest names the
content.

    firsts     int64 [shards + 1]   the number of the first sample of each file, and of all samples
    sizes      int64 [shards]       bytes of each file
    starts     int64 [n]            first byte of each record in its file
    checksums  uint32 [n]           the masked CRC of its data, as it stands in the file
    shards     uint8 [bytes]        the paths of the files below the root, a NUL after each

Invariant: the records of a file follow each other without a gap, from its first byte to its last;
where they do not, the file is refused with the record and the byte.
"""

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from batchd.errors import SourceInvalid
from batchd.sources.files.index import PROGRESS_EVERY
from batchd.sources.files.walk import Patterns, shards_of, shards_problems
from batchd.sources.interface import BuiltInKind
from batchd.sources.tfrecord.frames import CHECKSUM, FOOTER, HEADER, LENGTH_BYTES, masked_crc, parts_of
from batchd.sources.tfrecord.options import TFRecordSource
from batchd.storage.compression import ZLIB, compression_of
from batchd.storage.index import NUMBER, SourceIndex, blob
from batchd.storage.paths import size_of
from batchd.storage.survey import ReportProgress, Survey

RECORD_BYTES_MAX = (1 << 31) - 4096
"""Linux reads no more at once, and no protobuf message has more than 2 GiB."""
BLOCK_BYTES = 1 << 20
"""Read at once where records are shorter than this: one call for many, and the system reads on ahead."""
HEAD_BYTES = 4096
"""Read at once behind a record that is longer than a block."""
_ZLIB_METHOD, _ZLIB_METHOD_BITS, _ZLIB_DIVISOR = 8, 15, 31


def _scan(source: TFRecordSource, survey: Survey) -> SourceIndex:
    """Find the records of all files, in the order of the files' paths. Raises ``SourceInvalid``."""
    shards = shards_of(Patterns(source.root, source.shards, "shards", source.allow_outside_root), survey)
    records = _Records(survey.progress)
    firsts, sizes = [0], []
    for shard in shards:
        path = source.root / os.fsdecode(shard)
        with survey.open(path) as stream:
            sizes.append(size_of(stream))
            records.add_file(path, _Window(stream, sizes[-1], survey.looked))
        firsts.append(len(records.starts))
    survey.progress(firsts[-1])
    return SourceIndex.build(
        firsts[-1],
        {"parts": [part.fact for part in parts_of(source)], "sequence": source.sequence},
        {
            "firsts": np.array(firsts, NUMBER),
            "sizes": np.array(sizes, NUMBER),
            "starts": np.frombuffer(records.starts, np.int64).astype(NUMBER, copy=False),
            "checksums": np.frombuffer(records.checksums, np.uint32).astype(CHECKSUM, copy=False),
            "shards": blob(tuple(shards)),
        },
        {"root": os.fsdecode(source.root.absolute()), **survey.place()},
    )


class _Window:
    """The part of a file of ``size`` bytes that was read last: ``block``, whose first byte is byte ``first`` of the file."""

    def __init__(self, stream: BinaryIO, size: int, looked: Callable[[], None]) -> None:
        self.size = size
        self._looked = looked
        self.block = b""
        self._first = 0
        self._stream = stream

    @property
    def end(self) -> int:
        """The byte of the file at which the block ends."""
        return self._first + len(self.block)

    def move(self, start: int) -> None:
        """Let the block begin at byte ``start``, or behind the end of the file."""
        self._looked()
        ahead = start - self.end
        self._stream.seek(start)
        self.block = self._stream.read(BLOCK_BYTES if ahead < BLOCK_BYTES else HEAD_BYTES)
        self._first = start


class _Records:
    """What a scan finds: the place and the checksum of each record."""

    def __init__(self, progress: ReportProgress) -> None:
        self.starts = array("q")
        self.checksums = array("I")
        self._progress = progress

    def add_file(self, path: Path, window: _Window) -> None:
        """Step from record to record through a file. Raises ``SourceInvalid`` where the next step leads nowhere."""
        if window.size == 0:
            raise SourceInvalid(f"{path} is empty; leave it out of the shards")
        start = place = number = 0
        window.move(start)
        while start < window.size:
            if len(window.block) - place < HEADER.size:
                raise _cut(path, number, start, window)
            length, checksum = HEADER.unpack_from(window.block, place)
            if masked_crc(window.block[place : place + LENGTH_BYTES]) != checksum:
                raise _astray(path, number, start, window.block[place:])
            if length > RECORD_BYTES_MAX:
                raise SourceInvalid(
                    f"{path}: record {number} at byte {start} says that it has {length} bytes, and no record may have more than "
                    f"{RECORD_BYTES_MAX}; write the file anew"
                )
            end = start + HEADER.size + length + FOOTER.size
            place += HEADER.size + length
            if len(window.block) - place < FOOTER.size + HEADER.size and window.end < window.size:
                window.move(end - FOOTER.size)
                place = 0
            if len(window.block) - place < FOOTER.size or end > window.size:
                raise _cut(path, number, start, window)
            self.starts.append(start)
            self.checksums.append(FOOTER.unpack_from(window.block, place)[0])
            if len(self.starts) % PROGRESS_EVERY == 0:
                self._progress(len(self.starts))
            start, place, number = end, place + FOOTER.size, number + 1


def _cut(path: Path, number: int, start: int, window: _Window) -> SourceInvalid:
    """What to raise where a file ends too soon; it may have become shorter since it was opened."""
    return SourceInvalid(
        f"{path} is cut: it ends at byte {min(window.size, window.end)}, within record {number}, which begins at byte {start}; "
        "copy it again"
    )


def _astray(path: Path, number: int, start: int, data: bytes) -> SourceInvalid:
    """What to raise where there is no record: compressed files, others, and damaged ones."""
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
        problems=lambda source, storage: shards_problems(source.root, source.shards, storage),
        columns=lambda source, _storage: source.columns,
        scan=_scan,
    )
}
