"""Actions: every output of the core, as data.

``core.state`` decides; the daemon performs them in order.
"""

from batchd.core.course import Course
from batchd.core.rows import Rows
from batchd_wire.codec import Message, message
from batchd_wire.position import Position
from batchd_wire.record import record


class Action:
    """An output of the core."""

    __slots__ = ()


@record
class SpawnWorker(Action):
    """Start a worker under a new number; on the CPUs of a memory node, if there are several."""

    worker: int
    node: int | None = None


@record
class KillWorker(Action):
    """Kill a worker; ``reason`` goes into the log."""

    worker: int
    reason: str


@record
class DismissWorker(Action):
    """Have a worker without orders end; ``WorkerGone`` follows."""

    worker: int


@record
class CreateSlot(Action):
    """Reserve memory for a slot under a new number; of a memory node, if its trainers have one."""

    stream: int
    slot: int
    node: int | None = None


@record
class ReserveSlot(Action):
    """Mark the slot unfinished: a new batch will be filled into it.

    Paired with ``CommitSlot``; reserving the slot again abandons the batch.
    """

    slot: int


@record
class CommitSlot(Action):
    """Mark the slot whole: ``samples`` rows of ``position`` are in it, under ``generation``."""

    stream: int
    slot: int
    generation: int
    position: Position
    samples: int


@record
class OrderChunk(Action):
    """Have ``worker`` fill ``rows`` of ``position`` into ``slot``.

    ``places``: for a live stream, the place of each row's sample in the mailbox. ``share``: see
    ``worker.messages.Chunk``.
    """

    worker: int
    order: int
    stream: int
    slot: int
    position: Position
    rows: Rows
    places: tuple[int, ...] = ()
    share: tuple[int, int] = (0, 0)


@record
class ProveChunk(Action):
    """Have ``worker`` fill rows that a local worker has filled in ``slot``, to be compared.

    The fields are those of ``OrderChunk``. ``ReferenceCopied`` and ``OrderProved`` follow.
    """

    worker: int
    order: int
    stream: int
    slot: int
    position: Position
    rows: Rows


@message(72)
class WithdrawOrder(Message, Action):
    """Have nothing more written for ``order``; ``OrderWithdrawn`` follows unless it is over.

    It reaches the worker host as it is, which still reports the order's end (``OrderFilled``).
    """

    link: int
    worker: int
    order: int


@record
class ReportServing(Action):
    """Log that a worker host fills a stream from now on, or cannot because of ``refusal``."""

    link: int
    stream: int
    refusal: str


@record
class EndLink(Action):
    """End the link of a worker host for good, because its rows cannot be trusted."""

    link: int
    reason: str


@record
class ReleaseLink(Action):
    """End the link of a leaving worker host, whose orders are done; ``LinkClosed`` follows."""

    link: int


@record
class AdmitSubscription(Action):
    """Tell the trainer that its subscription is admitted."""

    session: int
    request: int
    subscription: int
    stream: int
    course: Course
    window: int


@record
class RecordBatch(Action):
    """Note in the journal what is in a batch that a trainer gets for the first time.

    ``pushed``: for each row, the number of its sample among all that were pushed.
    """

    stream: int
    slot: int
    position: Position
    pushed: tuple[int, ...]


@record
class GrantLease(Action):
    """Hand the trainer its next batch: rows ``first`` to ``first + count`` of ``slot``.

    ``is_remote``: send it as bytes; ``BatchSent`` follows when the slot is not read any more.
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
    is_spectator: bool = False
    bucket: int = 0
    """The number of the batch's layout."""


@record
class AdmitProducer(Action):
    """Hand a producer the stream's mailbox."""

    session: int
    request: int
    stream: int


@record
class LendPlace(Action):
    """Tell a producer where to write its sample; None: the mailbox is full, so drop it."""

    session: int
    request: int
    place: int | None


@record
class TakeSample(Action):
    """Tell a producer that its sample is queued; lend it ``next_place`` unless that is None."""

    session: int
    request: int
    next_place: int | None


@record
class Refuse(Action):
    """Refuse ``request`` or ``subscription``, whichever is not 0, and tell the trainer why."""

    session: int
    request: int
    subscription: int
    error: int
    text: str


@record
class ReportBad(Action):
    """Report a sample that was found bad for the first time."""

    stream: int
    sample: int
    path: str
    reason: str


@record
class ReportMismatch(Action):
    """Report that a trainer got a batch that did not match its checksums."""

    stream: int
    session: int
    position: Position


@record
class QuarantineSample(Action):
    """Tell every worker, now and later, never to decode a sample that killed its workers."""

    stream: int
    sample: int
    reason: str


@record
class ReportAway(Action):
    """Report that the storage of a stream's source is away, as ``text`` says: it is waited for."""

    stream: int
    text: str


@record
class ReportBack(Action):
    """Report that the storage of a stream's source is back, after ``away_s`` seconds."""

    stream: int
    away_s: float


@record
class ReportStopped(Action):
    """Report that a stream stops for good."""

    stream: int
    text: str


@record
class FreeSlots(Action):
    """Free slots of a stream that may have fewer now: no process reads or writes them."""

    stream: int
    slots: tuple[int, ...]


@record
class EndStream(Action):
    """Forget a stream: it has no slots, and no other action will name it."""

    stream: int
