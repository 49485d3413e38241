"""Reads the valid parts of an invalid configuration. Daemon and CLI.

    source = { type = "concat", sources = [{ type = "folder", path = "a" }, { type = "foldr" }] }
    pipeline = [{ op = "decode" }, { op = "resize", sise = [8, 8] }]

give the folder, and Decode with a gap behind it. So a mistake in one place does not hide mistakes
in others: all parts that are read here are checked further.

Invariant: of a source or a step with wrong options, only the fields that it may be about are
guessed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from batchd.config.schema import item_at
from batchd.config.tree import DaemonConfig, Mark, StreamConfig, keys_marked
from batchd.data.pipeline.kinds import STEP_KINDS
from batchd.data.pipeline.options import StepOptions
from batchd.data.samples.checks import OptionsInvalid
from batchd.data.samples.kinds import OneOf
from batchd.data.sources.kinds import SOURCE_KINDS
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.push.options import CAPACITY_MAX
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
_STAND_INS: Mapping[str, object] = {"path": "anywhere", "root": "anywhere", "shards": ["any"], "function": "any:thing"}
"""Values for required keys of sources that are wrong or missing."""


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
    data: Mapping[str, object]
    """The table of the stream."""


def whole_draft(stream: StreamConfig) -> StreamDraft:
    """The draft of a valid stream."""
    return StreamDraft((((), stream.source),), (), dict(enumerate(stream.pipeline)), {}, stream.model_dump(mode="json"))


def stream_drafts(data: Mapping[str, object]) -> dict[str, StreamDraft]:
    """The valid parts of each stream, by name."""
    return {name: _stream_draft(table) for name, table in _tables(data)}


def _tables(data: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    streams = data.get("streams")
    tables = streams.items() if isinstance(streams, dict) else ()
    return [(name, table) for name, table in tables if isinstance(table, dict)]


def _stream_draft(table: Mapping[str, object]) -> StreamDraft:
    sources: list[tuple[KeyPath, SourceOptions]] = []
    source_fields: list[str] = []
    _read_source((), table.get("source"), sources, source_fields)
    items = table.get("pipeline", [])
    read = {place: _read(_STEP, item) for place, item in enumerate(items)} if isinstance(items, list) else {0: None}
    steps = {place: step for place, step in read.items() if step is not None}
    gaps = {place: _gap(items[place] if isinstance(items, list) else None) for place in read.keys() - steps.keys()}
    return StreamDraft(sources, source_fields, steps, gaps, table)


def daemon_draft(data: Mapping[str, object]) -> tuple[DaemonConfig, frozenset[str]]:
    """[daemon] with defaults for its wrong keys, and those keys."""
    table = data.get("daemon")
    if isinstance(table, dict):
        wrong = _wrong_keys(DaemonConfig.model_validate_json, table)
        kept = {key: value for key, value in table.items() if key not in wrong}
        with suppress(ValidationError):
            return DaemonConfig.model_validate_json(json.dumps(kept, default=str), strict=True), wrong
    return DaemonConfig(), frozenset(DaemonConfig.model_fields)


def hidden_problems(data: Mapping[str, object]) -> list[tuple[KeyPath, str]]:
    """Problems of streams that pydantic finds only once other keys are right, each with its key."""
    return [
        (("streams", name, *key), text)
        for name, table in _tables(data)
        for key, text in [*_hidden_in_stream(table), *_hidden_in_source(("source",), table.get("source"))]
    ]


def _hidden_in_stream(table: Mapping[str, object]) -> list[tuple[KeyPath, str]]:
    """Conflicts between the keys of a stream; keys that are wrong get plain values meanwhile."""
    table = {**table, "pipeline": []}
    wrong = _wrong_keys(StreamConfig.model_validate_json, table)
    if "lag" in wrong or item_at(table.get("source"), "type") not in SOURCE_KINDS:
        table.pop("max_skew", None)
    cache_keys = {"cache", *keys_marked(Mark.OF_CACHE, StreamConfig)}
    if wrong & cache_keys:
        table = {key: value for key, value in table.items() if key not in cache_keys}
    stand_ins: dict[str, object] = {"batch_size": 1, "source": _like(table.get("source"))}
    kept = {key: value for key, value in table.items() if key not in wrong}
    kept |= {key: value for key, value in stand_ins.items() if key in wrong}
    return _wrong_together(StreamConfig.model_validate_json, kept)


def _like(source: object) -> dict[str, object]:
    """A valid source that allows the same keys of the stream as ``source``."""
    push: dict[str, object] = {"type": "push", "fields": {"x": "int64"}}
    match source:
        case {"type": "generator"}:
            return {"type": "generator", "function": "any:thing", "fields": {"x": "int64"}}
        case {"type": "push", "capacity": capacity}:
            given = {**push, "capacity": capacity}
            return given if _read(_SOURCE, given) else {**push, "capacity": CAPACITY_MAX}
        case {"type": "push"}:
            return push
    return {"type": "folder", "path": "anywhere"}


def _hidden_in_source(key: KeyPath, source: object) -> list[tuple[KeyPath, str]]:
    """Problems between the valid keys of a source, and of its parts."""
    if not isinstance(source, dict):
        return []
    wrong = _wrong_keys(_SOURCE.validate_json, source)
    kept = {name: value for name, value in source.items() if name not in wrong}
    stand_ins = {name: value for name, value in _STAND_INS.items() if name in wrong}
    found = _wrong_together(_SOURCE.validate_json, {**kept, **stand_ins}) if wrong else []
    return [
        *(((*key, *inner), text) for inner, text in found if inner and inner[0] in kept),
        *(problem for inner, part in _parts(source) for problem in _hidden_in_source((*key, *inner), part)),
    ]


def _parts(source: Mapping[str, object]) -> list[tuple[KeyPath, object]]:
    """The sources that a source is made of, each with its key."""
    several = source.get("sources")
    if isinstance(several, list):
        return [(("sources", number), part) for number, part in enumerate(several)]
    return [(("of",), source.get("of"))]


def _errors(validate: Callable[..., object], table: Mapping[str, object]) -> list[ErrorDetails]:
    try:
        validate(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        return error.errors()
    return []


def _wrong_keys(validate: Callable[..., object], table: Mapping[str, object]) -> frozenset[str]:
    """The keys of a table that are wrong by themselves."""
    return frozenset(str(details["loc"][0]) for details in _errors(validate, table) if details["loc"])


def _wrong_together(validate: Callable[..., object], table: Mapping[str, object]) -> list[tuple[KeyPath, str]]:
    """Problems between the keys of a table whose keys are right by themselves."""
    causes = [details.get("ctx", {}).get("error") for details in _errors(validate, table)]
    return [found for cause in causes if isinstance(cause, OptionsInvalid) for found in cause.found]


def _read_source(
    key: KeyPath, data: object, sources: list[tuple[KeyPath, SourceOptions]], source_fields: list[str]
) -> None:
    """Add the source, or its valid parts and the field that it adds to theirs."""
    source = _read(_SOURCE, data)
    if source is not None:
        sources.append((key, source))
    elif isinstance(data, dict):
        added = data.get("source_field")
        if isinstance(added, str) and added:
            source_fields.append(added)
        for inner, part in _parts(data):
            _read_source((*key, *inner), part, sources, source_fields)


def _gap(data: object) -> Gap:
    """The fields that a step may be about, by its keys and by the defaults of its kind."""
    table = data if isinstance(data, dict) else {}
    op = str(table.get("op"))
    kind = STEP_KINDS.get(nearest(op, STEP_KINDS) or "")
    if not isinstance(table.get("op"), str) or kind is None or kind is STEP_KINDS["call"]:
        return Gap(op)
    defaults = {option.name: option.default for option in fields(kind)}
    given = [table.get(name, defaults.get(name)) for name in _NAMING]
    listed = table.get("fields", ())
    names = [name for name in [*given, *(listed if isinstance(listed, list) else [listed])] if isinstance(name, str)]
    if not names:
        return Gap(op)
    touches = frozenset(f"{name}{ending}" for name in names for ending in _MADE_WITH)
    field = table.get("field", defaults.get("field"))
    return Gap(op, field if isinstance(field, str) else None, touches)


def _read(adapter: TypeAdapter[_T], data: object) -> _T | None:
    """``data`` as the adapter's type; None if it is invalid."""
    try:
        return adapter.validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError:
        return None
