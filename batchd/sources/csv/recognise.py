"""Recognise tables: their delimiter, the types of their columns, and a column of images. CLI.

The types come from the first records. Quotes are text if tables are damaged otherwise, or if each
line of each record of several lines has a cell for each title by itself. A column of paths becomes
the image if its first file exists: beside the table, or in a folder below the place.
"""

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from batchd.errors import SourceInvalid
from batchd.samples.columns import parse_column
from batchd.sources import recognise
from batchd.sources.csv.options import CsvSource
from batchd.sources.csv.scan import QuotesMisplaced, RecordFinder
from batchd.sources.csv.values import IMAGE, cell_reader, split_record
from batchd.sources.files.options import FolderSource
from batchd.sources.interface import FoundFiles, Recognised
from batchd.storage.index import readable
from batchd.storage.survey import Survey

_DELIMITERS = ",\t;|"


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names, notes, path = recognise.training_files(files, CsvSource)
    first = _first_line(path, survey)
    delimiter = max(_DELIMITERS, key=first.count)
    paths = [files.root / os.fsdecode(name) for name in names]
    has_text_quotes = any(_has_text_quotes(path, delimiter, survey) for path in paths)
    quoting: Literal["double", "none"] = "none" if has_text_quotes else "double"
    titles, records = _records(path, delimiter, quoting, survey)
    for name in names[1:]:
        other = files.root / os.fsdecode(name)
        if _first_line(other, survey) != first:
            raise SourceInvalid(
                f"{path} and {other} have different titles, so they are not one table; name one of them"
            )
    image = next((title for number, title in enumerate(titles) if _is_image(records, number)), None)
    image_root = None
    if image is not None:
        image_root = root_of_images(files, path, records[0][titles.index(image)], survey)
        image = None if image_root is None else image
    cells = {title: [record[number] for record in records] for number, title in enumerate(titles) if title != image}
    found = {title: _type(values) for title, values in cells.items() if titles.count(title) == 1}
    types = {title: text for title, text in found.items() if text is not None}
    left_out = [title for title in dict.fromkeys(titles) if title not in types and title != image]
    fields = recognise.named_fields({**types, **({IMAGE: "image"} if image is not None else {})})
    fields.fields.pop(IMAGE if image is not None else "", None)
    images = (
        [name for name in files.names if recognise.ending_of(name) in FolderSource.endings] if image is not None else []
    )
    is_one = len(names) == 1
    source = CsvSource(
        path=path if is_one else None,
        root=None if is_one else files.root,
        files=() if is_one else recognise.patterns_of(files, names),
        fields=fields.fields,
        names=fields.names,
        image=image or "",
        image_root=None if image_root in (None, path.parent) else image_root,
        delimiter=delimiter,
        quoting=quoting,
    )
    notes = (*notes, *(["quotes are characters of the values: see quoting"] if has_text_quotes else ()))
    return Recognised(source, [*names, *images], (*notes, *recognise.left_out_note("column", left_out)))


def _first_line(path: Path, survey: Survey) -> str:
    with survey.open(path) as stream:
        return stream.readline(1 << 16).decode("utf-8", "replace").strip()


def _has_text_quotes(path: Path, delimiter: str, survey: Survey) -> bool:
    """True if the quotes of a table cannot, or hardly, stand around values. Reads all of it."""
    separator = delimiter.encode()
    wanted, found = 0, set[int]()
    try:
        with survey.open(path) as stream:
            for run in RecordFinder(path, delimiter, "double").pieces(stream):
                wanted = wanted or run.record(0).count(separator)
                broken = map(run.record, run.broken.tolist())
                found |= {line.count(separator) for record in broken for line in record.split(b"\n") if line.strip()}
    except QuotesMisplaced:
        return True
    return wanted > 0 and found == {wanted}


def _records(path: Path, delimiter: str, quoting: str, survey: Survey) -> tuple[list[str], list[list[str]]]:
    """The titles and the first records of a table. Raises ``SourceInvalid``."""
    with survey.open(path) as stream:
        run = next(RecordFinder(path, delimiter, quoting).pieces(stream), None)
    if run is None:
        raise SourceInvalid(f"{path} is empty")
    ends = [*run.starts[1:].tolist(), run.end]
    spans = islice(zip(run.starts.tolist(), ends, strict=True), recognise.LOOKED_AT + 1)
    try:
        titles, *records = (
            split_record(run.data[start - run.first_byte : end - run.first_byte], delimiter, quoting)
            for start, end in spans
        )
    except ValueError as error:
        raise SourceInvalid(f"{path}: a record {error}") from None
    good = [record for record in records if len(record) == len(titles)]
    if not good:
        raise SourceInvalid(f"{path} has no record after its titles")
    return titles, good


def _is_image(records: Sequence[Sequence[str]], number: int) -> bool:
    return all(recognise.ending_of(os.fsencode(record[number])) in FolderSource.endings for record in records)


def root_of_images(files: FoundFiles, path: Path, value: str, survey: Survey) -> Path | None:
    """The folder to which the paths of a table are relative; None if the first file is missing."""
    if not survey.storage.at(path).file_problems(path.parent / value, "the image"):
        return path.parent
    end = b"/" + os.fsencode(value)
    found = next((name for name in files.names if name.endswith(end)), None)
    return None if found is None else files.root / readable(found[: -len(end)])


def _type(cells: Sequence[str]) -> str | None:
    """The type of a column by its first cells; None if some are empty."""
    if not all(cells):
        return None
    counts = {len(cell.split()) for cell in cells}
    shape = f"[{counts.pop()}]" if len(counts) == 1 and counts != {1} else ""
    for text in (f"int64{shape}", f"float32{shape}"):
        read = cell_reader(parse_column(recognise.field_name("cell"), text))
        try:
            for cell in cells:
                read(cell)
        except ValueError:
            continue
        return text
    return "text"


RECOGNISE = {CsvSource: _recognise}
