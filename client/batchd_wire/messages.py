"""Messages between trainer and daemon. Every process. A message's number is never reused.

Two sockets in the runtime directory make a session on one host:

    trainer                                              daemon
       |  -- lifeline (AF_UNIX SOCK_SEQPACKET) -------->   |   Hello
       |  <----------------------------------------------  |   Welcome (secret)  | Refused
       |  -- AskWritable ------------------------------->  |   only to register slots with a device
       |  -- ZeroMQ DEALER -> ROUTER ------------------->  |   Open (secret): joins the lifeline
       |  <----------------------------------------------  |   Opened            | Refused
       |  -- Subscribe --------------------------------->  |
       |  <-- Subscribed | Refused ----------------------  |
       |  -- Pull (position, ended leases) ------------->  |   for each batch taken, or for some
       |  <== lifeline: SlotShared + file descriptor ====  |   once per slot, before a handle
       |  <-- Handle, or Handles for several ------------  |   when the position is ready, in order
       |  -- Unsubscribe ------------------------------->  |

The lifeline proves the trainer's identity (``SO_PEERCRED``) and that it lives. When the last copy
of the trainer's end is gone, the kernel signals end of file, which ends every lease of the session.
A routing id is only an address.

From another host there is no lifeline and no shared memory. There, the session is one TCP
connection, or several: the first, and joined ones that carry only parts of batches. The session
ends when any of them ends. A batch's bytes follow their header:

    trainer                                              daemon
       |  -- ZeroMQ DEALER -> ROUTER, TCP, CURVE ------->  |   Greet
       |  <----------------------------------------------  |   Greeted           | Refused
       |     Subscribe, Pull, Unsubscribe as above         |
       |  -- further connections: Join ---------------->  |   as many as the trainer wants
       |  <----------------------------------------------  |   Joined            | Refused
       |  <== Parcel + the pieces of its rows ===========  |   see ``batchd_wire.tcp``; a part each

The slot is free again once ZeroMQ has sent the pieces, so the daemon ignores the ended leases of a
``Pull`` over TCP.

A producer pushes samples into a live stream, only on the daemon's host. Its session is like a
trainer's:

    producer                                             daemon
       |  -- Produce --------------------------------->    |
       |  <== lifeline: MailboxShared + descriptor =====   |   the mailbox, to read and write
       |  <-- Producing | Refused ---------------------    |
       |  -- AskPlace --------------------------------->   |   repeated while the producer waits
       |  <-- PlaceLent | Refused ---------------------    |   none: the sample is dropped
       |     writes a sample into its place                |   see ``batchd_wire.mailbox``
       |  -- Pushed ----------------------------------->   |
       |  <-- PushTaken | Refused ---------------------    |   the sample is in the queue now

``sequence`` counts the positions of one subscription from 0. A ``Pull`` names totals, never
differences, so a repeated or late one does no harm.
"""

from batchd_wire.codec import Message, Vocabulary, message
from batchd_wire.reports import ReportedRows

# --- on the lifeline ------------------------------------------------------------------------------


@message(1)
class Hello(Message):
    """First message of a trainer. ``name``: the program's name, which ``batchd status`` shows."""

    version: int
    name: str
    pid: int


@message(2)
class Welcome(Message):
    """The session exists. ``secret`` (16 bytes) opens it on the ZeroMQ side only."""

    version: int
    secret: bytes


@message(3)
class SlotShared(Message):
    """Carries one descriptor.

    The memory of ``slot``, ``slot_bytes`` long, sealed against shrinking. The descriptor is
    read-only; or readable and writable, if the session sent ``AskWritable`` and the configuration
    allows it.
    """

    slot: int
    slot_bytes: int


@message(4)
class MailboxShared(Message):
    """Carries one descriptor.

    The mailbox of ``stream``, ``mailbox_bytes`` long, readable and writable. The mailbox is sealed
    against shrinking, and sent before the ``Producing`` that names it.
    """

    stream: int
    mailbox_bytes: int


@message(5)
class AskWritable(Message):
    """Ask for writable descriptors of slots.

    Sent at most once, after ``Hello`` and before ``Open``. There is no answer: the mode of each
    descriptor shows whether the configuration allows it (``writable_slots``). The trainer must not
    write; most devices can only read memory that is mapped writable.
    """


@message(6)
class SlotsGone(Message):
    """Ask the trainer to unmap ``slots``.

    Their stream has ended, and no handle will name them again. Not sent if the trainer's lifeline
    is full because the trainer does not read it; such a trainer unmaps the slots when its session
    ends.
    """

    slots: list[int]


# --- trainer to daemon, over ZeroMQ ---------------------------------------------------------------


@message(10)
class Open(Message):
    """Tie this ZeroMQ connection to the session that the lifeline began."""

    version: int
    secret: bytes


@message(11)
class Subscribe(Message):
    """Claim a stream as ``rank`` of ``world_size``, from (``epoch``, ``step``) on.

    The claim ends before ``end_epoch``; None: never. ``step`` counts batches of the whole stream,
    not of one rank: ranks that stop together name the same step. ``window``: the number of
    positions to keep ready ahead of the trainer; 0 means the stream's own setting. ``fingerprint``:
    the stream's fingerprint in the trainer's saved state, or None. ``is_spectator``: trainers in
    lockstep do not wait for this session; from a live stream it gets one batch, and consumes
    nothing. ``knows_buckets``: the trainer reads layouts that have buckets. ``takes_several``: this
    session understands ``Handles``.

    ``sample``: begin with this sample of the epoch, counted from 0 in the order of the epoch, in
    place of ``step``; the first batch is what is left of the one that has it. ``parts``: as the
    saved state has them from ``Subscribed``. ``converts``: a state of the same samples in the same
    order, in batches of another size, is one of this stream: begin behind its last sample.
    ``settings``: a JSON object of keys of the stream with other values, by dotted paths: claim the
    stream that is derived with them, if the daemon allows that. ``defines``: a JSON object in
    UTF-8, the keys of a stream as batchd.toml has them: define ``stream`` so, if the daemon allows
    that, and claim it. It is kept for ``keep_s`` seconds after its last trainer; None: until it is
    removed.
    """

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
    knows_buckets: bool = False
    takes_several: bool = False
    sample: int | None = None
    parts: str = ""
    converts: bool = False
    settings: str = ""
    defines: bytes = b""
    keep_s: int | None = 0


@message(12)
class Pull(Message):
    """The trainer's progress.

    ``consumed``: positions handed to the user's loop so far; ``waiting``: the loop waits for the
    next one. ``released``: (sequence, generation) of ended leases. ``wait_us``: microseconds spent
    waiting so far, in total. ``reports``: what the loop reports of batches that it had, see
    ``batchd_wire.reports``; a repeated one does no harm.
    """

    subscription: int
    consumed: int
    waiting: bool
    wait_us: int
    released: list[tuple[int, int]]
    reports: list[ReportedRows] | None = None


@message(13)
class Unsubscribe(Message):
    """End a subscription.

    Leases of positions before ``consumed`` stay until they are released or the lifeline ends. Those
    from ``consumed`` on end now: the trainer has not read them, and drops their handles.
    """

    subscription: int
    consumed: int


@message(14)
class AskStatus(Message):
    """Ask for the daemon's status.

    ``log_after``: for the lines of the log after this one, as far as the daemon keeps them, in
    place of workers, trainers, streams and worker hosts. ``card_of``: for the card of this stream,
    in the same place; only for root and the daemon's own user, as it has the configuration.
    ``reports_of``: for a page of the reports about this stream, in the same place: those after
    number ``reports_after``; or, if ``reports_last`` is not 0, so many of the last ones, each with
    the mean of its values alone. ``is_brief``: for nothing but the daemon as a process.
    """

    request: int
    log_after: int | None = None
    card_of: str | None = None
    reports_of: str | None = None
    reports_after: int = 0
    reports_last: int = 0
    is_brief: bool = False


@message(15)
class AskBad(Message):
    """Ask for the bad samples of ``stream``, with reasons."""

    request: int
    stream: str


@message(16)
class Greet(Message):
    """First message over TCP, in place of ``Hello`` and ``Open``. ``host``: see ``host_id``."""

    version: int
    name: str
    pid: int
    host: str


@message(17)
class Mismatched(Message):
    """The rows of ``sequence`` do not match their checksums. The trainer resubscribes."""

    subscription: int
    sequence: int
    generation: int


@message(18)
class Join(Message):
    """Only message on a further TCP connection: joins the session that has this ``secret``."""

    secret: bytes


@message(19)
class AskReload(Message):
    """Ask for a reload, for root and the daemon's user; answered when it is done.

    ``is_dry``: only say what it would change. ``keeps_trainers``: change nothing if a trainer would
    end.
    """

    request: int
    is_dry: bool = False
    keeps_trainers: bool = False


@message(120)
class AskRemoval(Message):
    """Ask for the end of a defined stream, for its owner, root and the daemon's user."""

    request: int
    stream: str


@message(40)
class Produce(Message):
    """Become a producer of the stream named ``stream``."""

    request: int
    stream: str


@message(41)
class AskPlace(Message):
    """Ask for a place for a sample. A waiting producer keeps its turn; one with a place gets it."""

    request: int
    stream: int


@message(42)
class WithdrawAsk(Message):
    """Withdraw ``AskPlace``: the producer uses no place that it has or that is in transit."""

    stream: int


@message(43)
class Pushed(Message):
    """A whole sample is in ``place``. The producer does not write there again."""

    request: int
    stream: int
    place: int


# --- daemon to trainer, over ZeroMQ ---------------------------------------------------------------


@message(20)
class Opened(Message):
    """The connection may be used. ``daemon``: the daemon's version, to show."""

    daemon: str


@message(21)
class Subscribed(Message):
    """The claim is admitted.

    ``layout`` is a ``SlotLayout``. ``rounds``: batches of each rank in a whole epoch;
    ``first_rounds``: batches in the first epoch of this subscription, which starts at (``epoch``,
    ``step``). That is the requested position, or a later one if a live stream no longer has it.
    ``classes``: names of the labels; empty if the source has none, or more than a message holds.
    ``keeps_reports``: whether the daemon keeps the reports of a ``Pull``. ``in_lockstep``: whether
    other trainers, or producers, wait until this trainer has reported a batch that it took.
    ``sample``: the samples of the epoch before the first batch, if it begins within the batch of
    ``step``. ``parts``: for saved states, to tell later which of the stream's settings changed.
    ``drop_last``: whether an epoch has whole rounds of whole batches alone. ``repeats``: how many
    consecutive batches have the same samples, each counted once. ``stream``: its name in the
    status; "" from a daemon that derives none. ``has_budget``: whether a budget decides the rows of
    each batch. ``overlays``: what is drawn over images: image, role, field, form, and whether it is
    relative (``fields.Overlay``). ``owner``: who has defined the stream; "" of others.
    """

    request: int
    subscription: int
    epoch: int
    step: int
    fingerprint: str
    samples: int
    batch_size: int
    steps: int
    rounds: int
    first_rounds: int
    window: int
    layout: object
    classes: list[str]
    keeps_reports: bool = False
    in_lockstep: bool = False
    sample: int | None = None
    parts: str = ""
    drop_last: bool = False
    repeats: int = 1
    stream: str = ""
    has_budget: bool = False
    overlays: list[tuple[str, str, str, str, bool]] | None = None
    owner: str = ""


@message(22)
class Handle(Message):
    """The lease of the slot with (``epoch``, ``step``), of rows ``first`` to ``first + count``.

    ``bucket``: the number of the batch's layout, if the stream's layout has buckets.
    """

    subscription: int
    sequence: int
    epoch: int
    step: int
    slot: int
    generation: int
    first: int
    count: int
    bucket: int = 0


@message(113)
class Handles(Message):
    """Leases that were granted together. ``handles``: the fields of a ``Handle`` each, in order."""

    handles: list[list[int]]


@message(23)
class Refused(Message):
    """``request`` failed or, if 0, ``subscription`` has to end. ``error``: an ``ErrorCode``."""

    request: int
    subscription: int
    error: int
    text: str


@message(24)
class Status(Message):
    """The answer to ``AskStatus``: plain data, the same that ``batchd status --json`` prints."""

    request: int
    status: dict[str, object]


@message(25)
class BadSamples(Message):
    """The first of ``total`` bad samples: (sample index, path, reason, times seen).

    ``file``: path of the daemon's host with all of them, a line of JSON each; empty if all are
    here, if there is no such file, or if the daemon is older.
    """

    request: int
    total: int
    samples: list[tuple[int, str, str, int]]
    file: str = ""

    @property
    def left_out(self) -> int:
        """Number of bad samples that are not in ``samples``."""
        return self.total - len(self.samples)

    def to_plain(self) -> dict[str, object]:
        """The object that ``batchd bad --json`` and the observer's /bad.json show."""
        keys = ("sample", "path", "reason", "times")
        samples = [dict(zip(keys, bad, strict=True)) for bad in self.samples]
        return {"total": self.total, "left_out": self.left_out, "file": self.file or None, "samples": samples}


@message(26)
class Greeted(Message):
    """The TCP connection is a session. ``daemon``: the daemon's version, to show.

    ``ipc_address``: the local address, for a trainer on the daemon's own host; empty for all
    others. ``secret`` (16 bytes): further connections join with it.
    """

    daemon: str
    ipc_address: str
    secret: bytes


@message(27)
class Parcel(Message):
    """A batch sent as bytes: rows ``first`` to ``first + count`` of (``epoch``, ``step``).

    The pieces of the rows follow as frames. A batch is sent in ``parts``, each on one connection
    and with a ``Parcel`` of its own; this is number ``part``, from 0. ``bucket``: as of a
    ``Handle``.
    """

    subscription: int
    sequence: int
    epoch: int
    step: int
    generation: int
    first: int
    count: int
    part: int
    parts: int
    bucket: int = 0


@message(28)
class Joined(Message):
    """The connection has joined the session."""


@message(29)
class Reloaded(Message):
    """The answer to ``AskReload``. ``text``: the changes, or every problem of the configuration.

    ``exit_code``: 0 if the new configuration is in force; otherwise the old one stays, and a
    command exits with this number.
    """

    request: int
    exit_code: int
    text: str


@message(121)
class Removed(Message):
    """The answer to ``AskRemoval``: the stream ends, and its trainers with it."""

    request: int


@message(50)
class Producing(Message):
    """The session is a producer of stream number ``stream``, whose mailbox has ``capacity`` places.

    ``layout`` is a ``PlaceLayout``: the columns of a sample, and their offsets in a place.
    """

    request: int
    stream: int
    capacity: int
    layout: object


@message(51)
class PlaceLent(Message):
    """Only this producer may write into ``place``. None: all are taken, the sample is dropped."""

    request: int
    place: int | None


@message(52)
class PushTaken(Message):
    """The sample is in the queue. ``next_place``: for the next; None if it must be asked for."""

    request: int
    next_place: int | None


TO_DAEMON_LIFELINE = Vocabulary(Hello, AskWritable)
TO_TRAINER_LIFELINE = Vocabulary(Welcome, SlotShared, SlotsGone, MailboxShared, Refused)
TO_DAEMON = Vocabulary(
    Open,
    Subscribe,
    Pull,
    Mismatched,
    Unsubscribe,
    AskStatus,
    AskBad,
    AskReload,
    AskRemoval,
    Produce,
    AskPlace,
    WithdrawAsk,
    Pushed,
)
TO_TRAINER = Vocabulary(
    Opened, Subscribed, Handle, Handles, Refused, Status, BadSamples, Reloaded, Removed, Producing, PlaceLent, PushTaken
)
TO_DAEMON_REMOTE = Vocabulary(Greet, Join, Subscribe, Pull, Mismatched, Unsubscribe, AskStatus, AskBad, AskRemoval)
TO_TRAINER_REMOTE = Vocabulary(Greeted, Joined, Subscribed, Parcel, Refused, Status, BadSamples, Removed)
