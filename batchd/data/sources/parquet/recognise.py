"""Recognise Parquet and Arrow files: columns, with the types of Hugging Face's `datasets`. CLI."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from batchd.data.samples.columns import parse_column
from batchd.data.sources import recognise
from batchd.data.sources.interface import FoundFiles, Recognised
from batchd.data.sources.parquet import row_groups
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.parquet.record_batches import TableFile, open_table
from batchd.data.sources.parquet.scan import NUMBERS_BYTES_MAX
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd_wire.wording import counted

NULLS_MIN = 20
"""One null in this many rows, and a column of texts or lists is left out."""
_WHOLE = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names, _others, path = recognise.training_files(files, ParquetSource)
    with survey.open(path) as stream:
        try:
            file = open_table(stream)
            found = {field.name: _type(file, field) for field in file.schema}
            why = {field.name: _why_none(file, field) for field in file.schema if found[field.name] is None}
        except row_groups.Unreadable as error:
            raise SourceInvalid(f"{path} {error}") from None
        types = {title: text for title, text in found.items() if text is not None}
        label = next((title for title in types if row_groups.class_names(file.schema, title)), None)
    if not types:
        listed = ", ".join(f"{title} ({reason})" for title, reason in why.items())
        raise SourceInvalid(f"{path} has no column that batchd reads, only {listed}")
    reasons = dict(why)
    values = _Values(types)
    for name in names:
        with survey.open(files.root / os.fsdecode(name)) as stream:
            values.add(files.root / os.fsdecode(name), stream)
    for title, nulls in values.nulls.items():
        # a scan refuses a null among numbers; other columns have a bad sample for each
        if nulls and (
            ("[" not in types[title] and types[title] not in ("image", "text")) or nulls > values.rows // NULLS_MIN
        ):
            reasons[title] = f"null in {nulls:,} of {counted(values.rows, 'row')}"
            del types[title]
    exact = {title for title, largest in values.largest.items() if largest <= recognise.FLOAT32_WHOLE}
    label = label if label in types else recognise.label_in(types)
    if label is not None:
        types[label] = "int64"
    return recognise.recognise_records(
        ParquetSource, files, recognise.FoundFields(types, reasons, exact, label), "column"
    )


class _Values:
    """Nulls of the columns of several files, and their largest whole numbers, by title."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self.rows = 0
        self.nulls: Counter[str] = Counter()
        self.largest: dict[str, float] = {title: 0 for title, text in types.items() if text in _WHOLE}
        self._types = types

    def add(self, path: Path, stream: BinaryIO) -> None:
        """Add a file; what its footer does not say is read. Raises ``SourceInvalid``."""
        try:
            file = open_table(stream)
            titles = [title for title in self._types if title in file.schema.names]
            for group, rows in enumerate(file.rows):
                self.rows += rows
                for title in titles if rows else ():
                    self._add(file, group, title)
        except row_groups.Unreadable as error:
            raise SourceInvalid(f"{path} {error}") from None

    def _add(self, file: TableFile, group: int, title: str) -> None:
        is_number = self._types[title] in _WHOLE or self._types[title].startswith(("float", "bool"))
        known = file.known(group, title) if isinstance(file, row_groups.ParquetFile) else None
        if known is None and is_number and "[" not in self._types[title]:
            values = file.read(group, title, NUMBERS_BYTES_MAX)
            known = row_groups.ColumnFacts(values.null_count, None)
        if known is not None:
            self.nulls[title] += known.nulls
            if title in self.largest:
                self.largest[title] = max(self.largest[title], inf if known.largest is None else known.largest)


def _type(file: TableFile, field: pa.Field) -> str | None:
    """The type of a column, as users write it; None if none reads it."""
    kind, wanted = field.type, ["image", "text"]
    if row_groups.is_bytes(kind):
        wanted = [
            recognise.type_of([value for value in _first_values(file, field.name) if value is not None]) or "uint8[?]"
        ]
        wanted = [text if text != "text" else "uint8[?]" for text in wanted]
    if row_groups.is_number(kind):
        wanted.append(str(row_groups.dtype_of(kind)))
    elif row_groups.is_list(kind) and row_groups.is_number(kind.value_type):
        number = str(row_groups.dtype_of(kind.value_type))
        number = "int64" if number in _WHOLE - {"int8", "uint8", "uint64"} else number
        wanted.append(f"{number}[{getattr(kind, 'list_size', '?')}]")
    elif row_groups.is_list(kind) and (row_groups.is_image(kind.value_type) or row_groups.is_bytes(kind.value_type)):
        lists = [value for value in _first_values(file, field.name) if isinstance(value, list)]
        if row_groups.is_image(kind.value_type) or _are_images([value for values in lists for value in values]):
            wanted.append(recognise.image_list(max(map(len, lists), default=1)))
    if row_groups.is_image(kind) and any(map(recognise.is_sound, _first_files(file, field.name))):
        return "audio"
    return next((text for text in wanted if _reads(text, kind)), None)


def _are_images(values: Sequence[object]) -> bool:
    return recognise.type_of(values) == "image"


def _why_none(file: TableFile, field: pa.Field) -> str:
    kind = field.type
    if row_groups.is_list(kind):
        inner = kind.value_type
        values = [value for value in _first_values(file, field.name) if value is not None]
        if pa.types.is_struct(inner) and recognise.is_chat(values):
            return recognise.CHATS
        if _reads("text[<=8]", kind):
            return recognise.TEXT_LISTS
    return f"no type reads {str(kind)[:60]}"


def _first_files(file: TableFile, title: str) -> list[bytes]:
    """The first bytes of a column of files."""
    values = [value.get(row_groups.BYTES) for value in _first_values(file, title) if isinstance(value, dict)]
    return [value for value in values if value]


def _reads(text: str, kind: pa.DataType) -> bool:
    try:
        return not row_groups.problem_of(parse_column("field", text), kind)
    except ValueError:
        return False


def _first_values(file: TableFile, title: str) -> Sequence[object]:
    """Some values of a column of bytes."""
    groups = [group for group, rows in enumerate(file.rows) if rows]
    piece = next(file.batches(groups[0], title, 2)) if groups else None
    return [] if piece is None else list(piece.to_pylist())


RECOGNISE = {ParquetSource: _recognise}
