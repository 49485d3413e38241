"""Makes the samples of one stream, one by one. WORKER process.

    recipe + index --> reader, behind a cache --> values --first steps--> values --others--> a row
                                    ^---- a cache of decoded samples keeps the first steps' result

``epoch`` is that of the random numbers: ``Plan.draw_epoch`` of a row's position.

A recipe with a cut is made in two parts with and without a cache, because what is decoded without
knowing a crop may be other pixels. So a worker host needs no cache for the same bytes.

Invariant: a problem of one sample is a reason, and the next sample can be made;
``RecipeUnusable`` concerns all samples.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Plan
from batchd.data.functions.load import FunctionUnusable, expect
from batchd.data.pipeline.cache_split import decoded_files
from batchd.data.pipeline.effects import StepInvalid
from batchd.data.pipeline.execute import Pipeline, steps_before_joins
from batchd.data.pipeline.image.jpeg_box import FileTask
from batchd.data.pipeline.image.options import Decode
from batchd.data.pipeline.image.stages import ImagePlan
from batchd.data.pipeline.options import step_from_plain
from batchd.data.pipeline.stages import Row
from batchd.data.pipeline.step_files import changed_file
from batchd.data.samples.columns import parse_column
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.kept_files import FileFacts, KeptFiles, PartUnfit
from batchd.data.samples.location import is_url
from batchd.data.samples.shared_boxes import SharedBoxes, Sibling
from batchd.data.samples.values import Value
from batchd.data.sources.cache.disk import DiskCache
from batchd.data.sources.cache.keyed import KeyedCache
from batchd.data.sources.cache.memory import SampleCache
from batchd.data.sources.cache.reader import CachedReader, open_cache
from batchd.data.sources.interface import (
    NamesFiles,
    ReadsAhead,
    ReadsLengths,
    ReadsRows,
    open_reader,
    read_ahead,
)
from batchd.data.sources.options import source_from_plain
from batchd.data.sources.outage import why_away
from batchd.data.sources.push.reader import PushReader
from batchd.data.storage.access import Storage
from batchd.data.storage.ahead import Requested
from batchd.data.storage.index import SourceIndex
from batchd.runtime import failpoints
from batchd.runtime.rights import own_rights
from batchd.worker.messages import PATH_BYTES_MAX, SampleRecipe
from batchd.worker.others import NearSamples, Others
from batchd.worker.process import NoteMemory
from batchd.worker.stopwatch import Stopwatch
from batchd_wire.wording import KEEP_PART

BAD = SampleUnreadable, SampleUndecodable
"""Errors of a single sample."""

MEANWHILE_S = 0.005
"""How often a worker that waits for servers looks for something else to do."""


class RecipeUnusable(Exception):  # noqa: N818  names what is wrong
    """No sample can be made: a user's function cannot be imported, or a step's file has changed."""


class StorageAway(Exception):  # noqa: N818  names what is wrong
    """The storage of the source is away: the sample may be good, and is made later."""


class WantedRow(NamedTuple):
    """A row of an order that ``SampleMaker.make_files`` may make. ``arrays``: all of its batch."""

    order: int
    epoch: int
    row: int
    sample: int
    arrays: Row


class Announced(NamedTuple):
    """Samples that are requested before they are made; of those in ``parts``, a part is enough.

    ``blocks``: requests for several orders that some of the samples are in.
    """

    requested: Requested
    parts: dict[int, tuple[int, int]]
    blocks: tuple[Requested, ...] = ()


class SampleMaker:
    """Reads samples and runs the steps. Belongs to one stream of one process; not thread-safe.

    ``columns``: after all steps, by name. ``is_live``: reading a number again gives another sample.
    """

    _cached: CachedReader | None = None
    first_steps: Pipeline | None = None
    """Makes what is kept by a cache of decoded samples, with and without one, or by ``_near``."""
    _near: NearSamples | None = None
    """Samples that are about to join others."""
    _is_read = False
    """Whether the last sample was read, and so may be one for the cache."""

    def __init__(  # noqa: PLR0913  each is one thing that samples are made with
        self,
        recipe: SampleRecipe,
        index: SourceIndex,
        stopwatch: Stopwatch,
        storage: Storage,
        *,
        cache: str = "off",
        others: Sequence[int] = (),
        has_rows: bool = True,
        waits_for_storage: bool = False,
        plan: Plan | None = None,
        substitutes: bool = True,
        measures: bool = False,
    ) -> None:
        """Open the reader and load the steps. Raises ``RecipeUnusable``.

        ``cache``: which kind the stream has. ``others``: the descriptors of the cache, which stay
        the caller's, or that of the mailbox. Without rows, samples are values of whatever shape.
        ``waits_for_storage``: samples of storage that is away raise ``StorageAway``. ``plan`` and
        ``substitutes``: as of ``Others``. ``measures``: see ``Pipeline``.
        """
        steps = self._steps = [step_from_plain(step) for step in recipe.steps]
        source = source_from_plain(recipe.source)
        columns = [parse_column(name, text) for name, text in recipe.columns]
        expect(recipe.python_path, dict(recipe.modules))
        self.is_live = source.is_live
        self._stopwatch = stopwatch
        self._storage = storage
        self._index = index
        self._waits_for_storage = waits_for_storage and not source.is_live
        self.joining = Others(
            plan or Plan(max(1, len(index)), 1, recipe.seed, shuffle=False, drop_last=False),
            substitutes,
            self._read_made,
            self._keep,
            self._check_storage,
            self.shown_name,
        )
        self._ahead = Announced(storage.requested, {})
        timings, before_joins = stopwatch.timings, 0 if plan is None else steps_before_joins(steps)
        self._near = NearSamples() if before_joins else None
        self._keeps_made, cut = recipe.cut > 0 and cache != "off", recipe.cut or before_joins
        kept_files = self._kept_files = KeptFiles(
            [name for name, _longest in recipe.cropped], decoded_files(steps) if cache == "pixels" else ()
        )
        with ExitStack() as where_it_fails:
            try:
                self.reader = self._source = open_reader(source, index, recipe.record_bytes_max, storage)
                where_it_fails.callback(self.reader.close)
                self.mailbox = self.reader if isinstance(self.reader, PushReader) else None
                if self.mailbox is not None:
                    self.mailbox.attach(*others)
                if cache != "off":
                    with own_rights():
                        kept = open_cache(others)
                    where_it_fails.callback(kept.close)
                    self._use(kept, cache)
                if cut:
                    self.first_steps = Pipeline(
                        columns,
                        steps[:cut],
                        recipe.seed,
                        has_rows=False,
                        timings=timings,
                        kept=None if recipe.cut else kept_files,
                    )
                    columns = list(self.first_steps.columns.values())
                self._pipeline = Pipeline(
                    columns,
                    steps[cut:],
                    recipe.seed,
                    has_rows=has_rows,
                    timings=timings,
                    kept=kept_files,
                    others=self.joining,
                    measures=measures,
                )
                makes_no_values = not cut or self._cached is not None
                self._rows_reader = self.reader if isinstance(self.reader, ReadsRows) and makes_no_values else None
                if self._rows_reader is not None and not (self._pipeline.runs_rows and self._rows_reader.reads_rows()):
                    self._rows_reader = None
                places_files = self._cached is not None and self._cached.places is not None
                self._files_stage = self._pipeline.of_files if places_files and not cut else None
                self._shares = self._pipeline.announces and not cut and self._cached is None and not source.is_live
                self.reads_ahead = self._shares or (
                    isinstance(self._source, ReadsAhead) and (self._rows_reader is None or self._cached is not None)
                )
                """True if ``announce`` saves time: rows are local, but a cache may lack some."""
                self.columns = self._pipeline.columns
                changed = changed_file(recipe.files)
            except (FunctionUnusable, StepInvalid) as error:
                changed = changed_file(recipe.files) or str(error)
            if changed is not None:
                raise RecipeUnusable(changed)
            self._opened = where_it_fails.pop_all()

    def _use(self, cache: SampleCache | DiskCache, kind: str) -> None:
        """Read samples through a cache, or keep in it what is known of their files."""
        if kind == "media":
            self._kept_files.facts = KeyedCache(cache)
            return
        self.reader = self._cached = CachedReader(self.reader, cache, kind, files=self._kept_files)
        self._keeping = self._stopwatch.timings.part(KEEP_PART)

    def join(self, shared: SharedBoxes, siblings: str) -> None:
        """Decode together with the worker's other streams of this order: see ``ServeStream``."""
        decode = self._steps[0]
        assert isinstance(decode, Decode), "it decodes at first"
        sibling = self._kept_files.sibling = shared.join(siblings, decode.field, self._pipeline.boxes)
        self._opened.callback(sibling.leave)

    @property
    def sibling(self) -> Sibling | None:
        """The stream among those that the worker decodes together; None: it is alone."""
        return self._kept_files.sibling

    @property
    def facts(self) -> FileFacts | None:
        """What a cache keeps of files of sound and video; None without one."""
        return self._kept_files.facts

    @property
    def makes_rows(self) -> bool:
        """True if ``make_rows`` can be tried."""
        return self._rows_reader is not None

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def read_ahead(self, samples: Sequence[int], epoch: int | None = None) -> None:
        """Request all samples that the reader can fetch at once, and wait for the answers.

        Those of the call before this one are forgotten. ``epoch``: see ``announce``.
        """
        if self.reads_ahead:
            self._ahead.requested.forget()
            self._ahead = self.announce(samples, epoch)
            self.begin_announced(self._ahead)

    def announce(self, samples: Sequence[int], epoch: int | None = None) -> Announced:
        """Request all samples that the reader can fetch at once, which saves waiting for each.

        ``epoch``: of all of them, so that parts of files suffice; None if it differs. Paired with
        ``Requested.forget``.
        """
        if self._cached is not None:
            is_whole = epoch is None or self._pipeline.joins
            self._cached.plan_part = None if is_whole else partial(self._pipeline.part, epoch or 0)
        requested = self._storage.begin_reading_ahead()
        read_ahead(self.reader, samples)
        return Announced(requested, {} if self._cached is None else self._cached.parts)

    def others(self, epoch: int, sample: int) -> list[int]:
        """The samples that join one, if none is bad."""
        if not self._pipeline.joins:
            return []
        others_of = self.joining.others_of
        return [next(others_of(epoch, sample, pick, near)) for pick, near in self._pipeline.picks(epoch, sample)]

    def to_read(self, samples: Sequence[int]) -> list[int]:
        """Those of the samples that are not kept here."""
        return list(samples) if self._near is None else [one for one in dict.fromkeys(samples) if one not in self._near]

    def request_block(self, samples: Sequence[int]) -> Requested:
        """Request whole samples for several orders. Paired with ``Requested.forget``."""
        if self._cached is not None:
            self._cached.plan_part = None
        requested = self._storage.begin_reading_block()
        read_ahead(self.reader, samples)
        return requested

    def share(self, wanted: Iterable[tuple[int, int]], requested: Requested) -> None:
        """Announce samples, each with its epoch, that are decoded together where they can be.

        Until ``requested`` is forgotten.
        """
        told: list[tuple[int, int]] = []
        for epoch, sample in wanted if self._shares else ():
            with suppress(*BAD):  # which the sample says when it is made
                self._storage.begin_sample()
                if not self._pipeline.announce(self._source.read(sample), epoch, sample):
                    self._shares = False
                    break
                told.append((epoch, sample))
        requested.at_end(partial(self._forget, told))

    def _forget(self, told: Iterable[tuple[int, int]]) -> None:
        for epoch, sample in told:
            self._pipeline.forget(epoch, sample)

    def begin_announced(self, announced: Announced, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for announced samples, which are made next. ``meanwhile`` is called now and then.

        The wait is no longer than one sample may take; then, samples are read one by one.
        """
        if self._cached is not None:
            self._cached.parts = announced.parts
        begun_ns = perf_counter_ns()
        until_ns = begun_ns + int(self._storage.limits.deadline_s * 1e9)
        for requested in (*announced.blocks, announced.requested):
            while not requested.wait(MEANWHILE_S) and perf_counter_ns() < until_ns:
                meanwhile()
        self._stopwatch.waited(begun_ns)

    def make(self, epoch: int, sample: int, attempt: int = 0) -> Mapping[str, Value]:
        """Values of a sample, without a row. Raises ``BAD``, and as ``make_row`` does."""
        made = self._pipeline.make(self._read(epoch, sample, attempt), epoch, sample, attempt)
        self._keep()
        return made

    def lengths(self, samples: Sequence[int], field: str) -> NDArray[np.int64]:
        """The elements of a field in each sample, int64 ``[samples]``, 0 if it has to be made."""
        keeps_length = all(step.keeps_length or field not in (step.changes or {field}) for step in self._steps)
        if not keeps_length or not isinstance(self.reader, ReadsLengths):
            return np.zeros(len(samples), np.int64)
        self._ahead.requested.forget()
        self._ahead = Announced(self._storage.begin_reading_ahead(), {})
        self._storage.begin_sample()
        return self.reader.lengths(samples, field)

    def plan(self, epoch: int, sample: int) -> ImagePlan | None:
        """What the first stage on an image would make of a sample, as ``Pipeline.plan``."""
        return self._pipeline.plan(self._read(epoch, sample, 0), epoch, sample)

    def make_row(self, epoch: int, sample: int, attempt: int, row: Row) -> str | None:
        """Write the fields of a sample into ``row``; return why it is bad: then all are undefined.

        Raises ``StepInvalid`` and ``FunctionUnusable`` if no other sample can be made either, and
        ``StorageAway`` if that is so at present.
        """
        return self._try(epoch, sample, attempt, lambda values: self._pipeline.run(values, epoch, sample, attempt, row))

    def make_for(self, epoch: int, sample: int, store: Callable[[Mapping[str, Value]], None]) -> str | None:
        """Make the values of a sample, without a row, for ``store``; otherwise as ``make_row``.

        ``store`` may raise ``SampleUndecodable``.
        """
        return self._try(epoch, sample, 0, lambda values: store(self._pipeline.make(values, epoch, sample, 0)))

    def _try(self, epoch: int, sample: int, attempt: int, use: Callable[[Mapping[str, Value]], None]) -> str | None:
        error = self._try_once(epoch, sample, attempt, use)
        if error is None or not self._waits_for_storage:
            return None if error is None else str(error)
        self._check_storage(sample)
        if isinstance(error, SampleUnreadable) and not self._is_remote(sample):
            error = self._try_once(epoch, sample, attempt, use)  # the storage may be back just now
            if error is not None:
                self._check_storage(sample)
        return None if error is None else str(error)

    def _check_storage(self, sample: int) -> None:
        """Raise ``StorageAway`` if a sample is not bad, but the storage of its source is away."""
        if not self._waits_for_storage:
            return
        reason = why_away(self._source, self._index, sample, self._storage)
        if reason is not None:
            raise StorageAway(reason)

    def _is_remote(self, sample: int) -> bool:
        file = self._source.file(sample) if isinstance(self._source, NamesFiles) else None
        return is_url(file or os.fsencode(self._source.name(sample)))

    def _try_once(
        self, epoch: int, sample: int, attempt: int, use: Callable[[Mapping[str, Value]], None]
    ) -> SampleUnreadable | SampleUndecodable | None:
        try:
            try:
                use(self._read(epoch, sample, attempt))
            except PartUnfit:
                assert self._cached is not None, "it has read a part"
                self._cached.forget_part(sample)
                use(self._read(epoch, sample, attempt))
            self._keep()  # not before: a repaired file is to be read again
        except BAD as error:
            self._stopwatch.waste_sample()
            return error
        if self.sibling is not None and self.sibling.has_found:
            self._stopwatch.is_shared()
        taken_ns = self._stopwatch.end_sample()
        if taken_ns is not None:
            self._stopwatch.note_slow(sample, self.shown_name(sample), taken_ns)
        return None

    def _keep(self) -> None:
        if self._cached is not None and self.joining.is_good and self._is_read:
            self._cached.keep()
            self._stopwatch.timings.lap(self._keeping)

    @property
    def makes_files(self) -> bool:
        """True if ``make_files`` can be tried."""
        return self._files_stage is not None

    def make_files(self, wanted: Sequence[WantedRow], note: NoteMemory) -> set[tuple[int, int]]:
        """Plan several rows by what a cache knows of their files, then make these in one call.

        Returns (order, row) of those made: ``make_row`` makes the others, or says why not.
        The ``note`` names each sample while it is planned and while it is made. Only if
        ``makes_files``. Raises as ``make_row``.
        """
        assert self._files_stage is not None, "it makes files"
        assert self._cached is not None, "it knows files"
        assert self._cached.places is not None, "it places files"
        self._stopwatch.begin_sample()
        tasks: list[FileTask] = []
        for order, epoch, row, sample, arrays in wanted:
            note.begin(order)
            note.take(row, sample)
            file = self._cached.known_file(sample)
            if file is None:
                continue
            failpoints.passing("worker.sample.begin", sample)
            fields = {name: array[row, ...] for name, array in arrays.items()}
            known = self.reader.known(sample)
            with suppress(SampleUndecodable):
                task = self._pipeline.file_task(self._files_stage, file, known, epoch, sample, fields)
                if task is not None:
                    tasks.append(task._replace(order=order, row=row, sample=sample))
        if not tasks:
            return set()
        self._stopwatch.rows_planned()
        made = self._files_stage.make_files(tasks, self._cached.places.memory(), note.memory)
        for place, taken_ns in self._stopwatch.files_made(made):
            sample = tasks[place].sample
            self._stopwatch.note_slow(sample, self.shown_name(sample), taken_ns)
        return {(task.order, task.row) for task, one in zip(tasks, made, strict=True) if one.is_made}

    def make_rows(self, samples: NDArray[np.int64], chunks: Sequence[Row], begin: Callable[[int], None]) -> bool:
        """Write the fields of all samples at once; False if they must be made one by one.

        ``chunks``: ``[samples, *shape]`` each, of several batches, which the samples fill one after
        the other; undefined after False. ``begin`` is called with a chunk's number before it is
        written to. Only if ``makes_rows``.
        """
        assert self._rows_reader is not None, "it makes rows"
        if self._cached is not None and not self._cached.has_all(samples):
            return False
        self._stopwatch.begin_sample()
        self._storage.begin_sample()
        read = self._rows_reader.read_rows
        try:
            self._pipeline.run_rows(lambda made: read(samples, made, begin), chunks, self._stopwatch.reading)
        except BAD:
            self._stopwatch.waste_sample()
            return False
        self._stopwatch.rows_done(len(samples), from_cache=self._cached is not None)
        return True

    def note_draws(self) -> list[dict[str, object]]:
        """Have random steps note what they draw; the list has those of the last sample."""
        self._files_stage = None
        return self._pipeline.note_draws()

    def modified_ns(self, sample: int) -> int:
        """When the file of a sample was last written, in ns since 1970; 0 if that is not known."""
        file = self.reader.file(sample) if isinstance(self.reader, NamesFiles) else None
        if file is None or is_url(file):
            return 0
        try:
            return os.stat(file).st_mtime_ns  # noqa: PTH116  bytes, because names need not be text
        except OSError:
            return 0

    def keep_known(self, sample: int, row: Row) -> None:
        """Write a bad sample's known fields; all others get zeros, or their padding."""
        self._pipeline.keep(self.reader.known(sample), row)

    def shown_name(self, sample: int) -> str:
        """The path of a sample, for users: only its end if it is long; odd bytes are escaped."""
        shown = self.reader.name(sample).encode("utf-8", "backslashreplace")
        if len(shown) > PATH_BYTES_MAX:
            shown = b"..." + shown[3 - PATH_BYTES_MAX :]
        return shown.decode("utf-8", "ignore")

    def _read(self, epoch: int, sample: int, attempt: int) -> Mapping[str, Value]:
        """Read a sample's values: after the first steps if these are cached, else before all."""
        self._stopwatch.begin_sample()
        self.joining.begin(sample)
        return self._read_made(epoch, sample, attempt)

    def _read_made(self, epoch: int, sample: int, attempt: int = 0) -> Mapping[str, Value]:
        found = None if self._near is None else self._near.find(sample)
        self._is_read = found is None
        self.joining.stays = found is not None
        if found is not None:
            return found
        self._storage.begin_sample()
        values = self.reader.read(sample)
        keeps_samples = self._cached is not None and self._cached.keeps_samples
        self._stopwatch.is_read(values, from_cache=self._cached.is_hit if self._cached and keeps_samples else None)
        failpoints.passing("worker.sample.read", sample)
        is_made = self._keeps_made and self._cached is not None and self._cached.is_hit
        if self.first_steps is not None and not is_made:
            values = self.first_steps.make(values, epoch, sample, attempt)
            if self._keeps_made and self._cached is not None:
                self._cached.offer(values)
            if self._near is not None:
                values = self._near.keep(sample, values)
                self.joining.stays = True
        elif is_made:
            self.joining.stays = self._cached is not None and self._cached.values_stay
        return values


def shortened(text: str, bytes_max: int) -> str:
    """The first ``bytes_max`` bytes of a text as UTF-8; odd characters are escaped."""
    return text.encode("utf-8", "backslashreplace")[:bytes_max].decode("utf-8", "ignore")
