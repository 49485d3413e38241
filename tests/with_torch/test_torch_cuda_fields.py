"""Fields on their way to a GPU: the number of copies, and the schema. On the stand-in for CUDA."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from batchd_client.torch import BatchdLoader  # noqa: E402
from batchd_client.torch.cuda import GAP_BYTES_MAX  # noqa: E402
from batchd_wire.fields import RAGGED  # noqa: E402
from support.device_streams import SIZES, bare, streams_over  # noqa: E402
from support.settings import folder_stream  # noqa: E402

NEVER = 1 << 30
WIDE = [240, 320, 3]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def daemon(start_shared_daemon, photos, sizes):
    """Serve ragged images, too, with far more room than any of them needs."""
    wide = folder_stream(sizes, pipeline=[{"op": "decode"}, {"op": "ragged", "max_shape": WIDE}], memory="10MiB")
    drawn = folder_stream(photos, mix={"mixup": 0.8, "cutmix": 1.0}, erase={"probability": 0.5, "fill": "noise"})
    streams = {**streams_over(photos, sizes), "wide": wide, "drawn": drawn}
    return start_shared_daemon(streams, memory="24MiB", writable_slots=True)


# --- constants ------------------------------------------------------------------------------------


def test_constants_are_on_the_device_before_a_stream_reads_them_and_as_long_as_it_does(daemon, cuda, load):
    """The side stream makes them before the first batch; the loop's stream adopts each."""
    cuda.patience = NEVER
    loader = load(daemon, normalize=(MEAN, STD))
    (constants,) = [recipe.constants for recipe in loader._recipes if recipe.constants]
    assert len(cuda.queue) == len(constants) == 2
    places = {constant.untyped_storage().data_ptr() for constant in constants}
    host = BatchdLoader("photos", address=daemon.address, normalize=(MEAN, STD), as_dict=True)
    for batch, expected in zip(loader, host, strict=True):
        assert places < cuda.adopted[-1]
        assert torch.equal(batch["image"], expected["image"])
    host.close()


def test_without_normalisation_there_are_no_constants(daemon, cuda, load):
    """No constant is made without a reader."""
    loader = load(daemon, dtype=torch.float32)
    assert not any(recipe.constants for recipe in loader._recipes)
    assert not cuda.queue


# --- numbers for images ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_read_from_the_ring", [True, False])
def test_numbers_by_which_images_are_changed_stay_on_the_host(daemon, cuda, load, is_read_from_the_ring):
    """Else the loop would wait for the device: only images and labels go there."""
    cuda.takes_any = is_read_from_the_ring
    options = {"mix": True, "erase": True, "normalize": (MEAN, STD), "fields": ["image", "label"], "epochs": 1}
    given = [{name: tensor.clone() for name, tensor in batch.items()} for batch in load(daemon, "drawn", **options)]
    host = BatchdLoader("drawn", address=daemon.address, as_dict=True, **options)
    for batch, expected in zip(given, host, strict=True):
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())
    host.close()
    assert cuda.copies["registered" if is_read_from_the_ring else "locked"] == 2 * len(given)


# --- ragged fields --------------------------------------------------------------------------------


def taken(loader, daemon, stream):
    """Return the batches of an epoch; each is the bare client's."""
    given = list(loader)
    for batch, one in zip(given, bare(daemon, stream), strict=True):
        for name, tensor in batch.items():
            assert all(np.array_equal(ours.numpy(), theirs) for ours, theirs in zip(tensor, one[name], strict=True))
    return given


def assert_without_gaps(batches):
    """Check that the images of a batch fill their device memory completely."""
    for batch in batches:
        images = batch["image"]
        assert {image.untyped_storage().data_ptr() for image in images} == {images[0].untyped_storage().data_ptr()}
        assert images[0].untyped_storage().nbytes() == sum(image.numel() for image in images)


def test_a_ragged_field_is_one_copy_where_it_leaves_little_room(daemon, cuda, load):
    """The bytes between the rows are copied, too."""
    loader = load(daemon, "ragged", images=[], epochs=1)
    batches = taken(loader, daemon, "ragged")
    assert cuda.copies == {"registered": len(batches) * len(loader.schema), "locked": 0, "blocking": 0}


def test_a_ragged_field_is_a_copy_for_each_row_where_it_leaves_much_room(daemon, cuda, load):
    """The bytes between the rows take neither time nor memory on the device."""
    needed = sum(3 * height * width for height, width in SIZES)
    assert len(SIZES) * (3 * WIDE[0] * WIDE[1] - GAP_BYTES_MAX) > needed
    loader = load(daemon, "wide", images=[], epochs=1)
    batches = taken(loader, daemon, "wide")
    assert cuda.copies == {
        "registered": len(SIZES) + len(batches) * (len(loader.schema) - 1),
        "locked": 0,
        "blocking": 0,
    }
    assert_without_gaps(batches)


@pytest.mark.parametrize("stream", ["ragged", "wide"])
def test_a_ragged_field_that_is_not_read_from_the_ring_is_one_copy_of_what_its_rows_need(daemon, cuda, load, stream):
    """The CPU packs them into page-locked memory first; the batch is released at once."""
    cuda.takes_any = False
    cuda.patience = NEVER
    loader = load(daemon, stream, images=[], epochs=1)
    batches = taken(loader, daemon, stream)
    assert (cuda.copies["registered"], cuda.copies["locked"]) == (0, len(batches) * len(loader.schema))
    assert loader.statistics().batches_held == 0
    assert_without_gaps(batches)


# --- the schema -----------------------------------------------------------------------------------


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("stream", ["photos", "padded", "ragged", "wide"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16},
        {"normalize": (MEAN, STD), "channels_last": True},
        {"normalize": (MEAN, STD), "dtype": torch.bfloat16},
        {"images": []},
    ],
    ids=["plain", "halves", "normalised", "normalised halves", "no images"],
)
def test_the_schema_says_what_tensors_come(daemon, request, stream, options, where):
    """Types are equal; fixed dimensions equal the schema's, and variable ones do not exceed it."""
    if where == "device":
        loader = request.getfixturevalue("load")(daemon, stream, **options)
    else:
        loader = BatchdLoader(stream, address=daemon.address, as_dict=True, **options)
    schema = loader.schema
    shapes = {name: set() for name in schema}
    for batch in loader:
        for name, field in batch.items():
            varying = schema[name].varying
            assert isinstance(field, list) is (varying is not None and varying.kind == RAGGED)
            shapes[name] |= {tuple(sample.shape) for sample in field}
            assert {sample.dtype for sample in field} == {schema[name].dtype}
    loader.close()
    for name, (_dtype, largest, varying) in schema.items():
        axes = () if varying is None else varying.axes
        for axis, length in enumerate(largest):
            lengths = {shape[axis] for shape in shapes[name]}
            assert max(lengths) <= length
            assert (lengths == {length}) is (axis not in axes)
