"""Kinds of sources that other packages bring, by their entry points. Daemon, workers and CLI.

Invariant: a package's code runs only where a stream asks for it by name, and what it breaks is said
with its name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from batchd.errors import SourceInvalid
from batchd.functions.calls import FunctionFailed, call
from batchd.samples.columns import Column
from batchd.sources.code.options import PluginSource
from batchd.sources.interface import Reader, SourceProblem
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey
from batchd.suggestions import nearest

GROUP = "batchd.sources"


@dataclass(frozen=True, slots=True)
class SourceKind:
    """What a package's kind of source can do; ``batchd.plugin`` says where each is run, and what it has to keep to."""

    problems: Callable[[PluginSource], Sequence[str | SourceProblem]]
    """What is wrong with a source, without scanning it."""
    columns: Callable[[PluginSource], tuple[Column, ...]]
    """What its samples consist of. Raises ``SourceInvalid`` where files have to be looked at and cannot be."""
    scan: Callable[[PluginSource, Survey], SourceIndex]
    """Find all samples. Raises ``SourceInvalid`` naming the file, and the line, record or byte, that is wrong."""
    open: Callable[[PluginSource, SourceIndex, int], Reader]
    """Make a reader. The number is how many bytes a record may have; a longer one is a bad sample."""
    samples: Callable[[PluginSource], int | None] = lambda _source: None
    """How many samples there are, where a look at headers tells. Raises ``SourceInvalid`` as ``columns`` does."""


def plugin_kind(source: PluginSource) -> SourceKind:
    """What the package can do. Raises ``SourceInvalid`` where there is none, or where it cannot be imported."""
    found = entry_points(group=GROUP, name=source.name)
    if not found:
        known = sorted(entry_points(group=GROUP).names)
        raise SourceInvalid(
            f"no installed package brings the source {source.name!r}; {_those_there(source.name, known)}"
        )
    point = next(iter(found))
    try:
        kind = call(point.load)
    except FunctionFailed as error:
        raise SourceInvalid(f"{point.value}, which brings {source.name!r}, cannot be imported: {error}") from None
    if not isinstance(kind, SourceKind):
        raise SourceInvalid(f"{point.value} is {type(kind).__name__}, not a SourceKind of batchd.plugin")
    return kind


def _those_there(name: str, known: Sequence[str]) -> str:
    """Help with a name that no package brings."""
    meant = nearest(name, known)
    if meant is not None:
        return f"did you mean {meant}?"
    return f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else "there is none at all"
