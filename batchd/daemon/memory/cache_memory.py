"""Caches of samples in memory; ``cache_file`` has those on disk. DAEMON process.

    made -> memfd as large as its budget, sealed against shrinking and growing, mode 0600; only the
            index is reserved
    joined by each stream over the same source; left by each -> closed with the last

Streams share a cache if their samples are the same: the source's table, the scan's result, and the
longest record; and if they have the same budget. The daemon sets how far workers may fill it.

Invariant: as far as it is known, workers never fill more of it than the machine has memory left.
"""

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

from batchd import __version__
from batchd.config.schema import meaning_of
from batchd.config.tree import Config, StreamConfig
from batchd.daemon.memory.available import RESERVE_BYTES
from batchd.daemon.memory.cache_folder import BLOCK_BYTES, identity
from batchd.daemon.memory.rings import RingSize
from batchd.daemon.memory.slots import SEALS
from batchd.daemon.stream_plan import StreamPlan
from batchd.errors import Problem, SourceInvalid
from batchd.pipeline.kinds import CONTENT_VERSION
from batchd.pipeline.step_files import named_by_content
from batchd.samples.sizes import round_bytes
from batchd.sources.cache.memory import CacheForm, CacheHeader
from batchd.storage.index import SourceIndex
from batchd_wire.status import CacheStatistics

MEMORY_NAME = "batchd-cache"
CLAIMS_NAME = "batchd-cache-claims"


AnyCache = TypeVar("AnyCache", bound="SharedCache")


class CacheSpec(NamedTuple):
    """The cache that a stream wants.

    ``key`` is equal for streams that share it. ``folder``: of its file, "" for none.
    """

    kind: str
    key: str
    samples: int
    budget_bytes: int
    folder: str = ""


class SharedCache(ABC):
    """A cache that streams join and leave; the last one closes it."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._streams = 0
        self._header: CacheHeader | None = None
        self.descriptors: list[int] = []
        """Descriptors for a worker, to read and write: see ``sources.cache.reader.open_cache``."""

    def join(self) -> None:
        """Count one more stream that uses it."""
        self._streams += 1

    def leave(self) -> None:
        """Count one stream fewer. Workers keep the cache until they are told."""
        self._streams -= 1
        if self._streams == 0:
            self.close()

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that it takes at present."""

    @property
    def spoilt_samples(self) -> int:
        """How many records were not what had been written: in memory none."""
        return 0

    @property
    def held_samples(self) -> int:
        """How many samples are in it."""
        return self._header.held_samples if self._header is not None else 0

    def statistics(self) -> CacheStatistics:
        """Counters of the cache."""
        spec = self.spec
        used_bytes, spoilt = self.used_bytes, self.spoilt_samples
        folder = spec.folder or None
        return CacheStatistics(
            spec.kind, self.held_samples, used_bytes, spec.budget_bytes, self._streams, folder, spoilt
        )

    def close(self) -> None:
        """Release it. The memory lasts until every descriptor of it is closed."""
        if self._header is not None:
            self._header.close()
            self._header = None
        while self.descriptors:
            os.close(self.descriptors.pop())


class CacheMemory(SharedCache):
    """One cache in memory. Raises ``OSError`` if the kernel has no memory for its index."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        form = CacheForm(spec.samples, spec.budget_bytes)
        try:
            for name in (MEMORY_NAME, CLAIMS_NAME):
                self.descriptors.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.fchmod(self.descriptors[-1], 0o600)
            data, _claims = self.descriptors
            os.ftruncate(data, spec.budget_bytes)  # what is not reserved is never looked at before it was written
            os.posix_fallocate(data, 0, form.records_start)
            fcntl.fcntl(data, fcntl.F_ADD_SEALS, SEALS)
            self._header = CacheHeader(spec.samples, data)
            self._header.write()
        except OSError:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """The memory that it takes at present."""
        return os.fstat(self.descriptors[0]).st_blocks * BLOCK_BYTES

    def allow(self, more_bytes: int) -> int:
        """Let it take so many bytes beside those that it has; how many of these it may still need.

        Workers may be about to use what they were allowed before, which is why there is a reserve.
        """
        used_bytes = self.used_bytes
        allowed_bytes = min(self.spec.budget_bytes, used_bytes + max(0, more_bytes))
        if self._header is not None:
            self._header.allow(allowed_bytes)
        return allowed_bytes - used_bytes


def cache_spec(plan: StreamPlan, index: SourceIndex) -> CacheSpec | None:
    """The cache that a stream wants, or None. Raises ``SourceInvalid`` if it is too small."""
    config = plan.config
    if config.cache == "off":
        return None
    budget_bytes = config.cache_bytes
    assert budget_bytes is not None, "a configuration with a cache has a budget for it"
    form = CacheForm(len(index), budget_bytes)
    if form.extents < 1:
        least = round_bytes(form.records_start + form.extent_bytes)
        budget = "cache_memory" if config.cache_dir is None else "cache_size"
        raise SourceInvalid(
            f"streams.{plan.name}.{budget}: {round_bytes(budget_bytes)} have no room for anything but the index of "
            f"{len(index):,} samples; set more than {least}, better as much as the samples have"
        )
    modules = plan.code.digests if plan.runs_own_code else {}
    facts: list[Any] = [identity(config), index.digest, index.place, modules, *_own_place(config)]
    if config.cache == "decoded":
        kept = plan.pipeline.steps[: plan.pipeline.cut]
        facts += [decoders(), [named_by_content(step, plan.digests) for step in kept]]
    key = sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    folder = "" if config.cache_dir is None else os.path.realpath(config.cache_dir)
    return CacheSpec(config.cache, key, len(index), budget_bytes, folder)


def decoders() -> list[str]:
    """Versions of decoders and resizers, which decide pixels; found without loading them."""
    found = [f"batchd {__version__}", f"content {CONTENT_VERSION}"]
    for name in ("opencv-python-headless", "opencv-python", "simplejpeg", "numpy"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    with suppress(ImportError):
        found.append(f"libjpeg-turbo {import_module('batchd.pipeline._jpeg').LIBJPEG_TURBO_VERSION}")
    return found


def budgets_bytes(config: Config) -> int:
    """Memory budgets of all caches of a configuration; streams over the same source share one."""
    budgets = {
        (identity(stream), stream.cache_memory): stream.cache_memory
        for stream in config.streams.values()
        if stream.cache_memory is not None
    }
    return sum(budgets.values())


def needed_bytes(config: Config, rings: Mapping[str, RingSize]) -> int:
    """Memory of the rings and the caches when they are full."""
    return sum(ring.ring_bytes for ring in rings.values()) + budgets_bytes(config)


def memory_problem(config: Config, text: str | None) -> Problem | None:
    """The problem of a configuration that is short of memory, as ``text`` says; None for None."""
    if text is None:
        return None
    caches_bytes = budgets_bytes(config)
    text += f"; {round_bytes(caches_bytes)} of it are for caches (cache_memory =)" if caches_bytes else ""
    return Problem("daemon.memory", text, meaning_of(("daemon", "memory"), {}))


def allow_caches(caches: Sequence[CacheMemory], available_bytes: int) -> None:
    """Share among caches what the machine has left."""
    left_bytes = available_bytes - RESERVE_BYTES
    for cache in caches:
        left_bytes -= cache.allow(left_bytes)


def different(caches: Iterable[AnyCache | None]) -> list[AnyCache]:
    """Each cache of some streams once."""
    return list({id(cache): cache for cache in caches if cache is not None}.values())


def _own_place(config: StreamConfig) -> list[int | None]:
    """Text that distinguishes two caches of the same samples.

    A file in a folder may grow: its budget is not part of its name.
    """
    return [] if config.cache_dir is not None else [config.cache_memory]
