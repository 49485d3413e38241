"""The script of ``batchd bench`` for other interpreters, and its steps with each library."""

import ast
import inspect
import sys

import numpy as np
import pytest

from batchd.commands.bench import beside, dataloader
from batchd.commands.bench.beside import OLDEST, plain_steps
from batchd.commands.bench.dataloader import changes_of
from batchd.data.pipeline.image import options as op
from batchd.data.pipeline.text.options import Lowercase, TextBytes
from support.images import jpeg, photo

STEPS: list[tuple[list[op.ImageStep], tuple[int, ...], str]] = [
    ([op.Resize(size=(6, 8))], (6, 8, 3), "uint8"),
    ([op.Resize(shorter_side=24), op.CenterCrop(size=(20, 20))], (20, 20, 3), "uint8"),
    ([op.RandomCrop(size=(40, 70), padding=2)], (40, 70, 3), "uint8"),
    ([op.CenterCrop(size=(90, 200))], (90, 200, 3), "uint8"),
    ([op.RandomResizedCrop(size=(16, 16)), op.RandomFlip(direction="both"), op.Gray(channels=1)], (16, 16, 1), "uint8"),
    ([op.Resize(size=(8, 8)), op.Gray()], (8, 8, 3), "uint8"),
    ([op.Resize(size=(8, 8)), op.Normalize(), op.Layout()], (3, 8, 8), "float32"),
    ([op.Resize(size=(8, 8)), op.To()], (3, 8, 8), "float32"),
]
LIBRARIES = {"OpenCV": "cv2", "PIL": "PIL", "torchvision": "torchvision.transforms"}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("steps", "shape", "dtype"), STEPS, ids=[str(number) for number in range(len(STEPS))])
def test_each_library_makes_arrays_of_the_same_shape(
    steps: list[op.ImageStep], shape: tuple[int, ...], dtype: str, library: str
) -> None:
    """The library decides whether the channels come last or first."""
    pytest.importorskip(LIBRARIES[library], exc_type=(ImportError, RuntimeError))
    made = np.asarray(changes_of(plain_steps([op.Decode(), *steps]), library)(jpeg(photo(48, 64))))

    # PIL's grey images have no channels
    assert sorted(np.squeeze(made).shape) == sorted(side for side in shape if side > 1)
    assert made.dtype == dtype
    assert made.std() > 0


def test_texts_become_bytes() -> None:
    """They need no library for images."""
    made = changes_of(plain_steps([Lowercase(), TextBytes(length=6)]), "none")("Ein Bär")

    assert bytes(np.asarray(made)) == b"ein b\xc3"


def test_the_script_for_other_interpreters_needs_only_what_they_have() -> None:
    """It imports nothing of batchd, and is Python of the oldest version that it runs on."""
    parsed = ast.parse(inspect.getsource(dataloader), feature_version=OLDEST)

    modules = {alias.name for node in ast.walk(parsed) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom)}
    found = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert found == {"PIL", "cv2", "numpy", "torch", "torchvision"}


def test_any_python_can_read_what_asks_for_its_version() -> None:
    """The question has no syntax that is newer than its answer."""
    assert ast.parse(beside.PROBE, feature_version=(3, 0))
