"""Sources that are made of other sources: their indexes in one index, their readers in one reader. Daemon and workers.

    facts    {"parts": [[samples, facts], ...], ...}        place   {"parts": [place, ...]}
    arrays   "0/labels", "0/paths", ..., "1/labels", ...    and "classes", where all parts have the same

Invariant: the samples of all parts have the same columns, and where two of them have names for
their classes, the same names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.samples.values import Value
from batchd.sources.interface import Reader, kind_of, read_ahead
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage
from batchd.storage.index import Arrays, SourceIndex, blob, readable
from batchd.storage.survey import Survey

Parts = Sequence[SourceOptions]


def common_columns(parts: Parts, storage: Storage, source_field: str = "") -> tuple[Column, ...]:
    """The columns that all of them have, and one for which part a sample is from. Raises ``SourceInvalid`` where they differ."""
    return agreed_columns({number: _columns(part, number, storage) for number, part in enumerate(parts)}, source_field)


def agreed_columns(columns: Mapping[int, tuple[Column, ...]], source_field: str = "") -> tuple[Column, ...]:
    """As above, for parts whose columns are known, by their numbers."""
    (earliest, first), *others = columns.items()
    for number, other in others:
        if set(other) != set(first):
            raise SourceInvalid(f"sources[{number}] has {_listed(other)}, but sources[{earliest}] has {_listed(first)}")
    if source_field in {column.name for column in first}:
        raise SourceInvalid(f"source_field = {source_field!r} is a field of the sources already")
    return (*first, Column(source_field, dtype="int64")) if source_field else first


def scan_parts(parts: Parts, survey: Survey) -> list[SourceIndex]:
    """Find the samples of all parts. Raises ``SourceInvalid`` naming the part."""
    found: list[SourceIndex] = []
    for number, part in enumerate(parts):
        try:
            found.append(kind_of(part).scan(part, survey.part(sum(map(len, found)))))
        except SourceInvalid as error:
            raise SourceInvalid(f"sources[{number}]: {error}" if len(parts) > 1 else str(error)) from None
    return found


def join(parts: Sequence[SourceIndex], samples: int, facts: Mapping[str, Any], arrays: Arrays) -> SourceIndex:
    """One index of several, with ``facts`` and ``arrays`` that say which samples of theirs it has."""
    joined = {f"{number}/{name}": array for number, part in enumerate(parts) for name, array in part.arrays.items()}
    classes = _common_classes(parts)
    return SourceIndex.build(
        samples,
        {"parts": [[len(part), part.facts] for part in parts], **facts},
        {**arrays, **joined, **({"classes": blob(classes)} if classes else {})},
        {"parts": [part.place for part in parts]},
    )


class PartReaders:
    """The readers of all parts, each opened when its first sample is asked for."""

    def __init__(self, parts: Parts, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        self._parts = parts
        self._storage = storage
        self._index = index
        self._max_bytes = max_bytes
        self._readers: dict[int, Reader] = {}

    def __getitem__(self, number: int) -> Reader:
        reader = self._readers.get(number)
        if reader is None:
            part = self._parts[number]
            reader = kind_of(part).open(part, self._part(number), self._max_bytes, self._storage)
            self._readers[number] = reader
        return reader

    def read_ahead(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """Have every part read ahead what is wanted of it."""
        for number in {*wanted, *self._readers}:
            read_ahead(self[number], wanted.get(number, ()))

    def close(self) -> None:
        """Close all that are open."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _part(self, number: int) -> SourceIndex:
        samples, facts = self._index.facts["parts"][number]
        prefix = f"{number}/"
        arrays: dict[str, NDArray[Any]] = {
            name.removeprefix(prefix): array for name, array in self._index.arrays.items() if name.startswith(prefix)
        }
        return SourceIndex(samples, facts, arrays, self._index.place["parts"][number], "")


Places: TypeAlias = Callable[[int], tuple[int, int]]
"""The part that a sample of the whole is of, and its number within it. Raises ``IndexError`` where there is no such sample."""


class ComposedReader:
    """Samples of several parts."""

    def __init__(self, readers: PartReaders, places: Places, source_field: str = "") -> None:
        self._readers = readers
        self._places = places
        self._source_field = source_field
        self.close = readers.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        part, number = self._places(sample)
        return self._with_source(self._readers[part].read(number), part)

    def prefetch(self, samples: Sequence[int]) -> None:
        """See ``kinds.read_ahead``."""
        wanted: dict[int, list[int]] = {}
        for part, number in map(self._places, samples):
            wanted.setdefault(part, []).append(number)
        self._readers.read_ahead(wanted)

    def known(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        part, number = self._places(sample)
        return self._with_source(self._readers[part].known(number), part)

    def name(self, sample: int) -> str:
        """See ``kinds.Reader``."""
        part, number = self._places(sample)
        return self._readers[part].name(number)

    def _with_source(self, values: Mapping[str, Value], part: int) -> Mapping[str, Value]:
        return {**values, self._source_field: part} if self._source_field else values


def places_in(index: SourceIndex) -> Places:
    """Where samples are, of an index with the arrays ``numbers``, int64 [n], and ``parts``, int [n], where there are several."""
    parts, numbers = index.arrays.get("parts"), index.arrays["numbers"]

    def place(sample: int) -> tuple[int, int]:
        sample = index.checked(sample)
        return 0 if parts is None else int(parts[sample]), int(numbers[sample])

    return place


def _columns(part: SourceOptions, number: int, storage: Storage) -> tuple[Column, ...]:
    try:
        return kind_of(part).columns(part, storage)
    except SourceInvalid as error:
        raise SourceInvalid(f"sources[{number}]: {error}") from None


def _common_classes(parts: Sequence[SourceIndex]) -> tuple[bytes, ...]:
    """The names of the classes that all parts with names have. Raises ``SourceInvalid`` where two have different ones."""
    named = {number: names for number, part in enumerate(parts) if any(names := part.names("classes"))}
    if not named:
        return ()
    first, names = next(iter(named.items()))
    for number, others in named.items():
        for label, pair in enumerate(zip(names, others, strict=False)):
            if pair[0] != pair[1]:
                raise SourceInvalid(
                    f"label {label} is {readable(pair[0])} in sources[{first}], but {readable(pair[1])} in sources[{number}]: "
                    "give them the same classes, or name the files in list sources"
                )
        if len(names) != len(others):
            raise SourceInvalid(
                f"sources[{first}] has {len(names)} classes, but sources[{number}] has {len(others)}: give them the same "
                "classes, or name the files in list sources"
            )
    return names


def _listed(columns: tuple[Column, ...]) -> str:
    return ", ".join(f"{column.name}: {column.text}" for column in columns)
