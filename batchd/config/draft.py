"""Reads the valid parts of an invalid configuration. Daemon and CLI.

    source = { type = "concat", sources = [{ type = "folder", path = "a" }, { type = "foldr" }] }
    pipeline = [{ op = "decode" }, { op = "resize", sise = [8, 8] }]

give the folder, and Decode with a gap behind it. So a mistake in one place does not hide mistakes
in others: all parts that are read here are checked further. Each key is validated by itself, and
the valid ones of a table are compared with each other.

Invariant: of a source or a step with wrong options, only the fields that it may be about are
guessed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from batchd.config.synonyms import key_misspelt
from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.data.pipeline.options import STEP_KINDS, StepOptions
from batchd.data.samples.kinds import OneOf
from batchd.data.sources.options import SOURCE_KINDS, SourceOptions
from batchd.errors import KeyPath
from batchd.runtime.suggestions import nearest

_LATER = ConfigDict(defer_build=True)
"""Built at the first use: a daemon with a valid configuration never needs it."""
_SOURCE: TypeAdapter[SourceOptions] = TypeAdapter(Annotated[SourceOptions, OneOf(SOURCE_KINDS, "type")], config=_LATER)
_STEP: TypeAdapter[StepOptions] = TypeAdapter(Annotated[StepOptions, OneOf(STEP_KINDS, "op")], config=_LATER)
_T = TypeVar("_T")
_MADE_WITH = ("", "_mask", "_length", "_shape")
"""Endings of the fields that a step makes beside the one that it names."""
_NAMING = ("field", "to", "mask", "boxes", "points")


class Gap(NamedTuple):
    """A step with wrong options."""

    op: str
    field: str | None = None
    """Its field, if it has the key."""
    touches: frozenset[str] | None = None
    """The fields that it may read or make; None for any."""


class StreamDraft(NamedTuple):
    """The valid parts of a stream."""

    sources: Sequence[tuple[KeyPath, SourceOptions]]
    """The source with the key (), or its valid parts, each with its key in the source."""
    source_fields: Sequence[str]
    """The fields that sources with wrong options add to those of their parts."""
    steps: Mapping[int, StepOptions]
    """By their index in the pipeline."""
    gaps: Mapping[int, Gap]
    """The other steps."""
    conflicts: Sequence[tuple[KeyPath, str]]
    """Problems between the valid keys of the stream, and of its sources, each with its key."""
    data: Mapping[str, object]
    """The table of the stream."""


def whole_draft(stream: StreamConfig) -> StreamDraft:
    """The draft of a valid stream."""
    steps = dict(enumerate(stream.pipeline))
    return StreamDraft((((), stream.source),), (), steps, {}, (), stream.model_dump(mode="json"))


def stream_drafts(data: Mapping[str, object]) -> dict[str, StreamDraft]:
    """The valid parts of each stream, by name."""
    streams = data.get("streams")
    tables = streams.items() if isinstance(streams, dict) else ()
    return {name: _stream_draft(table) for name, table in tables if isinstance(table, dict)}


def _stream_draft(given: Mapping[str, object]) -> StreamDraft:
    table = _with_doubts(given)
    sources = _Sources([], [], [])
    source = _read_source((), table.get("source"), sources)
    conflicts = [*_stream_conflicts(table, source), *sources.conflicts]
    items = table.get("pipeline", [])
    read = {place: _read(_STEP, item) for place, item in enumerate(items)} if isinstance(items, list) else {0: None}
    steps = {place: step for place, step in read.items() if step is not None}
    gaps = {place: _gap(items[place] if isinstance(items, list) else None) for place in read.keys() - steps.keys()}
    return StreamDraft(sources.valid, sources.fields, steps, gaps, conflicts, table)


def _with_doubts(table: Mapping[str, object]) -> Mapping[str, object]:
    """The table with None, a wrong value, for each key that is misspelt, so that none is missed.

    The value under the wrong key is of no use: paths in it are not relative to the file.
    """
    known = list(StreamConfig.model_fields)
    meant = [key_misspelt(name, known) for name in table if name not in known]
    return dict.fromkeys(key for key in meant if key is not None) | dict(table)


def _stream_conflicts(table: Mapping[str, object], source: SourceOptions | None) -> list[tuple[KeyPath, str]]:
    """Problems between the valid keys of a stream."""
    values = _valid_values(StreamConfig, StreamConfig.model_fields, table)
    if source is not None:
        values["source"] = source
    stream = StreamConfig.model_construct(set(values), **values)
    for key in table.keys() - values.keys():  # a default in its place would have its own conflicts
        stream.__dict__.pop(key, None)
    return list(stream.checked(is_partial=True).found.items())


def daemon_draft(data: Mapping[str, object]) -> tuple[DaemonConfig, frozenset[str]]:
    """[daemon] with defaults for its wrong keys, and those keys."""
    table = data.get("daemon")
    if not isinstance(table, dict):
        return DaemonConfig(), frozenset(DaemonConfig.model_fields)
    values = _valid_values(DaemonConfig, DaemonConfig.model_fields, table)
    return DaemonConfig.model_construct(**values), frozenset(table.keys() - values.keys())


class _Sources(NamedTuple):
    """What is read of the source of a stream, and of its parts: see ``StreamDraft``."""

    valid: list[tuple[KeyPath, SourceOptions]]
    fields: list[str]
    conflicts: list[tuple[KeyPath, str]]


def _read_source(key: KeyPath, table: object, sources: _Sources) -> SourceOptions | None:
    """Add a source, or its valid parts; returns it without its wrong keys, None: of no kind."""
    source = _read(_SOURCE, table)
    if source is not None:
        sources.valid.append((key, source))
    elif isinstance(table, dict):
        added = table.get("source_field")
        if isinstance(added, str) and added:
            sources.fields.append(added)
        source, conflicts = _partial_source(table)
        sources.conflicts.extend((("source", *key, *inner), text) for inner, text in conflicts)
        for inner, part in _parts(table):
            _read_source((*key, *inner), part, sources)
    return source


def _partial_source(table: Mapping[str, object]) -> tuple[SourceOptions | None, list[tuple[KeyPath, str]]]:
    """A source without its wrong keys, None: of no kind; and the problems between the others.

    These take a wrong key for one that is not given, so a required one is not there.
    """
    name = table.get("type")
    kind = SOURCE_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        return None, []
    given = _valid_values(kind, [option.name for option in fields(kind)], table)
    source = object.__new__(kind)
    for option in fields(kind):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        value = given.get(option.name, default)
        if value is not MISSING:
            object.__setattr__(source, option.name, value)
    found = source.checked(is_partial=True).found
    conflicts = [(key, text) for key, text in found.items() if key and key[0] in given]
    wrong = table.keys() - given.keys() | {key[0] for key, _text in conflicts}
    for option in fields(kind):
        if option.name in wrong and hasattr(source, option.name):
            object.__delattr__(source, option.name)
    return source, conflicts


def _parts(source: Mapping[str, object]) -> list[tuple[KeyPath, object]]:
    """The sources that a source is made of, each with its key."""
    several = source.get("sources")
    if isinstance(several, list):
        return [(("sources", number), part) for number, part in enumerate(several)]
    return [(("of",), source.get("of"))]


def _gap(data: object) -> Gap:
    """The fields that a step may be about, by its keys and by the defaults of its kind."""
    table = data if isinstance(data, dict) else {}
    op = str(table.get("op"))
    kind = STEP_KINDS.get(nearest(op, STEP_KINDS) or "")
    if not isinstance(table.get("op"), str) or kind is None or kind is STEP_KINDS["call"]:
        return Gap(op)
    defaults = {option.name: option.default for option in fields(kind)}
    given = [table.get(name, defaults.get(name)) for name in _NAMING]
    into, listed = table.get("into"), table.get("fields", ())
    given += into if isinstance(into, dict) else ()
    names = [name for name in [*given, *(listed if isinstance(listed, list) else [listed])] if isinstance(name, str)]
    if not names:
        return Gap(op)
    touches = frozenset(f"{name}{ending}" for name in names for ending in _MADE_WITH)
    field = table.get("field", defaults.get("field"))
    return Gap(op, field if isinstance(field, str) else None, touches)


@cache
def _adapter(kind: type, key: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(kind, include_extras=True)[key])


def _valid_values(kind: type, keys: Iterable[str], table: Mapping[str, object]) -> dict[str, Any]:
    """The values in a table that are valid by themselves."""
    read = {key: _read(_adapter(kind, key), table[key]) for key in keys if key in table}
    return {key: value for key, value in read.items() if value is not None}


def _read(adapter: TypeAdapter[_T], data: object) -> _T | None:
    """``data`` as the adapter's type; None if it is invalid."""
    try:
        return adapter.validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError:
        return None
