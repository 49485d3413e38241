"""On which line each key of a TOML file stands. Daemon and CLI; standard library only.

``tomllib`` reads the values but does not say where they stood, and an error without a line is half
an error. This walks over text that ``tomllib`` has already accepted, so it only has to tell
strings, brackets and commas apart, and checks nothing.

Invariant: the paths found are exactly the paths of ``tomllib.loads(text)``: tables, keys and array
items.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

from batchd.errors import KeyPath

_TOKEN = re.compile(
    r"""
    (?P<blank>   [ \t\r]+ | \#[^\n]* )
  | (?P<newline> \n )
  | (?P<text>    \"{3} (?: \\. | [^\\] )*? \"{3,5} | '{3} .*? '{3,5} | " (?: \\. | [^"\\\n] )* " | '[^'\n]*' )
  | (?P<mark>    [\[\]{}=,.] )
  | (?P<bare>    [^\s\[\]{}=,.\#"']+ )
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _TomlToken:
    kind: str
    text: str
    line: int


class _Walk:
    """One walk over the text; ``lines`` grows as keys go by."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._tokens = list(_tokens(text))
        self._at = 0
        self._arrays: dict[KeyPath, int] = {}

    def run(self) -> None:
        """Walk from the first to the last statement."""
        table: KeyPath = ()
        while self._at < len(self._tokens):
            if self._next_is("\n"):
                self._at += 1
            elif self._next_is("["):
                table = self._header()
            else:
                self._assignment(table)

    def _header(self) -> KeyPath:
        """``[a.b]`` or ``[[a.b]]``; in the path of an array of tables each name stands with the item that it means now."""
        doubled = self._skip("[") == 2  # noqa: PLR2004  the two brackets of an array of tables
        names = self._key()
        path: KeyPath = ()
        for position, (name, line) in enumerate(names):
            path += (name,)
            self.lines.setdefault(path, line)
            if doubled and position == len(names) - 1:
                self._arrays[path] = self._arrays.get(path, -1) + 1
            if path in self._arrays:
                path += (self._arrays[path],)
                self.lines.setdefault(path, line)
        self._skip("]")
        return path

    def _assignment(self, table: KeyPath) -> None:
        path = table
        for name, line in self._key():
            path += (name,)
            self.lines.setdefault(path, line)
        self._skip("=")
        self._value(path)

    def _key(self) -> list[tuple[str, int]]:
        """Read the names of a dotted key up to what ends it."""
        names = []
        while not any(map(self._next_is, "=]")):
            token = self._take()
            if token.kind == "text":
                names.append((_unquote(token.text), token.line))
            elif token.kind == "bare":
                names.append((token.text, token.line))
        return names

    def _value(self, path: KeyPath) -> None:
        if self._next_is("["):
            self._array(path)
        elif self._next_is("{"):
            self._inline_table(path)
        else:
            while self._at < len(self._tokens) and not any(map(self._next_is, "\n,]}")):
                self._at += 1

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        position = 0
        while not self._next_is("]"):
            if self._next_is("\n") or self._next_is(","):
                self._at += 1
                continue
            item = (*path, position)
            self.lines[item] = self._tokens[self._at].line
            self._value(item)
            position += 1
        self._at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while not self._next_is("}"):
            if self._next_is("\n") or self._next_is(","):
                self._at += 1
                continue
            self._assignment(path)
        self._at += 1

    def _take(self) -> _TomlToken:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _next_is(self, text: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at].text == text

    def _skip(self, text: str) -> int:
        """Step over every ``text`` that stands here; tell how many."""
        start = self._at
        while self._next_is(text):
            self._at += 1
        return self._at - start


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line of every table, key and array item, counted from 1, by its path: ``("streams", "photos", "pipeline", 0)``.

    ``text`` must be TOML that ``tomllib`` reads.
    """
    walk = _Walk(text)
    walk.run()
    return walk.lines


def _tokens(text: str) -> Iterator[_TomlToken]:
    line = 1
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "blank":
            yield _TomlToken(str(match.lastgroup), match[0], line)
        line += match[0].count("\n")


def _unquote(text: str) -> str:
    """What a quoted key says, escapes and all; the reader of TOML knows."""
    name: str = next(iter(tomllib.loads(f"{text} = 0")))
    return name
