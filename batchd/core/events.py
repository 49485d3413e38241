"""What happens: every input of the daemon, as data. The daemon makes them, ``core.state`` handles them."""

from typing import NamedTuple

from batchd.core.spec import StreamSpec
from batchd.orders.worker import Work
from batchd_wire.record import record


@record
class SubscriptionAsked:
    """A trainer of ``session`` claims a stream. See ``messages.Subscribe``.

    ``subscription`` is the number that the claim gets if it is admitted.
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
    """It gets its batches as bytes; the daemon gives the slots back when they are sent."""


@record
class Pulled:
    """A trainer says where it is and what it gives back. See ``messages.Pull``."""

    session: int
    subscription: int
    consumed: int
    waiting: bool
    wait_us: int
    released: list[tuple[int, int]]


@record
class BatchSent:
    """The bytes of a batch have left for another host, or never will: the daemon reads its slot no more."""

    session: int
    subscription: int
    sequence: int
    generation: int


@record
class BatchMismatched:
    """A trainer got other bytes than a worker wrote. See ``messages.Mismatched``."""

    session: int
    subscription: int
    sequence: int
    generation: int


@record
class SubscriptionEnded:
    """A trainer gives up a claim and keeps what it still reads. See ``messages.Unsubscribe``."""

    session: int
    subscription: int
    consumed: int


@record
class ProducerAsked:
    """A session wants to push samples into a stream. See ``messages.Produce``."""

    session: int
    request: int
    stream: str


@record
class PlaceAsked:
    """A producer wants to write a sample. See ``messages.AskPlace``."""

    session: int
    request: int
    stream: int


@record
class PlaceWithdrawn:
    """A producer does not want to write just now. See ``messages.WithdrawAsk``."""

    session: int
    stream: int


@record
class SamplePushed:
    """A producer has written a sample. See ``messages.Pushed``."""

    session: int
    request: int
    stream: int
    place: int


@record
class SessionEnded:
    """The kernel closed a trainer's lifeline: it reads nothing any more."""

    session: int


@record
class SessionCutOff:
    """A trainer misbehaved and is not listened to any more; it may still read what it holds."""

    session: int


@record
class WorkerReady:
    """A worker takes orders."""

    worker: int


@record
class PartsNamed:
    """A worker says what the times of a stream are about. All workers say the same. See ``orders.StreamMeasured``."""

    stream: int
    parts: tuple[str, ...]


@record
class ChunkDone:
    """A worker filled the rows of ``order``. See ``orders.ChunkFilled``."""

    worker: int
    order: int
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str


class Note(NamedTuple):
    """A worker decodes ``sample`` for ``row`` of ``order``."""

    order: int
    row: int
    sample: int


@record
class WorkerObserved:
    """What a worker's note says right now; None between samples."""

    worker: int
    note: Note | None


@record
class WorkerGone:
    """A worker is dead, says the kernel. ``note`` is its last one; ``how`` is for people: "signal 11 (SIGSEGV)".

    ``from_outside``: somebody killed it, for reasons that hardly lie in the sample that it had in hand.
    ``out_of_memory``: it found none, or the kernel killed it for want of it.
    """

    worker: int
    how: str
    note: Note | None
    from_outside: bool = False
    out_of_memory: bool = False


@record
class SlotLost:
    """The memory for ``slot`` could not be had; ``reason`` is the system's."""

    stream: int
    slot: int
    reason: str


@record
class Ticked:
    """Time has passed."""


@record
class SlotWanted:
    """One more slot shall be made, of a ring that has not all of its slots, before anybody needs it."""


@record
class Reconfigured:
    """The configuration was read again: these streams end, those begin, and there shall be so many workers.

    ``removed`` are numbers of streams that are not served any more; ``replaced`` those whose name one of ``added`` has now.
    ``renews_workers``: those that are there have imported what is not right any more.
    """

    added: tuple[StreamSpec, ...]
    removed: tuple[int, ...]
    replaced: tuple[int, ...]
    workers: int
    sample_timeout_s: float
    chunk_rows_max: int
    renews_workers: bool = False


@record
class DrainAsked:
    """Finish what is being filled, begin nothing new."""


Event = (
    SubscriptionAsked
    | Pulled
    | BatchSent
    | BatchMismatched
    | SubscriptionEnded
    | ProducerAsked
    | PlaceAsked
    | PlaceWithdrawn
    | SamplePushed
    | SessionEnded
    | SessionCutOff
    | WorkerReady
    | PartsNamed
    | ChunkDone
    | WorkerObserved
    | WorkerGone
    | SlotLost
    | Ticked
    | SlotWanted
    | Reconfigured
    | DrainAsked
)
