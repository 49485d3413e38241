"""The step that calls a user's function. Daemon, workers and CLI; standard library only."""

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from batchd.data.functions.find import parse_function
from batchd.data.pipeline.options import StepOptions
from batchd.data.samples.checks import Checks, Example
from batchd.data.samples.columns import check_types, parse_column
from batchd_wire.record import options


@options
class Call(StepOptions):
    """Call your own function with each sample.

    `fn(sample, rng)` gets a dict of all fields and a `numpy.random.Generator`, and returns a dict
    of those that it makes or changes. docs/steps.md says what it may do.
    """

    op: Literal["call"] = "call"
    """What the step does."""
    is_cacheable: ClassVar[bool] = False

    function: Annotated[str, Example("package.module:name")]
    """The function, as "package.module:name". It is imported in workers alone, from the folders of
    `python_path` in [daemon]."""

    outputs: Annotated[dict[str, str], Example({"score": "float32"})] = field(default_factory=dict)
    """The fields that it makes or changes, with their types: { image = "uint8[224,224,3]", score =
    "float32" }. When not set, it may change every field, and none changes its type."""

    random: bool = True
    """Whether it may give something else in another epoch. false promises that it does not, so that
    batches may be used again; `rng` is None then."""

    def __post_init__(self) -> None:
        checks = Checks()
        with checks.at("function"):
            parse_function(self.function)
        check_types(checks, "outputs", self.outputs)
        checks.done()

    @property
    def is_random(self) -> bool:
        """A function may be random, unless the user promises that it is not."""
        return self.random

    @property
    def fixes_shape(self) -> bool:
        """True if it changes its outputs alone, which have one shape."""
        outputs = [parse_column(name, text) for name, text in self.outputs.items()]
        return bool(outputs) and all(output.is_fixed for output in outputs)

    @property
    def changes(self) -> frozenset[str] | None:
        """A function may read every field, but changes only its outputs, if any are declared."""
        return frozenset(self.outputs) or None
