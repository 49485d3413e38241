"""The user's own functions that a stream names: whether they exist, and their modules' digests.

For the daemon at its start, ``batchd check`` and ``batchd prepare``; none of them imports the
functions. Workers do not import this module, which needs pydantic.

Invariant: the stream's fingerprint has the digests of the modules that workers import.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchd.config.tree import StreamConfig
from batchd.errors import KeyPath, SourceInvalid
from batchd.functions.find import ModuleNotFound, find_module, function_problems, parse_function
from batchd.functions.signature import Given
from batchd.pipeline.call.effects import GIVEN
from batchd.pipeline.call.options import Call
from batchd.pipeline.options import StepOptions
from batchd.sources.code.options import GeneratorSource, PluginSource, PythonSource
from batchd.sources.composed.options import sources_in
from batchd.sources.options import SourceOptions


@dataclass(frozen=True, slots=True)
class StreamCode:
    """Modules of one stream: digests by name, and the folders that workers search first."""

    python_path: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)


def code_of(stream: StreamConfig, python_path: Sequence[Path]) -> StreamCode:
    """Find the modules of a stream. Raises ``SourceInvalid`` if one is missing."""
    named = [*(source for _key, source in sources_in(stream.source)), *stream.pipeline]
    functions = [one.function for one in named if isinstance(one, (PythonSource, GeneratorSource, Call))]
    if not functions:
        return StreamCode()
    try:
        modules = {parse_function(function).module for function in functions}
        digests = {module: find_module(module, python_path).digest for module in sorted(modules)}
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    return StreamCode(tuple(map(str, python_path)), digests)


def runs_own_code(whole: SourceOptions) -> bool:
    """True if the source, or a part of it, is the user's own code."""
    kinds = (PythonSource, GeneratorSource, PluginSource)
    return any(isinstance(source, kinds) for _key, source in sources_in(whole))


def code_problems(
    sources: Iterable[tuple[KeyPath, SourceOptions]], steps: Mapping[int, StepOptions], python_path: Sequence[Path]
) -> list[tuple[KeyPath, str]]:
    """Problems of the functions that a stream names, each with its key in the stream.

    ``sources``: with their keys in the stream's source. ``steps``: by their index in its pipeline.
    """
    named: list[tuple[KeyPath, str, Given]] = [
        (("source", *key, *inner, "function"), source.function, source.given)
        for key, whole in sources
        for inner, source in sources_in(whole)
        if isinstance(source, (PythonSource, GeneratorSource))
    ]
    named += [
        (("pipeline", place, "function"), step.function, GIVEN)
        for place, step in steps.items()
        if isinstance(step, Call)
    ]
    return [(key, text) for key, name, given in named for text in function_problems(name, python_path, given)]
