"""What can be read of the streams of a configuration in which something is wrong. Daemon and CLI.

    source = { type = "concat", sources = [{ type = "folder", path = "a" }, { type = "foldr" }] }   the folder alone
    pipeline = [{ op = "decode" }, { op = "resize", sise = [8, 8] }]                                Decode, and a gap

So that a mistake in one place does not hide those in others: whatever is read here can be looked
at.

Invariant: of a source or a step whose options are wrong, nothing is guessed but which fields it may
be about.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from batchd.config.tree import CACHE_KEYS, DaemonConfig, StreamConfig
from batchd.errors import KeyPath
from batchd.pipeline.kinds import STEP_KINDS
from batchd.pipeline.options import StepOptions
from batchd.samples.checks import OptionsInvalid
from batchd.samples.kinds import OneOf
from batchd.sources.kinds import SOURCE_KINDS
from batchd.sources.options import SourceOptions
from batchd.sources.push.options import CAPACITY_MAX
from batchd.suggestions import nearest

_LATER = ConfigDict(defer_build=True)
"""Made when it is first used: a daemon whose configuration is right never does."""
_SOURCE: TypeAdapter[Any] = TypeAdapter(Annotated[SourceOptions, OneOf(SOURCE_KINDS, "type")], config=_LATER)
_STEP: TypeAdapter[Any] = TypeAdapter(Annotated[StepOptions, OneOf(STEP_KINDS, "op")], config=_LATER)
_MADE_WITH = ("", "_mask", "_length", "_shape")
"""How the names of fields end that a step makes beside the one that it names."""
_NAMING = ("field", "to", "mask", "boxes", "points")
_STAND_INS: Mapping[str, Any] = {"path": "anywhere", "root": "anywhere", "shards": ["any"], "function": "any:thing"}
"""For required keys of sources that are wrong or missing."""


class Gap(NamedTuple):
    """What can be said of a step whose options are wrong. ``field``: the one that it is done to, where it says so.

    ``touches``: the fields that it reads or makes, as far as it says; None for any.
    """

    op: str
    field: str | None = None
    touches: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class StreamDraft:
    """A stream as far as it could be read. ``data`` is what its table holds.

    ``sources``: the source with the key (), or where its options are wrong the parts that could be
    read, each with its key in it. ``source_fields``: the fields that sources with wrong options add
    to those of their parts. ``steps`` by their places in the pipeline, and ``gaps`` where no step
    could be read.
    """

    sources: tuple[tuple[KeyPath, SourceOptions], ...]
    source_fields: tuple[str, ...]
    steps: Mapping[int, StepOptions]
    gaps: Mapping[int, Gap]
    data: Mapping[str, Any]


def whole_draft(stream: StreamConfig) -> StreamDraft:
    """A stream in which nothing is wrong."""
    return StreamDraft((((), stream.source),), (), dict(enumerate(stream.pipeline)), {}, stream.model_dump(mode="json"))


def stream_drafts(data: Mapping[str, Any]) -> dict[str, StreamDraft]:
    """What can be read of the streams of a file, by name."""
    return {name: _stream_draft(table) for name, table in _tables(data)}


def _tables(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The tables of the streams of a file, by name."""
    streams = data.get("streams")
    tables = streams.items() if isinstance(streams, dict) else ()
    return [(name, table) for name, table in tables if isinstance(table, dict)]


def _stream_draft(table: Mapping[str, Any]) -> StreamDraft:
    sources: list[tuple[KeyPath, SourceOptions]] = []
    source_fields: list[str] = []
    _read_source((), table.get("source"), sources, source_fields)
    items = table.get("pipeline", [])
    read = {place: _read(_STEP, item) for place, item in enumerate(items)} if isinstance(items, list) else {0: None}
    steps = {place: step for place, step in read.items() if step is not None}
    gaps = {place: _gap(items[place] if isinstance(items, list) else None) for place in read.keys() - steps.keys()}
    return StreamDraft(tuple(sources), tuple(source_fields), steps, gaps, table)


def daemon_draft(data: Mapping[str, Any]) -> tuple[DaemonConfig, frozenset[str]]:
    """What can be read of [daemon], with defaults for the keys that are wrong, and those keys."""
    table = data.get("daemon")
    if not isinstance(table, dict):
        return DaemonConfig(), frozenset(DaemonConfig.model_fields)
    try:
        return _daemon(table), frozenset()
    except ValidationError as error:
        wrong = frozenset(str(details["loc"][0]) for details in error.errors() if details["loc"])
    try:
        return _daemon({key: value for key, value in table.items() if key not in wrong}), wrong
    except ValidationError:
        return DaemonConfig(), frozenset(DaemonConfig.model_fields)


def hidden_problems(data: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """What is wrong with streams where it would be looked at only once other keys of theirs are right, each with its key."""
    return [
        (("streams", name, *key), text)
        for name, table in _tables(data)
        for key, text in [*_wrong_together(table), *_hidden_in_source(("source",), table.get("source"))]
    ]


def _wrong_together(table: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """Which keys of a stream do not go together, with plain values in the place of those that are wrong by themselves."""
    table = {**table, "pipeline": []}
    wrong = {key[0] for key in _wrong_keys(StreamConfig.model_validate_json, table)}
    if "lag" in wrong or not _is_kind(table.get("source")):
        table.pop("max_skew", None)
    if any(key in wrong for key in CACHE_KEYS):
        table = {key: value for key, value in table.items() if key not in CACHE_KEYS}
    stand_ins: dict[str, Any] = {"batch_size": 1, "source": _like(table.get("source"))}
    kept = {key: value for key, value in table.items() if key not in wrong}
    return _found_by(
        StreamConfig.model_validate_json, {**kept, **{key: value for key, value in stand_ins.items() if key in wrong}}
    )


def _is_kind(source: object) -> bool:
    return isinstance(source, dict) and source.get("type") in SOURCE_KINDS


def _like(source: object) -> dict[str, Any]:
    """A source that goes together with the same keys of a stream."""
    table = source if isinstance(source, dict) else {}
    if table.get("type") == "generator":
        return {"type": "generator", "function": "any:thing", "fields": {"x": "int64"}}
    if table.get("type") != "push":
        return {"type": "folder", "path": "anywhere"}
    push = {"type": "push", "fields": {"x": "int64"}}
    given = {**push, **{key: value for key, value in table.items() if key == "capacity"}}
    return given if _read(_SOURCE, given) else {**push, "capacity": CAPACITY_MAX}


def _hidden_in_source(key: KeyPath, source: object) -> list[tuple[KeyPath, str]]:
    """What a source would say of its keys if others were not unknown, or of a wrong type, or missing; and so its parts."""
    if not isinstance(source, dict):
        return []
    wrong = {inner[0] for inner in _wrong_keys(_SOURCE.validate_json, source)}
    kept = {name: value for name, value in source.items() if name not in wrong}
    stand_ins = {name: value for name, value in _STAND_INS.items() if name in wrong}
    found = _found_by(_SOURCE.validate_json, {**kept, **stand_ins}) if wrong else []
    several, one = source.get("sources"), source.get("of")
    parts = [(("sources", number), part) for number, part in enumerate(several)] if isinstance(several, list) else []
    return [
        *(((*key, *inner), text) for inner, text in found if inner and inner[0] in kept),
        *(told for inner, part in [*parts, (("of",), one)] for told in _hidden_in_source((*key, *inner), part)),
    ]


def _wrong_keys(validate: Callable[..., Any], table: Mapping[str, Any]) -> set[KeyPath]:
    """Where something is wrong by itself."""
    try:
        validate(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        return {details["loc"] for details in error.errors() if details["loc"]}
    return set()


def _found_by(validate: Callable[..., Any], table: Mapping[str, Any]) -> list[tuple[KeyPath, str]]:
    """What the checks of a table say, whose keys are right by themselves."""
    try:
        validate(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        errors = [details.get("ctx", {}).get("error") for details in error.errors()]
        return [found for one in errors if isinstance(one, OptionsInvalid) for found in one.found]
    return []


def _daemon(table: Mapping[str, Any]) -> DaemonConfig:
    return DaemonConfig.model_validate_json(json.dumps(table, default=str), strict=True)


def _read_source(
    key: KeyPath, data: object, sources: list[tuple[KeyPath, SourceOptions]], source_fields: list[str]
) -> None:
    """Add the source, or what can be read of its parts and the field that it adds to theirs."""
    source = _read(_SOURCE, data)
    if isinstance(source, SourceOptions):
        sources.append((key, source))
    elif isinstance(data, dict):
        several, one, added = data.get("sources"), data.get("of"), data.get("source_field")
        if isinstance(added, str) and added:
            source_fields.append(added)
        if isinstance(several, list):
            for number, part in enumerate(several):
                _read_source((*key, "sources", number), part, sources, source_fields)
        elif isinstance(one, dict):
            _read_source((*key, "of"), one, sources, source_fields)


def _gap(data: object) -> Gap:
    """Which fields a step may be about, by the names in it and by the default of its kind."""
    table = data if isinstance(data, dict) else {}
    op = table.get("op")
    kind = STEP_KINDS.get(nearest(op, STEP_KINDS) or "") if isinstance(op, str) else None
    if not isinstance(op, str) or kind is None or kind is STEP_KINDS["call"]:
        return Gap(str(op))
    known: Any = kind
    defaults = {option.name: option.default for option in fields(known)}
    given = [table.get(name, defaults.get(name)) for name in _NAMING]
    listed = table.get("fields", ())
    names = [name for name in [*given, *(listed if isinstance(listed, list) else [listed])] if isinstance(name, str)]
    if not names:
        return Gap(op)
    touches = frozenset(f"{name}{ending}" for name in names for ending in _MADE_WITH)
    field = table.get("field", defaults.get("field"))
    return Gap(op, field if isinstance(field, str) else None, touches)


def _read(adapter: TypeAdapter[Any], data: object) -> Any:
    """What the data says; None where it is wrong."""
    try:
        return adapter.validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError:
        return None
