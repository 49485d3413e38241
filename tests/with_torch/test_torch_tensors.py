"""How fields become tensors: dense and as the schema says, from any slot, on any device."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` installs it")

from batchd_client.stream import FieldSchema  # noqa: E402
from batchd_client.torch.tensors import ImageLayout, Recipe, cut, over  # noqa: E402

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
    """A field of four samples with its schema: the loop's tensor, cut to ``length`` samples."""
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
    """Also where samples are smaller than their room: the memory's layout is the same."""
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
    """Images without boxes, texts without words: there are such batches."""
    recipe, tensor, array = made(name, ImageLayout(), owned, length=0)
    assert tensor.numel() == 0
    assert tensor.dtype == recipe.schema.dtype
    assert sorted(tensor.shape) == sorted(array.shape)


def test_what_comes_from_the_slot_is_a_copy():
    """Of every type and shape; what came from the device may be given out as it is."""
    for name, (dtype, shape, _) in SHAPES.items():
        array = np.ones((4, *shape), dtype)
        recipe = Recipe(name, FieldSchema(np.dtype(dtype), shape, None), ImageLayout(), CPU)
        tensor = recipe.tensor(over(array), owned=False)
        array[...] = 0
        assert bool((tensor.to(torch.float64) == 1).all())
