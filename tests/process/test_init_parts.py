"""`batchd init` for a data set in parts: a stream for each, with the same fields and classes."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import batchd_client
from batchd.config.load import parse_config
from batchd.data.storage.access import Storage
from batchd.embedded import serve
from batchd.stream.rings import plan_rings
from support.commands import batchd
from support.images import jpeg, photo, write_photos
from support.lmdb_files import write_lmdb
from support.parquet_files import write_parquet
from support.shards import write_shard
from support.videos import write_video

pytestmark = pytest.mark.usefixtures("forked_children", "own_cache")


def streams_of(path: Path, *options: str | Path) -> tuple[dict[str, Any], list[str]]:
    """Return the streams that `batchd init` writes for data, and what it notes on the first."""
    whole = json.loads(batchd("init", path, "--json", "--dry-run", *options).stdout)
    streams = dict(tomllib.loads(whole["toml"])["streams"])
    assert list(streams) == [whole["stream"], *(part["stream"] for part in whole.get("parts", []))]
    return streams, whole["notes"]


def test_each_part_gets_a_stream_and_only_training_is_augmented(tmp_path: Path) -> None:
    """Both are served: labels mean the same, and the validation has each sample once, in order."""
    write_photos(tmp_path / "pets" / "train", {"cat": 4, "dog": 4})
    write_photos(tmp_path / "pets" / "val", {"cat": 2, "dog": 3})

    text = batchd("init", "pets", folder=tmp_path).stdout

    written = tomllib.loads((tmp_path / "batchd.toml").read_text())["streams"]
    path = str(tmp_path / "pets")
    assert written["train"]["source"] == {"type": "folder", "path": f"{path}/train"}
    assert written["val"]["source"] == {"type": "folder", "path": f"{path}/val", "classes": "train"}
    assert [step["op"] for step in written["train"]["pipeline"]] == ["decode", "random_resized_crop", "random_flip"]
    assert written["val"]["pipeline"] == [
        {"op": "decode"},
        {"op": "resize", "shorter_side": 54},
        {"op": "center_crop", "size": [48, 48]},
    ]
    assert '  for batch in daemon.stream("train"):\n      batch["image"], batch["label"]  # arrays' in text
    assert '  for batch in daemon.stream("val", epochs=1):\n      batch["image"], batch["label"]  # each' in text
    assert "is fine" in batchd("check", folder=tmp_path).stdout
    with serve(tmp_path / "batchd.toml") as address, batchd_client.connect(address) as daemon:
        batches = [(batch["image"].shape[1:], batch["label"].tolist()) for batch in daemon.stream("val", epochs=1)]
    assert [label for _shape, labels in batches for label in labels] == [0, 0, 1, 1, 1]
    assert {shape for shape, _labels in batches} == {(48, 48, 3)}


@pytest.mark.parametrize("parts", [("Training", "Testing"), ("train", "valid", "test"), ("train", "validation")])
def test_the_usual_names_of_parts_are_known(tmp_path: Path, parts: tuple[str, ...]) -> None:
    """Streams have these names, but the training part is `train`; validation is before test."""
    for part in parts:
        write_photos(tmp_path / part, {"cat": 2})

    assert list(streams_of(tmp_path)[0]) == ["train", *parts[1:]]


def test_parts_may_be_below_folders_that_all_files_share(tmp_path: Path) -> None:
    """Those of ImageNet are in Data/CLS-LOC; nothing of a folder above them is a class."""
    for part in ("train", "val"):
        write_photos(tmp_path / "Data" / "CLS-LOC" / part, {"cat": 2, "dog": 2})

    streams, _notes = streams_of(tmp_path)

    paths = [stream["source"]["path"] for stream in streams.values()]
    assert paths == [str(tmp_path / "Data" / "CLS-LOC" / part) for part in ("train", "val")]


def test_a_class_that_validation_has_alone_is_numbered_behind_the_others(tmp_path: Path) -> None:
    """So it changes no label of the training; a class that only training has keeps its number."""
    write_photos(tmp_path / "train", {"bee": 2, "dog": 2})
    write_photos(tmp_path / "val", {"ant": 2, "dog": 2})

    streams, notes = streams_of(tmp_path)

    assert streams["train"]["source"]["classes"] == ["bee", "dog", "ant"]
    assert streams["val"]["source"]["classes"] == "train"
    assert notes == ["classes that other parts have alone, numbered behind the others: ant"]


def test_parts_with_other_labels_or_fields_get_no_stream(tmp_path: Path) -> None:
    """The note has the reason: labels of a flat folder, and of a table without the column."""
    write_photos(tmp_path / "photos" / "train", {"cat": 2, "dog": 2})
    write_photos(tmp_path / "photos" / "test", {"": 2})
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "train.csv").write_text("x,label\n1.5,0\n2.5,1\n")
    (tmp_path / "tables" / "test.csv").write_text("x\n1.5\n")

    streams, notes = streams_of(tmp_path / "photos")
    assert list(streams) == ["photos"]
    assert notes[0].startswith("no stream of the part test: it has no class folders, so its labels are not known")
    streams, (note,) = streams_of(tmp_path / "tables")
    assert list(streams) == ["tables"]
    assert note.startswith("no stream of the part test: ")
    assert "'label'" in note


def test_folders_of_which_one_is_uneven_have_the_same_numbers(tmp_path: Path) -> None:
    """A pattern, for images beside class folders, has the classes as a list."""
    write_photos(tmp_path / "train", {"cat": 2, "dog": 2, "": 1})
    write_photos(tmp_path / "val", {"dog": 2})

    streams, _notes = streams_of(tmp_path)

    assert (streams["train"]["source"]["type"], streams["val"]["source"]["type"]) == ("glob", "folder")
    assert streams["val"]["source"]["classes"] == ["cat", "dog"]


def test_a_class_without_an_image_in_validation_is_a_class_all_the_same(tmp_path: Path) -> None:
    """Its folder is there, so the part is a folder as the training part is."""
    write_photos(tmp_path / "train", {"cat": 2, "dog": 2})
    write_photos(tmp_path / "val", {"dog": 2})
    (tmp_path / "val" / "cat").mkdir()

    streams, _notes = streams_of(tmp_path)

    assert streams["val"]["source"] == {"type": "folder", "path": str(tmp_path / "val"), "classes": "train"}


def write_rows(folder: Path, part: str, rows: int) -> None:
    (folder / f"{part}.csv").write_text("\n".join(["text,label", *["long" * rows + ",cat", "b,dog"] * rows]))


def write_lines(folder: Path, part: str, rows: int) -> None:
    lines = [json.dumps({"text": "long" * rows, "label": 1})] * rows
    (folder / f"{part}.jsonl").write_text("\n".join(lines))


def write_table(folder: Path, part: str, rows: int) -> None:
    write_parquet(folder / f"{part}-00000-of-00001.parquet", {"text": ["long" * rows] * rows, "label": [1] * rows})


def write_tar(folder: Path, part: str, rows: int) -> None:
    members = [(f"{row}.txt", b"long" * rows) for row in range(rows)]
    write_shard(folder / f"{part}-0000.tar", members)


def write_npy(folder: Path, part: str, rows: int) -> None:
    np.save(folder / f"x_{part}.npy", np.zeros((rows, 3)))
    np.save(folder / f"y_{part}.npy", np.arange(rows))


def write_npz(folder: Path, part: str, rows: int) -> None:
    np.savez(folder / f"{part}.npz", x=np.zeros((rows, 3)), y=np.arange(rows))


def write_bin(folder: Path, part: str, rows: int) -> None:
    (folder / f"{part}.bin").write_bytes((np.arange(1025 * rows, dtype=np.uint16) % 100).tobytes())


def write_database(folder: Path, part: str, rows: int) -> None:
    write_lmdb(folder / part, {b"%d" % row: jpeg(photo(seed=row)) for row in range(rows)})


def write_clips(folder: Path, part: str, rows: int) -> None:
    for name in ("run", "jump"):
        write_video(folder / part / name / "a.mp4", rows)


@pytest.mark.thorough(after_first=True)
@pytest.mark.usefixtures("forked_scans")
@pytest.mark.parametrize(
    "write",
    [write_rows, write_lines, write_table, write_tar, write_npy, write_npz, write_bin, write_database, write_clips],
)
def test_every_kind_of_file_has_parts(tmp_path: Path, write: Callable[[Path, str, int], None]) -> None:
    """A batch of each part has the same fields and shapes, with room for the longest of all."""
    data = tmp_path / "data"
    data.mkdir()
    for part, rows in (("train", 4), ("val", 8)):
        write(data, part, rows)

    whole = json.loads(batchd("init", data, "--json", "--dry-run").stdout)

    assert (whole["stream"], [part["stream"] for part in whole["parts"]], whole["left_out"]) == ("train", ["val"], [])
    assert whole["parts"][0]["samples"] > whole["samples"]
    config = parse_config(whole["toml"], tmp_path / "batchd.toml").config
    assert [stream.shuffle for stream in config.streams.values()] == [True, False]
    with Storage() as storage:
        rings = plan_rings(config, storage, thoroughly=True)
    train, val = ([text.partition("[")[0::2] for text in rings[name].layout.field_texts] for name in ("train", "val"))
    assert [(name, shape.split(",")[1:]) for name, shape in train] == [
        (name, shape.split(",")[1:]) for name, shape in val
    ]


def test_large_training_parts_drop_the_last_batch(tmp_path: Path) -> None:
    """Of few batches, the last one is too large a part of the data."""
    (tmp_path / "train.csv").write_text("x,label\n" + "1.5,0\n" * 1100)
    (tmp_path / "val.csv").write_text("x,label\n" + "1.5,0\n" * 1100)

    streams, _notes = streams_of(tmp_path)

    assert ("drop_last" in streams["val"], streams["train"]["drop_last"]) == (False, True)


def test_parts_are_added_under_free_names_and_with_the_classes_of_the_training_stream(tmp_path: Path) -> None:
    """So does a folder of validation alone, and a part that is new beside those in the file."""
    for data in ("pets", "birds"):
        write_photos(tmp_path / data / "train", {"cat": 2, "dog": 2})
        write_photos(tmp_path / data / "val", {"dog": 2})
    batchd("init", "pets/train", folder=tmp_path)
    batchd("init", "--add", "pets/val", folder=tmp_path)
    batchd("init", "--add", "birds", folder=tmp_path)
    write_photos(tmp_path / "birds" / "test", {"dog": 2})
    assert "as test\n" in batchd("init", "--add", "birds", folder=tmp_path).stdout

    streams = tomllib.loads((tmp_path / "batchd.toml").read_text())["streams"]

    classes = {name: stream["source"].get("classes") for name, stream in streams.items()}
    assert classes == {
        "train": None,
        "val": "train",
        "birds-train": None,
        "birds-val": "birds-train",
        "test": "birds-train",
    }
    assert [stream.get("shuffle") for stream in streams.values()] == [None, False, None, False, False]
    assert "is fine" in batchd("check", folder=tmp_path).stdout
