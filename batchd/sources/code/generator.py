"""Somebody's own generator as a source: each worker runs one, and takes what comes. Daemon and workers.

    number of a sample    counts, and names nothing: whoever reads gets the next sample of the generator in its process
    a generator ends      another one is begun, with another seed
    a generator raises    a bad sample; another one is begun

Invariant: without ``seed`` no two instances have the same seed, in whatever process, before or
after a restart; with it, instance n of worker i always has the same, and no other instance of a
stream has it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from batchd.errors import SourceInvalid
from batchd.functions.calls import FunctionFailed, call
from batchd.functions.find import ModuleNotFound, find_module, parse_function
from batchd.functions.load import Here, load_for
from batchd.samples.errors import SampleUnreadable
from batchd.samples.values import Value
from batchd.sources.code.declared import columns_of, named, source_given, values_of
from batchd.sources.code.options import SAMPLES_MAX, GeneratorSource
from batchd.sources.interface import BuiltInKind
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey

_END = object()


class GeneratorReader:
    """What the generator of this process yields, one sample after the other."""

    def __init__(self, source: GeneratorSource, max_bytes: int) -> None:
        self._name = source.function
        self._function = load_for(source.function, source_given(source))
        self._options = source.options
        self._takes_rng = _takes_rng(self._function)
        self._seed = source.seed
        self._begun = 0
        self._columns = columns_of(source.fields)
        self._max_bytes = max_bytes
        self._next = self._next_of_batch if source.yields == "batch" else self._next_sample
        self._running: Iterator[Any] | None = None
        self._batch: Mapping[str, Any] = {}
        self._rows = range(0)

    def read(self, _sample: int) -> Mapping[str, Value]:
        """The next sample, whatever number is asked for. See ``kinds.Reader``."""
        try:
            return values_of(self._columns, self._next(), self._max_bytes)
        except FunctionFailed as error:
            self._running, self._rows = None, range(0)
            raise SampleUnreadable(f"{error}\n  so the generator was begun anew") from None

    def known(self, _sample: int) -> Mapping[str, Value]:
        """Nothing is known of what comes."""
        return {}

    def name(self, sample: int) -> str:
        """Its place in the stream."""
        return f"{self._name}, number {sample}"

    def close(self) -> None:
        """The generator goes with the process."""

    def _next_sample(self) -> Mapping[str, Any]:
        return named(self._columns, self._yielded())

    def _next_of_batch(self) -> Mapping[str, Any]:
        if not self._rows:
            self._batch = named(self._columns, self._yielded())
            self._rows = range(self._length())
        row, self._rows = self._rows[0], self._rows[1:]
        return {name: call(_row, values, row) for name, values in self._batch.items()}

    def _length(self) -> int:
        lengths = {name: call(len, values) for name, values in self._batch.items()}
        if len(set(lengths.values())) > 1:
            raise SampleUnreadable(f"a batch whose fields have different lengths: {lengths}")
        length = min(lengths.values())
        if not length:
            raise SampleUnreadable("a batch without samples")
        return length

    def _yielded(self) -> Any:
        """The next that is yielded, by another generator where one has ended."""
        if self._running is not None:
            given = call(next, self._running, _END)
            if given is not _END:
                return given
        self._running = self._begin()
        given = call(next, self._running, _END)
        if given is _END:
            self._running = None
            raise SampleUnreadable("the generator ended before it had yielded anything")
        return given

    def _begin(self) -> Iterator[Any]:
        random = {"rng": np.random.default_rng(self._entropy())} if self._takes_rng else {}
        self._begun += 1
        return call(iter, call(self._function, **self._options, **random))

    def _entropy(self) -> tuple[int, ...] | None:
        """What the next instance's random numbers come from: None has the operating system choose."""
        if self._seed is None:
            return None
        return self._seed, Here.worker, *([self._begun] if self._begun else [])


def _row(values: Any, row: int) -> Any:
    return values[row]


def _takes_rng(function: Callable[..., Any]) -> bool:
    try:
        parameters = call(inspect.signature, function).parameters
    except FunctionFailed:  # written in C
        return False
    return "rng" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _scan(source: GeneratorSource, survey: Survey) -> SourceIndex:
    """There is nothing to scan. Raises ``SourceInvalid`` where the module is gone."""
    try:
        digest = find_module(parse_function(source.function).module, survey.python_path).digest
    except ModuleNotFound as error:
        raise SourceInvalid(str(error)) from None
    facts = {
        "function": source.function,
        "code": digest,
        "options": source.options,
        "fields": list(source.fields.items()),
        "yields": source.yields,
        **({} if source.seed is None else {"seed": source.seed}),
    }
    return SourceIndex.build(source.epoch_samples or SAMPLES_MAX, facts, {}, {})


KIND = BuiltInKind(
    problems=lambda _source, _storage: [],
    columns=lambda source, _storage: columns_of(source.fields),
    scan=_scan,
    open=lambda source, _index, max_bytes, _storage: GeneratorReader(source, max_bytes),
)
