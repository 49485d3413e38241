"""Text for terminals: tables, paragraphs and escapes. Pure; standard library only.

Invariant: no word is broken, nor a command in backticks that has room on a line.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_WORD = re.compile(r"(?:[^\s`]*`[^`]*`)+[^\s`]*|\S+")
"""A command in backticks is one word, with what stands beside it."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row; each column is as wide as its longest cell."""
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def padded(text: str, width: int) -> str:
    """The text with spaces behind it, up to ``width``."""
    return text + " " * (width - width_of(text))


def width_of(text: str) -> int:
    """The columns that a text takes in a terminal, which shows no styles."""
    shown = _STYLE.sub("", text)
    if shown.isascii():
        return len(shown)
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else not unicodedata.combining(one) for one in shown)


def without_styles(text: str) -> str:
    """The text without colours."""
    return _STYLE.sub("", text)


def wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most ``width``, the first one behind ``first``, the others behind ``rest``.

    A word that has no room, such as a path, has a line of its own, and is longer.
    """
    lines, line, is_begun = [], first, False
    for word in _words(text, width - width_of(rest)):
        has_room = width_of(line) + is_begun + width_of(word) <= width
        if not has_room and (is_begun or width_of(rest) < width_of(line)):
            lines.append(line.rstrip())
            line, is_begun = rest, False
        line, is_begun = f"{line}{' ' * is_begun}{word}", True
    return [*lines, line.rstrip()]


def _words(text: str, room: int) -> Iterator[str]:
    for word in _WORD.findall(text):
        yield from [word] if width_of(word) <= room else word.split()


def escaped(text: str) -> str:
    r"""The text with each character that is not printable written as an escape: \n, \x1b."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
