"""Plans the memory and the descriptors of the rings. Daemon and ``batchd check``; takes nothing.

    [daemon] memory = 4GiB
    |-- streams.a: memory = 1GiB -----|-- streams.b: half of the rest --|-- streams.c: the same --|
    |-- slot --|-- slot --|-- ... --| |-- slot --|-- slot --|           |-- slot --|-- slot --|

Invariant: the slots of all rings together never exceed the daemon's memory, and each ring has at
least two: one is read while the other is filled.
"""

import resource
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Literal

import numpy as np

from batchd.config.draft import whole_draft
from batchd.config.schema import problem_at
from batchd.config.tree import Config, DaemonConfig, StreamConfig
from batchd.core.admission import WINDOW_MAX
from batchd.core.buckets import ROWS, BucketSizes
from batchd.core.plan import Tables
from batchd.core.stream import CHUNK_TARGET_S, FIRST_CHUNK_ROWS, ORDERS_PER_S_MAX
from batchd.data.pipeline.cache_split import KINDS_OF_FACTS
from batchd.data.pipeline.sample_fields import columns_after, sample_fields
from batchd.data.samples.columns import Column
from batchd.data.sources.push.options import PushSource
from batchd.data.storage.access import Storage
from batchd.errors import ConfigInvalid, MemoryTooSmall, Problem, ProblemKind, path_text
from batchd.observe.diagnosis.demand import ORDERS_AT_ONCE, SLOTS_OF_A_TRAINER
from batchd.runtime.limits import SessionLimits
from batchd.runtime.sizes import round_bytes
from batchd.runtime.slots import ADVICE, MAPPING_DESCRIPTORS, SLOT_DESCRIPTORS
from batchd.stream.cache_file import cache_problems
from batchd.stream.cache_memory import identity
from batchd.stream.plan import bucket_rate, budgeted_field, drawn_fields, look_at_stream
from batchd.worker.messages import ASPECT_UNIT, CHUNK_ROWS_MAX, NOTE_BYTES
from batchd_wire.fields import CHECKSUM, Rooms, SlotLayout, place_fields
from batchd_wire.record import frozen
from batchd_wire.wording import counted

OWN_DESCRIPTORS = 64
"""Standard streams, sockets, ZeroMQ's threads, the directory's lock, signals,
``SPARE_DESCRIPTORS``."""
SPARE_DESCRIPTORS = 24
"""Of the daemon's own, those that local trainers leave free: to replace a worker, read the
configuration or a key."""
GATEWAY_DESCRIPTORS = 2
"""Its channel and its pidfd."""
WORKER_DESCRIPTORS = 6
"""Its channel, its note, its pidfd and its state, and what it takes to start one."""
MAILBOX_DESCRIPTORS = 2
"""To write and to read the mailbox of a live stream."""
CACHE_DESCRIPTORS = 2 + MAPPING_DESCRIPTORS
"""The cache of a stream, its mapping, and its claims; streams may share them."""
DISK_CACHE_DESCRIPTORS = 2 + CACHE_DESCRIPTORS
"""A cache on disk has its file and its lock, too."""
LOCAL_SESSION_DESCRIPTORS = 2
"""Its lifeline, and its connection to ZeroMQ."""
LOCAL_SOCKETS = 2
"""Each has pending connections of its own."""
TCP_OVERSHOOT = 2_048
"""Connections that ZeroMQ may accept before the loop knows of them: so many events fit into its
monitor, then it waits."""
SLOTS_MIN = 2
SLOTS_MAX = 640
"""Two slots for each of 256 trainers on one stream of small batches, and some more. Each slot costs
the daemon two descriptors and, on Python before 3.13, one more in each process that maps it (the
daemon too, for TCP); a process may often have 1024."""
DERIVED_SLOTS_MAX = 64
"""Of the ring of a derived stream: two for each of 32 trainers."""
WINDOW_BYTES = 16 << 20
WINDOW_MIN = 3
"""Batches ahead of a trainer by default: few large ones, and so many small ones that messages carry
some at a time."""
KEPT_BYTES = 128 << 20
KEPT_MIN = 8
"""Batches that are kept for a trainer that is behind."""
WORKERS_MAX = 1 << 17
"""More than all those of this host and ``pool_max``."""
MEBIBYTE = 1 << 20


@frozen
class RingSize:
    """Limits of one ring. ``columns``: of the source. ``mailbox_bytes``: of pushed samples."""

    columns: tuple[Column, ...]
    layout: SlotLayout
    slots_max: int
    mailbox_bytes: int = 0

    @property
    def ring_bytes(self) -> int:
        """The most memory that the ring takes, with the mailbox before it."""
        return self.slots_max * self.layout.slot_bytes + self.mailbox_bytes


def plan_rings(config: Config, storage: Storage, *, thoroughly: bool = False) -> dict[str, RingSize]:
    """Lay out the slots of every stream and count them.

    ``thoroughly``: for a caller that does not scan the sources afterwards. Raises ``ConfigInvalid``
    if a source cannot be read or the steps of a stream are wrong, and ``MemoryTooSmall`` if only
    the memory is too small; either has all problems of all streams. The problems have no lines yet.
    """
    problems = cache_problems(config)
    columns: dict[str, tuple[Column, ...]] = {}
    layouts: dict[str, SlotLayout] = {}
    for name, stream in config.streams.items():
        draft, python_path = whole_draft(stream), config.daemon.python_path or ()
        findings = look_at_stream(name, draft, python_path, storage, thoroughly=thoroughly)
        problems += findings.problems
        if findings.columns is not None:
            columns[name] = findings.columns
            layouts[name] = slot_layout(stream, findings.columns, has_checksums=stream.has_checksums)
    memory_problems = _memory_problems(config, layouts)
    if problems:
        raise ConfigInvalid(problems + memory_problems)
    if memory_problems:
        raise MemoryTooSmall(memory_problems)
    shares = _shares(config)
    rings = {}
    for name, layout in layouts.items():
        mailbox_bytes = _mailbox_bytes(config.streams[name])
        slots_max = min(SLOTS_MAX, (shares[name] - mailbox_bytes) // layout.slot_bytes)
        rings[name] = RingSize(columns[name], layout, slots_max, mailbox_bytes)
    return rings


def slot_layout(stream: StreamConfig, columns: Sequence[Column], *, has_checksums: bool) -> SlotLayout:
    """Lay out one slot. ``columns``: of the source; the steps fit them.

    Where buckets decide the room, it is the most that any can need: ``bucket_layout`` returns the
    layout with those of an index.
    """
    fields = sample_fields(columns, stream.pipeline, stream.on_error, drawn_fields(stream))
    field, rooms = budgeted_field(stream, columns), None
    if field is not None and stream.bucket is not None and stream.bucket.budget is not None:
        largest = ceil(stream.bucket.budget * (bucket_rate(stream) or 1) / stream.batch_size)
        rooms = Rooms(field, ((stream.batch_size, largest + 2 * bool(bucket_rate(stream))),))
    sizes = next((column.sizes for column in columns_after(columns, stream.pipeline).values() if column.size_axes), ())
    if sizes:
        rooms = Rooms("", tuple((stream.batch_size, *size) for size in sizes))
    return place_fields((*fields, CHECKSUM) if has_checksums else fields, stream.batch_size, rooms)


def bucket_layout(layout: SlotLayout, arrays: Tables, rate: int = 0) -> SlotLayout:
    """Lay out one slot for the buckets in the index of a stream, if they decide its room.

    ``rate``: see ``bucket_rate``.
    """
    sizes = BucketSizes(arrays) if layout.rooms is not None and ROWS in arrays else None
    if sizes is None or sizes.rows is None or layout.rooms is None:
        return layout
    lengths = np.maximum(sizes.largest, 1)[:, np.newaxis] if sizes.crops is None else sizes.crops[:, :2]
    if rate:  # seconds were rounded, so there is one sample more than they say
        lengths = lengths * rate // ASPECT_UNIT + 2
    rooms = tuple((rows, *room) for rows, room in zip(sizes.rows.tolist(), lengths.tolist(), strict=True))
    return place_fields(layout.fields, layout.rows, Rooms(layout.rooms.field, rooms))


def ring_slots(workers: int, batch_size: int, chunk_rows: int | Literal["auto"]) -> int:
    """Count the slots with which one trainer keeps so many workers busy.

    An order has as many rows as before any time was measured, and more where workers are many.
    """
    usual_rows = ceil(FIRST_CHUNK_ROWS * max(1.0, workers / ORDERS_PER_S_MAX / CHUNK_TARGET_S))
    order_rows = min(CHUNK_ROWS_MAX, usual_rows) if chunk_rows == "auto" else min(chunk_rows, usual_rows)
    return ceil(workers * ORDERS_AT_ONCE / ceil(batch_size / order_rows)) + SLOTS_OF_A_TRAINER


def window_of(stream: StreamConfig, daemon: DaemonConfig, ring: RingSize) -> int:
    """Count the batches that are prepared ahead of a trainer; see ``StreamConfig.window``."""
    if stream.window != "auto":
        return stream.window
    busy = ring_slots(daemon.worker_count(), ring.layout.rows, daemon.chunk_rows)
    window = max(WINDOW_BYTES // ring.layout.slot_bytes, WINDOW_MIN, busy)
    return max(SLOTS_MIN, min(window, WINDOW_MAX, ring.slots_max - 1))


def kept_ahead(stream: StreamConfig, ring: RingSize, *, equal_epochs: bool) -> int | None:
    """Return how far ahead of its next reader a batch is kept in new memory; see ``StreamSpec``.

    However far if all epochs have the same bytes, since a set that fits is decoded once, or if the
    stream was given this memory. Otherwise a trainer that is far behind would fill all memory with
    batches, and read few of them: those that were decoded last are evicted first.
    """
    if equal_epochs or stream.memory is not None:
        return None
    return max(KEPT_MIN, KEPT_BYTES // ring.layout.slot_bytes)


def ring_workers(slots: int, batch_size: int, chunk_rows: int | Literal["auto"]) -> int:
    """Count the workers that one trainer keeps busy with so many slots."""
    return bisect_right(range(WORKERS_MAX), slots, key=lambda workers: ring_slots(workers, batch_size, chunk_rows)) - 1


def budgets_bytes(config: Config) -> int:
    """Memory budgets of all caches of a configuration; streams over the same source share one."""
    budgets = {
        (identity(stream), stream.cache_memory): stream.cache_memory
        for stream in config.streams.values()
        # what is known of files takes the memory that is left
        if stream.cache_memory is not None
        and stream.cache_dir is None
        and stream.cache_kind not in {"off", *KINDS_OF_FACTS}
    }
    return sum(budgets.values())


def needed_bytes(config: Config, rings: Mapping[str, RingSize]) -> int:
    """Memory of the rings, those of derived streams, too, and the caches when they are full."""
    return sum(ring.ring_bytes for ring in rings.values()) + config.daemon.derived_bytes + budgets_bytes(config)


def memory_problem(config: Config, text: str | None) -> Problem | None:
    """Wrap ``text`` as MEMORY_TOO_SMALL; None stays None."""
    if text is None:
        return None
    caches_bytes = budgets_bytes(config)
    text += f"; {round_bytes(caches_bytes)} of it are for caches (cache_memory =)" if caches_bytes else ""
    return problem_at(("daemon", "memory"), ProblemKind.MEMORY_TOO_SMALL, text)


def _mailbox_bytes(stream: StreamConfig) -> int:
    return stream.source.mailbox_bytes if isinstance(stream.source, PushSource) else 0


def _shares(config: Config) -> dict[str, int]:
    """Bytes of each stream: its own, or an equal part of the rest (negative if overdrawn)."""
    own = {name: stream.memory for name, stream in config.streams.items() if stream.memory is not None}
    sharing = len(config.streams) - len(own)
    rest = (config.daemon.rings_bytes - sum(own.values())) // max(1, sharing)
    return {name: own.get(name, rest) for name in config.streams}


def _memory_problems(config: Config, layouts: dict[str, SlotLayout]) -> list[Problem]:
    """Find rings without room for two slots, and own memory that adds up to more than there is."""
    own_bytes = sum(stream.memory or 0 for stream in config.streams.values())
    sharing = [name for name, stream in config.streams.items() if stream.memory is None]
    mailboxes = {name: _mailbox_bytes(config.streams[name]) for name in layouts}
    needs = {name: SLOTS_MIN * layout.slot_bytes + mailboxes[name] for name, layout in layouts.items()}
    daemon_need = own_bytes + len(sharing) * max((needs[name] for name in sharing if name in needs), default=0)
    daemon_need += config.daemon.derived_bytes
    problems = []
    if own_bytes > config.daemon.rings_bytes:
        have = f"have {round_bytes(max(0, config.daemon.rings_bytes), floor)} for all rings together"
        have += " beside those of derived streams" if config.daemon.derived_bytes else ""
        remedy = f"set memory = {_setting(daemon_need)} in [daemon], or less in the streams"
        text = f"need {round_bytes(own_bytes, ceil)}, which the streams' own memory adds up to, {have}; {remedy}"
        problems.append(problem_at(("daemon", "memory"), ProblemKind.MEMORY_TOO_SMALL, text))
    for name, share in _shares(config).items():
        if needs.get(name, 0) <= share:
            continue
        have = f"have {round_bytes(max(0, share), floor)}"
        if name in sharing:
            have += " as the stream's part of [daemon] memory"
            remedy = f"set memory = {_setting(daemon_need)} in [daemon]"
        else:
            remedy = f"set memory = {_setting(needs[name])} in [{path_text(('streams', name))}]"
        slots = f"{SLOTS_MIN} slots of {counted(layouts[name].rows, 'sample')}"
        slots += " and the mailbox" if mailboxes[name] else ""
        text = f"need {round_bytes(needs[name], ceil)} for {slots}, {have}; {remedy}"
        rooms = layouts[name].rooms
        varying = [field.name for field in layouts[name].fields if field.varying and not rooms]
        smaller = [f"a smaller max_shape of {' and '.join(varying)}"] if varying else []
        smaller += ["a smaller budget"] if rooms else []
        smaller += ["a smaller capacity"] if mailboxes[name] else []
        text += f", or {', or '.join([*smaller, 'a smaller batch_size'])}"
        problems.append(problem_at(("streams", name, "memory"), ProblemKind.MEMORY_TOO_SMALL, text))
    return problems


def _setting(need_bytes: int) -> str:
    """The next whole MiB, as written in the file."""
    return f'"{-(-need_bytes // MEBIBYTE)}MiB"'


@frozen
class DescriptorPlan:
    """How many descriptors the process has, and the most that each part needs."""

    limit: int
    own: int
    slots: int
    connections: int
    per_slot: int = SLOT_DESCRIPTORS
    strangers: int = 0
    """Local connections that may be pending beside those of sessions."""

    @property
    def need(self) -> int:
        """The descriptors that streams and trainers can take together."""
        return self.own + self.slots + self.connections

    @property
    def reserved(self) -> int:
        """Slots with held descriptors; if short, what connections leave, but at least half.

        None where the limit is enough for all slots and whoever connects: then a ring has those of
        the slots that its trainers need.
        """
        if self.need + self.strangers <= self.limit:
            return 0
        free = max(0, self.limit - self.own)
        return min(self.slots, max(free - self.connections, free // 2)) // self.per_slot

    def shortage(self) -> str | None:
        """Say what is short if streams and trainers take everything; None if there is enough."""
        if self.need <= self.limit:
            return None
        return (
            f"need up to {self.need} descriptors ({self.slots} for slots, {self.connections} for connections, {self.own} "
            f"others), have {self.limit}: rings stay smaller, or trainers wait to be let in; {ADVICE}, or lower sessions_max "
            "in [daemon]"
        )

    def refusal(self, streams: int) -> Problem | None:
        """Say why the daemon cannot start: fewer than two slots per stream, and as many others."""
        need = self.own + 2 * SLOTS_MIN * self.per_slot * streams
        if need <= self.limit:
            return None
        text = f"need {need} descriptors at least, have {self.limit}; {ADVICE}; {self.own} are for the daemon and its workers"
        return problem_at(("daemon",), ProblemKind.TOO_FEW_DESCRIPTORS, text)


def largest_file(rings: Mapping[str, RingSize]) -> int:
    """The bytes of the largest piece of shared memory that rings and workers need."""
    return max([NOTE_BYTES, *(ring.layout.slot_bytes for ring in rings.values())])


def file_size_refusal(rings: Mapping[str, RingSize], limit: int) -> Problem | None:
    """Say why the daemon cannot start with this RLIMIT_FSIZE; None if it is enough."""
    need = largest_file(rings)
    if limit == resource.RLIM_INFINITY or need <= limit:
        return None
    text = (
        f"need shared memory of {need:,} bytes in one piece, may make files of {limit:,} (RLIMIT_FSIZE, which holds for shared "
        "memory, too); raise the limit of file sizes (ulimit -f unlimited, LimitFSIZE=infinity in the unit)"
    )
    return problem_at(("daemon",), ProblemKind.FILES_TOO_SMALL, text)


def plan_descriptors(config: Config, rings: dict[str, RingSize]) -> DescriptorPlan:
    """Count the descriptors of a configuration. The limit is the hard one."""
    daemon = config.daemon
    limits = SessionLimits(daemon.sessions_max, daemon.sessions_per_peer)
    connections = LOCAL_SESSION_DESCRIPTORS * daemon.sessions_max
    derived = daemon.derive_max if daemon.derive else 0
    derived += daemon.define.streams_max if daemon.define is not None else 0
    per_slot = SLOT_DESCRIPTORS
    if daemon.tcp is not None:
        per_slot += MAPPING_DESCRIPTORS
        # as many may join sessions
        connections += 2 * limits.sessions_max + limits.pending_max + TCP_OVERSHOOT
    return DescriptorPlan(
        limit=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        own=OWN_DESCRIPTORS
        + GATEWAY_DESCRIPTORS * (daemon.pool_gateways - 1)
        + WORKER_DESCRIPTORS * daemon.worker_count()
        + len(config.streams)
        + derived
        + MAILBOX_DESCRIPTORS * sum(ring.mailbox_bytes > 0 for ring in rings.values())
        + CACHE_DESCRIPTORS
        * sum(stream.cache_kind != "off" for stream in config.streams.values() if not stream.cache_dir)
        + DISK_CACHE_DESCRIPTORS * sum(stream.cache_dir is not None for stream in config.streams.values()),
        slots=per_slot * (sum(ring.slots_max for ring in rings.values()) + derived * DERIVED_SLOTS_MAX),
        connections=connections,
        per_slot=per_slot,
        strangers=LOCAL_SOCKETS * limits.pending_max,
    )
