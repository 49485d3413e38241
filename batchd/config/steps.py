"""Every kind of step, and steps as messages carry them. Daemon, workers and CLI; standard library only.

Invariant: ``step_from_plain(step_to_plain(step)) == step``, and the plain form is what msgpack and JSON can carry.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeAlias

from batchd.config.image_steps import (
    CenterCrop,
    Decode,
    Layout,
    Normalize,
    RandomFlip,
    RandomResizedCrop,
    Resize,
)

Step: TypeAlias = Decode | Resize | CenterCrop | RandomResizedCrop | RandomFlip | Normalize | Layout

STEP_KINDS: dict[str, type[Step]] = {
    "decode": Decode,
    "resize": Resize,
    "center_crop": CenterCrop,
    "random_resized_crop": RandomResizedCrop,
    "random_flip": RandomFlip,
    "normalize": Normalize,
    "layout": Layout,
}
"""Every step by its ``op``."""


def step_to_plain(step: Step) -> dict[str, object]:
    """Write a step as msgpack and JSON can carry it; ``step_from_plain`` is the way back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}


def step_from_plain(plain: Mapping[str, object]) -> Step:
    """Read what ``step_to_plain`` wrote: every option, nothing else. Raises ``ValueError`` naming what is wrong."""
    kind = STEP_KINDS.get(str(plain.get("op")))
    if kind is None:
        raise ValueError(f"the step {plain.get('op')!r} is not one of {', '.join(STEP_KINDS)}")
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the step {plain['op']!r} has the options {sorted(names)}, not {sorted(plain)}")
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return kind(**options)
