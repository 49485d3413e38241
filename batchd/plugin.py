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
"""

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column, parse_column
from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.code.options import PluginSource
from batchd.sources.code.plugin import SourceKind
from batchd.sources.interface import Reader
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey

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
