"""Arrow files, as `save_to_disk` of Hugging Face's `datasets` writes them, in a parquet source."""

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.interface import open_reader, read_ahead
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.parquet.record_batches import ArrowFile
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from support.http_files import FileServer
from support.parquet_files import (
    class_labels,
    hugging_face,
    open_parquet,
    scan_parquet,
    write_arrow,
)
from support.source_files import nothing

IMAGES = [f"image {number} ".encode() * (20 + 7 * number) for number in range(60)]
BOTH = {"image": "image", "label": "int64"}
pytestmark = pytest.mark.usefixtures("scans_here")


def photographs(file: Path, images: list[bytes | None] = IMAGES, **options: object) -> Path:
    """Numbered images in the format of Hugging Face."""
    return write_arrow(file, {"image": hugging_face(images), "label": list(range(len(images)))}, **options)


def scan_arrow(root: Path, fields: dict[str, str], **changes: object):
    return scan_parquet(root, fields, "*.arrow", **changes)


def open_arrow(root: Path, fields: dict[str, str], **changes: object):
    return open_parquet(root, fields, "*.arrow", **changes)


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_every_row_is_read_in_any_order(tmp_path, rows, new) -> None:
    """The rows are in two files; one of them has other columns in between."""
    photographs(tmp_path / "a.arrow", IMAGES[:30], rows=rows, new=new)
    columns = {"x": [[1.5]] * 30, "image": hugging_face(IMAGES[30:]), "text": ["long " * 99] * 30, "label": range(30)}
    write_arrow(tmp_path / "b.arrow", {name: pa.array(values) for name, values in columns.items()}, rows=rows, new=new)

    reader = open_arrow(tmp_path, BOTH)
    assert reader.name(33) == f"{tmp_path}/b.arrow: row 3"
    assert [bytes(reader.read(sample)["image"]) for sample in reversed(range(60))] == IMAGES[::-1]
    assert [int(reader.known(sample)["label"]) for sample in (0, 29, 30, 59)] == [0, 29, 0, 29]
    reader.close()


def test_every_type_that_a_field_may_have_is_read(tmp_path) -> None:
    """Strings and bytes of all widths, numbers, booleans, lists of one length and of several."""
    columns = {
        "text": pa.array(["a", "", "é"]),
        "large": pa.array(["b", "cc", "ddd"], pa.large_string()),
        "raw": pa.array([b"\0\1", b"\2\3", b"\4\5"], pa.binary(2)),
        "flag": pa.array([True, False, True]),
        "list": pa.array([[1, 2], [3], []], pa.list_(pa.int16())),
        "fixed": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
    }
    write_arrow(tmp_path / "a.arrow", columns, rows=2)
    fields = {"text": "text", "large": "text", "raw": "uint8[2]", "flag": "bool", "list": "int64[?]"}

    reader = open_arrow(tmp_path, {**fields, "fixed": "float32[2]"})
    read = [{name: np.array(value).tolist() for name, value in reader.read(sample).items()} for sample in range(3)]
    reader.close()
    assert [one["fixed"] for one in read] == [[1, 2], [3, 4], [5, 6]]
    assert [one["list"] for one in read] == [[1, 2], [3], []]
    assert [one["flag"] for one in read] == [True, False, True]
    assert [one["raw"] for one in read] == [[0, 1], [2, 3], [4, 5]]
    assert [(one["text"], one["large"]) for one in read] == [("a", "b"), ("", "cc"), ("é", "ddd")]


def test_the_scan_of_images_reads_none_of_their_bytes(tmp_path) -> None:
    """The scan reads only their lengths; workers read the values by their places."""

    class Counted:
        def __init__(self, stream):
            self._stream, self.bytes = stream, 0

        def seek(self, *where):
            return self._stream.seek(*where)

        def read(self, size):
            data = self._stream.read(size)
            self.bytes += len(data)
            return data

        def readinto(self, room):
            count = self._stream.readinto(room)
            self.bytes += count
            return count

    images = [bytes([number]) * 50_000 for number in range(20)]
    with photographs(tmp_path / "a.arrow", images).open("rb") as stream:
        counted = Counted(stream)
        file = ArrowFile(counted)
        found = np.concatenate([np.array(file.extents(group, "image")).reshape(-1, 2) for group in range(3)])
        assert counted.bytes < 20_000
        for image, (place, size) in zip(images, found.tolist(), strict=True):
            stream.seek(place)
            assert stream.read(size) == image


def test_an_image_without_bytes_is_the_file_that_it_names(tmp_path) -> None:
    """An image without bytes and file is a bad sample."""
    (tmp_path / "one.jpg").write_bytes(b"a picture")
    write_arrow(tmp_path / "a.arrow", {"image": hugging_face([b"x", None, None], ["", "one.jpg", None])})

    reader = open_arrow(tmp_path, {"image": "image"})
    assert [bytes(reader.read(sample)["image"]) for sample in range(2)] == [b"x", b"a picture"]
    with pytest.raises(SampleUnreadable, match=r"has neither bytes nor a path \(row group 0, row 2 of it\)"):
        reader.read(2)
    reader.close()


def test_labels_have_the_names_that_hugging_face_wrote_into_the_file(tmp_path) -> None:
    """They are in the metadata of the schema."""
    write_arrow(tmp_path / "a.arrow", {"label": [0, 1]}, class_labels(label=["cat", "owl"]))

    assert scan_arrow(tmp_path, {"label": "int64"})[1].class_names == ("cat", "owl")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xff", "is cut: it ends at byte 4"),
        (b"\xff\xff\xff\xff" + bytes(20), "there is no message at byte 0"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(20), "there is no message at byte 0"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + bytes(16), "does not begin with a schema|cannot be read"),
        (b"\xff\xff\xff\xff\x10\0\0\0" + b"\xff" * 16, "the message at byte 0 cannot be read"),
        (b"ARROW1\0\0", "is cut: it ends at byte 8"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path, data, reason) -> None:
    """The error names the file."""
    (tmp_path / "a.arrow").write_bytes(data)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/a\.arrow cannot be read as Arrow: .*({reason})"):
        scan_arrow(tmp_path, BOTH)


@pytest.mark.parametrize(
    ("options", "columns", "reason"),
    [
        ({"compression": "zstd"}, {"x": pa.array([1, 2])}, "is compressed, so no row can be read alone"),
        ({}, {"x": pa.array([1, 2]), "d": pa.array(["a", "b"]).dictionary_encode()}, "has dictionary-encoded columns"),
        ({}, {"x": pa.array([1, None])}, "row 1 .*there is no value"),
        ({}, {"x": pa.array([["a"], ["b"]])}, 'which cannot be "int64"'),
        ({}, {"y": pa.array([1, 2])}, "has no column 'x' for the field x"),
    ],
)
def test_unsupported_columns_are_refused(tmp_path, options, columns, reason) -> None:
    """The error has the file and a remedy."""
    write_arrow(tmp_path / "a.arrow", columns, **options)

    with pytest.raises(SourceInvalid, match=rf"{tmp_path}/a\.arrow.*{reason}"):
        scan_arrow(tmp_path, {"x": "int64"})


def test_a_record_batch_that_no_worker_could_keep_is_refused_with_the_numbers(tmp_path) -> None:
    """This concerns columns whose values cannot be read one by one."""
    write_arrow(tmp_path / "a.arrow", {"x": [[1, 2, 3]] * 100}, rows=100)

    with pytest.raises(SourceInvalid, match=r"more than cache_bytes = 100, .* rows in each record batch"):
        scan_arrow(tmp_path, {"x": "int64[3]"}, cache_bytes=100)


def test_files_of_a_server_are_read_by_ranges(tmp_path, web: FileServer, storage: Storage) -> None:
    """Images are read by their places, lists by record batches."""
    file = write_arrow(tmp_path / "a.arrow", {"image": hugging_face(IMAGES[:9]), "ids": [[n, n + 1] for n in range(9)]})
    web.files["a.arrow"] = file.read_bytes()

    source = ParquetSource(root=Path(web.url), shards=("a.arrow",), fields={"image": "image", "ids": "int64[?]"})
    reader = open_reader(source, scan_source(source, nothing, IndexCache(None), storage), 1 << 20, storage)
    read_ahead(reader, range(9))
    assert [bytes(reader.read(sample)["image"]) for sample in range(9)] == IMAGES[:9]
    assert [reader.read(sample)["ids"].tolist() for sample in range(9)] == [[n, n + 1] for n in range(9)]
    reader.close()


def file_with_footer(file: Path, columns: dict[str, object], rows: int = 2) -> bytes:
    return write_arrow(file, columns, rows=rows, new=pa.ipc.new_file).read_bytes()


def test_a_file_is_read_by_its_footer(tmp_path) -> None:
    """Polars writes no message that pyarrow reads as a schema in front of its record batches."""
    data = file_with_footer(tmp_path / "a.arrow", {"x": pa.array([1, 2, 3])})
    (tmp_path / "a.arrow").write_bytes(data[:8] + b"\4\0\0\0" + data[12:])

    reader = open_arrow(tmp_path, {"x": "int64"})
    assert [int(reader.known(sample)["x"]) for sample in range(3)] == [1, 2, 3]
    reader.close()


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_values_of_views_are_read_at_their_places(tmp_path, new) -> None:
    """Short ones are in the view, long ones in one of several buffers; a null is a bad sample."""
    texts = ["short", "longer than the view of it", None, "", "x" * 70_000, "y" * 70_000]
    raw = [None if text is None else text.encode() for text in texts]
    columns = {"text": pa.array(texts, pa.string_view()), "raw": pa.array(raw, pa.binary_view())}
    write_arrow(tmp_path / "a.arrow", columns, rows=4, new=new)

    reader = open_arrow(tmp_path, {"text": "text", "raw": "uint8[?]"})
    for sample, text in enumerate(texts):
        if text is None:
            with pytest.raises(SampleUnreadable, match="there is no text"):
                reader.read(sample)
        else:
            values = reader.read(sample)
            assert (values["text"], bytes(values["raw"])) == (text, text.encode())
    reader.close()


def test_bytes_that_no_record_batch_has_are_refused(tmp_path) -> None:
    """Behind the end of a stream, or between the record batches of a footer: `cat` appends them."""
    stream = write_arrow(tmp_path / "a.arrow", {"x": pa.array([1, 2, 3])}).read_bytes()
    for padding in (b"", bytes(100)):
        (tmp_path / "a.arrow").write_bytes(stream + padding)
        assert len(scan_arrow(tmp_path, {"x": "int64"})[1]) == 3
        (tmp_path / "a.arrow").write_bytes(stream + padding + stream)
        reason = f"ends at byte {len(stream)}, and has other bytes behind its end, from byte {len(stream + padding)} on"
        with pytest.raises(SourceInvalid, match=reason):
            scan_arrow(tmp_path, {"x": "int64"})

    file = file_with_footer(tmp_path / "a.arrow", {"x": pa.array([1, 2, 3])})
    (tmp_path / "a.arrow").write_bytes(file + file)
    with pytest.raises(SourceInvalid, match="has other bytes behind the record batch that ends at byte"):
        scan_arrow(tmp_path, {"x": "int64"})


def test_numbers_in_the_other_byte_order_are_refused(tmp_path) -> None:
    """They would be valid numbers, and other ones; pyarrow turns them, and does not say so."""
    footer = struct.pack("<IHHHHiIHHHxxih", 12, 8, 8, 0, 4, 8, 12, 6, 6, 4, 8, 1)
    tail = struct.pack("<i6s", len(footer), b"ARROW1")
    (tmp_path / "a.arrow").write_bytes(b"ARROW1\0\0" + footer + tail)
    with pytest.raises(SourceInvalid, match=r"a\.arrow .*has big-endian numbers"):
        scan_arrow(tmp_path, {"x": "int64"})
