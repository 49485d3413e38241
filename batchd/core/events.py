"""Events: every input of the core, as data. The daemon makes them; ``core.state`` handles them."""

from typing import NamedTuple

from batchd.core.spec import StreamSpec
from batchd.orders.worker import Work
from batchd_wire.record import record


@record
class SubscriptionAsked:
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


@record
class Pulled:
    """A trainer reports where it is and what it releases. See ``messages.Pull``."""

    session: int
    subscription: int
    consumed: int
    waiting: bool
    wait_us: int
    released: list[tuple[int, int]]


@record
class BatchSent:
    """A batch was sent as bytes, or never will be: the daemon reads its slot no more."""

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
    """A trainer ends a subscription and keeps what it still reads. See ``messages.Unsubscribe``."""

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
    """The kernel closed a trainer's lifeline: the trainer reads nothing any more."""

    session: int


@record
class SessionCutOff:
    """A trainer misbehaved and is ignored from now on; it may still read what it holds."""

    session: int


@record
class WorkerReady:
    """A worker takes orders."""

    worker: int


@record
class PartsNamed:
    """A worker names the parts of a stream's work. See ``orders.StreamMeasured``."""

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
    """A worker's note has been read; None between samples."""

    worker: int
    note: Note | None


@record
class WorkerGone:
    """The kernel reports a dead worker.

    ``note`` is its last one; ``how`` is for people: "signal 11 (SIGSEGV)".

    ``from_outside``: another process killed it, hardly because of the sample that it had in hand.
    ``out_of_memory``: an allocation failed, or the kernel's OOM killer ended it.
    """

    worker: int
    how: str
    note: Note | None
    from_outside: bool = False
    out_of_memory: bool = False


@record
class SlotLost:
    """The memory for ``slot`` could not be reserved; ``reason`` is the system's."""

    stream: int
    slot: int
    reason: str


@record
class Ticked:
    """Time has passed."""


@record
class SlotWanted:
    """One more slot is wanted in a ring that can grow, before a trainer needs it."""


@record
class Reconfigured:
    """The configuration was read again: streams and the number of workers may change.

    ``removed``: numbers of streams that are not served any more; ``replaced``: those whose name a
    stream of ``added`` has now. ``renews_workers``: the present workers have imported outdated
    code.
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
