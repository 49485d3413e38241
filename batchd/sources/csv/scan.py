"""Tables in CSV format: which bytes of which file are a record. Daemon.

    a.csv, 1.2 GB            index: 8 bytes for a record           worker: pread, split, read the cells
    title,title              starts  | 12 | 57 | 103 | ...
    1,"two lines             ends    | end of a.csv | of b.csv | ...

The daemon reads all files once, in blocks, and notes where records begin; workers read them one by
one, in any order.

Invariant: what is no table, or has not the columns that are asked for, is refused at the scan; what
is wrong with one record is found by whoever reads it, and makes one bad sample.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchd.errors import KeyPath, SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.csv.options import CsvSource
from batchd.sources.csv.reader import IMAGE, CsvReader
from batchd.sources.csv.records import RecordFinder
from batchd.sources.csv.values import split_record
from batchd.sources.files.walk import file_to_look_at, files_of, files_problems
from batchd.sources.interface import BuiltInKind, SourceProblem
from batchd.storage.access import Storage
from batchd.storage.index import NUMBER, SourceIndex
from batchd.storage.survey import Survey, quick_look
from batchd.suggestions import suggestion


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


KIND = BuiltInKind(problems=_problems, columns=_columns, scan=_scan, open=CsvReader)
