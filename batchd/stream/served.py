"""The streams that the daemon serves: facts for core, workers and trainers. DAEMON process.

    StreamConfig --> StreamPlan --scan--> index (memfd) --> ServeStream + descriptor, for workers
                                          layout, epochs --> StreamSpec, for the core
                                          fingerprint    --> the meaning of this stream's positions

Invariant: two streams with the same fingerprint have the same bytes at every position.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from hashlib import sha256
from importlib.metadata import version
from itertools import combinations
from typing import Any, Self

import structlog

from batchd.config.tree import Config, DaemonConfig, Mark, StreamConfig, keys_marked
from batchd.core.digests import EpochDigests
from batchd.core.epochs import planned
from batchd.core.events import StreamSpec
from batchd.core.mailbox import LiveSpec
from batchd.core.plan import Plan
from batchd.data.pipeline.image.options import CropToBucket, Decode
from batchd.data.pipeline.join.options import JoinStep
from batchd.data.pipeline.options import CONTENT_VERSION, StepOptions, step_to_plain, with_inner
from batchd.data.pipeline.sample_fields import columns_after, overlays_of
from batchd.data.pipeline.step_files import named_by_content
from batchd.data.sources.composed.options import sources_in
from batchd.data.sources.options import source_to_plain
from batchd.data.sources.push.options import PushSource
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import SourceInvalid
from batchd.runtime.plain import from_plain, to_plain
from batchd.runtime.slots import MailboxMemory
from batchd.stream.cache_file import CacheOnDisk, CacheUnusable
from batchd.stream.cache_memory import CacheMemory, CacheSpec, cache_spec
from batchd.stream.fingerprints import FINGERPRINT_DIGITS, content_from, fingerprint, parts_of, sketch_of
from batchd.stream.grouping import KeptSamples, MeasureOptions, grouping_of
from batchd.stream.journal import Journal, JournalSpec, journal_spec
from batchd.stream.plan import StreamPlan, bucket_rate, epoch_plan, plan_stream, planned_index
from batchd.stream.rings import RingSize, bucket_layout, kept_ahead, window_of
from batchd.worker.messages import ServeStream
from batchd_wire.codec import TEXT_CHARACTERS_MAX as MESSAGE_CHARACTERS_MAX
from batchd_wire.fields import SlotLayout, layout_from_wire
from batchd_wire.keys import DERIVED_MARK
from batchd_wire.position import Position
from batchd_wire.record import frozen
from batchd_wire.status import ContentPart, DeliveredRows, StreamCard, StreamDescription
from batchd_wire.wording import classes_apart

_log = structlog.get_logger()

REMOTE_BYTES_MAX = 1 << 30
REMOTE_WINDOW_MIN = 2
"""Cap of a remote trainer's read-ahead, in bytes; never below two batches."""
REPLAYED_KEYS = {"python_path", "worker_address", "pool_accept", "sandbox"}
"""The keys of [daemon] that have a say in what a stream's samples are, or in who may make them."""
TEXT_CHARACTERS_MAX = 200
DESCRIBED_CHARACTERS_MAX = 1_000
"""Of a description: one text, and all fields or all steps. A status has those of every stream."""
_QUERY = re.compile(r"\?\S+")
"""Of a URL; it may be a signature."""
CLASSES_MAX = 4_096
CLASSES_CHARACTERS_MAX = 256 * 1024


@frozen
class StreamFacts:
    """All that is known of a stream once it is worked out, without its descriptors.

    ``message``: for workers. ``signature``: equal for two streams with equal settings and equal
    findings in source and files. ``sketch``: for saved states. ``overlays``: for pictures.
    ``place_layout``, ``mailbox_bytes``: of a live stream.
    """

    spec: StreamSpec
    message: ServeStream
    signature: str
    classes: tuple[str, ...]
    description: StreamDescription
    card: StreamCard
    sketch: str
    overlays: tuple[tuple[str, str, str, str, bool], ...] = ()
    place_layout: object = None
    mailbox_bytes: int = 0
    cache: CacheSpec | None = None
    journal: JournalSpec | None = None

    def to_wire(self) -> object:
        """For another process, which gets the index, too: the plan's parts from it are left out."""
        plan = replace(self.spec.plan, order=None, draws=None, row_counts=None)
        return to_plain(replace(self, spec=replace(self.spec, plan=plan)))

    @classmethod
    def from_wire(cls, plain: object, number: int, index: SourceIndex) -> Self:
        """The way back, under another ``number``. Raises ``TypeError`` or ``ValueError``."""
        facts: Self = from_plain(cls, plain)
        spec = replace(facts.spec, number=number, plan=planned(facts.spec.plan, index.facts, index.arrays))
        return replace(facts, spec=spec, message=replace(facts.message, stream=number))


@dataclass(slots=True, eq=False)
class ServedStream:
    """One stream in service. The index's descriptor stays open, for later workers."""

    facts: StreamFacts
    index_descriptor: int
    mailbox: MailboxMemory | None = None
    """Of a live stream."""
    cache: CacheMemory | CacheOnDisk | None = None
    """The process that serves the stream provides it: see ``provide_cache``."""
    journal: Journal | None = None
    """Of a push stream; the process that serves it provides it: see ``provide_journal``."""
    kept: KeptSamples | None = None
    """What was kept when the samples were measured, until ``provide_cache``."""
    quarantined: list[int] = field(default_factory=list)
    digests: EpochDigests | None = None
    spec: StreamSpec = field(init=False)
    layout: SlotLayout = field(init=False)
    message: ServeStream = field(init=False)
    """For workers, with the limits of storage that are in force."""

    def __post_init__(self) -> None:
        self.spec, self.message = self.facts.spec, self.facts.message
        self.layout = layout_from_wire(self.message.layout)
        if self.spec.has_digests:
            self.digests = EpochDigests(self.spec.plan)

    @property
    def number(self) -> int:
        """Its number in orders and in the core."""
        return self.spec.number

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        return self.spec.name

    @property
    def is_derived(self) -> bool:
        """True if a trainer has derived it, or defined it: it is no stream of the file."""
        return DERIVED_MARK in self.name or bool(self.owner)

    @property
    def owner(self) -> str:
        """Who has defined it; "" for no trainer."""
        return self.facts.description.owner

    @property
    def ring_bytes(self) -> int:
        """The most memory that its ring takes."""
        return self.spec.slots_max * self.layout.slot_bytes

    @property
    def content(self) -> dict[str, Any]:
        """What its fingerprint is a digest of."""
        return content_from({part.name: json.loads(part.value) for part in self.facts.card.parts})

    def named(self, name: str, number: int, settings: str, owner: str = "") -> "ServedStream":
        """The same stream, derived with ``settings`` or defined; it takes over the index."""
        spec = replace(self.facts.spec, name=name, number=number)
        message = replace(self.facts.message, name=name, stream=number)
        description = replace(self.facts.description, settings=_cut(settings), owner=owner)
        facts = replace(self.facts, spec=spec, message=message, description=description)
        return ServedStream(facts, self.index_descriptor)

    def layout_of(self, position: Position) -> SlotLayout:
        """The layout of a batch."""
        return self.layout.of(self.spec.bucket_of(position))

    @contextmanager
    def descriptors(self) -> Iterator[list[int]]:
        """Descriptors for one worker: the index, then the mailbox or the cache."""
        mailbox = [self.mailbox.readable] if self.mailbox is not None else []
        with ExitStack() as until_sent:
            cache = until_sent.enter_context(self.cache.opened()) if self.cache is not None else []
            yield [self.index_descriptor, *mailbox, *cache]

    def dated_card(self) -> StreamCard:
        """The card, with the digests of what was delivered up to now."""
        digests = [] if self.digests is None else list(self.digests)
        return replace(self.facts.card, digests=tuple(DeliveredRows(*rows) for rows in digests))

    def provide_cache(self, others: Iterable["ServedStream"]) -> None:
        """Join the cache of one of the ``others``, or make one, if wanted. Raises ``OSError``."""
        spec = self.facts.cache
        if spec is None:
            return
        present = [other.cache for other in others if other.cache is not None]
        same = (cache for cache in present if (cache.spec.key, cache.spec.folder) == (spec.key, spec.folder))
        filled = None if self.kept is None else self.kept.take(spec)
        try:
            cache = next(same, None) or filled or (CacheOnDisk(spec) if spec.folder else CacheMemory(spec))
        except CacheUnusable as error:
            raise CacheUnusable(f"streams.{self.name}.cache_dir: {error.strerror or error}") from None
        if filled is not None and filled is not cache:
            filled.close()
        cache.join()
        self.cache = cache
        if isinstance(cache, CacheOnDisk):
            cache.resize(spec.budget_bytes)

    def provide_journal(self, others: Iterable["ServedStream"]) -> None:
        """Open the journal, if any, or take it from one of the ``others``. Raises ``OSError``."""
        spec = self.facts.journal
        if spec is None:
            return
        before = next((other for other in others if other.journal and other.journal.spec.path == spec.path), None)
        journal = None if before is None else before.journal
        try:
            self.journal = Journal(spec, self.layout, self.spec.fingerprint, journal)
        except CacheUnusable as error:
            raise CacheUnusable(f"streams.{self.name}.journal: {error.strerror or error}") from None
        if before is not None and journal is not None:
            journal.close()
            before.journal = None

    def close(self) -> None:
        """Close index, mailbox, cache and journal. Workers and producers keep theirs."""
        os.close(self.index_descriptor)
        if self.kept is not None:
            self.kept.close()
        if self.journal is not None:
            self.journal.close()
        if self.cache is not None:
            self.cache.leave()
        if self.mailbox is not None:
            self.mailbox.close()


def open_stream(  # noqa: PLR0913, PLR0917  each is one thing that a stream is made of
    number: int,
    name: str,
    whole: Config,
    ring: RingSize,
    storage: Storage,
    index_cache: IndexCache,
    found: Callable[[int], None],
    *,
    keeps: bool = False,
) -> ServedStream:
    """Scan the source and derive the rest. Raises ``SourceInvalid``, naming the stream.

    ``found`` is called now and then with the number of samples found so far. ``keeps``: the process
    serves the stream, so what is made of samples to measure them is kept for its cache.
    """
    config, python_path = whole.streams[name], whole.daemon.python_path or ()
    plan = plan_stream(name, config, ring.columns, whole.daemon)
    kept = KeptSamples(whole.daemon.memory) if keeps else None
    with ExitStack() as where_it_fails:
        if kept is not None:
            where_it_fails.callback(kept.close)
        try:
            pass_ = MeasureOptions(whole.daemon.worker_count(), whole.daemon.sample_timeout_s, storage, found, kept)
            index = scan_source(config.source, found, index_cache, storage, python_path, grouping_of(plan, pass_))
        except SourceInvalid as error:
            raise SourceInvalid(f"streams.{name}.source: {error}") from None
        for note in index.notes:
            _log.warning("note on a source", stream=name, note=note)
        served = stream_of(number, plan, whole, ring, storage, index)
        where_it_fails.pop_all()
    served.kept = kept
    return served


def stream_of(  # noqa: PLR0913, PLR0917  as above
    number: int, plan: StreamPlan, whole: Config, ring: RingSize, storage: Storage, index: SourceIndex
) -> ServedStream:
    """Derive all of a stream from its plan and the ``index`` of its source.

    Raises ``SourceInvalid``, naming the stream.
    """
    name, config, source = plan.name, plan.config, plan.config.source
    planned_with = planned_index(plan, index)
    epochs = epoch_plan(plan, planned_with)
    ring = replace(ring, layout=bucket_layout(ring.layout, planned_with.arrays, bucket_rate(config)))
    content = content_of(plan, index.digest, epochs, made_by_any=is_made_by_any(plan, whole.daemon))
    is_planned = epochs.order is not None or epochs.draws is not None
    is_random = plan.pipeline.is_random or plan.mixing is not None or plan.erasing is not None
    equal_epochs = not (config.shuffle or is_planned or source.is_live or is_random)
    bgr_fields = [field for field, column in columns_after(plan.columns, plan.pipeline.steps).items() if column.is_bgr]
    spec = StreamSpec(
        number=number,
        name=name,
        fingerprint=fingerprint(content),
        plan=epochs,
        equal_epochs=equal_epochs,
        window=window_of(config, whole.daemon, ring),
        remote_window_max=max(REMOTE_WINDOW_MIN, REMOTE_BYTES_MAX // ring.layout.slot_bytes),
        max_skew=config.max_skew if config.lag == "lockstep" else None,
        slots_max=ring.slots_max,
        kept_ahead=kept_ahead(config, ring, equal_epochs=equal_epochs),
        on_error=config.on_error,
        bad_fraction_max=config.max_bad_fraction,
        bgr_fields=tuple(bgr_fields),
        decodes_here=bool(config.why_here),
        shares_caches=config.cache_kind not in {"off", "media"}
        and whole.daemon.pool_cache == "shared"
        and plan.pack is None,
        live=LiveSpec(source.capacity, source.when_full, config.journal is not None)
        if isinstance(source, PushSource)
        else None,
        groups_neighbours=epochs.order is not None
        and (
            any(part.reads_urls or part.shares_decoding for _key, part in sources_in(source))
            or any(step.shares_decoding for step in plan.pipeline.steps)
        ),
        own_source=plan.runs_own_code,
        report_memory=config.report_memory,
        source="" if source.is_live else source_digest(index),
        has_digests=config.digest,
        has_buckets=bool(ring.layout.buckets),
        slot_bytes=ring.layout.slot_bytes,
        row_bytes=tuple(ring.layout.of(bucket).row_bytes for bucket in range(max(1, len(ring.layout.buckets)))),
        storage_away_s=config.storage_away_s,
        siblings=siblings_of(plan, content, epochs, index),
        joins_near=any(isinstance(step, JoinStep) and step.near for step in plan.pipeline.steps),
    )
    wanted_cache = cache_spec(plan, index)  # raises before there are descriptors
    if config.unused_by_cache:
        _log.warning("keys of a cache not used", stream=name, reason=config.unused_by_cache)
    message = ServeStream(
        stream=number,
        name=name,
        recipe=plan.recipe(),
        samples=epochs.samples,
        batch_size=config.batch_size,
        shuffle=config.is_shuffled,
        on_error=config.on_error,
        storage=storage.limits.to_wire(),
        layout=ring.layout.to_wire(),
        cache="off" if wanted_cache is None else wanted_cache.kind,
        pack={} if plan.pack is None else step_to_plain(plan.pack),
        as_of_ns=storage.as_of_ns,
        waits_for_storage=config.storage_away_s > 0,
        mixing=to_plain(plan.mixing),
        erasing=to_plain(plan.erasing),
        repeats=epochs.repeats,
        sizes=epochs.sizes,
        alike=epochs.alike,
        siblings=spec.siblings,
    )
    journal = journal_spec(whole, name)
    classes = [name for name in index.class_names if name]
    are_too_many = len(classes) > CLASSES_MAX or sum(map(len, classes)) > CLASSES_CHARACTERS_MAX
    mailbox_bytes = source.mailbox_bytes if isinstance(source, PushSource) else 0
    facts = StreamFacts(
        spec=spec,
        message=message,
        signature=signature(plan, spec.fingerprint, index),
        classes=() if are_too_many else tuple(classes),
        description=describe(config, ring.layout),
        card=card_of(plan, whole.daemon, content, epochs.samples, journal),
        sketch=sketch_of(content),
        overlays=overlays_of(plan.columns, plan.pipeline.steps, plan.digests),
        place_layout=source.layout.to_wire() if isinstance(source, PushSource) else None,
        mailbox_bytes=mailbox_bytes,
        cache=wanted_cache,
        journal=journal,
    )
    return ServedStream(facts, planned_with.to_memfd(), MailboxMemory(mailbox_bytes) if mailbox_bytes else None)


def differing_classes(classes: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Streams whose labels mean other classes than those of one before them, and how."""
    return [
        (name, f'classes differ: {found}; set classes = "{other}" of its source, or the same list in both')
        for (other, others), (name, own) in combinations(classes.items(), 2)
        if (found := classes_apart(name, own, other, others))
    ]


def source_digest(index: SourceIndex) -> str:
    """Digest of the samples of a source and of their places."""
    return sha256(json.dumps([index.digest, index.place], sort_keys=True, default=str).encode()).hexdigest()[
        :FINGERPRINT_DIGITS
    ]


def siblings_of(plan: StreamPlan, content: Mapping[str, object], epochs: Plan, index: SourceIndex) -> str:
    """See ``StreamSpec.siblings``. "" for a cache of decoded samples, buckets of sizes, and joins.

    The same samples are read in another way by another source, so its settings count, too. The
    numbers of drawn sizes are part of what random steps draw for.
    """
    config, steps = plan.config, plan.pipeline.steps
    is_more = any(isinstance(step, CropToBucket | JoinStep) for step in steps) or plan.pack is not None
    if is_more or config.source.is_live or plan.pipeline.cut or not (steps and isinstance(steps[0], Decode)):
        return ""
    of_the_steps = {"steps", "mix", "erase", "modules", "on_error", "accept"}
    facts = {
        "order": {key: value for key, value in content.items() if key not in of_the_steps},
        "sizes": [epochs.sizes, epochs.alike],
        "bucket": config.model_dump(mode="json", include={"bucket", "balance"}),
        "source": source_to_plain(config.source),
        "place": source_digest(index),
        "decode": step_to_plain(steps[0]),
    }
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:FINGERPRINT_DIGITS]


def describe(config: StreamConfig, layout: SlotLayout) -> StreamDescription:
    """What a stream is, for people. Texts are cut, and nothing secret of a URL is in them."""
    place = config.source.place
    if "://" in place:
        place = _QUERY.sub("?…", place)
    source = _cut(f"{config.source.type} {place}")
    return StreamDescription(source, _few(layout.field_texts), _few(map(_step_text, config.pipeline)))


def _step_text(step: StepOptions) -> str:
    """The step, and its options that are not the defaults: ``resize(size=[224, 224])``."""
    given = [
        f"{option.name}={_option_text(value)}"
        for option in fields(step)
        if option.name != "op" and (value := getattr(step, option.name)) != _default_of(option)
    ]
    return f"{step.op}({', '.join(given)})" if given else step.op


def _default_of(option: Field[object]) -> object:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _option_text(value: object) -> str:
    """As TOML has it; of a table only that it is one, as users pass their own options there."""
    return "{…}" if isinstance(value, Mapping) else json.dumps(value, ensure_ascii=False, default=str)


def _few(texts: Iterable[str]) -> tuple[str, ...]:
    """The first texts, each cut, and an ellipsis for more than a description may have."""
    found: list[str] = []
    left = DESCRIBED_CHARACTERS_MAX
    for text in map(_cut, texts):
        left -= len(text)
        if left < 0:
            return (*found, "…")
        found.append(text)
    return tuple(found)


def _cut(text: str) -> str:
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if len(plain) <= TEXT_CHARACTERS_MAX else f"{plain[: TEXT_CHARACTERS_MAX - 1]}…"


def signature(plan: StreamPlan, content: str, index: SourceIndex) -> str:
    """Digest of a stream: settings, fingerprint, and its files with their versions.

    Its share of the daemon's memory does not count: a stream that stays keeps its ring.
    """
    facts = {
        "settings": plan.config.model_dump(mode="json"),
        "content": content,
        "samples": len(index),
        "place": index.place,
        "files": [(str(path), digest) for path, digest in plan.digests.items()],
        "python_path": plan.code.python_path,
    }
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def is_made_by_any(plan: StreamPlan, daemon: DaemonConfig) -> bool:
    """True if worker hosts may fill the stream that need not make the same bytes as this host."""
    return not plan.config.why_here and daemon.worker_address is not None and daemon.pool_accept == "any"


def content_of(
    plan: StreamPlan, source_digest: str, epochs: Plan | None = None, *, made_by_any: bool = False
) -> dict[str, object]:
    """All that decides the bytes of a position: source, steps, batches.

    ``epochs``: an order of its own and draws by weight count by what they are, and not by the
    options that made them. ``made_by_any``: see ``is_made_by_any``.

    Files that steps read and modules of the user's functions count by their content, not their
    path. Window, memory and workers do not count: they decide when a batch is ready. Nor does a
    cache, except one of decoded samples, which cuts the pipeline.
    """
    config = plan.config
    content = {
        "version": CONTENT_VERSION,
        "source": source_digest,
        "columns": [(column.name, column.text) for column in plan.columns],
        "steps": [named_by_content(step, plan.digests) for step in plan.pipeline.steps],
        **{key: getattr(config, key) for key in keys_marked(Mark.DECIDES_BYTES, StreamConfig)},
        "shuffle": config.is_shuffled,  # not if live
        "balance": config.alike,  # in a grouping, the order has it
    }
    for key, absent in {"weights": None, "mix": None, "erase": None, "repeats": 1, "balance": 1}.items():
        if content[key] == absent:
            del content[key]
    if epochs is not None and epochs.draws is not None:
        content["weights"] = epochs.draws.digest
    if plan.mixing is not None:
        content["mix"] = to_plain(plan.mixing)
    if plan.erasing is not None:
        content["erase"] = to_plain(plan.erasing)
    if epochs is not None and epochs.order is not None:
        content["shuffle"] = epochs.order.digest
    if config.cache == "decoded":
        # what is decoded without knowing a crop may be other pixels
        content["cut"] = plan.pipeline.cut
    if made_by_any:
        content["accept"] = "any"
    steps = with_inner({(place,): step for place, step in enumerate(plan.pipeline.steps)}).values()
    deciding = [step.libraries for step in steps] + [
        source.libraries for _key, source in sources_in(plan.config.source)
    ]
    beside = {
        "libraries": {name: version(name) for names in deciding for name in names},
        "modules": dict(plan.code.digests),
    }
    return content | {key: value for key, value in beside.items() if value}


def card_of(
    plan: StreamPlan, settings: DaemonConfig, content: Mapping[str, object], samples: int, journal: JournalSpec | None
) -> StreamCard:
    """The parts of a stream's fingerprint, and the configuration that makes its batches again."""
    daemon = settings.model_dump(mode="json", include=REPLAYED_KEYS, exclude_unset=True)
    stream = plan.config.model_dump(mode="json", exclude_unset=True)
    if journal is not None:
        daemon["cache_dir"] = os.path.dirname(journal.path)  # noqa: PTH120  a text
    text = json.dumps({"daemon": daemon, "streams": {plan.name: stream}})
    pieces = tuple(text[at : at + MESSAGE_CHARACTERS_MAX] for at in range(0, len(text), MESSAGE_CHARACTERS_MAX))
    parts = tuple(ContentPart(part, json.dumps(value)) for part, value in parts_of(content))
    return StreamCard(plan.name, fingerprint(content), samples, parts, pieces)
