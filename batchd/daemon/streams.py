"""The streams that the daemon serves: facts for core, workers and trainers. DAEMON process.

    StreamConfig --> StreamPlan --scan--> index (memfd) --> ServeStream + descriptor, for workers
                                          layout, epochs --> StreamSpec, for the core
                                          fingerprint    --> the meaning of this stream's positions

Invariant: two streams with the same fingerprint have the same bytes at every position.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from batchd.config.tree import Mark, StreamConfig, keys_marked
from batchd.core.mailbox import LiveSpec
from batchd.core.spec import StreamSpec
from batchd.daemon.memory.cache_file import CacheOnDisk, CacheUnusable
from batchd.daemon.memory.cache_memory import CacheMemory, CacheSpec, cache_spec
from batchd.daemon.memory.rings import RingSize
from batchd.daemon.memory.slots import MailboxMemory
from batchd.daemon.stream_plan import StreamPlan, epoch_plan, plan_stream
from batchd.errors import SourceInvalid
from batchd.orders.worker import SampleRecipe, ServeStream
from batchd.pipeline.kinds import CONTENT_VERSION
from batchd.pipeline.sample_fields import columns_after
from batchd.pipeline.step_files import named_by_content
from batchd.sources.options import SourceOptions
from batchd.sources.push.options import PushSource
from batchd.storage.index import SourceIndex
from batchd.storage.values import StorageLimits
from batchd_wire.fields import SlotLayout

FINGERPRINT_DIGITS = 32
REMOTE_BYTES_MAX = 1 << 30
REMOTE_WINDOW_MIN = 2
"""Bytes of a stream that a remote trainer has waiting in its memory, or two batches, whatever its
window."""
CLASSES_MAX = 4_096
CLASSES_CHARACTERS_MAX = 256 * 1024


Scan: TypeAlias = Callable[[SourceOptions], SourceIndex]
"""Finds all samples of a source."""


@dataclass(slots=True, eq=False)
class ServedStream:
    """One stream, as plain facts. The index's descriptor stays open, for later workers.

    ``message``: the ``ServeStream`` for workers. ``signature``: equal for two streams with equal
    settings and equal findings in source and files. ``place_layout``: of a live stream.
    """

    spec: StreamSpec
    message: ServeStream
    layout: SlotLayout
    signature: str
    index_descriptor: int
    classes: list[str]
    place_layout: object = None
    mailbox: MailboxMemory | None = None
    """Only for a live stream."""
    cache_spec: CacheSpec | None = None
    cache: CacheMemory | CacheOnDisk | None = None
    """The cache of the stream's samples; the process that serves the stream provides it, see
    ``provide_cache``."""
    quarantined: list[int] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The stream's number in orders and in the core."""
        return self.spec.number

    @property
    def name(self) -> str:
        """The stream's name in the configuration."""
        return self.spec.name

    @property
    def mailbox_bytes(self) -> int:
        """The memory of its mailbox; 0 where it is no live stream."""
        return self.mailbox.mailbox_bytes if self.mailbox is not None else 0

    @property
    def descriptors(self) -> list[int]:
        """Descriptors for a worker: the index, then the mailbox or the cache."""
        mailbox = [self.mailbox.readable] if self.mailbox is not None else []
        return [self.index_descriptor, *mailbox, *(self.cache.descriptors if self.cache is not None else [])]

    def provide_cache(self, others: Iterable["ServedStream"]) -> None:
        """Join the cache of one of the ``others``, or make one, if wanted. Raises ``OSError``."""
        spec = self.cache_spec
        if spec is None:
            return
        place = spec.key, spec.folder
        same = (
            one.cache
            for one in others
            if one.cache is not None and (one.cache.spec.key, one.cache.spec.folder) == place
        )
        try:
            cache = next(same, None) or (CacheOnDisk(spec) if spec.folder else CacheMemory(spec))
        except CacheUnusable as error:
            raise CacheUnusable(f"streams.{self.name}.cache_dir: {error.strerror or error}") from None
        cache.join()
        self.cache = cache
        if isinstance(cache, CacheOnDisk):
            cache.resize(spec.budget_bytes)

    def close(self) -> None:
        """Close index, mailbox and cache. Workers and producers keep theirs."""
        os.close(self.index_descriptor)
        if self.cache is not None:
            self.cache.leave()
        if self.mailbox is not None:
            self.mailbox.close()


def open_stream(  # noqa: PLR0913, PLR0917  each is one thing that a stream is made of
    number: int,
    name: str,
    config: StreamConfig,
    ring: RingSize,
    scan: Scan,
    limits: StorageLimits,
    *,
    python_path: Sequence[Path] = (),
) -> ServedStream:
    """Scan the source and derive the rest. Raises ``SourceInvalid``, naming the stream."""
    plan = plan_stream(name, config, ring.columns, python_path)
    try:
        index = scan(config.source)
    except SourceInvalid as error:
        raise SourceInvalid(f"streams.{name}.source: {error}") from None
    source = config.source
    epochs = epoch_plan(name, config, len(index))
    spec = StreamSpec(
        number=number,
        name=name,
        fingerprint=fingerprint(plan, index.digest),
        plan=epochs,
        repeats=not (config.shuffle or source.is_live or plan.pipeline.is_random),
        window=config.window,
        remote_window_max=max(REMOTE_WINDOW_MIN, REMOTE_BYTES_MAX // ring.layout.slot_bytes),
        max_skew=config.max_skew if config.lag == "lockstep" else None,
        slots_max=ring.slots_max,
        on_error=config.on_error,
        bad_fraction_max=config.max_bad_fraction,
        bgr_fields=tuple(
            name for name, made in columns_after(plan.columns, plan.pipeline.steps).items() if made.is_bgr
        ),
        live=LiveSpec(source.capacity, source.when_full) if isinstance(source, PushSource) else None,
        own_source=plan.runs_own_code,
    )
    message = ServeStream(
        stream=number,
        name=name,
        recipe=plan.recipe(),
        samples=epochs.samples,
        batch_size=config.batch_size,
        shuffle=config.is_shuffled,
        on_error=config.on_error,
        storage=limits.to_wire(),
        layout=ring.layout.to_wire(),
        cache=config.cache,
    )
    wanted_cache = cache_spec(plan, index)
    return ServedStream(
        spec=spec,
        message=message,
        layout=ring.layout,
        signature=signature(config, spec.fingerprint, index, message.recipe),
        index_descriptor=index.to_memfd(),
        classes=_classes(index),
        place_layout=source.layout.to_wire() if isinstance(source, PushSource) else None,
        mailbox=MailboxMemory(source.mailbox_bytes) if isinstance(source, PushSource) else None,
        cache_spec=wanted_cache,
    )


def signature(config: StreamConfig, content: str, index: SourceIndex, recipe: SampleRecipe) -> str:
    """Digest of all of a stream: settings, fingerprint, and its files with their versions.

    Without its share of the daemon's memory: a stream that stays keeps its ring.
    """
    facts = {
        "settings": config.model_dump(mode="json"),
        "content": content,
        "samples": len(index),
        "place": index.place,
        "files": recipe.files,
        "python_path": recipe.python_path,
    }
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def fingerprint(plan: StreamPlan, source_digest: str) -> str:
    """Digest of all that decides the bytes of a position: source, steps, batches.

    A file that a step reads counts by its content, not its path, and so do the modules of the
    user's functions.

    Window, memory and the number of workers do not count: they decide when a batch is ready, not
    its bytes. Nor does a cache, except one of decoded samples, which cuts the pipeline.
    """
    config = plan.config
    content = {
        "version": CONTENT_VERSION,
        "source": source_digest,
        "columns": [(column.name, column.text) for column in plan.columns],
        "steps": [named_by_content(step, plan.digests) for step in plan.pipeline.steps],
        **{key: getattr(config, key) for key in keys_marked(Mark.DECIDES_BYTES, StreamConfig)},
        "shuffle": config.is_shuffled,  # never for a live source
    }
    if config.cache == "decoded":
        content["cut"] = plan.pipeline.cut  # what is decoded without knowing a crop may be other pixels
    if plan.code.digests:
        content["modules"] = dict(plan.code.digests)
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:FINGERPRINT_DIGITS]


def _classes(index: SourceIndex) -> list[str]:
    names = [name for name in index.class_names if name]
    if len(names) > CLASSES_MAX or sum(map(len, names)) > CLASSES_CHARACTERS_MAX:
        return []
    return names
