"""Which arrays a list of steps produces, and what is wrong with a list of steps. Daemon, workers and ``batchd check``.

Decides from the configuration alone, before any image is seen; imports neither cv2 nor simplejpeg.

Invariant: for steps without problems, ``sample_fields`` is exactly what ``execute.Pipeline`` writes.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from batchd.config.steps import (
    CenterCrop,
    Decode,
    Layout,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    Step,
)
from batchd_wire.fields import Field

IMAGE, LABEL, INDEX, VALID, PATH = "image", "label", "index", "valid", "path"
"""The names of the fields: the pixels, the class, the sample's index in the source, whether the sample is what it should be, and
where it came from."""

_RANKS: dict[type[Step], int] = {
    Decode: 0,
    Resize: 1,
    CenterCrop: 1,
    RandomResizedCrop: 1,
    RandomFlip: 1,
    Normalize: 2,
    Layout: 3,
}
_COLOR_CHANNELS = {"rgb": 3, "bgr": 3, "gray": 1}


def sample_fields(steps: Sequence[Step], on_error: str, path_bytes: int = 0) -> tuple[Field, ...]:
    """Name the arrays of one sample: ``image``, ``label``, ``index``, and ``valid`` where bad samples are masked.

    ``path`` comes where it is asked for, ``path_bytes`` long.
    """
    fields = [
        Field(IMAGE, image_dtype(steps), image_shape(steps)),
        Field(LABEL, "int64", ()),
        Field(INDEX, "int64", ()),
    ]
    if on_error == "mask":
        fields.append(Field(VALID, "bool", ()))
    if path_bytes:
        fields.append(Field(PATH, "uint8", (path_bytes,)))
    return tuple(fields)


def image_shape(steps: Sequence[Step]) -> tuple[int, int, int]:
    """Shape of one image: [height, width, channels], or [channels, height, width] for "nchw". Steps without problems only."""
    height, width = next(size for size in map(_fixed_size, reversed(steps)) if size)
    channels = channel_count(steps)
    return (channels, height, width) if is_channels_first(steps) else (height, width, channels)


def image_dtype(steps: Sequence[Step]) -> str:
    """Type of one image's numbers, by numpy's name."""
    return next((step.dtype for step in steps if isinstance(step, Normalize)), "uint8")


def channel_count(steps: Sequence[Step]) -> int:
    """3 for colour, 1 for grey."""
    return next(_COLOR_CHANNELS[step.color] for step in steps if isinstance(step, Decode))


def is_channels_first(steps: Sequence[Step]) -> bool:
    """Tell whether the channels come first in memory."""
    return any(isinstance(step, Layout) and step.order == "nchw" for step in steps)


def is_random(steps: Sequence[Step]) -> bool:
    """Tell whether one sample can give different images; False means that it always gives the same bytes."""
    return any(map(_is_random_step, steps))


def check_steps(steps: Sequence[Step]) -> list[str]:
    """List everything that is wrong with the order or the options of ``steps``; empty where they can be run."""
    return list(_problems(steps))


def _problems(steps: Sequence[Step]) -> Iterator[str]:
    if not steps or not isinstance(steps[0], Decode):
        yield 'the first step must be { op = "decode" }'
    for before, after in pairwise(steps):
        if _RANKS[type(before)] > _RANKS[type(after)]:
            yield f'"{after.op}" cannot come after "{before.op}"'
    for kind, name in ((Decode, "decode"), (Normalize, "normalize"), (Layout, "layout")):
        count = sum(isinstance(step, kind) for step in steps)
        if count > 1:
            yield f'"{name}" stands {count} times; once is allowed'
    yield from _size_problems(steps)
    yield from _channel_problems(steps)


def _size_problems(steps: Sequence[Step]) -> Iterator[str]:
    resizing = [step for step in steps if isinstance(step, (Resize, CenterCrop, RandomResizedCrop))]
    if not resizing:
        yield 'the images keep their different sizes, so no batch can hold them; add "random_resized_crop" or "resize"'
    elif _fixed_size(resizing[-1]) is None:
        yield 'after "resize" with shorter_side the images still have different sizes; let "center_crop" follow'


def _channel_problems(steps: Sequence[Step]) -> Iterator[str]:
    if not any(isinstance(step, Decode) for step in steps):
        return
    channels = channel_count(steps)
    for step in steps:
        if isinstance(step, Normalize):
            for name, values in (("mean", step.mean), ("std", step.std)):
                if len(values) != channels:
                    yield f'"normalize" has {len(values)} numbers in {name}, and the image has {channels} channels'


def _fixed_size(step: Step) -> tuple[int, int] | None:
    return step.size if isinstance(step, (Resize, CenterCrop, RandomResizedCrop)) else None


def _is_random_step(step: Step) -> bool:
    match step:
        case RandomResizedCrop():
            return True
        case RandomFlip(probability=probability):
            return 0 < probability < 1
        case _:
            return False
