"""Fields that a user declares for samples that have no shape of their own. Daemon, workers and CLI; standard library only.

fields = { image = "image", label = "int64" }      what a sample consists of, in the order of a batch
names  = { label = "class_id" }                    what the data calls a field, where that is something else
"""

from collections.abc import Mapping

from batchd.config.columns import Column, parse_column
from batchd.config.names import nearest


def declared_columns(fields: Mapping[str, str], *, with_shapes: bool = False) -> tuple[Column, ...]:
    """The columns of a sample. Raises ``ValueError`` where a field makes no sense, or none is declared.

    ``with_shapes``: does the data say the shapes of arrays itself, so that several lengths may differ?
    """
    if not fields:
        raise ValueError('fields must name at least one field, as in { image = "image", label = "int64" }')
    columns = tuple(parse_column(name, text) for name, text in fields.items())
    for column in columns:
        if column.name in ("index", "valid"):
            raise ValueError(
                f"every batch calls something else {column.name!r}; choose another name, and say the old in names"
            )
        if column.shape.count(None) > 1 and not with_shapes:
            raise ValueError(
                f'{column.name} = "{column.text}": one length may differ from sample to sample, not several'
            )
    return columns


def check_names(fields: Mapping[str, str], names: Mapping[str, str], **tables: Mapping[str, object]) -> None:
    """Raise ``ValueError`` for an empty name, or with all that ``names`` and other ``tables`` have that is no field."""
    check_known(fields, names=names, **tables)
    for field, name in names.items():
        if not name:
            raise ValueError(f"names.{field} must not be empty")


def check_known(fields: Mapping[str, str], **tables: Mapping[str, object]) -> None:
    """Raise ``ValueError`` with every name in one of the ``tables``, by their keys, that is none of the fields."""
    unknown = [
        f"{key} has {name!r}, which is none of the fields {', '.join(fields)}"
        + (f"; did you mean {meant}?" if meant else "")
        for key, table in tables.items()
        for name in table
        if name not in fields
        for meant in [nearest(name, fields)]
    ]
    if unknown:
        raise ValueError("; ".join(unknown))
