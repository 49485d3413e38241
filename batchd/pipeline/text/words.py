"""What a word is, and lists of them in files. Daemon, workers and CLI; standard library only.

    "(Don't stop!)  2 go"   -split->   "(Don't"   "stop!)"   "2"   "go"     at white space, as str.split() does
                            -core-->    Don't      stop       2     go      without what is at the ends and belongs to no word

Invariant: every step that speaks of words means these.
"""

from collections.abc import Iterator
from pathlib import Path
from unicodedata import category

from batchd.pipeline.step_files import StepFileInvalid, read_file

STOP_WORDS_BYTES_MAX = 64 << 20


def core_of(chunk: str) -> tuple[int, int]:
    """Where the word in a chunk without white space begins and ends; both the same where there is none."""
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
    """A text without some words, the rest joined by single spaces. ``lower``: words are compared after ``str.lower()``."""
    kept = []
    for chunk in text.split():
        start, end = core_of(chunk)
        word = chunk[start:end]
        rest = chunk[:start] + chunk[end:] if (word.lower() if lower else word) in words and word else chunk
        if rest:
            kept.append(rest)
    return " ".join(kept)


def read_stop_words(path: Path, *, lower: bool) -> frozenset[str]:
    """The words of a list. Raises ``StepFileInvalid`` naming file and line where a line is no word, or there is none."""
    try:
        text = read_file(path, STOP_WORDS_BYTES_MAX).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StepFileInvalid(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    found = set()
    for number, line in enumerate(text.split("\n"), 1):
        chunks = _before_comment(line).split()
        if not chunks:
            continue
        words = list(words_of(chunks[0]))
        if len(chunks) > 1 or not words:
            raise StepFileInvalid(f"{path}: line {number} is {line.strip()[:40]!r}, which is not one word")
        found.add(words[0].lower() if lower else words[0])
    if not found:
        raise StepFileInvalid(f"{path} has no words")
    return frozenset(found)


def _before_comment(line: str) -> str:
    """The line up to a # that stands at its beginning or behind white space."""
    for place, character in enumerate(line):
        if character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _is_of_word(character: str) -> bool:
    return character.isalnum() or category(character)[0] == "M"
