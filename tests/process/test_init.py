"""`batchd init`: what it finds at a path, what it writes, and that a daemon serves it."""

import csv
import io
import json
import tarfile

import numpy as np
import pytest

from batchd.config.load import load_config
from support.commands import batchd
from support.images import encode, jpeg, photo, write_photos

CROPPED = ["decode", "random_resized_crop", "random_flip"]


def classes(folder):
    write_photos(folder, {"cat": 6, "dog": 5})
    (folder / "cat" / "notes.txt").write_text("no image")
    return "folder", {"image", "label", "index"}


def flat(folder):
    (folder / "one.jpg").write_bytes(jpeg(photo(60, 80)))
    return "folder", {"image", "label", "index"}


def tree(folder):
    """Images beside folders, and a folder without any: neither flat nor one class for each."""
    write_photos(folder, {"cat": 3, "dog": 3})
    (folder / "more.png").write_bytes(encode(photo(60, 80), ".png"))
    (folder / "empty").mkdir()
    return "glob", {"image", "label", "index"}


def shards(folder):
    for number in range(6):
        with tarfile.open(folder / f"train-{number}.tar", "w") as tar:
            for ending, data in (("jpg", jpeg(photo(60, 80))), ("cls", b"3"), ("json", b"{}")):
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return "webdataset", {"image", "label", "index"}


def table(folder):
    (folder / "pictures").mkdir()
    (folder / "pictures" / "one.jpg").write_bytes(jpeg(photo(60, 80)))
    with (folder / "table.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["file", "Age", "name"], ["pictures/one.jpg", "7.5", "Ann"]])
    return "csv", {"image", "age", "index"}  # of the file: a folder is one of images


def array(folder):
    np.save(folder / "digits.npy", np.zeros((70, 28, 28), np.uint8))
    return "npy", {"image", "index"}


def arrays(folder):
    names = {"x_train": (70, 8), "y_train": (70,), "x_test": (9, 8)}
    np.savez(folder / "all.npz", **{name: np.zeros(shape, np.float32) for name, shape in names.items()})
    return "npz", {"x_train", "y_train", "index"}


def parquet(folder):
    """As Hugging Face's `to_parquet` writes images and classes."""
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": jpeg(photo(60, 80)), "path": None}] * 4
    rows = arrow.table({"image": images, "label": [0, 1, 0, 1], "caption": ["a", "b", "c", "d"]})
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    rows = rows.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    writer.write_table(rows, folder / "train.parquet")
    return "parquet", {"image", "label", "index"}


def records(folder):
    reader = pytest.importorskip("batchd.sources.tfrecord.reader")
    from batchd.sources.tfrecord.frames import FOOTER, HEADER, masked_crc  # noqa: PLC0415  beside what it needs

    example = reader.Example()
    example.features.feature["image/encoded"].bytes_list.value.append(jpeg(photo(60, 80)))
    example.features.feature["image/class/label"].int64_list.value.append(7)
    example.features.feature["image/class/text"].bytes_list.value.append(b"cat")
    data = example.SerializeToString()
    length = HEADER.pack(len(data), 0)[:8]
    frame = HEADER.pack(len(data), masked_crc(length)) + data + FOOTER.pack(masked_crc(data))
    for number in range(6):
        (folder / f"train.tfrecord-{number:05}-of-00006").write_bytes(frame)
    return "tfrecord", {"image", "image_class_label", "index"}


@pytest.mark.parametrize("make", [classes, flat, tree, shards, table, array, arrays, parquet, records])
def test_what_is_written_is_served(tmp_path, make):
    """For each kind of data, and with the fields that need no further steps."""
    folder = tmp_path / "my data"
    folder.mkdir()
    kind, fields = make(folder)

    place = folder / "table.csv" if make is table else folder
    said = batchd("init", place, folder=tmp_path).stdout

    ((name, stream),) = load_config(tmp_path / "batchd.toml").streams.items()
    assert name == ("table" if make is table else "my-data")
    assert stream.source.type == kind
    assert [step.op for step in stream.pipeline] == (CROPPED if "image" in fields and kind != "npy" else [])
    header = next(
        line for line in said.splitlines() if line.startswith(("image", "x_train", "age")) and "index" in line
    )
    assert set(header.split()) == fields
    assert said.endswith('for batch in daemon.stream("NAME"): ...\n'.replace("NAME", name))
    assert "fine" in batchd("check", folder=tmp_path).stdout


def test_what_is_left_out_is_named_in_the_file_and_on_the_terminal(tmp_path):
    (tmp_path / "photos").mkdir()
    classes(tmp_path / "photos")

    said = batchd("init", "photos", "--sheet", "sheet.png", folder=tmp_path).stdout

    line = "left out: 1 of 12 files: cat/notes.txt"
    assert line in said
    written = (tmp_path / "batchd.toml").read_text()
    assert "# photos: 11 images in 2 classes: cat (6), dog (5); for example JPEG" in written
    assert f"# {line}" in written
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_is_replaced_only_where_that_is_asked_for(tmp_path):
    (tmp_path / "photos").mkdir()
    flat(tmp_path / "photos")
    (tmp_path / "batchd.toml").write_text("mine")

    refused = batchd("init", "photos", folder=tmp_path, status=1).stderr
    found = json.loads(batchd("init", "photos", "--json", "-o", "-", folder=tmp_path).stdout)

    assert "batchd.toml exists; `batchd init --force` replaces it" in refused
    assert (tmp_path / "batchd.toml").read_text() == "mine"
    assert found["file"] is None
    assert found["source"] == {"type": "folder", "path": str(tmp_path / "photos")}
    batchd("init", "photos", "--force", "--name", "cats", folder=tmp_path)
    assert list(load_config(tmp_path / "batchd.toml").streams) == ["cats"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no files that batchd reads: it is empty; it reads images"),
        ({"a.doc": b"x", "b.doc": b"x"}, "has no files that batchd reads: 2 x .doc; it reads images"),
        ({"a.tar": b"x" * 2000}, "a.tar is no plain tar file"),
        ({"x.npy": b"x" * 200}, "x.npy cannot be read"),
        ({"a.csv": b"name\nAnn\n"}, "has no image and no column of single numbers, only name"),
        ({"data.mdb": b""}, "is an LMDB database"),
        (
            {"a.jpg": b"no image"},
            "1 of 1 samples are bad, more than max_bad_fraction = 0.05 (1 image, without classes; for",
        ),
    ],
)
def test_what_cannot_be_served_is_said_and_nothing_is_written(tmp_path, files, reason):
    (tmp_path / "data").mkdir()
    for name, data in files.items():
        (tmp_path / "data" / name).write_bytes(data)

    status = 1 if "samples are bad" in reason else 2
    assert reason in batchd("init", "data", folder=tmp_path, status=status).stderr
    assert [one.name for one in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [("nowhere", "there is no "), ("s3://bucket/images/", "of URLs, only those of tar shards and arrays")],
)
def test_a_place_that_is_not_there_or_not_known_is_named(tmp_path, place, reason):
    assert reason in batchd("init", place, folder=tmp_path, status=2).stderr
