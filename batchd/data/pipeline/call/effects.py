"""The effect of a step that calls a user's function: what it declares. Daemon, workers, CLI."""

from dataclasses import replace

from batchd.data.functions.find import CallArguments
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.effects import RESERVED, Columns, StepInvalid, effect
from batchd.data.samples.columns import Column, parse_column

ARGUMENTS = CallArguments(places=("sample", "rng"))
"""The arguments of a ``call`` step's function."""


@effect.register
def _call(step: Call, columns: Columns) -> Columns:
    for name in step.outputs:
        if name in RESERVED:
            raise StepInvalid(f'"call" cannot make a field {name!r}, which is what every batch calls something else')
    if not step.outputs:
        return {name: replace(column, made_by=step.op) for name, column in columns.items()}
    made = {name: _declared(step, parse_column(name, text), columns.get(name)) for name, text in step.outputs.items()}
    return {**columns, **made}


def _declared(step: Call, declared: Column, there: Column | None) -> Column:
    """An output that exists keeps what its type does not say: channels first, followers."""
    if there is None:
        return replace(declared, made_by=step.op)
    if there.followers and there.is_fixed and declared.is_fixed and there.shape[:2] != declared.shape[:2]:
        names = " and ".join(repr(name) for _role, name in there.followers)
        raise StepInvalid(
            f'"call" changes {there.name!r} from {there.text} to {declared.text}, and unlike steps on images it does not '
            f"move {names} with it"
        )
    keeps_axes = len(there.shape) == len(declared.shape) and there.shape[:1] == declared.shape[:1]
    return replace(
        there,
        kind=declared.kind,
        dtype=declared.dtype,
        shape=declared.shape,
        channels_first=there.channels_first and keeps_axes,
        made_by=step.op,
    )
