"""Call a user's function with each sample. Worker process.

    fields of the sample --copied--> function(sample, rng) --checked--> fields

Arrays, lists and dicts are copies, so a function may keep them. It may write into those that it
may change: the outputs, or all where none are declared. Other arrays are read-only, so that nothing
changes that is not declared.

Invariant: afterwards each field is what its column says, or the sample is bad.
"""

from collections.abc import Iterable
from copy import deepcopy
from sys import getrefcount
from typing import Any

import numpy as np

from batchd.data.functions.load import FunctionFailed, NotAsDeclared, call, checked_value, load_for
from batchd.data.pipeline.call.effects import ARGUMENTS
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.effects import Columns
from batchd.data.pipeline.randomness import SampleRandom
from batchd.data.pipeline.stages import Row, make_stage
from batchd.data.samples.errors import SampleUndecodable
from batchd.data.samples.values import Value
from batchd_wire.views import Array

_CHANGEABLE = (np.ndarray, list, dict)
_KNOWN_REFERENCES = 3
"""The table's, the variable's and the argument's; a view refers to the owner of its memory."""


@make_stage.register(Call)
class CallStage:
    """See the module. Raises ``FunctionUnusable`` where the function cannot be used."""

    def __init__(self, step: Call, before: Columns, after: Columns) -> None:
        self._name = step.function
        self._function = load_for(step.function, ARGUMENTS)
        self._is_random = step.random
        self._fields = tuple(before)
        self._changing = {name: after[name] for name in step.outputs or before}
        self._outputs = step.outputs
        self._of_same_type = {name for name in before if before[name].text == after[name].text}
        self._followed = [name for name in self._changing if name in before and before[name].followers]
        self._copies: dict[str, Array] = {}
        """Memory for copies, reused unless the function keeps it: new memory costs more."""

    def __call__(self, values: dict[str, Value], random: SampleRandom, _row: Row) -> None:
        """Replace the fields that the function makes or changes."""
        given = {name: self._given(name, values[name]) for name in self._fields}
        kept = dict(given)
        sizes = {name: _size(given[name]) for name in self._followed}
        if self._is_random and random.draws is not None:
            random.draws.append({"numbers": "its own"})
        try:
            made = call(self._function, given, random.generator if self._is_random else None)
            values.update(self._checked(made, kept))
        except FunctionFailed as error:
            raise SampleUndecodable(f"{self._name}: {error}") from None
        except NotAsDeclared as error:
            raise SampleUndecodable(self._misfit(error)) from None
        for name, size in sizes.items():
            if _size(values[name]) != size:
                raise SampleUndecodable(
                    f"{self._name} changed the size of {name!r}, but the mask, boxes or points that follow it would not move"
                )

    def _misfit(self, error: NotAsDeclared) -> str:
        """Say which type the function gives, and which line of the step would declare it."""
        if error.column is None:
            return f"{self._name} gives another type than is declared: {error}"
        name, declared, found = error.column.name, error.column.text, error.found
        dtype, _bracket, shape = declared.partition("[")
        wanted = dtype if found.partition("[")[2] == shape else declared
        outputs = ", ".join(f'{key} = "{text}"' for key, text in {**self._outputs, name: found}.items())
        return (
            f"{self._name} changes {name!r} from {declared} to {found}; return {wanted}, or declare "
            f"outputs = {{ {outputs} }}"
        )

    def _given(self, name: str, value: Value) -> object:
        """Return what the function gets of a field, which the next sample does not overwrite."""
        if isinstance(value, memoryview):
            return bytes(value)
        if not isinstance(value, np.ndarray):
            return deepcopy(value)
        given = self._copied(name, value)
        if name not in self._changing:
            given.flags.writeable = False
        return given

    def _copied(self, name: str, value: Array) -> Array:
        """Copy an array; a function that keeps the copy, or any view of it, keeps its memory."""
        owner = self._copies.get(name)
        if (
            owner is None
            or owner.shape != value.shape
            or owner.dtype != value.dtype
            or getrefcount(owner) > _KNOWN_REFERENCES
        ):
            owner = self._copies[name] = np.empty_like(value, order="C", subok=False)
        np.copyto(owner, value)
        return owner.view()

    def _checked(self, made: object, given: dict[str, object]) -> dict[str, Value]:
        if not isinstance(made, dict):
            raise SampleUndecodable(f"{self._name} returned {type(made).__name__} instead of a dict of fields")
        missing = self._outputs.keys() - made.keys()
        if missing:
            raise SampleUndecodable(f"{self._name} did not return {_listed(missing)}, which its outputs declare")
        undeclared = [
            name for name, value in made.items() if name not in self._changing and value is not given.get(name, made)
        ]
        if undeclared:
            raise SampleUndecodable(f"{self._name} returned {_listed(undeclared)}, which its outputs do not declare")
        checked: dict[str, Value] = {}
        for name, column in self._changing.items():
            if name in made:
                value = made[name]
                is_as_given = name in self._of_same_type and value is given[name] and not isinstance(value, _CHANGEABLE)
                checked[name] = value if is_as_given else checked_value(column, value)
        return checked


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(repr(name) for name in names))


def _size(image: Any) -> tuple[int, ...]:
    size: tuple[int, ...] = np.shape(image)[:2]
    return size
