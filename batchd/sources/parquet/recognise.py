"""Recognise Parquet and Arrow files: columns, with the types of Hugging Face's `datasets`. CLI."""

from collections.abc import Sequence

import pyarrow as pa

from batchd.errors import SourceInvalid
from batchd.samples.columns import parse_column
from batchd.sources.interface import FoundFiles, Recognised
from batchd.sources.parquet import row_groups
from batchd.sources.parquet.options import ParquetSource
from batchd.sources.parquet.record_batches import TableFile, open_table
from batchd.sources.recognise import left_out_note, named_fields, patterns_of, training_files, type_of
from batchd.storage.survey import Survey


def _recognise(files: FoundFiles, survey: Survey) -> Recognised:
    names, notes, path = training_files(files, ParquetSource)
    with survey.open(path) as stream:
        try:
            file = open_table(stream)
            found = {field.name: _type(file, field) for field in file.schema}
        except row_groups.Unreadable as error:
            raise SourceInvalid(f"{path} {error}") from None
        types = {title: text for title, text in found.items() if text is not None}
        label = next((title for title in types if row_groups.class_names(file.schema, title)), None)
    if not types:
        raise SourceInvalid(f"{path} has no column that batchd reads, only {', '.join(found)}")
    fields = named_fields(types, label)
    source = ParquetSource(root=files.root, shards=patterns_of(files, names), fields=fields.fields, names=fields.names)
    return Recognised(source, names, (*notes, *left_out_note("column", [one for one in found if one not in types])))


def _type(file: TableFile, field: pa.Field) -> str | None:
    """The type of a column, as users write it; None if none reads it."""
    kind, wanted = field.type, ["image", "text"]
    if row_groups.is_bytes(kind):
        wanted = [type_of([value for value in _first_values(file, field.name) if value is not None]) or "uint8[?]"]
        wanted = [text if text != "text" else "uint8[?]" for text in wanted]
    if row_groups.is_number(kind):
        wanted.append(_dtype(kind))
    elif row_groups.is_list(kind) and row_groups.is_number(kind.value_type):
        wanted.append(f"{_dtype(kind.value_type)}[{getattr(kind, 'list_size', '?')}]")
    return next((text for text in wanted if _reads(text, kind)), None)


def _dtype(kind: pa.DataType) -> str:
    name: str = kind.to_pandas_dtype().__name__
    return name.removesuffix("_")


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
