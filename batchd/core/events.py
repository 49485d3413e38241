"""Events: every input of the core, as data. The daemon makes them; ``core.state`` handles them."""

from typing import NamedTuple

from batchd.core.spec import StreamSpec
from batchd.core.work import Work
from batchd_wire.record import record


class Event:
    """An input of the core."""

    __slots__ = ()


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


@record
class LinkBegun(Event):
    """A worker host has registered; its workers and the streams that it can fill follow.

    ``name``: what it calls itself. ``workers``: how many it has while none of them has died.
    """

    link: int
    name: str
    workers: int


@record
class StreamOpened(Event):
    """A worker host can fill a stream, once it has proved itself."""

    link: int
    stream: int


@record
class StreamRefused(Event):
    """A worker host cannot fill a stream."""

    link: int
    stream: int
    reason: str


@record
class HostLeaves(Event):
    """A worker host takes no more orders. ``ReleaseLink`` follows when it has none."""

    link: int


@record
class LinkEnded(Event):
    """A worker host is gone. All its workers were reported gone before."""

    link: int


@record
class WorkerJoined(Event):
    """A worker of a worker host takes orders. Its number is from ``REMOTE_NUMBERS`` on."""

    worker: int
    link: int


@record
class OrderWithdrawn(Event):
    """Nothing more is written for an order of a remote worker; see ``WithdrawOrder``."""

    worker: int
    order: int


@record
class OrderSettled(Event):
    """The remote worker itself is done with an order that was withdrawn."""

    worker: int
    order: int


@record
class ReferenceCopied(Event):
    """The slot of a ``ProveChunk`` is not read any more."""

    worker: int
    order: int


@record
class ChunkProved(Event):
    """The rows of a ``ProveChunk`` were compared: equal, if ``difference`` is empty.

    ``bad_rows``: rows that could not be filled there. ``is_hopeless``: none of the stream can be.
    ``last_bad``: one of their samples, and why it is bad there.
    """

    worker: int
    order: int
    difference: str
    bad_rows: int = 0
    is_hopeless: bool = False
    last_bad: str = ""


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


@record
class DrainAsked(Event):
    """Finish what is being filled, begin nothing new."""
