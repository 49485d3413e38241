"""Caches of samples in memory; for those on disk see ``cache_file``. DAEMON process.

    made -> memfd as large as its budget, sealed against shrinking and growing, mode 0600; only the
            index is reserved
    joined by each stream over the same source; left by each -> closed with the last

Streams share a cache if their samples are the same (the source's table, the scan's result, and the
longest record), and they have the same budget. The daemon limits how far workers may fill it.

Invariant: the limit never exceeds the memory that the machine had left at the last check.
"""

import fcntl
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from importlib import import_module
from typing import NamedTuple, TypeVar

from batchd.config.tree import StreamConfig
from batchd.core.tenants import Demand, Weights, divide_by_tenant
from batchd.data.pipeline.cache_split import decoded_files, plan_pipeline
from batchd.data.pipeline.options import CONTENT_VERSION, step_to_plain
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.pipeline.text.options import Chat, Tokenize
from batchd.data.samples.kept_files import POINTS_VERSION
from batchd.data.sources.cache.memory import CacheForm, CacheHeader, places_of
from batchd.data.sources.options import source_to_plain
from batchd.data.storage.index import SourceIndex
from batchd.errors import SourceInvalid
from batchd.runtime import __version__
from batchd.runtime.available import RESERVE_BYTES, limit_bytes
from batchd.runtime.sizes import round_bytes
from batchd.runtime.slots import SEALS
from batchd.stream.plan import StreamPlan
from batchd_wire.status import CacheStatistics

MEMORY_NAME = "batchd-cache"
CLAIMS_NAME = "batchd-cache-claims"
BLOCK_BYTES = 512
"""Unit in which the kernel counts a file's size on disk."""

PIXELS_VERSION = 2
"""Of the records of pixels (``data.sources.cache.reader``): another layout needs another number."""
FACTS_MEMORY_PART = 16
FACTS_BYTES_ON_DISK = 1 << 16
"""Budget for each sample: a photograph of 12 megapixels needs it, one of 500 x 375 some 4 kB, and a
minute of video 36 kB."""

AnyCache = TypeVar("AnyCache", bound="SharedCache")


class CacheSpec(NamedTuple):
    """The cache of a stream. ``key``: equal if shared. ``folder``: "" for one in memory."""

    kind: str
    key: str
    samples: int
    budget_bytes: int
    folder: str = ""


class SharedCache(ABC):
    """A cache that streams join and leave; the last one closes it."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.spoilt_samples = 0
        """Number of damaged records; always 0 in memory."""
        self.descriptors: list[int] = []
        """Descriptors for a worker, to read and write: see ``sources.cache.reader.open_cache``."""
        self._header: CacheHeader
        self._streams = 0
        self._stack = ExitStack()

    def join(self) -> None:
        """Count another stream that uses it."""
        self._streams += 1

    def leave(self) -> None:
        """Count one stream less. Workers keep the cache until ``ForgetStream``."""
        self._streams -= 1
        if self._streams == 0:
            self.close()

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of memory or disk that it uses now."""

    def statistics(self) -> CacheStatistics:
        """Counters of the cache."""
        return CacheStatistics(
            self.spec.kind,
            self._header.held_samples,
            self.used_bytes,
            self.spec.budget_bytes,
            self._streams,
            self.spec.folder or None,
            self.spoilt_samples,
        )

    def _make_memory(self, reserved_bytes: int, size_bytes: int) -> None:
        """Make the memory for index, samples and claims. Raises ``OSError``; ``close`` cleans up.

        Workers read bytes that are not reserved only after they were written.
        """
        for name in (MEMORY_NAME, CLAIMS_NAME):
            self._own(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.fchmod(self.descriptors[-1], 0o600)
        memory = self.descriptors[0]
        os.ftruncate(memory, size_bytes)
        os.posix_fallocate(memory, 0, reserved_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
        self._header = CacheHeader(self.spec.samples, memory)
        self._stack.callback(self._header.close)

    @contextmanager
    def opened(self) -> Iterator[list[int]]:
        """The descriptors for one worker."""
        yield self.descriptors

    def _own(self, descriptor: int) -> None:
        self.descriptors.append(descriptor)
        self._stack.callback(os.close, descriptor)

    def close(self) -> None:
        """Close it. The memory lasts until every descriptor of it is closed."""
        self._stack.close()
        self.descriptors.clear()


class CacheMemory(SharedCache):
    """One cache in memory. Raises ``OSError`` if the kernel has no memory for its index."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        form = CacheForm(spec.samples, spec.budget_bytes)
        try:
            self._make_memory(form.records_start, spec.budget_bytes)
            self._header.write()
        except OSError:
            self.close()
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that it uses now."""
        return os.fstat(self.descriptors[0]).st_blocks * BLOCK_BYTES

    def may_serve(self, spec: CacheSpec) -> bool:
        """Become the cache of ``spec``, and say so, if only its key is another.

        For one that was filled when the key was not known: that has the plan of the rows.
        """
        if self.spec._replace(key=spec.key) != spec:
            return False
        self.spec = spec
        return True

    def allow(self, more_bytes: int) -> int:
        """Let it grow by ``more_bytes``, within its budget; return how many of these it may use."""
        used_bytes = self.used_bytes
        allowed_bytes = min(self.spec.budget_bytes, used_bytes + max(0, more_bytes))
        self._header.allow(allowed_bytes)
        return allowed_bytes - used_bytes


def identity(config: StreamConfig) -> str:
    """Text that differs for two streams whose cached samples differ, known before any scan."""
    kind = config.cache_kind
    plan = plan_pipeline(config.pipeline, kind, config.cache_short_side)
    facts: list[object] = [kind, source_to_plain(config.source), plan.record_bytes_max]
    if kind == "pixels":
        facts += [decoded_files(plan.steps), POINTS_VERSION, PIXELS_VERSION]
    elif plan.cropped:
        facts += [plan.cropped, POINTS_VERSION]
    if kind == "decoded":
        facts.append([step_to_plain(step) for step in plan.steps[: plan.cut]])
    return json.dumps(facts, sort_keys=True, default=str)


def cache_spec(plan: StreamPlan, index: SourceIndex) -> CacheSpec | None:
    """The cache that a stream needs, or None. Raises ``SourceInvalid`` if it is too small."""
    config, kind = plan.config, plan.config.cache_kind
    if kind == "off":
        return None
    budget_bytes = config.cache_bytes or facts_budget(kind, len(index), config.cache_dir)
    form = CacheForm(entries_of(kind, len(index)), budget_bytes)
    if form.extents < 1 and config.cache == "auto" and config.cache_bytes is None:
        return None
    if form.extents < 1:
        least = round_bytes(form.records_start + form.extent_bytes)
        budget = "cache_memory" if config.cache_dir is None else "cache_size"
        raise SourceInvalid(
            f"streams.{plan.name}.{budget}: {round_bytes(budget_bytes)} only have room for the index of "
            f"{len(index):,} samples; set more than {least}, at best the size of all samples"
        )
    modules = plan.code.digests if plan.runs_own_code else {}
    facts: list[object] = [identity(config), index.digest, index.place, modules]
    if config.cache_dir is None:  # a file may grow: its budget is not part of its name
        facts.append(config.cache_memory)
    kept = plan.pipeline.steps[: plan.pipeline.cut]
    if kind in {"pixels", "decoded"}:
        has_tokens = any(isinstance(step, (Chat, Tokenize)) for step in kept)
        facts.append(decoders(*(["tokenizers"] if has_tokens else [])))
    if kind == "decoded":
        facts.append([named_by_content(step, plan.digests) for step in kept])
    key = sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    folder = "" if config.cache_dir is None else os.path.realpath(config.cache_dir)
    return CacheSpec(kind, key, form.samples, budget_bytes, folder)


def entries_of(kind: str, samples: int) -> int:
    """The entries in the index of a cache for a source with so many samples."""
    return places_of(samples) if kind == "media" else samples


def facts_budget(kind: str, samples: int, folder: object | None) -> int:
    """The default budget of a cache of what is known of files, in bytes: in memory, or on disk."""
    if folder is not None:
        return CacheForm(entries_of(kind, samples), 0).records_start + samples * FACTS_BYTES_ON_DISK
    return limit_bytes() // FACTS_MEMORY_PART


def decoders(*more: str) -> list[str]:
    """Versions of the decoders and resizers, which decide pixels, and of ``more`` libraries.

    Without loading them.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  most caches are in memory

    found = [f"batchd {__version__}", f"content {CONTENT_VERSION}"]
    for name in ("opencv-python-headless", "opencv-python", "simplejpeg", "numpy", *more):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    with suppress(ImportError):
        found.append(f"libjpeg-turbo {import_module('batchd.data.pipeline._jpeg').LIBJPEG_TURBO_VERSION}")
    return found


def allow_caches(
    caches: Sequence[CacheMemory],
    available_bytes: int,
    tenants: Sequence[str | None] = (),
    weights: Weights = (),
) -> None:
    """Divide the available memory among caches, except a reserve for workers' other memory.

    ``tenants``: who has defined the streams of each, or None. What is defined has by ``weights``
    what the others leave.
    """
    left_bytes = available_bytes - RESERVE_BYTES
    whose = tenants or [None] * len(caches)
    for cache in (cache for cache, tenant in zip(caches, whose, strict=True) if tenant is None):
        left_bytes -= cache.allow(left_bytes)
    defined = [(cache, cache.used_bytes, tenant) for cache, tenant in zip(caches, whose, strict=True) if tenant]
    demands = [(tenant, Demand(1.0, used, max(used, cache.spec.budget_bytes))) for cache, used, tenant in defined]
    total_bytes = max(0, left_bytes) + sum(used for _cache, used, _tenant in defined)
    for (cache, used, _tenant), part in zip(defined, divide_by_tenant(total_bytes, demands, weights), strict=True):
        cache.allow(part - used)


def different(caches: Iterable[AnyCache | None]) -> list[AnyCache]:
    """Each cache of some streams once."""
    return list({id(cache): cache for cache in caches if cache is not None}.values())
