"""What `batchd init` keeps of data, and what it says of the rest: nothing is cut without a word."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import batchd_client
from batchd.config import directories
from batchd.daemon import config_checks
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.interface import kind_of, open_reader
from batchd.data.storage.access import Storage
from batchd.data.storage.survey import Survey
from batchd.embedded import serve
from support.commands import batchd
from support.images import jpeg, photo
from support.videos import write_video

pytestmark = pytest.mark.usefixtures("forked_children", "own_cache")
Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], Path]


def found(path: Path) -> dict[str, Any]:
    """Return what `batchd init --json` prints; comments that are wrapped are joined."""
    whole = json.loads(batchd("init", path, "--json", "--dry-run").stdout)
    return {**whole, "toml": whole["toml"].replace("\n#   ", " ")}


def batches(folder: Path, text: str) -> list[dict[str, np.ndarray]]:
    """All batches of an epoch of the configuration's only stream."""
    (folder / "served.toml").write_text(text + "shuffle = false\n")
    name = text.partition("[streams.")[2].partition("]")[0]
    with serve(folder / "served.toml") as address, batchd_client.connect(address) as daemon:
        return [{key: np.array(batch[key]) for key in batch} for batch in daemon.stream(name, epochs=1)]


def refused_cell(path: Path, plain: dict[str, Any]) -> str:
    """Why the last record of a table is a bad sample."""
    source, storage = CsvSource(**{**plain, "path": path, "classes": tuple(plain["classes"])}), Storage()
    index = kind_of(source).scan(source, Survey(lambda _found: None))
    reader = open_reader(source, index, 1 << 20, storage)
    with pytest.raises(SampleUnreadable) as caught:
        reader.read(len(index) - 1)
    reader.close()
    assert str(path) in reader.name(len(index) - 1)
    return str(caught.value)


def write_csv(folder: Path, rows: Rows) -> Path:
    lines = [",".join(rows[0]), *(",".join("" if one is None else str(one) for one in row.values()) for row in rows)]
    (folder / "rows.csv").write_text("\n".join(lines))
    return folder / "rows.csv"


def write_jsonl(folder: Path, rows: Rows) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


def write_parquet(folder: Path, rows: Rows) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=50)
    return folder / "rows.parquet"


TABLES = pytest.mark.parametrize("write", [write_csv, write_jsonl, write_parquet])


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@TABLES
def test_the_longest_text_decides_wherever_it_is(tmp_path: Path, write: Write) -> None:
    """It is not among the few that are evenly spread; a later, longer one is a bad sample."""
    rows = [{"n": n, "caption": "x" * (81 if n == 191 else 9)} for n in range(200)]

    whole = found(write(tmp_path, rows))

    assert whole["pipeline"] == [{"op": "text_bytes", "field": "caption", "length": 128, "truncation": False}]
    texts = [text for batch in batches(tmp_path, whole["toml"]) for text in batchd_client.text(batch["caption"])]
    assert [len(text) for text in texts] == [len(row["caption"]) for row in rows]


def test_lists_have_room_for_the_longest_and_boxes_follow_their_image(tmp_path: Path) -> None:
    """No class and no box is lost.

    Boxes follow what is done to the image, and no crop loses them.
    """
    (tmp_path / "a.jpg").write_bytes(jpeg(photo(80, 100)))
    counts = [9 if n == 41 else n % 3 for n in range(60)]
    rows = [
        {"image": "a.jpg", "boxes": [[1, 2, 30 + at, 40] for at in range(count)], "classes": list(range(count))}
        for count in counts
    ]

    whole = found(write_jsonl(tmp_path, rows))

    assert whole["fields"] == {"image": "image", "boxes": "float32[?,4]", "classes": "int64[?]"}
    assert [step["op"] for step in whole["pipeline"]] == [
        "decode",
        "follow",
        "resize",
        "random_flip",
        *["pad_batch"] * 2,
    ]
    assert whole["pipeline"][1] == {"op": "follow", "boxes": "boxes", "labels": ["classes"]}
    made = batches(tmp_path, whole["toml"])
    assert [n for batch in made for n in batch["boxes_length"].tolist()] == counts
    assert all((batch["boxes"][..., 2] > batch["boxes"][..., 0]).sum() == batch["boxes_length"].sum() for batch in made)


def test_one_small_picture_shrinks_no_other(tmp_path: Path) -> None:
    """The crop has the size that the largest allows."""
    for name, size in (("a", (1, 6)), ("b", (300, 400)), ("c", (1, 6))):
        cv2.imwrite(str(tmp_path / f"{name}.png"), photo(*size))

    assert found(tmp_path)["pipeline"][1] == {"op": "random_resized_crop", "size": [224, 224]}


# --- what is left out -----------------------------------------------------------------------------


def test_each_column_that_is_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    """However many they are."""
    rows: Rows = [{"a": 1, **{f"empty_{at}": None if n == at else 3 for at in range(30)}} for n in range(40)]

    toml = found(write_csv(tmp_path, rows))["toml"]

    assert f"# 30 columns left out, empty in 1 of 40 records: {', '.join(f'empty_{at}' for at in range(30))}\n" in toml


def test_keys_that_are_left_out_have_their_reasons(tmp_path: Path) -> None:
    """Also keys that later lines have alone, and what is of no use."""
    rows: Rows = [{"n": n, "null": None if n == 40 else 1, "mixed": n or "a"} for n in range(50)]
    rows = [{**row, "ragged": [[1], [1, 2]], "tags": ["a"], "big": 1 << 70, "empty": []} for row in rows]
    rows[44]["late"] = 1

    notes = found(write_jsonl(tmp_path, rows))["notes"]

    assert notes == [
        "1 key left out, missing or null in 1 of 50 samples: null",
        "1 key left out, of several kinds: numbers beyond int64, texts: mixed",
        "1 key left out, lists of other things than numbers, or of different depth: ragged",
        '1 key left out, lists of texts, which are of type "text[<=8]": docs/sources.md ("Types"): tags',
        "1 key left out, numbers beyond int64: big",
        "1 key left out, empty lists: empty",
        "1 key left out, missing or null in 49 of 50 samples: late",
    ]


@pytest.mark.thorough
def test_a_null_among_numbers_of_parquet_leaves_the_column_out(tmp_path: Path) -> None:
    """Wherever it is, also in another file; few missing texts are bad samples."""
    rows: Rows = [{"id": n, "age": 3, "text": None if n == 7 else "a"} for n in range(100)]
    write_parquet(tmp_path, rows).rename(tmp_path / "first.parquet")
    write_parquet(tmp_path, [{**row, "age": None if row["id"] == 77 else 1} for row in rows])

    whole = found(tmp_path)

    assert whole["fields"] == {"id": "int64", "text": "text"}
    assert "1 column left out, null in 1 of 200 rows: age" in whole["notes"]
    assert "# 2 of the 200 samples read cannot be used" in whole["toml"]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("write", "damage"),
    [
        (write_parquet, lambda data: data[:-9]),
        (write_parquet, lambda _data: b""),
        (write_jsonl, gzip.compress),
        (write_csv, lambda data: data + b"\0"),
    ],
)
def test_one_file_of_many_that_cannot_be_read_is_left_out(
    tmp_path: Path, write: Write, damage: Callable[[bytes], bytes]
) -> None:
    """The file says which, and why; the others are served."""
    for name in "abc":
        path = write(tmp_path, [{"x": 3}, {"x": 4}])
        path = path.rename(tmp_path / f"{name}{path.suffix}")
        if name == "b":
            path.write_bytes(damage(path.read_bytes()))

    whole = found(tmp_path)

    assert (whole["samples"], whole["left_out"]) == (4, [f"b{path.suffix}"])
    assert f"# 1 of 3 files left out, {next(iter(whole['left_out_reasons']))}: 1 {path.suffix} (b" in whole["toml"]
    assert len(batches(tmp_path, whole["toml"])) == 1


# --- wide tables, classes -------------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@TABLES
def test_many_columns_of_numbers_are_one_field(tmp_path: Path, write: Write) -> None:
    """In the order of the columns; the label is a field of its own."""
    rows: Rows = [{"label": n % 3, **{f"pixel{at}": n + at for at in range(784)}} for n in range(20)]

    whole = found(write(tmp_path, rows))

    assert whole["fields"] == {"label": "int64", "x": "float32[784]"}
    assert whole["source"]["names"] == {"x": "pixel{0..783}"}
    x = np.concatenate([batch["x"] for batch in batches(tmp_path, whole["toml"])])
    assert (x == np.arange(20)[:, None] + np.arange(784)).all()


def test_columns_of_numbers_without_numbers_in_their_names_are_one_field(tmp_path: Path) -> None:
    """Whole numbers that float32 does not hold stay what they are."""
    names = [f"{word}_{kind}" for word in "abcdefghi" for kind in ("mean", "error")]
    rows: Rows = [{**dict.fromkeys(names, 1.5), "stamp": (1 << 40) + 1, "kind": "owl"} for _n in range(3)]

    whole = found(write_csv(tmp_path, rows))

    assert whole["fields"]["x"] == "float64[19]"
    assert whole["source"]["names"] == {"x": f"{{{','.join([*names, 'stamp'])}}}"}


def test_more_fields_than_a_batch_has_are_named(tmp_path: Path) -> None:
    """The first are served, and the label first of all."""
    rows: Rows = [{**{f"t{at}": f"word{n}" for at in range(70)}, "label": n} for n in range(3)]

    whole = found(write_csv(tmp_path, rows))

    assert len(whole["fields"]) == 61
    assert "label" in whole["fields"]
    assert (
        f"10 columns left out, a batch has at most 61 fields: {', '.join(f't{at}' for at in range(60, 70))}"
        in whole["notes"]
    )


@pytest.mark.thorough
def test_names_of_classes_become_numbers(tmp_path: Path) -> None:
    """The trainer has the names; a cell with another name is a bad sample that says so."""
    kinds = ["setosa", "virginica", "setosa", "versicolor"] * 10
    path = write_csv(tmp_path, [{"width": n / 2, "species": kind} for n, kind in enumerate(kinds)])

    whole = found(path)

    assert whole["fields"] == {"width": "float32", "label": "int64"}
    assert whole["source"]["classes"] == ["setosa", "versicolor", "virginica"]
    (tmp_path / "served.toml").write_text(whole["toml"] + "shuffle = false\n")
    with serve(tmp_path / "served.toml") as address, batchd_client.connect(address) as daemon:
        stream = daemon.stream("rows", epochs=1)
        labels = [label for batch in stream for label in batch["label"].tolist()]
        assert [stream.classes[label] for label in labels] == kinds
    path.write_text(path.read_text() + "\n3,setossa" * 3)
    assert "is 'setossa', which is none of the classes; did you mean setosa?" in refused_cell(path, whole["source"])


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["007", "12", "3"], "text"),
        (["1.5", "1700000001"], "float64"),
        (["1", "2.5"], "float32"),
        (["12345678901234567890123", "1"], "text"),
        (["1", "2", "x"], "text"),
    ],
)
def test_no_type_changes_what_a_cell_says(tmp_path: Path, cells: list[str], wanted: str) -> None:
    """Not leading zeros, nor digits that a type does not hold, also behind the first records."""
    rows: Rows = [{"n": 1, "cell": "1"}] * 100 + [{"n": 1, "cell": cell} for cell in cells]

    assert found(write_csv(tmp_path, rows))["fields"]["cell"] == wanted


# --- other data -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_tokens_are_int64_and_videos_can_be_clips(tmp_path: Path) -> None:
    """Embeddings take no uint16; the note has the keys of a clip."""
    (tmp_path / "train.bin").write_bytes((np.arange(5000, dtype=np.uint16) % 100).tobytes())
    write_video(tmp_path / "videos" / "a.mp4", 5)
    write_parquet(tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [3]}])

    assert batches(tmp_path, found(tmp_path / "train.bin")["toml"])[0]["tokens"].dtype == np.int64
    assert found(tmp_path / "rows.parquet")["fields"] == {"input_ids": "int64[?]"}
    assert "frames = 16 makes clips" in found(tmp_path / "videos")["toml"]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("form", ["yolo", "yolo by part", "coco", "voc"])
def test_data_for_detection_is_recognised_as_what_it_is(tmp_path: Path, form: str) -> None:
    """There is a stream of each part, whose boxes follow the image; images without a box stay."""
    folders = {
        "yolo": ("images/{}", "labels/{}"),
        "yolo by part": ("{}/images", "{}/labels"),
        "coco": ("{}2017", "annotations"),
        "voc": ("JPEGImages", "Annotations"),
    }
    images, labels = folders[form]
    box = "<bndbox><xmin>26</xmin><ymin>41</ymin><xmax>75</xmax><ymax>60</ymax></bndbox>"
    for part in ("train", "val"):
        for number in range(3):
            image, label = tmp_path / images.format(part) / f"{part}{number}.jpg", tmp_path / labels.format(part)
            image.parent.mkdir(parents=True, exist_ok=True)
            label.mkdir(parents=True, exist_ok=True)
            image.write_bytes(jpeg(photo(100, 100, seed=number)))
            if form.startswith("yolo"):
                (label / f"{image.stem}.txt").write_text("1 0.5 0.5 0.5 0.2\n" if number else "")
            elif form == "voc":
                thing = f"<object><name>bicycle</name>{box}</object>" if number else ""
                (label / f"{image.stem}.xml").write_text(f"<annotation>{thing}</annotation>")
        if form == "coco":
            whole = {"categories": [{"id": 90}, {"id": 3}, {"id": 1}]}
            whole["images"] = [{"id": n, "file_name": f"{part}{n}.jpg"} for n in range(3)]
            whole["annotations"] = [{"image_id": n, "category_id": 3, "bbox": [25, 40, 50, 20]} for n in (1, 2)]
            (tmp_path / labels / f"instances_{part}2017.json").write_text(json.dumps(whole))
            (tmp_path / labels / f"captions_{part}2017.json").write_text(json.dumps({**whole, "annotations": []}))
        if form == "voc":
            (lists := tmp_path / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
            (lists / f"{part}.txt").write_text("".join(f"{part}{n}\n" for n in range(3)))

    (tmp_path / "served.toml").write_text(found(tmp_path)["toml"])
    with serve(tmp_path / "served.toml") as address, batchd_client.connect(address) as daemon:
        for part in ("train", "val"):
            boxes, classes = [], []
            for batch in daemon.stream(part, epochs=1):
                for row, length in enumerate(batch["boxes_length"]):
                    boxes.append(batch["boxes"][row, :length].tolist())
                    classes += batch["classes"][row, :length].tolist()
            # a flip leaves this box where it is
            assert sorted(boxes) == [[], [[25, 40, 75, 60]], [[25, 40, 75, 60]]]
            assert classes == [1, 1]


@pytest.mark.parametrize(
    ("yaml", "numbers", "points"),
    [("kpt_shape: [4, 2]\n", 8, 4), ("path: .\nkpt_shape:\n- 4\n- 3\n", 12, 4), (None, 51, 17), (None, 4, 0)],
)
def test_points_behind_the_boxes_of_yolo_are_no_polygon(
    tmp_path: Path, yaml: str | None, numbers: int, points: int
) -> None:
    """Their number is that of the YAML of ultralytics, or of lines that can be nothing else."""
    for folder, name, content in (("images", "1.jpg", jpeg(photo())), ("labels", "1.txt", b"")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content or (b"0" + b" 0.5" * (4 + numbers) + b"\n"))
    if yaml is not None:
        (tmp_path / "data.yaml").write_text(yaml)

    assert (f"keypoints = {points}" in found(tmp_path)["toml"]) == (points > 0)
    assert ("keypoints are left out" in found(tmp_path)["toml"]) == (points > 0)


def test_captions_beside_images_are_no_boxes(tmp_path: Path) -> None:
    """A text of the same name is not always an annotation."""
    (tmp_path / "a.jpg").write_bytes(jpeg(photo()))
    (tmp_path / "a.txt").write_text("4 cats on 2 sofas")

    assert "detection" not in found(tmp_path)["toml"]


def test_no_runtime_directory_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user without XDG_RUNTIME_DIR can look at data."""

    def refuse(*_configured: object) -> None:
        raise AssertionError("it asked for a runtime directory")

    monkeypatch.setattr(directories, "choose_runtime_directory", refuse)
    monkeypatch.setattr(config_checks, "choose_runtime_directory", refuse)

    assert found(write_csv(tmp_path, [{"x": 1}]))["fields"] == {"x": "int64"}
