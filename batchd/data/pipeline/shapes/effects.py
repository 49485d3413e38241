"""The effects of the steps for samples of different shapes.

Daemon, workers and ``batchd check``; standard library only. With ``pad_batch`` and ``ragged``:

    image: uint8 [?, ?, 3]  --> image: uint8 [<=512, <=512, 3]   image_shape: int32 [2]
    tokens: int32 [?]       --> tokens: int32 [<=128]            tokens_length: int32

With ``patches``, of 14 x 14 pixels:

    image: uint8 [?, ?, 3]  --> image: uint8 [?, 588]            image_grid: int32 [2]

With ``interleave``, of 14 x 14 pixels and merge = 2:

    tokens: int32 [?]       --> tokens: int32 [?]            images_positions: int32 [?, 2]
    images: list, 3 colors  --> images: uint8 [?, 588]       images_segments: int32 [?]

With ``pack``, of 4,096 elements and at most 256 documents, columns are those of a row:

    tokens: int32 [?]       --> tokens: int32 [4096]    segment_ids, position_ids: int32 [4096]
    label: int64            --> label: int64 [256]      lengths: int32 [256]

Invariant: the column with the sizes directly follows each column that varies.
"""

import json
from dataclasses import replace

from batchd.data.pipeline.effects import (
    FLOAT_MAX,
    IMAGE_DIMENSIONS,
    WHOLE,
    Columns,
    NoSuchField,
    StepInvalid,
    column_of,
    described,
    effect,
    first_step_on,
    replaced,
    sizes_column,
)
from batchd.data.pipeline.shapes.options import Interleave, Pack, PadBatch, Patches, Ragged, RoomStep
from batchd.data.samples.columns import Beside, Column, Following
from batchd_wire.fields import DIMENSIONS_MAX, PADDED, RAGGED, Varying


@effect.register
def _pad_batch(step: PadBatch, columns: Columns) -> Columns:
    made = _with_room(step, columns, PADDED)
    column = made[step.field]
    if not _holds(column.dtype, step.fill):
        raise StepInvalid(f'"pad_batch" has fill = {step.fill:g}, which {column.dtype} cannot hold ({step.field!r})')
    return {**made, step.field: replace(column, fill=step.fill)}


@effect.register
def _ragged(step: Ragged, columns: Columns) -> Columns:
    return _with_room(step, columns, RAGGED)


@effect.register
def _patches(step: Patches, columns: Columns) -> Columns:
    column = column_of(step, columns)
    is_image = column.kind == "array" and len(column.shape) == IMAGE_DIMENSIONS and not column.channels_first
    channels = column.shape[2] if is_image else None
    if channels is None:
        why = f"; {first_step_on(column)}" if column.kind == "encoded" else ""
        raise StepInvalid(
            f'"patches" needs an image [height, width, channels], and {column.name!r} is {column.text}{why}'
        )
    height, width = column.shape[:2]
    count = None if height is None or width is None else (height // step.size) * (width // step.size)
    if count == 0:
        raise StepInvalid(
            f'"patches" has size = {step.size}, and {column.name!r} is {column.text}, which has none', ("size",)
        )
    shape = count, step.size * step.size * channels
    made = replace(column, shape=shape, is_bgr=False, following=Following())
    return replaced(step, columns, made, Column(step.grid, dtype="int32", shape=(2,)))


@effect.register
def _interleave(step: Interleave, columns: Columns) -> Columns:
    missing = [name for name in (step.field, step.images, *step.also) if name not in columns]
    if missing:
        key = "field" if missing[0] == step.field else "images" if missing[0] == step.images else "also"
        raise NoSuchField(f'"interleave" needs {" and ".join(map(repr, missing))}', (key,), missing, columns)
    tokens, images = columns[step.field], columns[step.images]
    others = [columns[name] for name in step.also]
    if tokens.dtype not in WHOLE or not all(map(_is_line, (tokens, *others))):
        wrong = next((column for column in (tokens, *others) if not _is_line(column)), tokens)
        raise StepInvalid(
            f'"interleave" needs tokens of any length, and {wrong.name!r} is {wrong.text}{_numbers_of_a_length(wrong)}'
        )
    beside = [name for name, one in columns.items() if one.made_by == tokens.made_by != "" and _is_line(one)]
    unnamed = [name for name in beside if name not in {step.field, *step.also}]
    if unnamed:
        raise StepInvalid(
            f'"interleave" would leave {unnamed[0]!r} shorter than {step.field!r}; write also = {json.dumps(unnamed)}',
            ("also",),
        )
    image = images.item if images.kind == "arrays" else images
    is_image = image.kind == "array" and image.dtype == "uint8" and len(image.shape) == IMAGE_DIMENSIONS
    if not is_image or image.channels_first or image.shape[2] is None:
        why = f"; {first_step_on(replace(images, kind='encoded'))}" if images.kind in ("encoded", "images") else ""
        raise StepInvalid(
            f'"interleave" needs images [height, width, channels], and {images.name!r} is {images.text}{why}',
            ("images",),
        )
    place = Beside(images.name, step.merge * step.merge)
    patches = Column(images.name, shape=(None, step.size * step.size * image.shape[2]), beside=place)
    positions = Column(step.positions, dtype="int32", shape=(None, 2), beside=place)
    segments = Column(step.segments, dtype="int32", shape=(None,), beside=place)
    changed = {**columns, **{one.name: replace(one, made_by=step.op) for one in (tokens, *others)}}
    return replaced(replace(step, field=step.images), changed, patches, positions, segments)


def _is_line(column: Column) -> bool:
    return column.kind == "array" and column.shape == (None,) and column.beside is None


SEGMENTS, PLACES, LENGTHS = "segment_ids", "position_ids", "lengths"
"""The fields that ``pack`` makes."""


@effect.register
def _pack(step: Pack, columns: Columns) -> Columns:
    if step.field not in columns:
        raise NoSuchField(f'"pack" is done to {step.field!r}', ("field",), [step.field], columns)
    packed = columns[step.field]
    if not is_packed(packed) or packed.beside is not None:
        needs = f'"pack" needs numbers whose first dimension alone varies, and {packed.name!r} is {packed.text}'
        raise StepInvalid(needs + _numbers_of_a_length(packed), ("field",))
    if not _holds(packed.dtype, step.fill):
        raise StepInvalid(f'"pack" has fill = {step.fill:g}, which {packed.dtype} cannot hold ({step.field!r})')
    _check_patches(step, columns)
    ids = (SEGMENTS, PLACES) if step.ids else ()
    taken = [name for name in (*ids, LENGTHS) if name in columns]
    if taken:
        raise StepInvalid(f'"pack" makes a field {taken[0]!r}, and the sample already has one of this name')
    made = {}
    for name, column in columns.items():
        if not (column.is_fixed or is_packed(column)):
            raise StepInvalid(
                f'"pack" needs fields of one shape beside {step.field!r}, or of its length, and {name!r} is {column.text}; '
                '"drop" leaves it out'
            )
        if len(column.shape) == DIMENSIONS_MAX and not is_packed(column):
            raise StepInvalid(
                f'"pack" adds a dimension to {name!r}, which has {DIMENSIONS_MAX}, the most of a field, already'
            )
        rows, inner = (step.length, column.shape[1:]) if is_packed(column) else (step.documents_max, column.shape)
        if column.beside is not None:
            rows = step.patches or step.length * column.beside.most
        fill = step.fill if name == step.field else 0.0
        made[name] = replace(column, shape=(rows, *inner), made_by=step.op, fill=fill)
    for name, rows in (*((name, step.length) for name in ids), (LENGTHS, step.documents_max)):
        made[name] = Column(name, dtype="int32", shape=(rows,), made_by=step.op)
    return made


def _check_patches(step: Pack, columns: Columns) -> None:
    """Raise ``StepInvalid`` if patches of images would be cut, or if there are none."""
    has_images = any(column.beside for column in columns.values())
    if (has_images or columns[step.field].made_by == "patches") and step.too_long != "drop":
        raise StepInvalid(
            f'"pack" has too_long = "{step.too_long}", which would cut the patches of an image; "drop" leaves images of more '
            f"than length = {step.length} out",
            ("too_long",),
        )
    if step.patches is not None and not has_images:
        raise StepInvalid('"pack" has patches, and no "interleave" makes some; leave it out', ("patches",))


def _numbers_of_a_length(column: Column) -> str:
    """Return which step makes numbers for ``pack`` of this column, behind a semicolon."""
    if column.kind == "encoded":
        return f"; {first_step_on(column)}"
    if column.kind == "text":
        return '; "tokenize" makes numbers of a text'
    return '; padding = "none" of "tokenize" leaves each text its length' if column.made_by == "tokenize" else ""


def is_packed(column: Column) -> bool:
    """True for numbers whose first dimension alone varies: ``pack`` joins those of a row."""
    return column.kind == "array" and column.shape[:1] == (None,) and None not in column.shape[1:]


def _with_room(step: RoomStep, columns: Columns, kind: str) -> Columns:
    column = column_of(step, columns)
    if column.kind == "arrays":
        if None in column.shape:
            raise StepInvalid(
                f'"{step.op}" needs values of one shape in each list, and {column.name!r} is {column.text}: "resize" or a '
                "crop gives images one"
            )
        column = column.stacked
    if column.kind == "encoded":
        raise StepInvalid(
            f'"{step.op}" needs pixels, and {column.name!r} is an image file; put {{ op = "decode" }} before'
        )
    if column.kind != "array":
        raise StepInvalid(f'"{step.op}" needs numbers, and {column.name!r} is {described(column)}')
    axes = tuple(axis for axis, length in enumerate(column.shape) if length is None)
    if column.size_axes:
        raise StepInvalid(f'"{step.op}" has nothing to do: all images of a batch have one size; leave the step out')
    if not axes:
        raise StepInvalid(f'"{step.op}" has nothing to do: every {column.name!r} is {column.text}; leave the step out')
    if not column.takes(step.max_shape):
        raise StepInvalid(
            f'"{step.op}" has max_shape = {list(step.max_shape)}, and {column.name!r} is {column.text}: give one length for each '
            "dimension, a largest one where there is ?, and the others as they are"
        )
    made = replace(column, shape=step.max_shape, varying=Varying(kind, axes), made_by=step.op)
    sizes = sizes_column(made)
    if sizes.name in columns:
        raise StepInvalid(f'"{step.op}" makes a field {sizes.name!r}, and the sample already has one of this name')
    return {one.name: one for old in columns.values() for one in ((made, sizes) if old.name == column.name else (old,))}


def _holds(dtype: str, value: float) -> bool:
    if dtype in FLOAT_MAX:
        return abs(value) <= FLOAT_MAX[dtype]
    low, high = WHOLE[dtype]
    return value == int(value) and low <= value <= high
