"""Byte-pair encoding as the library ``tokenizers`` does it, by words that it has seen. Workers.

    text --added tokens--> sections --pattern--> words --memo--> numbers
                           "Hi there"            "Hi" " there"   {" there": 1070, ...}

Texts repeat their words, and the library encodes each of them anew. Here it is asked once for the
tokens of a word, and once for the classes of a character, which differ between versions of Unicode.

Invariant: the numbers, and the token of each character, are those of ``Tokenizer.encode``. Where
this is not certain, ``word_encoder`` and ``encode`` return None, and the library has to encode.
"""

import json
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.pipeline.text.options import TOKEN_MAX

try:
    from batchd.data.pipeline import _words
except ImportError:  # not built
    IS_BUILT = False
else:
    IS_BUILT = True

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS_MAX = 1 << 17
"""Of the memo, which then begins anew: some 30 MB."""
WORD_CHARACTERS_MAX = 64
"""Longer words are not kept."""
_TOKEN_BYTES, _TABLE_BYTES = 4, 32 << 15
_ASCII, _GOES_ON, _BEGINS, _UNKNOWN, _LETTERS = 128, 253, 254, 255, 256
"""Letters: from ``_ASCII`` on of classes, then of tokens that are added, and of what is unknown."""
_BLOCK, _CHARACTERS, _SURROGATES = 256, 0x110000, range(0xD800, 0xE000)
_HAS_CLASSES, _HAS_UNKNOWN = 1, 2
"""What ``_words.letters`` has found."""
_ANY = 255
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern that ``ByteLevel`` has of its own."""
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MEMBER = r"\\p\{[LMN][a-z]?\}|\\s|\\[rn]|[ '/a-z]"
_ITEM = re.compile(
    rf"(?P<next>\(\?!\\S\))|(?P<ending>%)(?P<maybe>\??)|"
    rf"(?P<set>\[\^?(?:{_MEMBER})+\]|{_MEMBER})(?P<times>\{{1,3\}}|[?*+]?)(?![?*+{{])"
)
"""A part of a pattern that means here what it does in the library. Patterns of such parts are those
of GPT-2, Llama 3 and 4, Qwen, Tekken and o200k."""
_TIMES = {"": (1, 1), "?": (0, 1), "*": (0, _ANY), "+": (1, _ANY), "{1,3}": (1, 3)}


_BYTE_LEVEL = r'\{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":[a-z]+,"use_regex":{}\}}'
_OWN_PATTERN = re.compile(_BYTE_LEVEL.format("true"))
_ONE_PATTERN = re.compile(
    r'\{"type":"Sequence","pretokenizers":\[\{"type":"Split","pattern":\{"Regex":("(?:[^"\\]|\\.)*")\},'
    rf'"behavior":(?:"Isolated","invert":false|"Removed","invert":true)\}},{_BYTE_LEVEL.format("false")}\]\}}'
)
"""Pre-tokenizers, in JSON."""
_Item = tuple[tuple[str, ...], int, int]
"""Members of a set of letters, and how often it is there: at least, at most."""
_ADDED: list[_Item] = [((chr(_BEGINS),), 1, 1), ((chr(_GOES_ON),), 0, _ANY)]
"""A token that is added: no other part of a pattern matches its letters."""


class EncodedWords(NamedTuple):
    """The tokens of a text. ``ends``: see ``_words.encode``."""

    ids: NDArray[np.int32]
    text: str
    ends: NDArray[np.int32]
    encoder: "WordEncoder"

    def __len__(self) -> int:
        return len(self.ids)

    def char_to_token(self, character: int) -> int:
        """The first token of a character."""
        first, end, token, count = _words.place(self.ends, character)
        if count == 1 or character == first:
            return int(token)
        return int(token) + self.encoder.token_in(self.text[first:end], character - first)


class _Memo(dict[str, bytes]):
    """The numbers of a word as bytes of int32."""

    def __init__(self, encoder: "WordEncoder") -> None:
        super().__init__()
        self._encoder = encoder

    def __missing__(self, word: str) -> bytes:
        numbers = [number for number, _size in self._encoder.made(word)]
        made = array("i", numbers).tobytes()
        if len(self) >= WORDS_MAX:
            self.clear()
        if len(word) <= WORD_CHARACTERS_MAX:
            self[word] = made
        return made


class WordEncoder:
    """See the module. Made by ``word_encoder``."""

    def __init__(self, tokenizer: "Tokenizer", pattern: str, added: Mapping[str, int]) -> None:
        self._tokenize = tokenizer.model.tokenize
        self._normalizer = tokenizer.normalizer
        self._added = added
        marks = {token for token in added if len(token) == 1}
        if any(mark in token for token in added.keys() - marks for mark in marks):
            marks = set()  # the longer one counts
        several = added.keys() - marks
        found = "|".join(map(re.escape, sorted(several, key=len, reverse=True)))
        self._find_added = re.compile(found).finditer if found else None
        self._letters = _Letters(pattern, "".join(sorted(marks)))
        self._memo = _Memo(self)
        self._table = bytearray(_TABLE_BYTES)

    def encode(self, text: str) -> EncodedWords | None:
        """The tokens of a text, without those that the library adds around it."""
        try:
            letters, has_classes = self._letters.of(text)
        except UnicodeEncodeError:  # half of a surrogate pair
            return None
        for found in self._find_added(text) if self._find_added is not None else ():
            first, end = found.span()
            letters[first:end] = bytes([_BEGINS]) + bytes([_GOES_ON]) * (end - first - 1)
        if has_classes and self._normalizer is not None and self._normalizer.normalize_str(text) != text:
            return None
        numbers, words = _words.encode(text, letters, self._letters.program, self._memo, self._table)
        if len(text) != int.from_bytes(words[-2 * _TOKEN_BYTES : -_TOKEN_BYTES], sys.byteorder):
            return None
        ends = np.frombuffer(words, np.int32).reshape(-1, 2)
        return EncodedWords(np.frombuffer(numbers, np.int32), text, ends, self)

    def made(self, word: str) -> Iterator[tuple[int, int]]:
        """Number and bytes of each token of a word."""
        if word in self._added:
            yield self._added[word], len(word.encode())
            return
        for token in self._tokenize(word.encode().decode("latin-1").translate(_BYTES)):
            yield token.id, len(token.value)

    def token_in(self, word: str, character: int) -> int:
        """The first token of a character of a word."""
        ends = accumulate(size for _number, size in self.made(word))
        return bisect_right(list(ends), len(word[:character].encode()))


class _Letters:
    """A letter, one byte, for each character, and the pattern as a program on these.

    One of ASCII is its own letter, any other has that of the classes that it is in. ``marks`` are
    tokens that are added, of one character each.
    """

    def __init__(self, pattern: str, marks: str = "") -> None:
        from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415  needs an extra

        self._alternatives = _alternatives(pattern)
        names = {name for items in self._alternatives for members, _least, _most in items for name in members}
        asked = sorted(name for name in names if name.startswith(("\\p", "\\s", "(?i")))
        self._removing = {name: pre_tokenizers.Split(Regex(name), "removed").pre_tokenize_str for name in asked}
        self._of_classes: dict[tuple[bool, ...], int] = {}
        self._of_ascii = {name: np.flatnonzero(self._asked(name, range(_ASCII))).tolist() for name in asked}
        self._table = np.full(_CHARACTERS, _UNKNOWN, np.uint8)
        self._table[:_ASCII] = np.arange(_ASCII)
        self._marks = list(map(ord, marks))
        self._table[self._marks] = _BEGINS
        self.program = self._written()

    def of(self, text: str) -> tuple[bytearray, bool]:
        """The letters of a text, and whether any is of classes. Raises ``UnicodeEncodeError``."""
        letters, found = _words.letters(text, self._table)
        if found & _HAS_UNKNOWN:
            codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
            for block in np.unique(codes[np.frombuffer(letters, np.uint8) == _UNKNOWN] // _BLOCK).tolist():
                self._ask(range(max(_ASCII, block * _BLOCK), (block + 1) * _BLOCK))
            self._table[self._marks] = _BEGINS
            self.program = self._written()
            letters, found = _words.letters(text, self._table)
        return letters, bool(found & _HAS_CLASSES)

    def _ask(self, codes: Sequence[int]) -> None:
        """Ask the library for the classes of some characters."""
        codes = [code for code in codes if code not in _SURROGATES]
        for code, *classes in zip(codes, *(self._asked(name, codes).tolist() for name in self._removing), strict=True):
            self._table[code] = self._of_classes.setdefault(tuple(classes), _ASCII + len(self._of_classes))

    def _asked(self, name: str, codes: Sequence[int]) -> NDArray[np.bool_]:
        """Which characters are of a class."""
        are = np.ones(len(codes), bool)
        for _text, (first, end) in self._removing[name]("".join(map(chr, codes))):
            are[first:end] = False
        return are

    def _written(self) -> bytes:
        """The program: see ``_words.c``."""
        sets: dict[bytes, int] = {}
        alternatives = []
        for items in [_ADDED, *self._alternatives]:
            written = bytearray([len(items)])
            for members, least, most in items:
                written += bytes([sets.setdefault(self._set(members), len(sets)), least, most])
            alternatives.append(bytes(written))
        return b"".join([bytes([len(sets)]), *sets, *alternatives])

    def _set(self, members: Sequence[str]) -> bytes:
        """A bit for each letter."""
        bits = np.zeros(_LETTERS, bool)
        for name in members:
            if name in self._removing:
                place = list(self._removing).index(name)
                others = [letter for classes, letter in self._of_classes.items() if classes[place]]
                bits[self._of_ascii[name] + others] = True
            elif name != "^":
                bits[ord(name)] = True
        if "^" in members:
            bits[:_GOES_ON] = ~bits[:_GOES_ON]
        return np.packbits(bits, bitorder="little").tobytes()


def _alternatives(pattern: str) -> list[list[_Item]]:
    """The alternatives of a pattern, as items of members, least and most. Raises ``ValueError``."""
    found: list[list[_Item]] = []
    for alternative in pattern.replace(_ENDINGS, "%").split("|"):
        items: list[_Item] = []
        at = 0
        while (part := _ITEM.match(alternative, at)) is not None:
            at = part.end()
            if part["next"]:
                items.append((("^", r"\s"), 0, 0))
            elif part["ending"]:
                if at < len(alternative):
                    break
                found += [[*items, *ending] for ending in _endings()]
            else:
                members = re.findall(rf"\^|{_MEMBER}", part["set"])
                items.append((tuple(_ESCAPED.get(name, name) for name in members), *_TIMES[part["times"]]))
        if at < len(alternative) or not alternative:
            raise ValueError(f"not known: {alternative[at:]!r}")
        if not alternative.endswith("%"):
            found.append(items)
    return found


_ESCAPED = {r"\r": "\r", r"\n": "\n"}


def _endings() -> Iterator[list[_Item]]:
    """Those of English words, in either case."""
    for ending in re.findall("'([a-z]+)", _ENDINGS):
        yield [(("'",), 1, 1), *(((f"(?i:{letter})",), 1, 1) for letter in ending)]


def word_encoder(tokenizer: "Tokenizer") -> WordEncoder | None:
    """An encoder that does as a tokenizer does when it adds no special tokens, or None."""
    from tokenizers import models  # noqa: PLC0415  needs an extra

    model, pattern = tokenizer.model, _pattern_of(tokenizer.pre_tokenizer)
    if not IS_BUILT or pattern is None or not _keeps_places(tokenizer.post_processor):
        return None
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if _state(tokenizer.normalizer) not in {"", '{"type":"NFC"}'}:
        return None
    vocabulary = tokenizer.get_vocab()
    if not vocabulary.keys() >= set(_BYTES.values()) or max(vocabulary.values()) > TOKEN_MAX:
        return None
    added = {
        token.content: (number, token)
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if not (token.special and tokenizer.encode_special_tokens)
    }
    if any(token.single_word or token.lstrip or token.rstrip or token.normalized for _number, token in added.values()):
        return None
    try:
        return WordEncoder(tokenizer, pattern, {content: number for content, (number, _token) in added.items()})
    except ValueError:
        return None


def _pattern_of(pre_tokenizer: object) -> str | None:
    """The pattern at which a pre-tokenizer cuts, before it makes bytes of the words."""
    state = _state(pre_tokenizer)
    if _OWN_PATTERN.fullmatch(state):
        return _GPT2
    found = _ONE_PATTERN.fullmatch(state)
    return None if found is None else str(json.loads(found[1]))


def _keeps_places(post_processor: object) -> bool:
    """True if a post-processor leaves the characters of a token as they are."""
    state = _state(post_processor)
    kinds = set(re.findall('"type":"([A-Za-z]+)"', state))
    return kinds <= {"ByteLevel", "TemplateProcessing", "Sequence"} and '"trim_offsets":true' not in state


def _state(part: object) -> str:
    """The options of a part of a tokenizer, in JSON."""
    state = b"" if part is None else part.__getstate__()
    assert isinstance(state, bytes), "the library pickles its parts as JSON"
    return state.decode()


def _byte_letters() -> dict[int, str]:
    """The character that stands for each byte: itself if it is seen, else one from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(seen))
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


_BYTES = _byte_letters()
