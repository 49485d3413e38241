"""A quick look at a source and at all that it is made of, each by itself. The daemon at its start, and ``batchd check``.

What is wrong is told at its own key, and once: a part whose columns nobody knows does not hide those of the others, nor is
anything told that follows from it.

Invariant: a source without problems has columns.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from batchd.config.columns import Column
from batchd.config.composed_sources import SubsetSource, UnreadSource, parts_of
from batchd.config.lines import KeyPath
from batchd.config.source import SourceOptions
from batchd.errors import SourceInvalid
from batchd.sources.kinds import BuiltInKind, SourceProblem, kind_of
from batchd.sources.parts import agreed_columns
from batchd.storage.access import Storage

_ABSENT = re.compile(r"^there is no (file|folder) | is no (file|folder|regular file)$| is not readable for this user$")


class Look(NamedTuple):
    """What a look at a source gives; ``columns`` is None where nobody can tell them."""

    columns: tuple[Column, ...] | None
    problems: tuple[SourceProblem, ...]


def look_at(source: SourceOptions | UnreadSource, storage: Storage, *, thoroughly: bool = True) -> Look:
    """Look at a source without scanning it. Not ``thoroughly``: find its columns alone, and what is wrong with these."""
    parts = [(key, look_at(part, storage, thoroughly=thoroughly)) for key, part in parts_of(source)]
    problems = [SourceProblem((*key, *one.key), one.text) for key, look in parts for one in look.problems]
    if parts or isinstance(source, UnreadSource):
        columns, own = _of_parts(source, [look for _key, look in parts], storage, thoroughly=thoroughly)
    else:
        columns, own = _by_itself(source, storage, thoroughly=thoroughly)
    return Look(columns, (*problems, *own))


def _by_itself(
    source: SourceOptions, storage: Storage, *, thoroughly: bool
) -> tuple[tuple[Column, ...] | None, list[SourceProblem]]:
    problems: list[SourceProblem] = []
    try:
        kind = kind_of(source)
        if thoroughly:
            problems = _told(source, kind, storage)
        return kind.columns(source, storage), problems
    except SourceInvalid as error:
        return None, problems or [SourceProblem(_key_of(source, str(error)), str(error))]


def _of_parts(
    source: SourceOptions | UnreadSource, looks: list[Look], storage: Storage, *, thoroughly: bool
) -> tuple[tuple[Column, ...] | None, list[SourceProblem]]:
    """The columns that the parts agree on, as far as they are known, and what is wrong besides the parts."""
    problems: list[SourceProblem] = []
    if thoroughly and isinstance(source, SourceOptions):
        problems = _told(source, kind_of(source), storage)
    known = {number: look.columns for number, look in enumerate(looks) if look.columns is not None}
    if not known:
        return None, problems
    try:
        return agreed_columns(known, getattr(source, "source_field", "")), problems
    except SourceInvalid as error:
        if isinstance(source, SourceOptions):
            problems.append(SourceProblem((), str(error)))
        return None, problems


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
