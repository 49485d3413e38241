"""Rows of Parquet files: the values of each field, how they are read, and errors for damage."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import open_reader
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.storage.access import Storage
from batchd.errors import SourceInvalid
from support.parquet_files import (
    class_labels,
    hugging_face,
    open_parquet,
    scan_parquet,
    write_arrow,
    write_parquet,
)

IMAGES = [f"image {number} ".encode() * (20 + 7 * number) for number in range(60)]
BOTH = {"image": "image", "label": "int64"}
pytestmark = pytest.mark.usefixtures("scans_here")


def photographs(file: Path, images: list[bytes] = IMAGES, **options: object) -> Path:
    """Make numbered images in the layout of Hugging Face."""
    return write_parquet(file, {"image": hugging_face(images), "label": list(range(len(images)))}, **options)


def read_all(reader, count=len(IMAGES)):  # noqa: B008  of a constant
    """Read every sample from the last to the first, because any order must work."""
    found = {
        sample: {name: _kept(value) for name, value in reader.read(sample).items()} for sample in reversed(range(count))
    }
    reader.close()
    return [found[sample] for sample in range(count)]


def _kept(value):
    return bytes(value) if isinstance(value, memoryview) else np.array(value) if not isinstance(value, str) else value


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("dictionary", [True, False])
def test_every_row_is_read_in_any_order(tmp_path, compression, rows, dictionary) -> None:
    """This holds across several files with any row groups, compression and encoding."""
    for number in range(2):
        file = tmp_path / f"train-{number}.parquet"
        photographs(
            file, IMAGES[30 * number :][:30], compression=compression, row_group_size=rows, use_dictionary=dictionary
        )

    reader = open_parquet(tmp_path, BOTH, "train-{0..1}.parquet")
    assert reader.name(33) == f"{tmp_path}/train-1.parquet: row 3"
    assert [one["image"] for one in read_all(reader)] == IMAGES
    assert [int(reader.known(sample)["label"]) for sample in (0, 29, 30, 59)] == [0, 29, 0, 29]


def test_values_that_are_not_compressed_are_read_without_their_row_group(tmp_path) -> None:
    """Each value takes one read, whatever the row group's size: the footer is missing here."""
    file = photographs(tmp_path / "a.parquet", compression="none")
    source, index = scan_parquet(tmp_path, BOTH, cache_bytes=1)
    status, data = file.stat(), file.read_bytes()
    file.write_bytes(data[:-100] + bytes(100))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert [one["image"] for one in read_all(open_reader(source, index, 1 << 20, Storage()))] == IMAGES


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.none() | st.binary(max_size=30) | st.sampled_from([b"", b"twice" * 40, b"\0\0\0\0"]), min_size=1
    ),
    rows=st.integers(1, 40),
    dictionary=st.booleans(),
    pages=st.tuples(st.sampled_from([1, 64, 1 << 20]), st.sampled_from(["1.0", "2.0"])),
)
def test_what_is_found_in_a_file_is_what_pyarrow_reads(tmp_path, values, rows, dictionary, pages) -> None:
    """Short values that occur often, repeated, empty and null values are found."""
    file = tmp_path / "a.parquet"
    options = {
        "row_group_size": rows,
        "use_dictionary": dictionary,
        "data_page_size": pages[0],
        "data_page_version": pages[1],
    }
    write_parquet(file, {"raw": pa.array(values, pa.binary())}, compression="none", **options)
    reader = open_parquet(tmp_path, {"raw": "uint8[?]"})

    for sample, value in enumerate(values):
        if value is None:
            with pytest.raises(SampleUnreadable, match="there is no raw"):
                reader.read(sample)
        else:
            assert reader.read(sample)["raw"].tobytes() == value
    reader.close()


def test_every_type_that_a_field_may_have_is_read(tmp_path) -> None:
    """Each type is read as declared, under the column names of the file."""
    columns = {
        "blob": pa.array([b"one", b"two"], pa.large_binary()),
        "caption": ["eins", "zwei \u00e4"],
        "kind": pa.array(["cat", "dog"]).dictionary_encode(),
        "tokens": pa.array([[1, 2, 3], []], pa.list_(pa.int32())),
        "box": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.float64(), 4)),
        "digit": pa.array([bytes(range(6)), bytes(6)], pa.binary(6)),
        "score": [0.5, float("inf")],
        "good": [True, False],
        "small": pa.array([1, 255], pa.uint8()),
    }
    fields = {
        "image": "image", "caption": "text", "kind": "text", "tokens": "int64[?]", "box": "float32[2,2]",
        "digit": "uint8[2,3]", "score": "float32", "good": "bool", "small": "int16",
    }  # fmt: skip
    for number, options in enumerate(({"compression": "none"}, {"compression": "snappy"})):
        write_parquet(tmp_path / f"{number}.parquet", columns, **options)

    for number in range(2):
        one, two = read_all(open_parquet(tmp_path, fields, f"{number}.parquet", names={"image": "blob"}), 2)
        assert list(one) == list(two)
        assert (one["image"], one["caption"], two["caption"], two["kind"]) == (b"one", "eins", "zwei \u00e4", "dog")
        assert (one["tokens"].tolist(), two["tokens"].tolist(), one["tokens"].dtype) == ([1, 2, 3], [], np.int64)
        assert (one["box"].tolist(), one["box"].dtype) == ([[1, 2], [3, 4]], np.float32)
        assert one["digit"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (float(two["score"]), bool(one["good"]), int(two["small"])) == (float("inf"), True, 255)
        assert (one["score"].dtype, one["good"].dtype, one["small"].dtype) == (np.float32, np.bool_, np.int16)


def test_columns_that_are_not_declared_are_not_read(tmp_path) -> None:
    """Neither the scan nor a read decodes these columns, which have invalid content here."""
    file = write_parquet(tmp_path / "a.parquet", {"label": [7, 8], "image": IMAGES[:2]}, compression="none")
    column = parquet.ParquetFile(file).metadata.row_group(0).column(1)
    data = bytearray(file.read_bytes())
    start = min(column.dictionary_page_offset, column.data_page_offset)
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(data)

    assert [int(one["label"]) for one in read_all(open_parquet(tmp_path, {"label": "int64"}), 2)] == [7, 8]


def test_an_image_without_bytes_is_the_file_that_it_names(tmp_path) -> None:
    """The file is below the root; a path out of it is a bad sample unless allowed."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "outside.jpg").write_bytes(b"outside")
    (root / "sub/a.jpg").write_bytes(b"inside")
    (root / "link.jpg").symlink_to("../outside.jpg")
    paths = ["sub/a.jpg", "../outside.jpg", str(tmp_path / "outside.jpg"), "link.jpg", "gone.jpg", None, "a\0b"]
    bytes_and_paths = [
        pa.array([None] * 8, pa.binary()),
        pa.array([*(path and path.encode() for path in paths), b"\xff"]),
    ]
    # The last is not UTF-8.
    bytes_and_paths[1] = pa.Array.from_buffers(pa.string(), 8, bytes_and_paths[1].buffers())
    write_parquet(root / "a.parquet", {"image": pa.StructArray.from_arrays(bytes_and_paths, ["bytes", "path"])})

    reader = open_parquet(root, {"image": "image"})
    assert bytes(reader.read(0)["image"]) == b"inside"
    for sample in (1, 2, 3):
        with pytest.raises(SampleUnreadable, match=r"out of the root.*; set allow_outside_root"):
            reader.read(sample)
    for sample, reason in (
        (4, "gone.jpg: No such file"),
        (5, "neither bytes nor a path"),
        (6, "character NUL"),
        (7, r"\\xff: No such"),
    ):
        with pytest.raises(SampleUnreadable, match=rf"{reason}.*row group 0, row {sample} of it"):
            reader.read(sample)
    reader.close()

    allowed = open_parquet(root, {"image": "image"}, allow_outside_root=True)
    assert [bytes(allowed.read(sample)["image"]) for sample in (1, 2, 3)] == [b"outside"] * 3
    allowed.close()


@pytest.mark.parametrize(
    ("values", "text", "reason"),
    [
        ([1, 2, 300], "uint8", r"row 2 \(row group 1\), column 'x': x is 300, which no uint8 can be"),
        ([-1, 2, 3], "uint64", r"row 0 \(row group 0\), column 'x': x is -1, which no uint64 can be"),
        ([1.0, 1e300], "float32", r"x is 1e\+300, which no float32 can be"),
        ([1, None, 3], "int64", r"row 1 \(row group 0\), column 'x': there is no value"),
        ([1.0, 1.5], "int64", r"row 1 \(row group 0\), column 'x': x is 1.5, which no int64 can be"),
        ([1, 2], "bool", r"row 1 \(row group 0\), column 'x': x is 2, which no bool can be"),
        (["1"], "int64", r'column \'x\' is string, which cannot be "int64": declare it as "text"'),
        ([b"1"], "text", r'is binary, which cannot be "text": declare it as "image"'),
        ([1], "image", r'is int64, which cannot be "image": declare it as "int64"'),
        ([[1]], "int64", r'declare it as "int64\[\?\]"'),
        ([[[1]]], "int64[?]", r"write x as a number, a string, binary, or a list of numbers"),
        ([{"a": 1}], "int64", r"struct<a: int64>, which cannot be"),
        ([hugging_face([b"x"])[0].as_py()], "text", r'declare it as "image"'),
        (pa.array([1], pa.timestamp("us")), "int64", r"is timestamp\[us\], which cannot be"),
        (pa.array([1], pa.decimal128(5)), "int64", r"is decimal128\(5, 0\), which cannot be"),
    ],
)  # fmt: skip
def test_values_that_are_not_what_a_field_says_are_refused_with_their_row(tmp_path, values, text, reason) -> None:
    """The error names file, column and row, and advises a type where the type is wrong."""
    write_parquet(tmp_path / "a.parquet", {"x": values}, row_group_size=2)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/a\.parquet.*{reason}"):
        scan_parquet(tmp_path, {"x": text})


def test_values_of_another_length_are_bad_samples(tmp_path) -> None:
    """Each such value is a bad sample with its row, and the other values are read."""
    lists = pa.array([[1, 2], [1, 2, 3], None, [4, None], [5, 6]])
    write_parquet(tmp_path / "a.parquet", {"pair": lists, "raw": [b"12", b"123", b"12", b"12", b"34"]})
    reader = open_parquet(tmp_path, {"pair": "int64[2]"})

    assert [reader.read(sample)["pair"].tolist() for sample in (0, 4)] == [[1, 2], [5, 6]]
    for sample, reason in (
        (1, r"3 numbers, not those of int64\[2\]"),
        (2, "there is no pair"),
        (3, "lacks 1 number"),
    ):
        with pytest.raises(SampleUnreadable, match=rf"{reason}.*\(row group 0, row {sample} of it\)"):
            reader.read(sample)
    reader.close()
    words = open_parquet(tmp_path, {"raw": "uint16[1]"})
    assert words.read(4)["raw"].tolist() == [0x3433]
    with pytest.raises(SampleUnreadable, match="3 bytes, which are no whole number of uint16"):
        words.read(1)
    words.close()


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_images_that_are_empty_or_too_large_are_bad_samples(tmp_path, compression) -> None:
    """Both ways of reading detect such images."""
    write_parquet(tmp_path / "a.parquet", {"image": [b"", b"x" * 100, b"good"]}, compression=compression)
    reader = open_parquet(tmp_path, {"image": "image"}, max_bytes=99)

    assert bytes(reader.read(2)["image"]) == b"good"
    with pytest.raises(SampleUnreadable, match="empty"):
        reader.read(0)
    with pytest.raises(SampleUnreadable, match="100 bytes, more than max_bytes = 99"):
        reader.read(1)
    reader.close()


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tmp_path) -> None:
    """A column that occurs twice is rejected as well."""
    write_parquet(tmp_path / "a.parquet", {"img": [b"x"], "label": [1]})
    with pytest.raises(
        SourceInvalid, match=r"a\.parquet has no column 'image' for the field image; did you mean img\?"
    ):
        scan_parquet(tmp_path, {"image": "image"})
    with pytest.raises(SourceInvalid, match=r"has no column 'depth' for the field depth; known here: img, label"):
        scan_parquet(tmp_path, {"depth": "int64"})
    parquet.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]), tmp_path / "a.parquet")
    with pytest.raises(SourceInvalid, match=r"a\.parquet has 2 columns 'x'"):
        scan_parquet(tmp_path, {"x": "int64"})


def test_a_row_group_that_no_worker_could_keep_is_refused_with_the_numbers(tmp_path) -> None:
    """Reading one row costs its whole group, unless the values are uncompressed."""
    photographs(tmp_path / "a.parquet", row_group_size=30, compression="snappy")

    with pytest.raises(
        SourceInvalid, match=r"row group 0 holds 30 rows of \d+ bytes together \(image\), more than cache_bytes = 1000"
    ):
        scan_parquet(tmp_path, BOTH, cache_bytes=1000)
    photographs(tmp_path / "a.parquet", compression="none")
    scan_parquet(tmp_path, BOTH, cache_bytes=1)


def test_a_column_that_is_larger_than_its_footer_says_is_not_decoded_to_its_end(tmp_path) -> None:
    """A dictionary may store once a value that thousands of rows use."""
    write_parquet(tmp_path / "a.parquet", {"text": ["x" * 100_000] * 300}, compression="snappy")
    reader = open_parquet(tmp_path, {"text": "text"}, cache_bytes=1 << 20)

    before = pa.total_allocated_bytes()
    for sample in (0, 299):
        with pytest.raises(SampleUnreadable, match="more than 1048576 bytes when it is decoded"):
            reader.read(sample)
    assert pa.total_allocated_bytes() - before < 1 << 20
    reader.close()


def test_a_worker_keeps_no_more_row_groups_than_it_may(tmp_path) -> None:
    """The least recently used groups are dropped, and reading one again gives the same values."""
    images = [os.urandom(10_000) for _ in range(200)]
    photographs(tmp_path / "a.parquet", images, row_group_size=5, compression="snappy", use_dictionary=False)
    reader = open_parquet(tmp_path, {"image": "image"}, cache_bytes=300_000)
    before = pa.total_allocated_bytes()

    for sample in np.random.default_rng(0).integers(0, 200, 400).tolist():
        assert bytes(reader.read(sample)["image"]) == images[sample]
        assert pa.total_allocated_bytes() - before < 600_000
    reader.close()
    assert pa.total_allocated_bytes() - before < 50_000


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty; leave it out of the shards"),
        (b"PAR1", "is not a Parquet file"),
        (b"no parquet at all" * 10, "is not a Parquet file: it starts with b'no p'"),
        (b"PAR1" + bytes(100) + b"PAR1", "cannot be read as Parquet"),
        (b"PAR1" + bytes(96) + b"\xff\xff\xff\x7fPAR1", "cannot be read as Parquet"),
        (b"PARE" + bytes(100) + b"PARE", "is encrypted"),
    ],
)
def test_what_is_no_parquet_file_is_refused(tmp_path, data, reason) -> None:
    """The error names the file."""
    (tmp_path / "a.parquet").write_bytes(data)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/a\.parquet.*{reason}"):
        scan_parquet(tmp_path, BOTH)


def test_a_damaged_page_makes_bad_samples_of_its_row_group_alone(tmp_path) -> None:
    """The errors name file, row group and row."""
    file = photographs(tmp_path / "a.parquet", row_group_size=20, compression="snappy", write_page_checksum=True)
    column = parquet.ParquetFile(file).metadata.row_group(1).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset - 20] ^= 0xFF
    file.write_bytes(data)
    reader = open_parquet(tmp_path, BOTH)

    assert [bytes(reader.read(sample)["image"]) for sample in (0, 19, 40, 59)] == [
        IMAGES[0],
        IMAGES[19],
        IMAGES[40],
        IMAGES[59],
    ]
    for _ in range(2):
        with pytest.raises(SampleUnreadable, match=r"\(row group 1, row 5 of it\)"):
            reader.read(25)
    assert reader.name(25) == f"{file}: row 25"
    assert int(reader.known(25)["label"]) == 25
    reader.close()


def test_an_encrypted_column_is_refused(tmp_path) -> None:
    """The footer may be unencrypted."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Client(encryption.KmsClient):
        def wrap_key(self, key_bytes: bytes, _name: str) -> bytes:
            return b"k" + key_bytes

        def unwrap_key(self, wrapped: bytes, _name: str) -> bytes:
            return wrapped[1:]

    for plain in (True, False):
        properties = encryption.CryptoFactory(lambda _config: Client()).file_encryption_properties(
            encryption.KmsConnectionConfig(),
            encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["x"]}, plaintext_footer=plain),
        )
        write_parquet(tmp_path / "a.parquet", {"x": [1]}, encryption_properties=properties)
        with pytest.raises(SourceInvalid, match=r"a\.parquet.*crypt"):
            scan_parquet(tmp_path, {"x": "int64"})


def test_files_without_rows_are_left_out(tmp_path) -> None:
    """Some writers create such files; at least one row must exist."""
    write_parquet(tmp_path / "a.parquet", {"x": pa.array([], pa.int64())})
    with pytest.raises(SourceInvalid, match="hold no row"):
        scan_parquet(tmp_path, {"x": "int64"})
    write_parquet(tmp_path / "b.parquet", {"x": [5]})
    reader = open_parquet(tmp_path, {"x": "int64"})
    assert (int(reader.read(0)["x"]), reader.name(0)) == (5, f"{tmp_path}/b.parquet: row 0")


CLASSES = ["cat", "d\u00f6g", "owl"]


@pytest.mark.parametrize(
    ("fields", "names", "classes"),
    [
        ({"label": "int64"}, {}, CLASSES),
        ({"label": "uint8"}, {"label": "fine"}, ["a", "b"]),
        ({"fine": "int64"}, {}, ["a", "b"]),
        ({"fine": "int64", "label": "int64"}, {}, CLASSES),
        ({"fine": "int64", "coarse": "int64"}, {"coarse": "label"}, []),
        ({"number": "int64"}, {}, []),
        ({"label": "int64"}, {"label": "number"}, []),
    ],
)
def test_labels_have_the_names_that_hugging_face_wrote_into_the_file(tmp_path, fields, names, classes) -> None:
    """The names belong to the field `label`, or to the only field with names."""
    columns = {"label": [0, 2], "fine": [1, 0], "number": [5, 6]}
    write_parquet(tmp_path / "a.parquet", columns, class_labels(label=CLASSES, fine=["a", "b"]))
    write_parquet(tmp_path / "b.parquet", columns)

    assert list(scan_parquet(tmp_path, fields, names=names)[1].class_names) == classes


@pytest.mark.parametrize(
    "metadata",
    [
        b"\xff", b"[", b"[1]", b"{}", b'{"info": {"features": []}}', b'{"info": {"features": {"label": 3}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel"}}}}', b"[" * 100_000,
        b'{"info": {"features": {"label": {"_type": "Value", "names": ["a"]}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", ""]}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", 3]}}}}',
        b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a\\u0000b"]}}}}',
    ],
)  # fmt: skip
def test_what_is_not_names_of_classes_is_none(tmp_path, metadata) -> None:
    """Other metadata gives no names, and it is no error of the file."""
    write_parquet(tmp_path / "a.parquet", {"label": [0, 1]}, {b"huggingface": metadata})

    assert scan_parquet(tmp_path, {"label": "int64"})[1].class_names == ()


@pytest.mark.parametrize(
    ("others", "difference"),
    [(["cat", "owl"], "label 1 is 'owl' and was 'd\u00f6g'"), (["cat"], "there are 1 and were 3")],
)
def test_files_whose_labels_mean_other_classes_are_refused(tmp_path, others, difference) -> None:
    """The error shows the first difference."""
    for name, classes in (("a", CLASSES), ("b", others)):
        write_parquet(tmp_path / f"{name}.parquet", {"label": [0, 1]}, class_labels(label=classes))

    with pytest.raises(SourceInvalid, match=rf"b\.parquet has other classes than the files before it: {difference}; "):
        scan_parquet(tmp_path, {"label": "int64"})


def test_the_index_holds_no_more_than_some_bytes_for_each_sample(tmp_path) -> None:
    """The index keeps numbers and offsets in flat arrays."""
    photographs(tmp_path / "a.parquet", compression="none")

    _, index = scan_parquet(tmp_path, BOTH)
    per_sample = {name: array.nbytes // len(index) for name, array in index.arrays.items() if len(array) >= len(index)}
    assert per_sample == {"numbers.label": 8, "extents.image": 16}


def test_pyarrow_runs_in_one_thread_and_only_where_a_stream_needs_it() -> None:
    """A worker without such a stream does not import it."""
    program = (
        "import sys; import batchd.worker.loop, batchd.daemon.serve; assert 'pyarrow' not in sys.modules;"
        "import batchd.data.sources.parquet.reader;"
        "from batchd.data.sources.parquet.row_groups import use_one_thread; use_one_thread();"
        "import pyarrow; assert (pyarrow.cpu_count(), pyarrow.io_thread_count()) == (1, 1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shards": ()}, "shards must not be empty"),
        ({"fields": {}}, "fields must name at least one field"),
        ({"fields": {"x": "int"}}, "is not a valid type"),
        ({"fields": {"index": "int64"}}, "every batch calls something else 'index'"),
        ({"fields": {"x": "int64[?,?]"}}, "one length may differ"),
        ({"names": {"y": "z"}}, "names has 'y', which is none of the fields x"),
        ({"names": {"x": ""}}, r"names\.x must not be empty"),
        ({"cache_bytes": 0}, "cache_bytes must be 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text) -> None:
    """The error names the key."""
    with pytest.raises(ValueError, match=text):
        ParquetSource(**{"root": Path("/a"), "shards": ("*",), "fields": {"x": "int64"}} | changes)


def test_partition_columns_are_named(tmp_path) -> None:
    """They stand in names of folders, which no row has: noted, or refused for a field."""
    for name in ("cat", "dog"):
        (tmp_path / f"label={name}").mkdir()
        write_parquet(tmp_path / f"label={name}/0.parquet", {"x": [1]})

    _source, index = scan_parquet(tmp_path, {"x": "int64"}, "*/*.parquet")
    file = f"{tmp_path}/label=cat/0.parquet"
    assert index.notes == (
        f"partition column label, which stands in names of folders and is not read: {file} and 1 more",
    )
    with pytest.raises(SourceInvalid, match="has no column 'label' for the field label; it is a partition column"):
        scan_parquet(tmp_path, {"label": "text"}, "*/*.parquet")


NESTED = {
    "meta": [{"stars": 4, "ids": [7, 8]}, {"stars": 5, "ids": [9]}, {"stars": 6, "ids": [1, 2, 3]}],
    "boxes": [[{"size": [1, 2]}, {"size": [3, 4]}], [{"size": [5, 6]}], [{"size": [7, 8]}]],
    "meta.own": [1, 2, 3],
}
PATHS = {
    "stars": ("int64", "meta.stars", [4, 5, 6]),
    "count": ("int32", "meta.ids.#", [2, 1, 3]),
    "first": ("int64", "meta.ids.0", [7, 9, 1]),
    "ids": ("int64[?]", "meta.ids", [[7, 8], [9], [1, 2, 3]]),
    "size": ("int64[2]", "boxes.0.size", [[1, 2], [5, 6], [7, 8]]),
    "own": ("int64", "meta.own", [1, 2, 3]),
}


@pytest.mark.parametrize("kind", ["parquet", "compressed", "arrow"])
def test_a_path_of_keys_leads_into_columns(tmp_path, kind) -> None:
    """Into structs and lists, as in JSON; a column that is called so comes first."""
    columns = {name: pa.array(values) for name, values in NESTED.items()}
    columns["fixed"] = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    if kind == "arrow":
        write_arrow(tmp_path / "a.parquet", columns, rows=2)
    else:
        write_parquet(
            tmp_path / "a.parquet", columns, compression="none" if kind == "parquet" else "zstd", row_group_size=2
        )
    paths = {**PATHS, "fixed": ("int64", "fixed.1", [2, 4, 6])}
    reader = open_parquet(
        tmp_path,
        {name: text for name, (text, _path, _values) in paths.items()},
        names={name: path for name, (_text, path, _values) in paths.items()},
    )
    found = [{name: np.asarray(value).tolist() for name, value in reader.read(sample).items()} for sample in range(3)]
    reader.close()
    assert {name: [one[name] for one in found] for name in paths} == {
        name: values for name, (_t, _p, values) in paths.items()
    }


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("meta.ids.1", "int64", r"row 1 \(row group 0\), column 'meta\.ids\.1': there is no value"),
        ("meta.sters", "int64", "has no column 'meta.sters'"),
        ("boxes.0.size.x", "int64", "has no column"),
        ("meta.stars.0", "int64", "has no column"),
        ("meta", "int64", 'which cannot be "int64"'),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(tmp_path, path, text, reason) -> None:
    """In all rows, or in one of them."""
    write_parquet(tmp_path / "a.parquet", NESTED)
    with pytest.raises(SourceInvalid, match=reason):
        scan_parquet(tmp_path, {"x": text}, names={"x": path})


def test_a_list_without_the_element_is_a_bad_sample(tmp_path) -> None:
    """Where the value is read with its row, as is one in a struct that is null."""
    write_parquet(tmp_path / "a.parquet", {"t": [["a", "b"], ["c"], None], "s": [{"x": "y"}, None, {"x": "z"}]})
    reader = open_parquet(tmp_path, {"t": "text", "s": "text"}, names={"t": "t.1", "s": "s.x"})
    assert reader.read(0) == {"t": "b", "s": "y"}
    for sample, field in ((1, "t"), (2, "t")):
        with pytest.raises(SampleUnreadable, match=f"there is no {field}"):
            reader.read(sample)
    reader.close()
