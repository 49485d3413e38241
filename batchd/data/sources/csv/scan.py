"""Find the records of tables in CSV format. Daemon.

    a.csv, 1.2 GB            index: 8 bytes for a record         worker: pread, split, convert
    title,title              starts  | 12 | 57 | 103 | ...
    1,"two lines             ends    | end of a.csv | of b.csv | ...

The daemon reads all files once, in blocks, and notes the start of each record; workers read records
one by one, in any order.

    title,other CR LF  1,"two LF lines" LF  LF  3,"a ""quoted"" word" LF
    ^ header           ^ record 1           |   ^ record 2            ^ end
                                            a blank line, which belongs to the record before it

A record ends with a line, unless the end of the line is quoted: behind an odd number of quotes. The
count is right only if quotes are where RFC 4180 allows them, so every quote is checked: an opening
one follows a delimiter or the end of a line, a closing one precedes one. All of this works on whole
blocks, in numpy, and quotes cost time only where there are some. Two quotes that are text may look
like that, too, and hide the records between them: so records of several lines are noted. Without
quoting, each line is a record.

Invariant: the scan finds all records, in order, and none is cut. It refuses a file that is no
table, lacks a column, or is ambiguous. An error in one record makes one bad sample, when it is
read.
"""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.csv.values import BYTE_ORDER_MARK, IMAGE, TOO_LONG, split_record
from batchd.data.sources.files.walk import file_to_look_at, files_of, files_problems
from batchd.data.sources.finding import find_in_records
from batchd.data.sources.interface import BuiltInKind, SourceProblem
from batchd.data.sources.neighbours import Neighbours, in_records
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, blob, number_array
from batchd.data.storage.survey import Survey, quick_look
from batchd.errors import KeyPath, SourceInvalid
from batchd.runtime.suggestions import suggestion

BLOCK_BYTES = 256 << 10
"""Fits into the cache of a core, with the arrays that are made of it."""
RECORD_BYTES_MAX = 64 << 20
_LINE_FEED, _CARRIAGE_RETURN, _QUOTE = b"\n"[0], b"\r"[0], b'"'[0]
UTF_16 = (b"\xff\xfe", b"\xfe\xff")

Places = NDArray[np.int64]


class QuotesMisplaced(SourceInvalid):
    """Quotes are not where RFC 4180 allows them, or one is never closed."""


class RecordRun(NamedTuple):
    """Whole records of a file. ``starts``: their first bytes; ``end``: behind the last one."""

    data: bytes
    first_byte: int
    starts: Places
    end: int
    broken: Places
    """The numbers, among these, of the records with line ends in their cells."""

    def record(self, number: int) -> bytes:
        """One of the records."""
        end = int(self.starts[number + 1]) if number + 1 < len(self.starts) else self.end
        return self.data[int(self.starts[number]) - self.first_byte : end - self.first_byte]


class RecordFinder:
    """Finds the records of one file. ``end`` and ``checksum`` (CRC-32) are of all bytes so far."""

    def __init__(self, path: Path, delimiter: str, quoting: str, *, has_header: bool = True) -> None:
        self.end = 0
        self.checksum = 0
        self._path = path
        self._has_quotes = quoting != "none"
        self._found = 0 if has_header else 1
        self._may_stand_before = _table(delimiter, "\n", '"')
        self._may_stand_after = _table(delimiter, "\r", "\n", '"')

    def pieces(self, stream: BinaryIO) -> Iterator[RecordRun]:
        """All records of the file, with the header. Raises ``SourceInvalid``."""
        start = stream.read(len(BYTE_ORDER_MARK))
        if start.startswith(UTF_16):
            raise SourceInvalid(f"{self._path} is UTF-16; save it as UTF-8")
        self._count(start)
        waiting = start.removeprefix(BYTE_ORDER_MARK)
        first_byte = self.end - len(waiting)
        is_last = False
        while not is_last:
            block = stream.read(max(BLOCK_BYTES, len(waiting)))
            is_last = not block
            self._count(block)
            data = waiting + block
            starts, used, inside = self._records(data, first_byte, is_last=is_last)
            if len(starts):
                broken = np.unique(np.searchsorted(starts, inside, "right") - 1)
                yield RecordRun(data, first_byte, starts + first_byte, first_byte + used, broken)
            self._found += len(starts)
            waiting, first_byte = data[used:], first_byte + used
            if len(waiting) > RECORD_BYTES_MAX:
                none = np.empty(0, np.int64)
                reason = f"has no end within {RECORD_BYTES_MAX} bytes: a quote is missing, or {TOO_LONG}"
                raise self._refusal(np.frombuffer(waiting, np.uint8), none, first_byte, reason)

    def _count(self, block: bytes) -> None:
        if (place := block.find(b"\0")) >= 0:
            raise SourceInvalid(
                f"{self._path} has a character NUL at byte {self.end + place}; a table is plain text, in UTF-8 and not compressed"
            )
        self.end += len(block)
        self.checksum = crc32(block, self.checksum)

    def _records(self, data: bytes, first_byte: int, *, is_last: bool) -> tuple[Places, int, Places]:
        """The records that end in ``data``: their starts, their bytes, and line ends in cells."""
        characters = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(characters == _LINE_FEED)
        inside = ends[:0]
        if self._has_quotes and b'"' in data:
            lines, ends = ends, self._outside_quotes(characters, ends, first_byte, is_last=is_last)
            inside = np.setdiff1d(lines, ends, assume_unique=True)
        if is_last and data and (not len(ends) or ends[-1] != len(data) - 1):
            ends = np.append(ends, len(data))
        used = min(int(ends[-1]) + 1, len(data)) if len(ends) else 0
        return record_starts(characters, ends), used, inside[inside < used]

    def _outside_quotes(self, characters: NDArray[np.uint8], ends: Places, first_byte: int, *, is_last: bool) -> Places:
        """The ends of lines that are ends of records."""
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
                'in it stands in quotes, and those in it are doubled; where quotes are text, set quoting = "none"'
            )
            raise self._refusal(characters, outside[outside < first], first_byte, reason)
        if is_last and len(quotes) % 2:
            reason = (
                f"has a quote at byte {first_byte + int(quotes[-1])} that is never closed; where quotes are text, set "
                'quoting = "none"'
            )
            raise self._refusal(characters, outside[outside < quotes[-1]], first_byte, reason)
        return outside

    def _refusal(self, characters: NDArray[np.uint8], before: Places, first_byte: int, reason: str) -> QuotesMisplaced:
        """The error about the record after those that end at ``before``."""
        start = first_byte + (int(before[-1]) + 1 if len(before) else 0)
        number = self._found + len(record_starts(characters, before))
        record = f"record {number}" if number else "the header"
        return QuotesMisplaced(f"{self._path}: {record}, which begins at byte {start}, {reason}")


def record_starts(characters: NDArray[np.uint8], ends: Places) -> Places:
    """The starts of the records that end at ``ends``, without blank lines."""
    starts: Places = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1] + 1])
    short = ends - starts <= 1
    if not short.any():
        return starts
    wanted: Places = starts[~(short & ((ends == starts) | (characters[starts] == _CARRIAGE_RETURN)))]
    return wanted


def _table(*characters: str) -> NDArray[np.bool_]:
    """True for the bytes of ``characters``: bool ``[256]``."""
    table = np.zeros(256, np.bool_)
    table[[ord(character) for character in characters]] = True
    return table


def _columns(source: CsvSource, _storage: Storage) -> tuple[Column, ...]:
    image = (Column(IMAGE, "encoded"),) if source.image else ()
    return *image, *source.columns


def _scan(source: CsvSource, survey: Survey) -> SourceIndex:
    starts: array[int] = array("q")
    contents: list[list[int]] = []
    files = files_of(source, survey)
    titles: list[str] = []
    for path in files:
        found = len(starts)
        finder = RecordFinder(path, source.delimiter, source.quoting, has_header=source.header)
        header: list[str] | None = None
        with survey.open(path) as stream:
            for piece in finder.pieces(stream):
                records = piece.starts
                before = len(starts) - found + (header is not None or not source.header)
                _note_broken(path, piece, before, survey)
                if header is None:
                    header = _header(path, piece.record(0), source)
                    records = records[1:] if source.header else records
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
        "cells": {column.name: _cells_of(source, column, titles) for column in source.columns},
        "image": titles.index(source.image) if source.image else None,
        "delimiter": source.delimiter,
        **({} if source.header else {"header": False}),
        **({} if source.quoting == "double" else {"quoting": source.quoting}),
    }
    root = None if source.image_root is None else str(source.image_root.absolute())
    place = {"files": list(map(str, files)), "image_root": root, **survey.place()}
    arrays = {"starts": number_array(starts)}
    if source.classes:
        arrays["classes"] = blob([name.encode() for name in source.classes])
    return SourceIndex.build(len(starts), facts, arrays, place)


def _note_broken(path: Path, piece: RecordRun, before: int, survey: Survey) -> None:
    """Note the records of several lines; ``before``: the records in front of the piece."""
    if len(piece.broken):
        first = int(piece.broken[0])
        where = f"{path}: record {before + first}" if before + first else f"{path}: the header"
        advice = 'if the quotes around them are text, set quoting = "none"'
        place = f"{where} (byte {piece.starts[first]})"
        survey.note("records with line ends inside a cell", place, advice, len(piece.broken))


def titles_of(source: CsvSource, column: Column, header: Sequence[str]) -> tuple[str, ...]:
    """The titles of a field: several if it has braces, and no column is called so."""
    name = source.name_of(column.name)
    return (name,) if name in header else source.names_of(column)


def _cells_of(source: CsvSource, column: Column, header: Sequence[str]) -> int | list[int]:
    """The number of the column of a field, or the numbers of several."""
    places = [header.index(title) for title in titles_of(source, column, header)]
    return places if len(places) > 1 else places[0]


def _header(path: Path, record: bytes, source: CsvSource) -> list[str]:
    if b"\r" in record and b"\n" not in record:
        raise SourceInvalid(f"{path} ends its lines with CR alone; save it with LF, or CR and LF")
    try:
        titles = split_record(record, source.delimiter, source.quoting)
    except ValueError as error:
        raise SourceInvalid(f"{path}: the {'header' if source.header else 'first record'} {error}") from None
    return titles if source.header else list(map(str, range(len(titles))))


def _check_titles(source: CsvSource, path: Path, header: Sequence[str], first: Sequence[str]) -> None:
    """Refuse a header that lacks a column, or differs from that of the first file."""
    if wrong := _wrong_titles(source, path, header):
        raise SourceInvalid("; ".join(problem.text for problem in wrong))
    if list(header) != list(first):
        raise SourceInvalid(f"{path} has the titles {list(header)}, and the first file has {list(first)}")


def _wrong_titles(source: CsvSource, path: Path, header: Sequence[str]) -> list[SourceProblem]:
    """Each title that is not in the header exactly once, at the key that names it."""
    asked: list[tuple[KeyPath, str]] = [
        (("names" if column.name in source.names else "fields", column.name), title)
        for column in source.columns
        for title in titles_of(source, column, header)
    ]
    if source.image:
        asked.append((("image",), source.image))
    alone = "; is the delimiter another one?" if len(header) == 1 else ""
    found = []
    for key, title in asked:
        count = header.count(title)
        if count > 1:
            text = f"{path}: {count} columns have the title {title!r}, so it is unclear which one is meant"
            found.append(SourceProblem(key, text))
        elif not count:
            text = f"{path} has no column {title!r}; {suggestion(title, header)}{alone}"
            found.append(SourceProblem(key, text))
    return found


def _problems(source: CsvSource, storage: Storage) -> Sequence[str | SourceProblem]:
    """Problems of a table; reads its header, so a wrong title is found here."""
    problems: list[str | SourceProblem] = [*files_problems(source, "the table", storage)]
    if source.image_root is not None:
        problems += storage.at(source.image_root).folder_problems(source.image_root)
    if problems:
        return problems
    path = source.path or file_to_look_at(source)
    if path is not None:
        with quick_look(storage).open(path) as stream:
            piece = next(
                RecordFinder(path, source.delimiter, source.quoting, has_header=source.header).pieces(stream), None
            )
            if piece is None:
                raise SourceInvalid(f"{path} is empty")
            problems += _wrong_titles(source, path, _header(path, piece.record(0), source))
    return problems


def _neighbours(source: CsvSource, index: SourceIndex) -> Neighbours:
    return in_records(index, "the index has no sizes of the files that the table names" if source.names_files else "")


KINDS = {
    CsvSource: BuiltInKind(
        problems=_problems,
        columns=_columns,
        scan=_scan,
        neighbours=_neighbours,
        find=lambda _source, index, pattern: find_in_records(pattern, index),
    )
}
