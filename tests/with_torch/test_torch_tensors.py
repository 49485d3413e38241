"""How fields become tensors: dense and as the schema says, from any slot, on any device."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

import batchd_client  # noqa: E402
from batchd_client.errors import BatchReleased  # noqa: E402
from batchd_client.stream import FieldSchema  # noqa: E402
from batchd_client.torch.tensors import ImageLayout, Recipe, cut, over  # noqa: E402
from batchd_wire.fields import Field, Varying  # noqa: E402
from batchd_wire.views import slot_arrays  # noqa: E402
from support.fake_daemon import FakeDaemon  # noqa: E402
from support.fake_stream import FakeStream  # noqa: E402

CPU = torch.device("cpu")
SHAPES = {
    "label": ("int64", (), None),
    "tokens": ("int64", (16,), 9),
    "boxes": ("float32", (8, 4), 3),
    "mask": ("uint8", (12, 10), 7),
    "image": ("uint8", (12, 10, 3), 7),
    "grey image": ("uint8", (13, 7, 1), 5),
    "image with alpha": ("uint8", (11, 9, 4), 6),
    "image of halves": ("float16", (12, 10, 3), 7),
    "clip": ("uint8", (5, 12, 10, 3), 2),
    "small numbers": ("uint16", (6,), 4),
}
LOOKS = {
    "plain": ImageLayout(),
    "channels last": ImageLayout(channels_last=True),
    "float32": ImageLayout(dtype=torch.float32),
    "normalised": ImageLayout(normalize=((0.5,) * 3, (0.2,) * 3)),
    "normalised, channels last, halves": ImageLayout(
        normalize=((0.5,) * 3, (0.2,) * 3), channels_last=True, dtype=torch.float16
    ),
}


def made(name, look, owned, *, length=None):
    """Make four samples of a field; return recipe, the loop's tensor and the array, both cut."""
    dtype, shape, _ = SHAPES[name]
    if name == "clip":
        look = look._replace(images=["clip"])
    if dtype != "uint8":
        look = look._replace(normalize=None)
    elif look.normalize is not None:
        look = look._replace(normalize=tuple(numbers[:1] * shape[-1] for numbers in look.normalize))
    recipe = Recipe(name, FieldSchema(np.dtype(dtype), shape, None), look, CPU)
    array = np.random.default_rng(7).integers(0, 100, (4, *shape)).astype(dtype)
    array.flags.writeable = False
    raw = over(array).clone() if owned else over(array)
    if length is not None:
        raw, array = cut(raw, {1: length}), array[:, :length]
    return recipe, recipe.tensor(raw, owned=owned), array


@pytest.mark.parametrize("owned", [False, True], ids=["from the slot", "from the device"])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_dense_and_as_the_schema_says(name, look, owned):
    """Samples smaller than their room are no exception: the memory has the same layout."""
    for length in (None, SHAPES[name][2]):
        recipe, tensor, array = made(name, LOOKS[look], owned, length=length)
        assert tensor.dtype == recipe.schema.dtype
        assert tensor.ndim == len(recipe.schema.shape) + 1
        if length is None:
            assert tuple(tensor.shape[1:]) == recipe.schema.shape
        laid_out = tensor.movedim(-3, -1) if recipe.is_image and LOOKS[look].channels_last else tensor
        assert laid_out.is_contiguous()
        if "normalised" not in look or array.dtype != np.uint8 or not recipe.is_image:
            expected = np.moveaxis(array, -1, -3) if recipe.is_image else array
            assert np.array_equal(tensor.to(torch.float64).numpy(), expected.astype(np.float64))


@pytest.mark.parametrize("owned", [False, True], ids=["from the slot", "from the device"])
@pytest.mark.parametrize("name", [name for name, (_dtype, _shape, length) in SHAPES.items() if length])
def test_a_batch_whose_samples_are_all_empty_is_one_of_no_elements(name, owned):
    """Images without boxes and texts without words give such batches."""
    recipe, tensor, array = made(name, ImageLayout(), owned, length=0)
    assert tensor.numel() == 0
    assert tensor.dtype == recipe.schema.dtype
    assert sorted(tensor.shape) == sorted(array.shape)


def test_what_comes_from_the_slot_is_a_copy():
    """Every type and shape is copied; a tensor from the device may be given out unchanged."""
    for name, (dtype, shape, _) in SHAPES.items():
        array = np.ones((4, *shape), dtype)
        recipe = Recipe(name, FieldSchema(np.dtype(dtype), shape, None), ImageLayout(), CPU)
        tensor = recipe.tensor(over(array), owned=False)
        array[...] = 0
        assert bool((tensor.to(torch.float64) == 1).all())


@pytest.fixture
def stream(tmp_path):
    """Return a stream of images and labels from a fake daemon."""
    with FakeDaemon(tmp_path / "run", FakeStream()) as fake, batchd_client.connect(fake.address) as daemon:
        yield daemon.stream("photos")


def test_tensors_of_a_batch_are_views_that_keep_it_alive(stream):
    """Arrays of a batch do so, too; after the last of them the memory is released."""
    batch = next(iter(stream))
    tensors = batch.to_torch()

    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "image": (torch.uint8, (4, 2, 2, 3)),
        "label": (torch.int64, (4,)),
    }
    assert tensors["image"].data_ptr() == batch["image"].ctypes.data
    assert tensors["label"].tolist() == batch["label"].tolist()
    del batch
    gc.collect()
    assert stream.statistics().batches_held == 1
    del tensors
    gc.collect()
    assert stream.statistics().batches_held == 0


def test_copied_tensors_outlive_their_batch(stream):
    """The copies are writable, and a released batch gives none."""
    with next(iter(stream)) as batch:
        tensors = batch.to_torch(copy=True)
        labels = batch["label"].tolist()

    assert tensors["image"].add_(1).shape == (4, 2, 2, 3)
    assert tensors["label"].tolist() == labels
    assert stream.statistics().batches_held == 0
    with pytest.raises(BatchReleased):
        batch.to_torch()


@pytest.mark.parametrize("copy", [False, True])
def test_samples_of_different_shapes_are_tensors_of_their_own(tmp_path, copy):
    """A ragged field gives a list; a padded one is cut to its largest sample."""
    fields = (
        Field("image", "uint8", (4, 5, 3), Varying("ragged", (0, 1))),
        Field("image_shape", "int32", (2,)),
        Field("label", "int64", (6,), Varying("padded", (0,))),
        Field("label_length", "int32", ()),
    )
    fake_stream = FakeStream(fields=fields, rows=2)
    fake_stream.page = _page_of_sizes(fake_stream)
    with FakeDaemon(tmp_path / "run", fake_stream) as fake, batchd_client.connect(fake.address) as daemon:
        tensors = next(iter(daemon.stream("photos"))).to_torch(copy=copy)

        assert [tuple(image.shape) for image in tensors["image"]] == [(2, 3, 3), (4, 1, 3)]
        assert all((image == 7).all() for image in tensors["image"])
        assert tensors["label"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


def _page_of_sizes(stream):
    """Make slots with two images, and labels of one and four numbers."""

    def page(_epoch, _step):
        content = bytearray(stream.layout.slot_bytes)
        arrays = slot_arrays(content, stream.layout)
        arrays["image"][:] = 7
        arrays["image_shape"][:] = [[2, 3], [4, 1]]
        arrays["label"][:] = np.arange(12).reshape(2, 6)
        arrays["label_length"][:] = [1, 4]
        return content

    return page
