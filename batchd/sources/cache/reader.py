"""A reader that keeps samples in a cache, and reads each only once. Workers only.

    read -> in the cache?  yes -> its values, in place
                           no  -> read -> (the caller makes a row of it) -> keep
    read_rows -> the values of many samples that are all in the cache, straight into their rows

Each value of a sample is a fact of its record, as msgpack: (name, kind, ...). The bytes of images
and arrays follow behind the facts, in this order:

    bytes     (name, 0, bytes)                    a read-only memoryview
    array     (name, 1, dtype, shape, bytes)      copied out, as steps may write into it
    scalar    (name, 2, dtype, its bytes)         of numpy
    plain     (name, 3, value)                    a text, or a number of Python
    points    (name, 4, bytes)                    the access points of the field's file
    pixels    (name, 5, header, length of the file, ((factor, shape), ...))    instead of the
              file's bytes: all of them as decoded at 1/factor, one factor after the other

Invariant: a sample has the same values, in type, order and content, from the cache or not. Only of
a field with a rewriter the bytes differ, and the steps make the same of them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from batchd.samples.access_points import has_points
from batchd.samples.columns import Column
from batchd.samples.errors import SampleUnreadable
from batchd.samples.kept_files import DecodedFile, KeptFiles
from batchd.samples.values import Value, array_of
from batchd.sources.cache.disk import DiskCache
from batchd.sources.cache.memory import SampleCache
from batchd.sources.interface import Reader, ReadsAhead

DISK_DESCRIPTORS = 3
_BYTES, _ARRAY, _SCALAR, _PLAIN, _POINTS, _PIXELS = range(6)


Rewriter: TypeAlias = Callable[[memoryview], bytes | None]
"""Makes other bytes of a field, with the same meaning for all readers; None: the same bytes."""


class Record(NamedTuple):
    """A sample as a cache keeps it."""

    facts: bytes
    values: list[memoryview | bytes]


NO_VALUES = Record(msgpack.packb([]), [])
POINTS_BYTES = 1 << 14
"""Of the access points of a file: if there is room for so many, files are walked for them."""
POINTS_PART = 100
"""A file's points take some 1/130 of what its pixels take, or less."""
FORMS_MAX = 4096
REPLACED_MAX = 10_000
"""Samples whose points a worker replaces. A source may give other bytes each time, and a replaced
record still takes its room."""


def open_cache(descriptors: Sequence[int]) -> SampleCache | DiskCache:
    """The cache of a worker: two descriptors in memory, three on disk. The caller keeps them."""
    if len(descriptors) == DISK_DESCRIPTORS:
        return DiskCache(*descriptors)
    return SampleCache(*descriptors)


class CachedReader:
    """Reads through a cache; a ``Reader`` itself. Belongs to one worker and one stream.

    ``kind``: "points" keeps access points alone, and all samples are read from the source. "pixels"
    keeps samples with the pixels of their files, as long as that leaves room for the points of all
    others. With "decoded", the cache has what steps made of a sample, so ``read`` returns either
    that or what the source gives, and ``is_hit`` says which.
    """

    def __init__(
        self,
        reader: Reader,
        cache: SampleCache | DiskCache,
        kind: str = "encoded",
        *,
        files: KeptFiles | None = None,
        rewriters: Mapping[str, Rewriter] = MappingProxyType({}),
    ) -> None:
        """``rewriters``: by the names of fields whose bytes are replaced if they have no points."""
        self._reader = reader
        self._ahead = reader if isinstance(reader, ReadsAhead) else None
        self._cache = cache
        self.keeps_samples = kind != "points"
        self._keeps_made = kind == "decoded"
        self._keeps_pixels = kind == "pixels"
        files = files or KeptFiles()
        self._points, self._decoded = files.points, files.decoded
        self._rewriters = rewriters
        self._refused_bytes = 0
        """The size of the last record for which there was no room."""
        self._replaced: set[int] = set()
        """Samples whose points were those of other bytes."""
        self._sample = 0
        self._fresh: tuple[int, Record] | None = None
        self.is_hit = False
        """True if the last sample was in the cache."""
        self._has_record = False
        """True if the last sample, or its access points, were in the cache."""
        self._values: Mapping[str, Value] = {}
        self._forms: dict[bytes, RecordForm] = {}
        """By the facts of samples that were read at once: few, if only labels differ."""
        self._whole: str | None = None
        """The column that was all values of the samples last read at once."""
        self.known = reader.known
        self.name = reader.name
        self.close = reader.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        self._fresh = None
        found = self._cache.find(sample)
        self._has_record = found is not None
        kept, known = unpack(*found, partial(self._file, sample)) if found is not None else ({}, {})
        self.is_hit = bool(kept)
        self._decoded.begin()
        if self.is_hit:
            self._points.begin(known, is_kept=False)
            return kept
        values = self._reader.read(sample)
        self._sample = sample
        if self._keeps_pixels or not self.keeps_samples:
            self._points.begin(known, is_kept=self._may_keep_points(sample))
            if self._keeps_pixels:
                self._values = values
                self._decoded.begin(self._has_room_for_pixels)
        elif not self._keeps_made:
            self.offer(values)
            self._points.begin(is_kept=self._fresh is not None)
        return values

    def reads_rows(self) -> bool:
        """See ``interface.ReadsRows``: records have all values of a sample."""
        return self.keeps_samples and not self._keeps_pixels

    def has_all(self, samples: npt.NDArray[np.int64]) -> bool:
        """True if all samples are in the cache, as far as its index tells."""
        return self._cache.has_all(samples)

    def read_rows(self, samples: npt.NDArray[np.int64], rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """See ``interface.ReadsRows``, of samples that are all in the cache.

        Values that are one column alone are read straight into its rows.
        """
        whole, self._whole = self._whole, None
        values = np.empty((0, 0), np.uint8)

        def memory(length: int) -> npt.NDArray[np.uint8]:
            nonlocal values
            if whole is None or rows[whole].nbytes != len(samples) * length or not rows[whole].flags.c_contiguous:
                values = np.empty((len(samples), length), np.uint8)
            else:
                values = rows[whole].reshape(-1).view(np.uint8).reshape(len(samples), length)
            return values

        facts = self._cache.read_rows(samples, memory)
        if facts is None:
            raise SampleUnreadable("a sample is damaged in the cache, or they differ in length")
        forms = {one: self._form(one, rows) for one in set(facts)}
        arrays = forms[facts[0]].arrays
        if any(form.arrays != arrays for form in forms.values()):
            raise SampleUnreadable("the arrays of the samples differ in shape")
        is_there = whole is not None and np.may_share_memory(values, rows[whole])
        if is_there and list(arrays) != [whole]:
            raise SampleUnreadable(f"{whole!r} is not all that the samples have in the cache")
        for name, out in rows.items():
            if name not in arrays:
                out[...] = np.array([forms[one].numbers[name] for one in facts], out.dtype)
            elif not is_there:
                start, size = arrays[name]
                out[...] = values[:, start : start + size].copy().view(out.dtype).reshape(out.shape)
        (self._whole,) = arrays if len(arrays) == 1 else [None]

    def _form(self, facts: bytes, rows: Mapping[str, npt.NDArray[Any]]) -> "RecordForm":
        """The form of records with these facts. Raises as ``record_form``."""
        if facts not in self._forms:
            if len(self._forms) >= FORMS_MAX:
                self._forms.clear()
            self._forms[facts] = record_form(facts, rows)
        return self._forms[facts]

    def offer(self, values: Mapping[str, Value]) -> None:
        """Offer values of the last sample, to be kept if it is good and there is room."""
        values_bytes = sum(getattr(value, "nbytes", 0) for value in values.values())
        if self._cache.has_room(values_bytes + POINTS_BYTES * len(self._points.fields)):
            self._fresh = self._sample, pack(values)

    def keep(self) -> None:
        """Keep the last sample, or its points: it is good. Called before the next ``read``."""
        found = self._points.found
        if self._fresh is not None:
            sample, record = self._fresh
            self._fresh = None
            rewriters = {name: one for name, one in self._rewriters.items() if not has_points(found.get(name))}
            self._cache.keep(sample, *_with_points(rewritten(record, rewriters) if rewriters else record, found))
        elif self._decoded.found:
            record = pack({**self._values, **self._decoded.found})
            self._cache.keep(self._sample, *_with_points(record, {**self._points.known, **found}))
        elif found:
            if self._has_record:
                self._replaced.add(self._sample)
            record = _with_points(NO_VALUES, {**self._points.known, **found})
            is_kept = self._cache.keep(self._sample, *record)
            self._refused_bytes = 0 if is_kept else sum(map(len, record.values))

    def _may_keep_points(self, sample: int) -> bool:
        """True if there is room for points of a sample, and it has not other bytes each time."""
        if self._has_record and (sample in self._replaced or len(self._replaced) >= REPLACED_MAX):
            return False
        return self._cache.has_room(max(POINTS_BYTES, self._refused_bytes))

    def prefetch(self, samples: Sequence[int]) -> None:
        """Announce samples; those that are not in the cache are read next."""
        if self._ahead is not None:
            is_kept = self.reads_rows() and self.has_all(np.asarray(samples, np.int64))
            self._ahead.prefetch([] if is_kept else [sample for sample in samples if not self._has_values(sample)])

    def _has_values(self, sample: int) -> bool:
        if not self._keeps_pixels:
            return self.keeps_samples and sample in self._cache
        found = self._cache.find(sample)  # a record may have access points alone
        return found is not None and any(kind != _POINTS for _name, kind, *_rest in _facts(found[0]))

    def _file(self, sample: int, name: str) -> memoryview:
        """Read a file whose pixels are kept."""
        value = self._reader.read(sample)[name]
        assert isinstance(value, memoryview), "a file was decoded"
        return value

    def _has_room_for_pixels(self, size: int) -> bool:
        """True if there is room for ``size`` bytes of pixels, and then for the points of all samples."""
        return self._cache.has_room(size + len(self._cache) * (size // POINTS_PART))


def pack(values: Mapping[str, Value]) -> Record:
    """The record of a sample: views of bytes, and copies of arrays, which steps may write into."""
    facts: list[tuple[Any, ...]] = []
    parts: list[memoryview | bytes] = []
    for name, value in values.items():
        if isinstance(value, memoryview):
            facts.append((name, _BYTES, value.nbytes))
            parts.append(value)
        elif isinstance(value, np.ndarray):
            facts.append((name, _ARRAY, value.dtype.str, value.shape, value.nbytes))
            parts.append(value.tobytes())
        elif isinstance(value, DecodedFile):
            shapes = [(factor, image.shape) for factor, image in value.pixels.items()]
            facts.append((name, _PIXELS, value.header, value.file_bytes, shapes))
            parts += [image.data.cast("B") for image in value.pixels.values()]
        elif isinstance(value, np.generic):
            facts.append((name, _SCALAR, value.dtype.str, value.tobytes()))
        else:
            facts.append((name, _PLAIN, value))
    return Record(msgpack.packb(facts, unicode_errors="surrogatepass"), parts)


def _with_points(record: Record, points: Mapping[str, memoryview | bytes]) -> Record:
    if not points:
        return record
    facts = _facts(record.facts)
    facts += [(name, _POINTS, len(one)) for name, one in points.items()]
    return Record(msgpack.packb(facts, unicode_errors="surrogatepass"), [*record.values, *points.values()])


def rewritten(record: Record, rewriters: Mapping[str, Rewriter]) -> Record:
    """The record with the bytes of the rewriters."""
    facts = _facts(record.facts)
    parts: list[memoryview | bytes] = []
    old_parts = iter(record.values)
    for fact in facts:
        if fact[1] == _PIXELS:
            parts += islice(old_parts, len(fact[-1]))
        if fact[1] not in {_BYTES, _ARRAY}:
            continue
        part = next(old_parts)
        if fact[1] == _BYTES and fact[0] in rewriters:
            part = rewriters[fact[0]](memoryview(part)) or part
            fact[2] = len(part)
        parts.append(part)
    return Record(msgpack.packb(facts, unicode_errors="surrogatepass"), parts)


def unpack(
    facts: memoryview, parts: memoryview, file: Callable[[str], memoryview] | None = None
) -> tuple[dict[str, Value], dict[str, memoryview]]:
    """The values of a record, and the access points of its files.

    ``file`` reads the file of a field whose pixels the record has.
    """
    values: dict[str, Value] = {}
    points: dict[str, memoryview] = {}
    start = 0
    for name, kind, *rest in _facts(facts):
        if kind in {_BYTES, _POINTS}:
            (size,) = rest
            (values if kind == _BYTES else points)[name] = parts[start : start + size]
            start += size
        elif kind == _ARRAY:
            dtype, shape, size = rest
            array: npt.NDArray[Any] = np.frombuffer(parts[start : start + size], dtype)
            values[name] = array.reshape(shape).copy()
            start += size
        elif kind == _PIXELS:
            header, file_bytes, shapes = rest
            assert file is not None, "the reader of samples whose pixels are kept"
            pixels = {}
            for factor, shape in shapes:
                pixels[factor] = np.ndarray(shape, np.uint8, parts, start)
                start += pixels[factor].size
            values[name] = DecodedFile(tuple(header), file_bytes, pixels, partial(file, name))
        elif kind == _SCALAR:
            dtype, content = rest
            values[name] = np.frombuffer(content, dtype)[0]
        else:
            (values[name],) = rest
    return values, points


class RecordForm(NamedTuple):
    """What the facts of a record say about some columns.

    ``arrays``: the first byte and the length of each array in the values. ``numbers``: all others.
    """

    arrays: Mapping[str, tuple[int, int]]
    numbers: Mapping[str, Any]


def record_form(facts: bytes, rows: Mapping[str, npt.NDArray[Any]]) -> RecordForm:
    """The form of a record, for the columns of ``rows``, ``[samples, *shape]`` of its dtype each.

    Raises ``SampleUnreadable`` or ``SampleUndecodable`` if a column is not one of these numbers.
    """
    arrays: dict[str, tuple[int, int]] = {}
    numbers: dict[str, Any] = {}
    start = 0
    for name, kind, *rest in _facts(facts):
        if name in rows:
            dtype, shape = rows[name].dtype, rows[name].shape[1:]
            if kind == _ARRAY and (np.dtype(rest[0]), tuple(rest[1])) == (dtype, shape):
                arrays[name] = start, rest[2]
            elif kind in {_SCALAR, _PLAIN}:
                value = rest[0] if kind == _PLAIN else np.frombuffer(rest[1], rest[0])[0]
                numbers[name] = array_of(Column(name, dtype=dtype.name, shape=shape), value).item()
        start += rest[-1] if kind in {_BYTES, _POINTS, _ARRAY, _PIXELS} else 0
    missing = rows.keys() - arrays.keys() - numbers.keys()
    if missing:
        raise SampleUnreadable(f"{min(missing)!r} has another shape in the cache")
    return RecordForm(arrays, numbers)


def _facts(facts: memoryview | bytes) -> list[Any]:
    made: list[Any] = msgpack.unpackb(facts, unicode_errors="surrogatepass")
    return made
