"""Walks through one large JSON without holding it: the elements of its lists, and where they are.

    {"info": {...}, "images": [{...}, {...}], "annotations": [{...}, ...], "categories": [...]}
                               ^ list, first byte, end, value

Daemon. The parser of the standard library reads one element after the other out of a window of the
file, whose bytes it takes for characters, so a place in the window is a place in the file.

Invariant: memory holds a window and one element, however large the file is.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

from batchd.data.storage.survey import compression_of
from batchd.errors import SourceInvalid

WINDOW_BYTES = 4 << 20
ELEMENT_BYTES_MAX = 64 << 20
_WHITE_SPACE = " \t\r\n"
_BYTE_ORDER_MARK = "\xef\xbb\xbf"


class Element(NamedTuple):
    """An element of a list of the document: the list's key, its first byte, its end and itself."""

    key: str
    start: int
    end: int
    value: Any


class Document:
    """The document in an open file; ``path``: for messages. Methods raise ``SourceInvalid``."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._before = 0
        """The bytes of the file in front of the window."""
        self._is_all = False
        self.checksum = 0
        """CRC-32 of all bytes, once all elements were read."""

    @property
    def size(self) -> int:
        """The bytes of the file, once all elements were read."""
        return self._before + len(self._text)

    def elements(self) -> Iterator[Element]:
        """All elements of lists that are values of the document's keys."""
        self._check_start()
        for key in self._keys():
            if self._peek() == "[":
                for start in self._items("]"):
                    value = self._value()
                    yield Element(key, start, self._before + self._at, value)
            else:
                self._value()
        if self._peek():
            raise self._wrong("something stands behind its end")

    def _keys(self) -> Iterator[str]:
        for _start in self._items("}"):
            key = self._value()
            if not isinstance(key, str):
                raise self._wrong("a key is no text")
            self._take(":")
            yield key

    def _items(self, end: str) -> Iterator[int]:
        """The first byte of each item of the object or list that begins here."""
        self._at += 1
        if self._peek() != end:
            while True:
                self._peek()
                yield self._before + self._at
                if self._peek() == end:
                    break
                self._take(",")
        self._take(end)

    def _value(self) -> Any:
        """The value that begins here; the next character is the one behind it."""
        wanted = WINDOW_BYTES
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if isinstance(error, RecursionError) or self._is_all:
                    why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(":")[0]
                    raise self._wrong(f"no JSON: {why}") from None
            else:
                if end < len(self._text) or self._is_all:
                    written, self._at = self._text[self._at : end], end
                    return value if written.isascii() else self._as_utf_8(written)
            if len(self._text) - self._at > ELEMENT_BYTES_MAX:
                raise self._wrong(f"a value of more than {ELEMENT_BYTES_MAX >> 20} MiB, or no JSON")
            self._read(wanted)
            wanted *= 2

    def _as_utf_8(self, written: str) -> Any:
        """The value again, with the characters of its texts."""
        try:
            return json.loads(written.encode("latin-1"))
        except ValueError as error:
            raise self._wrong(f"no JSON: {error}") from None

    def _peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _WHITE_SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_all:
                return ""
            self._read(WINDOW_BYTES)

    def _take(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise self._wrong(f"{wanted!r} is missing")
        self._at += 1

    def _read(self, count: int) -> None:
        """Move the window behind what was parsed, and enlarge it at its end."""
        data = self._stream.read(count)
        self._is_all = not data
        self.checksum = crc32(data, self.checksum)
        self._before += self._at
        self._text = self._text[self._at :] + data.decode("latin-1")
        self._at = 0

    def _check_start(self) -> None:
        self._read(WINDOW_BYTES)
        if self._text.startswith(_BYTE_ORDER_MARK):
            self._at = len(_BYTE_ORDER_MARK)
        first = self._text[:16].encode("latin-1")
        compression = compression_of(first)
        if compression is not None:
            raise SourceInvalid(
                f"{self._path} is compressed ({compression.name}), so its objects cannot be read one by one; unpack it: "
                f"{compression.unpack} < FILE > UNPACKED"
            )
        if self._peek() == "[":
            raise SourceInvalid(f"{self._path} is a list, as of results, and not an object with images and annotations")
        if self._peek() != "{":
            raise SourceInvalid(f"{self._path} begins with {first[:8]!r}, and JSON of COCO with {{")

    def _wrong(self, what: str) -> SourceInvalid:
        return SourceInvalid(f"{self._path}: {what} (byte {self._before + self._at})")
