"""Lowercase letters, stop words, vectors of words, and text as bytes, against plain Python."""

import os
from unicodedata import category

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchd_client
from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.sample_fields import sample_fields
from batchd.data.pipeline.step_files import StepFileInvalid
from batchd.data.pipeline.text.options import Lookup, Lowercase, RemoveStopwords, TextBytes
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.steps import check_steps
from support.texts import word_table

TEXT = [Column("text", "text")]
ROOM = 4096


def run(steps, text):
    """The fields that the steps make of a text."""
    row = {field.name: np.full(field.shape, 77, field.dtype) for field in sample_fields(TEXT, steps, "fail")[:-1]}
    Pipeline(TEXT, steps, 0).run({"text": text}, 0, 0, 0, row)
    return row


def text_after(step, text):
    """The text that a step makes of another one."""
    (made,) = batchd_client.text(run([step, TextBytes(length=ROOM)], text)["text"][None])
    return made


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
def test_small_letters_are_pythons(text):
    """Lowercase letters are those of ``str.lower`` in every language."""
    assert text_after(Lowercase(), text) == text.lower()


def test_small_letters_of_a_few_languages():
    """One letter may become two."""
    assert text_after(Lowercase(), "ΑΣ GROSSE Straẞe İ Ж") == "ας grosse straße i̇ ж"


def stop_words(folder, content):
    file = folder / "stop.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize(
    ("text", "case", "becomes"),
    [
        ("The cat (the old one), and a dog.", "ignore", "cat ( old one), dog."),
        ("The cat and the dog", "exact", "The cat dog"),
        ("theatre  the\n\n\tother", "ignore", "theatre other"),
        ("Don't! don\u2019t stop", "ignore", "! don\u2019t stop"),
        ("the", "ignore", ""),
        ("", "ignore", ""),
        ("...  !", "ignore", "... !"),
        ("THE-the the-the", "ignore", "THE-the the-the"),
        ("मैं और तुम", "ignore", "मैं तुम"),
    ],
)
def test_words_of_the_list_go(tmp_path, text, case, becomes):
    """A word goes with its white space, and punctuation around other words stays."""
    file = stop_words(tmp_path, "the\nand\na\ndon't\nऔर\n")

    assert text_after(RemoveStopwords(file=file, case=case), text) == becomes


@given(
    st.lists(st.sampled_from(["the", "The", "theory", "of", "(of)", "cat", "é", "of,the"]), max_size=12),
    st.sampled_from([" ", "\n", " \u3000 "]),
)
def test_what_is_left_are_the_other_words(tmp_path_factory, words, space):
    """Single spaces join the words, whatever was between them."""
    file = tmp_path_factory.mktemp("words") / "stop.txt"
    file.write_text("the\nOf\n")

    kept = [word.replace("of", "") if word == "(of)" else word for word in words if word.lower() not in {"the", "of"}]
    assert text_after(RemoveStopwords(file=file), space.join(words)) == " ".join(kept)


def test_lists_have_comments_blank_lines_and_a_mark_in_front(tmp_path):
    """People write such lists, and editors on Windows do."""
    file = stop_words(tmp_path, b"\xef\xbb\xbfthe\r\n# of\r\n\r\n  and   # not or\r\n'a'\r\n")

    assert text_after(RemoveStopwords(file=file), "the cat of and a dog or") == "cat of dog or"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no words"),
        ("# nothing\n\n", "has no words"),
        ("the\nof course\n", "line 2 is 'of course', which is not one word"),
        ("the\n\n...\n", "line 3 is '...', which is not one word"),
        (b"the\nna\xefve\n", "is not UTF-8: byte 0xef at 6"),
    ],
)
def test_lists_that_are_none_are_named(tmp_path, content, problem):
    """The message has the line."""
    file = stop_words(tmp_path, content)

    (found,) = check_steps(TEXT, [RemoveStopwords(file=file), TextBytes(length=9)])
    assert str(file) in found
    assert problem in found


def words_of(text):
    """The words of a text: chunks between white space, without punctuation at their ends."""
    punctuation = "".join({one for one in text if not (one.isalnum() or category(one).startswith("M"))})
    return [word for chunk in text.split() if (word := chunk.strip(punctuation))]


VOCABULARY = ["the", "cat", "é", "e\u0301", "don't", "cat", "x", "2", ""]
"""The vocabulary has one word twice, and an empty one."""


@given(
    st.lists(st.sampled_from(["the", "(cat)", "Cat", "é!", "e\u0301", "don't", "dog", "2", "..."]), max_size=9),
    st.integers(1, 6),
    st.sampled_from(["skip", "zeros"]),
)
def test_words_become_the_rows_of_the_table(tmp_path_factory, words, max_words, unknown):
    """Unknown words follow the option, and zeros fill the rows after the last word."""
    files, table = word_table(tmp_path_factory.mktemp("table"), VOCABULARY)
    row = run([Lookup(**files, max_words=max_words, unknown=unknown)], " ".join(words))

    found = [VOCABULARY.index(word) if word in VOCABULARY else None for word in words_of(" ".join(words))]
    if unknown == "skip":
        found = [one for one in found if one is not None]
    expected = np.zeros((max_words, 3), np.float32)
    for place, one in enumerate(found[:max_words]):
        expected[place] = 0 if one is None else table[one]
    assert row["vectors"].dtype == np.float32
    assert np.array_equal(row["vectors"], expected)
    assert row["vectors_length"] == min(len(found), max_words)
    assert row["vectors_length"].dtype == np.int32


def test_many_words_are_each_found_where_they_stand(tmp_path):
    """Words with equal hashes are told apart: "plumless" and "buckeroo" have the same CRC-32."""
    words = ["plumless", "buckeroo", *(f"word{number}" for number in range(50_000))]
    files, table = word_table(tmp_path, words, columns=1)
    asked = ["buckeroo", "plumless", "word49999", "word0", "word31415"]

    vectors = run([Lookup(**files, max_words=5)], " ".join(asked))["vectors"]

    assert vectors[:, 0].tolist() == [table[words.index(word), 0] for word in asked]


def test_lines_end_as_they_do_on_windows_too(tmp_path):
    """The last line needs no line end."""
    files, table = word_table(tmp_path, ["the", "cat"])
    files["words"].write_bytes(b"the\r\ncat")

    assert np.array_equal(run([Lookup(**files, max_words=1)], "cat")["vectors"], table[1:])


def test_a_text_with_more_words_is_a_bad_sample_where_none_may_be_cut(tmp_path):
    """Words that are skipped do not count."""
    files, _table = word_table(tmp_path, ["the", "cat"])
    step = Lookup(**files, max_words=2, truncation=False)

    assert run([step], "the old cat")["vectors_length"] == 2
    with pytest.raises(SampleUndecodable, match="the text has 3 words, more than max_words = 2"):
        run([step], "the cat, the dog")


def broken_table(folder, write):
    files, _table = word_table(folder, ["the", "cat", "sat"])
    write(files["table"])
    return files


def saved(array):
    return lambda file: np.save(file, array, allow_pickle=True)


class Harmful:
    """An object that would create a folder if it was unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (saved(np.zeros((3, 2))), "holds float64[3, 2]; it must be float32[words, columns]"),
        (saved(np.zeros(3, np.float32)), "holds float32[3]; it must be"),
        (saved(np.zeros((3, 2), ">f4")), "holds >f4[3, 2]; it must be"),
        (saved(np.zeros((3, 2), np.float32, order="F")), "columns first in memory; it must be"),
        (saved(np.zeros((3, 0), np.float32)), "so there is nothing to look up"),
        (saved(np.array([[Harmful()]], object)), "holds object[1, 1]; it must be float32"),
        (saved(np.zeros((2, 2), np.float32)), "has 3 lines, and the table"),
        (saved(np.zeros((4, 2), np.float32)), "has 4 rows; they must be as many"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is cut: it has 163 bytes, and 164 by its header"),
        (lambda file: file.write_bytes(b""), "is not a .npy file, or it is cut"),
        (lambda file: file.write_bytes(b"PK\3\4 not this"), "is not a .npy file, or it is cut"),
        (lambda file: file.unlink(), "there is no file"),
    ],
)
def test_tables_that_are_none_are_named(tmp_path, monkeypatch, write, problem):
    """The check never unpickles anything."""
    monkeypatch.chdir(tmp_path)
    files = broken_table(tmp_path, write)

    (found,) = check_steps(TEXT, [Lookup(**files, max_words=2)])
    assert problem in found
    assert str(files["table"]) in found
    assert not (tmp_path / "unpickled").exists()


def test_a_header_that_is_cut_anywhere_is_named(tmp_path):
    """Every cut gives a message that names the file."""
    files, _table = word_table(tmp_path, ["the", "cat"])
    whole = files["table"].read_bytes()
    for length in range(len(whole)):
        files["table"].write_bytes(whole[:length])
        (problem,) = check_steps(TEXT, [Lookup(**files, max_words=2)])
        assert str(files["table"]) in problem


def test_a_table_that_is_written_to_while_it_is_in_use_ends_the_stream(tmp_path):
    """The stream ends before a sample gets a row of the new table."""
    files, table = word_table(tmp_path, ["the", "cat"])
    step = Lookup(**files, max_words=1)
    pipeline = Pipeline(TEXT, [step], 0)
    row = {"vectors": np.zeros((1, 3), np.float32), "vectors_length": np.zeros((), np.int32)}
    pipeline.run({"text": "cat"}, 0, 0, 0, row)
    assert np.array_equal(row["vectors"], table[1:])

    os.truncate(files["table"], 0)
    with pytest.raises(StepFileInvalid, match=r"table.npy was written to while it was in use; restart the daemon"):
        pipeline.run({"text": "cat"}, 0, 0, 0, row)


def test_a_table_that_is_replaced_stays_what_it_was(tmp_path):
    """A new file that is renamed into place does not change the mapped one."""
    files, table = word_table(tmp_path, ["the", "cat"])
    pipeline = Pipeline(TEXT, [Lookup(**files, max_words=1)], 0)
    row = {"vectors": np.zeros((1, 3), np.float32), "vectors_length": np.zeros((), np.int32)}

    for name in ("words.txt", "table.npy"):
        (tmp_path / "new").write_bytes(b"something else")
        (tmp_path / "new").rename(tmp_path / name)
    pipeline.run({"text": "cat"}, 0, 0, 0, row)

    assert np.array_equal(row["vectors"], table[1:])


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30), st.integers(1, 40))
def test_bytes_are_the_longest_beginning_of_whole_characters(text, length):
    """The client reads exactly this text."""
    row = run([TextBytes(length=length)], text)["text"]
    (read,) = batchd_client.text(row[None])

    assert text.startswith(read)
    assert len(read) == len(text) or len(text[: len(read) + 1].encode()) > length
    assert row.dtype == np.uint8
    assert bytes(row) == read.encode().ljust(length, b"\0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ééé", "^the text has 6 bytes, more than length = 5$"),
        ("a\0b", "^the text has the character NUL at 1$"),
        ("ab\ud800", "^the text has half of a surrogate pair at 2"),
        (b"bytes", "'text' is not a text but bytes"),
    ],
)
def test_texts_that_make_no_field_are_bad_samples(text, reason):
    """The reason says what is wrong with the text."""
    with pytest.raises(SampleUndecodable, match=reason):
        run([TextBytes(length=5, truncation=False)], text)


@pytest.mark.parametrize(
    ("column", "step", "problem"),
    [
        (Column("text", dtype="int64"), Lowercase(), "\"lowercase\" needs text, and 'text' is int64"),
        (Column("text", "encoded"), TextBytes(length=5), "is the bytes of an image file"),
        (Column("text", "text"), Lowercase(), "'text' is text, which a batch cannot hold; add \"tokenize\""),
        (Column("text", "text"), Lowercase(field="words"), "is done to 'words'"),
    ],
)
def test_steps_that_cannot_be_done_are_named(column, step, problem):
    """The message proposes a step that helps."""
    assert [found for found in check_steps([column], [step]) if problem in found]


def test_what_comes_after_bytes_is_named():
    """Text has become numbers by then."""
    steps = [TextBytes(length=5), Lowercase()]

    assert check_steps(TEXT, steps) == ['"lowercase" needs text, and \'text\' is uint8[5] after "text_bytes"']
