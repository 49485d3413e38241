"""The contact sheet, checked pixel by pixel: every kind of image that a pipeline makes."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from batchd.cli.contact_sheet import (
    BACKGROUND,
    CAPTION_PIXELS,
    COLUMNS,
    IMAGES_MAX,
    MARGIN_PIXELS,
    TILE_PIXELS,
    draw,
    draw_sheet,
    image_fields,
    shortened_caption,
    write_png,
)
from batchd.cli.peeked import PeekedBatch
from batchd.errors import BatchdError
from batchd_client.batch import WholeField
from batchd_client.mixing import Mixing, mixed
from batchd_client.showing import COLORS, label_text
from batchd_wire.fields import Field, Varying

RED_IN_BGR, GREEN, BLUE_IN_BGR = (0, 0, 255), (0, 255, 0), (255, 0, 0)


def batch_of(images: np.ndarray, labels: list[int] | None = None, **options: object) -> PeekedBatch:
    arrays = {"image": images, "label": np.array(labels or range(len(images)), np.int64)}
    arrays |= {name: np.array(values) for name, values in options.items() if name != "classes"}
    return PeekedBatch(epoch=0, step=0, classes=list(options.get("classes", [])), arrays=arrays)


def filled(color: tuple[int, ...], height: int = 20, width: int = 20) -> np.ndarray:
    """One image, [height, width, channels], in one colour."""
    return np.full((height, width, len(color)), color, np.uint8)


def tile(sheet: np.ndarray, index: int, columns: int) -> np.ndarray:
    top = MARGIN_PIXELS + index // columns * (TILE_PIXELS + CAPTION_PIXELS + MARGIN_PIXELS)
    left = MARGIN_PIXELS + index % columns * (TILE_PIXELS + MARGIN_PIXELS)
    return sheet[top : top + TILE_PIXELS, left : left + TILE_PIXELS]


def caption_strip(sheet: np.ndarray) -> np.ndarray:
    """The pixels of the strip below the first image."""
    return sheet[MARGIN_PIXELS + TILE_PIXELS : MARGIN_PIXELS + TILE_PIXELS + CAPTION_PIXELS]


def caption_of(batch: PeekedBatch) -> str:
    """The caption of the first image."""
    return shortened_caption(label_text(batch.arrays, batch.classes, 0))


def middle(sheet: np.ndarray, index: int = 0, columns: int = 1) -> tuple[int, ...]:
    return tuple(map(int, tile(sheet, index, columns)[TILE_PIXELS // 2, TILE_PIXELS // 2]))


def test_rgb_images_keep_their_colours_and_their_places() -> None:
    """The rows of the sheet are in OpenCV's order of channels."""
    images = np.stack([filled((255, 0, 0)), filled((0, 255, 0)), filled((0, 0, 255))] * 3)

    sheet = draw_sheet(batch_of(images), is_bgr=False)

    assert sheet.dtype == np.uint8
    assert [middle(sheet, index, COLUMNS) for index in range(9)] == [RED_IN_BGR, GREEN, BLUE_IN_BGR] * 3
    assert tuple(tile(sheet, 9, COLUMNS)[80, 80]) == BACKGROUND


def test_bgr_images_keep_their_colours_too() -> None:
    """The decode step declares the order."""
    assert middle(draw_sheet(batch_of(filled((255, 0, 0))[None]), is_bgr=True)) == BLUE_IN_BGR


def test_channels_may_come_first() -> None:
    """The same image in the other order of axes gives the same picture."""
    image = np.random.default_rng(5).integers(0, 256, (1, 24, 40, 3), np.uint8)

    last = draw_sheet(batch_of(image), is_bgr=False)
    first = draw_sheet(batch_of(image.transpose(0, 3, 1, 2)), is_bgr=False)

    assert np.array_equal(first, last)


@pytest.mark.parametrize("shape", [(1, 12, 20, 1), (1, 1, 12, 20)], ids=["last", "first"])
def test_grey_images_are_grey(shape) -> None:
    """The single channel may be at either end of the shape."""
    assert middle(draw_sheet(batch_of(np.full(shape, 90, np.uint8)), is_bgr=False)) == (90, 90, 90)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2)], ids=["nhwc", "nchw"])
def test_floating_point_images_are_stretched(dtype, order) -> None:
    """The range is that of the whole sheet; here half is red and half is black."""
    image = np.full((1, 20, 20, 3), -2.0, dtype)
    image[0, :, :10, 0] = 2.5

    sheet = draw_sheet(batch_of(image.transpose(order)), is_bgr=False)

    drawn = tile(sheet, 0, 1)
    assert tuple(drawn[80, 20]) == RED_IN_BGR
    assert tuple(drawn[80, 140]) == (0, 0, 0)


def test_floating_point_images_of_one_value_each_are_distinguishable() -> None:
    """Numbers from 0 to 1 are drawn without a change.

    Other numbers are drawn within the range of the sheet, which may be empty.
    """

    def middles(*numbers: float) -> list[int]:
        images = np.stack([np.full((8, 8, 3), number, np.float32) for number in numbers])
        sheet = draw_sheet(batch_of(images), is_bgr=False)
        return [int(tile(sheet, index, len(numbers))[80, 80, 0]) for index in range(len(numbers))]

    assert middles(0.2, 0.6) == [51, 153]
    assert middles(-2.0, 0.5, 3.0) == [0, 128, 255]
    assert middles(7.0) == [0]
    assert middles(float("nan"), 0.5)[0] == 0


def test_proportions_are_kept() -> None:
    """Wide images have bars above and below, tall ones at the sides; tiny ones stay visible."""
    wide = tile(draw_sheet(batch_of(filled((0, 255, 0), 10, 40)[None]), is_bgr=False), 0, 1)
    high = tile(draw_sheet(batch_of(filled((0, 255, 0), 400, 100)[None]), is_bgr=False), 0, 1)
    line = tile(draw_sheet(batch_of(filled((0, 255, 0), 1, 1000)[None]), is_bgr=False), 0, 1)

    assert np.array_equal((wide == GREEN).all(axis=2).sum(axis=0), [40] * TILE_PIXELS)
    assert np.array_equal((high == GREEN).all(axis=2).sum(axis=1), [40] * TILE_PIXELS)
    assert (line == GREEN).all(axis=2).sum() == TILE_PIXELS
    assert tuple(wide[0, 0]) == tuple(high[0, 0]) == BACKGROUND


def test_more_images_than_fit_are_left_out() -> None:
    """A large batch makes a sheet of limited height, and a small batch a narrow one."""
    image = filled((1, 2, 3), 2, 2)
    large = draw_sheet(batch_of(np.stack([image] * (IMAGES_MAX + 9))), is_bgr=False)
    full = draw_sheet(batch_of(np.stack([image] * IMAGES_MAX)), is_bgr=False)
    small = draw_sheet(batch_of(np.stack([image] * 2)), is_bgr=False)

    assert large.shape == full.shape
    assert small.shape == (2 * MARGIN_PIXELS + TILE_PIXELS + CAPTION_PIXELS, 3 * MARGIN_PIXELS + 2 * TILE_PIXELS, 3)


def test_a_caption_is_drawn_under_its_image() -> None:
    """The caption is in its strip and outside the image; another label gives other pixels."""
    seven, eight = (draw_sheet(batch_of(filled((9, 9, 9))[None], [label]), is_bgr=False) for label in (7, 8))

    assert (caption_strip(seven) != BACKGROUND).any()
    assert not np.array_equal(caption_strip(seven), caption_strip(eight))
    assert np.array_equal(tile(seven, 0, 1), tile(eight, 0, 1))


@pytest.mark.parametrize(
    ("label", "options", "text"),
    [
        (1, {"classes": ["cat", "dog"]}, "1 dog"),
        (1, {}, "1"),
        (2, {"classes": ["cat", "dog"]}, "2"),
        (-1, {"classes": ["cat", "dog"]}, "-1"),
        (0, {"classes": ["käse"]}, "0 k?se"),
        (0, {"classes": ["n01440764 tench, Tinca tinca"]}, "0 n01440764 tench.."),
        (0, {"classes": ["cat"], "valid": [True]}, "0 cat"),
        (0, {"classes": ["cat"], "valid": [False]}, "bad, masked: 0 cat"),
    ],
)
def test_a_caption_shows_the_label_within_its_width(label, options, text) -> None:
    """It has number and name in the font's letters, fits the image, and marks masked samples."""
    assert caption_of(batch_of(filled((1, 1, 1))[None], [label], **options)) == text


def test_mixed_images_are_drawn_below_the_others() -> None:
    """The upper part is the sheet without a mix."""
    images = np.stack([filled((200, 100, 50)), filled((0, 20, 40))])
    numbers = {"mix_row": [1, 0], "mix_lambda": np.float32([0.25, 1.0]), "mix_box": np.zeros((2, 4), np.int32)}
    batch = batch_of(images, **numbers)
    sheet, above = draw_sheet(batch, is_bgr=False), draw_sheet(batch_of(images), is_bgr=False)
    below = sheet[len(above) :]
    assert np.array_equal(sheet[: len(above)], above)
    wanted = mixed(batch.arrays, 2, Mixing())[0]
    assert [middle(below, index, 2) for index in (0, 1)] == [tuple(image[0, 0, ::-1].tolist()) for image in wanted]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_erased_images_are_drawn_below_the_others(dtype) -> None:
    """Pixels of 8 bits get what normalised ones of ImageNet would; the rest of them stays."""
    images = np.stack([filled((200, 100, 50)), filled((10, 20, 40))]).astype(dtype)
    boxes = np.array([[[5, 5, 15, 15]], [[0, 0, 0, 0]]], np.int32)
    sheet = draw_sheet(batch_of(images, erase_box=boxes), is_bgr=False)
    above = draw_sheet(batch_of(images), is_bgr=False)
    below = sheet[len(above) :]
    assert np.array_equal(sheet[: len(above)], above)
    assert middle(below, 0, 2) == ((114, 114, 114) if dtype == np.uint8 else (0, 0, 0))
    assert middle(below, 1, 2) == middle(above, 1, 2)


def test_the_sheet_is_written_as_a_png(tmp_path) -> None:
    """The file has the drawn pixels and replaces an older sheet."""
    batch = batch_of(np.stack([filled((200, 100, 50)), filled((1, 2, 3))]))
    file = tmp_path / "sheet.out"
    file.write_bytes(b"older" * 100_000)

    write_png(draw_sheet(batch, is_bgr=False), file)

    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert np.array_equal(cv2.imread(str(file)), draw_sheet(batch, is_bgr=False))


@pytest.mark.parametrize("name", ["missing/sheet.png", ".", "file/sheet.png"])
def test_a_path_that_cannot_be_written_is_named(tmp_path, name) -> None:
    """The error has the kernel's reason."""
    (tmp_path / "file").touch()

    with pytest.raises(BatchdError, match=rf"{tmp_path / name} cannot be written: .*name another place"):
        write_png(filled((1, 1, 1)), tmp_path / name)


def varying_batch(kind: str, sizes: list[tuple[int, int]], *, channels_first: bool = False) -> PeekedBatch:
    """Green images of these sizes, in a room of 40 x 40 whose rest is red."""
    array = np.zeros((len(sizes), 40, 40, 3), np.uint8)
    for row, (height, width) in zip(array, sizes, strict=True):
        row[...] = (255, 0, 0)
        image = filled((0, 255, 0), height, width)
        if kind == "padded":
            row[:height, :width] = image
        elif channels_first:
            row.reshape(-1)[: image.size] = image.transpose(2, 0, 1).reshape(-1)
        else:
            row.reshape(-1)[: image.size] = image.reshape(-1)
    if channels_first and kind == "padded":
        array = np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    axes = (1, 2) if channels_first else (0, 1)
    array = array.reshape(len(sizes), *((3, 40, 40) if channels_first else (40, 40, 3)))
    varying = Varying("padded" if kind == "padded" else "ragged", axes)
    if kind == "of a bucket":  # of 400 pixels at most
        field = Field("image", "uint8", array.shape[1:], varying).within(400)
        array, varying = array.reshape(len(sizes), -1)[:, :1200].reshape(len(sizes), *field.shape), field.varying
    room = WholeField(array, np.array(sizes, np.int64), varying)
    arrays = {"image": array, "image_shape": np.array(sizes, np.int32), "index": np.arange(len(sizes))}
    return PeekedBatch(0, 0, [], arrays, {"image": room})


@pytest.mark.parametrize("kind", ["padded", "ragged", "of a bucket"])
@pytest.mark.parametrize("channels_first", [False, True])
def test_images_of_different_sizes_are_drawn_each_in_its_own(kind, channels_first) -> None:
    """No red pixel of the room is visible, and a masked image without pixels is an empty tile."""
    sheet = draw_sheet(varying_batch(kind, [(10, 40), (40, 1), (0, 0)], channels_first=channels_first), is_bgr=False)

    wide, high, nothing = (tile(sheet, index, 3) for index in range(3))
    assert np.array_equal((wide == GREEN).all(axis=2).sum(axis=0), [40] * TILE_PIXELS)
    assert np.array_equal((high == GREEN).all(axis=2).sum(axis=1), [4] * TILE_PIXELS)
    assert (nothing == BACKGROUND).all()
    assert not (sheet == RED_IN_BGR).all(axis=2).any()


def test_images_are_known_by_their_shape() -> None:
    """Colour or grey, channels first or last; "image" comes first, numbers and vectors never."""
    shapes = {
        "tokens": ((2, 9), np.uint8),
        "label": ((2,), np.int64),
        "vectors": ((2, 9, 64), np.float32),
        "volume": ((2, 9, 9, 9), np.uint8),
        "counts": ((2, 9, 9, 3), np.int64),
        "digit": ((2, 28, 28), np.uint8),
        "planes": ((2, 3, 9, 9), np.float16),
        "image": ((2, 9, 9, 1), np.uint8),
    }
    batch = PeekedBatch(0, 0, [], {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})

    assert image_fields(batch) == ["image", "digit", "planes"]


def test_all_views_of_a_sample_are_in_one_row(tmp_path) -> None:
    """Fields with several images are drawn with those that have one, unless one is named."""
    reds, blues = (np.stack([filled(color)] * 2) for color in ((255, 0, 0), (0, 0, 255)))
    views = np.stack([reds, blues], axis=1)
    batch = batch_of(views, local=np.stack([filled((0, 255, 0), 5, 5)] * 2))

    sheet = draw_sheet(batch, "image", "local", is_bgr=False)

    assert image_fields(batch) == ["image", "local"]
    assert [middle(sheet, place, 3) for place in range(6)] == [RED_IN_BGR, BLUE_IN_BGR, GREEN] * 2
    draw(batch, "photos", tmp_path / "all.png", None)
    assert np.array_equal(cv2.imread(str(tmp_path / "all.png")), sheet)
    draw(batch, "photos", tmp_path / "one.png", "local")
    assert np.array_equal(cv2.imread(str(tmp_path / "one.png")), draw_sheet(batch, "local", is_bgr=False))


def test_an_image_without_channels_is_grey() -> None:
    """Images of digits have this shape."""
    batch = PeekedBatch(0, 0, [], {"digit": np.full((1, 9, 9), 90, np.uint8), "index": np.array([7])})

    assert middle(draw_sheet(batch, "digit", is_bgr=False)) == (90, 90, 90)
    assert caption_of(batch) == "#7"


@pytest.mark.parametrize(
    ("label", "text"),
    [(np.array([0.25], np.float32), "0.25"), (np.zeros((1, 10), np.float32), "#3"), (np.array([True]), "True")],
)
def test_a_label_may_have_any_type_or_be_absent(label, text) -> None:
    """A number is shown directly; otherwise the caption has the sample's index in its source."""
    images = filled((1, 1, 1))[None]

    assert caption_of(PeekedBatch(0, 0, [], {"image": images, "label": label, "index": np.array([3])})) == text


OVERLAYS = (
    ("image", "masks", "masks", "xyxy", False),
    ("image", "boxes", "boxes", "xyxy", False),
    ("image", "keypoints", "keypoints", "xyxy", False),
    ("image", "points", "points", "xyxy", False),
    ("image", "label", "kinds", "xyxy", False),
)
FIRST_COLOR, SECOND_COLOR = (tuple(map(int, color[::-1])) for color in COLORS[:2])
"""In OpenCV's order of channels."""


def with_objects(overlays=OVERLAYS, **others) -> PeekedBatch:
    """A batch of one grey image, twice as large as its tile, with two objects."""
    masks = np.zeros((1, 2, 2 * TILE_PIXELS, 2 * TILE_PIXELS), np.uint8)
    masks[0, 1, :, 200:] = 1
    objects = {
        "boxes": np.array([[[40, 60, 160, 300], [0, 0, 0, 0]]], np.float32),
        "kinds": np.array([[7, 3]]),
        "masks": masks,
        "keypoints": np.array([[[[100, 200, 2], [0, 0, 0]], [[300, 20, 1], [300, 300, 0]]]], np.float32),
        "points": np.array([[[20, 310]]], np.float32),
    }
    batch = batch_of(filled((100, 100, 100), 2 * TILE_PIXELS, 2 * TILE_PIXELS)[None], **{**objects, **others})
    return replace(batch, overlays=overlays)


def pixel(sheet: np.ndarray, x: int, y: int) -> tuple[int, ...]:
    return tuple(map(int, tile(sheet, 0, 1)[y, x]))


def test_what_belongs_to_an_image_is_drawn_over_it() -> None:
    """Edges of boxes, masks mixed with the image, and dots; each object in its color."""
    sheet = draw_sheet(with_objects(), is_bgr=False)

    assert [pixel(sheet, *at) for at in ((50, 30), (50, 149), (20, 100), (79, 100))] == [FIRST_COLOR] * 4
    assert pixel(sheet, 60, 40) == pixel(sheet, 40, 60) == (100, 100, 100)
    assert pixel(sheet, 120, 60) == tuple((100 + color) // 2 for color in SECOND_COLOR)
    assert [pixel(sheet, *at) for at in ((50, 100), (150, 10), (10, 155))] == [FIRST_COLOR, SECOND_COLOR, FIRST_COLOR]
    assert pixel(sheet, 51, 100) == (255, 255, 255)
    assert pixel(sheet, 150, 150) == tuple((100 + color) // 2 for color in SECOND_COLOR), "a point that is not labelled"


def test_the_number_of_a_class_is_written_into_its_box() -> None:
    """Another class gives other pixels, and only there."""
    seven, eight = (draw_sheet(with_objects(kinds=[[number, 3]]), is_bgr=False) for number in (7, 8))

    rows, columns = np.nonzero((tile(seven, 0, 1) != tile(eight, 0, 1)).any(axis=2))
    assert 20 <= columns.min() < columns.max() < 30
    assert 30 <= rows.min() < rows.max() < 44


def test_boxes_are_drawn_in_any_form() -> None:
    """As DETR has them: middle and size, as fractions of the image."""
    overlays = [one if one[1] != "boxes" else ("image", "boxes", "boxes", "cxcywh", True) for one in OVERLAYS]
    relative = np.array([[[100, 180, 120, 240], [0, 0, 0, 0]]], np.float32) / (2 * TILE_PIXELS)

    drawn = draw_sheet(with_objects(tuple(overlays), boxes=relative), is_bgr=False)

    assert np.array_equal(drawn, draw_sheet(with_objects(), is_bgr=False))


def test_the_numbers_of_a_mask_are_colors() -> None:
    """0 and 255, the background and what a loss ignores, are not drawn."""
    mask = np.zeros((1, 2 * TILE_PIXELS, 2 * TILE_PIXELS), np.int32)
    mask[0, :, 100:200], mask[0, :, 200:] = 1 + len(COLORS) * 10_000, 255
    batch = replace(
        batch_of(filled((100, 100, 100), 320, 320)[None], ids=mask), overlays=(("image", "mask", "ids", "", False),)
    )

    sheet = draw_sheet(batch, is_bgr=False)

    assert pixel(sheet, 25, 80) == pixel(sheet, 125, 80) == (100, 100, 100)
    assert pixel(sheet, 75, 80) == tuple((100 + color) // 2 for color in SECOND_COLOR)


def test_what_belongs_to_objects_is_no_image() -> None:
    """Keypoints are three numbers each, as pixels are; a mask has a sheet of its own, too."""
    batch = with_objects(mask=np.zeros((1, 20, 20), np.uint8))

    assert image_fields(replace(batch, overlays=(*OVERLAYS, ("image", "mask", "mask", "", False)))) == ["image", "mask"]
