"""The interface of every kind of source, and how a kind is found. Daemon, workers and CLI.

A kind is a folder. Each of its modules belongs to a process:

    options.py   all       a dataclass: the options in batchd.toml, and the libraries it needs
    scan.py      daemon    KINDS = {options: BuiltInKind}
                           problems   what is missing or makes no sense; no scan
                           columns    what a sample consists of; reads headers at most
                           scan       all samples, once -> SourceIndex, shared by all workers
    reader.py    worker    READERS = {options: function}
                           any sample by its number -> values of its columns
    recognise.py command   RECOGNISE = {options: function}, of a kind with ``endings``
                           the files of a place -> options that read them (`batchd init`)
    others       both      such as index.py: the layout of the index

Scan and reader are imported when a stream needs them, so a library costs only the streams that
use it.

Invariant: code that depends on the kind of a source calls it here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.samples.values import Value
from batchd.data.sources.finding import FilePattern, has_no_files
from batchd.data.sources.neighbours import Neighbours, in_order
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.survey import Survey
from batchd.errors import KeyPath, SourceInvalid
from batchd.runtime.suggestions import pip_command
from batchd_wire.record import options
from batchd_wire.views import Array


class Reader(Protocol):
    """Reads any sample. Belongs to one worker and one stream; not thread-safe."""

    def read(self, sample: int) -> Mapping[str, Value]:
        """All columns of a sample, valid until the next call. Raises ``SampleUnreadable``."""

    def known(self, sample: int) -> Mapping[str, Value]:
        """The columns that the index holds, so a bad sample still carries them."""

    def name(self, sample: int) -> str:
        """The sample in messages: its file, and the record in it."""

    def close(self) -> None:
        """Close files and connections."""


class PlainReader:
    """Base of the readers whose index holds no values of a sample."""

    def known(self, _sample: int) -> Mapping[str, Value]:
        """Empty: only ``read`` gives values."""
        return {}


@runtime_checkable
class NamesFiles(Protocol):
    """A reader that knows in which file a sample is."""

    def file(self, sample: int) -> bytes | None:
        """The path or the URL of the file; None if the sample has none."""


@runtime_checkable
class HasParts(Protocol):
    """A reader of a source that is made of others."""

    def part_with(self, sample: int) -> "tuple[Reader, SourceIndex, int]":
        """The reader and the index of the part with a sample, and its number there."""


FilePlace: TypeAlias = tuple[int, bytes, int, int, int]
"""Where a file is: the arguments of ``data.storage.rows.read_file``, without its memory."""


@runtime_checkable
class PlacesFiles(Protocol):
    """A reader whose samples are a file of this host, ``image``, and what ``known`` says."""

    def place(self, sample: int) -> FilePlace | None:
        """Where to read the file of a sample; None if only ``read`` can."""

    def memory(self) -> memoryview:
        """The memory for one file, which ``read`` uses, too."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A reader that reads several samples faster together than one by one."""

    def prefetch(self, samples: Sequence[int]) -> None:
        """Announce the samples that are read next, in any order. Data of others may be dropped."""


@runtime_checkable
class ReadsRows(Protocol):
    """A reader that reads the numbers of several samples at once, in less time than one by one."""

    def reads_rows(self) -> bool:
        """False if these files must be read sample by sample."""

    def read_rows(
        self, samples: NDArray[np.int64], chunks: Sequence[Mapping[str, Array]], begin: Callable[[int], None]
    ) -> None:
        """Write each column of the samples into its arrays, ``[samples, *shape]`` of its dtype.

        ``chunks``: the arrays of several batches, by column; the samples fill one after the other.
        ``begin`` is called with a chunk's number before it is written to, perhaps repeatedly.
        Raises ``SampleUnreadable`` if a sample cannot be read: ``read`` says which, and why.
        """


@runtime_checkable
class ReadsLengths(Protocol):
    """A reader that finds how long fields are in less time than by reading their samples."""

    def lengths(self, samples: Sequence[int], field: str) -> NDArray[np.int64]:
        """The elements of a field in each sample, int64 ``[samples]``; 0 where only ``read`` tells.

        ``read`` succeeds for the others. Requests from servers what it needs.
        """


@runtime_checkable
class ReadsParts(Protocol):
    """A reader that reads parts of the files of its column ``image``, in less time than all."""

    def reads_parts(self) -> bool:
        """False if files are to be read whole."""

    def prefetch_with(self, samples: Sequence[int], parts: Mapping[int, tuple[int, int]]) -> None:
        """As ``prefetch``; of samples in ``parts`` only the bytes from a first one to an end."""

    def read_part(self, sample: int, first: int, end: int) -> Mapping[str, Value]:
        """All columns of a sample, as ``read``, with these bytes of its file."""


@runtime_checkable
class ReadsPoints(Protocol):
    """A reader of files that may have their access points beside them."""

    points: Mapping[str, memoryview]
    """The records of the sample that was read last, by column, as long as its values."""

    def read_points(self) -> bool:
        """Read them with each sample from now on; False if there are none."""


def read_ahead(reader: Reader, samples: Sequence[int]) -> None:
    """Announce the next samples to a reader that can use it."""
    if isinstance(reader, ReadsAhead):
        reader.prefetch(samples)


class SourceProblem(NamedTuple):
    """A problem, and the key in the source's table that it is about."""

    key: KeyPath
    text: str


@options
class BuiltInKind:
    """The daemon's side of one kind of source. The first argument is its options."""

    scan: Callable[[Any, Survey], SourceIndex]
    """Find all samples. Raises ``SourceInvalid``, which names the file, and the line, record or
    byte."""
    columns: Callable[[Any, Storage], tuple[Column, ...]] = lambda source, _storage: source.columns
    """The columns of a sample, if they are not the declared ones. Raises ``SourceInvalid`` if a
    file that has to be read cannot be."""
    problems: Callable[[Any, Storage], Sequence[str | SourceProblem]] = lambda _source, _storage: ()
    """Problems that show without a scan, except those of its parts; it may raise one of them as
    ``SourceInvalid``. A text without a key is about the whole source, or about the path in it."""
    samples: Callable[[Any, Storage], int | None] = lambda _source, _storage: None
    """The number of samples, if headers tell it. Raises ``SourceInvalid`` as ``columns`` does."""
    neighbours: Callable[[Any, SourceIndex], Neighbours] = lambda _source, index: in_order(index)
    """Which samples are neighbours in storage, for a shuffle of blocks."""
    labels: Callable[[Any, SourceIndex], NDArray[np.int64] | None] = lambda _source, index: index.arrays.get(
        "labels", index.arrays.get("numbers.label")
    )
    """The label of each sample, int64 ``[samples]``, for weights and `batchd seen`; None if the
    index has none."""
    find: Callable[[Any, SourceIndex, FilePattern], NDArray[np.int64]] = has_no_files
    """The samples of the files that match, int64 ``[found]``, ascending; for `batchd seen`. Raises
    ``SourceInvalid`` if its index names no files."""
    lengths: Callable[[Any, SourceIndex, str], NDArray[np.int64] | None] = lambda _source, _index, _field: None
    """How many elements a field whose first dimension varies has in each sample: int64
    ``[samples]``; None if the index does not tell."""


class FoundFiles(NamedTuple):
    """The files of a place: paths below ``root``, in order, without hidden ones."""

    root: Path
    names: Sequence[bytes]
    endings: Sequence[str]
    """The ending of each file, as ``recognise.ending_of`` gives it."""
    folders: frozenset[bytes] = frozenset()
    """The folders below the root."""
    patterns: tuple[str, ...] = ()
    """The user's selection of the files: a pattern, or the name of one file; or empty."""
    unusable: Mapping[bytes, str] = MappingProxyType({})
    """Files that no source may read, as they are damaged, or do not fit the others: why."""
    part: str = ""
    """The part of the data set that is wanted, such as "val", as ``Recognised.others`` names it; ""
    for the training part, or for all files where names show no parts."""


class Recognised(NamedTuple):
    """A source that reads some of the files."""

    source: SourceOptions
    names: Sequence[bytes]
    """The files that it reads."""
    notes: tuple[str, ...] = ()
    """The content that it leaves out, and assumptions."""
    left_out: Mapping[bytes, str] = MappingProxyType({})
    """Why it leaves files out."""
    others: tuple[str, ...] = ()
    """The other parts of the data set, such as "val", that names show beside the one it reads."""


Recognise: TypeAlias = Callable[[FoundFiles, Survey], Recognised]
"""Raises ``SourceInvalid`` if the kind cannot read the files, or ``ValueError``, from options."""

OpenReader: TypeAlias = Callable[[Any, SourceIndex, int, Storage], Reader]
"""Makes a reader from options, index, the longest record in bytes, and storage."""


def kind_of(source: SourceOptions) -> BuiltInKind:
    """The daemon's side of a source. Raises ``SourceInvalid`` if a library is not installed."""
    kind = _module_of(type(source), "scan").KINDS[type(source)]
    assert isinstance(kind, BuiltInKind)
    return kind


def import_scan(kind: type[SourceOptions]) -> None:
    """Import the daemon's side of a kind, for a process whose forks scan. Raises as ``kind_of``."""
    _module_of(kind, "scan")


def open_reader(source: SourceOptions, index: SourceIndex, max_bytes: int, storage: Storage) -> Reader:
    """Make a reader, as ``kind_of``. A record of more than ``max_bytes`` bytes is a bad sample."""
    reader: Reader = _module_of(type(source), "reader").READERS[type(source)](source, index, max_bytes, storage)
    return reader


def recogniser_of(kind: type[SourceOptions]) -> Recognise:
    """The function that makes options of files. Raises ``SourceInvalid`` as ``kind_of``."""
    recogniser: Recognise = _module_of(kind, "recognise").RECOGNISE[kind]
    return recogniser


def check_installed(kind: type[SourceOptions]) -> None:
    """Raise ``SourceInvalid`` if a library that a kind needs is not installed."""
    missing = next((module for module in kind.requires if not _is_installed(module)), None)
    if missing is not None:
        name = {field.name: field.default for field in fields(kind)}["type"]
        raise SourceInvalid(
            f'a source of type "{name}" needs {missing}, which is not installed: {pip_command(f"batchd[{kind.extra}]")}'
        )


def _module_of(kind: type[SourceOptions], name: str) -> ModuleType:
    """A module of the folder in which a source's class is defined."""
    check_installed(kind)
    return import_module(f"{kind.__module__.rpartition('.')[0]}.{name}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it
        return False


def part_of(index: SourceIndex, number: int) -> SourceIndex:
    """The index of one part of a source made of others, over the same memory, without a digest.

    Invariant: a part's own arrays are in the whole index, each under the part's number and a slash.
    """
    samples, facts = index.facts["parts"][number]
    prefix = f"{number}/"
    arrays = {name.removeprefix(prefix): array for name, array in index.arrays.items() if name.startswith(prefix)}
    return SourceIndex(samples, facts, arrays, index.place["parts"][number], "")
