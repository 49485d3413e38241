"""Samples that people's own functions give, as the fields that they declared. Workers; ``columns_of`` in the daemon too.

a tuple or list      values in the order of the fields
a dict               values by name; what is more in it is left out
anything else        the value itself, where there is one field
"""

from collections.abc import Mapping
from typing import Any

from batchd.functions.calls import FunctionFailed, NotAsDeclared, checked_value
from batchd.functions.signature import Given
from batchd.samples.columns import Column, parse_column
from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.code.options import GeneratorSource, PythonSource


def columns_of(fields: Mapping[str, str]) -> tuple[Column, ...]:
    """The columns that the fields of a source declare."""
    return tuple(parse_column(name, text) for name, text in fields.items())


def named(columns: tuple[Column, ...], given: Any) -> dict[str, Any]:
    """What was given for each field. Raises ``SampleUnreadable``."""
    if isinstance(given, Mapping):
        missing = [column.name for column in columns if column.name not in given]
        if missing:
            raise SampleUnreadable(f"there is no {missing[0]!r}, only {', '.join(map(repr, list(given)[:8]))}")
        return {column.name: given[column.name] for column in columns}
    if len(columns) == 1 and not (isinstance(given, tuple) and len(given) == 1):
        return {columns[0].name: given}
    if not isinstance(given, (tuple, list)) or len(given) != len(columns):
        what = f"{len(given)} values" if isinstance(given, (tuple, list)) else f"one {type(given).__name__}"
        raise SampleUnreadable(f"{what} instead of the {len(columns)} that fields declares")
    return {column.name: value for column, value in zip(columns, given, strict=True)}


def values_of(columns: tuple[Column, ...], given: Mapping[str, Any], max_bytes: int) -> dict[str, Value]:
    """The values as the columns hold them. Raises ``SampleUnreadable``."""
    try:
        values = {column.name: checked_value(column, given[column.name]) for column in columns}
    except (NotAsDeclared, FunctionFailed) as error:
        raise SampleUnreadable(str(error)) from None
    for name, value in values.items():
        if isinstance(value, memoryview) and value.nbytes > max_bytes:
            raise SampleUnreadable(f"{name!r} has {value.nbytes} bytes, more than max_bytes = {max_bytes}")
    return values


def source_given(source: PythonSource | GeneratorSource) -> Given:
    """What the function of a source is called with."""
    return Given(options=source.options, offered="rng" if isinstance(source, GeneratorSource) else "")
