"""The stages of the steps on text. Worker process. ``text.options`` says what each does exactly.

Libraries and files that a step needs are loaded when its stage is made.
"""

from collections.abc import Callable, Mapping

import numpy as np

from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, Stage, make_stage
from batchd.data.pipeline.text import files
from batchd.data.pipeline.text.options import Chat, Lookup, Lowercase, RemoveStopwords, TextBytes, Tokenize
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value

_CONTINUATION_MASK, _CONTINUATION = 0b1100_0000, 0b1000_0000


@make_stage.register
def _lowercase(step: Lowercase, _before: Columns, _after: Columns) -> Stage:
    return _changing(step.field, str.lower)


@make_stage.register
def _remove_stopwords(step: RemoveStopwords, _before: Columns, _after: Columns) -> Stage:
    lower = step.case == "ignore"
    words = files.read_stop_words(step.file, lower=lower)
    return _changing(step.field, lambda text: files.without_words(text, words, lower=lower))


def _changing(field: str, change: Callable[[str], str]) -> Stage:
    """A stage that makes text of text."""

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        values[field] = change(_text_in(values, field))

    return run


@make_stage.register
def _text_bytes(step: TextBytes, _before: Columns, _after: Columns) -> Stage:
    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        encoded = _encoded(_text_in(values, step.field))
        if len(encoded) > step.length:
            if not step.truncation:
                raise SampleUndecodable(f"the text has {len(encoded)} bytes, more than length = {step.length}")
            encoded = _cut(encoded, step.length)
        made = np.zeros(step.length, np.uint8)
        made[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        values[step.field] = made

    return run


@make_stage.register
def _lookup(step: Lookup, _before: Columns, _after: Columns) -> Stage:
    table = files.WordTable(step.words, step.table)

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        table.check()
        rows = table.rows_of(list(files.words_of(_text_in(values, step.field))))
        if step.unknown == "skip":
            rows = [row for row in rows if row >= 0]
        if len(rows) > step.max_words and not step.truncation:
            raise SampleUndecodable(f"the text has {len(rows)} words, more than max_words = {step.max_words}")
        rows = rows[: step.max_words]
        vectors = np.zeros((step.max_words, table.vectors.shape[1]), np.float32)
        known = [place for place, row in enumerate(rows) if row >= 0]
        vectors[known] = table.vectors[[rows[place] for place in known]]
        del values[step.field]
        values |= dict(zip(step.makes, (vectors, np.int32(len(rows))), strict=True))

    return run


@make_stage.register
def _tokenize(step: Tokenize, _before: Columns, _after: Columns) -> Stage:
    tokenizer = files.TextTokenizer(step)

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        tokens = tokenizer.tokens_of(_text_in(values, step.field))
        count = len(tokens)
        del values[step.field]
        if step.padding == "none":
            values[step.to] = tokens
            return
        padded = np.full(step.max_length, tokenizer.pad_id, np.int32)
        padded[:count] = tokens
        mask = np.zeros(step.max_length, np.uint8)
        mask[:count] = 1
        values |= dict(zip(step.makes, (padded, mask, np.int32(count)), strict=True))

    return run


@make_stage.register
def _chat(step: Chat, _before: Columns, _after: Columns) -> Stage:
    tokenizer = files.ChatTokenizer(step)

    def run(values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        tools = values.pop(step.tools) if step.tools else None
        made = tokenizer.tokens_of(values.pop(step.field), tools)
        values |= dict(zip(step.makes, made, strict=True))

    return run


def _text_in(values: Mapping[str, Value], field: str) -> str:
    value = values[field]
    if not isinstance(value, str):
        raise SampleUndecodable(f"{field!r} is not a text but {type(value).__name__}")
    return value


def _encoded(text: str) -> bytes:
    if "\0" in text:
        raise SampleUndecodable(f"the text has the character NUL at {text.index(chr(0))}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SampleUndecodable(f"the text has half of a surrogate pair at {error.start}, which no UTF-8 has") from None


def _cut(encoded: bytes, length: int) -> bytes:
    """The longest beginning of whole characters that is no longer than ``length``."""
    while encoded[length] & _CONTINUATION_MASK == _CONTINUATION:
        length -= 1
    return encoded[:length]
