"""What can be read of the streams of a configuration in which something is wrong. Daemon and CLI.

    source = { type = "concat", sources = [{ type = "folder", path = "a" }, { type = "foldr" }] }   UnreadSource with one part
    pipeline = [{ op = "decode" }, { op = "resize", sise = [8, 8] }]                                Decode, UnreadStep

So that a mistake in one place does not hide those in others: whatever is read here can be looked at.

Invariant: nothing of an ``UnreadSource`` or an ``UnreadStep`` is guessed but which fields it may be about.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from batchd.config.composed_sources import UnreadSource
from batchd.config.lines import KeyPath
from batchd.config.names import nearest
from batchd.config.source import SourceOptions
from batchd.config.sources import Source
from batchd.config.step import UnreadStep
from batchd.config.steps import STEP_KINDS, Step
from batchd.config.tree import DaemonConfig, StreamConfig

_SOURCE: TypeAdapter[Any] = TypeAdapter(Annotated[Source, Field(discriminator="type")])
_STEP: TypeAdapter[Any] = TypeAdapter(Annotated[Step, Field(discriminator="op")])
_MADE_WITH = ("", "_mask", "_length", "_shape")
"""How the names of fields end that a step makes beside the one that it names."""
_NAMING = ("field", "to", "mask", "boxes", "points")
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


def hidden_by_pipelines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with streams as a whole, by name, where it would be looked at only once their pipelines are right."""
    streams = data.get("streams")
    tables = streams.items() if isinstance(streams, dict) else ()
    return [(name, text) for name, table in tables if isinstance(table, dict) for text in _wrong_as_a_whole(table)]


def _wrong_as_a_whole(table: Mapping[str, Any]) -> list[str]:
    try:
        StreamConfig.model_validate_json(json.dumps({**table, "pipeline": []}, default=str), strict=True)
    except ValidationError as error:
        return [str(details["ctx"]["error"]) for details in error.errors() if details["loc"] == ()]
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
