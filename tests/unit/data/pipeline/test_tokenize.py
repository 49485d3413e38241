"""Text to tokens, with generated tokenizer.json files, against plain Python."""

import itertools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.shapes.options import Ragged
from batchd.data.pipeline.text.options import Tokenize
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.steps import check_steps
from support.texts import BPE_MERGES, BPE_VOCABULARY, WORDS, byte_pairs, save, with_special, word_level

TEXT = [Column("text", "text"), Column("label", dtype="int64")]
UNK, CLS, SEP = 0, 1, 2


def run(step, text):
    """The fields that the step makes of a text."""
    fields = {field.name: field for field in sample_fields(TEXT, [step], "fail")[:-1]}
    row = {name: np.full(field.shape, 77, field.dtype) for name, field in fields.items()}
    Pipeline(TEXT, [step], 0).run({"text": text, "label": 5}, 0, 0, 0, row)
    assert row.pop("label") == 5
    return row


def tokens_of(step, text):
    """The tokens without their padding, after a check of mask and length."""
    row = run(step, text)
    count = int(row["tokens_length"])
    assert row["tokens_mask"].tolist() == [1] * count + [0] * (step.max_length - count)
    return row["tokens"][:count].tolist()


def words_of(text):
    """The tokens of the word-level tokenizer for a text, without special tokens."""
    return [WORDS.get(word, UNK) for word in re.findall(r"\w+|[^\w\s]+", text)]


def byte_pairs_of(text):
    """Byte pair encoding in its textbook form.

    It merges the best pair, the leftmost one first, until no pair is left.
    """
    made = []
    for word in text.split():
        pieces = list(word)
        while True:
            ranks = [
                BPE_MERGES.index(pair) if pair in BPE_MERGES else len(BPE_MERGES) for pair in itertools.pairwise(pieces)
            ]
            if min(ranks, default=len(BPE_MERGES)) == len(BPE_MERGES):
                break
            place = ranks.index(min(ranks))
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
        made += [BPE_VOCABULARY.get(piece, 0) for piece in pieces]
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "words": save(word_level(), folder, "words.json"),
        "pairs": save(byte_pairs(), folder, "pairs.json"),
    }


def test_words_become_their_numbers_with_padding_behind_them(files):
    """Tokens, mask and length have the types that trainers expect."""
    row = run(Tokenize(file=files["words"], max_length=9, pad_id=9), "the cat sat on a mat.")

    assert {name: array.dtype.name for name, array in row.items()} == {
        "tokens": "int32",
        "tokens_mask": "uint8",
        "tokens_length": "int32",
    }
    assert row["tokens"].tolist() == [CLS, 3, 4, 5, 6, UNK, 7, 8, SEP]
    row = run(Tokenize(file=files["words"], max_length=6, pad_id=9), "the cat")
    assert row["tokens"].tolist() == [CLS, 3, 4, SEP, 9, 9]
    assert row["tokens_mask"].tolist() == [1, 1, 1, 1, 0, 0]
    assert row["tokens_length"] == 4


@given(st.lists(st.sampled_from(["the", "cat", "dog", ".", "mat"])), st.integers(2, 12), st.booleans())
def test_long_texts_are_cut_at_their_end_and_keep_their_special_tokens(files, words, max_length, special_tokens):
    """This holds for every length; without special tokens there is room for two more words."""
    text = " ".join(words)
    step = Tokenize(file=files["words"], max_length=max_length, special_tokens=special_tokens)

    whole = words_of(text)
    cut = [CLS, *whole[: max_length - 2], SEP] if special_tokens else whole[:max_length]
    assert tokens_of(step, text) == cut


@given(st.text("abcdefghij ", max_size=40))
def test_byte_pairs_are_merged_in_their_order(files, text):
    """The tokens equal those of the implementation in plain Python."""
    step = Tokenize(file=files["pairs"], max_length=64)

    assert tokens_of(step, text) == byte_pairs_of(text)


def test_a_text_that_is_too_long_is_a_bad_sample_where_none_may_be_cut(files):
    """The message has both lengths."""
    step = Tokenize(file=files["words"], max_length=4, truncation=False)

    assert tokens_of(step, "the cat") == [CLS, 3, 4, SEP]
    with pytest.raises(SampleUndecodable, match=r"^the text has 5 tokens, more than max_length = 4$"):
        run(step, "the cat sat")


def test_without_padding_there_are_as_many_tokens_as_there_are(files):
    """A later step gives the tokens a fixed shape; mask and length fields are not made."""
    step = Tokenize(file=files["words"], max_length=4, padding="none")
    pipeline = Pipeline([Column("text", "text")], [step], 0)
    row = {"tokens": np.zeros(4, np.int32)}

    pipeline.run({"text": "the cat sat on"}, 0, 0, 0, row)

    assert {name: column.text for name, column in pipeline.columns.items()} == {"tokens": "int32[?]"}
    assert row["tokens"].tolist() == [CLS, 3, 4, SEP]
    assert "a batch cannot hold 'tokens' (int32[?]" in check_steps(TEXT, [step])[0]
    assert check_steps(TEXT, [step, Ragged(field="tokens", max_shape=(4,))]) == []


def test_what_the_file_says_of_padding_and_truncation_does_not_count(tmp_path):
    """Only the file's number for padding is used."""
    tokenizer = word_level()
    tokenizer.enable_padding(direction="left", length=20, pad_id=6)
    tokenizer.enable_truncation(3)
    file = save(tokenizer, tmp_path)

    assert run(Tokenize(file=file, max_length=7), "the cat sat")["tokens"].tolist() == [CLS, 3, 4, 5, SEP, 6, 6]
    assert len(tokens_of(Tokenize(file=file, max_length=30, truncation=False), "the cat " * 14)) == 30


@pytest.mark.parametrize(
    ("tokenizer", "pad_id", "expected"),
    [
        (word_level(), None, 0),
        (with_special(word_level(), "[PAD]"), None, len(WORDS)),
        (with_special(word_level(), "<pad>"), None, len(WORDS)),
        (with_special(word_level(), "[MASK]"), None, 0),
        (with_special(word_level(), "[PAD]"), 3, 3),
    ],
)
def test_the_padding_is_the_tokenizers_own(tmp_path, tokenizer, pad_id, expected):
    """A number in the step's options overrides it."""
    file = save(tokenizer, tmp_path)

    assert run(Tokenize(file=file, max_length=3, pad_id=pad_id), "")["tokens"].tolist() == [CLS, SEP, expected]


def test_fields_stand_where_the_text_was_and_are_called_what_the_step_says(files):
    """The tokens may have the name of the text."""
    for to in ("ids", "text"):
        fields = sample_fields(TEXT, [Tokenize(file=files["words"], max_length=4, to=to)], "fail")
        assert [field.name for field in fields] == [to, f"{to}_mask", f"{to}_length", "label", "index"]


@pytest.mark.parametrize("text", ["\ud800", 7, None, memoryview(b"the cat")])
def test_what_is_no_text_is_a_bad_sample(files, text):
    """Half of a surrogate pair is no text either."""
    with pytest.raises(SampleUndecodable):
        run(Tokenize(file=files["words"], max_length=4), text)


def test_a_word_that_the_tokenizer_has_nothing_for_is_a_bad_sample(tmp_path):
    """The message has the tokenizer's own error."""
    document = json.loads(word_level().to_str())
    document["model"]["unk_token"] = "[NONE]"
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))

    with pytest.raises(SampleUndecodable, match="the tokenizer does not take the text: WordLevel error"):
        run(Tokenize(file=file, max_length=4), "dog")


def test_a_number_that_int32_cannot_hold_is_a_bad_sample(tmp_path):
    """No number wraps around."""
    document = json.loads(word_level().to_str())
    document["model"]["vocab"]["cat"] = (1 << 32) - 1
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(document))

    with pytest.raises(SampleUndecodable, match="makes the number 4294967295, which int32 cannot hold"):
        run(Tokenize(file=file, max_length=4), "cat")


@pytest.mark.parametrize(
    ("columns", "changes", "problem"),
    [
        ([Column("text", "encoded")], {}, "\"tokenize\" needs text, and 'text' is the bytes of an image file"),
        ([Column("text", dtype="uint8", shape=(9,))], {}, "\"tokenize\" needs text, and 'text' is uint8[9]"),
        ([Column("caption", "text")], {}, "is done to 'text', and a sample has 'caption'"),
        (TEXT, {"to": "label"}, "would make a field 'label', which the sample has already"),
        (TEXT, {"to": "index"}, "would make a field 'index', which every batch has of itself"),
        (TEXT, {"max_length": 1}, "adds 2 special tokens, more than max_length = 1"),
    ],
)
def test_steps_that_cannot_be_done_are_named(files, columns, changes, problem):
    """The message has the column that is there instead."""
    step = Tokenize(**{"file": files["words"], "max_length": 4} | changes)

    assert [text for text in check_steps(columns, [step]) if problem in text]


def test_a_file_that_is_cut_anywhere_is_named(files, tmp_path):
    """The daemon's start and ``batchd check`` report it, so that workers never meet it."""
    whole = files["words"].read_bytes()
    file = tmp_path / "cut.json"
    for length in range(0, len(whole.rstrip()), 7):
        file.write_bytes(whole[:length])
        (problem,) = check_steps(TEXT[:1], [Tokenize(file=file, max_length=4)])
        assert problem.startswith(f"{file} is not a tokenizer.json, or it is cut: ")


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"model": {}}', b"null", b"\xff\xfe", b"[" * 10_000, b"0" * 100])
def test_what_is_no_tokenizer_is_named(tmp_path, content):
    """The message is the same for every kind of wrong content."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)

    (problem,) = check_steps(TEXT[:1], [Tokenize(file=file, max_length=4)])
    assert problem.startswith(f"{file} is not a tokenizer.json")


def test_a_tokenizer_that_throws_dice_is_refused(tmp_path):
    """The same text could not have the same tokens on every worker."""
    tokenizer = byte_pairs()
    tokenizer.model.dropout = 0.5

    (problem,) = check_steps(TEXT[:1], [Tokenize(file=save(tokenizer, tmp_path), max_length=4)])
    assert "has dropout = 0.5, which makes other tokens of the same text each time" in problem


def test_padding_that_int32_cannot_hold_is_named(tmp_path):
    """The message names the option to set instead."""
    tokenizer = word_level()
    tokenizer.enable_padding(pad_id=1 << 31)

    (problem,) = check_steps(TEXT[:1], [Tokenize(file=save(tokenizer, tmp_path), max_length=4)])
    assert "pads with 2147483648, which int32 cannot hold; set pad_id" in problem


def test_without_the_library_the_extra_is_named(files, monkeypatch):
    """``batchd check`` already reports it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    problems = check_steps(TEXT[:1], [Tokenize(file=files["words"], max_length=4)])
    command = f"{sys.executable} -m pip install 'batchd[text]'"
    assert problems == [f'"tokenize" needs tokenizers, which is not installed: {command}']


def test_no_thread_is_started(files):
    """The environment asks for threads, but there is already one worker for every core."""
    program = f"""
import os
from pathlib import Path
from batchd.data.samples.columns import Column
from batchd.data.pipeline.text.options import Tokenize
from batchd.data.pipeline.execute import Pipeline
import numpy as np
before = len(os.listdir("/proc/self/task"))
pipeline = Pipeline([Column("text", "text")], [Tokenize(file=Path({str(files["pairs"])!r}), max_length=4)], 0)
row = {{name: np.zeros(column.fixed_shape, column.dtype) for name, column in pipeline.columns.items()}}
for _ in range(100):
    pipeline.run({{"text": "abcde " * 1000}}, 0, 0, 0, row)
print(len(os.listdir("/proc/self/task")) - before)
"""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "8"}

    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
