"""Arrays in .npy, .npz and raw files: the place of each sample, and an error for each damage."""

import io
import os
import random
import struct
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.samples.columns import Column
from batchd.data.sources.arrays import scan as array_scan
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.interface import kind_of
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.values import PROBE_BYTES, fingerprint
from batchd.errors import SourceInvalid
from batchd_wire.fields import ITEM_BYTES
from support.samples import opened, read_samples, reason, refused, scan


def npy(folder: Path, array: np.ndarray, name: str = "x.npy") -> NpySource:
    np.save(folder / name, array)
    return NpySource(path=folder / name, field="x")


def npz(folder: Path, **arrays: np.ndarray) -> NpzSource:
    np.savez(folder / "a.npz", **arrays)
    return NpzSource(path=folder / "a.npz")


def raw(folder: Path, content: bytes, record: dict[str, str], **options) -> RawSource:
    (folder / "x.bin").write_bytes(content)
    return RawSource(path=folder / "x.bin", record=record, **options)


def columns(source: SourceOptions) -> tuple[Column, ...]:
    return kind_of(source).columns(source, Storage())


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array in which no two neighbours are equal."""
    flat = np.arange(np.prod(shape)) % 251
    return (flat % 2 if dtype == "bool" else flat).astype(dtype).reshape(shape)


# --- npy ------------------------------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("byte_order", "<>")
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", [(5,), (4, 3), (3, 2, 4, 5)])
def test_each_sample_is_a_row_of_the_array(tmp_path, dtype, byte_order, order, shape) -> None:
    """This holds for each dtype, byte order and order of dimensions."""
    array = numbers(shape, dtype)
    stored = np.asarray(array, np.dtype(dtype).newbyteorder(byte_order), order=order)
    source = npy(tmp_path, stored)

    assert columns(source) == (Column("x", dtype=dtype, shape=shape[1:]),)
    for values, row in zip(read_samples(source), array, strict=True):
        np.testing.assert_array_equal(values["x"], row, strict=True)
        assert values["x"].dtype.isnative


def test_several_files_are_the_fields_of_one_sample(tmp_path) -> None:
    """The fields have the order of the configuration; a value stays valid as long as the others."""
    np.save(tmp_path / "x.npy", numbers((6, 2, 3), "uint8"))
    np.save(tmp_path / "y.npy", np.arange(6))
    source = NpySource(root=tmp_path, arrays={"image": "x.npy", "label": "y.npy"})

    assert [column.name for column in columns(source)] == ["image", "label"]
    with opened(source) as (reader, _index):
        values = reader.read(4)
        np.testing.assert_array_equal(values["image"], numbers((6, 2, 3), "uint8")[4], strict=True)
        assert values["label"] == 4
        assert reader.name(4) == f"{tmp_path}/x.npy: sample 4 (byte 152)"


def test_arrays_of_other_lengths_are_refused_with_all_of_them(tmp_path) -> None:
    """The error lists all lengths, because any of them can be the wrong one."""
    np.save(tmp_path / "x.npy", np.zeros((6, 2)))
    np.save(tmp_path / "y.npy", np.zeros(5))

    assert "image has 6, label has 5" in refused(NpySource(root=tmp_path, arrays={"image": "x.npy", "label": "y.npy"}))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3, [("left", "i4"), ("right", "f4")]), "is a structured array (left, right)"),
        (np.array([None, 1], dtype=object), "holds Python objects, which are never loaded"),
        (np.zeros(3, "complex64"), "is of the type complex64"),
        (np.zeros(3, "datetime64[s]"), "is of the type datetime64[s]"),
        (np.array(["a", "bc"]), "is of the type <U2"),
        (np.array(5), "is one number"),
        (np.zeros((0, 3)), "holds nothing: its shape is [0, 3]"),
        (np.zeros((3, 0)), "holds nothing: its shape is [3, 0]"),
        (np.zeros((5000, 3)).T, "is in Fortran order, in which a sample's 5000 numbers lie all over the file"),
    ],
)
def test_arrays_that_no_batch_can_hold_are_refused_by_name(tmp_path, array, message) -> None:
    """`check` refuses them as well."""
    np.save(tmp_path / "x.npy", array, allow_pickle=True)  # users have such files
    source = NpySource(path=tmp_path / "x.npy")

    assert f"{tmp_path}/x.npy {message}" in refused(source)
    with pytest.raises(SourceInvalid):
        columns(source)


def test_a_file_that_is_not_as_long_as_its_header_says_is_refused(tmp_path) -> None:
    """The error has both lengths."""
    source = npy(tmp_path, np.zeros((4, 8)))
    os.truncate(source.path, 380)
    assert f"{source.path} is cut: it has 380 bytes, and its header says 384" in refused(source)

    os.truncate(source.path, 400)
    assert "has something behind its array: it has 400 bytes, and its header says 384" in refused(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"PK\3\4 and more", "it begins with b'PK"),
        (b"\x93NUMPY", "damaged header"),
        (b"\x93NUMPY\x03\x00\x10\x00", "version 3.0"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "damaged header"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"(" * 9000, "damaged header"),
    ],
)
def test_a_malformed_npy_file_is_refused(tmp_path, content, message) -> None:
    """The scan refuses the file before it creates an array."""
    (tmp_path / "x.npy").write_bytes(content)

    assert message in refused(NpySource(path=tmp_path / "x.npy"))


@pytest.mark.parametrize("shape", ["(-3, 4)", "(True, 4)", "(3.0,)", "3", "(10**30,)", "(__import__('os').getpid(),)"])
def test_a_header_with_a_wild_shape_is_refused(tmp_path, shape) -> None:
    """The scan does not execute any code in the header."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".encode()
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)

    assert str(tmp_path / "x.npy") in refused(NpySource(path=tmp_path / "x.npy"))


@given(seed=st.integers(0, 1 << 32))
def test_a_damaged_header_is_refused_or_read_as_what_it_says(tmp_path_factory, seed) -> None:
    """Bytes changed at random raise no other error, and no read goes beyond the file."""
    random_one = random.Random(seed)
    content = io.BytesIO()
    np.save(content, numbers((4, 3), "float32"))
    damaged = bytearray(content.getvalue())
    for _ in range(random_one.randrange(1, 4)):
        damaged[random_one.randrange(128)] = random_one.randrange(256)
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    path.write_bytes(damaged)
    try:
        samples = read_samples(NpySource(path=path))
    except SourceInvalid:
        return
    assert sum(values["image"].nbytes for values in samples) <= len(damaged)


def test_a_file_that_shrinks_later_makes_bad_samples_and_kills_no_process(tmp_path) -> None:
    """The reason has the file's new length and says which of several files it is."""
    np.save(tmp_path / "x.npy", np.zeros((4, 8)))
    np.save(tmp_path / "y.npy", np.arange(4))
    source = NpySource(root=tmp_path, arrays={"image": "x.npy", "label": "y.npy"})
    with opened(source) as (reader, _index):
        os.truncate(tmp_path / "y.npy", 150)
        assert "y.npy" in reason(reader, 1)
        assert "its file has changed since the daemon read it: it had 160 bytes, and has 150" in reason(reader, 1)
        assert reason(reader, 2) == f"the file ends at byte 150, 2 bytes before the sample does ({tmp_path}/y.npy)"
        os.truncate(tmp_path / "x.npy", 0)
        assert reason(reader, 1) == "the file ends at byte 0, 256 bytes before the sample does"


def test_an_array_in_fortran_order_that_shrinks_makes_bad_samples(tmp_path) -> None:
    """This also holds where the numbers of a sample are read one by one."""
    source = npy(tmp_path, np.asfortranarray(numbers((4, 3), "int32")))
    with opened(source) as (reader, _index):
        os.truncate(source.path, 128 + 40)
        assert "its file has changed" in reason(reader, 1)
        os.truncate(source.path, 128 + 4)
        assert "the file ends at byte 132" in reason(reader, 2)


def test_a_byte_that_is_not_a_bool_makes_a_bad_sample(tmp_path) -> None:
    """Different libraries would read such a byte as different values."""
    source = npy(tmp_path, np.zeros((2, 3), bool))
    status = source.path.stat()
    with opened(source) as (reader, _index), source.path.open("r+b") as stream:
        stream.seek(128 + 4)
        stream.write(b"\7")
        stream.flush()
        os.utime(source.path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert reason(reader, 1) == "'x' has a byte 7, which is not bool: 0 or 1"
        assert reader.read(0)["x"].tolist() == [False] * 3


@pytest.mark.parametrize("probe_bytes", [PROBE_BYTES, 8192])
def test_the_digest_tells_arrays_of_the_same_shape_apart(tmp_path, monkeypatch, probe_bytes) -> None:
    """The digest reads long files at their ends and in blocks; paths are not part of it."""
    monkeypatch.setattr(array_scan, "fingerprint", partial(fingerprint, probe_bytes=probe_bytes))
    array = np.zeros((1000, 1000), "uint8")
    digests = [scan(npy(tmp_path, array)).digest]
    for place in ((0, 0), (999, 999), slice(500, 520)):
        array[place] = 1
        digests.append(scan(npy(tmp_path, array)).digest)

    assert len(set(digests)) == 4
    assert scan(npy(tmp_path, array, "other.npy")).digest == digests[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either path"),
        ({"path": Path("/x.npy"), "arrays": {"x": "y.npy"}}, "set either path"),
        ({"arrays": {"x": "y.npy"}}, "set either path"),
        ({"path": Path("/x.npy"), "root": Path("/x")}, "set either path"),
        ({"path": Path("/x.npy"), "field": "1x"}, "is not a valid field name"),
        ({"root": Path("/x"), "arrays": {"x": "../y.npy"}}, "leads out of the root"),
        ({"root": Path("/x"), "arrays": {"x": "/y.npy"}}, "leads out of the root"),
        ({"root": Path("/x"), "arrays": {"x": "y.npy"}, "field": "z"}, "field counts only with path"),
    ],
)
def test_settings_of_npy_that_make_no_sense_are_refused(options, message) -> None:
    """The scan refuses them before it opens a file."""
    with pytest.raises(ValueError, match=message):
        NpySource(**options)


# --- npz ------------------------------------------------------------------------------------------


def test_the_arrays_of_an_archive_are_fields(tmp_path) -> None:
    """The fields have the names of the arrays, and are read directly from the file."""
    x, y = numbers((5, 2, 3), "uint8"), np.arange(5, dtype=">i4")
    source = npz(tmp_path, x=x, y=y)

    assert columns(source) == (Column("x", shape=(2, 3)), Column("y", dtype="int32"))
    for number, values in enumerate(read_samples(source)):
        np.testing.assert_array_equal(values["x"], x[number], strict=True)
        assert values["y"] == y[number]


def test_chosen_arrays_get_other_names(tmp_path) -> None:
    """The archive of MNIST needs this: its arrays differ in length."""
    npz(tmp_path, x_train=np.arange(5), y_train=np.arange(5) * 2, x_test=np.arange(3))
    source = NpzSource(path=tmp_path / "a.npz", arrays={"label": "y_train", "image": "x_train"})

    assert [list(values.items()) for values in read_samples(source)][2] == [("label", 4), ("image", 2)]
    assert "x_train has 5, y_train has 5, x_test has 3" in refused(NpzSource(path=tmp_path / "a.npz"))
    assert "has no array 'x_trian'; did you mean x_train?" in refused(
        NpzSource(path=tmp_path / "a.npz", arrays={"x": "x_trian"})
    )


def test_a_compressed_archive_is_refused_with_advice(tmp_path) -> None:
    """Compressed samples have no fixed place in the file."""
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(5))

    assert "a.npz: x.npy is compressed" in refused(NpzSource(path=tmp_path / "a.npz"))
    with pytest.raises(SourceInvalid, match=r"numpy\.savez instead of numpy\.savez_compressed"):
        columns(NpzSource(path=tmp_path / "a.npz"))


def write_zip(path: Path, members: dict[str, bytes]) -> NpzSource:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return NpzSource(path=path)


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "holds no array"),
        ({"x.txt": b"text"}, "x.txt is not a .npy file"),
        ({"x.npy": b""}, "x.npy is not a .npy file"),
        ({"x.npy": saved(np.zeros(5))[:-8]}, "x.npy has 160 bytes, and its header says 168"),
        ({"x.npy": saved(np.zeros(5)) + b"12"}, "x.npy has 170 bytes, and its header says 168"),
        ({"1.npy": saved(np.zeros(5))}, "'1' is not a valid field name"),
        ({"x.npy": saved(np.zeros(5)), "x": saved(np.zeros(5))}, "two arrays of the same name"),
        ({"x.npy": saved(np.zeros(5, complex))}, "x.npy is of the type complex128"),
    ],
)
def test_an_archive_of_something_else_is_refused(tmp_path, members, message) -> None:
    """The error names the member."""
    assert message in refused(write_zip(tmp_path / "a.npz", members))


def test_bytes_around_an_archive_are_refused(tmp_path) -> None:
    """Two archives that were joined would be the last one alone; zeros are padding."""
    source = npz(tmp_path, x=np.arange(5))
    file = tmp_path / "a.npz"
    whole = file.read_bytes()
    assert len(read_samples(source)) == 5
    file.write_bytes(whole + bytes(600))
    assert len(read_samples(source)) == 5

    file.write_bytes(whole + whole)
    assert f"has {len(whole)} bytes in front of its first array, which no sample would have" in refused(source)
    file.write_bytes(whole + b"\0x")
    assert f"ends at byte {len(whole)}, and has other bytes behind its end, from byte {len(whole) + 1} on" in refused(
        source
    )


def test_an_archive_whose_bytes_have_changed_is_refused(tmp_path) -> None:
    """The archive's checksum shows it."""
    source = npz(tmp_path, x=np.zeros((5, 100)))
    content = bytearray(source.path.read_bytes())
    content[2000] ^= 1
    source.path.write_bytes(content)

    assert "x.npy is damaged: its checksum is" in refused(source)


def test_an_archive_that_is_cut_or_damaged_anywhere_is_refused_or_the_same(tmp_path) -> None:
    """The scan raises no other error, and never returns other numbers."""
    source = npz(tmp_path, x=np.arange(20.0))
    whole = source.path.read_bytes()
    for end in range(0, len(whole), 7):
        source.path.write_bytes(whole[:end])
        assert str(source.path) in refused(source)
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        source.path.write_bytes(damaged)
        try:
            samples = read_samples(source)
        except SourceInvalid:
            continue
        assert [float(*values.values()) for values in samples] == list(range(20))


# --- raw ------------------------------------------------------------------------------------------


def test_records_of_mixed_fields_are_cut_out_of_the_file(tmp_path) -> None:
    """Files of CIFAR-10 have such records: a label and the pixels."""
    record = {"label": "uint8", "image": "uint8[3,2,2]"}
    source = raw(tmp_path, bytes(range(26)), record)

    assert columns(source) == (Column("label"), Column("image", shape=(3, 2, 2)))
    first, second = read_samples(source)
    assert (first["label"], second["label"]) == (0, 13)
    np.testing.assert_array_equal(second["image"], np.arange(14, 26, dtype="uint8").reshape(3, 2, 2), strict=True)


def test_bytes_in_front_are_left_out(tmp_path) -> None:
    """Files of MNIST have such a header; each file has a header of its own."""
    for number in (1, 2):
        (tmp_path / f"{number}.idx").write_bytes(b"header" + bytes([number] * 8))
    source = RawSource(root=tmp_path, files=("*.idx",), record={"image": "uint8[2,2,1]"}, offset=6)

    assert [int(values["image"].max()) for values in read_samples(source)] == [1, 1, 2, 2]
    with opened(source) as (reader, _index):
        assert reader.name(3) == f"{tmp_path}/2.idx: sample 1 (byte 10)"


@pytest.mark.parametrize("byte_order", ["little", "big"])
def test_numbers_may_have_their_bytes_in_either_order(tmp_path, byte_order) -> None:
    """The numbers may begin at any byte."""
    mark = "<" if byte_order == "little" else ">"
    content = b"".join(struct.pack(f"{mark}Bhd", *values) for values in ((1, -2, 0.5), (3, -4, 1e300)))
    source = raw(tmp_path, content, {"a": "uint8", "b": "int16", "c": "float64"}, byte_order=byte_order)

    assert [tuple(values.values()) for values in read_samples(source)] == [(1, -2, 0.5), (3, -4, 1e300)]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (37, "37 bytes are not 16 and whole records of 5 bytes each; 1 are left"),
        (39, "39 bytes are not 16 and whole records of 5 bytes each; 3 are left"),
        (16, "16 bytes hold no record of 5 bytes behind the first 16"),
        (3, "3 bytes hold no record of 5 bytes behind the first 16"),
    ],
)
def test_a_file_that_is_not_made_of_whole_records_is_refused(tmp_path, size, message) -> None:
    """The error has the length of the file and of a record."""
    source = raw(tmp_path, bytes(size), {"x": "uint8[5]"}, offset=16)

    assert refused(source) == f"{source.path}: {message}"
    os.truncate(source.path, 36)
    assert len(scan(source)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": {}}, "record must name a field"),
        ({"record": {"x": "text"}}, "x: text has no fixed number of bytes"),
        ({"record": {"x": "image"}}, "x: image has no fixed number of bytes"),
        ({"record": {"x": "int8[?]"}}, "has no fixed number of bytes"),
        ({"record": {"x": "int8"}, "offset": -1}, "offset must not be negative"),
        ({"record": {"x": "int8"}, "root": Path("/x")}, "set either path"),
    ],
)
def test_settings_of_raw_that_make_no_sense_are_refused(options, message) -> None:
    """The scan refuses them before it opens a file."""
    with pytest.raises(ValueError, match=message):
        RawSource(**{"path": Path("/x.bin"), **options})
