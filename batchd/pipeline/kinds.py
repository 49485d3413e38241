"""Every kind of step, and steps as messages carry them. Daemon, workers and CLI; standard library only.

Invariant: ``step_from_plain(step_to_plain(step)) == step``, and the plain form is what msgpack and JSON can carry.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

from batchd.pipeline.call.options import Call
from batchd.pipeline.fields.options import Drop, Rename
from batchd.pipeline.image.options import (
    CenterCrop,
    ColorJitter,
    Cutout,
    Decode,
    Follow,
    Gray,
    Layout,
    Normalize,
    Pad,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    Rotate,
    SubtractMean,
    To,
)
from batchd.pipeline.numbers.options import Cast, Clip, OneHot, Scale
from batchd.pipeline.shapes.options import PadBatch, Ragged
from batchd.pipeline.text.options import Lookup, Lowercase, RemoveStopwords, TextBytes, Tokenize

CONTENT_VERSION = 3
"""Grows when the same steps, or the same plan, begin to give other bytes."""

ImageStep: TypeAlias = (
    Decode
    | Follow
    | Resize
    | CenterCrop
    | RandomCrop
    | RandomResizedCrop
    | RandomFlip
    | Pad
    | Rotate
    | ColorJitter
    | Gray
    | Cutout
    | Normalize
    | SubtractMean
    | To
    | Layout
)
NumberStep: TypeAlias = OneHot | Cast | Clip | Scale
FieldStep: TypeAlias = Drop | Rename
ShapeStep: TypeAlias = PadBatch | Ragged
TextStep: TypeAlias = Tokenize | Lowercase | RemoveStopwords | Lookup | TextBytes
Step: TypeAlias = ImageStep | NumberStep | FieldStep | TextStep | ShapeStep | Call

STEP_KINDS: dict[str, type[Step]] = {
    "decode": Decode,
    "follow": Follow,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_crop": RandomCrop,
    "random_resized_crop": RandomResizedCrop,
    "random_flip": RandomFlip,
    "pad": Pad,
    "rotate": Rotate,
    "color_jitter": ColorJitter,
    "gray": Gray,
    "cutout": Cutout,
    "normalize": Normalize,
    "subtract_mean": SubtractMean,
    "to": To,
    "layout": Layout,
    "one_hot": OneHot,
    "cast": Cast,
    "clip": Clip,
    "scale": Scale,
    "drop": Drop,
    "rename": Rename,
    "tokenize": Tokenize,
    "lowercase": Lowercase,
    "remove_stopwords": RemoveStopwords,
    "lookup": Lookup,
    "text_bytes": TextBytes,
    "pad_batch": PadBatch,
    "ragged": Ragged,
    "call": Call,
}
"""Every step by its ``op``."""


def step_to_plain(step: Step) -> dict[str, object]:
    """Write a step as msgpack and JSON can carry it; ``step_from_plain`` is the way back."""
    return {name: _to_plain(value) for name, value in asdict(step).items()}


def step_from_plain(plain: Mapping[str, object]) -> Step:
    """Read what ``step_to_plain`` wrote: every option, nothing else. Raises ``ValueError`` naming what is wrong."""
    kind = STEP_KINDS.get(str(plain.get("op")))
    if kind is None:
        raise ValueError(f"the step {plain.get('op')!r} is not one of {', '.join(STEP_KINDS)}")
    types = {field.name: field.type for field in fields(kind)}
    if plain.keys() != types.keys():
        raise ValueError(f"the step {plain['op']!r} has the options {sorted(types)}, not {sorted(plain)}")
    options: dict[str, Any] = {name: _from_plain(types[name], value) for name, value in plain.items()}
    return kind(**options)


def _to_plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _from_plain(hint: object, value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if hint is Path and isinstance(value, str) else value
