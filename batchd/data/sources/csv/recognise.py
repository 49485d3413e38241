"""Recognise tables: their delimiter, the types of their columns, and a column of images. CLI.

The types come from the first ``CELLS_MAX`` cells. Quotes are text if tables are damaged otherwise,
or if each line of each record of several lines has a cell for each title by itself. A column of
paths becomes the image if its first file exists: beside the table, or in a folder below the place.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from batchd.data.samples.columns import parse_column
from batchd.data.sources import recognise
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.csv.scan import QuotesMisplaced, RecordFinder
from batchd.data.sources.csv.values import IMAGE, cell_reader, split_record
from batchd.data.sources.files.options import IMAGE_ENDINGS
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.storage.index import readable
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.wording import counted

_DELIMITERS = ",\t;|"
CELLS_MAX = 500_000
"""Cells that the types come from."""
CLASSES_MAX = 1000
"""More different texts are no classes."""
CLASS_CHARACTERS = 40
FLOAT64_WHOLE = 1 << 53
_WHOLE = re.compile(r"[+-]?[0-9]+")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names, parts, _path = recognise.training_files(files, CsvSource)
    heads = {name: _first_line(files.root / os.fsdecode(name), survey) for name in names}
    first = Counter(heads.values()).most_common(1)[0][0]
    names, others = [name for name in names if heads[name] == first], [name for name in names if heads[name] != first]
    paths = [files.root / os.fsdecode(name) for name in names]
    path = paths[0]
    delimiter = max(_DELIMITERS, key=first.count)
    has_text_quotes = any(_has_text_quotes(path, delimiter, survey) for path in paths)
    quoting: Literal["double", "none"] = "none" if has_text_quotes else "double"
    titles, records, is_whole = _records(path, delimiter, quoting, survey)
    is_whole &= len(names) == 1
    image = next((title for number, title in enumerate(titles) if _is_image(records, number)), None)
    image_root = None
    if image is not None:
        image_root = root_of_images(files, path, records[0][titles.index(image)], survey)
        image = None if image_root is None else image
    columns, reasons = _columns(titles, records, image)
    label = recognise.label_in({title: cells.text for title, cells in columns.items()})
    classes: tuple[str, ...] = ()
    if label is None and (label := _class_column(columns)) is not None:
        classes = tuple(sorted(columns[label].values))
        columns[label] = columns[label]._replace(text="int64")
    types = {title: cells.text for title, cells in columns.items()}
    exact = {title for title, cells in columns.items() if cells.is_exact}
    chosen = recognise.choose_fields(
        {**types, **({IMAGE: "image"} if image is not None else {})}, reasons, exact, label
    )
    fields = recognise.named_fields(chosen.types, label, chosen.joined)
    fields.fields.pop(IMAGE if image is not None else "", None)
    images = [name for name in files.names if recognise.ending_of(name) in IMAGE_ENDINGS] if image is not None else []
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
        classes=classes,
    )
    notes = (
        *(["quotes are characters of the values: see quoting"] if has_text_quotes else ()),
        *(
            []
            if is_whole
            else [f"types by the first {counted(len(records), 'record')}; others that do not fit are bad samples"]
        ),
        *recognise.left_out_notes("column", reasons),
    )
    left_out = dict.fromkeys(others, f"its titles are not those of {readable(names[0])}")
    return Recognised(source, [*names, *images], notes, left_out, parts)


class _Cells(NamedTuple):
    """The type of a column.

    ``values``: of texts, if few. ``come_back``: they are short, and each is there twice.
    ``is_exact``: float32 holds its numbers.
    """

    text: str
    values: frozenset[str] = frozenset()
    come_back: bool = False
    is_exact: bool = False


def _columns(
    titles: Sequence[str], records: Sequence[Sequence[str]], image: str | None
) -> tuple[dict[str, _Cells], dict[str, str]]:
    """The columns by title, and why others are left out."""
    columns: dict[str, _Cells] = {}
    reasons: dict[str, str] = {}
    for number, title in enumerate(titles):
        if title == image:
            continue
        cells = [record[number] for record in records]
        empty = sum(not cell for cell in cells)
        if titles.count(title) > 1:
            reasons[title or "''"] = "several columns have this title"
        elif not title:
            reasons["''"] = "it has no title"
        elif empty:
            reasons[title] = f"empty in {empty:,} of {counted(len(cells), 'record')}"
        else:
            columns[title] = _type(cells)
    return columns, reasons


def _class_column(columns: Mapping[str, _Cells]) -> str | None:
    """The column whose texts are probably the names of classes; None if there is none.

    Its title says so, or it is the only one of texts, and they are short and come back.
    """
    texts = [title for title, cells in columns.items() if cells.text == "text"]
    named = [title for title in texts if columns[title].values and recognise.is_label(title)]
    alone = [title for title in texts if len(texts) == 1 and columns[title].come_back]
    return next(iter([*named, *alone]), None)


def _first_line(path: Path, survey: Survey) -> str:
    with survey.open(path) as stream:
        return stream.readline(1 << 16).decode("utf-8", "replace").strip()


def _has_text_quotes(path: Path, delimiter: str, survey: Survey) -> bool:
    """True if the quotes of a table cannot, or hardly, stand around values. Reads all of it."""
    separator = delimiter.encode()
    wanted, counts = 0, set[int]()
    try:
        with survey.open(path) as stream:
            for run in RecordFinder(path, delimiter, "double").pieces(stream):
                wanted = wanted or run.record(0).count(separator)
                broken = map(run.record, run.broken.tolist())
                counts |= {line.count(separator) for record in broken for line in record.split(b"\n") if line.strip()}
    except QuotesMisplaced:
        return True
    return wanted > 0 and counts == {wanted}


def _records(path: Path, delimiter: str, quoting: str, survey: Survey) -> tuple[list[str], list[list[str]], bool]:
    """The titles and the first records of a table, and whether these are all.

    Raises ``SourceInvalid``.
    """
    with survey.open(path) as stream:
        runs = RecordFinder(path, delimiter, quoting).pieces(stream)
        rows = (run.record(number) for run in runs for number in range(len(run.starts)))
        try:
            titles = split_record(next(rows, b""), delimiter, quoting)
            count = max(recognise.LOOKED_AT, CELLS_MAX // len(titles))
            good = [row for row in _split(islice(rows, count), delimiter, quoting) if len(row) == len(titles)]
        except ValueError as error:
            raise SourceInvalid(f"{path}: the header {error}") from None
        is_whole = next(rows, None) is None
    if not good:
        raise SourceInvalid(f"{path} has no record after its titles")
    return titles, good, is_whole


def _split(records: Iterable[bytes], delimiter: str, quoting: str) -> Iterator[list[str]]:
    """The cells of records; without those that are bad samples."""
    for record in records:
        with suppress(ValueError):
            yield split_record(record, delimiter, quoting)


def _is_image(records: Sequence[Sequence[str]], number: int) -> bool:
    return all(recognise.ending_of(os.fsencode(record[number])) in IMAGE_ENDINGS for record in records)


def root_of_images(files: FoundFiles, path: Path, value: str, survey: Survey) -> Path | None:
    """The folder to which the paths of a table are relative; None if the first file is missing."""
    if not survey.storage.at(path).file_problems(path.parent / value, "the image"):
        return path.parent
    end = b"/" + os.fsencode(value)
    found = next((name for name in files.names if name.endswith(end)), None)
    return None if found is None else files.root / readable(found[: -len(end)])


def _type(cells: Sequence[str]) -> _Cells:
    """The type of a column by its cells."""
    different = Counter(cells)
    counts = {len(cell.split()) for cell in different}
    shape = f"[{counts.pop()}]" if len(counts) == 1 and counts != {1} else ""
    words = [word for cell in different for word in cell.split()]
    is_written_so = any(_LEADING_ZERO.match(word) for word in words)  # such as a postal code
    for dtype in ("int64", "float32") if not is_written_so else ():
        read = cell_reader(parse_column(recognise.field_name("cell"), f"{dtype}{shape}"))
        with suppress(ValueError):
            numbers = np.concatenate([np.atleast_1d(np.asarray(read(cell))) for cell in different])
            is_exact = bool((np.abs(numbers) <= recognise.FLOAT32_WHOLE).all())
            if dtype == "float32" and any(_WHOLE.fullmatch(word) and abs(int(word)) > FLOAT64_WHOLE for word in words):
                break
            wanted = recognise.float_type(map(float, words)) if dtype == "float32" else dtype
            return _Cells(f"{wanted}{shape}", is_exact=is_exact)
    few = len(different) <= min(CLASSES_MAX, len(cells) // 2)
    come_back = (
        few and len(different) > 1 and min(different.values()) > 1 and max(map(len, different)) <= CLASS_CHARACTERS
    )
    return _Cells("text", frozenset(different) if few else frozenset(), come_back)


RECOGNISE = {CsvSource: _recognise}
