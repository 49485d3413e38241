"""What shall be done: every output of the core, as data. ``core.state`` decides them, the daemon performs them in order."""

from batchd.core.course import Course
from batchd_wire.position import Position
from batchd_wire.record import record


@record
class SpawnWorker:
    """Start a worker under a number that was never used before."""

    worker: int


@record
class KillWorker:
    """Kill a worker; ``reason`` goes into the log."""

    worker: int
    reason: str


@record
class DismissWorker:
    """Have a worker end that has nothing in hand; ``WorkerGone`` follows."""

    worker: int


@record
class CreateSlot:
    """Reserve memory for a slot under a number that was never used before."""

    stream: int
    slot: int


@record
class ReserveSlot:
    """Mark the slot unfinished: a new batch will be filled into it. Paired with ``CommitSlot``; reserving again abandons it."""

    slot: int


@record
class CommitSlot:
    """Mark the slot whole: ``samples`` rows of ``position`` are in it, under ``generation``."""

    stream: int
    slot: int
    generation: int
    position: Position
    samples: int


@record
class OrderChunk:
    """Have ``worker`` fill rows of ``position`` into ``slot``. ``places``: of a live stream, where each row's sample is."""

    worker: int
    order: int
    stream: int
    slot: int
    position: Position
    first: int
    count: int
    places: tuple[int, ...] = ()


@record
class AdmitSubscription:
    """Tell the trainer that its claim is admitted."""

    session: int
    request: int
    subscription: int
    stream: int
    course: Course
    window: int


@record
class GrantLease:
    """Hand the trainer its next batch: rows ``first`` to ``first + count`` of ``slot``.

    ``is_remote``: as bytes; ``BatchSent`` says when the slot is read no more.
    """

    stream: int
    session: int
    subscription: int
    sequence: int
    epoch: int
    step: int
    slot: int
    generation: int
    first: int
    count: int
    is_remote: bool


@record
class AdmitProducer:
    """Hand a producer the stream's mailbox."""

    session: int
    request: int
    stream: int


@record
class LendPlace:
    """Tell a producer where to write its sample; None: the mailbox is full, and the sample is dropped."""

    session: int
    request: int
    place: int | None


@record
class TakeSample:
    """Tell a producer that its sample is in the queue. ``next_place`` is lent to it as well, unless it is None."""

    session: int
    request: int
    next_place: int | None


@record
class Refuse:
    """Tell the trainer what cannot be done. ``request`` or ``subscription`` is 0, whichever it is not about."""

    session: int
    request: int
    subscription: int
    error: int
    text: str


@record
class ReportBad:
    """A sample was found bad for the first time."""

    stream: int
    sample: int
    path: str
    reason: str


@record
class ReportMismatch:
    """A trainer got a batch that did not match its checksums."""

    stream: int
    session: int
    position: Position


@record
class QuarantineSample:
    """A sample killed its workers: tell every worker, now and later, never to decode it again."""

    stream: int
    sample: int
    reason: str


@record
class ReportStopped:
    """A stream stops for good."""

    stream: int
    text: str


@record
class FreeSlots:
    """Give back the memory of slots of a stream that is not served any more: nobody reads or writes them."""

    stream: int
    slots: tuple[int, ...]


@record
class EndStream:
    """Forget a stream: it has no slots any more, and no other action will name it."""

    stream: int


Action = (
    SpawnWorker
    | KillWorker
    | DismissWorker
    | CreateSlot
    | ReserveSlot
    | CommitSlot
    | OrderChunk
    | AdmitSubscription
    | GrantLease
    | AdmitProducer
    | LendPlace
    | TakeSample
    | Refuse
    | ReportBad
    | ReportMismatch
    | QuarantineSample
    | ReportStopped
    | FreeSlots
    | EndStream
)
