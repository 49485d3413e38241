"""The daemon's streams, adapted to the workers of this host. WORKER HOST process.

    HostServe --> recipe and index --(--map: paths of this host)--> checks --> ServeStream + index
                  layout           --> of an order's rows, not of a whole slot
                  cache            --> one of this host, within its own budget, or none

This host does not see the cache of the daemon's host. A stream has the same bytes without a cache:
the recipe cuts the steps at the same place with and without one (``worker.sample_maker``).

Invariant: the folders, files, modules and libraries of an opened stream are on this host, as far as
a check can tell without reading samples.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

import structlog

from batchd.core.work import Work
from batchd.data.functions.find import ModuleNotFound, find_module
from batchd.data.pipeline.cache_split import KINDS_OF_FACTS, decoded_files, has_crop_decoder
from batchd.data.pipeline.options import step_from_plain
from batchd.data.pipeline.step_files import StepFileInvalid, digest_of
from batchd.data.samples.kept_files import POINTS_VERSION
from batchd.data.samples.location import is_url
from batchd.data.sources.cache.memory import CacheForm
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.interface import check_installed
from batchd.data.sources.options import source_from_plain
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.values import version_of, versions_in
from batchd.errors import SourceInvalid
from batchd.pool.messages import HostServe
from batchd.runtime.available import RESERVE_BYTES, available_bytes
from batchd.runtime.sizes import round_bytes
from batchd.stream.cache_file import CacheOnDisk
from batchd.stream.cache_memory import (
    PIXELS_VERSION,
    CacheMemory,
    CacheSpec,
    allow_caches,
    decoders,
    different,
    entries_of,
    facts_budget,
)
from batchd.worker.messages import CHUNK_ROWS_MAX, SampleRecipe, ServeStream
from batchd_wire.fields import SlotLayout, layout_from_wire, place_fields

_log = structlog.get_logger()

PATHS_CHECKED_MAX = 64
"""Number of an index's paths that are checked when a stream opens; workers check the others."""


class StreamUnusable(Exception):  # noqa: N818  names what is wrong
    """A stream cannot be filled on this host; the text says why, and what to do."""


class CacheBudget(NamedTuple):
    """Limits for the caches of samples on this host; 0 bytes for no cache.

    ``memory_bytes``: all caches in memory together. ``folder``: of files, ``file_bytes`` each.
    """

    memory_bytes: int = 0
    folder: Path | None = None
    file_bytes: int = 0


class PathMap:
    """Rewrites paths of the daemon's host to those of this one, by whole components."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """``pairs``: absolute paths (there, here). The longest one that matches is used."""
        self._pairs = sorted(((_bare(there), _bare(here)) for there, here in pairs), key=lambda pair: -len(pair[0]))

    def here(self, value: object) -> Any:
        """A value as in JSON, with every path in it replaced by that of this host."""
        if isinstance(value, str):
            return self._path(value)
        if isinstance(value, Mapping):
            return {self._path(name): self.here(item) for name, item in value.items()}
        if isinstance(value, Sequence):
            return [self.here(item) for item in value]
        return value

    def _path(self, text: str) -> str:
        for there, here in self._pairs:
            if text == there or text.startswith(f"{there}/"):
                return here + text[len(there) :] or "/"
        return text


def _bare(path: str) -> str:
    return path.rstrip("/")


@dataclass(slots=True, eq=False)
class OpenedStream:
    """One stream. ``number``: its number for the workers of this host, never used twice.

    ``served``: the gateway's message, by which the next link recognises the stream. ``layout``: of
    the rows of one order. ``lacks_cache``: the daemon's workers have a cache, and these have none.
    """

    number: int
    served: HostServe
    message: ServeStream
    layout: SlotLayout
    index: int
    quarantined: list[int]
    cache: CacheMemory | CacheOnDisk | None
    lacks_cache: bool

    @property
    def name(self) -> str:
        """Its name in the daemon's configuration."""
        return self.message.name

    @contextmanager
    def descriptors(self) -> Iterator[list[int]]:
        """Descriptors for one worker: the index, then the cache."""
        with ExitStack() as until_sent:
            yield [self.index, *(until_sent.enter_context(self.cache.opened()) if self.cache is not None else [])]

    def is_still(self, served: HostServe) -> bool:
        """True if a gateway now serves the stream with the same facts that its workers know."""
        is_same = (self.served.serve, self.served.digest) == (served.serve, served.digest)
        return is_same and set(self.quarantined) <= set(served.quarantined)

    def use_storage(self, storage: tuple[int, int, int]) -> None:
        """Use these limits for file servers for workers that open the stream from now on."""
        self.message = ServeStream.filled_from(self.message, storage=storage)

    def as_daemon_counts(self, work: Work) -> Work:
        """``work`` with the parts of the daemon's workers: a missing cache took no time."""
        if not self.lacks_cache or not work.parts_us:
            return work
        return work._replace(parts_us=[work.parts_us[0], 0, *work.parts_us[1:]])

    def close(self) -> None:
        """Close index and cache. Workers keep theirs until ``ForgetStream``."""
        os.close(self.index)
        if self.cache is not None:
            self.cache.leave()


class StreamOpener:
    """Opens the streams that gateways serve, with the paths and the caches of this host."""

    def __init__(self, paths: PathMap, budget: CacheBudget) -> None:
        self._paths = paths
        self._budget = budget
        self._last_number = 0

    def open(self, served: HostServe, serve: ServeStream, memory: int, others: Iterable[OpenedStream]) -> OpenedStream:
        """Open a stream whose index is in the sealed ``memory``, which the caller closes.

        It shares the cache of one of the ``others`` with the same samples. Raises
        ``StreamUnusable``.
        """
        try:
            index = SourceIndex.from_descriptor(memory)
            layout = layout_from_wire(serve.layout)
        except ValueError as error:
            raise StreamUnusable(str(error)) from None
        recipe = self._recipe_here(SampleRecipe(*serve.recipe))
        place = self._paths.here(index.place)
        _check(recipe, place)
        rooms = layout.rooms and replace(
            layout.rooms,
            of_buckets=tuple((min(rows, CHUNK_ROWS_MAX), *room) for rows, *room in layout.rooms.of_buckets),
        )
        layout = place_fields(layout.fields, min(serve.batch_size, CHUNK_ROWS_MAX), rooms)
        try:
            descriptor = os.dup(memory) if place == index.place else replace(index, place=place).to_memfd()
        except OSError as error:
            raise StreamUnusable(f"no memory for the index: {error.strerror}") from None
        cache = self._cache(served, serve, recipe, len(index), others)
        self._last_number += 1
        now_ns = time_ns()  # copies of files may be younger here, and clocks differ
        changes = {"stream": self._last_number, "recipe": recipe, "layout": layout.to_wire(), "as_of_ns": now_ns}
        # without storage, others fill the rows
        kind = cache.spec.kind if cache is not None else "off"
        message = ServeStream.filled_from(serve, **changes, cache=kind, waits_for_storage=False)
        lacks_cache = cache is None and serve.cache != "off"
        return OpenedStream(
            self._last_number, served, message, layout, descriptor, list(served.quarantined), cache, lacks_cache
        )

    def _recipe_here(self, recipe: SampleRecipe) -> SampleRecipe:
        """The recipe with paths of this host."""
        here = {path: self._paths.here(path) for path, _digest in recipe.files}
        return recipe._replace(
            source=self._paths.here(recipe.source),
            steps=[
                {name: here.get(value, value) if isinstance(value, str) else value for name, value in step.items()}
                for step in recipe.steps
            ],
            files=[(here[path], digest) for path, digest in recipe.files],
            python_path=self._paths.here(recipe.python_path),
            access=[needed._replace(read=self._paths.here(needed.read)) for needed in [recipe.needed] if needed],
        )

    def _cache(
        self, served: HostServe, serve: ServeStream, recipe: SampleRecipe, samples: int, others: Iterable[OpenedStream]
    ) -> CacheMemory | CacheOnDisk | None:
        """Join the cache of one of the ``others``, or make one. If that fails, log the reason."""
        folder, kind = self._budget.folder, serve.cache
        budget_bytes = self._budget.memory_bytes if folder is None else self._budget.file_bytes
        if kind in KINDS_OF_FACTS and folder is None:
            budget_bytes = budget_bytes or facts_budget(kind, samples, folder)
        if kind == "off" or not budget_bytes:
            return None
        reason = ""
        entries = entries_of(kind, samples)
        if CacheForm(entries, budget_bytes).extents < 1:
            reason = f"{round_bytes(budget_bytes)} only have room for the index of {samples:,} samples"
        elif kind == "points" and not has_crop_decoder():
            reason = "the extension that decodes crops was not built here"
        if reason:
            _log.warning("no cache for a stream", stream=serve.name, reason=reason)
            return None
        key = _cache_key(kind, recipe, served.digest)
        spec = CacheSpec(kind, key, entries, budget_bytes, "" if folder is None else os.path.realpath(folder))
        cache = next((one.cache for one in others if one.cache is not None and one.cache.spec.key == key), None)
        try:
            cache = cache or (CacheMemory(spec) if folder is None else CacheOnDisk(spec))
        except OSError as error:
            _log.warning("no cache for a stream", stream=serve.name, reason=error.strerror or str(error))
            return None
        cache.join()
        if isinstance(cache, CacheOnDisk):
            cache.resize(budget_bytes)
        return cache

    def allow_caches(self, streams: Iterable[OpenedStream]) -> None:
        """Let caches fill, in memory together up to the budget. Log trouble with their files.

        What is left of the machine's memory is read from several files of the kernel.
        """
        caches = different(stream.cache for stream in streams)
        for cache in caches:
            if isinstance(cache, CacheOnDisk):
                cache.tell_troubles()
        in_memory = [cache for cache in caches if isinstance(cache, CacheMemory)]
        if in_memory:
            budget_bytes = self._budget.memory_bytes or max(cache.spec.budget_bytes for cache in in_memory)
            left_bytes = budget_bytes - sum(cache.used_bytes for cache in in_memory)
            # the check needs a descriptor: without one, the last limits stay
            with suppress(OSError):
                allow_caches(in_memory, min(available_bytes(), left_bytes + RESERVE_BYTES))


def _cache_key(kind: str, recipe: SampleRecipe, digest: str) -> str:
    """Text that differs for streams whose cached samples differ. ``digest``: of the whole index."""
    facts: list[object] = [kind, recipe.source, recipe.columns, recipe.record_bytes_max, digest, recipe.modules]
    if kind == "pixels":
        files = decoded_files([step_from_plain(step) for step in recipe.steps])
        facts += [decoders(), files, POINTS_VERSION, PIXELS_VERSION]
    elif recipe.cropped:
        facts += [recipe.cropped, POINTS_VERSION]
    if kind == "decoded":
        facts += [decoders(), recipe.steps[: recipe.cut], recipe.files]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _check(recipe: SampleRecipe, place: Mapping[str, object]) -> None:
    """Raise ``StreamUnusable`` if a library, file or module of the stream is missing here."""
    try:
        for _key, source in sources_in(source_from_plain(recipe.source)):
            check_installed(type(source))
    except (ValueError, TypeError, SourceInvalid) as error:
        raise StreamUnusable(str(error)) from None
    _check_place(place)
    for path, digest in recipe.files:
        _status(path)
        try:
            is_same = digest_of(Path(path)) == digest
        except StepFileInvalid as error:
            raise StreamUnusable(str(error)) from None
        if not is_same:
            raise StreamUnusable(f"{path} has other content than the daemon's")
    for name, digest in recipe.modules:
        try:
            found = find_module(name, list(map(Path, recipe.python_path)))
        except ModuleNotFound as error:
            raise StreamUnusable(f"{error}; if it is elsewhere on this host: --map FROM=TO") from None
        if found.digest != digest:
            raise StreamUnusable(f"{found.file} has other content than the daemon's")


def _check_place(place: Mapping[str, object]) -> None:
    """Raise ``StreamUnusable`` if folders or files of an index are missing here, or differ."""
    for path in islice(_paths_in(place), PATHS_CHECKED_MAX):
        _status(path)
    versions = ((path, version) for path, version in versions_in(place).items() if not is_url(os.fsencode(path)))
    for path, version in islice(versions, PATHS_CHECKED_MAX):
        difference = version.differs_from(version_of(_status(path)))
        if difference:
            raise StreamUnusable(
                f"{path} is not the file that the daemon reads: {difference}; copy it with its time (rsync -a, cp -p)"
            )


def _paths_in(place: object) -> Iterator[str]:
    """The paths of this machine in the place of an index, or of its parts."""
    if isinstance(place, Mapping):
        for value in place.values():
            yield from _paths_in(value)
    elif isinstance(place, list):
        for value in place:
            yield from _paths_in(value)
    elif isinstance(place, str) and place.startswith("/"):
        yield place


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)  # noqa: PTH116  with surrogates
    except (FileNotFoundError, NotADirectoryError):
        raise StreamUnusable(f"there is no {path} on this host; if the data is elsewhere: --map FROM=TO") from None
    except OSError as error:
        raise StreamUnusable(f"{path} cannot be read: {error.strerror}") from None
