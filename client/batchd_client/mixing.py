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

    on the host       row by row, each in the processor's cache; in place, a row waits until the one
                      that it gives pixels to is made, and one of each cycle is kept
    on a device       two calls for all rows, as partners are consecutive but for one place
    JAX and others    one formula under a mask
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchd_client.errors import TensorsInvalid
from batchd_client.pixels import (
    Values,
    beside,
    channels_first,
    is_inside,
    is_on_host,
    is_writable,
    namespace,
    numbers_below,
    on_host,
    pixels_of,
)
from batchd_wire.views import Array

MIX_ROW, MIX_LAMBDA, MIX_BOX = "mix_row", "mix_lambda", "mix_box"
MIX_FIELDS = (MIX_ROW, MIX_LAMBDA, MIX_BOX)
VALID = "valid"
IMAGE_DIMENSIONS = 4
"""With the rows."""


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


def classes_of(mixing: Mixing, names: Sequence[str], label_shape: Sequence[int] = ()) -> int:
    """The number of classes: of one-hot labels, as given, or as a stream names them.

    ``label_shape``: of one sample's. Raises ``TensorsInvalid``.
    """
    if label_shape:
        return label_shape[-1]
    classes = len(names) if mixing.classes is None else mixing.classes
    if classes < 1:
        raise TensorsInvalid("mix: the stream has no class names; give their number, mix=Mixing(classes=1000)")
    return classes


def fields_read(has: Container[str], shown: Sequence[str], mixing: Mixing) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that a loader reads for a loop that gets those ``shown``, and those of the mix.

    ``has``: all of the stream. Raises ``TensorsInvalid``.
    """
    _check_fields([name for name in (mixing.image, mixing.label, *MIX_FIELDS) if name not in has])
    others = [name for name in (mixing.image, mixing.label) if name not in shown]
    return (*shown, *others), ((*MIX_FIELDS, VALID) if VALID in has else MIX_FIELDS)


def _check_fields(missing: Sequence[str]) -> None:
    if missing:
        raise TensorsInvalid(
            f"mix: the stream has no field {missing[0]!r}; set mix = {{ mixup = 0.8, cutmix = 1.0 }} for it in batchd.toml, and "
            'name its images and labels, as in mix=Mixing(label="class")'
        )


def mixed(
    fields: Mapping[str, Values], classes: int, mixing: Mixing = DEFAULT, *, in_place: bool = False
) -> tuple[Values, Values]:
    """Return the mixed images and the soft targets of a batch's ``fields``, by name.

    Images ``[rows, height, width, channels]``, or with the channels before the sides, keep their
    dtype: whole numbers are rounded once. Labels are whole numbers ``[rows]``, or one-hot or soft
    already, float32 ``[rows, classes]``, as targets are. A row whose partner is not ``valid`` stays
    as it is. ``in_place``: images are the caller's own, and may be written if their library can;
    use what is returned.

    Raises ``TensorsInvalid`` if a field is missing, or has another shape.
    """
    _check_fields([name for name in (*MIX_FIELDS, mixing.image, mixing.label) if name not in fields])
    images, labels = fields[mixing.image], fields[mixing.label]
    is_soft = labels.ndim == 2 and "float" in str(labels.dtype)  # noqa: PLR2004  rows, classes
    if images.ndim != IMAGE_DIMENSIONS or not (labels.ndim == 1 or is_soft):
        shapes = f"{list(images.shape)} and {labels.dtype} {list(labels.shape)}"
        raise TensorsInvalid(
            "mix: images [rows, …] of three dimensions are mixed, with labels [rows] or soft ones, floating-point "
            f"[rows, classes], not {shapes}"
        )
    names = (*MIX_FIELDS, VALID) if VALID in fields else MIX_FIELDS
    numbers = [fields[name] for name in names]
    if is_writable(images):
        numbers = [on_host(values) for values in numbers]
    # of a batch that ranks share, each has some rows
    partners, shares, boxes = numbers[0] % len(images), *numbers[1:3]
    for is_valid in numbers[3:]:
        is_good = is_valid[partners]
        shares, boxes = shares * is_good + ~is_good, boxes * is_good[:, None]
    if not is_writable(images):
        whole = _masked(images, partners, shares, boxes)
    elif is_on_host(images):
        whole = beside(images, _by_row(on_host(images), partners, shares, boxes, in_place=in_place))
    else:
        whole = mixed_at_once(images, partners, shares, boxes, in_place=in_place)
    if is_writable(labels):
        partners, shares = beside(labels, partners), beside(labels, shares)
    return whole, _targets(labels, partners, shares[:, None], classes, mixing.smoothing)


def _targets(labels: Values, partners: Values, shares: Values, classes: int, smoothing: float) -> Values:
    soft = labels if labels.ndim > 1 else labels[:, None] == numbers_below(classes, labels)
    return (soft * shares + soft[partners] * (1 - shares)) * (1 - smoothing) + smoothing / soft.shape[1]


def _by_row(
    images: Array, partners: NDArray[np.int32], shares: NDArray[np.float32], boxes: NDArray[np.int32], *, in_place: bool
) -> Array:
    """Images in the host's memory, each while the processor has it in its cache."""
    in_place = in_place and len(np.unique(partners)) == len(partners)
    whole = images if in_place else np.empty_like(images)
    pixels, to = channels_first(images), channels_first(whole)
    sources = _in_cycles(pixels, partners) if in_place else ((row, pixels[of]) for row, of in enumerate(partners))
    for row, partner in sources:
        left, top, right, bottom = boxes[row]
        if right <= left and shares[row] < 1:
            _blend(pixels[row], partner, shares[row, None, None, None], to[row])
            continue
        if not in_place:
            to[row] = pixels[row]
        to[row, :, top:bottom, left:right] = partner[:, top:bottom, left:right]
    return whole


def _in_cycles(pixels: Array, partners: NDArray[np.int32]) -> Iterator[tuple[int, Array]]:
    """All rows, each with its partner's pixels as they are before that row is yielded."""
    rows = dict.fromkeys(range(len(partners)))
    while rows:
        row = first = next(iter(rows))
        kept = pixels[first].copy()
        while row in rows:
            del rows[row]
            partner = int(partners[row])
            yield row, kept if partner == first else pixels[partner]
            row = partner


def mixed_at_once(
    images: Values,
    partners: NDArray[np.int32],
    shares: NDArray[np.float32],
    boxes: NDArray[np.int32],
    *,
    in_place: bool,
) -> Values:
    """Mix images on a device, ``[rows, …]`` of any dtype, in a few calls however many there are.

    ``partners`` int32, ``shares`` float32 and ``boxes`` int32 are the fields of ``MIX_FIELDS``.
    """
    has_box = boxes[:, 2] > boxes[:, 0]
    own = np.where(has_box, np.float32(1), shares)[:, None, None, None]
    is_faded, is_even = (own < 1).any(), (own == own[0]).all()
    whole = namespace(images).empty_like(images) if is_faded else images if in_place else images.clone()
    pixels, to = channels_first(images), channels_first(whole)
    runs = _runs(partners)
    if is_faded:
        for rows, others in runs:
            _blend(pixels[rows], pixels[others], own[:1] if is_even else own[rows], to[rows])
    if has_box[0] and (boxes == boxes[0]).all():
        left, top, right, bottom = boxes[0]
        taken = [pixels[others, :, top:bottom, left:right].clone() for _rows, others in runs]
        for (rows, _others), part in zip(runs, taken, strict=True):
            to[rows, :, top:bottom, left:right] = part
    elif has_box.any():
        cut = np.flatnonzero(has_box)
        down, across, of, other = pixels_of(boxes[cut], np.stack([cut, partners[cut]]), images)
        to[of, :, down, across] = pixels[other, :, down, across]
    return whole


def _runs(partners: NDArray[np.int32]) -> list[tuple[slice, slice]]:
    """Consecutive rows whose partners are consecutive, too: both as slices."""
    starts = np.flatnonzero(np.diff(partners, prepend=-2) != 1)
    runs = zip(starts.tolist(), [*starts[1:].tolist(), len(partners)], partners[starts].tolist(), strict=True)
    return [(slice(row, end), slice(of, of + end - row)) for row, end, of in runs]


def _blend(own: Values, partner: Values, shares: NDArray[np.float32], to: Values) -> None:
    """Write ``share * own + (1 - share) * partner``, whole numbers rounded once, half to even.

    ``shares``: with the dimensions of ``own``, for all of it or for each row.
    """
    of_library, is_float = namespace(own), "float" in str(own.dtype)
    share: Values = shares
    if of_library is not np:
        share = shares.item() if shares.size == 1 else beside(own, shares)
        if is_float and (shares.size == 1 or share.dtype == own.dtype):
            of_library.lerp(partner, own, share, out=to)
            return
    made = own * share
    made += partner * (1 - share)
    to[...] = made if is_float else of_library.round(made)


def _masked(images: Values, partners: Values, shares: Values, boxes: Values) -> Values:
    """Images of a library whose arrays never change: one expression, which a compiler fuses."""
    of_library, pixels = namespace(images), channels_first(images)
    height, width = pixels.shape[2:]
    own, has_box = shares[:, None, None, None], (boxes[:, 2] > boxes[:, 0])[:, None, None, None]
    weights = ~has_box * own + has_box * (~is_inside(boxes, height, width) * (own * 0 + 1))
    whole = pixels * weights + pixels[partners] * (1 - weights)
    whole = whole if "float" in str(images.dtype) else of_library.round(whole)
    return (whole if pixels is images else of_library.moveaxis(whole, 1, -1)).astype(images.dtype)
