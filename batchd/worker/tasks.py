"""Samples that are made for something else than rows: written into shards, measured. WORKER.

    NAME-000000.tar    a shard: members for each value, named by the sample's number

A shard is written as NAME.unfinished and flushed to the disk. The process of `batchd prepare`
renames it when it has noted which samples were left out.

A stream with ``pack`` or a bucket plans its batches by the size of each sample, so each sample is
made once before the first batch; of images that are cut into patches, of a sound and of an array in
a shard, the header suffices, and of a list of numbers in Parquet, its length.

Invariant: what an order makes is a function of the source, the steps, the seed and the encoding.
"""

import io
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchd.core.rows import rows_of
from batchd.data.functions.load import FunctionUnusable
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.image.options import Decode, ImageStep
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.pipeline.image.stages import can_join
from batchd.data.pipeline.media.sound_files import open_sound
from batchd.data.pipeline.media.windows import length_of
from batchd.data.pipeline.options import FILE_BYTES_MAX, StepOptions, step_from_plain
from batchd.data.pipeline.shapes.options import Patches
from batchd.data.samples.columns import Column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.image_header import PIXELS_MAX
from batchd.data.samples.kept_files import FileFacts
from batchd.data.samples.values import MediaFile, Value, array_of
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import StorageLimits
from batchd.runtime import failpoints
from batchd.worker import messages as orders
from batchd.worker.members import MemberEncoder
from batchd.worker.process import NoteMemory
from batchd.worker.sample_maker import BAD, RecipeUnusable, SampleMaker, shortened
from batchd.worker.stopwatch import Stopwatch
from batchd_wire.codec import Message
from batchd_wire.wording import counted

EPOCH = 0
"""Random steps draw the numbers of the first epoch, if the message names no other."""
AHEAD_SAMPLES = 64
"""Samples of a shard that are requested from a server at once."""
NAME_DIGITS = 9
VALUE_MAX = 10**12
"""Of a field whose value is the size."""
FIRST_SIDEWAYS = 5
"""Of the EXIF orientations: from here on, width and height are exchanged."""


class SizeInvalid(Exception):  # noqa: N818  names what is wrong
    """A sample has a value that cannot be a size."""


class SampleTask(ABC):
    """What a worker does with the samples of its only stream.

    ``descriptors``: the index, which stays the caller's, and a cache, which it has until its end.
    """

    def __init__(
        self,
        message: orders.PrepareStream | orders.MeasureStream,
        descriptors: Sequence[int],
        note: NoteMemory,
        storage: Storage,
    ) -> None:
        storage.limits = StorageLimits.from_wire(message.storage)
        storage.as_of_ns = message.as_of_ns
        self.quarantined: set[int] = set()
        self._note = note
        self._recipe = recipe = orders.SampleRecipe(*message.recipe)
        self._steps = [step_from_plain(step) for step in recipe.steps]
        found = SourceIndex.from_descriptor(descriptors[0])
        self._cache = descriptors[1:]
        self._open = partial(SampleMaker, index=found, stopwatch=Stopwatch(), storage=storage)

    measures = False
    """Whether only lengths count, so that headers of images may do."""
    cache = "off"
    """The kind of the cache."""

    @cached_property
    def _maker(self) -> SampleMaker:
        """Raises ``RecipeUnusable``."""
        return self._open(self._recipe, has_rows=False, measures=self.measures, cache=self.cache, others=self._cache)

    @abstractmethod
    def carry_out(self, order: orders.WriteShard | orders.MeasureSamples) -> Iterator[Message]:
        """Report bad samples, and the result."""

    def _each(
        self, samples: Sequence[int], ahead: int, reason_bytes_max: int, use: Callable[[int], None]
    ) -> Iterator[orders.SampleBad]:
        """Call ``use`` for each sample, of which so many are requested at once."""
        for place, sample in enumerate(samples):
            if place % ahead == 0:
                self._maker.read_ahead(samples[place : place + ahead])
            self._note.take(place, sample)
            try:
                if sample in self.quarantined:
                    raise SampleUnreadable("killed the process that worked on it, twice")
                use(sample)
            except BAD as error:
                reason = shortened(str(error), reason_bytes_max)
                yield orders.SampleBad(sample, self._maker.shown_name(sample), reason)


class ShardWriter(SampleTask):
    """Reads, processes, encodes and writes one shard after the other."""

    def __init__(
        self, message: orders.PrepareStream, descriptors: Sequence[int], note: NoteMemory, storage: Storage
    ) -> None:
        super().__init__(message, descriptors, note, storage)
        self._folder = Path(message.folder)
        self._image_format, self._quality = message.image_format, message.quality
        self._short_groups = message.short_groups

    @cached_property
    def _encoder(self) -> MemberEncoder:
        is_bgr = any(isinstance(step, Decode) and step.color == "bgr" for step in self._steps)
        return MemberEncoder(
            self._maker.columns, self._image_format, self._quality, is_bgr=is_bgr, short_groups=self._short_groups
        )

    def carry_out(self, order: orders.WriteShard | orders.MeasureSamples) -> Iterator[Message]:
        """Write a shard."""
        assert isinstance(order, orders.WriteShard)
        self._note.begin(order.order)
        unfinished = self._folder / f"{order.name}.unfinished"
        size, hopeless = 0, ""
        try:
            yield from self._write(order, unfinished)
            size = unfinished.stat().st_size
        except RecipeUnusable as error:
            hopeless = shortened(str(error), orders.HOPELESS_BYTES_MAX)
        except (OSError, FunctionUnusable, StepInvalid) as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else shortened(str(error), orders.HOPELESS_BYTES_MAX)
            hopeless = f"{self._folder / order.name}: {reason}"
        self._note.clear()
        yield orders.ShardWritten(size, hopeless)
        failpoints.passing("prepare.shard.written")

    def _write(self, order: orders.WriteShard, file: Path) -> Iterator[orders.SampleBad]:
        """Write all good samples; report the others."""
        encoder = self._encoder
        with file.open("wb") as raw:
            # closed without an end if the context ends by an error
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:

                def add(sample: int) -> None:
                    failpoints.passing("prepare.sample.begin", sample)
                    _add_members(tar, sample, encoder.members(self._maker.make(EPOCH, sample)))

                samples = range(order.first, order.first + order.count)
                yield from self._each(samples, AHEAD_SAMPLES, orders.REASON_BYTES_MAX, add)
            raw.flush()
            os.fsync(raw.fileno())


def _add_members(tar: tarfile.TarFile, sample: int, members: Iterator[tuple[str, bytes]]) -> None:
    """Append a sample in WebDataset format. Members have no times and no owners.

    Raises ``OSError``; ``SampleUndecodable`` before it writes.
    """
    for ending, content in list(members):
        member = tarfile.TarInfo(f"{sample:0{NAME_DIGITS}}.{ending}")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


class SampleMeasurer(SampleTask):
    """Finds the size of each sample, or whether it can be made."""

    def __init__(
        self, message: orders.MeasureStream, descriptors: Sequence[int], note: NoteMemory, storage: Storage
    ) -> None:
        super().__init__(message, descriptors, note, storage)
        self.cache = message.cache
        self._field, self._by, self._epoch = message.field, message.by, message.epoch
        self.measures = message.by == "length"
        self._patches = patches_of(self._steps, message.field)

    @cached_property
    def _row_maker(self) -> tuple[SampleMaker, dict[str, NDArray[np.generic]]] | None:
        """Makes rows, and the fields of one; None where a later plan joins samples.

        The row is of a batch whose images have the first of several sizes.
        """
        fields = [(column.field, column.sizes[0] if column.sizes else ()) for column in self._maker.columns.values()]
        row = {field.name: np.zeros(field.of_room("", size).shape, field.dtype) for field, size in fields if field}
        if len(row) < len(fields):
            return None
        return self._open(self._recipe), row

    def carry_out(self, order: orders.WriteShard | orders.MeasureSamples) -> Iterator[Message]:
        """Measure samples that are not known to be bad."""
        assert isinstance(order, orders.MeasureSamples)
        self._note.begin(order.order)
        sizes, hopeless, after = dict.fromkeys(rows_of(order.runs), 0), "", list[dict[str, str]]()
        unknown = [sample for sample in sizes if sample not in self.quarantined]

        def measure(sample: int) -> None:
            if self._by == "steps":
                after.extend([] if after else self._after_steps(sample))
                sizes[sample] = 1
                return
            sizes[sample] = self._size(sample) if self._by else self._try(sample)

        try:
            maker = self._maker  # while it opens, no sample is to blame
            if self._by == "length" and unknown:
                self._note.take(0, unknown[0])
                sizes.update(zip(unknown, maker.lengths(unknown, self._field).tolist(), strict=True))
                unknown = [sample for sample in unknown if not sizes[sample]]
            yield from self._each(unknown, orders.SAMPLES_AT_ONCE, orders.LONG_REASON_BYTES_MAX, measure)
        except (FunctionUnusable, StepInvalid, RecipeUnusable, SizeInvalid) as error:
            hopeless = shortened(str(error), orders.HOPELESS_BYTES_MAX)
        self._note.clear()
        yield orders.SamplesMeasured(list(sizes.values()), hopeless, after)

    def _after_steps(self, sample: int) -> list[dict[str, str]]:
        """See ``SamplesMeasured``. Raises as ``SampleMaker.make``."""
        found: list[dict[str, str]] = []
        known: dict[str, str] = {}
        for count in range(len(self._steps) + 1):
            maker = self._open(self._recipe._replace(steps=self._recipe.steps[:count]), has_rows=False)
            try:
                texts = {name: _text_of(value) for name, value in maker.make(self._epoch, sample).items()}
            finally:
                maker.close()
            found.append({name: text for name, text in texts.items() if text != known.get(name)})
            known = texts
        return found

    def _try(self, sample: int) -> int:
        """Make a sample as a row of a batch, or its values; 1. Raises ``SampleUndecodable``."""
        if self._row_maker is None:
            bad = self._maker.make_for(EPOCH, sample, lambda _values: None)
        else:
            maker, row = self._row_maker
            bad = maker.make_row(EPOCH, sample, 0, row)
        if bad is not None:
            raise SampleUndecodable(bad)
        return 1

    def _size(self, sample: int) -> int:
        """The size of a sample, at least 0. Raises ``SizeInvalid``, and as ``SampleMaker.make``."""
        if self._patches is not None:
            plan = self._maker.plan(EPOCH, sample)
            assert plan is not None, "a step decodes"
            return (plan.geometry.height // self._patches.size) * (plan.geometry.width // self._patches.size)
        value = self._maker.make(EPOCH, sample)[self._field]
        try:
            if self._by == "seconds":
                assert isinstance(value, memoryview | MediaFile), "the bytes of a file"
                return _duration(self._maker.columns[self._field], value, self._maker.facts)
            return _size(self._maker.columns[self._field], value, self._by)
        except SizeInvalid as error:
            raise SizeInvalid(f"{self._maker.shown_name(sample)}: {error}") from None


def patches_of(steps: Sequence[StepOptions], field: str) -> Patches | None:
    """The step that cuts ``field``, if all steps on it are planned from the header of a file."""
    on_field = [step for step in steps if field in (step.changes or {field})]
    first = next((place for place, step in enumerate(steps) if isinstance(step, ImageStep)), 0)
    run = [step for step in steps[first : first + len(on_field) - 1] if isinstance(step, ImageStep)]
    is_planned = bool(run) and run == on_field[:-1] and isinstance(run[0], Decode) and all(map(can_join, run, run[1:]))
    return on_field[-1] if is_planned and isinstance(on_field[-1], Patches) else None


def _text_of(value: Value) -> str:
    """What there is of a value, for people."""
    if isinstance(value, str):
        return counted(len(value), "character")
    if isinstance(value, list | dict):
        return counted(len(value), "item")
    if isinstance(value, np.ndarray | np.generic) and value.shape:
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, memoryview | bytes | MediaFile):
        return f"{value.size if isinstance(value, MediaFile) else len(value):,} bytes"
    return str(value)


def _size(column: Column, value: Value, by: str) -> int:
    """The size of a value, at least 0. Raises ``SampleUndecodable`` and ``SizeInvalid``."""
    if by == "length":
        return len(array_of(column, value))
    if by == "bytes":
        if isinstance(value, MediaFile):
            return value.size
        stored = value.encode() if isinstance(value, str) else value
        return len(stored) if isinstance(stored, (bytes, memoryview)) else array_of(column, stored).nbytes
    if by == "value":
        number = float(array_of(column, value))
        if not 0 < number <= VALUE_MAX:  # nor NaN
            raise SizeInvalid(f"{column.name!r} is {number:g}: a size is a number above 0, and at most {VALUE_MAX:g}")
        return max(1, round(number * orders.ASPECT_UNIT))
    if isinstance(value, memoryview):
        header = probe_image(value)
        height, width = header.height, header.width
        if header.orientation >= FIRST_SIDEWAYS:
            height, width = width, height
    else:
        height, width = array_of(column, value).shape[:2]
    if by == "pixels":
        return height * width
    return max(1, width * orders.ASPECT_UNIT // height) if height * width else 0


def _duration(column: Column, value: memoryview | MediaFile, facts: FileFacts | None) -> int:
    """The seconds of sound or video, as a size, at least 0. Raises as ``SampleMaker.make``."""
    if column.kind == "audio":
        with open_sound(value, facts=facts) as sound:
            return max(1, round(sound.frames * orders.ASPECT_UNIT / sound.rate)) if sound.frames else 0
    from batchd.data.media.frames import open_frames  # noqa: PLC0415  needs an extra

    file = value if isinstance(value, MediaFile) else MediaFile.of(value)
    with closing(open_frames(file, None, PIXELS_MAX, FILE_BYTES_MAX, facts)) as video:
        frames = video.frames
    return max(1, round(length_of(frames.times[frames.order]) * Fraction(*frames.unit) * orders.ASPECT_UNIT))


def task_of(
    message: orders.PrepareStream | orders.MeasureStream, descriptors: Sequence[int], note: NoteMemory, storage: Storage
) -> SampleTask:
    """The task of a worker that gets this message, with its descriptors: see ``SampleTask``."""
    if isinstance(message, orders.PrepareStream):
        return ShardWriter(message, descriptors, note, storage)
    return SampleMeasurer(message, descriptors, note, storage)
