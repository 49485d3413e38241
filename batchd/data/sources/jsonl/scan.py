"""Find the lines of files in JSON Lines. Daemon.

    a.jsonl, 1.2 GB          index: 8 bytes for a line           worker: pread, parse, convert
    {"id": 1} LF             starts  | 0 | 10 | 21 | ...
    CR LF                    a blank line, which belongs to the line before it
    {"id": 2} LF

The daemon reads all files once, in blocks, and notes the start of each line; workers read lines one
by one, in any order. JSON has no line end within a value, so nothing is parsed here. The first
character of a file tells files of other formats.

Invariant: the scan finds all lines that are not blank, in order, and keeps a few bytes of a line in
memory, however long it is. An error in a line makes one bad sample, when it is read.
"""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np

from batchd.data.sources.csv.scan import BLOCK_BYTES, UTF_16, Places, record_starts
from batchd.data.sources.csv.values import BYTE_ORDER_MARK
from batchd.data.sources.files.walk import shards_of, shards_problems
from batchd.data.sources.finding import find_in_records
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.neighbours import Neighbours, in_records
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, number_array
from batchd.data.storage.survey import Survey, compression_of
from batchd.errors import SourceInvalid

_LINE_FEED = b"\n"[0]
_WHITE_SPACE = b" \t\r\n"
_SHORT_BYTES = 2
"""How a line begins suffices to know that it is not blank: a blank one is LF, or CR LF."""


class LineFinder:
    """Finds the lines of one file. ``end`` and ``checksum`` (CRC-32) are of all bytes so far."""

    def __init__(self, path: Path) -> None:
        self.end = 0
        self.checksum = 0
        self._path = path

    def starts(self, stream: BinaryIO) -> Iterator[Places]:
        """The first bytes of the lines of each block, int64 ``[lines]``, in order.

        Raises ``SourceInvalid`` for another format.
        """
        start, begun = 0, b""  # of the line that has no end yet: its first byte, and how it begins
        is_known = False
        while block := stream.read(max(BLOCK_BYTES, len(BYTE_ORDER_MARK))):
            self.checksum = crc32(block, self.checksum)
            data = begun + (block if self.end else block.removeprefix(BYTE_ORDER_MARK))
            self.end += len(block)
            before = self.end - len(data)
            start = start if begun else before
            if not is_known and (first := data.lstrip(_WHITE_SPACE)):
                self._check_format(first)
                is_known = True
            characters = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(characters == _LINE_FEED)
            found = record_starts(characters, ends)
            yield np.where(found == 0, start, found + before)
            if len(ends):
                start = before + int(ends[-1]) + 1
                data = data[start - before :]
            begun = data[:_SHORT_BYTES]
        if begun.strip(b"\r"):
            yield np.array([start], np.int64)

    def _check_format(self, first: bytes) -> None:
        """Refuse a file whose ``first`` characters do not begin an object."""
        if first.startswith(b"{"):
            return
        found = compression_of(first)
        if found is not None:
            raise SourceInvalid(
                f"{self._path} is compressed ({found.name}), so its lines cannot be read one by one; unpack it: "
                f"{found.unpack} < FILE > UNPACKED"
            )
        if first.startswith(b"["):
            raise SourceInvalid(
                f"{self._path} begins with '[': it is a list, and not an object on each line; convert it: "
                "jq -c '.[]' FILE > FILE.jsonl"
            )
        if first.startswith(UTF_16):
            raise SourceInvalid(f"{self._path} is UTF-16; save it as UTF-8")
        raise SourceInvalid(
            f"{self._path} begins with {first[:8]!r}, and JSON Lines with {{, as each line is an object"
        )


def _scan(source: JsonlSource, survey: Survey) -> SourceIndex:
    starts: array[int] = array("q")
    contents: list[list[int]] = []
    shards = shards_of(source, survey)
    files = [source.root.absolute() / os.fsdecode(shard) for shard in shards]
    for path in files:
        before = len(starts)
        finder = LineFinder(path)
        with survey.open(path) as stream:
            for found in finder.starts(stream):
                starts.frombytes(found.astype(np.int64, copy=False).tobytes())
                survey.progress(len(starts))
        if len(starts) == before:
            raise SourceInvalid(f"{path} has no line that is not blank; leave it out of the shards")
        contents.append([len(starts) - before, finder.end, finder.checksum])
    fields = [[one.text, one.name, source.name_of(one.name), source.defaults.get(one.name)] for one in source.columns]
    root = None if source.image_root is None else str(source.image_root.absolute())
    place = {"files": list(map(str, files)), "image_root": root, **survey.place()}
    return SourceIndex.build(
        len(starts), {"files": contents, "fields": fields}, {"starts": number_array(starts)}, place
    )


def _problems(source: JsonlSource, storage: Storage) -> list[str]:
    problems = shards_problems(source, storage)
    if source.image_root is not None:
        problems += storage.at(source.image_root).folder_problems(source.image_root)
    return problems


def _neighbours(source: JsonlSource, index: SourceIndex) -> Neighbours:
    has_images = bool(source.images)
    return in_records(index, "the index has no sizes of the images that the lines name" if has_images else "")


KINDS = {
    JsonlSource: BuiltInKind(
        problems=_problems,
        scan=_scan,
        neighbours=_neighbours,
        find=lambda _source, index, pattern: find_in_records(pattern, index),
    )
}
