"""The functions of their own that people name in a stream: are they there, and what is in their modules?

The daemon at its start, ``batchd check`` and ``batchd prepare``; imports none of them. Nor may workers import this module, which
needs pydantic.

Invariant: what workers import has the digests that are in the stream's fingerprint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchd.config.call_steps import Call
from batchd.config.code_sources import GeneratorSource, PythonSource
from batchd.config.composed_sources import UnreadSource, parts_of
from batchd.config.function import parse_function
from batchd.config.lines import KeyPath
from batchd.config.plugin_source import PluginSource
from batchd.config.source import SourceOptions
from batchd.config.step import UnreadStep
from batchd.config.steps import Step
from batchd.config.tree import StreamConfig
from batchd.errors import SourceInvalid
from batchd.functions.find import ModuleNotFound, find_module, function_problems
from batchd.functions.given import call_given, source_given
from batchd.functions.signature import Given


@dataclass(frozen=True, slots=True)
class StreamCode:
    """The modules of one stream: digests of their sources by name, and where workers look first. Both empty where it has none."""

    python_path: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)


def code_of(stream: StreamConfig, python_path: Sequence[Path]) -> StreamCode:
    """Find the modules of a stream. Raises ``SourceInvalid`` where one is not there."""
    functions = [function for _path, function, _given in _functions_in(stream.source, stream.pipeline)]
    if not functions:
        return StreamCode()
    try:
        modules = {parse_function(function).module for function in functions}
        digests = {module: find_module(module, python_path).digest for module in sorted(modules)}
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    return StreamCode(tuple(map(str, python_path)), digests)


def runs_own_code(whole: SourceOptions) -> bool:
    """Is the source, or a part of it, somebody's own code, of which nobody here knows what it does?"""
    kinds = (PythonSource, GeneratorSource, PluginSource)
    return any(isinstance(source, kinds) for _key, source in _sources_in(("source",), whole))


def code_problems(
    source: SourceOptions | UnreadSource, steps: Sequence[Step | UnreadStep], python_path: Sequence[Path]
) -> list[tuple[KeyPath, str]]:
    """What is wrong with the functions that a stream names, each with its key in the stream."""
    return [
        (key, text)
        for key, function, given in _functions_in(source, steps)
        for text in function_problems(function, python_path, given)
    ]


def _functions_in(
    whole: SourceOptions | UnreadSource, steps: Sequence[Step | UnreadStep]
) -> Iterator[tuple[KeyPath, str, Given]]:
    """Each function with its key, and with what it is called."""
    for key, source in _sources_in(("source",), whole):
        if isinstance(source, (PythonSource, GeneratorSource)):
            yield (*key, "function"), source.function, source_given(source)
    for place, step in enumerate(steps):
        if isinstance(step, Call):
            yield ("pipeline", place, "function"), step.function, call_given()


def _sources_in(
    key: KeyPath, source: SourceOptions | UnreadSource
) -> Iterator[tuple[KeyPath, SourceOptions | UnreadSource]]:
    """A source and all that it is made of."""
    yield key, source
    for name, part in parts_of(source):
        yield from _sources_in((*key, *name), part)
