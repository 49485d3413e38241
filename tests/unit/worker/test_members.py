"""Values of a sample as members of a shard: every kind of column, as a source reads it again."""

import io
import json
from functools import partial

import cv2
import numpy as np
import pytest

from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.options import Decode
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.sources.webdataset.options import is_label
from batchd.worker import members as members_module
from batchd.worker.members import MemberEncoder, is_image, main_image
from support.images import JPEG_END, encode, jpeg, photo, progressive_jpeg

PIXELS = Column("image", dtype="uint8", shape=(None, None, 3))


def members(columns, values, image_format="jpg", quality=90, *, is_bgr=False):
    encoder = MemberEncoder({column.name: column for column in columns}, image_format, quality, is_bgr=is_bgr)
    return dict(encoder.members(values))


def decoded(data):
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


@pytest.mark.parametrize("is_bgr", [False, True])
def test_pixels_come_back_as_they_were(is_bgr):
    """PNG, and WebP with quality 100, lose nothing, in either order of the channels."""
    pixels = photo(20, 31)
    for image_format, quality in (("png", 90), ("webp", 100)):
        (data,) = members([PIXELS], {"image": pixels}, image_format, quality, is_bgr=is_bgr).values()

        expected = pixels if is_bgr else pixels[:, :, ::-1]
        assert np.array_equal(decoded(data), expected)


@pytest.mark.parametrize("with_simplejpeg", [True, False])
@pytest.mark.parametrize("is_bgr", [False, True])
def test_a_jpeg_is_near_to_its_pixels(is_bgr, with_simplejpeg, monkeypatch):
    """More quality brings it nearer; both encoders know which channel is red."""
    if not with_simplejpeg:
        monkeypatch.setattr(members_module, "simplejpeg", None)
    pixels = photo(64, 96)
    sizes, errors = [], []
    for quality in (50, 95):
        (data,) = members([PIXELS], {"image": pixels}, "jpg", quality, is_bgr=is_bgr).values()
        back = decoded(data) if is_bgr else decoded(data)[:, :, ::-1]
        sizes.append(len(data))
        errors.append(np.abs(back.astype(int) - pixels).mean())

    assert errors[1] < errors[0] < 12
    assert sizes[0] < sizes[1]


def test_grey_stays_grey():
    """Every format keeps one channel."""
    gray = photo(16, 16)[:, :, :1]
    for image_format in ("jpg", "png"):
        (data,) = members([Column("image", dtype="uint8", shape=(16, 16, 1))], {"image": gray}, image_format).values()
        assert decoded(data).ndim == 2


def test_pixels_need_not_be_contiguous():
    """A crop is a view of a larger array."""
    pixels = photo(40, 40)[3:20, 5:30]

    (data,) = members([PIXELS], {"image": pixels}, "png").values()

    assert np.array_equal(decoded(data)[:, :, ::-1], pixels)


@pytest.mark.parametrize(("data", "ending"), [(jpeg(photo()), "jpg"), (encode(photo(), ".png"), "png")])
def test_a_file_that_is_not_decoded_stays_as_it_was(data, ending):
    """The file keeps its bytes and gets the ending of its format."""
    found = members([Column("image", "encoded")], {"image": memoryview(data)})

    assert found == {ending: data}


@pytest.mark.skipif(not jpeg_box.IS_BUILT, reason="the extension is not built")
def test_a_progressive_file_becomes_a_sequential_one():
    """It has the same pixels, and access points behind it; a broken one stays as it was."""
    data = progressive_jpeg(photo(200, 150))
    hole = data[: data.rindex(b"\xff\xda") + 20] + JPEG_END

    found = members([Column("image", "encoded")], {"image": memoryview(data)})

    assert list(found) == ["jpg", "jpg.points"]
    assert b"\xff\xc0" in found["jpg"]
    assert np.array_equal(decoded(found["jpg"]), decoded(data))
    assert members([Column("image", "encoded")], {"image": memoryview(hole)}) == {"jpg": hole}


@pytest.mark.skipif(not jpeg_box.IS_BUILT, reason="the extension is not built")
def test_a_file_of_too_many_pixels_stays_as_it_was(monkeypatch):
    """To rewrite it would take the memory of all its coefficients."""
    monkeypatch.setattr(members_module, "Decode", partial(Decode, max_pixels=10_000))
    data = progressive_jpeg(photo(200, 150))

    assert members([Column("image", "encoded")], {"image": memoryview(data)}) == {"jpg": data}


def test_every_kind_of_value_has_its_member():
    """The label is a member as sources read it, and other numbers share one member.

    Arrays, texts and further images are members under their names.
    """
    columns = [
        PIXELS,
        Column("mask", dtype="uint8", shape=(4, 4, 1)),
        Column("label", dtype="int64"),
        Column("score", dtype="float32"),
        Column("good", dtype="bool"),
        Column("boxes", dtype="float32", shape=(None, 4)),
        Column("planes", dtype="uint8", shape=(3, 4, 4), channels_first=True),
        Column("caption", "text"),
    ]
    values = {
        "image": photo(4, 4),
        "mask": photo(4, 4)[:, :, :1],
        "label": np.int64(-3),
        "score": 0.5,
        "good": True,
        "boxes": np.ones((2, 4), np.float32),
        "planes": np.zeros((3, 4, 4), np.uint8),
        "caption": "grüß",
    }

    found = members(columns, values, "png")

    assert set(found) == {"png", "mask.png", "cls", "json", "boxes.npy", "planes.npy", "caption.txt"}
    assert found["cls"] == b"-3"
    assert json.loads(found["json"]) == {"score": 0.5, "good": True}
    assert found["caption.txt"].decode() == "grüß"
    boxes = np.lib.format.read_array(io.BytesIO(found["boxes.npy"]), allow_pickle=False)
    assert np.array_equal(boxes, values["boxes"])


def test_what_is_an_image():
    """Pixels need one or three channels, in the last dimension."""
    assert is_image(PIXELS)
    assert is_image(Column("x", "encoded"))
    assert not is_image(Column("x", dtype="uint8", shape=(2, 2, 4)))
    assert not is_image(Column("x", dtype="float32", shape=(2, 2, 3)))
    assert not is_image(Column("x", dtype="uint8", shape=(3, 2, 2), channels_first=True))
    assert not is_image(Column("x", "text"))


@pytest.mark.parametrize("image_format", ["jpg", "png", "webp"])
def test_pixels_that_no_format_takes_are_a_bad_sample(image_format):
    """An image of height 0 cannot be encoded."""
    with pytest.raises(SampleUndecodable):
        members([PIXELS], {"image": np.empty((0, 5, 3), np.uint8)}, image_format)


def test_the_image_called_image_is_the_sample_s_image():
    """Its place among the others does not matter; without that name, the first image counts."""
    mask, image = Column("mask", dtype="uint8", shape=(4, 4, 1)), PIXELS
    values = {"mask": photo(4, 4)[:, :, :1], "image": photo(4, 4)}

    assert set(members([mask, image], values, "png")) == {"mask.png", "png"}
    assert members([mask, image], values, "png")["png"] == members([image], values, "png")["png"]
    assert main_image({"mask": mask}) == "mask"
    assert main_image({}) == ""


@pytest.mark.parametrize(
    ("column", "is_one"),
    [
        (Column("label", dtype="int64"), True),
        (Column("label", dtype="uint8"), True),
        (Column("label", dtype="float32", shape=(10,)), False),
        (Column("label", dtype="float32"), False),
        (Column("label", dtype="bool"), False),
        (Column("label", "text"), False),
        (Column("other", dtype="int64"), False),
    ],
)
def test_a_label_is_one_whole_number(column, is_one):
    """The source can read such a label again; other values are kept in another form."""
    assert is_label(column) is is_one
