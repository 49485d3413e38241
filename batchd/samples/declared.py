"""Fields that a user declares for samples that have no shape of their own. Daemon, workers and CLI; standard library only.

fields = { image = "image", label = "int64" }      what a sample consists of, in the order of a batch
names  = { label = "class_id" }                    what the data calls a field, where that is something else

Invariant: of a field that is wrong in itself nothing else is said.
"""

from collections.abc import Mapping

from batchd.samples.checks import Checks
from batchd.samples.columns import Column, parse_column
from batchd.suggestions import nearest


def declared_columns(fields: Mapping[str, str], *, with_shapes: bool = False) -> tuple[Column, ...]:
    """The columns of a sample. Raises ``ValueError`` with all fields that make no sense, or where none is declared.

    ``with_shapes``: does the data say the shapes of arrays itself, so that several lengths may
    differ?
    """
    checks = Checks()
    columns = check_declared(checks, fields, with_shapes=with_shapes)
    checks.done()
    return columns


def check_declared(checks: Checks, fields: Mapping[str, str], *, with_shapes: bool = False) -> tuple[Column, ...]:
    """The columns of the fields that make sense; ``checks`` are told of the others. ``with_shapes`` as above."""
    if not fields:
        checks.say('fields must name at least one field, as in { image = "image", label = "int64" }', "fields")
    columns = check_types(checks, "fields", fields)
    usable = []
    for column in columns:
        if column.name in ("index", "valid"):
            text = f"every batch calls something else {column.name!r}; choose another name, and say the old in names"
            checks.say(text, "fields", column.name)
        elif column.shape.count(None) > 1 and not with_shapes:
            text = f'{column.name} = "{column.text}": one length may differ from sample to sample, not several'
            checks.say(text, "fields", column.name)
        else:
            usable.append(column)
    return tuple(usable)


def check_types(checks: Checks, key: str, fields: Mapping[str, str]) -> tuple[Column, ...]:
    """The columns of the fields in the table ``key`` whose types are types; ``checks`` are told of the others."""
    columns = []
    for name, text in fields.items():
        with checks.at(key, name):
            columns.append(parse_column(name, text))
    return tuple(columns)


def check_names(
    checks: Checks, fields: Mapping[str, str], names: Mapping[str, str], **tables: Mapping[str, object]
) -> None:
    """Tell ``checks`` of empty names, and of all that ``names`` and other ``tables`` have that is no field."""
    check_known(checks, fields, names=names, **tables)
    for field, name in names.items():
        if field in fields and not name:
            checks.say(f"names.{field} must not be empty", "names", field)


def check_known(checks: Checks, fields: Mapping[str, str], **tables: Mapping[str, object]) -> None:
    """Tell ``checks`` of every name in one of the ``tables``, by their keys, that is none of the fields."""
    for key, table in tables.items():
        for name in table if fields else ():
            if name not in fields:
                meant = nearest(name, fields)
                advice = f"; did you mean {meant}?" if meant else ""
                checks.say(f"{key} has {name!r}, which is none of the fields {', '.join(fields)}{advice}", key, name)
