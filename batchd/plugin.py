"""What a package needs that adds a kind of source to batchd. Daemon, workers and ``batchd check``.

The package names a ``SourceKind`` in its ``pyproject.toml``:

    [project.entry-points."batchd.sources"]
    zip = "batchd_zip:KIND"

and ``source = { type = "plugin", name = "zip", options = { path = "photos.zip" } }`` in batchd.toml
makes a stream of it. Its four functions get that source as ``PluginSource``. Where each is run, and
what it has to keep to:

* ``problems`` and ``columns``, in ``batchd check`` and in the daemon: quick; they look at headers at most.
* ``scan``, in the daemon, once: finds every sample, keeps what is needed for each in flat arrays, and refuses with
  ``SourceInvalid`` what cannot be served, naming file and record. ``Survey.saw`` for each file that is read lets the index be
  kept for the next start.
* ``open``, in each worker: a ``Reader``, which reads any sample in any order, and raises ``SampleUnreadable`` for one that it
  cannot read. A list with an entry for each sample would be in the memory of every worker; the arrays are there once.

The package runs as part of the daemon: it may do whatever the daemon may.
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
