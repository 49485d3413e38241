"""A quick look at a source and at all that it is made of, each by itself. The daemon at its start, and ``batchd check``.

What is wrong is told at its own key, and once: a part whose columns nobody knows does not hide
those of the others, nor is anything told that follows from it.

Invariant: a source without problems has columns.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from batchd.errors import KeyPath, SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.composed.options import SubsetSource, parts_of
from batchd.sources.composed.scan import agreed_columns
from batchd.sources.interface import BuiltInKind, SourceProblem, kind_of
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage

_ABSENT = re.compile(r"^there is no (file|folder) | is no (file|folder|regular file)$| is not readable for this user$")


class Look(NamedTuple):
    """What a look at a source gives; ``columns`` is None where nobody can tell them."""

    columns: tuple[Column, ...] | None
    problems: tuple[SourceProblem, ...]


def look_at(source: SourceOptions, storage: Storage, *, thoroughly: bool = True) -> Look:
    """Look at a source without scanning it. Not ``thoroughly``: find its columns alone, and what is wrong with these."""
    parts = [(key, look_at(part, storage, thoroughly=thoroughly)) for key, part in parts_of(source)]
    problems = [SourceProblem((*key, *one.key), one.text) for key, look in parts for one in look.problems]
    columns = None
    own: list[SourceProblem] = []
    try:
        kind = kind_of(source)
        if thoroughly:
            own = _told(source, kind, storage)
        looks = [look for _key, look in parts]
        columns = known_columns(looks, getattr(source, "source_field", "")) if parts else kind.columns(source, storage)
    except SourceInvalid as error:
        if parts or not own:
            own.append(SourceProblem(_key_of(source, str(error)), str(error)))
    return Look(columns, (*problems, *own))


def known_columns(looks: Sequence[Look], source_field: str = "") -> tuple[Column, ...] | None:
    """The columns that several sources agree on, as far as these are known. Raises ``SourceInvalid`` where they do not."""
    known = {number: look.columns for number, look in enumerate(looks) if look.columns is not None}
    return agreed_columns(known, source_field) if known else None


def _told(source: SourceOptions, kind: BuiltInKind, storage: Storage) -> list[SourceProblem]:
    """What a kind says of a source, each with its key; its columns may be known all the same."""
    try:
        told = kind.problems(source, storage)
    except SourceInvalid as error:
        told = [str(error)]
    return [SourceProblem(_key_of(source, one), one) if isinstance(one, str) else one for one in told]


def _key_of(source: SourceOptions, text: str) -> KeyPath:
    """The option whose path is not what it should be; the source as a whole where it is about something else, or files below."""
    kind: Any = type(source)
    if not _ABSENT.search(text) and not isinstance(source, SubsetSource):
        return ()
    named = {
        name: str(path)
        for name in (field.name for field in fields(kind))
        if isinstance(path := getattr(source, name), Path) and re.search(rf"{re.escape(str(path))}([ :]|$)", text)
    }
    return (max(named, key=lambda name: len(named[name])),) if named else ()
