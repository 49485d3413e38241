"""The interface of every kind of source, and how a kind is found. Daemon, workers and CLI.

A kind is a folder. Each of its modules belongs to a process:

    options.py   all       a dataclass: the options in batchd.toml, the libraries it needs, the extra that installs them
    scan.py      daemon    KINDS = {options: BuiltInKind}
                           problems   is it there, and do its settings make sense?     nothing is scanned
                           columns    what do its samples consist of?                  at most headers are read
                           scan       all samples, once, at the start                  -> SourceIndex, shared by all workers
    reader.py    worker    READERS = {options: function}
                           a reader: any sample by its number                          -> values of the columns
    others       both      such as index.py, the layout of the index

Both are imported when a stream needs them, so a library costs only the streams that use it.

Invariant: code that depends on the kind of a source calls it here; ``sources.kinds`` finds all kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInKind:
    """One kind of source. The source is always its dataclass of ``sources.kinds``; storage is where its files are."""

    columns: Callable[[Any, Storage], tuple[Column, ...]]
    """What its samples consist of. Raises ``SourceInvalid`` where files have to be looked at and cannot be."""
    scan: Callable[[Any, Survey], SourceIndex]
    """Find all samples. Raises ``SourceInvalid`` naming the file, and the line, record or byte, that is wrong."""
    problems: Callable[[Any, Storage], Sequence[str | SourceProblem]] = lambda _source, _storage: ()
    """Problems of a source that show without a scan. Those of its parts, if it has some, are found
    apart. A text alone is about the source as a whole, or about the path that it names."""
    samples: Callable[[Any, Storage], int | None] = lambda _source, _storage: None
    """How many samples there are, where a look at headers tells. Raises ``SourceInvalid`` as ``columns`` does."""


OpenReader: TypeAlias = Callable[[Any, SourceIndex, int, Storage], Reader]
"""Makes a reader of a source; ``open_reader`` says of what."""


def kind_of(source: SourceOptions) -> BuiltInKind:
    """What the daemon can do with a source. Raises ``SourceInvalid`` if a library that it needs is not installed."""
    kind = _module_of(source, "scan").KINDS[type(source)]
    assert isinstance(kind, BuiltInKind)
    return kind


def open_reader(source: SourceOptions, index: SourceIndex, max_bytes: int, storage: Storage) -> Reader:
    """Make a reader. A record of more than ``max_bytes`` bytes is a bad sample. Raises as ``kind_of`` does."""
    reader: Reader = _module_of(source, "reader").READERS[type(source)](source, index, max_bytes, storage)
    return reader


def _module_of(source: SourceOptions, name: str) -> ModuleType:
    """A module of the folder in which the source's class is defined."""
    missing = next((module for module in source.requires if not _is_installed(module)), None)
    if missing is not None:
        raise SourceInvalid(
            f'a source of type "{source.type}" needs {missing}, which is not installed: '
            f"pip install 'batchd[{source.extra}]'"
        )
    return import_module(f"{type(source).__module__.rpartition('.')[0]}.{name}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False
