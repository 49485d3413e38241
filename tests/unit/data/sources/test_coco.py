"""JSON of COCO: its objects beside the images, masks as pycocotools makes them, and damage."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pycocotools import mask as coco_tools

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.sources.coco import document, outlines
from batchd.data.sources.coco.options import CocoSource
from batchd.data.sources.coco.outlines import mask_of
from batchd.errors import SourceInvalid
from support.samples import opened, read_samples, reason, scan
from support.source_files import source_problems

ALL = ("image", "boxes", "classes", "masks", "keypoints", "crowd", "areas", "ids", "image_id")
RING = [1, 1, 7, 1, 7, 6, 1, 6]


def an_object(number: int, image: int, **changed: object) -> dict[str, object]:
    plain = {"bbox": [1, 1, 6, 5], "area": 30.5, "iscrowd": 0, "segmentation": [RING], "category_id": 18}
    return {"id": number, "image_id": image, **plain, **changed}


def coco(folder: Path, objects: list[object], **options: Any) -> CocoSource:
    """A source of three images of 10 x 8 pixels, with ids 30, 20 and 10, and these objects."""
    images = [
        {"id": number, "file_name": f"{number}.jpg", "height": 8, "width": 10}
        for number in options.pop("at", (30, 20, 10))
    ]
    categories = [{"id": 90, "name": "brush"}, {"id": 18, "name": "dog"}]
    content = {"info": {}, "images": images, "annotations": objects, "categories": categories}
    return written(folder, json.dumps(content), **options)


def written(folder: Path, content: str | bytes, **options: Any) -> CocoSource:
    (folder / "images").mkdir(exist_ok=True)
    for number in (10, 20, 30):
        (folder / "images" / f"{number}.jpg").write_bytes(b"%d" % number)
    file = folder / "instances.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return CocoSource(**{"path": file, "images": folder / "images", "fields": ALL, "keypoints": 2, **options})


def bad(folder: Path, **changed: object) -> str:
    """Return why an image is a bad sample whose second object has other values."""
    with opened(coco(folder, [an_object(7, 20), an_object(8, 20, **changed)])) as (reader, _index):
        return reason(reader, 1)


def refused(source: CocoSource) -> str:
    with pytest.raises(SourceInvalid) as caught:
        scan(source)
    return str(caught.value).replace(str(source.path), "JSON")


def test_an_image_has_its_objects_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Images are in the order of the file, too; one without objects stays, with empty fields."""
    objects = [an_object(4, 10), an_object(2, 30), an_object(3, 10, category_id=90, bbox=[0.5, 2, 1.25, 3])]
    first, second, third = read_samples(coco(tmp_path, [*objects, an_object(9, 10, iscrowd=1)]))

    assert [bytes(one["image"]) for one in (first, second, third)] == [b"30", b"20", b"10"]
    assert [int(one["image_id"]) for one in (first, second, third)] == [30, 20, 10]
    assert third["boxes"].tolist() == [[1, 1, 7, 6], [0.5, 2, 1.75, 5]]
    assert third["classes"].tolist() == [0, 1]
    assert third["ids"].tolist() == [4, 3]
    assert third["areas"].tolist() == [30.5, 30.5]
    assert third["masks"].shape == (2, 8, 10)
    assert {name: second[name].shape for name in ALL[1:-1]} == {
        "boxes": (0, 4),
        "classes": (0,),
        "masks": (0, 8, 10),
        "keypoints": (0, 2, 3),
        "crowd": (0,),
        "areas": (0,),
        "ids": (0,),
    }


def test_what_an_option_leaves_out_or_keeps(tmp_path: Path) -> None:
    """Crowds, images without objects, and the numbers of classes."""
    objects = [an_object(4, 10, iscrowd=1), an_object(5, 20), an_object(6, 10)]
    crowds = read_samples(coco(tmp_path, objects, crowds=True, class_numbers="ids"))
    (filled,) = read_samples(coco(tmp_path, objects[1:2], empty=False))

    assert crowds[2]["crowd"].tolist() == [1, 0]
    assert crowds[2]["classes"].tolist() == [18, 18]
    assert bytes(filled["image"]) == b"20"
    assert scan(coco(tmp_path, objects)).class_names == ("dog", "brush")
    assert scan(coco(tmp_path, objects, class_numbers="ids")).class_names[18] == "dog"


def test_keypoints_are_rows_of_x_y_and_visibility(tmp_path: Path) -> None:
    """An object without them has zeros."""
    with_points = an_object(4, 10, keypoints=[1, 2, 2, 3, 4.5, 0])
    keypoints = read_samples(coco(tmp_path, [with_points, an_object(5, 10)]))[2]["keypoints"]

    assert keypoints.tolist() == [[[1, 2, 2], [3, 4.5, 0]], [[0, 0, 0], [0, 0, 0]]]


def test_captions_are_texts_of_an_image(tmp_path: Path) -> None:
    """For a step pick; the JSON of captions has no boxes."""
    objects = [{"id": n, "image_id": 10, "caption": f"caption {n} ä"} for n in range(2)]
    source = coco(tmp_path, [*objects, {"id": 3, "image_id": 20}], fields=("image", "captions"))

    with opened(source) as (reader, _index):
        assert [reader.read(sample)["captions"] for sample in (0, 2)] == [[], ["caption 0 ä", "caption 1 ä"]]
        assert reason(reader, 1) == "captions[0] is null, not a text"


def test_segments_of_a_panoptic_annotation_are_its_objects(tmp_path: Path) -> None:
    """The PNG is a field of its own, whose colours are the ids."""
    (tmp_path / "panoptic").mkdir()
    (tmp_path / "panoptic" / "20.png").write_bytes(b"png")
    segments = [{"id": 70_000, "category_id": 90, "bbox": [0, 0, 2, 3], "area": 5, "iscrowd": 0}]
    annotation = {"image_id": 20, "file_name": "20.png", "segments_info": segments}
    fields = ("image", "segments", "ids", "classes", "boxes")
    source = coco(tmp_path, [annotation], fields=fields, segments=tmp_path / "panoptic", empty=False)
    (sample,) = read_samples(source)

    assert bytes(sample["segments"]) == b"png"
    assert (sample["ids"].tolist(), sample["classes"].tolist()) == ([70_000], [1])
    with opened(coco(tmp_path, [annotation], fields=fields, segments=tmp_path / "panoptic")) as (reader, _index):
        assert reason(reader, 0) == "has 0 panoptic annotations, and not one"


# --- masks ----------------------------------------------------------------------------------------


def of_pycocotools(polygons: list[list[float]], height: int, width: int) -> tuple[str, NDArray[np.uint8]]:
    """Run lengths as text, and the mask."""
    runs = coco_tools.merge(coco_tools.frPyObjects([[*map(float, one)] for one in polygons], height, width))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, at its conversion
        return runs["counts"].decode(), coco_tools.decode(runs)


coordinates = st.one_of(st.floats(-20, 80), st.integers(-5, 64), st.sampled_from([0.5, 0.1, 63.99, 0.0]))


@pytest.fixture(params=["extension", "numpy"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the extension for pixels, and as without a compiler."""
    if request.param == "numpy":
        monkeypatch.setattr(outlines, "IS_BUILT", False)


WAYS = pytest.mark.usefixtures("either")
CHECKED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@WAYS
@CHECKED
@given(
    polygons=st.lists(
        st.lists(coordinates, min_size=6, max_size=40).map(lambda xy: xy[: len(xy) // 2 * 2]), min_size=1, max_size=3
    ),
    height=st.integers(1, 60),
    width=st.integers(1, 60),
)
def test_the_mask_of_polygons_is_that_of_pycocotools(polygons: list[list[float]], height: int, width: int) -> None:
    """Bit by bit, also where a polygon leaves the image, or crosses itself."""
    mask = np.zeros((height, width), np.uint8)
    mask_of(polygons, mask)

    assert np.array_equal(mask, of_pycocotools(polygons, height, width)[1])


@pytest.mark.thorough
@WAYS
def test_a_thousand_objects_have_the_masks_of_pycocotools() -> None:
    """Shapes and sizes as in real data, with coordinates of two decimals, and both run lengths."""
    random = np.random.default_rng(0)
    for number in range(1000):
        height, width, corners = *random.integers(64, 512, 2).tolist(), int(random.integers(3, 80))
        angles, radii = np.sort(random.uniform(0, 2 * np.pi, corners)), random.uniform(2, 150, corners)
        x, y = random.uniform(0, width) + radii * np.cos(angles), random.uniform(0, height) + radii * np.sin(angles)
        polygon = np.stack([x.clip(0, width), y.clip(0, height)], 1).round(2).reshape(-1).tolist()
        text, expected = of_pycocotools([polygon], height, width)
        outline: Any = [polygon]
        if number % 3:
            outline = {"size": [height, width], "counts": text}
        if number % 3 == 2:
            flat = np.concatenate([[0], expected.reshape(-1, order="F")])
            ends = np.append(np.flatnonzero(np.diff(flat)), height * width)
            outline["counts"] = np.diff(ends, prepend=0).tolist()
        mask = np.zeros((height, width), np.uint8)
        mask_of(outline, mask)
        assert np.array_equal(mask, expected), f"object {number}"


@WAYS
@CHECKED
@given(counts=st.text(max_size=12) | st.lists(st.integers(-5, 100) | st.floats(), max_size=6))
def test_any_run_lengths_are_a_mask_or_refused(counts: object) -> None:
    """What a text or a list may hold ends in no other error."""
    mask = np.zeros((6, 7), np.uint8)
    try:
        mask_of({"size": [6, 7], "counts": counts}, mask)
    except SampleUnreadable:
        return
    assert mask.max(initial=0) <= 1


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"bbox": [1, 2, 3]}, "its bbox is no list of left, top, width and height"),
        ({"bbox": [1, 2, float("nan"), 4]}, "its bbox has a number that is not finite"),
        ({"bbox": [1, 2, -3, 4]}, "its bbox has a negative width or height"),
        ({"bbox": None}, "its bbox is no list of left, top, width and height"),
        ({"category_id": 5}, "its category_id is 5, which is the id of no category"),
        ({"category_id": [5]}, "its category_id is [5], which is the id of no category"),
        ({"area": "x"}, "its area is 'x', and no number"),
        ({"segmentation": None}, "its segmentation is neither a list of polygons nor run lengths"),
        (
            {"segmentation": [[1, 2, 3]]},
            "its segmentation has a polygon that is no list of three corners or more, x and y of each",
        ),
        (
            {"segmentation": [[1, 2, 3, 4, 5, float("inf")]]},
            "its segmentation has a coordinate that is no finite number",
        ),
        (
            {"segmentation": {"size": [9, 10], "counts": [90]}},
            "its segmentation has run lengths of the size [9, 10], and the image [8, 10]",
        ),
        (
            {"segmentation": {"size": [8, 10], "counts": [79]}},
            "its segmentation has run lengths that do not fill 8 x 10 pixels",
        ),
        ({"keypoints": [1, 2]}, "its keypoints are not x, y and visibility of 2 points"),
    ],
)
def test_a_wrong_object_makes_a_bad_sample_with_its_id(tmp_path: Path, changed: Mapping[str, object], why: str) -> None:
    """Another image is as good as before."""
    assert bad(tmp_path, **changed) == f"annotation 8: {why}"


def test_objects_of_images_that_are_not_there_are_noted(tmp_path: Path) -> None:
    """They belong to no sample."""
    index = scan(coco(tmp_path, [an_object(1, 99), an_object(2, 20), an_object(3, 98)]))

    (note,) = index.notes
    assert note.startswith(
        "annotations of images that it does not have, which are left out: annotation 1 of image 99 in "
    )
    assert note.endswith("instances.json and 1 more")


def test_two_objects_of_an_image_with_one_id_make_a_bad_sample(tmp_path: Path) -> None:
    """Files that were joined have objects twice; those of other images are good."""
    with opened(coco(tmp_path, [an_object(4, 10), an_object(2, 20), an_object(4, 10)])) as (reader, index):
        by_image = dict(zip(index.arrays["image_ids"].tolist(), range(len(index)), strict=True))
        assert reason(reader, by_image[10]) == "annotation 4 is in the JSON more than once"
        assert len(reader.read(by_image[20])["boxes"]) == 1


def test_objects_of_two_images_with_one_id_make_bad_samples(tmp_path: Path) -> None:
    """Tools do not agree which one the id means; other objects, and those without one, are good."""
    without = [{key: value for key, value in an_object(0, image).items() if key != "id"} for image in (20, 30)]
    objects = [an_object(4, 10), an_object(4, 10), *without, an_object(5, 20), an_object(5, 20), an_object(4, 20)]
    named = tuple(name for name in ALL if name != "ids")
    with opened(coco(tmp_path, objects, at=(10, 20, 30), fields=named)) as (reader, index):
        assert (
            "images with the id of an annotation of another one, which are bad samples: image 10 in" in index.notes[0]
        )
        assert [reason(reader, sample) for sample in (0, 1)] == [
            "annotation 4 is in the JSON more than once, of another image, too"
        ] * 2
        assert len(reader.read(2)["boxes"]) == 1
    images = coco(tmp_path, objects, at=(10, 20, 30), fields=("image", "image_id"))
    with opened(images) as (reader, index):
        assert [int(reader.read(sample)["image_id"]) for sample in range(3)] == [10, 20, 30]


def test_two_images_of_one_id_are_bad_samples(tmp_path: Path) -> None:
    """Nobody knows whose the objects are; others are good."""
    with opened(coco(tmp_path, [an_object(2, 20)], at=(20, 10, 20))) as (reader, index):
        assert "images with the id of another one, which are bad samples: image 20 in " in index.notes[0]
        assert [reason(reader, sample) for sample in (0, 2)] == [
            "has the id 20, as another image, so its objects are not known"
        ] * 2
        assert int(reader.read(1)["image_id"]) == 10


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "JSON is a list, as of results, and not an object with images and annotations"),
        ("id,x", "JSON begins with b'id,x', and JSON of COCO with {"),
        ("{}", 'JSON names no images: it has no "images", or none in them'),
        ('{"images": [{}]}', """JSON: of "images" the object at byte 12: "file_name" is None, and no name of a file"""),
        ('{"images": [7]}', 'JSON: of "images" the object at byte 12: is no object'),
        (
            '{"images": [{"id": 1.5, "file_name": "a"}]}',
            'JSON: of "images" the object at byte 12: "id" is 1.5, and no whole number',
        ),
        ('{"images": [] "x": 1}', "JSON: ',' is missing (byte 14)"),
        ('{"images": [', "JSON: no JSON: Expecting value (byte 12)"),
        ('{"images": []} {}', "JSON: something stands behind its end (byte 15)"),
        ('{"x": ' + "[" * 100_000, "JSON: no JSON: nested too deeply (byte 7)"),
        (b'{"x": "\xff"}', None),
        (
            b"\x1f\x8b\x08rest of a gzip",
            "JSON is compressed (gzip), so its objects cannot be read one by one; unpack it: ",
        ),
    ],
)
def test_what_is_no_json_of_coco_is_refused(tmp_path: Path, content: str | bytes, why: str | None) -> None:
    """The message names the file and the byte."""
    text = refused(written(tmp_path, content))

    assert text.startswith(why) if why else text.startswith("JSON: no JSON: ")


@pytest.mark.parametrize("window", [1, 7, 64])
def test_an_object_may_cross_any_window(tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places and texts are those of the file, also of characters of several bytes."""
    source = coco(tmp_path, [an_object(4, 10), an_object(5, 20)])
    whole = json.loads(source.path.read_text())
    whole["images"][0]["file_name"] = "ä é 日.jpg"
    source.path.write_text(json.dumps(whole, ensure_ascii=False, indent=window % 3))
    expected = scan(source)
    monkeypatch.setattr(document, "WINDOW_BYTES", window)
    index = scan(source)

    assert index.digest == expected.digest
    assert index.arrays["names"].tobytes().startswith("ä é 日.jpg".encode())


def test_options_that_make_no_sense_are_named(tmp_path: Path) -> None:
    """A misspelt field, and PNGs without their field."""
    with pytest.raises(ValueError, match=r"a sample has no 'box', but image, boxes.*; did you mean boxes"):
        CocoSource(path=tmp_path, images=tmp_path, fields=("image", "box"))
    with pytest.raises(ValueError, match='segments = "FOLDER" and the field "segments" belong together'):
        CocoSource(path=tmp_path, images=tmp_path, segments=tmp_path)
    (first, second) = source_problems(CocoSource(path=tmp_path / "a.json", images=tmp_path / "none"))
    assert "a.json" in first
    assert "none" in second
