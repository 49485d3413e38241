"""Batches of images in any library, and the pixels of boxes in them. Runs in the trainer.

    numpy, torch   written in place, box by box
    JAX, others    made anew under a mask, which a compiled program joins with all else

Invariant: numbers that came with a batch decide on the host what is done to its images. Where they
are there already, as a loader keeps them, nothing waits for a device.
"""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHANNELS_MAX = 4
Values = Any
"""An array of numpy, torch or JAX, or a module of theirs."""


def namespace(array: Values) -> Values:
    """The module with the functions of an array's library."""
    if _is_tensor(array):
        return importlib.import_module("torch")
    find = getattr(array, "__array_namespace__", None)
    return np if find is None else find()


def is_writable(array: Values) -> bool:
    """True for arrays of numpy and torch; those of other libraries never change."""
    return isinstance(array, np.ndarray) or _is_tensor(array)


def is_on_host(array: Values) -> bool:
    """True if a writable array is in the host's memory, as numbers that numpy has."""
    return isinstance(array, np.ndarray) or (array.device.type == "cpu" and "bfloat16" not in str(array.dtype))


def on_host(numbers: Values) -> NDArray[Any]:
    """Numbers as an array of numpy, of their shape and in their memory.

    Waits for numbers that a device has, and copies them.
    """
    return np.asarray(numbers.cpu() if _is_tensor(numbers) else numbers)


def beside(array: Values, numbers: NDArray[Any], dtype: object = None) -> Values:
    """Numbers as an array of the library of another one, on its device; the shape stays.

    ``dtype``: of that library; default: theirs.
    """
    if isinstance(array, np.ndarray):
        return np.asarray(numbers, dtype)  # type: ignore[call-overload]
    placed = namespace(array).asarray(numbers, dtype=dtype)
    if not _is_tensor(array):
        return placed
    # from other memory, a copy waits for all that the device has to do
    if array.device.type == "cuda":
        return placed.pin_memory().to(array.device, non_blocking=True)
    return placed.to(array.device)


def numbers_below(count: int, array: Values) -> Values:
    """The numbers below ``count``, on the device of an array."""
    of_library = namespace(array)
    return of_library.arange(count, device=array.device) if hasattr(array, "device") else of_library.arange(count)


def channels_first(images: Values) -> Values:
    """View images as ``[rows, channels, height, width]``, whichever axis has the channels."""
    is_last = images.shape[1] > CHANNELS_MAX or images.shape[-1] <= CHANNELS_MAX < images.shape[2]
    return namespace(images).moveaxis(images, -1, 1) if is_last else images


def is_inside(boxes: Values, height: int, width: int) -> Values:
    """Whether pixels are in the box of their row: bool ``[rows, 1, height, width]``.

    ``boxes``: ``[rows, 4]``, left, top, right and bottom.
    """
    left, top, right, bottom = (boxes[:, side, None] for side in range(4))
    across, down = numbers_below(width, boxes), numbers_below(height, boxes)
    is_down, is_across = (down >= top) & (down < bottom), (across >= left) & (across < right)
    return is_down[:, None, :, None] & is_across[:, None, None, :]


def pixels_of(boxes: NDArray[np.int32], facts: NDArray[np.int32], array: Values) -> Values:
    """The pixels of ``boxes``, ``[boxes, 4]``, beside an array: int32 ``[2 + facts, pixels]``.

    Row and column of each in its image, then the ``facts`` of its box, int32 ``[facts, boxes]``.
    """
    left, top, right, bottom = boxes.T
    areas = (right - left) * (bottom - top)
    ends = np.cumsum(areas)
    pixels = int(areas.sum())
    known = beside(array, np.stack([top, left, ends - areas, right - left, *facts]).astype(np.int32))
    if isinstance(array, np.ndarray):
        of_each = known.repeat(areas, axis=1)
    else:
        of_each = known.repeat_interleave(beside(array, areas), dim=1, output_size=pixels)
    place = numbers_below(pixels, array) - of_each[2]
    of_each[0] += place // of_each[3]
    of_each[1] += place % of_each[3]
    return of_each[[0, 1, *range(4, 4 + len(facts))]]


def _is_tensor(array: Values) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"
