"""Words that are known have the tokens that the library makes of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from batchd.data.pipeline import _words
from batchd.data.pipeline.text import byte_pairs
from batchd.data.pipeline.text.byte_pairs import WordEncoder, word_encoder
from batchd.data.pipeline.text.files import TextTokenizer
from batchd.data.pipeline.text.options import Tokenize
from batchd.data.samples.errors import SampleUndecodable

VOCABULARY = json.loads((Path(__file__).parents[3] / "golden" / "chats.json").read_text())["tokenizer"]
ENDS = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%"
PATTERNS = {
    "gpt-2": None,
    "llama-3": rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{ENDS}",
    "qwen-2": rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{ENDS.replace('{1,3}', '')}",
    "qwen-3.5": rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|"
    r"\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": f"{CASED.replace('%', '')}|{ENDS.replace('{1,3}', '').replace(chr(92) + 'n]*', chr(92) + 'n/]*')}",
    "o200k": f"{CASED.replace('%', ENDINGS + '?')}|{ENDS.replace(chr(92) + 'n]*', chr(92) + 'n/]*')}",
}
ODD_CODES = (
    0x2019,
    0x2028,
    0x3000,
    0xBD,
    0xB2,
    0x663,
    0xE9,
    0xC9,
    0xDF,
    0x17F,
    0x212A,
    0x1C5,
    0x2B0,
    0x301,
    0x338,
    0x4E2D,
)
ODD_CODES += (0xE01, 0xE34, 0x1F642, 0x1F469, 0x200D, 0xE000, 0x10FFFF)
ODD = "aAzZsStTrReEvVlLmMdD' \t\n\r\x0b\x1c\x85\xa0/-_.<>09" + "".join(map(chr, ODD_CODES))
TEXTS = st.text(st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"]), max_size=24)


def made(pattern: str | None, **parts: Any) -> Tokenizer:
    """A tokenizer of bytes, which cuts at a pattern of the library or at its own."""
    tokenizer = Tokenizer.from_str(json.dumps(VOCABULARY))
    tokenizer.add_tokens([AddedToken("<t>", normalized=False), AddedToken("<t>a", normalized=False)])
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = pre_tokenizers.Split(Regex(pattern or ""), "isolated")
    tokenizer.pre_tokenizer = own if pattern is None else pre_tokenizers.Sequence([split, own])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


@cache
def pair(name: str) -> tuple[Tokenizer, WordEncoder]:
    tokenizer = made(PATTERNS[name], normalizer=normalizers.NFC() if name.startswith("qwen") else None)
    encoder = word_encoder(tokenizer)
    assert encoder is not None
    return tokenizer, encoder


def check(tokenizer: Tokenizer, encoder: WordEncoder, text: str) -> bool:
    """Compare a text; False if the library has to encode it."""
    found, wanted = encoder.encode(text), tokenizer.encode(text, add_special_tokens=False)
    if found is None:
        return False
    assert found.ids.tolist() == wanted.ids
    assert [found.char_to_token(place) for place in range(len(text))] == list(
        map(wanted.char_to_token, range(len(text)))
    )
    return True


@pytest.mark.parametrize("name", PATTERNS)
def test_words_and_tokens_are_those_of_the_library(name: str) -> None:
    """Of any text: its words, the numbers of its tokens, and the token of each character."""
    tokenizer, encoder = pair(name)

    @given(TEXTS)
    def run(text: str) -> None:
        is_known = check(tokenizer, encoder, text)
        assert is_known or normalizers.NFC().normalize_str(text) != text
        if is_known and "<t>" not in text:
            words = [end for _word, (_first, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            found = encoder.encode(text)
            assert found is not None
            assert sorted(set(words)) == found.ends[:, 0].tolist()

    run()


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_character_is_of_the_class_that_the_library_says(name: str) -> None:
    """Of three planes of Unicode: behind a space, between letters, and in front of a line's end."""
    tokenizer = made(PATTERNS[name])
    encoder = word_encoder(tokenizer)
    assert encoder is not None
    codes = [code for code in range(0, 0x32000, 181) if not 0xD800 <= code < 0xE000]
    text = "".join(f" {one}a{one}\n" for one in map(chr, codes))

    found = encoder.encode(text)

    assert found is not None
    assert found.ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert found.ends[:, 0].tolist() == sorted({end for _word, (_first, end) in words})


def test_tokens_that_are_added_cut_a_text() -> None:
    """The longest first; special ones only where their text is parsed."""
    for keeps in (False, True):
        tokenizer = made(PATTERNS["llama-3"])
        tokenizer.encode_special_tokens = keeps
        encoder = word_encoder(tokenizer)
        assert encoder is not None
        for text in ("<t>", "a <t>a <t> <t><t>aa", "x <|im_end|> <t>\n\n<|im_end|>", " <t>  <t> é<t>é", ""):
            assert check(tokenizer, encoder, text)


@pytest.mark.parametrize("tokens", [["é", "\ue000", "<m>"], ["é", "\ue000", "é!"], ["x", "\n"]])
def test_tokens_of_one_character_cut_a_text(tokens: list[str]) -> None:
    """Beside longer ones, or as a part of these; also where others of their block are asked for."""
    tokenizer = made(PATTERNS["llama-3"])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    encoder = word_encoder(tokenizer)
    assert encoder is not None
    for text in ("é", "aéb\ue000\ue000 é!é", "\ue001\ue000è é", "<m>\ue000<m> é<m", "ax x\n\n xx\n", ""):
        assert check(tokenizer, encoder, text)


def test_texts_are_tokenized_by_words_where_nothing_is_added(tmp_path: Path) -> None:
    """They are cut at their end, as the library cuts them; without the extension, it does all."""
    made(PATTERNS["llama-3"]).save(str(tmp_path / "tokenizer.json"))
    text = "Hello there, it's 12345 é\n"
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    for length in (4, len(whole), 99):
        step = Tokenize(file=tmp_path / "tokenizer.json", max_length=length)
        assert TextTokenizer(step).tokens_of(text).tolist() == whole[:length]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(byte_pairs, "IS_BUILT", False)
            assert TextTokenizer(step).tokens_of(text).tolist() == whole[:length]
    with pytest.raises(SampleUndecodable, match="more than max_length = 4"):
        TextTokenizer(Tokenize(file=tmp_path / "tokenizer.json", max_length=4, truncation=False)).tokens_of(text)


def test_a_memo_that_is_full_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long words are not kept; numbers stay the same."""
    monkeypatch.setattr(byte_pairs, "WORDS_MAX", 4)
    tokenizer = made(None)
    encoder = word_encoder(tokenizer)
    assert encoder is not None

    for text in (*(f"w{number} {'é' * number}" for number in range(40)), "x" * 300, "é" * 300):
        assert check(tokenizer, encoder, text)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.NFKC()},
        {"pre_tokenizer": None},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"post_processor": processors.ByteLevel(trim_offsets=True)},
    ],
)
def test_other_tokenizers_are_left_to_the_library(parts: dict[str, Any]) -> None:
    """Those whose tokens depend on more than the words."""
    assert word_encoder(made(None, **parts)) is None


@pytest.mark.parametrize(
    "pattern",
    [r"\w+", r"\p{L}+?", r"\p{L}++", "(a|b)", r"\p{Han}+", r"\p{L}+|", "[a-c]+", r"\p{L}{2}", f"{ENDINGS}x", ""],
)
def test_other_patterns_are_left_to_the_library(pattern: str) -> None:
    """Parts that are not known might mean something else."""
    assert word_encoder(made(pattern)) is None


def test_added_tokens_with_conditions_are_left_to_the_library() -> None:
    """Those that take spaces along, stand alone, or are sought in normalised text."""
    for options in ({"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}):
        tokenizer = made(None)
        tokenizer.add_tokens([AddedToken("<x>", **{"normalized": False, **options})])
        assert word_encoder(tokenizer) is None


def test_half_of_a_surrogate_pair_is_left_to_the_library() -> None:
    """It refuses it."""
    assert pair("llama-3")[1].encode("a\ud800") is None


@pytest.mark.parametrize(
    ("letters", "program", "table"),
    [
        (b"a", b"\0", bytearray(32)),
        (b"ab", b"", bytearray(32)),
        (b"ab", b"\1", bytearray(32)),
        (b"ab", b"\0\1\0\1\1", bytearray(32)),
        (b"ab", bytes([1]) + bytes(32) + b"\2\0\1\1", bytearray(32)),
        (b"ab", b"\0" + b"\0" * 65, bytearray(32)),
        (b"ab", b"\0", bytearray(31)),
        (b"ab", b"\0", bytearray(96)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(letters: bytes, program: bytes, table: bytearray) -> None:
    """The extension reads nothing outside of them."""
    with pytest.raises(ValueError, match="letters are as many"):
        _words.encode("ab", letters, program, {}, table)


def test_where_no_word_begins_the_text_ends() -> None:
    """Its words are fewer; an error of the memo is raised."""
    program = bytes([1]) + bytes([255] * 16) + bytes(16) + b"\1\0\1\1"
    assert _words.encode("aß", b"a\xdf", program, {"a": b"1234"}, bytearray(32))[0] == b"1234"
    with pytest.raises(KeyError):
        _words.encode("b", b"b", program, {}, bytearray(32))


def test_letters_and_words_of_other_arguments_are_refused() -> None:
    """A table of less than all characters; a character behind the words, or before them."""
    with pytest.raises(ValueError, match="a letter for each character"):
        _words.letters("a", np.zeros(128, np.uint8))
    for character in (-1, 3, 1 << 40):
        with pytest.raises(ValueError, match="in no word"):
            _words.place(np.array([[3, 8]], np.int32), character)
    assert _words.place(np.array([[3, 8], [5, 12]], np.int32), 4) == (3, 5, 2, 1)
