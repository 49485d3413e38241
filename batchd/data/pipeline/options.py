"""The common base of all steps of a pipeline, every kind of step, and steps in messages.

Daemon, workers and CLI; standard library only.

Invariant: ``step_from_plain(step_to_plain(step)) == step``, and the plain form is what msgpack and
JSON can carry.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args, get_origin, get_type_hints

from batchd.data.samples.checks import Range
from batchd.data.samples.kinds import Kinds
from batchd.errors import KeyPath

CONTENT_VERSION = 4
"""Grows when the same steps, or the same plan, begin to give other bytes."""
SIDE_PIXELS_MAX = 16_384
FILE_BYTES_MAX = 1 << 32

Interpolation: TypeAlias = Literal["auto", "nearest", "linear", "area", "cubic", "lanczos"]


Side: TypeAlias = Annotated[int, Range(1, SIDE_PIXELS_MAX)]
Size: TypeAlias = tuple[Side, Side]


class StepOptions:
    """Base of the steps: a key that is no option is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}
    __dataclass_fields__: ClassVar[dict[str, Any]]
    """Every step is a dataclass."""

    op: str
    """The step's name."""

    later: ClassVar[frozenset[str]] = frozenset()
    """Options that an older version did not have: at its default, one is in no fingerprint."""

    @property
    def unsaid(self) -> frozenset[str]:
        """The ``later`` options that change no bytes as they are."""
        options = (option for option in fields(self) if option.name in self.later)
        return frozenset(option.name for option in options if getattr(self, option.name) == option.default)

    keeps_length: ClassVar[bool] = False
    """Whether the first dimension of its field stays as long as it is."""

    shares_decoding: ClassVar[bool] = False
    """Whether neighbours in the source may have something in common that is decoded once."""

    @property
    def keeps_pixels(self) -> bool:
        """Whether no image in its field gets more pixels."""
        return False

    @property
    def is_cacheable(self) -> bool:
        """Whether a cache of decoded samples may keep what the step makes, unless ``is_random``."""
        return True

    @property
    def is_random(self) -> bool:
        """Whether the step can make different values of one sample."""
        return False

    @property
    def draws_shape(self) -> bool:
        """Whether a sample can get another shape each time, and not other values alone."""
        return self.is_random and not self.keeps_length

    @property
    def fixes_shape(self) -> bool:
        """Whether each value of its field has one shape then, whatever it had."""
        return False

    @property
    def inner_steps(self) -> Mapping[KeyPath, "StepOptions"]:
        """The steps that are options of this one, by their keys."""
        return {}

    @property
    def touches(self) -> frozenset[str] | None:
        """The fields of a sample that the step reads or makes; None for all of them."""
        return None

    @property
    def changes(self) -> frozenset[str] | None:
        """The fields that the step may change or make; None for all of them."""
        return self.touches

    @property
    def libraries(self) -> tuple[str, ...]:
        """The distributions whose versions decide bytes: other versions may decode others."""
        return ()

    @property
    def files(self) -> dict[str, Path]:
        """The files and folders that the step reads, by option; content decides bytes, no path."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Path)}

    @property
    def folders(self) -> frozenset[str]:
        """Those of ``files`` that are folders: all that is below them decides bytes."""
        return frozenset()


def with_inner(steps: Mapping[KeyPath, StepOptions]) -> dict[KeyPath, StepOptions]:
    """Steps by their keys, each followed by the steps inside it."""
    found: dict[KeyPath, StepOptions] = {}
    for key, step in steps.items():
        found[key] = step
        found |= {(*key, *inner): one for inner, one in step.inner_steps.items()}
    return found


class FieldStep(StepOptions):
    """Base of the steps on one field."""

    __slots__ = ()

    is_for_each: ClassVar[bool] = False
    """Whether the step is done to each value of a list."""
    field: str
    """Name of the field that the step changes."""

    @property
    def touches(self) -> frozenset[str]:
        """The field, and those that the step makes."""
        return frozenset({self.field})


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
    return plain_options(step, step_to_plain)


def plain_options(table: Any, inner: Callable[[StepOptions], object]) -> dict[str, object]:
    """Write the options of a step; ``inner`` writes the steps among them."""
    return {option.name: _plain(getattr(table, option.name), inner) for option in fields(table)}


def _plain(value: object, inner: Callable[[StepOptions], object]) -> object:
    if isinstance(value, StepOptions):
        return inner(value)
    if is_dataclass(value):
        return plain_options(value, inner)
    if isinstance(value, Mapping):
        return {name: _plain(item, inner) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item, inner) for item in value]
    return str(value) if isinstance(value, Path) else value


def step_from_plain(plain: Mapping[str, object]) -> StepOptions:
    """Read what ``step_to_plain`` wrote: every option, nothing else. Raises ``ValueError``."""
    kind = STEP_KINDS.get(str(plain.get("op")))
    if kind is None:
        raise ValueError(f"the step {plain.get('op')!r} is not one of {', '.join(STEP_KINDS)}")
    return kind(**_restored_options(kind, plain, f"the step {plain['op']!r}"))


def _restored_options(kind: type, plain: Mapping[str, object], named: str) -> dict[str, Any]:
    types = {option.name: None for option in fields(kind)}
    if plain.keys() != types.keys():
        raise ValueError(f"{named} has the options {sorted(types)}, not {sorted(plain)}")
    types |= get_type_hints(kind)
    return {name: _restored(types[name], value) for name, value in plain.items()}


def _restored(hint: Any, value: Any) -> Any:
    """A value of the type that an option has: the way back from ``_plain``."""
    if isinstance(value, Mapping):
        if hint is StepOptions:
            return step_from_plain(value)
        if isinstance(hint, type) and is_dataclass(hint):
            return hint(**_restored_options(hint, value, hint.__name__))
        inner = get_args(hint)[1:] or (None,)
        return {name: _restored(inner[0], item) for name, item in value.items()}
    if isinstance(value, list):
        inner = get_args(hint) if get_origin(hint) is tuple else (None,)
        return tuple(_restored(inner[0], item) for item in value)
    choices = (hint, *get_args(hint))
    is_path = Path in choices and not any(value in get_args(choice) for choice in choices[1:])
    return Path(value) if is_path and isinstance(value, str) else value
