"""Every kind of step, and steps as messages carry them. All processes; standard library only.

Invariant: ``step_from_plain(step_to_plain(step)) == step``, and the plain form is what msgpack and
JSON can carry.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from batchd.pipeline.options import StepOptions
from batchd.samples.kinds import kinds_in

CONTENT_VERSION = 3
"""Grows when the same steps, or the same plan, begin to give other bytes."""

STEP_KINDS = kinds_in("batchd.pipeline", StepOptions, "op", first="image")
"""Every step by its ``op``."""


def import_families(module: str) -> None:
    """Import the ``module`` of each family ("effects" or "stages"), which registers its steps."""
    for family in dict.fromkeys(kind.__module__.rpartition(".")[0] for kind in STEP_KINDS.values()):
        import_module(f"{family}.{module}")


def step_to_plain(step: StepOptions) -> dict[str, object]:
    """Write a step as msgpack and JSON can carry it; ``step_from_plain`` is the way back."""
    return {name: _to_plain(value) for name, value in asdict(step).items()}


def step_from_plain(plain: Mapping[str, object]) -> StepOptions:
    """Read what ``step_to_plain`` wrote: every option, nothing else. Raises ``ValueError``."""
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
