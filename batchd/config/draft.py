"""What can be read of the streams of a configuration in which something is wrong. Daemon and CLI.

    source = { type = "concat", sources = [{ type = "folder", path = "a" }, { type = "foldr" }] }   UnreadSource with one part
    pipeline = [{ op = "decode" }, { op = "resize", sise = [8, 8] }]                                Decode, UnreadStep

So that a mistake in one place does not hide those in others: whatever is read here can be looked at.

Invariant: nothing of an ``UnreadSource`` or an ``UnreadStep`` is guessed but which fields it may be about.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from batchd.config.checks import OptionsInvalid
from batchd.config.composed_sources import UnreadSource
from batchd.config.kinds import OneOf
from batchd.config.lines import KeyPath
from batchd.config.live_sources import CAPACITY_MAX
from batchd.config.names import nearest
from batchd.config.source import SourceOptions
from batchd.config.sources import SOURCE_KINDS, Source
from batchd.config.step import UnreadStep
from batchd.config.steps import STEP_KINDS, Step
from batchd.config.tree import CACHE_KEYS, DaemonConfig, StreamConfig

_LATER = ConfigDict(defer_build=True)
"""Made when it is first used: a daemon whose configuration is right never does."""
_SOURCE: TypeAdapter[Any] = TypeAdapter(Annotated[Source, OneOf(SOURCE_KINDS, "type")], config=_LATER)
_STEP: TypeAdapter[Any] = TypeAdapter(Annotated[Step, OneOf(STEP_KINDS, "op")], config=_LATER)
_MADE_WITH = ("", "_mask", "_length", "_shape")
"""How the names of fields end that a step makes beside the one that it names."""
_NAMING = ("field", "to", "mask", "boxes", "points")
_STAND_INS: Mapping[str, Any] = {"path": "anywhere", "root": "anywhere", "shards": ["any"], "function": "any:thing"}
"""For required keys of sources that are wrong or missing."""
AnySource: TypeAlias = SourceOptions | UnreadSource


@dataclass(frozen=True, slots=True)
class StreamDraft:
    """A stream as far as it could be read. ``data`` is what its table holds."""

    source: AnySource
    steps: tuple[Step | UnreadStep, ...]
    data: Mapping[str, Any]


def whole_draft(stream: StreamConfig) -> StreamDraft:
    """A stream in which nothing is wrong."""
    return StreamDraft(stream.source, stream.pipeline, stream.model_dump(mode="json"))


def stream_drafts(data: Mapping[str, Any]) -> dict[str, StreamDraft]:
    """What can be read of the streams of a file, by name."""
    streams = data.get("streams")
    tables = streams.items() if isinstance(streams, dict) else ()
    return {
        name: StreamDraft(_source(table.get("source")), tuple(_steps(table.get("pipeline", []))), table)
        for name, table in tables
        if isinstance(table, dict)
    }


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
    streams = data.get("streams")
    tables = streams.items() if isinstance(streams, dict) else ()
    return [
        (("streams", name, *key), text)
        for name, table in tables
        if isinstance(table, dict)
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


def _source(data: object) -> AnySource:
    source = _read(_SOURCE, data)
    if isinstance(source, SourceOptions):
        return source
    table = data if isinstance(data, dict) else {}
    source_field = table.get("source_field", "")
    return UnreadSource(tuple(_parts(table)), source_field if isinstance(source_field, str) else "")


def _parts(table: Mapping[str, Any]) -> Iterator[tuple[KeyPath, AnySource]]:
    several, one = table.get("sources"), table.get("of")
    if isinstance(several, list):
        yield from ((("sources", number), _source(part)) for number, part in enumerate(several))
    elif isinstance(one, dict):
        yield ("of",), _source(one)


def _steps(data: object) -> Iterator[Step | UnreadStep]:
    if not isinstance(data, list):
        yield UnreadStep("", None)
        return
    for item in data:
        step = _read(_STEP, item)
        yield step if step is not None else _unread_step(item if isinstance(item, dict) else {})


def _unread_step(table: Mapping[str, Any]) -> UnreadStep:
    """Which fields a step may be about, by the names in it and by the default of its kind."""
    op = table.get("op")
    kind = STEP_KINDS.get(nearest(op, STEP_KINDS) or "") if isinstance(op, str) else None
    if not isinstance(op, str) or kind is None or kind is STEP_KINDS["call"]:
        return UnreadStep(str(op), None)
    known: Any = kind
    defaults = {option.name: option.default for option in fields(known)}
    given = [table.get(name, defaults.get(name)) for name in _NAMING]
    listed = table.get("fields", ())
    names = [name for name in [*given, *(listed if isinstance(listed, list) else [listed])] if isinstance(name, str)]
    if not names:
        return UnreadStep(op, None)
    touches = frozenset(f"{name}{ending}" for name in names for ending in _MADE_WITH)
    field = table.get("field", defaults.get("field"))
    return UnreadStep(op, touches, field if isinstance(field, str) else None)


def _read(adapter: TypeAdapter[Any], data: object) -> Any:
    """What the data says; None where it is wrong."""
    try:
        return adapter.validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError:
        return None
