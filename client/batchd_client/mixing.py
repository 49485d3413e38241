"""Mixup and cutmix of a batch by the numbers that come with it. Runs in the trainer.

    mix_row      int32 [rows]       the partner of each row in its batch
    mix_lambda   float32 [rows]     the share of the row itself
    mix_box      int32 [rows, 4]    cutmix: left, top, right, bottom of what the partner has; else 0

A stream with ``mix = { … }`` has these fields. With w = 0 in the box, 1 beside it, and without one
λ everywhere:

    image    w * row + (1 - w) * partner
    target   λ * row + (1 - λ) * partner, of one-hot labels

Arrays may be of numpy, torch, JAX or another library whose arrays index, broadcast and compare as
numpy's do; all stay on their device.
"""

import importlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchd_client.errors import TensorsInvalid

MIX_ROW, MIX_LAMBDA, MIX_BOX = "mix_row", "mix_lambda", "mix_box"
MIX_FIELDS = (MIX_ROW, MIX_LAMBDA, MIX_BOX)
VALID = "valid"
IMAGE_DIMENSIONS = 4
"""With the rows."""
CHANNELS_MAX = 4
Values = Any
"""An array of numpy, torch or JAX, or a module of theirs."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """How a loader mixes. ``classes``: their number; default: that of the stream's class names.

    ``smoothing``: share of each target that is spread over all classes, before the mix, as timm
    does it. ``image`` and ``label``: the fields that are mixed.
    """

    classes: int | None = None
    smoothing: float = 0.0
    image: str = "image"
    label: str = "label"


DEFAULT = Mixing()


def classes_of(mixing: Mixing, names: Sequence[str]) -> int:
    """The number of classes, as given or as a stream names them. Raises ``TensorsInvalid``."""
    classes = len(names) if mixing.classes is None else mixing.classes
    if classes < 1:
        raise TensorsInvalid("mix: the stream has no class names; give their number, mix=Mixing(classes=1000)")
    return classes


def fields_read(has: Container[str], shown: Sequence[str], mixing: Mixing) -> tuple[str, ...]:
    """The fields that a loader reads for a loop that gets those ``shown``.

    ``has``: all of the stream. Raises ``TensorsInvalid``.
    """
    needed = (mixing.image, mixing.label, *MIX_FIELDS)
    _check_fields([name for name in needed if name not in has])
    others = [name for name in (*needed, VALID) if name in has and name not in shown]
    return (*shown, *others)


def _check_fields(missing: Sequence[str]) -> None:
    if missing:
        raise TensorsInvalid(
            f"mix: the stream has no field {missing[0]!r}; set mix = {{ mixup = 0.8, cutmix = 1.0 }} for it in batchd.toml, and "
            'name its images and labels, as in mix=Mixing(label="class")'
        )


def mixed(fields: Mapping[str, Values], classes: int, mixing: Mixing = DEFAULT) -> tuple[Values, Values]:
    """Return the mixed images and the soft targets of a batch's ``fields``, by name.

    Images ``[rows, height, width, channels]``, or with the channels before the sides, keep their
    dtype: whole numbers are rounded once. Labels are whole numbers ``[rows]``, and targets float32
    ``[rows, classes]``. A row whose partner is not ``valid`` stays as it is.

    Raises ``TensorsInvalid`` if a field is missing, or has another shape.
    """
    _check_fields([name for name in (*MIX_FIELDS, mixing.image, mixing.label) if name not in fields])
    images, labels = fields[mixing.image], fields[mixing.label]
    if images.ndim != IMAGE_DIMENSIONS or labels.ndim != 1:
        shapes = f"{list(images.shape)} and {list(labels.shape)}"
        raise TensorsInvalid(f"mix: images [rows, …] of three dimensions and labels [rows] are mixed, not {shapes}")
    partners = fields[MIX_ROW] % len(images)  # of a batch that ranks share, each has some rows
    shares, boxes = fields[MIX_LAMBDA], fields[MIX_BOX]
    if VALID in fields:
        is_good = fields[VALID][partners]
        shares, boxes = shares * is_good + ~is_good, boxes * is_good[:, None]
    of_library = _namespace(images)
    weights = _weights(of_library, images, shares, boxes)
    whole = images * weights + images[partners] * (1 - weights)
    is_label = labels[:, None] == _numbers(of_library, classes, labels)
    shares = shares[:, None]
    spread = mixing.smoothing / classes
    targets = (is_label * shares + is_label[partners] * (1 - shares)) * (1 - mixing.smoothing) + spread
    return _as(of_library, whole, images.dtype), targets


def _weights(of_library: Values, images: Values, shares: Values, boxes: Values) -> Values:
    """The share of each pixel's own row: float32 ``[rows, …]`` with 1 for the channels."""
    has_channels_last = images.shape[1] > CHANNELS_MAX or images.shape[-1] <= CHANNELS_MAX < images.shape[2]
    height, width = images.shape[1:3] if has_channels_last else images.shape[2:4]
    left, top, right, bottom = (boxes[:, side, None] for side in range(4))
    across, down = _numbers(of_library, width, boxes), _numbers(of_library, height, boxes)
    is_cut = ((down >= top) & (down < bottom))[:, :, None] & ((across >= left) & (across < right))[:, None, :]
    has_box = (right > left)[:, :, None]
    own = shares[:, None, None]
    weights = ~has_box * own + has_box * (~is_cut * (own * 0 + 1))
    return weights[..., None] if has_channels_last else weights[:, None]


def _namespace(array: Values) -> Values:
    """The module with the functions of an array's library."""
    if type(array).__module__.partition(".")[0] == "torch":
        return importlib.import_module("torch")
    find = getattr(array, "__array_namespace__", None)
    return np if find is None else find()


def _numbers(of_library: Values, count: int, like: Values) -> Values:
    """The numbers below ``count``, on the device of another array."""
    return of_library.arange(count, device=like.device) if hasattr(like, "device") else of_library.arange(count)


def _as(of_library: Values, array: Values, dtype: Values) -> Values:
    """The array in another dtype, rounded half to even for one of whole numbers."""
    whole = array if "float" in str(dtype) else of_library.round(array)
    return whole.to(dtype) if hasattr(whole, "to") and not hasattr(whole, "astype") else whole.astype(dtype)
