"""A box that is decoded, resampled and flipped in one call has the bytes of three calls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchd.data.pipeline.execute import Pipeline
from batchd.data.pipeline.image import jpeg_box, stages
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.image.geometry import Cut
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.stages import Timings
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable
from support.images import JPEG_END, jpeg, jpeg_of, jpeg_with_exif, photo, progressive_jpeg, ycck_jpeg
from support.jpeg_boxes import SUBSAMPLINGS, extension, where_it_is_built
from support.pipelines import image_pipeline, run

pytestmark = where_it_is_built
if jpeg_box.IS_BUILT:
    from batchd.data.pipeline import _pixels

WIDE = photo(150, 200)
SIZE = (32, 40)
PIPELINES = {
    "random crops": [op.RandomResizedCrop(size=SIZE), op.RandomFlip(direction="both")],
    "large crops": [op.RandomResizedCrop(size=SIZE, scale=(0.9, 1.0))],
    "the whole image": [op.Resize(size=SIZE)],
    "the middle": [op.CenterCrop(size=SIZE)],
    "the middle, mirrored": [op.CenterCrop(size=SIZE), op.RandomFlip(probability=1.0)],
    "a padded middle": [op.CenterCrop(size=(160, 210))],
    "a crop of a smaller image": [op.Resize(shorter_side=48), op.RandomCrop(size=SIZE)],
    "nearest": [op.RandomResizedCrop(size=SIZE, interpolation="nearest")],
    "cubic": [op.RandomResizedCrop(size=SIZE, interpolation="cubic"), op.RandomFlip()],
    "rotated": [op.Resize(size=SIZE), op.Rotate(degrees=(-30, 30))],
    "quarter turns": [op.Resize(size=(32, 32)), op.Rotate(quarter_turns=(0, 1, 2, 3))],
    "grey": [op.RandomResizedCrop(size=SIZE), op.Gray()],
    "other colours": [op.RandomResizedCrop(size=SIZE), op.RandomFlip(), op.ColorJitter(brightness=0.4)],
    "floating point": [op.RandomResizedCrop(size=SIZE), op.Normalize(mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))],
}
FILES = {
    "upright": jpeg(WIDE),
    "mirrored by EXIF": jpeg_with_exif(jpeg(WIDE), 2),
    "turned by EXIF": jpeg_with_exif(jpeg(WIDE), 6),
    "progressive": progressive_jpeg(WIDE),
    "inks": ycck_jpeg(np.dstack([WIDE, WIDE[..., 0]])),
}


def decoded(data, box, eighths=8, color="rgb", **target):
    """The answer of the extension, and its memory."""
    header = probe_image(memoryview(data))
    memory = np.zeros(header.height * header.width * 3, np.uint8)
    arguments = target.values() if target else ()
    return extension.decode(
        data, memory, color, eighths, (header.height, header.width), box, None, False, *arguments
    ), memory


@given(
    subsampling=st.sampled_from(SUBSAMPLINGS),
    color=st.sampled_from(["rgb", "gray"]),
    box=st.tuples(st.integers(0, 70), st.integers(0, 90), st.integers(1, 30), st.integers(1, 40)),
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    is_area=st.booleans(),
    flips=st.tuples(st.booleans(), st.booleans()),
)
def test_a_target_gets_the_box_resampled_and_flipped(subsampling, color, box, size, is_area, flips):
    """For each kind of file, box and size, also in part of a larger array; nothing else changes."""
    image = photo(100, 130)
    data = jpeg_of(image[..., 0] if subsampling == "grey" else image, subsampling)
    channels = 1 if color == "gray" else 3
    (columns, before, *_), memory = decoded(data, box, color=color)
    rows = memory[: box[2] * columns * channels].reshape(box[2], columns, channels)
    pixels = np.ascontiguousarray(rows[:, before : before + box[3]])
    expected = np.zeros((*size, channels), np.uint8)
    if expected.shape == pixels.shape:
        expected = pixels[:: -1 if flips[0] else 1, :: -1 if flips[1] else 1]
    else:
        _pixels.scale(pixels, expected, is_area, *flips)
    around = np.full((size[0] + 2, size[1] + 2, channels), 7, np.uint8)
    target = around[1:-1, 1:-1]

    decoded(data, box, color=color, target=target, is_area=is_area, is_upside_down=flips[0], is_mirrored=flips[1])

    assert np.array_equal(target, expected)
    target[...] = 7
    assert (around == 7).all(), "bytes beside the target were written"


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
@pytest.mark.parametrize("steps", PIPELINES.values(), ids=PIPELINES)
def test_a_pipeline_makes_the_same_of_it_in_one_call_and_in_three(steps, file, monkeypatch):
    """The steps that one call cannot do are done as before."""
    one, three = (image_pipeline([op.Decode(), *steps]) for _ in range(2))
    for epoch in range(12):
        made = run(one, file, epoch)
        with monkeypatch.context() as context:
            context.setattr(stages, "plan_scaling", lambda *_: None)
            assert np.array_equal(made, run(three, file, epoch))


def test_usual_crops_take_one_call(monkeypatch):
    """Random crops, resizing and the middle need nothing that another call does."""
    monkeypatch.setattr(stages, "make_moves", None)
    for name in ("random crops", "large crops", "the whole image", "the middle", "grey", "floating point"):
        run(image_pipeline([op.Decode(), *PIPELINES[name]]), FILES["upright"])


def test_a_broken_file_says_the_same_with_a_target():
    """The reason of a bad sample does not depend on the number of calls."""
    broken = FILES["upright"][: FILES["upright"].index(b"\xff\xda") + 200] + JPEG_END
    with pytest.raises(extension.JpegError) as alone:
        decoded(broken, Cut(0, 0, 150, 200))
    with pytest.raises(SampleUndecodable, match=f"^a broken JPEG: {alone.value}$"):
        run(image_pipeline([op.Decode(), op.Resize(size=SIZE)]), broken)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (np.zeros((4, 4, 1), np.uint8), "a target of other channels"),
        (np.zeros((4, 4), np.uint8), "an image is bytes"),
        (np.zeros((4, 4, 3), np.float32), "an image is bytes"),
        (np.zeros((4, 8, 3), np.uint8)[:, ::2], "an image is bytes"),
        (np.frombuffer(bytes(48), np.uint8).reshape(4, 4, 3), "read-only"),
    ],
)
def test_a_wrong_target_is_refused(target, message):
    """No pixel is decoded before."""
    with pytest.raises((ValueError, BufferError), match=message):
        decoded(FILES["upright"], (0, 0, 8, 8), target=target)


def test_decoding_and_resampling_are_timed_apart():
    """One call ends two parts: the extension says when the first one ended."""
    timings = Timings()
    pipeline = Pipeline(
        [Column("image", "encoded")], [op.Decode(), op.RandomResizedCrop(size=SIZE)], 0, timings=timings
    )
    timings.start()
    run(pipeline, FILES["upright"])
    assert timings.names == ["decode", "random_resized_crop", "store"]
    assert all(timings.since_start_ns(part) > 0 for part in range(3))


def test_a_box_of_the_targets_size_is_only_copied():
    """Nothing is weighed where a crop has the size of the row."""
    box = Cut(8, 16, *SIZE)
    target = np.zeros((*SIZE, 3), np.uint8)
    decoded(FILES["upright"], box, target=target)
    (columns, before, *_), memory = decoded(FILES["upright"], box)
    rows = memory[: SIZE[0] * columns * 3].reshape(SIZE[0], columns, 3)
    assert np.array_equal(target, rows[:, before : before + SIZE[1]])
