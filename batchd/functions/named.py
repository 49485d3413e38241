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
from batchd.config.composed_sources import ConcatSource, MixSource, SubsetSource
from batchd.config.function import parse_function
from batchd.config.lines import KeyPath
from batchd.config.problems import path_text
from batchd.config.schema import meaning_of
from batchd.config.source import SourceOptions
from batchd.config.tree import StreamConfig
from batchd.errors import Problem, SourceInvalid
from batchd.functions.find import ModuleNotFound, find_module, function_problems


@dataclass(frozen=True, slots=True)
class StreamCode:
    """The modules of one stream: digests of their sources by name, and where workers look first. Both empty where it has none."""

    python_path: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)


def code_of(stream: StreamConfig, python_path: Sequence[Path]) -> StreamCode:
    """Find the modules of a stream. Raises ``SourceInvalid`` where one is not there."""
    functions = [function for _path, function in _functions_in(stream)]
    if not functions:
        return StreamCode()
    try:
        modules = {parse_function(function).module for function in functions}
        digests = {module: find_module(module, python_path).digest for module in sorted(modules)}
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    return StreamCode(tuple(map(str, python_path)), digests)


def code_problems(name: str, stream: StreamConfig, python_path: Sequence[Path]) -> list[Problem]:
    """What is wrong with the functions that the stream ``name`` names, each with its key."""
    data = {"streams": {name: stream.model_dump(mode="json")}}
    return [
        Problem(path_text(path), text, meaning_of(path, data))
        for key, function in _functions_in(stream)
        for path in [("streams", name, *key)]
        for text in function_problems(function, python_path)
    ]


def _functions_in(stream: StreamConfig) -> Iterator[tuple[KeyPath, str]]:
    for key, source in _sources_in(("source",), stream.source):
        if isinstance(source, (PythonSource, GeneratorSource)):
            yield (*key, "function"), source.function
    for place, step in enumerate(stream.pipeline):
        if isinstance(step, Call):
            yield ("pipeline", place, "function"), step.function


def _sources_in(key: KeyPath, source: SourceOptions) -> Iterator[tuple[KeyPath, SourceOptions]]:
    """A source and all that it is made of."""
    yield key, source
    if isinstance(source, (ConcatSource, MixSource)):
        for number, part in enumerate(source.sources):
            yield from _sources_in((*key, "sources", number), part)
    elif isinstance(source, SubsetSource):
        yield from _sources_in((*key, "of"), source.of)
