"""The steps on text, run. Worker process. What each does exactly stands at its options, in ``text_steps``.

Libraries and files that a step needs are loaded when its stage is made.
"""

from collections.abc import Callable, Mapping

import numpy as np

from batchd.pipeline.effects import Columns
from batchd.pipeline.randomness import SampleRandom
from batchd.pipeline.stages import Row, Stage, make_stage
from batchd.pipeline.text.options import TOKEN_MAX, Lookup, Lowercase, RemoveStopwords, TextBytes, Tokenize
from batchd.pipeline.text.words import WordTable, read_stop_words, without_words, words_of
from batchd.samples.errors import SampleUndecodable
from batchd.samples.values import Value

_CONTINUATION_MASK, _CONTINUATION = 0b1100_0000, 0b1000_0000


class ChangeText:
    """A step that makes text of text."""

    def __init__(self, field: str, change: Callable[[str], str]) -> None:
        self._field = field
        self._change = change

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        values[self._field] = self._change(text_in(values, self._field))


@make_stage.register(TextBytes)
class EncodeText:
    """Writes text as UTF-8 with zeros behind it."""

    def __init__(self, step: TextBytes, _before: Columns, _after: Columns) -> None:
        self._step = step

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        step = self._step
        encoded = _encoded(text_in(values, step.field))
        if len(encoded) > step.length:
            if not step.truncation:
                raise SampleUndecodable(f"the text has {len(encoded)} bytes, more than length = {step.length}")
            encoded = _cut(encoded, step.length)
        made = np.zeros(step.length, np.uint8)
        made[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        values[step.field] = made


@make_stage.register(Lookup)
class LookUpWords:
    """Replaces text by the rows of its words in a table."""

    def __init__(self, step: Lookup, _before: Columns, _after: Columns) -> None:
        self._step = step
        self._table = WordTable(step.words, step.table)

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        step = self._step
        self._table.check()
        rows = self._table.rows_of(list(words_of(text_in(values, step.field))))
        if step.unknown == "skip":
            rows = [row for row in rows if row >= 0]
        if len(rows) > step.max_words and not step.truncation:
            raise SampleUndecodable(f"the text has {len(rows)} words, more than max_words = {step.max_words}")
        rows = rows[: step.max_words]
        vectors = np.zeros((step.max_words, self._table.vectors.shape[1]), np.float32)
        known = [place for place, row in enumerate(rows) if row >= 0]
        vectors[known] = self._table.vectors[[rows[place] for place in known]]
        del values[step.field]
        values |= dict(zip(step.makes, (vectors, np.int32(len(rows))), strict=True))


@make_stage.register(Tokenize)
class TokenizeStage:
    """Replaces text by tokens, and where they are padded, by their mask and their number too."""

    def __init__(self, step: Tokenize, _before: Columns, _after: Columns) -> None:
        from batchd.pipeline.text.tokenizer_file import failures_as, load_tokenizer  # noqa: PLC0415  needs an extra

        self._step = step
        self._failures_as = failures_as
        self._tokenizer, self._pad_id = load_tokenizer(step)

    def run(self, values: dict[str, Value], _random: SampleRandom, _row: Row) -> None:
        """See ``stages.Stage``."""
        step = self._step
        tokens = self._tokens(text_in(values, step.field))
        del values[step.field]
        if step.padding == "none":
            values[step.to] = tokens
            return
        count = len(tokens)
        padded = np.full(step.max_length, self._pad_id, np.int32)
        padded[:count] = tokens
        mask = np.zeros(step.max_length, np.uint8)
        mask[:count] = 1
        values |= dict(zip(step.makes, (padded, mask, np.int32(count)), strict=True))

    def _tokens(self, text: str) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """Raises ``SampleUndecodable``."""
        step = self._step
        with self._failures_as(SampleUndecodable, "the tokenizer does not take the text"):
            numbers = self._tokenizer.encode(text, add_special_tokens=step.special_tokens).ids
        if len(numbers) > step.max_length:
            raise SampleUndecodable(f"the text has {len(numbers)} tokens, more than max_length = {step.max_length}")
        if max(numbers, default=0) > TOKEN_MAX:
            raise SampleUndecodable(f"the tokenizer makes the number {max(numbers)}, which int32 cannot hold")
        return np.array(numbers, np.int32)


def text_in(values: Mapping[str, Value], field: str) -> str:
    """A value that is text. Raises ``SampleUndecodable`` where it is none."""
    value = values[field]
    if not isinstance(value, str):
        raise SampleUndecodable(f"{field!r} is no text but {type(value).__name__}")
    return value


def _encoded(text: str) -> bytes:
    """Raises ``SampleUndecodable``."""
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


@make_stage.register
def _lowercase(step: Lowercase, _before: Columns, _after: Columns) -> Stage:
    return ChangeText(step.field, str.lower)


@make_stage.register
def _remove_stopwords(step: RemoveStopwords, _before: Columns, _after: Columns) -> Stage:
    lower = step.case == "ignore"
    words = read_stop_words(step.file, lower=lower)
    return ChangeText(step.field, lambda text: without_words(text, words, lower=lower))
