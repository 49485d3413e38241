"""Events: every input of the core, as data. The daemon makes them; ``core.state`` handles them.

What worker hosts and gateways report are messages of the pool, too: they reach the core as they
are. They name a worker by its link and its number there; see ``core.fleet.remote_number``.
"""

from collections.abc import Mapping
from typing import NamedTuple

from batchd.core.mailbox import LiveSpec
from batchd.core.plan import Plan
from batchd.core.tenants import EVERYBODY, Weights
from batchd.core.work import Work
from batchd_wire.codec import Message, message
from batchd_wire.position import Position
from batchd_wire.record import frozen, record


class Event:
    """An input of the core."""

    __slots__ = ()


@frozen
class StreamSpec:
    """The facts of one stream, which never change: with other facts it is another stream.

    ``equal_epochs``: slots serve all epochs, which have the same bytes. ``max_skew``: how many of
    its batches a trainer may be ahead of the slowest; None: each has its own pace.
    ``remote_window_max``: batches that may wait in the memory of a trainer on another host.
    ``kept_ahead``: the ring is not enlarged to keep a batch that its next reader reads after more
    others than these; None: it is. ``bgr_fields``: images in BGR order, for display.
    """

    number: int
    name: str
    fingerprint: str
    plan: Plan
    equal_epochs: bool
    window: int
    remote_window_max: int
    max_skew: int | None
    slots_max: int
    on_error: str
    bad_fraction_max: float
    kept_ahead: int | None = None
    bgr_fields: tuple[str, ...] = ()
    live: LiveSpec | None = None
    """For a stream whose samples are pushed by producers."""
    decodes_here: bool = False
    """Whether only workers of this host may fill it."""
    shares_caches: bool = False
    """Whether worker hosts fill the rows whose samples their caches have; see ``shares``."""
    groups_neighbours: bool = False
    """Whether an order has rows whose samples are near each other: few requests, shared decodes."""
    own_source: bool = False
    """Whether its source is the user's own code."""
    report_memory: int = 0
    """Bytes for what trainers report of its batches."""
    source: str = ""
    """Digest of the samples and their places; "" of a live source."""
    has_digests: bool = False
    """Whether the rows that are delivered in each epoch have a digest."""
    has_buckets: bool = False
    """Whether the batches of each bucket have a layout of their own."""
    storage_away_s: float = 0.0
    """How long it waits for storage that is away; 0: workers report bad samples instead."""
    siblings: str = ""
    """Digest of its samples, their order and their "decode": streams with the same one decode each
    sample once, as far as they come to it together; "" if it does not decode files first."""
    slot_bytes: int = 0
    row_bytes: tuple[int, ...] = (0,)
    """Of a row of a batch, in each bucket."""
    joins_near: bool = False
    """Whether samples join those of their row in other batches, so each row is for one worker."""

    def bucket_of(self, position: Position) -> int:
        """Return the number of the layout of a batch."""
        return self.plan.bucket_of(position) if self.has_buckets else 0


@record
class SubscriptionAsked(Event):
    """A trainer of ``session`` subscribes to a stream. See ``messages.Subscribe``.

    ``subscription`` is the number that the subscription gets if it is admitted.
    """

    session: int
    subscription: int
    request: int
    stream: str
    rank: int
    world_size: int
    window: int
    epoch: int
    step: int
    end_epoch: int | None
    fingerprint: str | None
    is_spectator: bool
    is_remote: bool = False
    """The trainer gets its batches as bytes; the daemon releases the slots when they are sent."""
    knows_buckets: bool = True
    sample: int | None = None
    parts: str = ""
    converts: bool = False
    settings: str = ""
    defines: bytes = b""
    keep_s: int | None = 0
    changes: str = ""
    """How the stream differs from the one of the saved state, where its ``parts`` tell."""
    is_convertible: bool = False
    """Whether the state would do with ``converts``."""
    owner: str = ""
    """Who the trainer is: a user, or a key."""
    tenant: str = EVERYBODY
    """Whose share of the workers' time it has."""
    node: int | None = None
    """The memory node on which it runs."""


@record
class Pulled(Event):
    """A trainer reports where it is and what it releases. See ``messages.Pull``."""

    session: int
    subscription: int
    consumed: int
    waiting: bool
    wait_us: int
    released: list[tuple[int, int]]


@record
class BatchSent(Event):
    """A batch was sent as bytes, or never will be: the daemon reads its slot no more."""

    session: int
    subscription: int
    sequence: int
    generation: int


@record
class BatchMismatched(Event):
    """A trainer got other bytes than a worker wrote. See ``messages.Mismatched``."""

    session: int
    subscription: int
    sequence: int
    generation: int


@record
class SubscriptionEnded(Event):
    """A trainer ends a subscription and keeps what it still reads. See ``messages.Unsubscribe``."""

    session: int
    subscription: int
    consumed: int


@record
class ProducerAsked(Event):
    """A session wants to push samples into a stream. See ``messages.Produce``."""

    session: int
    request: int
    stream: str


@record
class PlaceAsked(Event):
    """A producer wants to write a sample. See ``messages.AskPlace``."""

    session: int
    request: int
    stream: int


@record
class PlaceWithdrawn(Event):
    """A producer does not want to write just now. See ``messages.WithdrawAsk``."""

    session: int
    stream: int


@record
class SamplePushed(Event):
    """A producer has written a sample. See ``messages.Pushed``."""

    session: int
    request: int
    stream: int
    place: int


@record
class SessionEnded(Event):
    """The kernel closed a trainer's lifeline: the trainer reads nothing any more."""

    session: int


@record
class SessionCutOff(Event):
    """A trainer misbehaved and is ignored from now on; it may still read what it holds."""

    session: int


@record
class WorkerReady(Event):
    """A worker takes orders."""

    worker: int


@record
class PartsNamed(Event):
    """A worker names the parts of a stream's work. See ``orders.StreamMeasured``."""

    stream: int
    parts: tuple[str, ...]


@record
class ChunkDone(Event):
    """A worker filled the rows of ``orders``, of one stream. See ``orders.ChunksFilled``."""

    worker: int
    orders: tuple[int, ...]
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str
    away: str = ""


class Note(NamedTuple):
    """A worker decodes ``sample`` for ``row`` of ``order``."""

    order: int
    row: int
    sample: int


@record
class WorkerObserved(Event):
    """A worker's note has been read; None between samples."""

    worker: int
    note: Note | None


@record
class WorkerGone(Event):
    """The kernel reports a dead worker; ``how`` is for people: "signal 11 (SIGSEGV)".

    ``from_outside``: another process killed it, so its sample is hardly the cause.
    ``out_of_memory``: an allocation failed, or the kernel's OOM killer ended it.
    """

    worker: int
    how: str
    note: Note | None
    from_outside: bool = False
    out_of_memory: bool = False


@message(80)
class LinkBegun(Message, Event):
    """A worker host has registered; its workers and the streams that it can fill follow.

    ``name``: what it calls itself. ``key``: the name of its key, empty without keys. ``workers``:
    how many it has while none of them has died.
    """

    link: int
    name: str
    host: str
    key: str
    pid: int
    workers: int
    machine: str
    batchd: str


@message(67)
class StreamOpened(Message, Event):
    """A worker host can fill a stream, once it has proved itself."""

    link: int
    stream: int


@message(68)
class StreamRefused(Message, Event):
    """A worker host cannot fill a stream, for ``reason``; other streams continue."""

    link: int
    stream: int
    reason: str


@message(69)
class WorkerUp(Message, Event):
    """A remote worker takes orders. ``decoders``: names and versions, as ``orders.Ready``."""

    link: int
    worker: int
    decoders: str


@message(70)
class WorkerDown(Message, Event):
    """A remote worker is dead, with all its orders; ``how`` is for people, as in ``WorkerGone``."""

    link: int
    worker: int
    how: str


@message(73)
class OrderFilled(Message, Event):
    """A remote worker is done with an order: its rows are in the slot, unless it was withdrawn.

    From the worker host it travels with its rows as frames; with none if it was withdrawn.
    ``work``, ``bad`` and ``hopeless`` are as in ``orders.ChunksFilled``.
    """

    link: int
    worker: int
    order: int
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str


@message(92)
class OrderWithdrawn(Message, Event):
    """No row of an order of a remote worker will be written: others may fill them.

    ``OrderFilled`` follows when the worker itself is done with it.
    """

    link: int
    worker: int
    order: int


@message(89)
class ReferenceCopied(Message, Event):
    """The gateway has copied the rows of a ``ProveChunk``: the slot is not read any more."""

    link: int
    worker: int
    order: int


@message(90)
class OrderProved(Message, Event):
    """The rows of a ``ProveChunk`` were compared: equal, if ``difference`` is empty.

    ``bad_rows``: rows that could not be filled there. ``is_hopeless``: none of the stream can be.
    ``last_bad``: the last of their samples, and why it is bad there.
    """

    link: int
    worker: int
    order: int
    difference: str
    bad_rows: int = 0
    is_hopeless: bool = False
    last_bad: str = ""


@message(77)
class HostLeaves(Message, Event):
    """A worker host takes no more orders; it fills those that it has. ``ReleaseLink`` follows."""

    link: int


@message(78)
class LinkClosed(Message, Event):
    """A link has ended with all its workers, for ``reason``: no row of it will be written.

    ``is_final``: the worker host need not register again. The daemon has a link ended by the same
    message.
    """

    link: int
    reason: str
    is_final: bool


@record
class SlotLost(Event):
    """The memory for ``slot`` could not be reserved; ``reason`` is the system's."""

    stream: int
    slot: int
    reason: str


@record
class Ticked(Event):
    """Time has passed."""


@record
class SlotWanted(Event):
    """A ring that can grow should get another slot before a trainer needs it."""


@record
class Reconfigured(Event):
    """The configuration was read again: streams and the number of workers may change.

    ``removed``: numbers of streams that are not served any more; ``replaced``: those whose name a
    stream of ``added`` has. ``renews_workers``: the present workers have imported outdated code.
    """

    added: tuple[StreamSpec, ...]
    removed: tuple[int, ...]
    replaced: tuple[int, ...]
    workers: int
    sample_timeout_s: float
    chunk_rows_max: int
    renews_workers: bool = False
    weights: Weights = ()
    """Of the tenants."""


@record
class RingsSized(Event):
    """Rings may have so many of their slots from now on. ``slots_max``: by stream number.

    The ring of a live stream keeps its size: it holds samples that nobody has read yet.
    """

    slots_max: Mapping[int, int]


@record
class DrainAsked(Event):
    """Finish what is being filled, begin nothing new."""
