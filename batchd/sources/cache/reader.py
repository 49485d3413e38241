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
    pixels    (name, 5, header, length of the file, ((factor, shape), ...), bytes)    instead of the
              file's bytes: all of them as decoded at 1/factor, one factor after the other
    head      (name, 6, header, length of the file, bytes)    what is in front of its image data

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

from batchd.samples.access_points import FileHead, has_points
from batchd.samples.columns import Column
from batchd.samples.errors import SampleUnreadable
from batchd.samples.kept_files import DecodedFile, FilePart, KeptFiles
from batchd.samples.values import Value, array_of
from batchd.sources.cache.disk import DiskCache
from batchd.sources.cache.memory import SampleCache
from batchd.sources.interface import Reader, ReadsAhead, ReadsParts

DISK_DESCRIPTORS = 3
_BYTES, _ARRAY, _SCALAR, _PLAIN, _POINTS, _PIXELS, _HEAD = range(7)
WITH_VALUES = frozenset({_BYTES, _ARRAY, _POINTS, _PIXELS, _HEAD})
"""Kinds of facts whose last number says how many bytes they have behind the facts."""


Rewriter: TypeAlias = Callable[[memoryview], bytes | None]
"""Makes other bytes of a field, with the same meaning for all readers; None: the same bytes."""


PlanPart: TypeAlias = Callable[[int, str, FileHead, memoryview], tuple[int, int] | None]
"""The bytes that a sample needs of the file in a field, from a first one to an end; None: all."""


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
HEAD_BYTES_MAX = 1 << 14
"""Longer heads of files are not kept."""
FILE_WITH_PARTS_BYTES_MIN = 1 << 18
"""Shorter files are read whole: few crops leave out enough of them."""
PART_SAVES_BYTES_MIN = 1 << 17
"""A part of a file is read if it leaves out so much: some 60 us of a worker's CPU time and 1 ms at 1
Gbit/s, and to plan the part takes some 30 us."""
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
        self._parts_reader = (
            reader if kind == "points" and isinstance(reader, ReadsParts) and reader.reads_parts() else None
        )
        self._points.wants_heads = self._parts_reader is not None
        self.plan_part: PlanPart | None = None
        """Plans parts of the files that are read next."""
        self._parts: dict[int, tuple[int, int]] = {}
        self._unfit: set[int] = set()
        """Samples of whose files a part was not enough: they are others by now."""
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
        values = self._read_part(sample, *found) if found is not None and sample in self._parts else None
        if values is None:
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

    def forget_part(self, sample: int) -> None:
        """Read all of this sample from now on."""
        self._parts.pop(sample, None)
        self._unfit.add(sample)

    def _read_part(self, sample: int, facts: memoryview, parts: memoryview) -> Mapping[str, Value] | None:
        """The values of a sample, with a part of its file; None if that part cannot be read."""
        assert self._parts_reader is not None, "the part was planned for it"
        head = heads_of(facts, parts).get("image")
        if head is None:
            return None
        first, end = self._parts[sample]
        try:
            values = dict(self._parts_reader.read_part(sample, first, end))
        except SampleUnreadable:
            return None
        # Zeros that are never written take no memory.
        data = np.zeros(head.file_bytes, np.uint8).data
        data[: len(head.data)] = head.data
        read = values["image"]
        assert isinstance(read, memoryview), "bytes of a file"
        data[first:end] = read
        values["image"] = FilePart(head.header, data, end - first)
        return values

    def _planned_parts(self, samples: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The parts of files that save enough."""
        planned: dict[int, tuple[int, int]] = {}
        if self._parts_reader is None or self.plan_part is None or len(self._unfit) >= REPLACED_MAX:
            return planned
        for sample in samples:
            if sample in self._unfit:
                continue
            found = self._cache.find(sample)
            head = heads_of(*found).get("image") if found is not None else None
            if found is None or head is None:
                continue
            part = self.plan_part(sample, "image", head, unpack(*found)[1]["image"])
            if part is not None and head.file_bytes - (part[1] - part[0]) >= PART_SAVES_BYTES_MIN:
                planned[sample] = part
        return planned

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
            record = _with_heads(_with_points(NO_VALUES, {**self._points.known, **found}), self._points.heads)
            is_kept = self._cache.keep(self._sample, *record)
            self._refused_bytes = 0 if is_kept else sum(map(len, record.values))

    def _may_keep_points(self, sample: int) -> bool:
        """True if there is room for points of a sample, and it has not other bytes each time."""
        if self._has_record and (sample in self._replaced or len(self._replaced) >= REPLACED_MAX):
            return False
        return self._cache.has_room(max(POINTS_BYTES, self._refused_bytes))

    def prefetch(self, samples: Sequence[int]) -> None:
        """Announce samples; those that are not in the cache are read next."""
        if self._ahead is None:
            return
        self._parts = self._planned_parts(samples)
        if self._parts:
            assert self._parts_reader is not None, "parts are planned for it"
            self._parts_reader.prefetch_with(samples, self._parts)
            return
        is_kept = self.reads_rows() and self.has_all(np.asarray(samples, np.int64))
        self._ahead.prefetch([] if is_kept else [sample for sample in samples if not self._has_values(sample)])

    def _has_values(self, sample: int) -> bool:
        if not self._keeps_pixels:
            return self.keeps_samples and sample in self._cache
        found = self._cache.find(sample)  # a record may have access points alone
        return found is not None and any(kind not in {_POINTS, _HEAD} for _name, kind, *_rest in _facts(found[0]))

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
            size = sum(image.nbytes for image in value.pixels.values())
            facts.append((name, _PIXELS, value.header, value.file_bytes, shapes, size))
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


def _with_heads(record: Record, heads: Mapping[str, FileHead]) -> Record:
    kept = {
        name: head
        for name, head in heads.items()
        if len(head.data) <= HEAD_BYTES_MAX and head.file_bytes >= FILE_WITH_PARTS_BYTES_MIN
    }
    if not kept:
        return record
    facts = _facts(record.facts)
    facts += [(name, _HEAD, head.header, head.file_bytes, len(head.data)) for name, head in kept.items()]
    return Record(
        msgpack.packb(facts, unicode_errors="surrogatepass"), [*record.values, *(head.data for head in kept.values())]
    )


def heads_of(facts: memoryview, parts: memoryview) -> dict[str, FileHead]:
    """The heads of the files of a record."""
    heads: dict[str, FileHead] = {}
    start = 0
    for name, kind, *rest in _facts(facts):
        if kind == _HEAD:
            header, file_bytes, size = rest
            heads[name] = FileHead(tuple(header), file_bytes, parts[start : start + size])
        start += rest[-1] if kind in WITH_VALUES else 0
    return heads


def rewritten(record: Record, rewriters: Mapping[str, Rewriter]) -> Record:
    """The record with the bytes of the rewriters."""
    facts = _facts(record.facts)
    parts: list[memoryview | bytes] = []
    old_parts = iter(record.values)
    for fact in facts:
        if fact[1] == _PIXELS:
            parts += islice(old_parts, len(fact[-2]))
            continue
        if fact[1] not in WITH_VALUES:
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
            header, file_bytes, shapes, _size = rest
            assert file is not None, "the reader of samples whose pixels are kept"
            pixels = {}
            for factor, shape in shapes:
                pixels[factor] = np.ndarray(shape, np.uint8, parts, start)
                start += pixels[factor].size
            values[name] = DecodedFile(tuple(header), file_bytes, pixels, partial(file, name))
        elif kind == _HEAD:
            start += rest[-1]
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
        start += rest[-1] if kind in WITH_VALUES else 0
    missing = rows.keys() - arrays.keys() - numbers.keys()
    if missing:
        raise SampleUnreadable(f"{min(missing)!r} has another shape in the cache")
    return RecordForm(arrays, numbers)


def _facts(facts: memoryview | bytes) -> list[Any]:
    made: list[Any] = msgpack.unpackb(facts, unicode_errors="surrogatepass")
    return made
