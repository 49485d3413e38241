"""Read samples of users' own objects and generators, and of packages. Workers only.

    object       made before the first sample, and asked for samples by number
    generator    a sample's number is only a count: each read takes the next sample of this process;
                 a generator that ends is begun again with another seed, and so is one that raises,
                 which makes a bad sample
    plugin       the reader of the package

    tuple or list    values in the order of the fields
    dict             values by name; further ones are left out
    anything else    the value itself, if there is one field

Invariant: without ``seed``, no two instances of a generator have the same seed, in any process,
also after a restart. With it, instance n of worker i always has the same, and no other instance of
a stream has it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from typing import Any

import numpy as np

from batchd.data.functions import load
from batchd.data.functions.find import CallArguments
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.values import Value
from batchd.data.sources.code.options import GeneratorSource, PluginSource, PythonSource
from batchd.data.sources.interface import OpenReader, PlainReader
from batchd.data.sources.options import SourceOptions
from batchd.plugin import plugin_kind

_END = object()


class PythonReader(PlainReader):
    """Reads an object that was made in this process."""

    def __init__(self, source: PythonSource, max_bytes: int) -> None:
        self._function = source.function
        self._columns = source.columns
        self._max_bytes = max_bytes
        try:
            self._object = make_object(source.function, source.options)
        except load.FunctionFailed as error:
            raise load.FunctionUnusable(f"calling {source.function} in a worker: {error}") from None
        if not hasattr(type(self._object), "__getitem__"):
            raise load.FunctionUnusable(f"what {source.function} returns in a worker has no __getitem__")

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        try:
            given = load.call(getitem, self._object, sample)
        except load.FunctionFailed as error:
            raise SampleUnreadable(str(error)) from None
        return _values_of(self._columns, _named(self._columns, given), self._max_bytes)

    def name(self, sample: int) -> str:
        """The expression in Python."""
        return f"{self._function}[{sample}]"

    def close(self) -> None:
        """The object ends with the process."""


def make_object(function: str, options: dict[str, object]) -> Any:
    """Import the function and call it. Raises ``FunctionUnusable`` or ``FunctionFailed``."""
    return load.call(load.load_for(function, CallArguments(options=options)), **options)


class GeneratorReader(PlainReader):
    """Reads what the generator of this process yields, one sample after the other."""

    def __init__(self, source: GeneratorSource, max_bytes: int) -> None:
        self._name = source.function
        self._function = load.load_for(source.function, source.arguments)
        self._options = source.options
        self._takes_rng = _takes_rng(self._function)
        self._seed = source.seed
        self._begun = 0
        self._columns = source.columns
        self._max_bytes = max_bytes
        self._yields_batches = source.yields == "batch"
        self._running: Iterator[object] | None = None
        self._batch: Mapping[str, object] = {}
        self._rows = range(0)

    def read(self, _sample: int) -> Mapping[str, Value]:
        """The next sample, whatever number is asked for."""
        try:
            return _values_of(self._columns, self._next(), self._max_bytes)
        except load.FunctionFailed as error:
            self._running, self._rows = None, range(0)
            raise SampleUnreadable(f"{error}\n  so the generator was restarted") from None

    def name(self, sample: int) -> str:
        """Its place in the stream."""
        return f"{self._name}, number {sample}"

    def close(self) -> None:
        """The generator ends with the process."""

    def _next(self) -> Mapping[str, object]:
        if not self._yields_batches:
            return _named(self._columns, self._yielded())
        if not self._rows:
            self._batch = _named(self._columns, self._yielded())
            lengths = {name: load.call(len, values) for name, values in self._batch.items()}
            if len(set(lengths.values())) > 1:
                raise SampleUnreadable(f"a batch whose fields have different lengths: {lengths}")
            self._rows = range(min(lengths.values()))
            if not self._rows:
                raise SampleUnreadable("a batch without samples")
        row, self._rows = self._rows[0], self._rows[1:]
        return {name: load.call(getitem, values, row) for name, values in self._batch.items()}

    def _yielded(self) -> object:
        """The next value; another generator is begun if one has ended."""
        if self._running is not None:
            given = load.call(next, self._running, _END)
            if given is not _END:
                return given
        self._running = self._begin()
        given = load.call(next, self._running, _END)
        if given is _END:
            self._running = None
            raise SampleUnreadable("the generator ended before it had yielded anything")
        return given

    def _begin(self) -> Iterator[object]:
        entropy = None  # the operating system chooses
        if self._seed is not None:
            entropy = self._seed, load.Here.worker, *([self._begun] if self._begun else [])
        random = {"rng": np.random.default_rng(entropy)} if self._takes_rng else {}
        self._begun += 1
        return load.call(iter, load.call(self._function, **self._options, **random))


def _takes_rng(function: Callable[..., object]) -> bool:
    try:
        parameters = load.call(inspect.signature, function).parameters
    except load.FunctionFailed:  # written in C
        return False
    return "rng" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _named(columns: tuple[Column, ...], given: object) -> dict[str, object]:
    if isinstance(given, Mapping):
        missing = [column.name for column in columns if column.name not in given]
        if missing:
            raise SampleUnreadable(f"there is no {missing[0]!r}, only {', '.join(map(repr, list(given)[:8]))}")
        return {column.name: given[column.name] for column in columns}
    if len(columns) == 1 and not (isinstance(given, tuple) and len(given) == 1):
        return {columns[0].name: given}
    if not isinstance(given, (tuple, list)) or len(given) != len(columns):
        what = f"{len(given)} values" if isinstance(given, (tuple, list)) else f"one {type(given).__name__}"
        raise SampleUnreadable(f"{what} instead of the {len(columns)} that fields declares")
    return {column.name: value for column, value in zip(columns, given, strict=True)}


def _values_of(columns: tuple[Column, ...], given: Mapping[str, object], max_bytes: int) -> dict[str, Value]:
    """Values with the types of their columns. Raises ``SampleUnreadable``."""
    try:
        values = {column.name: load.checked_value(column, given[column.name]) for column in columns}
    except (load.NotAsDeclared, load.FunctionFailed) as error:
        raise SampleUnreadable(str(error)) from None
    for name, value in values.items():
        if isinstance(value, memoryview):
            check_bytes(value.nbytes, max_bytes, f"{name!r} ")
    return values


READERS: dict[type[SourceOptions], OpenReader] = {
    PythonSource: lambda source, _index, max_bytes, _storage: PythonReader(source, max_bytes),
    GeneratorSource: lambda source, _index, max_bytes, _storage: GeneratorReader(source, max_bytes),
    PluginSource: lambda source, index, max_bytes, _storage: plugin_kind(source).open(source, index, max_bytes),
}
