"""The steps that drop and rename fields, as plain data. Daemon, workers and CLI."""

from typing import Annotated, Literal

from batchd.data.pipeline.options import FieldStep, StepOptions
from batchd.data.samples.checks import Example
from batchd.data.samples.columns import check_field_names
from batchd_wire.record import options


@options
class Drop(StepOptions):
    """Leave fields out of the batch. At least one must remain."""

    op: Literal["drop"] = "drop"
    fields: Annotated[tuple[str, ...], Example(["caption"])]
    """The fields that a batch shall not have."""

    def __post_init__(self) -> None:
        if not self.fields:
            raise ValueError("fields must not be empty")

    @property
    def touches(self) -> frozenset[str]:
        """The fields that go."""
        return frozenset(self.fields)


@options
class Rename(FieldStep):
    """Rename a field. It keeps its place among the others."""

    op: Literal["rename"] = "rename"
    field: Annotated[str, Example("fname")]
    """The present name of the field."""
    to: Annotated[str, Example("file")]
    """The new name of the field, in later steps and in the batch."""

    def __post_init__(self) -> None:
        check_field_names(self.to)
        if self.to == self.field:
            raise ValueError(f"to = {self.to!r} is what the field is called already")

    @property
    def touches(self) -> frozenset[str]:
        """The field by either name."""
        return frozenset({self.field, self.to})
