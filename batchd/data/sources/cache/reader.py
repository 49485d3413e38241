"""A reader that keeps samples in a cache and reads each only once. Workers only.

    read -> in the cache?  yes -> its values, in place
                           no  -> read -> (the caller makes a row of it) -> keep
    read_rows -> the values of many samples that are all in the cache, straight into their rows

Invariant: a sample has the same values from the cache and from the source: same types, order and
content.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from batchd.data.samples.errors import SampleUnreadable
from batchd.data.samples.kept_files import FileHead, FilePart, KeptFiles, KnownFile, has_points
from batchd.data.samples.values import MediaFile, Value
from batchd.data.sources.cache import record as records
from batchd.data.sources.cache.disk import DiskCache
from batchd.data.sources.cache.memory import SampleCache
from batchd.data.sources.interface import PlacesFiles, Reader, ReadsAhead, ReadsParts, ReadsPoints
from batchd_wire.views import Array

MEMORY_DESCRIPTORS = 2
PlanPart: TypeAlias = Callable[[int, str, FileHead, memoryview], tuple[int, int] | None]
"""The bytes that a sample needs of the file in a field, from a first one to an end; None: all."""


POINTS_BYTES = 1 << 14
"""Room that a cache needs before a file is walked for its access points."""
POINTS_PART = 100
"""A file's points take some 1/130 of what its pixels take, or less."""
FORMS_MAX = 4096
PART_SAVES_BYTES_MIN = 1 << 17
"""A part of a file is read if it leaves out this many bytes: some 60 us of a worker's CPU time and
1 ms at 1 Gbit/s, while a plan of the part takes some 30 us."""
REPLACED_MAX = 10_000
"""Number of samples whose points a worker replaces: a replaced record still takes room, and a
source may return other bytes each time."""


def open_cache(descriptors: Sequence[int]) -> SampleCache | DiskCache:
    """Open a worker's cache: two descriptors in memory, more on disk. The caller keeps them."""
    if len(descriptors) > MEMORY_DESCRIPTORS:
        return DiskCache(*descriptors)
    return SampleCache(*descriptors)


class CachedReader:
    """A ``Reader`` that reads through a cache. Belongs to one worker and one stream.

    ``kind``: "points" keeps only access points, and reads all samples from the source. "pixels"
    keeps samples with the pixels of their files, while that leaves room for the points of all
    others. "decoded" keeps the output of steps: ``read`` returns either that or the values of the
    source, and ``is_hit`` says which.
    """

    def __init__(
        self,
        reader: Reader,
        cache: SampleCache | DiskCache,
        kind: str = "encoded",
        *,
        files: KeptFiles | None = None,
    ) -> None:
        self._reader = reader
        self._ahead = reader if isinstance(reader, ReadsAhead) else None
        self._cache = cache
        self.keeps_samples = kind != "points"
        self._keeps_made = kind == "decoded"
        self._keeps_pixels = kind == "pixels"
        files = files or KeptFiles()
        self._points, self._decoded = files.points, files.decoded
        self._parts_reader = (
            reader if kind == "points" and isinstance(reader, ReadsParts) and reader.reads_parts() else None
        )
        self._points.wants_heads = self._parts_reader is not None
        self._points_reader = (
            reader if self._points.fields and isinstance(reader, ReadsPoints) and reader.read_points() else None
        )
        self.places = reader if kind == "points" and isinstance(reader, PlacesFiles) else None
        """The reader, if ``known_file`` can be asked."""
        self.plan_part: PlanPart | None = None
        """Plans parts of the files that are read next."""
        self.parts: dict[int, tuple[int, int]] = {}
        """The planned parts of the samples that were announced last, or that are read now."""
        self._unfit: set[int] = set()
        """Samples of whose files a part was not enough: they are others by now."""
        self._refused_bytes = 0
        """The size of the last record for which there was no room."""
        self._replaced: set[int] = set()
        """Samples whose cached points did not match their bytes."""
        self._sample = 0
        self._fresh: tuple[int, records.Record] | None = None
        self.is_hit = False
        """True if the last sample was in the cache."""
        self._has_record = False
        """True if the last sample, or its access points, were in the cache."""
        self._values: Mapping[str, Value] = {}
        self._forms: dict[bytes, records.RecordForm] = {}
        """By the facts of samples that were read at once: few, if only labels differ."""
        self._whole: str | None = None
        """The column that was all values of the samples last read at once."""
        self.values_stay = isinstance(cache, SampleCache)
        """Whether values from the cache stay; one on disk uses its memory again."""
        self.known = reader.known
        self.name = reader.name
        self.close = reader.close

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        self._fresh = None
        found = self._cache.find(sample)
        self._has_record = found is not None
        kept, known = records.unpack(*found, partial(self._file, sample)) if found is not None else ({}, {})
        self.is_hit = bool(kept)
        self._decoded.begin()
        if self.is_hit:
            self._points.begin(known, is_kept=False)
            return kept
        values = self._read_part(sample, *found) if found is not None and sample in self.parts else None
        beside: Mapping[str, memoryview] = {}
        if values is None:
            values = self._reader.read(sample)
            beside = self._points_beside()
        self._sample = sample
        if self._keeps_pixels or not self.keeps_samples:
            is_kept = self._may_keep_points(sample)
            self._points.begin({**beside, **known}, is_kept=is_kept, unkept=beside.keys() - known.keys())
            if self._keeps_pixels:
                self._values = values
                self._decoded.begin(self._has_room_for_pixels)
        elif not self._keeps_made:
            self.offer(values)
            self._points.begin(beside, is_kept=self._fresh is not None)
        return values

    def _points_beside(self) -> dict[str, memoryview]:
        """The access points that lie beside the files of the sample that was read last."""
        if self._points_reader is None:
            return {}
        return {name: record for name, record in self._points_reader.points.items() if name in self._points.fields}

    def known_file(self, sample: int) -> KnownFile | None:
        """The file of a sample, if it is known and need not be read to plan its crop.

        Only if ``places``.
        """
        assert self.places is not None, "it places files"
        found = self._cache.find(sample)
        header, points = records.header_and_points(*found, "image") if found is not None else (None, None)
        place = self.places.place(sample) if header is not None else None
        if header is None or place is None:
            return None
        if points is None or not has_points(points):
            return KnownFile(place, header, None)
        # A cache on disk uses its memory again.
        return KnownFile(place, header, bytes(points) if isinstance(self._cache, DiskCache) else points)

    def forget_part(self, sample: int) -> None:
        """Read all of this sample from now on."""
        self.parts.pop(sample, None)
        self._unfit.add(sample)

    def _read_part(self, sample: int, facts: memoryview, parts: memoryview) -> Mapping[str, Value] | None:
        """The values of a sample, with a part of its file; None if that part cannot be read."""
        assert self._parts_reader is not None, "the part was planned for it"
        head = records.heads_of(facts, parts).get("image")
        if head is None:
            return None
        first, end = self.parts[sample]
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
            head = records.heads_of(*found).get("image") if found is not None else None
            if found is None or head is None:
                continue
            part = self.plan_part(sample, "image", head, records.unpack(*found)[1]["image"])
            if part is not None and head.file_bytes - (part[1] - part[0]) >= PART_SAVES_BYTES_MIN:
                planned[sample] = part
        return planned

    def reads_rows(self) -> bool:
        """See ``interface.ReadsRows``: records have all values of a sample."""
        return self.keeps_samples and not self._keeps_pixels

    def has_all(self, samples: npt.NDArray[np.int64]) -> bool:
        """True if all samples are in the cache, as far as its index tells."""
        return self._cache.has_all(samples)

    def read_rows(
        self, samples: npt.NDArray[np.int64], chunks: Sequence[Mapping[str, Array]], begin: Callable[[int], None]
    ) -> None:
        """See ``interface.ReadsRows``, of samples that are all in the cache."""
        end = 0
        for chunk, rows in enumerate(chunks):
            begin(chunk)
            first, end = end, end + len(next(iter(rows.values())))
            self._read_chunk(samples[first:end], rows)

    def _read_chunk(self, samples: npt.NDArray[np.int64], rows: Mapping[str, Array]) -> None:
        """Values that are one column alone are read straight into its rows."""
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

    def _form(self, facts: bytes, rows: Mapping[str, Array]) -> records.RecordForm:
        """The form of records with these facts. Raises as ``record_form``."""
        if facts not in self._forms:
            if len(self._forms) >= FORMS_MAX:
                self._forms.clear()
            self._forms[facts] = records.record_form(facts, rows)
        return self._forms[facts]

    def offer(self, values: Mapping[str, Value]) -> None:
        """Offer values of the last sample; ``keep`` keeps them if there is room."""
        several = (value if isinstance(value, list) else [value] for value in values.values())
        values_bytes = sum(
            one.size if isinstance(one, MediaFile) else getattr(one, "nbytes", 0) for value in several for one in value
        )
        if self._cache.has_room(values_bytes + POINTS_BYTES * len(self._points.fields)):
            self._fresh = self._sample, records.pack(values)

    def keep(self) -> None:
        """Keep the last sample or its points. Called for good samples, before the next ``read``."""
        found = self._points.found
        if self._fresh is not None:
            sample, record = self._fresh
            self._fresh = None
            self._cache.keep(sample, *records.with_points(record, {**self._points.known, **found}))
        elif self._decoded.found:
            record = records.pack({**self._values, **self._decoded.found})
            self._cache.keep(self._sample, *records.with_points(record, {**self._points.known, **found}))
        elif found:
            if self._has_record:
                self._replaced.add(self._sample)
            record = records.with_headers(
                records.with_points(records.NO_VALUES, {**self._points.known, **found}), self._points.headers
            )
            record = records.with_heads(record, self._points.heads)
            is_kept = self._cache.keep(self._sample, *record)
            self._refused_bytes = 0 if is_kept else sum(map(len, record.values))

    def _may_keep_points(self, sample: int) -> bool:
        """True if there is room for the points of a sample whose bytes do not keep changing."""
        if self._has_record and (sample in self._replaced or len(self._replaced) >= REPLACED_MAX):
            return False
        return self._cache.has_room(max(POINTS_BYTES, self._refused_bytes))

    def prefetch(self, samples: Sequence[int]) -> None:
        """Announce samples; those that are not in the cache are read next."""
        if self._ahead is None:
            return
        self.parts = self._planned_parts(samples)
        if self.parts:
            assert self._parts_reader is not None, "parts are planned for it"
            self._parts_reader.prefetch_with(samples, self.parts)
            return
        is_kept = self.reads_rows() and self.has_all(np.asarray(samples, np.int64))
        self._ahead.prefetch([] if is_kept else [sample for sample in samples if not self._has_values(sample)])

    def _has_values(self, sample: int) -> bool:
        if not self._keeps_pixels:
            return self.keeps_samples and sample in self._cache
        found = self._cache.find(sample)  # a record may have access points alone
        return found is not None and records.has_values(found[0])

    def _file(self, sample: int, name: str) -> memoryview:
        """Read the file of a field whose pixels are in the cache."""
        value = self._reader.read(sample)[name]
        assert isinstance(value, memoryview), "a file was decoded"
        return value

    def _has_room_for_pixels(self, size: int) -> bool:
        """True if there is room for ``size`` bytes of pixels and the points of all samples."""
        return self._cache.has_room(size + len(self._cache) * (size // POINTS_PART))
