"""Tables in CSV format: their records, their cells, and an error for each kind of damage."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.csv import scan as csv_scan
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.recognise import recognise
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from support.samples import opened, read_samples, reason, scan
from support.source_files import source_problems

FIELDS = {"a": "text", "b": "text"}


def table(folder: Path, content: bytes | str, name: str = "t.csv", **options) -> CsvSource:
    """A source of one table with this content; by default the fields are texts ``a`` and ``b``."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return CsvSource(**{"path": path, "fields": FIELDS, **options})


def rows(source: CsvSource) -> list[tuple]:
    return [tuple(values.values()) for values in read_samples(source)]


def refused(source: CsvSource) -> str:
    """Return the error text of the scan of a table."""
    with pytest.raises(SourceInvalid) as caught:
        scan(source)
    assert str(source.path or source.root) in str(caught.value)
    return str(caught.value)


# --- quotes ---------------------------------------------------------------------------------------

GLUE = 'id\ttext\tlabel\n1\t"Hello, he said\t0\n2\tplain\t1\n3\tmid\t0\n4\tbye"\t1\n6\tend\t1\n'
"""Quotes that are text, and hide records where they count."""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_without_quoting_each_line_is_a_record(tmp_path, end) -> None:
    """Quotes are characters as any other, wherever they are."""
    content = GLUE.replace("\n", end) + 'a 5" pipe\t""\t3'
    source = table(tmp_path, content, fields={"text": "text"}, delimiter="\t", quoting="none")

    assert [text for (text,) in rows(source)] == ['"Hello, he said', "plain", "mid", 'bye"', "end", '""']
    assert scan(source).notes == ()
    assert scan(source).digest != scan(table(tmp_path, GLUE, fields={"text": "text"}, delimiter="\t")).digest


@pytest.mark.parametrize("block", [3, 1 << 18])
def test_records_of_several_lines_are_noted_once(tmp_path, monkeypatch, block) -> None:
    """The note has the first one and their number, in blocks of any size."""
    monkeypatch.setattr(csv_scan, "BLOCK_BYTES", block)
    text = 'a,b\n1,2\n"x\ny\nz",3\n4,5\n"v\n",""\n6,"\n'
    where = f"{tmp_path}/t.csv: record 2 (byte 8)"

    (note,) = scan(table(tmp_path, f'{text}"')).notes
    assert (
        note
        == f'records with line ends inside a cell: {where} and 2 more; if the quotes around them are text, set quoting = "none"'
    )
    assert scan(table(tmp_path, 'a,b\n"x","y"\n')).notes == ()


@pytest.mark.parametrize(
    ("content", "quoting"),
    [
        (GLUE, "none"),
        ('id\ttext\n1\ta 5" pipe\n', "none"),
        ('id\ttext\n1\t"never closed\n', "none"),
        ('id,text\n1,"two\nlines"\n2,"a, b"\n', "double"),
        ('text\n"two\nlines"\n', "double"),
        ('id,text\n1,"quoted ""word"""\n', "double"),
    ],
)
def test_quotes_that_are_text_are_recognised(tmp_path, content, quoting) -> None:
    """So `batchd init` serves tables that do not quote, and others as RFC 4180 says."""
    (tmp_path / "t.tsv").write_text(content)
    found = recognise(tmp_path / "t.tsv", Survey(lambda _found: None)).recognised

    assert isinstance(found.source, CsvSource)
    assert found.source.quoting == quoting
    assert any("quotes are characters" in note for note in found.notes) == (quoting == "none")


# --- content of a table ---------------------------------------------------------------------------


def test_chosen_columns_become_fields_of_their_types(tmp_path) -> None:
    """They have the order of the configuration; other columns are left out."""
    fields = {
        "name": "text",
        "age": "float32",
        "label": "int64",
        "box": "uint16[2,2]",
        "words": "int32[?]",
        "good": "bool",
    }
    text = (
        "age,Class Label,name,unused,box,words,good\n"
        " 1.5 ,-7,Ann,x,1 2 3 65535,5 6 7,true\n"
        "nan,9223372036854775807,Böb,x, 0 0  0 0 ,,0\n"
    )
    source = table(tmp_path, text, fields=fields, names={"label": "Class Label"})
    first, second = read_samples(source)

    assert list(first) == list(fields)
    assert first["name"] == "Ann"
    assert (first["age"], first["age"].dtype) == (1.5, np.float32)
    assert (first["label"], first["label"].dtype) == (-7, np.int64)
    np.testing.assert_array_equal(first["box"], np.array([[1, 2], [3, 65535]], np.uint16), strict=True)
    np.testing.assert_array_equal(first["words"], np.array([5, 6, 7], np.int32), strict=True)
    assert first["good"].dtype == np.bool_
    assert (bool(first["good"]), bool(second["good"])) == (True, False)
    assert second["name"] == "Böb"
    assert np.isnan(second["age"])
    assert second["label"] == (1 << 63) - 1
    assert second["words"].shape == (0,)


def test_columns_are_the_image_and_the_fields(tmp_path) -> None:
    """The columns are known before the table is opened."""
    source = CsvSource(path=tmp_path / "gone.csv", fields={"x": "float32[3]", "t": "text"}, image="file")

    assert kind_of(source).columns(source, Storage()) == (
        Column("image", "encoded"),
        Column("x", dtype="float32", shape=(3,)),
        Column("t", "text"),
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a,b\n1,2\n3,4\n", [("1", "2"), ("3", "4")]),
        (b"a,b\r\n1,2\r\n3,4\r\n", [("1", "2"), ("3", "4")]),
        (b"a,b\n1,2\n3,4", [("1", "2"), ("3", "4")]),
        (b"\xef\xbb\xbfa,b\n1,2\n", [("1", "2")]),
        (b'\xef\xbb\xbf"a",b\n1,2', [("1", "2")]),
        (b"\n\r\na,b\n\n1,2\n\r\n\n3,4\n\n", [("1", "2"), ("3", "4")]),
        (b'a,b\n"1,1","2\n2"\n"",""""\n', [("1,1", "2\n2"), ("", '"')]),
        (b'a,b\r\n"1\r\n1",2\r\n', [("1\r\n1", "2")]),
        (b'"a",b\n"say ""hi""",""""""\n', [('say "hi"', '""')]),
        (b"b,a\n1,2\n", [("2", "1")]),
        (b"a,b\n,\n", [("", "")]),
        ("a,b\nä€😀,é\n".encode(), [("ä€😀", "é")]),
    ],
)
def test_records_are_those_of_rfc_4180(tmp_path, monkeypatch, content, expected) -> None:
    """This holds for every end of the blocks in which the scan reads."""
    for block in (*range(1, 12), 1 << 20):
        monkeypatch.setattr(csv_scan, "BLOCK_BYTES", block)
        assert rows(table(tmp_path, content)) == expected, block


def test_another_delimiter_can_be_chosen(tmp_path) -> None:
    """Commas are ordinary text then."""
    assert rows(table(tmp_path, 'a\tb\n1,5\t"x\ty"\n', delimiter="\t")) == [("1,5", "x\ty")]


CELLS = st.text(st.sampled_from('ab,;"\r\n é1😀'), max_size=6)


@given(
    cells=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12),
    ends=st.tuples(st.sampled_from(["\n", "\r\n"]), st.booleans()),
    block=st.integers(1, 40),
    quote_all=st.booleans(),
)
def test_a_written_table_reads_back_unchanged(tmp_path_factory, cells, ends, block, quote_all) -> None:
    """Cells have any text, line ends and quotes; the last line end is optional."""
    end, has_last_end = ends

    def written(cell: str) -> str:
        return '"' + cell.replace('"', '""') + '"' if quote_all or set(cell) & set(',"\r\n') else cell

    text = end.join(["a,b", *(f"{written(one)},{written(other)}" for one, other in cells)]) + end * has_last_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_scan, "BLOCK_BYTES", block)
        assert rows(table(tmp_path_factory.getbasetemp(), text)) == cells


@given(content=st.lists(st.sampled_from([b"a", b"b", b",", b'"', b"\n", b"\r", b"\0", b"\xff", b"1"]), max_size=30))
def test_bytes_of_any_kind_are_refused_or_read(tmp_path_factory, content) -> None:
    """No other error is raised, at the scan or later; each bad record is one bad sample."""
    source = table(tmp_path_factory.getbasetemp(), b"a,b\n" + b"".join(content))
    try:
        scan(source)
    except SourceInvalid:
        return
    with opened(source) as (reader, index):
        for sample in range(len(index)):
            with suppress(SampleUnreadable):
                assert list(reader.read(sample)) == ["a", "b"]


SCAN_IN_A_PROCESS_OF_ITS_OWN = """
import sys
from pathlib import Path

from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey

source = CsvSource(path=Path(sys.argv[1]), fields={"number": "int64"})
index = kind_of(source).scan(source, Survey(lambda _found: None))
reader = open_reader(source, index, 1 << 20, Storage())
numbers = [int(reader.read(sample)["number"]) for sample in (0, 1, len(index) - 2, len(index) - 1)]
status = Path("/proc/self/status").read_text().splitlines()
peak_kib = next(line.split()[1] for line in status if line.startswith("VmHWM:"))
print(len(index), *numbers, peak_kib)
"""


@pytest.mark.slow
def test_a_table_that_is_larger_than_the_memory_is_never_loaded_whole(tmp_path) -> None:
    """Memory has only the starts of records; late records are read like early ones."""
    rows_at_once, pieces, filler = 10_000, 110, "x" * 1_000
    with (tmp_path / "t.csv").open("w") as stream:
        stream.write("number,text\n")
        for first in range(0, pieces * rows_at_once, rows_at_once):
            stream.write("".join(f"{number},{filler}\n" for number in range(first, first + rows_at_once)))
    assert (tmp_path / "t.csv").stat().st_size > 1_100_000_000
    command = [sys.executable, "-c", SCAN_IN_A_PROCESS_OF_ITS_OWN, str(tmp_path / "t.csv")]

    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (tmp_path / "t.csv").unlink()

    *found, peak_kib = map(int, told.split())
    last = pieces * rows_at_once - 1
    assert found == [last + 1, 0, 1, last - 1, last]
    assert peak_kib < 200 << 10


# --- tables that the scan refuses -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\n\n", "is empty"),
        (b"a,b\n", "holds no record behind its titles"),
        (b"a,b", "holds no record behind its titles"),
        (b"A,b\n1,2\n", "has no column 'a'; did you mean A?"),
        (b"x,y\n1,2\n", "has no column 'a'; known here: x, y"),
        (b"a;b\n1;2\n", "has no column 'a'; known here: a;b; is the delimiter another one?"),
        (b"a,b,a\n1,2,3\n", "2 columns have the title 'a'"),
        (b"a,b\r1,2\r3,4\r", "ends its lines with CR alone"),
        (b"a,b\xff\n1,2\n", "the header is not UTF-8: byte 0xff at byte 3"),
        ("a,b\n1,2\n".encode("utf-16"), "is UTF-16"),
        (b"\xfe\xff\0a\0,\0b\0\n\0", "is UTF-16"),
        ("a,b\n1,2\n".encode("utf-16-le"), "has a character NUL at byte 1"),
        (b"a,b\n1,2\n3,\0\n", "has a character NUL at byte 10"),
        (b'a,b\n1,2\n3,"4\n5,6\n', "record 2, which begins at byte 8, has a quote at byte 10 that is never closed"),
        (b'"a,b\n1,2\n', "the header, which begins at byte 0, has a quote at byte 0 that is never closed"),
        (b'a,b\n\n1,2\n3,4 " x\n5,6\n', "record 2, which begins at byte 9, has a quote at byte 13 that neither begins"),
        (b'a,b\n1,"2" x\n3,4\n', "record 1, which begins at byte 4, has a quote at byte 8 that neither begins"),
        (b'a,b\n1,"2\n3,4\n5,"6"\n', "record 1, which begins at byte 4, has a quote at byte 15 that neither begins"),
    ],
)
def test_files_that_are_no_table_are_refused(tmp_path, monkeypatch, content, message) -> None:
    """The error has the record and the byte, for every end of the scan's blocks."""
    for block in (*range(1, 8), 1 << 20):
        monkeypatch.setattr(csv_scan, "BLOCK_BYTES", block)
        assert message in refused(table(tmp_path, content)), block


def test_a_quote_that_is_left_open_does_not_fill_the_memory(tmp_path, monkeypatch) -> None:
    """The length of a record is limited."""
    monkeypatch.setattr(csv_scan, "RECORD_BYTES_MAX", 1000)
    monkeypatch.setattr(csv_scan, "BLOCK_BYTES", 100)

    text = refused(table(tmp_path, 'a,b\n1,2\n3,"4\n' + "5,6\n" * 1000))

    assert (
        "record 2, which begins at byte 8, has no end within 1000 bytes: a quote is missing, or its cells are too"
        in text
    )


def test_tables_with_other_titles_or_no_records_are_refused(tmp_path) -> None:
    """The error names the file."""
    table(tmp_path, "a,b\n1,2\n", "1.csv")
    second = table(tmp_path, "b,a\n1,2\n", "2.csv").path
    source = CsvSource(root=tmp_path, files=("*.csv",), fields=FIELDS)
    assert f"{second} has the titles ['b', 'a'], and the first file has ['a', 'b']" in refused(source)

    second.write_text("a,b\n")
    assert f"{second} holds no record behind its titles; leave it out of the files" in refused(source)


def test_a_wrong_title_is_found_by_check(tmp_path) -> None:
    """The check needs no daemon; a right title is no problem."""
    assert source_problems(table(tmp_path, "a,B\n1,2\n")) == [f"{tmp_path}/t.csv has no column 'b'; did you mean B?"]
    assert source_problems(table(tmp_path, "a,b\n1,2\n")) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name a column"),
        ({"fields": {"x": "image"}}, 'image = "TITLE" names a column'),
        ({"fields": {"x": "int32[?,?]"}}, "one unknown length"),
        ({"fields": {"x": "float"}}, "is not a valid type"),
        ({"fields": {"image": "text"}, "image": "file"}, "image stands for two fields"),
        ({"fields": FIELDS, "names": {"c": "C"}}, "names has 'c'"),
        ({"fields": FIELDS, "delimiter": ",,"}, "one ASCII character"),
        ({"fields": FIELDS, "delimiter": '"'}, "one ASCII character"),
        ({"fields": FIELDS, "root": Path("/x")}, "set either path"),
        ({"fields": FIELDS, "path": None}, "set either path"),
        ({"fields": FIELDS, "path": None, "root": Path("/x"), "files": ("",)}, "empty path"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message) -> None:
    """The error comes before any file is opened."""
    with pytest.raises(ValueError, match=message):
        CsvSource(**{"path": Path("/t.csv"), **options})


# --- problems of one record -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "cell", "message"),
    [
        ("int64", "1.5", "'x' is '1.5', which is no whole number, so not int64"),
        ("int64", "", "'x' is '', which is no whole number"),
        ("int64", "1_000", "is no whole number"),
        ("int64", "٣", "is no whole number"),
        ("int64", "9" * 5000, "'x' is '9999999999999999999999999999999999999999…', which is no whole number"),
        ("int64", "9223372036854775808", "and int64 goes from -9223372036854775808 to 9223372036854775807"),
        ("uint8", "256", "'x' is '256', and uint8 goes from 0 to 255"),
        ("uint8", "-1", "'x' is '-1', and uint8 goes from 0 to 255"),
        ("float32", "abc", "'x' is 'abc', which is not a number, so not float32"),
        ("float32", "", "which is not a number, so not float32; write nan where there is no number"),
        ("float32", "0x10", "is not a number"),
        ("float32", "1_0.5", "is not a number"),
        ("float32", "1e39", "'x' is '1e39', and float32 goes from -3.40282e+38 to 3.40282e+38"),
        ("float64", "1e999", "'x' is '1e999', and float64"),
        ("float16", "65520", "and float16 goes from -65504 to 65504"),
        ("bool", "yes", "'x' is 'yes', which is not bool: 0, 1, false or true"),
        ("float32[3]", "1 2", "'x' has 2 numbers, and float32[3] has 3"),
        ("float32[3]", "1 2 x", "'x' is 'x', which is not a number"),
        ("int8[2,?]", "1 2 3", "'x' has 3 numbers, not those of int8[2,?]"),
    ],
)
def test_a_cell_that_does_not_match_its_column_makes_a_bad_sample(tmp_path, dtype, cell, message) -> None:
    """The reason has the title and the text; neighbouring records are readable."""
    source = table(tmp_path, f"x,y\n1 1 1 1 1 1,0\n{cell},0\n", fields={"x": dtype})
    with opened(source) as (reader, _index):
        assert message in reason(reader, 1)
        assert reader.name(1) == f"{tmp_path}/t.csv: record 2 (byte 18)"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"1", "has 1 cell, and the header 2, so there is no 'b'"),
        (b"1,2,3", "has 3 cells, and the header 2"),
        (b"1,\xe9t\xe9", "is not UTF-8: byte 0xe9 at byte 2 of the record"),
        (b"1,2\r3,4", "is no record of a table: new-line character seen in unquoted field"),
        (
            b"x" * 5000 + b",1",
            "has 5003 bytes, more than max_bytes = 4096; its cells are too long for a table: put them into files",
        ),
    ],
)
def test_a_malformed_record_makes_a_bad_sample(tmp_path, record, message) -> None:
    """Neighbouring records are readable."""
    with opened(table(tmp_path, b"a,b\n1,2\n" + record + b"\n3,4\n"), 4096) as (reader, _index):
        assert message in reason(reader, 1)
        assert [reader.read(sample)["a"] for sample in (0, 2)] == ["1", "3"]


def test_a_table_that_is_cut_or_changed_after_the_scan_makes_bad_samples(tmp_path) -> None:
    """Size and time show it; if these are equal, records that no longer end in their places do."""
    content = "a,b\n" + "".join(f"{number},{number}\n" for number in range(10, 20))
    source = table(tmp_path, content)
    status = source.path.stat()

    def rewrite(text: str) -> None:
        source.path.write_text(text[: len(content)].ljust(len(content), "\n"))
        os.utime(source.path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with opened(source) as (reader, _index):
        os.truncate(source.path, 30)
        assert "its file has changed since the daemon read it: it had 64 bytes, and has 30" in reason(reader, 3)
        assert "the file ends at byte 30, 4 bytes before the sample does" in reason(reader, 4)
        rewrite("# " + content)
        assert "does not end where it did; the file was changed" in reason(reader, 0)
        rewrite("a,b\n" + "1,\n2,\n" * 10)
        assert reason(reader, 1) == "is no record of a table: new-line character seen in unquoted field"
        rewrite("")
        assert reason(reader, 1) == "is no record any more; the file was changed after the daemon read it"
    with opened(table(tmp_path, content)) as (reader, _index):
        source.path.unlink()
        assert reason(reader) == "No such file or directory"
        with pytest.raises(IndexError):
            reader.read(10)


# --- images ---------------------------------------------------------------------------------------


def pictures(folder: Path, *cells: str, **options) -> CsvSource:
    """A table of paths in ``folder/in``, with other files next to that folder."""
    (folder / "in" / "sub").mkdir(parents=True)
    (folder / "in" / "sub" / "1.jpg").write_bytes(b"picture 1")
    (folder / "in" / "2.jpg").symlink_to("sub/1.jpg")
    (folder / "secret").write_bytes(b"secret")
    (folder / "in" / "away.jpg").symlink_to("../secret")
    (folder / "in" / "up").symlink_to("..")
    text = "file,label\n" + "".join(f'"{cell}",{number}\n' for number, cell in enumerate(cells))
    return table(folder / "in", text, fields={"label": "int64"}, image="file", **options)


OUTSIDE = ["../secret", "sub/../../secret", "{}/secret", "away.jpg", "up/secret"]


def test_a_column_of_paths_becomes_images(tmp_path) -> None:
    """Paths are relative to the folder of the table; a link inside it counts as a file."""
    first, second = read_samples(pictures(tmp_path, "sub/1.jpg", "2.jpg"))

    assert first == {"image": b"picture 1", "label": 0}
    assert second["image"] == b"picture 1"


def test_the_images_may_be_in_another_folder(tmp_path) -> None:
    """That folder may itself be a link."""
    (tmp_path / "link").symlink_to("in/sub")

    assert read_samples(pictures(tmp_path, "1.jpg", image_root=tmp_path / "link"))[0]["image"] == b"picture 1"


def test_no_path_leads_out_of_the_root(tmp_path) -> None:
    """The path's text, a link to a file, or a link to a folder on the way could lead out."""
    with opened(pictures(tmp_path, *(path.format(tmp_path) for path in OUTSIDE))) as (reader, _index):
        reasons = [reason(reader, sample) for sample in range(len(OUTSIDE))]

    assert all(text.startswith("'file' is ") and "set allow_outside_root = true" in text for text in reasons)
    assert all("a path that may lead out of the root" in text for text in reasons[:3])
    assert all(f"a link leads out of the root, to {tmp_path}/secret" in text for text in reasons[3:])


def test_paths_may_leave_the_root_if_that_is_allowed(tmp_path) -> None:
    """All the paths of the previous test are accepted."""
    cells = [path.format(tmp_path) for path in OUTSIDE]

    assert {values["image"] for values in read_samples(pictures(tmp_path, *cells, allow_outside_root=True))} == {
        b"secret"
    }


def test_a_missing_image_is_a_bad_sample_with_its_path(tmp_path) -> None:
    """An empty cell is a bad sample, too."""
    with opened(pictures(tmp_path, "gone.jpg", "", "sub")) as (reader, _index):
        assert [reason(reader, sample) for sample in range(3)] == [
            "'file' is 'gone.jpg': No such file or directory",
            "'file' is empty, and not the path of an image",
            "'file' is 'sub': is a directory, not a regular file",
        ]
        assert reader.known(0) == {}
