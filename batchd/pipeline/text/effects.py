"""What the steps on text make of the columns. Daemon, workers and ``batchd check``; standard library only.

text  --lowercase, remove_stopwords-->  text  --tokenize-->    tokens: int32[n], tokens_mask: uint8[n], tokens_length: int32
                                              --lookup-->      vectors: float32[n, columns], vectors_length: int32
                                              --text_bytes-->  text: uint8[n]
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from batchd.pipeline.effects import Columns, Effect, StepInvalid, column_of, replaced
from batchd.pipeline.options import StepOptions
from batchd.pipeline.text.options import Lookup, Lowercase, RemoveStopwords, TextBytes, TextStep, Tokenize
from batchd.samples.columns import Column


def _words(step: Lowercase | RemoveStopwords, columns: Columns) -> Columns:
    return {**columns, step.field: replace(_text(step, columns), made_by=step.op)}


def _tokenize(step: Tokenize, columns: Columns) -> Columns:
    _text(step, columns)
    if step.padding == "none":
        return replaced(step.op, columns, step.field, Column(step.to, dtype="int32", shape=(None,), made_by=step.op))
    tokens, mask, length = step.makes
    return replaced(
        step.op,
        columns,
        step.field,
        Column(tokens, dtype="int32", shape=(step.max_length,), made_by=step.op),
        Column(mask, dtype="uint8", shape=(step.max_length,), made_by=step.op),
        Column(length, dtype="int32", made_by=step.op),
    )


def _lookup(step: Lookup, columns: Columns) -> Columns:
    """How many columns the table has stands in its header."""
    from batchd.pipeline.text.word_table import table_shape  # noqa: PLC0415  needs numpy

    _text(step, columns)
    _rows, width, _offset = table_shape(step.table)
    vectors, length = step.makes
    return replaced(
        step.op,
        columns,
        step.field,
        Column(vectors, dtype="float32", shape=(step.max_words, width), made_by=step.op),
        Column(length, dtype="int32", made_by=step.op),
    )


def _text_bytes(step: TextBytes, columns: Columns) -> Columns:
    _text(step, columns)
    return {**columns, step.field: Column(step.field, dtype="uint8", shape=(step.length,), made_by=step.op)}


EFFECTS: Mapping[type[StepOptions], Effect] = MappingProxyType(
    {
        Tokenize: _tokenize,
        Lowercase: _words,
        RemoveStopwords: _words,
        Lookup: _lookup,
        TextBytes: _text_bytes,
    }
)


def is_random(_step: StepOptions) -> bool:
    """None of them is."""
    return False


def _text(step: TextStep, columns: Columns) -> Column:
    """The column of a step that needs text."""
    column = column_of(step, columns)
    if column.kind != "text":
        what = "the bytes of an image file" if column.kind == "encoded" else column.text
        by = f' after "{column.made_by}"' if column.made_by else ""
        raise StepInvalid(f'"{step.op}" needs text, and {column.name!r} is {what}{by}')
    return column
