"""Files that belong together by their names: pairs, texts of YOLO and XML of Pascal VOC."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchd.data.sources.pairs.options import PairsSource, VocSource, YoloSource
from batchd.errors import SourceInvalid
from support.samples import opened, read_samples, reason, scan


def tree(root: Path, *names: str) -> None:
    """Files whose content is their path."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def pairs(root: Path, image: str, mask: str) -> PairsSource:
    return PairsSource(root=root, fields={"image": "image", "mask": "image"}, files={"image": image, "mask": mask})


def found(source: PairsSource) -> list[tuple[str, str]]:
    return [(bytes(one["image"]).decode(), bytes(one["mask"]).decode()) for one in read_samples(source)]


@pytest.mark.parametrize(
    ("image", "mask", "expected"),
    [
        (
            "leftImg8bit/train/*/*_leftImg8bit.png",
            "gtFine/train/*/*_gtFine_labelIds.png",
            [
                (f"leftImg8bit/train/{one}_leftImg8bit.png", f"gtFine/train/{one}_gtFine_labelIds.png")
                for one in ("aachen/a_1", "ulm/a_1", "ulm/a_2")
            ],
        ),
        (
            "images/**/*.{jpg,png}",
            "annotations/**/*.png",
            [("images/x.png", "annotations/x.png"), ("images/b/1.jpg", "annotations/b/1.png")],
        ),
    ],
)
def test_files_of_the_same_names_are_samples(
    tmp_path: Path, image: str, mask: str, expected: list[tuple[str, str]]
) -> None:
    """Cityscapes' two trees, and ADE20K's; samples are in the order of the first paths."""
    tree(tmp_path, *[name for pair in expected for name in pair], "gtFine/train/ulm/a_1_gtFine_color.png")

    assert found(pairs(tmp_path, image, mask)) == expected


def test_what_has_no_counterpart_is_noted(tmp_path: Path) -> None:
    """On both sides, with the first and the number."""
    tree(tmp_path, "a/1.jpg", "a/2.jpg", "a/3.jpg", "b/2.png", "b/4.png")
    source = pairs(tmp_path, "a/*.jpg", "b/*.png")

    assert found(source) == [("a/2.jpg", "b/2.png")]
    assert list(scan(source).notes) == [
        "files of mask without one of image, which are left out: b/4.png",
        "files of image without one of mask, which are left out: a/1.jpg and 1 more",
    ]


@pytest.mark.parametrize(
    ("image", "mask", "why"),
    [
        (
            "a/*.jpg",
            "b/*.png",
            "no file of image has those of mask, whose names differ in another way: a/1.jpg, b/2.png",
        ),
        ("a/*.jpg", "c/*.png", "c/*.png"),
        ("a/*.{jpg,jpeg}", "b/*.png", "a/1.jpeg and "),
    ],
)
def test_names_that_pair_nothing_are_refused(tmp_path: Path, image: str, mask: str, why: str) -> None:
    """So are two files of one name."""
    tree(tmp_path, "a/1.jpg", "a/1.jpeg", "b/2.png")
    with pytest.raises(SourceInvalid) as caught:
        scan(pairs(tmp_path, image, mask))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"image": "a/*.jpg"}, "files has no pattern for the field mask"),
        ({"image": "a/*.jpg", "mask": "b/x.png"}, r"'b/x.png' needs a \* that stands for what is the same"),
        ({"image": "a/*.jpg", "mask": "b/*/*.png"}, r"its patterns need as many \* and \*\* as each other"),
        (
            {"image": "a/?.jpg", "mask": "b/*.png"},
            r"files are paired by what \* and \*\* stand for; \? and \[\] are not",
        ),
    ],
)
def test_patterns_that_cannot_pair_are_refused(files: Mapping[str, str], why: str) -> None:
    """Before any scan."""
    with pytest.raises(ValueError, match=why):
        PairsSource(root=Path("/"), fields={"image": "image", "mask": "image"}, files=dict(files))


def test_a_counterpart_that_vanishes_is_named(tmp_path: Path) -> None:
    """The sample is called by its image."""
    tree(tmp_path, "a/1.jpg", "b/1.png")
    with opened(pairs(tmp_path, "a/*.jpg", "b/*.png")) as (reader, _index):
        (tmp_path / "b/1.png").unlink()
        assert reason(reader) == f"{tmp_path}/b/1.png: No such file or directory"
        assert reader.name(0) == f"{tmp_path}/a/1.jpg"


# --- YOLO -----------------------------------------------------------------------------------------


def yolo(root: Path, text: str | None, **options: Any) -> YoloSource:
    """A source of one image with this text."""
    tree(root, "images/train/1.jpg")
    if text is not None:
        (root / "labels/train").mkdir(parents=True, exist_ok=True)
        (root / "labels/train/1.txt").write_text(text)
    return YoloSource(root=root, images="images/train/*.jpg", **options)


def test_lines_are_objects_with_relative_boxes(tmp_path: Path) -> None:
    """A polygon becomes the box around it; blank lines are none."""
    (sample,) = read_samples(yolo(tmp_path, "3 0.5 0.25 0.5 0.125\n\n0 0.1 0.2 0.5 0.2 0.3 0.6\r\n"))

    assert sample["classes"].tolist() == [3, 0]
    assert np.allclose(sample["boxes"], [[0.5, 0.25, 0.5, 0.125], [0.3, 0.4, 0.4, 0.4]])


@pytest.mark.parametrize("text", ["", None])
def test_an_image_without_a_text_or_a_line_has_no_objects(tmp_path: Path, text: str | None) -> None:
    """Such images are the background of other loaders."""
    (sample,) = read_samples(yolo(tmp_path, text))

    assert (sample["classes"].shape, sample["boxes"].shape) == ((0,), (0, 4))


@pytest.mark.parametrize(
    ("numbers", "seen"), [("0.1 0.2 0.3 0.4", [2, 2]), ("0.1 0.2 0 0 0 0", [0, 0]), ("0.1 0.2 2 0.3 0.4 1", [2, 1])]
)
def test_keypoints_have_two_numbers_or_three(tmp_path: Path, numbers: str, seen: list[int]) -> None:
    """Without a visibility, a point at 0, 0 is not labelled, as ultralytics takes it."""
    fields = ("image", "boxes", "keypoints")
    (sample,) = read_samples(yolo(tmp_path, f"0 0.5 0.5 1 1 {numbers}\n", fields=fields, keypoints=2))

    assert sample["keypoints"][0, :, 2].tolist() == seen
    assert np.allclose(sample["keypoints"][0, 0, :2], [0.1, 0.2])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("1 0.5 0.5", "has 3 numbers, and an object a class and the four of its box"),
        ("1 0.5 0.5 0.5 x", "has something that is no number"),
        ("1 0.5 0.5 0.5 nan", "has something that is no number"),
        ("1.5 0.5 0.5 0.5 0.5", "begins with 1.5, which is no number of a class"),
        ("2 0.5 0.5 0.5 0.5", "begins with 2, which is no number of a class"),
        ("1 0.5 0.5 320 0.5", "has a coordinate outside of 0 to 1: they are fractions of the image's width and height"),
        ("1 0.5 0.5 0.5 0.5 0.5", "has 6 numbers, which are neither a box nor the corners of a polygon"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    """The sample is bad as a whole."""
    with opened(yolo(tmp_path, f"0 0.5 0.5 0.5 0.5\n{line}\n", names=("a", "b"))) as (reader, _index):
        assert reason(reader) == f"{tmp_path}/labels/train/1.txt: line 2 {why}"


# --- Pascal VOC -----------------------------------------------------------------------------------

BOX = "<bndbox><xmin>48</xmin><ymin>240.5</ymin><xmax>195</xmax><ymax>371</ymax></bndbox>"


def voc(root: Path, content: str, **options: Any) -> VocSource:
    tree(root, "JPEGImages/1.jpg")
    (root / "Annotations").mkdir(exist_ok=True)
    (root / "Annotations/1.xml").write_text(f"<annotation>{content}</annotation>")
    return VocSource(root=root, fields=("image", "boxes", "classes", "difficult", "truncated"), **options)


def test_objects_of_an_xml_are_rows(tmp_path: Path) -> None:
    """Its pixels are numbered from 1, and the last is inside; parts of objects are no objects."""
    dog = f"<object><name>dog</name><difficult>1</difficult>{BOX}<part><name>head</name>{BOX}</part></object>"
    (sample,) = read_samples(voc(tmp_path, f"{dog}<object><name> person </name><truncated>1</truncated>{BOX}</object>"))

    assert sample["boxes"].tolist() == [[47, 239.5, 195, 371]] * 2
    assert [sample[name].tolist() for name in ("classes", "difficult", "truncated")] == [[11, 14], [1, 0], [0, 1]]
    assert read_samples(voc(tmp_path, ""))[0]["boxes"].shape == (0, 4)


def test_a_list_chooses_the_images_of_a_part(tmp_path: Path) -> None:
    """The lists of one class have a second number."""
    source = voc(tmp_path, "", part="ImageSets/Main/train.txt")
    tree(tmp_path, "JPEGImages/2.jpg", "ImageSets/Main/train.txt")
    (tmp_path / "Annotations/2.xml").write_text("<annotation/>")
    (tmp_path / source.part).write_text("2  1\n")

    with opened(source) as (reader, index):
        assert [reader.name(sample) for sample in range(len(index))] == [f"{tmp_path}/JPEGImages/2.jpg"]
    (tmp_path / source.part).write_text("3\n")
    with pytest.raises(SourceInvalid, match=r"train.txt names 3, and no file of JPEGImages/\*.jpg is called so"):
        scan(source)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("<object><name>dog</name></object>", "object 1 has no bndbox of four numbers: xmin, ymin, xmax, ymax"),
        (f"<object><name>dragon</name>{BOX}</object>", "object 1 is of the class 'dragon', which names does not have"),
        ("<object>", "is no XML: mismatched tag: line 1, column 22"),
        ("<!ENTITY a 'a'>", "declares entities, or a type of document, which annotations do not need"),
        (
            f"<object><name>dog</name><difficult>yes</difficult>{BOX}</object>",
            "object 1 has difficult 'yes', and not 0 or 1",
        ),
        (
            f"<object><name>dog</name>{BOX.replace('195', '4')}</object>",
            "object 1 has a bndbox whose end is before its beginning",
        ),
    ],
)
def test_a_wrong_object_is_named(tmp_path: Path, content: str, why: str) -> None:
    """The sample is bad as a whole."""
    with opened(voc(tmp_path, content)) as (reader, _index):
        assert reason(reader) == f"{tmp_path}/Annotations/1.xml: {why}"
