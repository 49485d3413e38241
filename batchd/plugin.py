"""The interface for packages that add a kind of source. Daemon, workers and ``batchd check``.

The package names a ``SourceKind`` in its ``pyproject.toml``:

    [project.entry-points."batchd.sources"]
    zip = "batchd_zip:KIND"

and ``source = { type = "plugin", name = "zip", options = { path = "photos.zip" } }`` in batchd.toml
makes a stream of it. Its four functions get that source as ``PluginSource``. Where each runs, and
its rules:

* ``problems`` and ``columns``, in ``batchd check`` and in the daemon: they are quick, and read
  headers at most.
* ``scan``, in the daemon, once: finds every sample, and keeps the facts of each in flat arrays. It
  raises ``SourceInvalid``, which names file and record, for data that cannot be served. With
  ``Survey.saw`` for each file that it reads, the index is kept for the next start.
* ``open``, in each worker: a ``Reader``, which reads any sample in any order, and raises
  ``SampleUnreadable`` for one that it cannot read. A list with an entry for each sample would take
  memory in every worker; the arrays are in memory once.

The package runs as part of the daemon, with all of the daemon's rights.

Invariant: a package's code runs only if a stream asks for it by name, and its errors name it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from batchd.data.functions.load import FunctionFailed, call
from batchd.data.samples.columns import Column, parse_column
from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.values import Value
from batchd.data.sources.code.options import PluginSource
from batchd.data.sources.interface import Reader, SourceProblem
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid
from batchd.runtime.suggestions import nearest

__all__ = [
    "Column",
    "PluginSource",
    "Reader",
    "SampleUnreadable",
    "SourceIndex",
    "SourceInvalid",
    "SourceKind",
    "Survey",
    "Value",
    "parse_column",
]

GROUP = "batchd.sources"


@dataclass(frozen=True, slots=True)
class SourceKind:
    """The functions of a package's kind of source; see above where each one runs."""

    problems: Callable[[PluginSource], Sequence[str | SourceProblem]]
    """Problems of a source that show without a scan."""
    columns: Callable[[PluginSource], tuple[Column, ...]]
    """The columns of a sample. Raises ``SourceInvalid`` if a file that has to be read cannot be."""
    scan: Callable[[PluginSource, Survey], SourceIndex]
    """Find all samples. Raises ``SourceInvalid``, which names the file, and the line, record or
    byte."""
    open: Callable[[PluginSource, SourceIndex, int], Reader]
    """Make a reader. Records of more bytes than the number are bad samples."""


def plugin_kind(source: PluginSource) -> SourceKind:
    """The package's kind of source. Raises ``SourceInvalid`` if it is absent or not importable."""
    found = entry_points(group=GROUP, name=source.name)
    if not found:
        known = sorted(entry_points(group=GROUP).names)
        meant = nearest(source.name, known)
        there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}" if known else "there is none at all"
        advice = there if meant is None else f"did you mean {meant}?"
        raise SourceInvalid(f"no installed package brings the source {source.name!r}; {advice}")
    point = next(iter(found))
    try:
        kind = call(point.load)
    except FunctionFailed as error:
        raise SourceInvalid(f"{point.value}, which brings {source.name!r}, cannot be imported: {error}") from None
    if not isinstance(kind, SourceKind):
        raise SourceInvalid(f"{point.value} is {type(kind).__name__}, not a SourceKind of batchd.plugin")
    return kind
