"""What every kind of source has to be able to do, and where each kind is found. Daemon, workers and CLI.

    check    problems   is it there, and do its settings make sense?         nothing is scanned
             columns    what do its samples consist of?                      at most headers are read
    daemon   scan       all samples, once, at the start                      -> SourceIndex, shared by all workers
    worker   open       a reader: any sample by its number                   -> values of the columns

Each kind is one module with a ``KIND`` in it, imported when a stream needs it, so that what it
depends on costs nobody else.

Invariant: whatever depends on a kind of source asks it here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol, runtime_checkable

from batchd.errors import KeyPath, SourceInvalid
from batchd.samples.columns import Column
from batchd.samples.values import Value
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey


class Reader(Protocol):
    """Reads any sample. Belongs to one worker and one stream; not for several threads at once."""

    def read(self, sample: int) -> Mapping[str, Value]:
        """All columns of a sample, valid until the next call. Raises ``SampleUnreadable`` with the reason."""

    def known(self, sample: int) -> Mapping[str, Value]:
        """The columns that are known without reading the sample, so that a bad one can still carry them."""

    def name(self, sample: int) -> str:
        """Where a sample is, for people: its file, and the record in it."""

    def close(self) -> None:
        """Give back what is open."""


@runtime_checkable
class ReadsAhead(Protocol):
    """What a reader may be able to do besides: get several samples faster together than one by one."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """These samples are read next, in any order; what was there of others may be forgotten."""


def read_ahead(reader: Reader, samples: Sequence[int]) -> None:
    """Tell a reader what comes next, where that is of use to it."""
    if isinstance(reader, ReadsAhead):
        reader.prefetch(samples)


class SourceProblem(NamedTuple):
    """What is wrong, and the key in the source's table that it is about."""

    key: KeyPath
    text: str


@dataclass(frozen=True, slots=True)
class BuiltInKind:
    """One kind of source. The source is always its dataclass of ``sources.kinds``; storage is where its files are."""

    problems: Callable[[Any, Storage], Sequence[str | SourceProblem]]
    """What is wrong with a source, without scanning it. Of one that is made of others, what is wrong besides these.
    A text alone is about the source as a whole, or about the path that it names."""
    columns: Callable[[Any, Storage], tuple[Column, ...]]
    """What its samples consist of. Raises ``SourceInvalid`` where files have to be looked at and cannot be."""
    scan: Callable[[Any, Survey], SourceIndex]
    """Find all samples. Raises ``SourceInvalid`` naming the file, and the line, record or byte, that is wrong."""
    open: Callable[[Any, SourceIndex, int, Storage], Reader]
    """Make a reader. The number is how many bytes a record may have; a longer one is a bad sample."""
    samples: Callable[[Any, Storage], int | None] = lambda _source, _storage: None
    """How many samples there are, where a look at headers tells. Raises ``SourceInvalid`` as ``columns`` does."""


_MODULES = {
    "folder": "batchd.sources.files.folder",
    "list": "batchd.sources.files.listing",
    "glob": "batchd.sources.files.glob",
    "webdataset": "batchd.sources.webdataset.scan",
    "csv": "batchd.sources.csv.scan",
    "npy": "batchd.sources.arrays.npy",
    "npz": "batchd.sources.arrays.npz",
    "raw": "batchd.sources.arrays.raw",
    "tfrecord": "batchd.sources.tfrecord.scan",
    "parquet": "batchd.sources.parquet.reader",
    "lmdb": "batchd.sources.lmdb.reader",
    "push": "batchd.sources.push.reader",
    "video": "batchd.sources.video.kind",
    "concat": "batchd.sources.composed.concat",
    "mix": "batchd.sources.composed.mix",
    "subset": "batchd.sources.composed.subset",
    "plugin": "batchd.sources.code.plugin",
    "python": "batchd.sources.code.python",
    "generator": "batchd.sources.code.generator",
}
_EXTRAS: dict[str, tuple[str, ...]] = {
    "tfrecord": ("google_crc32c", "google", "tfrecord"),
    "parquet": ("pyarrow", "arrow"),
    "lmdb": ("lmdb", "lmdb"),
    "video": ("av", "video"),
}
"""What to install for a kind of source whose module needs more than batchd does: modules, and the extra that brings them."""


def kind_of(source: SourceOptions) -> BuiltInKind:
    """What a source can do, by its type. Raises ``SourceInvalid`` where a library that it needs is not installed."""
    try:
        kind = import_module(_MODULES[source.type]).KIND
    except ModuleNotFoundError as error:
        *needed, extra = _EXTRAS.get(source.type, ("",))
        if (error.name or "").partition(".")[0] not in needed:
            raise
        raise SourceInvalid(
            f"a source of type \"{source.type}\" needs {error.name}, which is not installed: pip install 'batchd[{extra}]'"
        ) from None
    assert isinstance(kind, BuiltInKind)
    return kind
