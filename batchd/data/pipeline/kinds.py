"""Every kind of step, and steps in messages. Daemon, workers, CLI; standard library only.

Invariant: ``step_from_plain(step_to_plain(step)) == step``, and the plain form is what msgpack and
JSON can carry.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

from batchd.data.pipeline.options import StepOptions
from batchd.data.samples.kinds import Kinds

CONTENT_VERSION = 4
"""Grows when the same steps, or the same plan, begin to give other bytes."""

STEP_KINDS = Kinds("batchd.data.pipeline", StepOptions, "op", first="image")
"""Every step by its ``op``."""


def import_families(module: str) -> None:
    """Import the ``module`` of each family ("effects" or "stages"), which registers its steps."""
    for kind in STEP_KINDS.values():
        import_family(kind, module)


def import_family(kind: type[StepOptions], module: str) -> None:
    """Import the ``module`` of the family of a step."""
    import_module(f"{kind.__module__.rpartition('.')[0]}.{module}")


def step_to_plain(step: StepOptions) -> dict[str, object]:
    """Write a step as msgpack and JSON can carry it; ``step_from_plain`` is the way back."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}
    return {**plain, **{name: str(path) for name, path in step.files.items()}}


def step_from_plain(plain: Mapping[str, object]) -> StepOptions:
    """Read what ``step_to_plain`` wrote: every option, nothing else. Raises ``ValueError``."""
    kind = STEP_KINDS.get(str(plain.get("op")))
    if kind is None:
        raise ValueError(f"the step {plain.get('op')!r} is not one of {', '.join(STEP_KINDS)}")
    names = {field.name for field in fields(kind)}
    if plain.keys() != names:
        raise ValueError(f"the step {plain['op']!r} has the options {sorted(names)}, not {sorted(plain)}")
    types = get_type_hints(kind)
    options: dict[str, object] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    paths = {name: Path(value) for name, value in options.items() if types[name] is Path and isinstance(value, str)}
    return kind(**options | paths)
