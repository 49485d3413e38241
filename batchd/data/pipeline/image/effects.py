"""The effects of the steps on images.

Daemon, workers and ``batchd check``; standard library only.

    encoded  --decode-->  uint8 [?, ?, 3]  --geometry-->  uint8 [224, 224, 3]
             --normalize-->  float32  --layout-->  [3, 224, 224]

Invariant: for steps without problems, the column at the end is exactly what ``image.stages`` makes.
"""

import json
from dataclasses import replace

from batchd.data.pipeline.effects import (
    IMAGE_DIMENSIONS,
    WHOLE,
    Columns,
    NoSuchField,
    StepInvalid,
    changed,
    column_of,
    described,
    effect,
    first_step_on,
)
from batchd.data.pipeline.image import options
from batchd.data.pipeline.options import STEP_KINDS, FieldStep
from batchd.data.samples.columns import Column, Following
from batchd_wire.wording import counted

GRAY_DIMENSIONS = 2
"""Dimensions of an image without an axis for its one channel; the first step on it adds that."""
COLOR_CHANNELS = 3
_CLIP_DIMENSIONS = range(IMAGE_DIMENSIONS, IMAGE_DIMENSIONS + 3)
"""Of an image, of the frames of a clip, and of several clips."""
CHANNELS_MAX = 4
"""More than that cv2 cannot do in every step."""
_CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}
_FOLLOWERS = {
    "mask": 'a mask is the bytes of a PNG ("image"), without a "decode" of its own, or uint8[?,?] or int32[?,?]',
    "masks": "masks are uint8[?,?,?]: objects, height, width",
    "boxes": "boxes are float32[?,4]",
    "points": "points are float32[?,2]",
    "keypoints": "keypoints are float32[?,?,2] or float32[?,?,3]",
    "label": "labels have a row for each box, such as int64[?]",
}
_COORDINATES = {"boxes": {4}, "points": {2}, "keypoints": {2, 3}}
_DIMENSIONS = {"mask": 2, "masks": 3, "boxes": 2, "points": 2, "keypoints": 3}


@effect.register
def _decode(step: options.Decode, columns: Columns) -> Columns:
    column = column_of(step, columns)
    if column.kind != "encoded":
        raise _misplaced(step, column)
    shape = (None, None, _CHANNELS[step.color])
    return changed(
        step, columns, kind="array", dtype="uint8", shape=shape, is_bgr=step.color == "bgr", pixels_max=step.max_pixels
    )


@effect.register
def _follow(step: options.Follow, columns: Columns) -> Columns:
    lead = alone(step, columns)
    maker = STEP_KINDS.get(lead.made_by)
    if lead.followers or (lead.made_by != "decode" and maker is not None and issubclass(maker, options.ImageStep)):
        raise StepInvalid(
            f'"follow" comes right behind "decode", in front of all other steps on {lead.name!r}, and once: '
            f'what "{lead.made_by}" did would not be done to those who follow'
        )
    facts = Following(step.followers, step.drops_rows, step.min_visible, step.min_area, step.flip_indices)
    made = dict(changed_image(step, columns, shape=lead.shape, following=facts))
    following = {name for column in columns.values() for _role, name in column.followers}
    missing = [(role, name) for role, name in step.followers if name not in columns]
    if missing:
        said = " and ".join(f"{_KEYS.get(role, role)} = {name!r}" for role, name in missing)
        key = _KEYS.get(missing[0][0], missing[0][0])
        raise NoSuchField(f'"follow" has {said}', (key,), [name for _role, name in missing], columns)
    for role, name in step.followers:
        key, column = _KEYS.get(role, role), columns[name]
        if name in following:
            raise StepInvalid(f'"follow" has {key} = {name!r}, which follows another image already', (key,))
        if not (_can_follow(role, column) or (role == "mask" and column.kind == "encoded")):
            raise StepInvalid(f'"follow" has {key} = {name!r}, which is {column.text}; {_FOLLOWERS[role]}', (key,))
        _check_flips(step, role, column)
        made[name] = _following(step, role, column, lead)
    return made


def _check_flips(step: options.Follow, role: str, column: Column) -> None:
    """Raise ``StepInvalid`` for indices of another number of keypoints."""
    count = column.shape[1] if role == "keypoints" else None
    if step.flip_indices and count is not None and count != len(step.flip_indices):
        raise StepInvalid(
            f'"follow" has {counted(len(step.flip_indices), "number")} in flip_indices, and {column.name!r} is {column.text}',
            ("flip_indices",),
        )


def _following(step: options.Follow, role: str, column: Column, lead: Column) -> Column:
    """A column that follows an image, as it is from then on."""
    shape = column.shape
    if role in _SIZED:
        shape = (*shape[: len(shape) - 2], *lead.shape[:2]) if column.kind == "array" else lead.shape[:2]
    if step.drops_rows and column.name in Following(step.followers).of_objects:
        shape = (None, *shape[1:])
    dtype = step.mask_type if column.kind == "encoded" else column.dtype
    fill = step.mask_fill if role == "mask" else 0
    if fill > WHOLE.get(dtype, (0, 0))[1] and fill:
        raise StepInvalid(
            f'"follow" has mask_fill = {fill}, and {column.name!r} is {column.text}, which ends before', ("mask_fill",)
        )
    return replace(column, kind="array", dtype=dtype, shape=shape, made_by=step.op, fill=fill)


_SIZED = ("mask", "masks")
"""What has a number for each pixel of its image."""
_KEYS = {"label": "labels"}
"""The option that names a follower, where it is not called as its role."""


def _can_follow(role: str, column: Column) -> bool:
    if column.kind != "array" or column.made_by == "box_form":
        return False
    if role == "label":
        return len(column.shape) > 0 and column.varying is None
    if len(column.shape) != _DIMENSIONS[role]:
        return False
    if role in _SIZED:
        return column.dtype == "uint8" or (role == "mask" and column.dtype == "int32")
    return column.dtype == "float32" and column.shape[-1] in _COORDINATES[role]


@effect.register
def _box_form(step: options.BoxForm, columns: Columns) -> Columns:
    boxes, image = column_of(step, columns), columns.get(step.image)
    if not _can_follow("boxes", boxes):
        raise StepInvalid(f'"box_form" needs boxes in pixels, float32[?,4], and {boxes.name!r} is {boxes.text}')
    if image is None:
        raise NoSuchField(f'"box_form" has image = {step.image!r}', ("image",), [step.image], columns)
    if not any(one == ("boxes", boxes.name) for one in image.followers):
        raise StepInvalid(
            f'"box_form" needs boxes that follow {step.image!r}, and {boxes.name!r} does not: '
            f'{{ op = "follow", boxes = {json.dumps(boxes.name)} }} reads them',
            ("image",),
        )
    return changed(step, columns)


@effect.register
def _resize(step: options.Resize, columns: Columns) -> Columns:
    return placed(step, columns, step.size or (None, None), step.sizes)


@effect.register
def _letterbox(step: options.Letterbox, columns: Columns) -> Columns:
    check_fill(step, step.fill, columns)
    return placed(step, columns, step.size or (None, None), step.sizes)


@effect.register
def _crop(step: options.CropStep, columns: Columns) -> Columns:
    if isinstance(step, options.RandomCrop):
        check_fill(step, step.fill, columns)
    return perhaps_placed(step, columns, step.size)


@effect.register
def _crop_to_bucket(step: options.CropToBucket, columns: Columns) -> Columns:
    alone(step, columns)
    return placed(step, columns, (None, None), step.bucket_sizes)


@effect.register
def _flip(step: options.RandomFlip, columns: Columns) -> Columns:
    return unresized(step, columns)


@effect.register
def _pad(step: options.Pad, columns: Columns) -> Columns:
    check_fill(step, step.fill, columns)
    height, width, _channels = pixels_of(step, columns).shape
    if step.border is not None:
        above, below, before, behind = step.border
        size = _sum(above, height, below), _sum(before, width, behind)
        return placed(step, columns, size)
    assert step.size is not None
    if (height or 0) > step.size[0] or (width or 0) > step.size[1]:
        raise StepInvalid(
            f'"pad" cannot make {height} x {width} pixels {step.size[0]} x {step.size[1]}: a crop makes them smaller'
        )
    return placed(step, columns, step.size)


@effect.register
def _rotate(step: options.Rotate, columns: Columns) -> Columns:
    check_fill(step, step.fill, columns)
    height, width, _channels = pixels_of(step, columns).shape
    sideways = {count % 2 == 1 for count in step.quarter_turns or (0,)}
    if sideways == {False} or (height is not None and height == width):
        return unresized(step, columns)
    return perhaps_placed(step, columns, (width, height) if sideways == {True} else (None, None))


@effect.register
def _same(step: options.ColorJitter | options.Cutout, columns: Columns) -> Columns:
    column = pixels_of(step, columns)
    if isinstance(step, options.Cutout):
        check_fill(step, step.fill, columns)
    elif column.shape[2] not in (1, COLOR_CHANNELS):
        raise StepInvalid(f'"color_jitter" is for images of 1 or 3 channels, and {column.name!r} is {column.text}')
    return changed_image(step, columns, shape=column.shape)


@effect.register
def _gray(step: options.Gray, columns: Columns) -> Columns:
    column = pixels_of(step, columns)
    height, width, channels = column.shape
    if channels not in (1, COLOR_CHANNELS):
        raise StepInvalid(f'"gray" is for images of 1 or 3 channels, and {column.name!r} is {column.text}')
    if step.probability < 1 and channels != step.channels:
        raise StepInvalid(
            f'"gray" with probability = {step.probability:g} keeps the number of channels, and {column.name!r} is '
            f"{column.text}: set channels = {channels}",
            ("channels",),
        )
    return changed_image(step, columns, shape=(height, width, step.channels))


@effect.register
def _to_floats(step: options.Normalize | options.SubtractMean, columns: Columns) -> Columns:
    shape = pixels_of(step, columns).shape
    factors, dtype = {"mean": step.mean}, "float32"
    if isinstance(step, options.Normalize):
        factors, dtype = {"mean": step.mean, "std": step.std}, step.dtype
    for name, values in factors.items():
        if len(values) != shape[2]:
            raise StepInvalid(
                f'"{step.op}" has {counted(len(values), "number")} in {name}, and the image has {_shown_channels(shape[2])}',
                (name,),
            )
    return changed_image(step, columns, dtype=dtype, shape=shape)


@effect.register
def _to(step: options.To, columns: Columns) -> Columns:
    height, width, channels = pixels_of(step, columns).shape
    is_first = step.layout == "nchw"
    shape = (channels, height, width) if is_first else (height, width, channels)
    return changed_image(step, columns, dtype=step.dtype, shape=shape, channels_first=is_first)


@effect.register
def _layout(step: options.Layout, columns: Columns) -> Columns:
    column = _with_channels(column_of(step, columns))
    if column.kind != "array" or len(column.shape) not in _CLIP_DIMENSIONS or column.channels_first:
        raise _misplaced(step, column)
    height, width, channels = column.shape[-IMAGE_DIMENSIONS:]
    if step.order == "nhwc":
        return {**columns, step.field: column}
    return changed_image(step, columns, shape=(channels, height, width), channels_first=True)


def unresized(step: options.ImageStep, columns: Columns) -> Columns:
    """The columns after geometry that leaves an image its size was done to it."""
    lead = pixels_of(step, columns)
    height, width, _channels = lead.shape
    return placed(step, columns, (height, width), lead.sizes)


def placed(
    step: options.ImageStep,
    columns: Columns,
    size: tuple[int | None, int | None],
    sizes: tuple[tuple[int, int], ...] = (),
) -> Columns:
    """The columns after the geometry of an image, and of all that follows it, was changed.

    ``sizes``: of the image in each bucket, if these have one each, or that batches draw from.
    """
    lead = pixels_of(step, columns)
    made = dict(changed_image(step, columns, shape=(*size, lead.shape[2]), sizes=sizes))
    for role, name in lead.followers:
        follower = columns.get(name)
        if follower is None or not _can_follow(role, follower):
            raise StepInvalid(
                f'"{step.op}" is done to {name!r} as well, which follows {lead.name!r}, and '
                f"{'is not there any more' if follower is None else f'is {follower.text} by then'}: "
                f"change {name!r} behind all steps on {lead.name!r}"
            )
        if role in _SIZED:
            shape = (*follower.shape[:-2], *size)
            made[name] = replace(follower, shape=shape, sizes=sizes if len(shape) == GRAY_DIMENSIONS else ())
        else:
            made[name] = follower
    return made


def perhaps_placed(step: options.ChanceStep, columns: Columns, size: tuple[int | None, int | None]) -> Columns:
    """The columns after a step that may not act: then the image keeps its size."""
    before = pixels_of(step, columns).shape
    kept = (length if length == before[side] else None for side, length in enumerate(size))
    return placed(step, columns, size if step.probability == 1 else (next(kept), next(kept)))


def changed_image(step: FieldStep, columns: Columns, **changes: object) -> Columns:
    """The columns with changes of an image, or of each frame of clips: arguments of ``Column``."""
    column = columns[step.field]
    if column.kind == "array" and isinstance(shape := changes.get("shape"), tuple):
        changes["shape"] = (*column.shape[:-IMAGE_DIMENSIONS], *shape)
    return changed(step, columns, **changes)


def alone(step: FieldStep, columns: Columns) -> Column:
    """As ``pixels_of``, for steps that are not done to clips. Raises ``StepInvalid``."""
    column = columns.get(step.field)
    if column is not None and column.kind == "array" and len(column.shape) > IMAGE_DIMENSIONS:
        raise StepInvalid(
            f'"{step.op}" is for images, and {column.name!r} has several in each sample: it is {column.text}'
        )
    return pixels_of(step, columns)


def pixels_of(step: FieldStep, columns: Columns) -> Column:
    """The column of a step on pixels: 8 bits, channels last. Without their axis, it gets one.

    Of clips, [frames, height, width, channels] with more in front, the column of one frame.
    """
    column = _with_channels(column_of(step, columns))
    is_image = column.kind == "array" and column.dtype == "uint8" and len(column.shape) in _CLIP_DIMENSIONS
    are_views = column.made_by == "views" and len(column.shape) > IMAGE_DIMENSIONS
    if not is_image or column.channels_first or are_views:
        raise _misplaced(step, column)
    if column.shape[-1] is None or column.shape[-1] > CHANNELS_MAX:
        raise StepInvalid(
            f'"{step.op}" is for images whose number of channels is known and at most {CHANNELS_MAX}, '
            f"and {column.name!r} is {column.text}"
        )
    return replace(column, shape=column.shape[-IMAGE_DIMENSIONS:])


def _with_channels(column: Column) -> Column:
    if column.kind == "array" and column.dtype == "uint8" and len(column.shape) == GRAY_DIMENSIONS:
        return replace(column, shape=(*column.shape, 1))
    return column


def check_fill(step: options.ImageStep, fill: options.Fill, columns: Columns) -> None:
    """Raise ``StepInvalid`` for a colour of another number of channels."""
    channels = pixels_of(step, columns).shape[2]
    if len(fill) not in (1, channels):
        raise StepInvalid(
            f'"{step.op}" has {counted(len(fill), "number")} in fill, and the image has {_shown_channels(channels)}'
        )


def _sum(before: int, length: int | None, behind: int) -> int | None:
    return None if length is None else before + length + behind


def _misplaced(step: FieldStep, column: Column) -> StepInvalid:
    if column.is_file:
        return StepInvalid(f"{first_step_on(column)}: {column.name!r} is {described(column)}")
    if column.made_by:
        return StepInvalid(
            f'"{step.op}" cannot come after "{column.made_by}": {column.name!r} is {column.text} by then'
        )
    return StepInvalid(f'"{step.op}" cannot be done to {column.name!r}, which is {column.text}')


def _shown_channels(channels: int | None) -> str:
    return "channels that differ" if channels is None else counted(channels, "channel")
