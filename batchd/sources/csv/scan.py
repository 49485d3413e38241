"""Tables in CSV format: which bytes of which file are a record. Daemon.

    a.csv, 1.2 GB            index: 8 bytes for a record           worker: pread, split, read the cells
    title,title              starts  | 12 | 57 | 103 | ...
    1,"two lines             ends    | end of a.csv | of b.csv | ...

The daemon reads all files once, in blocks, and notes where records begin; workers read them one by
one, in any order.

    title,other CR LF  1,"two LF lines" LF  LF  3,"a ""quoted"" word" LF
    ^ header           ^ record 1           |   ^ record 2            ^ end
                                            a blank line, which belongs to the record before it

Records end where lines end, unless that is within quotes: where an odd number of quotes stands
before it. That counts right only if quotes stand where RFC 4180 has them, so every quote is looked
at: one that opens a value follows a delimiter or the end of a line, and one that closes it comes
before one. All of this is done on whole blocks, by numpy, and quotes cost only where there are
some.

Invariant: what is no table, or has not the columns that are asked for, is refused at the scan; what
is wrong with one record is found by whoever reads it, and makes one bad sample. No record is cut, and
what cannot be told apart for sure is refused.
"""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from batchd.errors import KeyPath, SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.csv.options import CsvSource
from batchd.sources.csv.values import BYTE_ORDER_MARK, IMAGE, TOO_LONG, split_record
from batchd.sources.files.walk import file_to_look_at, files_of, files_problems
from batchd.sources.interface import BuiltInKind, SourceProblem
from batchd.storage.access import Storage
from batchd.storage.index import NUMBER, SourceIndex
from batchd.storage.survey import Survey, quick_look
from batchd.suggestions import suggestion

BLOCK_BYTES = 256 << 10
"""What fits into the cache of a core, with the arrays that are made of it."""
RECORD_BYTES_MAX = 64 << 20
_LINE_FEED, _CARRIAGE_RETURN, _QUOTE = b"\n"[0], b"\r"[0], b'"'[0]
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")

Places = NDArray[np.int64]


class RecordRun(NamedTuple):
    """Some whole records of a file. ``starts``: the bytes of the file where they begin; ``end``: where the last one ends."""

    data: bytes
    first_byte: int
    starts: Places
    end: int

    @property
    def first(self) -> bytes:
        """The first record."""
        last = int(self.starts[1]) if len(self.starts) > 1 else self.end
        return self.data[int(self.starts[0]) - self.first_byte : last - self.first_byte]


class RecordFinder:
    """Finds the records of one file. ``end`` and ``checksum`` (CRC-32) are those of all bytes seen so far."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self.end = 0
        self.checksum = 0
        self._path = path
        self._found = 0
        self._may_stand_before = _table(delimiter, "\n", '"')
        self._may_stand_after = _table(delimiter, "\r", "\n", '"')

    def pieces(self, stream: BinaryIO) -> Iterator[RecordRun]:
        """All records from the start of the file, the header among them. Raises ``SourceInvalid``."""
        waiting = self._beginning(stream)
        first_byte = self.end - len(waiting)
        is_last = False
        while not is_last:
            block = stream.read(max(BLOCK_BYTES, len(waiting)))
            is_last = not block
            self._count(block)
            data = waiting + block
            starts, used = self._records(data, first_byte, is_last=is_last)
            if len(starts):
                yield RecordRun(data, first_byte, starts + first_byte, first_byte + used)
            self._found += len(starts)
            waiting, first_byte = data[used:], first_byte + used
            if len(waiting) > RECORD_BYTES_MAX:
                none = np.empty(0, np.int64)
                reason = f"has no end within {RECORD_BYTES_MAX} bytes: a quote is missing, or {TOO_LONG}"
                raise self._refusal(np.frombuffer(waiting, np.uint8), none, first_byte, reason)

    def _beginning(self, stream: BinaryIO) -> bytes:
        """The first bytes, without a byte order mark."""
        start = stream.read(len(BYTE_ORDER_MARK))
        if start.startswith(_UTF_16):
            raise SourceInvalid(f"{self._path} is UTF-16; save it as UTF-8")
        self._count(start)
        return start.removeprefix(BYTE_ORDER_MARK)

    def _count(self, block: bytes) -> None:
        if (place := block.find(b"\0")) >= 0:
            raise SourceInvalid(
                f"{self._path} has a character NUL at byte {self.end + place}; a table is plain text, in UTF-8 and not compressed"
            )
        self.end += len(block)
        self.checksum = crc32(block, self.checksum)

    def _records(self, data: bytes, first_byte: int, *, is_last: bool) -> tuple[Places, int]:
        """Where records begin in ``data``, and how many bytes those take that end in there."""
        characters = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(characters == _LINE_FEED)
        if b'"' in data:
            ends = self._outside_quotes(characters, ends, first_byte, is_last=is_last)
        if is_last and data and (not len(ends) or ends[-1] != len(data) - 1):
            ends = np.append(ends, len(data))
        return _starts(characters, ends), min(int(ends[-1]) + 1, len(data)) if len(ends) else 0

    def _outside_quotes(self, characters: NDArray[np.uint8], ends: Places, first_byte: int, *, is_last: bool) -> Places:
        """Those ends of lines that are ends of records."""
        quotes = np.flatnonzero(characters == _QUOTE)
        outside: Places = ends[np.searchsorted(quotes, ends) % 2 == 0]
        opening, closing = quotes[::2], quotes[1::2]
        before = opening[opening > 0] - 1
        after = closing[closing < len(characters) - 1] + 1
        wrong = np.concatenate(
            [
                before[~self._may_stand_before[characters[before]]] + 1,
                after[~self._may_stand_after[characters[after]]] - 1,
            ]
        )
        if len(wrong):
            first = int(wrong.min())
            reason = (
                f"has a quote at byte {first_byte + first} that neither begins nor ends a value; a value with quotes "
                "in it stands in quotes, and those in it are doubled"
            )
            raise self._refusal(characters, outside[outside < first], first_byte, reason)
        if is_last and len(quotes) % 2:
            reason = f"has a quote at byte {first_byte + int(quotes[-1])} that is never closed"
            raise self._refusal(characters, outside[outside < quotes[-1]], first_byte, reason)
        return outside

    def _refusal(self, characters: NDArray[np.uint8], before: Places, first_byte: int, reason: str) -> SourceInvalid:
        """Name the record behind those that end at ``before``."""
        start = first_byte + (int(before[-1]) + 1 if len(before) else 0)
        number = self._found + len(_starts(characters, before))
        record = f"record {number}" if number else "the header"
        return SourceInvalid(f"{self._path}: {record}, which begins at byte {start}, {reason}")


def _starts(characters: NDArray[np.uint8], ends: Places) -> Places:
    """Where the records begin that end at ``ends``, without blank lines."""
    starts: Places = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1] + 1])
    short = ends - starts <= 1
    if not short.any():
        return starts
    wanted: Places = starts[~(short & ((ends == starts) | (characters[starts] == _CARRIAGE_RETURN)))]
    return wanted


def _table(*characters: str) -> NDArray[np.bool_]:
    """Which bytes are one of the characters."""
    table = np.zeros(256, np.bool_)
    table[[ord(character) for character in characters]] = True
    return table


def _columns(source: CsvSource, _storage: Storage) -> tuple[Column, ...]:
    image = (Column(IMAGE, "encoded"),) if source.image else ()
    return *image, *source.parsed_fields()


def _scan(source: CsvSource, survey: Survey) -> SourceIndex:
    """Find the records of all files. Raises ``SourceInvalid``."""
    starts: array[int] = array("q")
    contents: list[list[int]] = []
    files = files_of(source, survey)
    titles: list[str] = []
    for path in files:
        found = len(starts)
        finder = RecordFinder(path, source.delimiter)
        header: list[str] | None = None
        with survey.open(path) as stream:
            for piece in finder.pieces(stream):
                records = piece.starts
                if header is None:
                    header, records = _header(path, piece.first, source.delimiter), records[1:]
                    titles = titles or header
                    _check_titles(source, path, header, titles)
                starts.frombytes(records.astype(np.int64, copy=False).tobytes())
                survey.progress(len(starts))
        if len(starts) == found:
            what = "holds no record behind its titles" if header else "is empty"
            raise SourceInvalid(f"{path} {what}" + ("; leave it out of the files" if len(files) > 1 else ""))
        contents.append([len(starts) - found, finder.end, finder.checksum])
    facts = {
        "files": contents,
        "titles": titles,
        "cells": {name: titles.index(source.title(name)) for name in source.fields},
        "image": titles.index(source.image) if source.image else None,
        "delimiter": source.delimiter,
    }
    root = source.image_root
    place: dict[str, object] = {
        "files": [str(path) for path in files],
        "image_root": None if root is None else str(root.absolute()),
    }
    place |= survey.place()
    numbers = np.frombuffer(starts, np.int64).astype(NUMBER, copy=False)
    return SourceIndex.build(len(starts), facts, {"starts": numbers}, place)


def _header(path: Path, record: bytes, delimiter: str) -> list[str]:
    """The titles that the first record of a file holds."""
    if b"\r" in record and b"\n" not in record:
        raise SourceInvalid(f"{path} ends its lines with CR alone; save it with LF, or CR and LF")
    try:
        return split_record(record, delimiter)
    except ValueError as error:
        raise SourceInvalid(f"{path}: the header {error}") from None


def _check_titles(source: CsvSource, path: Path, header: Sequence[str], first: Sequence[str]) -> None:
    """Refuse a header without all columns that are asked for, or unlike that of the first file."""
    wrong = _wrong_titles(source, path, header)
    if wrong:
        raise SourceInvalid("; ".join(problem.text for problem in wrong))
    if list(header) != list(first):
        raise SourceInvalid(f"{path} has the titles {list(header)}, and the first file has {list(first)}")


def _wrong_titles(source: CsvSource, path: Path, header: Sequence[str]) -> list[SourceProblem]:
    """Each title that is asked for and does not stand in the header once, at the key that asks for it."""
    asked: list[tuple[KeyPath, str]] = [
        (("names" if name in source.names else "fields", name), source.title(name)) for name in source.fields
    ]
    if source.image:
        asked.append((("image",), source.image))
    alone = "; is the delimiter another one?" if len(header) == 1 else ""
    found = []
    for key, title in asked:
        count = header.count(title)
        if count > 1:
            text = f"{path}: {count} columns have the title {title!r}, so nobody can tell which is meant"
            found.append(SourceProblem(key, text))
        elif not count:
            text = f"{path} has no column {title!r}; {suggestion(title, header)}{alone}"
            found.append(SourceProblem(key, text))
    return found


def _problems(source: CsvSource, storage: Storage) -> Sequence[str | SourceProblem]:
    """A header is read here too, so that a wrong title is found before the daemon starts."""
    problems: list[str | SourceProblem] = [
        *files_problems(source.path, source.root, source.files, "the table", storage)
    ]
    if source.image_root is not None:
        problems += storage.at(source.image_root).folder_problems(source.image_root)
    path = source.path if source.root is None else None
    if not problems and source.root is not None:
        path = file_to_look_at(source.root, source.files, "files")
    if not problems and path is not None:
        finder = RecordFinder(path, source.delimiter)
        with quick_look(storage).open(path) as stream:
            piece = next(finder.pieces(stream), None)
            if piece is None:
                raise SourceInvalid(f"{path} is empty")
            header = _header(path, piece.first, source.delimiter)
            problems += _wrong_titles(source, path, header)
    return problems


KINDS = {CsvSource: BuiltInKind(problems=_problems, columns=_columns, scan=_scan)}
