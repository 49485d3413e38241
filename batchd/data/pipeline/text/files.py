"""Words, and the files that steps on text read: stop words, vectors, tokenizers.

Workers; the daemon and ``batchd check`` check the files. Needs numpy; ``tokenizers`` is imported by
``load_tokenizer`` alone.

    "(Don't stop!)  2 go"   -split->   "(Don't"   "stop!)"   "2"   "go"     at white space
                            -core-->    Don't      stop       2     go      without punctuation

A table has one vector for each word:

    words    the file itself, mapped            one word on each line
    starts   int64 [n + 1]                      where each line begins
    hashes   uint32 [n], sorted                 CRC-32 of each word, to find it without a dictionary
    rows     int32 [n]                          the row of each; equal hashes in the order of rows
    table    the .npy file, mapped              float32 [n, columns]

Both files are pages that all workers share. Each worker itself needs 16 bytes for each word, where
a dictionary would need about 150.

Invariants: all steps on words mean these. Only options of the step decide on padding, truncation
and special tokens; nothing is downloaded and no thread is started.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import category
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.step_files import MappedFile, StepFileInvalid, npy_header, open_file, read_file
from batchd.data.pipeline.text import chats
from batchd.data.pipeline.text.byte_pairs import EncodedWords, word_encoder
from batchd.data.pipeline.text.options import TOKEN_MAX, Chat, Tokenize
from batchd.data.samples.errors import SampleUndecodable
from batchd_wire.wording import counted

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

STOP_WORDS_BYTES_MAX = 64 << 20
_COMMENT = re.compile(r"(?:^|\s)#")


def core_of(chunk: str) -> tuple[int, int]:
    """Return start and end of the word in a chunk without white space; equal if there is none."""
    start, end = 0, len(chunk)
    while start < end and not _is_of_word(chunk[start]):
        start += 1
    while end > start and not _is_of_word(chunk[end - 1]):
        end -= 1
    return start, end


def words_of(text: str) -> Iterator[str]:
    """The words of a text, in their order."""
    for chunk in text.split():
        start, end = core_of(chunk)
        if start < end:
            yield chunk[start:end]


def without_words(text: str, words: frozenset[str], *, lower: bool) -> str:
    """A text without some words, joined by single spaces; ``lower``: compared in lower case."""
    kept = []
    for chunk in text.split():
        start, end = core_of(chunk)
        word = chunk[start:end]
        rest = chunk[:start] + chunk[end:] if (word.lower() if lower else word) in words and word else chunk
        if rest:
            kept.append(rest)
    return " ".join(kept)


def read_stop_words(path: Path, *, lower: bool) -> frozenset[str]:
    """The words of a list. Raises ``StepFileInvalid`` naming the line that is no word."""
    try:
        text = read_file(path, STOP_WORDS_BYTES_MAX).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StepFileInvalid(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    found = set()
    for number, line in enumerate(text.split("\n"), 1):
        chunks = _COMMENT.split(line, maxsplit=1)[0].split()
        if not chunks:
            continue
        words = list(words_of(chunks[0]))
        if len(chunks) > 1 or not words:
            raise StepFileInvalid(f"{path}: line {number} is {line.strip()[:40]!r}, which is not one word")
        found.add(words[0].lower() if lower else words[0])
    if not found:
        raise StepFileInvalid(f"{path} has no words")
    return frozenset(found)


def _is_of_word(character: str) -> bool:
    return character.isalnum() or category(character)[0] == "M"


ROWS_MAX = (1 << 31) - 1
_NEWLINE = ord("\n")


class WordTable:
    """Finds the rows of words. Raises ``StepFileInvalid``."""

    def __init__(self, words: Path, table: Path) -> None:
        self._words = MappedFile(words)
        self._table = MappedFile(table)
        rows, columns, offset = table_shape(table)
        items = np.frombuffer(self._table.memory, np.dtype("<f4"), rows * columns, offset)
        self.vectors: NDArray[np.float32] = items.reshape(rows, columns)
        """The table, read-only. Call ``check`` before it is read."""
        self._starts = line_starts(self._words.memory)
        _check_lengths(words, self._starts, table, rows)
        hashes = np.fromiter((crc32(self._line(row)) for row in range(rows)), np.uint32, rows)
        self._rows = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._rows]

    def check(self) -> None:
        """Raise ``StepFileInvalid`` if a file was written to since it was mapped."""
        self._words.check()
        self._table.check()

    def rows_of(self, words: Sequence[str]) -> list[int]:
        """The row of each word; -1 for those that are not in the table."""
        encoded = [word.encode("utf-8", "surrogatepass") for word in words]
        hashes = np.fromiter(map(crc32, encoded), np.uint32, len(encoded))
        first = np.searchsorted(self._hashes, hashes, "left").tolist()
        last = np.searchsorted(self._hashes, hashes, "right").tolist()
        found = []
        for word, *places in zip(encoded, first, last, strict=True):
            rows = self._rows[slice(*places)].tolist()
            found.append(next((row for row in rows if self._line(row) == word), -1))
        return found

    def _line(self, row: int) -> bytes:
        start, end = int(self._starts[row]), int(self._starts[row + 1]) - 1
        line = bytes(self._words.memory[start:end])
        return line[:-1] if line.endswith(b"\r") else line


def line_starts(memory: memoryview) -> NDArray[np.int64]:
    """The start of each line, and the end of the last one, in bytes: int64 ``[lines + 1]``.

    A final newline begins no line.
    """
    content = np.frombuffer(memory, np.uint8)
    ends = np.flatnonzero(content == _NEWLINE)
    if len(content) and content[-1] != _NEWLINE:
        ends = np.append(ends, len(content))
    return np.concatenate(([0], ends + 1)).astype(np.int64)


def table_shape(path: Path) -> tuple[int, int, int]:
    """Rows, columns and offset of float32 in an .npy file. Raises ``StepFileInvalid``."""
    with open_file(path) as stream:
        dtype, shape, is_fortran = npy_header(stream, path)
        offset, size = stream.tell(), stream.seek(0, 2)
    if dtype != np.dtype("<f4") or dtype.hasobject or len(shape) != 2 or is_fortran:  # noqa: PLR2004  [words, columns]
        order = ", columns first in memory" if is_fortran else ""
        raise StepFileInvalid(
            f"{path} holds {dtype}{list(shape)}{order}; it must be float32[words, columns], as "
            "np.save(file, np.ascontiguousarray(table, np.float32)) writes it"
        )
    rows, columns = shape
    if not (0 < rows <= ROWS_MAX and columns > 0):
        raise StepFileInvalid(f"{path} holds float32{list(shape)}, so there is nothing to look up")
    if size < offset + rows * columns * dtype.itemsize:
        raise StepFileInvalid(
            f"{path} is cut: it has {size} bytes, and {rows * columns * dtype.itemsize + offset} by its header"
        )
    return rows, columns, offset


def check_word_table(words: Path, table: Path) -> None:
    """Raise ``StepFileInvalid`` if words and table do not match; reads neither to its end."""
    rows, _columns, _offset = table_shape(table)
    _check_lengths(words, line_starts(MappedFile(words).memory), table, rows)


def _check_lengths(words: Path, starts: NDArray[np.int64], table: Path, rows: int) -> None:
    lines = len(starts) - 1
    if lines != rows:
        raise StepFileInvalid(
            f"{words} has {counted(lines, 'line')}, and the table {table} has {counted(rows, 'row')}; they must be as many"
        )


TOKENIZER_BYTES_MAX = 1 << 30
PADDING_NAMES = ("[PAD]", "<pad>")
"""Name of the special token for padding."""


def read_tokenizer(path: Path) -> "Tokenizer":
    """A tokenizer that makes the same tokens of a text each time. Raises ``StepFileInvalid``."""
    from tokenizers import Tokenizer  # noqa: PLC0415  needs an extra

    content = read_file(path, TOKENIZER_BYTES_MAX)
    with failures_as(StepFileInvalid, f"{path} is not a tokenizer.json, or it is cut"):
        tokenizer = Tokenizer.from_str(content.decode())
    if getattr(tokenizer.model, "dropout", None):
        raise StepFileInvalid(
            f"{path} has dropout = {tokenizer.model.dropout}, which makes other tokens of the same text each time; remove it"
        )
    return tokenizer


def load_tokenizer(step: Tokenize) -> tuple["Tokenizer", int]:
    """The tokenizer of a step, and the number of its padding. Raises ``StepFileInvalid``."""
    tokenizer = read_tokenizer(step.file)
    pad_id = _pad_id(tokenizer) if step.pad_id is None else step.pad_id
    if pad_id > TOKEN_MAX:
        raise StepFileInvalid(f"{step.file} pads with {pad_id}, which int32 cannot hold; set pad_id")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special = tokenizer.num_special_tokens_to_add(False) if step.special_tokens else 0
    if special > step.max_length:
        raise StepFileInvalid(
            f"{step.file} adds {special} special tokens, more than max_length = {step.max_length}; set special_tokens = false, "
            "or a larger max_length"
        )
    if step.truncation:
        tokenizer.enable_truncation(step.max_length)
    return tokenizer, pad_id


class TextTokenizer:
    """Makes tokens of texts. Raises ``StepFileInvalid``."""

    def __init__(self, step: Tokenize) -> None:
        self._step = step
        self._tokenizer, self.pad_id = load_tokenizer(step)
        adds = step.special_tokens and self._tokenizer.num_special_tokens_to_add(False) > 0
        self._words = None if adds else word_encoder(self._tokenizer)

    def tokens_of(self, text: str) -> NDArray[np.int32]:
        """The numbers of the tokens of a text, int32 [n]. Raises ``SampleUndecodable``."""
        step = self._step
        found = None if self._words is None else self._words.encode(text)
        if found is not None:
            tokens = found.ids[: step.max_length] if step.truncation else found.ids
        else:
            with failures_as(SampleUndecodable, "the tokenizer does not take the text"):
                numbers = self._tokenizer.encode(text, add_special_tokens=step.special_tokens).ids
            if max(numbers, default=0) > TOKEN_MAX:
                raise SampleUndecodable(f"the tokenizer makes the number {max(numbers)}, which int32 cannot hold")
            tokens = np.array(numbers, np.int32)
        if len(tokens) > step.max_length:
            raise SampleUndecodable(f"the text has {len(tokens)} tokens, more than max_length = {step.max_length}")
        return tokens


class ChatTokenizer:
    """Makes tokens of chats, and the mask of those that are learned. Raises ``StepFileInvalid``.

    The marks of the template (see ``chats``) are tokens of a copy of the tokenizer. A token is
    learned if it has the first or a later character of learned words.
    """

    def __init__(self, step: Chat) -> None:
        from tokenizers import AddedToken  # noqa: PLC0415  needs an extra

        template = chats.read_template(step.template)
        name = step.template if isinstance(step.template, str) else step.template.name
        if step.tools and template.tools is None:
            raise StepFileInvalid(f'the template "{name}" has no tools, so tools = {step.tools!r} cannot be written')
        if not step.tools:
            template = replace(template, tools=None)
        self._step = step
        self._tokenizer = tokenizer = read_tokenizer(step.tokenizer)
        added = {token.content: (number, token) for number, token in tokenizer.get_added_tokens_decoder().items()}
        if step.image:
            template = _with_image(template, step, added)
        special = (*template.tokens, *(template.tools.tokens if template.tools is not None else ()))
        self._writer = chats.ChatWriter(name, template, step.loss, generation=step.generation_prompt)
        self._image = self._writer.with_marks(step.image)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        missing = [token for token in special if token not in added]
        if missing:
            raise StepFileInvalid(
                f'{step.tokenizer} has no special token {", ".join(missing)}, which the template "{name}" writes'
            )
        numbers = tokenizer.get_vocab().values()
        largest = max(numbers)
        marks = [chr(chats.FIRST_MARK + number) for number in range(len(special))]
        for mark, token in zip(marks, special, strict=True):
            like = added[token][1]
            made = AddedToken(mark, lstrip=like.lstrip, rstrip=like.rstrip, normalized=False, special=False)
            tokenizer.add_tokens([made])
        tokenizer.encode_special_tokens = step.special_text == "keep"
        vocabulary = tokenizer.get_vocab()
        of_marks = [vocabulary[mark] for mark in marks]
        if largest > TOKEN_MAX or not set(numbers).isdisjoint(of_marks):
            raise StepFileInvalid(f"{step.tokenizer} has tokens up to number {largest}, which leave no room for more")
        self._words = word_encoder(tokenizer)
        self._real = np.arange(max(largest, *of_marks) + 1, dtype=np.int32)
        self._real[of_marks] = [added[token][0] for token in special]

    def tokens_of(self, value: object, tools: object = None) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Tokens int32 [n], and their mask uint8 [n]. Raises ``SampleUndecodable``."""
        step = self._step
        messages, known = chats.messages_of(step.field, value, self._image), chats.tools_of(step.tools, tools)
        written = self._writer.write(messages, known)
        found = self._encoded(written)
        if len(found) > step.max_length:
            if step.truncate == "bad":
                raise SampleUndecodable(f"the chat has {len(found)} tokens, more than max_length = {step.max_length}")
            if step.truncate == "turns":
                written, found = self._last_exchanges(messages, written, found, known)
        tokens, mask = self._real.take(found.ids), np.zeros(len(found), np.uint8)
        for first, end in written.learned:
            mask[_token_at(found, first, end, 1) : _token_at(found, end - 1, first - 1, -1) + 1] = 1
        if len(tokens) > step.max_length:
            kept = slice(-step.max_length, None) if step.truncate == "left" else slice(step.max_length)
            tokens, mask = tokens[kept], mask[kept]
        if step.loss and not mask.any():
            raise SampleUndecodable(f"the chat has no token to learn: no words of {', '.join(step.loss)}")
        return tokens, mask

    def _encoded(self, written: chats.Written) -> "Encoding | EncodedWords":
        found = None if self._words is None else self._words.encode(written.text)
        if found is not None:
            return found
        with failures_as(SampleUndecodable, "the tokenizer does not take the chat"):
            return self._tokenizer.encode(written.text, add_special_tokens=False)

    def _last_exchanges(
        self,
        messages: list[chats.ChatMessage],
        written: chats.Written,
        found: "Encoding | EncodedWords",
        tools: Sequence[Mapping[str, object]],
    ) -> tuple[chats.Written, "Encoding | EncodedWords"]:
        """The system, and the last whole exchanges that fit."""
        total, longest = len(found), self._step.max_length
        starts = [_token_at(found, first, len(written.text), 1) for first in written.exchanges]
        users = [place for place, message in enumerate(messages) if message.role == "user"]
        head = messages[: messages[0].role == "system"]
        for place, start in zip(users[1:], starts[1:], strict=True):
            if total - (start - starts[0]) > longest:
                continue
            written = self._writer.write([*head, *messages[place:]], tools)
            found = self._encoded(written)
            if len(found) <= longest:
                return written, found
        raise SampleUndecodable(f"the last exchange of the chat alone is longer than max_length = {longest}")


def _with_image(template: chats.Template, step: Chat, added: Collection[str]) -> chats.Template:
    """The template with the special tokens of an image. Raises ``StepFileInvalid`` without any."""
    of_image = [token for token in added if token in step.image]
    if not of_image:
        raise StepFileInvalid(f"{step.tokenizer} has no special token in image = {step.image!r}; it needs one")
    return replace(template, tokens=tuple(dict.fromkeys((*template.tokens, *of_image))))


def _token_at(found: "Encoding | EncodedWords", first: int, end: int, way: int) -> int:
    """The token of the first character that has one, on the way to ``end``."""
    for character in range(first, end, way):
        token = found.char_to_token(character)
        if token is not None:
            return int(token)
    return len(found) if way > 0 else -1


def _pad_id(tokenizer: "Tokenizer") -> int:
    """The number that the file has for padding, else that of its special token for it, else 0."""
    if tokenizer.padding is not None:
        return int(tokenizer.padding["pad_id"])
    tokens = tokenizer.get_added_tokens_decoder().items()
    return min((int(number) for number, token in tokens if token.special and token.content in PADDING_NAMES), default=0)


@contextmanager
def failures_as(problem: type[StepFileInvalid | SampleUndecodable], what: str) -> Iterator[None]:
    """Raise what the library cannot do as a ``problem``."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise problem(f"{what}: {error}") from None
