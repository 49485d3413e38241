"""Facts that follow from a stream's steps: where a cache cuts them, the longest record.

Daemon and CLI; imports no decoder.

    decode  (resize to cache_short_side)  resize  center_crop  |  random_crop  random_flip  to
    chat                                                       |  pack
    once for each sample: the cache keeps the result           |  in each epoch

A cache of decoded samples keeps the output of the steps before the first random one. Steps that are
not ``is_cacheable`` are after the cut, too: conversions of pixels to numbers, which are larger, and
calls of users' functions, which may be random.

Invariant: the steps before the cut give the same values for a sample in every epoch, so the cache
cannot change a batch.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import takewhile

from batchd.data.pipeline.image.options import CropStep, CropToBucket, Decode, Follow, Resize
from batchd.data.pipeline.media.options import DecodeAudio, DecodeVideo, is_exact
from batchd.data.pipeline.options import StepOptions
from batchd.data.pipeline.text.options import Chat, Tokenize
from batchd.data.pipeline.views.options import Views
from batchd_wire.record import frozen

KINDS_WITH_POINTS = {"points", "pixels", "encoded"}
"""Caches whose records have the access points of JPEGs: see ``_jpeg_scan.h``."""
KINDS_OF_FACTS = frozenset({"points", "media"})
"""Caches of what is known of files, which are read all the same. They take the memory that is
left."""
RECORD_BYTES_MAX = 64 << 20
"""Length of a record, in bytes, above which a sample is bad, unless a step that decodes sets it."""


@frozen
class PipelinePlan:
    """The steps of a stream, and the facts that follow from them alone.

    ``cut``: the number of steps whose output a cache of decoded samples keeps; 0 without one.
    ``record_bytes_max``: the longest record of the source. ``cropped``: the fields for which a
    cache keeps access points, each with the maximum size of a file in bytes; empty without one.
    ``is_random``: a sample can have different fields each time.
    """

    steps: tuple[StepOptions, ...]
    cut: int
    record_bytes_max: int
    cropped: Mapping[str, int]
    is_random: bool


def plan_pipeline(pipeline: tuple[StepOptions, ...], cache: str = "off", short_side: int | None = None) -> PipelinePlan:
    """Plan the steps of a stream. ``short_side``: of decoded images in a cache, in pixels."""
    steps = steps_of(pipeline, short_side if cache == "decoded" else None)
    return PipelinePlan(
        steps,
        cut_of(steps) if cache == "decoded" else 0,
        max(
            (step.max_bytes for step in steps if isinstance(step, Decode | DecodeAudio | DecodeVideo)),
            default=RECORD_BYTES_MAX,
        ),
        cropped_files(steps) if cache in KINDS_WITH_POINTS else {},
        any(step.is_random for step in steps),
    )


def steps_of(steps: tuple[StepOptions, ...], short_side: int | None) -> tuple[StepOptions, ...]:
    """Return a stream's pipeline, with the resize that its ``cache_short_side`` inserts."""
    decode = next((step for step in steps if isinstance(step, Decode)), None)
    if short_side is None or decode is None:
        return steps
    place = steps.index(decode) + 1
    while place < len(steps) and isinstance(steps[place], Follow):
        place += 1
    return (*steps[:place], Resize(field=decode.field, shorter_side=short_side), *steps[place:])


def cut_of(steps: Sequence[StepOptions]) -> int:
    """Count the steps before the cut."""
    return len(list(takewhile(lambda step: step.is_cacheable and not step.is_random, steps)))


def cut_problem(steps: Sequence[StepOptions]) -> str | None:
    """The reason why a pipeline cannot be cut, and what to do; None if it can."""
    in_front = steps[: cut_of(steps)]
    if any(isinstance(step, _COSTLY) for step in in_front):
        return None
    costly = next((step for step in steps if isinstance(step, _COSTLY)), None)
    if costly is None:
        return 'no step decodes, so there are no pixels to keep; cache = "encoded" keeps the values of the source'
    step = steps[len(in_front)]
    why = "is random" if step.is_random else "runs in each epoch"
    what = {Decode: "decoded image is", DecodeAudio: "decoded sound is"}.get(type(costly), "tokens are")
    return (
        f'"{step.op}" (pipeline[{len(in_front)}]) {why} and is before "{costly.op}", so no {what} the same in all '
        f'epochs; move "{costly.op}" before it, or set cache = "encoded"'
    )


_COSTLY = (Decode, DecodeAudio, DecodeVideo, Tokenize, Chat)
"""The steps whose output is worth a cache."""


def cropped_files(steps: Sequence[StepOptions]) -> dict[str, int]:
    """The fields that only a ``decode`` with a crop reads, and the largest size of their files."""
    found = {}
    for place, step in enumerate(steps):
        if isinstance(step, Decode) and not any(_looks_at(before, step.field) for before in steps[:place]):
            behind = (later for later in steps[place + 1 :] if _looks_at(later, step.field))
            if _crops(next((later for later in behind if not isinstance(later, Follow)), None)):
                found[step.field] = step.max_bytes
    return found


def _crops(step: StepOptions | None) -> bool:
    """True for a crop, and for views of which some begin with one."""
    if isinstance(step, Views):
        return any(isinstance(first, CropStep) for view in step.into.values() for first in view.steps[:1])
    return isinstance(step, CropStep | CropToBucket)


def decoded_files(steps: Sequence[StepOptions]) -> dict[str, list[object]]:
    """The fields that only ``decode`` reads, and the options that decide pixels and bad files."""
    return {
        step.field: [step.color, step.max_bytes, step.max_pixels]
        for place, step in enumerate(steps)
        if isinstance(step, Decode) and not any(_looks_at(before, step.field) for before in steps[:place])
    }


def media_fields(steps: Sequence[StepOptions]) -> list[str]:
    """The fields whose files of sound or video have to be read through to know them.

    WAV, FLAC and AIFF say how long they are.
    """
    return [
        step.field
        for step in steps
        if isinstance(step, DecodeVideo) or (isinstance(step, DecodeAudio) and not is_exact(step.formats))
    ]


def media_problem(steps: Sequence[StepOptions]) -> str | None:
    """The reason why nothing is to be kept of sound and video, and what to do; None if it is."""
    if media_fields(steps):
        return None
    return (
        'cache = "media" needs "decode_video", or "decode_audio" of other formats than "wav", "flac" and "aiff", which say how '
        'long they are; set cache = "off"'
    )


def crop_problem(steps: Sequence[StepOptions]) -> str | None:
    """The reason why a pipeline cannot use access points, and what to do; None if it can."""
    if not cropped_files(steps):
        return (
            'cache = "points" needs a crop directly after "decode" (random_resized_crop, random_crop, center_crop, '
            "crop_to_bucket), and there "
            'is none; set cache = "off"'
        )
    if not has_crop_decoder():
        return (
            'cache = "points" needs the extension that decodes crops, which was not built: install a compiler and the headers '
            'of libjpeg-turbo, then reinstall batchd; or set cache = "off"'
        )
    return None


@cache
def has_crop_decoder() -> bool:
    """True if the extension that decodes crops of JPEGs was built."""
    try:
        import_module("batchd.data.pipeline._jpeg")
    except ImportError:
        return False
    return True


def _looks_at(step: StepOptions, field: str) -> bool:
    return step.touches is None or field in step.touches
