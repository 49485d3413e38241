"""Every kind of source that reads files, in small: ``test_conformance.py`` reads and damages it.

A new kind gets its tests by an entry in ``KINDS``.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchd.data.samples.values import MediaFile
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.coco.options import CocoSource
from batchd.data.sources.composed.options import ConcatSource, SubsetSource
from batchd.data.sources.csv.options import CsvSource
from batchd.data.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.data.sources.jsonl.options import JsonlSource
from batchd.data.sources.lerobot.options import LeRobotSource
from batchd.data.sources.lmdb.options import LmdbSource
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.pairs.options import PairsSource, VocSource, YoloSource
from batchd.data.sources.parquet.options import ParquetSource
from batchd.data.sources.tfrecord.options import TFRecordSource
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.sources.video.options import VideoSource
from batchd.data.sources.webdataset.options import WebDatasetSource
from support.lerobot_files import Layout, write_lerobot
from support.lmdb_files import write_lmdb
from support.megatron import write_megatron
from support.parquet_files import hugging_face, write_arrow, write_parquet
from support.shards import write_shard
from support.tfrecords import example, write_records
from support.videos import Coding, number_in, write_video

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of source over files of numbered samples."""

    write: Callable[[Path, range], Path]
    """Writes a file with a sample of each number at a path without an ending; gives the file."""
    source: Callable[..., SourceOptions]
    """``source(root, *names)``: of the files of these names below a folder or a URL."""
    number: Callable[[Values], int]
    """The number of a sample, from its values."""
    name: str
    """What messages call the third sample of a file "a", below the root."""
    changes: tuple[dict[str, Any], ...] = ()
    """Options that give the same files another digest."""
    takes_several: bool = True
    """Whether it reads several files."""
    is_scanned: bool = False
    """Whether the file is read by the scan alone."""
    is_mapped: bool = False
    """Whether a cut of the file kills the process: ``tests/process`` shows that."""
    is_any: bool = False
    """Whether any bytes are samples, so that a file of something else is read."""
    is_remote: bool = True
    """Whether it takes URLs."""
    is_listed: bool = False
    """Whether its files have to be listed, which http servers cannot do."""
    reads_rows: bool = False
    """Whether it reads the numbers of several samples at once."""
    index_bytes: int | None = None
    """Bytes of the index for each sample, where they have a limit."""

    @property
    def is_read_in_parts(self) -> bool:
        """Whether a sample has a file that a step reads in parts."""
        return self.number is _of_video

    @property
    def is_file_each(self) -> bool:
        """Whether each sample is a file of its own, so that one fails alone."""
        return self.write in {_files, _beside}


def image(number: int) -> bytes:
    """The bytes of an image, which no test decodes."""
    return bytes([number % 251]) * (40 + number % 251)


def _of_image(values: Values) -> int:
    return int(values["image"][0])


def _of_video(values: Values) -> int:
    video = values["video"] if "video" in values else values["audio"]
    return int((video.whole() if isinstance(video, MediaFile) else video)[0])


def _of(name: str) -> Callable[[Values], int]:
    return lambda values: int(np.asarray(values.get(name, -1)).reshape(-1)[0])


def _files(path: Path, numbers: range) -> Path:
    path.mkdir()
    for number in numbers:
        (path / f"{number} é.jpg").write_bytes(image(number))
    return path / f"{numbers[2]} é.jpg"


def _robot(path: Path, numbers: range) -> Path:
    write_lerobot(path, Layout([len(numbers)], [[0]], ["observation.images.top"], first=numbers[0]))
    return path / "videos/observation.images.top/chunk-000/file-000.mp4"


def _folder(root: Path, *_names: str) -> SourceOptions:
    return FolderSource(path=root)


def _glob(root: Path, *names: str) -> SourceOptions:
    return GlobSource(root=root, patterns=tuple(f"{name}/*.jpg" for name in names), path_bytes=20)


def _pairs(root: Path, *names: str) -> SourceOptions:
    (name,) = names
    fields = {"image": "image", "mask": "image", "text": "text", "x": "float32[2]"}
    files = {field: f"{name}/*.{end}" for field, end in zip(fields, ("jpg", "png", "xml", "npy"), strict=True)}
    return PairsSource(root=root, fields=fields, files=files)


def _yolo(root: Path, *names: str) -> SourceOptions:
    return YoloSource(root=root, images=f"{names[0]}/*.jpg", fields=("classes", "boxes", "image"))


def _voc(root: Path, *names: str) -> SourceOptions:
    return VocSource(root=root, images=f"{names[0]}/*.jpg", annotations=f"{names[0]}/*.xml")


def _beside(path: Path, numbers: range) -> Path:
    """Images, and beside each what the kinds of ``pairs`` read."""
    file = _files(path, numbers)
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox>"
    for number in numbers:
        (path / f"{number} é.png").write_bytes(image(number))
        np.save(path / f"{number} é.npy", np.array([number, 0], np.float32))
        (path / f"{number} é.txt").write_text("1 0.5 0.5 0.25 0.25\n" * (number % 3))
        (path / f"{number} é.xml").write_text(f"<annotation><object><name>dog</name>{box}</object></annotation>")
    return file


def _list(path: Path, numbers: range) -> Path:
    _files(path, numbers)
    file = path.with_suffix(".txt")
    file.write_text("".join(f"{path.name}/{number} é.jpg {number}\n" for number in numbers))
    return file


def _shard(path: Path, numbers: range) -> Path:
    members = [(f"{n}.{end}", data) for n in numbers for end, data in (("jpg", image(n)), ("cls", b"%d" % n))]
    return write_shard(path.with_suffix(".tar"), members)


def _shard_of_fields(path: Path, numbers: range) -> Path:
    box = io.BytesIO()
    np.save(box, np.arange(4, dtype=np.float32))
    others = {"seg.png": b"mask", "txt": "a téxt".encode(), "box.npy": box.getvalue(), "json": b'{"score": 1.5}'}
    return write_shard(
        path.with_suffix(".tar"),
        [
            (f"{n}.{ending}", data)
            for n in numbers
            for ending, data in ({"jpg": image(n)} | others | {"cls": b"%d" % n}).items()
        ],
    )


SHARD_FIELDS = {
    "image": "image",
    "mask": "image",
    "caption": "text",
    "box": "float32[4]",
    "score": "float32",
    "label": "int64",
}
IMAGE_AND_LABEL = {"image": "image", "label": "int64"}


def _records(path: Path, numbers: range) -> Path:
    return write_records(path.with_suffix(".rec"), [example(image=[image(n)], label=[n]) for n in numbers])


def _table(path: Path, numbers: range) -> Path:
    file = path.with_suffix(".csv")
    file.write_text("x,name\n" + "".join(f'{n},"th""é\n{n}"\n' for n in numbers))
    return file


def _table_of_images(path: Path, numbers: range) -> Path:
    _files(path, numbers)
    file = path.with_suffix(".csv")
    file.write_text("file,x\n" + "".join(f"{path.name}/{n} é.jpg,{n}\n" for n in numbers))
    return file


def _table_of_videos(path: Path, numbers: range) -> Path:
    _files(path, numbers)
    file = path.with_suffix(".csv")
    file.write_text("".join(f'"{path.name}/{n} é.jpg" {n}\n' for n in numbers))
    return file


def _lines(path: Path, numbers: range) -> Path:
    _files(path, numbers)
    lines = [
        {"x": n, "meta": {"ids": [n] * (n % 3)}, "files": [f"{path.name}/{n} é.jpg"] * (1 + n % 2)} for n in numbers
    ]
    file = path.with_suffix(".jsonl")
    file.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\r\n\n" for line in lines))
    return file


def _objects(path: Path, numbers: range) -> Path:
    _files(path, numbers)
    box = {"bbox": [1, 2.5, 3, 4], "category_id": 7, "segmentation": [[0, 0, 3, 0, 3, 3]], "area": 9, "iscrowd": 0}
    content = {
        "images": [{"id": n + 5, "file_name": f"{n} é.jpg", "height": 4, "width": 5} for n in numbers],
        "annotations": [{"id": 3 * n + one, "image_id": n + 5, **box} for n in numbers for one in range(1 + n % 3)],
        "categories": [{"id": 7, "name": "ä"}, {"id": 3, "name": "b"}],
    }
    file = path.with_suffix(".json")
    file.write_text(json.dumps(content, ensure_ascii=False))
    return file


def _array(path: Path, numbers: range) -> Path:
    file = path.with_suffix(".npy")
    np.save(file, np.repeat(np.array(numbers, np.int16), 6).reshape(-1, 6))
    np.save(path.with_name(f"{path.name}-f.npy"), np.asfortranarray(np.arange(2.0 * len(numbers)).reshape(-1, 2)))
    return file


def _archive(path: Path, numbers: range) -> Path:
    file = path.with_suffix(".npz")
    np.savez(file, x=np.arange(6.0 * len(numbers)).reshape(-1, 6), y=np.array(numbers))
    return file


def _bytes(path: Path, numbers: range) -> Path:
    file = path.with_suffix(".bin")
    file.write_bytes(b"".join(bytes([n]) + bytes(range(6)) for n in numbers))
    return file


def _tokens(path: Path, numbers: range) -> Path:
    file = path.with_suffix(".bin")
    file.write_bytes(np.repeat(np.array(numbers, np.uint16), 2).tobytes())
    return file


def _documents(path: Path, numbers: range) -> Path:
    return write_megatron(path.with_suffix(".bin"), [[[n, 1]] for n in numbers], "int32")


def _columns(path: Path, numbers: range) -> dict[str, Any]:
    """Columns of a table; the image of every fourth row is in a file of its own."""
    _files(path, numbers)
    stored = [None if n % 4 == 3 else image(n) for n in numbers]
    images = hugging_face(stored, [f"{path.name}/{n} é.jpg" if n % 4 == 3 else None for n in numbers])
    return {"image": images, "label": pa.array(numbers, pa.int64()), "box": [[n, 1] for n in numbers]}


ROW_FIELDS = {"image": "image", "label": "int64", "box": "int32[2]"}


def _named(names: tuple[str, ...], ending: str) -> tuple[str, ...]:
    return tuple(name + ending for name in names)


def _numbered_subset(path: Path, numbers: range) -> Path:
    _array(path, range(numbers.start, numbers.stop + 1))
    file = path.with_suffix(".txt")
    file.write_text("".join(f"{row}\n" for row in range(len(numbers))))
    return file


KINDS = {
    "folder": Kind(_files, _folder, _of_image, "a/2 é.jpg", is_listed=True),
    "glob": Kind(_files, _glob, _of_image, "a/2 é.jpg", ({"classes": "folder"},), is_listed=True),
    "files of videos": Kind(
        _files,
        lambda root, *names: GlobSource(root=root, patterns=tuple(f"{name}/*.jpg" for name in names), media="video"),
        _of_video,
        "a/2 é.jpg",
        is_listed=True,
    ),
    "files of sounds": Kind(
        _files,
        lambda root, *names: GlobSource(root=root, patterns=tuple(f"{name}/*.jpg" for name in names), media="audio"),
        _of_video,
        "a/2 é.jpg",
        is_listed=True,
    ),
    "list": Kind(
        _list,
        lambda root, name: ListSource(path=root / f"{name}.txt"),
        _of_image,
        "a/2 é.jpg",
        takes_several=False,
        is_scanned=True,
    ),
    "webdataset": Kind(
        _shard,
        lambda root, *_names: WebDatasetSource(root=root, shards=("*.tar",)),
        _of_image,
        "a.tar: 2.jpg (byte 4608)",
        ({"label": ""},),
        is_listed=True,
    ),
    "webdataset of fields": Kind(
        _shard_of_fields,
        lambda root, *names: WebDatasetSource(
            root=root,
            shards=_named(names, ".tar"),
            fields=SHARD_FIELDS,
            names={"mask": "seg.png", "caption": "txt"},
        ),
        _of_image,
        "a.tar: 2",
        (
            {"fields": SHARD_FIELDS | {"label": "int32"}},
            {"defaults": {"label": 1}},
            {"names": {"mask": "seg.png", "caption": "txt", "label": "json:more"}, "defaults": {"label": 1}},
        ),
    ),
    "tfrecord": Kind(
        _records,
        lambda root, *names: TFRecordSource(root=root, shards=_named(names, ".rec"), fields=IMAGE_AND_LABEL),
        _of_image,
        "a.rec: record 2 (byte 179)",
        (
            {"names": {"label": "other"}},
            {"defaults": {"label": -1}},
            {"defaults": {"label": -2}},
            {"sequence": True},
            {"fields": {"image": "image", "label": "int32"}},
        ),
        index_bytes=12,
    ),
    "csv": Kind(
        _table,
        lambda root, *names: CsvSource(root=root, files=_named(names, ".csv"), fields={"x": "float32", "name": "text"}),
        _of("x"),
        "a.csv: record 3 (byte 33)",
        ({"names": {"x": "name", "name": "x"}},),
        index_bytes=8,
    ),
    "csv of images": Kind(
        _table_of_images,
        lambda root, name: CsvSource(path=root / f"{name}.csv", fields={"x": "int64"}, image="file", image_root=root),
        _of_image,
        "a.csv: record 3 (byte 33)",
        takes_several=False,
    ),
    "csv of videos": Kind(
        _table_of_videos,
        lambda root, name: CsvSource(
            path=root / f"{name}.csv",
            delimiter=" ",
            header=False,
            fields={"video": "video", "label": "int64"},
            image_root=root,
        ),
        _of_video,
        "a.csv: record 3 (byte 30)",
        takes_several=False,
        is_any=True,
    ),
    "jsonl": Kind(
        _lines,
        lambda root, *names: JsonlSource(
            root=root,
            shards=_named(names, ".jsonl"),
            fields={"x": "float32", "ids": "int16[?]", "image": "image", "other": "image"},
            names={"ids": "meta.ids", "image": "files.0", "other": "files.1"},
            defaults={"other": f"{names[0]}/0 é.jpg"},
            image_root=root,
        ),
        _of_image,
        "a.jsonl: record 3 (byte 129)",
        ({"defaults": {"other": "else.jpg"}}, {"fields": {"x": "float64"}, "names": {}, "defaults": {}}),
    ),
    "coco": Kind(
        _objects,
        lambda root, name: CocoSource(
            path=root / f"{name}.json",
            images=root / name,
            fields=("image", "boxes", "classes", "masks", "areas", "crowd", "ids", "image_id"),
        ),
        _of_image,
        "a/2 é.jpg",
        ({"class_numbers": "ids"}, {"fields": ("image", "boxes")}),
        takes_several=False,
    ),
    "pairs": Kind(
        _beside,
        _pairs,
        _of_image,
        "a/2 é.jpg",
        ({"fields": {"image": "image", "mask": "image", "text": "text", "x": "float32[?]"}},),
        takes_several=False,
        is_listed=True,
    ),
    "yolo": Kind(
        _beside,
        _yolo,
        _of_image,
        "a/2 é.jpg",
        ({"names": ("a", "b")}, {"fields": ("image",)}),
        takes_several=False,
        is_listed=True,
    ),
    "voc": Kind(
        _beside,
        _voc,
        _of_image,
        "a/2 é.jpg",
        ({"names": ("cat", "dog")}, {"fields": ("image",)}),
        takes_several=False,
        is_listed=True,
    ),
    "npy": Kind(
        _array,
        lambda root, name: NpySource(path=root / f"{name}.npy", field="x"),
        _of("x"),
        "a.npy: sample 2 (byte 152)",
        takes_several=False,
        reads_rows=True,
    ),
    "npy of several": Kind(
        _array,
        lambda root, name: NpySource(root=root, arrays={"x": f"{name}.npy", "f": f"{name}-f.npy"}),
        _of("x"),
        "a.npy: sample 2 (byte 152)",
        takes_several=False,
    ),
    "npz": Kind(
        _archive,
        lambda root, name: NpzSource(path=root / f"{name}.npz"),
        _of("y"),
        "a.npz: sample 2 (byte 279)",
        takes_several=False,
        reads_rows=True,
    ),
    "raw": Kind(
        _bytes,
        lambda root, name: RawSource(path=root / f"{name}.bin", record={"label": "uint8", "x": "uint8[2,3]"}),
        _of("label"),
        "a.bin: sample 2 (byte 14)",
        takes_several=False,
        is_any=True,
        reads_rows=True,
    ),
    "tokens": Kind(
        _tokens,
        lambda root, *names: TokensSource(root=root, files=_named(names, ".bin"), dtype="uint16", length=2),
        _of("tokens"),
        "a.bin: sample 2 (byte 8)",
        ({"overlap": 1},),
        is_any=True,
        reads_rows=True,
        index_bytes=0,
    ),
    "documents": Kind(
        _documents,
        lambda root, *names: TokensSource(
            root=root, files=_named(names, ".bin"), format="megatron", dtype="int32", field="x"
        ),
        _of("x"),
        "a.bin: document 2 (byte 16)",
        ({"length": 3}, {"length": 3, "overlap": 1}),
    ),
    "index of documents": Kind(
        lambda path, numbers: _documents(path, numbers).with_suffix(".idx"),
        lambda root, name: TokensSource(path=root / f"{name}.bin", format="megatron", dtype="int32", field="x"),
        _of("x"),
        "a.bin: document 2 (byte 16)",
        takes_several=False,
        is_scanned=True,
    ),
    "parquet": Kind(
        lambda path, numbers: write_parquet(path.with_suffix(".parquet"), _columns(path, numbers), row_group_size=2),
        lambda root, *names: ParquetSource(root=root, shards=_named(names, ".parquet"), fields=ROW_FIELDS),
        _of("label"),
        "a.parquet: row 2",
        ({"fields": IMAGE_AND_LABEL},),
    ),
    "parquet of stored values": Kind(
        lambda path, numbers: write_parquet(
            path.with_suffix(".parquet"),
            {"image": [image(n) for n in numbers], "label": list(numbers)},
            compression="none",
            row_group_size=2,
        ),
        lambda root, *names: ParquetSource(root=root, shards=_named(names, ".parquet"), fields=IMAGE_AND_LABEL),
        _of_image,
        "a.parquet: row 2",
    ),
    "arrow": Kind(
        lambda path, numbers: write_arrow(path.with_suffix(".arrow"), _columns(path, numbers), rows=2),
        lambda root, *_names: ParquetSource(root=root, shards=("*.arrow",), fields=ROW_FIELDS),
        _of("label"),
        "a.arrow: row 2",
        ({"fields": IMAGE_AND_LABEL},),
        is_listed=True,
    ),
    "lmdb": Kind(
        lambda path, numbers: write_lmdb(
            path.with_suffix(".lmdb"), {b"%d" % n: image(n) for n in numbers}, subdir=False
        ),
        lambda root, name: LmdbSource(path=root / f"{name}.lmdb", fields={"image": "image"}),
        _of_image,
        "a.lmdb: 2",
        ({"fields": {"image": "uint8[?]"}},),
        takes_several=False,
        is_mapped=True,
        is_remote=False,
    ),
    "video": Kind(
        lambda path, numbers: write_video(
            path.with_suffix(".avi"),
            len(numbers),
            Coding("mjpeg", {"strict": "-2"}, pixels="yuvj420p", b_frames=0),
            numbers[0],
        ),
        lambda root, *names: VideoSource(root=root, files=_named(names, ".avi")),
        lambda values: number_in(values["image"]),
        "a.avi: frame 2 at 0.080 s",
        ({"color": "bgr"}, {"size": (24, 32)}, {"every": 2}),
        is_remote=False,
    ),
    "lerobot": Kind(
        _robot,
        lambda root, name: LeRobotSource(root=root / name),
        lambda values: number_in(values["top"]),
        "a: episode 0, frame 2 at 0.200 s",
        ({"times": {"action": (0.0,)}}, {"normalize": {"observation.state": "min_max"}}, {"fields": ("action",)}),
        takes_several=False,
        is_remote=False,
    ),
    "concat": Kind(
        _table,
        lambda root, *names: ConcatSource(
            sources=tuple(CsvSource(path=root / f"{name}.csv", fields={"x": "int64"}) for name in names)
        ),
        _of("x"),
        "a.csv: record 3 (byte 33)",
    ),
    "subset": Kind(
        _numbered_subset,
        lambda root, name: SubsetSource(
            of=NpySource(path=root / f"{name}.npy", field="x"), indices=root / f"{name}.txt"
        ),
        _of("x"),
        "a.npy: sample 2 (byte 152)",
        takes_several=False,
        is_scanned=True,
    ),
}
"""By name."""
