"""A class has the same label wherever its name stands: without images, and in another stream."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchd.config.load import load_config
from batchd.data.sources.files.options import FolderSource, GlobSource
from batchd.errors import ConfigInvalid, SourceInvalid
from batchd_client import loader
from batchd_client.loader import ALONE, Loader, LoaderConnection
from batchd_wire.wording import classes_apart
from support.images import write_photos
from support.samples import scan

CLASSES = ("cat", "dog", "owl")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A training part of three classes, and a validation part without dogs."""
    write_photos(tmp_path / "train", {"cat": 1, "dog": 2, "owl": 1})
    write_photos(tmp_path / "val", {"cat": 1, "owl": 2})
    return tmp_path


def labels(source: FolderSource | GlobSource) -> tuple[tuple[str, ...], list[int]]:
    index = scan(source)
    return index.class_names, index.arrays["labels"].tolist()


def test_an_empty_class_folder_keeps_its_number(data: Path) -> None:
    """Otherwise the labels behind it would mean other classes; a note names it."""
    (data / "val/dog/deep").mkdir(parents=True)
    source = FolderSource(path=data / "val")

    assert labels(source) == (CLASSES, [0, 2, 2])
    assert scan(source).notes == (f"class folders without an image, which keep their numbers: {data}/val/dog",)


def test_classes_have_the_numbers_of_a_list(data: Path) -> None:
    """Also in an order of its own, and without a folder; samples keep theirs."""
    assert labels(FolderSource(path=data / "val", classes=CLASSES)) == (CLASSES, [0, 2, 2])
    order = ("owl", "emu", "cat")
    source = FolderSource(path=data / "val", classes=order)
    assert labels(source) == (order, [2, 0, 0])
    assert scan(source).notes == (f"classes without a folder, which keep their numbers: emu in {data}/val",)
    assert (
        scan(FolderSource(path=data / "train", classes=CLASSES)).digest
        == scan(FolderSource(path=data / "train")).digest
    )
    folders = ("val/owl", "val/dog", "val/cat")
    glob = GlobSource(root=data, patterns=("val/**/*.jpg",), classes=folders)
    assert labels(glob) == (folders, [2, 0, 0])


def test_a_folder_that_is_none_of_the_classes_is_refused(data: Path) -> None:
    """The advice changes no label."""
    with pytest.raises(
        SourceInvalid, match="class folder 'dog', which is none of the classes cat, owl: add it behind them"
    ):
        scan(FolderSource(path=data / "train", classes=("cat", "owl")))
    with pytest.raises(SourceInvalid, match="class folder 'val/owl'"):
        scan(GlobSource(root=data, patterns=("val/**/*.jpg",), classes=("val/cat",)))
    for classes, reason in ((("a", "b", "a"), "'a' more than once"), (("a", ""), "an empty name")):
        with pytest.raises(ValueError, match=reason):
            FolderSource(path=data, classes=classes)


def config(data: Path, *sources: str) -> Path:
    file = data / "batchd.toml"
    file.write_text(
        "".join(f"[streams.s{number}]\nbatch_size = 1\nsource = {one}\n" for number, one in enumerate(sources))
    )
    return file


@pytest.mark.parametrize(
    "train",
    [
        '{ type = "folder", path = "train" }',
        '{ type = "folder", path = "train", classes = ["cat", "dog", "owl"] }',
        '{ type = "subset", stop = "90%", of = { type = "folder", path = "train" } }',
    ],
)
def test_classes_are_those_of_another_stream(data: Path, train: str) -> None:
    """Whether that has a list, or the names of its folders, and through several streams."""
    val = '{ type = "folder", path = "val", classes = "s0" }'
    again = '{ type = "subset", stop = 1, of = { type = "folder", path = "val", classes = "s1" } }'
    streams = load_config(config(data, train, val, again), environment={}).streams

    assert labels(streams["s1"].source) == (CLASSES, [0, 2, 2])
    assert scan(streams["s2"].source).class_names == CLASSES


@pytest.mark.parametrize(
    ("named", "other", "reason"),
    [
        ("s9", '{ type = "folder", path = "train" }', "there is no stream 's9'"),
        ("s1", '{ type = "list", path = "a.txt" }', "has no source of the type folder"),
        ("s1", '{ type = "folder", path = "train", classes = "s0" }', "write them as a list"),
    ],
)
def test_a_stream_without_classes_of_folders_is_refused(data: Path, named: str, other: str, reason: str) -> None:
    """Each problem is at the key that names the stream."""
    file = config(data, f'{{ type = "folder", path = "val", classes = "{named}" }}', other)
    with pytest.raises(ConfigInvalid, match=reason) as caught:
        load_config(file, environment={})
    assert caught.value.problems[0].path == "streams.s0.source.classes"


def test_labels_that_differ_are_found() -> None:
    """Between streams with a class in common, and in either direction."""
    assert classes_apart("a", CLASSES, "b", ("cat", "owl")) == "'owl' is label 2 in a and 1 in b"
    assert classes_apart("a", ("cat",), "b", ("cat", "dog")) == "'dog' is a class of b and not of a"
    assert not classes_apart("a", CLASSES, "b", CLASSES)
    assert not classes_apart("a", CLASSES, "b", ("rose", "tulip"))


class _Loader(Loader[int]):
    def _open(self) -> object:  # type: ignore[override]
        raise NotImplementedError


def test_a_program_is_warned_of_streams_whose_labels_differ(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever adapter has them: training and validation are loaders of one program."""
    monkeypatch.setattr(loader, "_CLASSES", {})
    kept = []
    with caplog.at_level(logging.WARNING, "batchd_client"):
        for name, classes in (("train", CLASSES), ("val", ("cat", "owl")), ("other", ()), ("val", ("cat", "owl"))):
            prefetcher = SimpleNamespace(stream=SimpleNamespace(classes=classes), close=lambda: None)
            kept.append(_Loader(name, ALONE, "here"))
            LoaderConnection(kept[-1], prefetcher, None).close()  # type: ignore[arg-type]

    assert [one.getMessage() for one in caplog.records] == [
        "classes differ: 'owl' is label 1 in val and 2 in train; set classes = \"train\" of the source of val"
    ]
