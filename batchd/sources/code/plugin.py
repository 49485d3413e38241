"""Kinds of sources in other packages, by their entry points. Daemon, workers and CLI.

Invariant: a package's code runs only if a stream asks for it by name, and its errors name it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from batchd.errors import SourceInvalid
from batchd.functions.load import FunctionFailed, call
from batchd.samples.columns import Column
from batchd.sources.code.options import PluginSource
from batchd.sources.interface import Reader, SourceProblem
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey
from batchd.suggestions import nearest

GROUP = "batchd.sources"


@dataclass(frozen=True, slots=True)
class SourceKind:
    """The functions of a package's kind of source; ``batchd.plugin`` says where each one runs."""

    problems: Callable[[PluginSource], Sequence[str | SourceProblem]]
    """Problems of a source that show without a scan."""
    columns: Callable[[PluginSource], tuple[Column, ...]]
    """The columns of a sample. Raises ``SourceInvalid`` if a file that has to be read cannot be."""
    scan: Callable[[PluginSource, Survey], SourceIndex]
    """Find all samples. Raises ``SourceInvalid``, which names the file, and the line, record or
    byte."""
    open: Callable[[PluginSource, SourceIndex, int], Reader]
    """Make a reader. Records of more bytes than the number are bad samples."""
    samples: Callable[[PluginSource], int | None] = lambda _source: None
    """The number of samples, if headers tell it. Raises ``SourceInvalid`` as ``columns`` does."""


def plugin_kind(source: PluginSource) -> SourceKind:
    """The package's kind of source. Raises ``SourceInvalid`` if it is absent or not importable."""
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
    """Help with a name that no package has."""
    meant = nearest(name, known)
    if meant is not None:
        return f"did you mean {meant}?"
    return f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else "there is none at all"
