"""What trainer and daemon say to each other. Every process; the numbers are given once and never reused.

Two sockets in the runtime directory make a session on one host:

    trainer                                              daemon
       |  -- lifeline (AF_UNIX SOCK_SEQPACKET) -------->   |   Hello
       |  <----------------------------------------------  |   Welcome (secret)  | Refused
       |  -- AskWritable ------------------------------->  |   by those alone who register slots with a device
       |  -- ZeroMQ DEALER -> ROUTER ------------------->  |   Open (secret): ties the connection to the lifeline
       |  <----------------------------------------------  |   Opened            | Refused
       |  -- Subscribe --------------------------------->  |
       |  <-- Subscribed | Refused ----------------------  |
       |  -- Pull (how far I am, what I give back) ----->  |   one for each batch taken
       |  <== lifeline: SlotShared + file descriptor ====  |   once for each slot, before the first handle that names it
       |  <-- Handle ------------------------------------  |   as soon as the position is ready, in order
       |  -- Unsubscribe ------------------------------->  |

The lifeline proves who the trainer is (``SO_PEERCRED``) and that it lives: its end of file, which
the kernel sends when the last copy of the trainer's end is gone, gives back every lease of the
session. A routing id is only an address.

From another host there is no lifeline and no shared memory. Then one TCP connection is the session,
or several are: the first one, and those that have joined it, over which parts of batches come and
nothing else. With any of them the session ends. The bytes travel behind their header:

    trainer                                              daemon
       |  -- ZeroMQ DEALER -> ROUTER, TCP, CURVE ------->  |   Greet
       |  <----------------------------------------------  |   Greeted           | Refused
       |     Subscribe, Pull, Unsubscribe as above         |
       |  -- further connections: Join ---------------->  |   as many as the trainer wants, each of its own
       |  <----------------------------------------------  |   Joined            | Refused
       |  <== Parcel + the pieces of its rows ===========  |   see ``batchd_wire.tcp``; one part on each connection

The slot is free again once the pieces are on their way, so what a ``Pull`` over TCP gives back is
not looked at.

A producer pushes samples into a live stream, on the daemon's host alone. Its session is like a
trainer's:

    producer                                             daemon
       |  -- Produce --------------------------------->    |
       |  <== lifeline: MailboxShared + descriptor =====   |   the mailbox, to read and write
       |  <-- Producing | Refused ---------------------    |
       |  -- AskPlace --------------------------------->   |   again and again, if it has to wait
       |  <-- PlaceLent | Refused ---------------------    |   none: the sample is dropped
       |     writes a sample into its place                |   see ``batchd_wire.mailbox``
       |  -- Pushed ----------------------------------->   |
       |  <-- PushTaken | Refused ---------------------    |   from here on it is in the queue

``sequence`` counts the positions of one subscription from 0. A ``Pull`` names totals, never
differences, so it may be repeated or overtaken without harm.
"""

from batchd_wire.codec import Message, Vocabulary, message

# --- on the lifeline -------------------------------------------------------------------------------------------------


@message(1)
class Hello(Message):
    """The trainer's first word. ``name`` is for people: the program's name, shown by ``batchd status``."""

    version: int
    name: str
    pid: int


@message(2)
class Welcome(Message):
    """The session exists. ``secret`` (16 bytes) opens it on the ZeroMQ side and nowhere else."""

    version: int
    secret: bytes


@message(3)
class SlotShared(Message):
    """Travels with one descriptor: the memory of ``slot``, ``slot_bytes`` long, sealed against shrinking.

    It is opened read-only, or for reading and writing where the session said ``AskWritable`` and
    the configuration allows that.
    """

    slot: int
    slot_bytes: int


@message(4)
class MailboxShared(Message):
    """Travels with one descriptor, opened for reading and writing: the mailbox of ``stream``, ``mailbox_bytes`` long.

    It is sealed against shrinking, and comes before the ``Producing`` that names it.
    """

    stream: int
    mailbox_bytes: int


@message(5)
class AskWritable(Message):
    """Share slots with me so that I can map them writable. Said once at most, behind ``Hello`` and before ``Open``.

    There is no answer: the mode of each descriptor says whether the configuration allows it
    (``writable_slots``). Nobody shall write; most devices read memory by themselves only if it is
    mapped writable.
    """


@message(6)
class SlotsGone(Message):
    """Memory is given back: unmap it. ``slots`` are of a stream that is not served any more, and no handle will name them.

    Not sent to a trainer that leaves its lifeline unread until it takes no more; that one unmaps
    them with the session.
    """

    slots: list[int]


# --- trainer to daemon, over ZeroMQ ----------------------------------------------------------------------------------


@message(10)
class Open(Message):
    """Tie this ZeroMQ connection to the session that the lifeline began."""

    version: int
    secret: bytes


@message(11)
class Subscribe(Message):
    """Claim a stream as ``rank`` of ``world_size``, from (``epoch``, ``step``) up to before ``end_epoch`` (None: for ever).

    ``step`` counts batches of the whole stream, not of one rank: ranks that stop together name the
    same step. ``window`` is how many positions ahead of the trainer shall be ready; 0 means the
    stream's own setting. ``fingerprint`` is what the trainer's saved state says the stream was, or
    None. ``is_spectator``: it only wants a look, so trainers in lockstep do not wait for it, and of
    a live stream it gets one batch and uses nothing up.
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


@message(12)
class Pull(Message):
    """Where the trainer is.

    ``consumed`` positions were handed to the user's loop so far; ``waiting``: it stands still for
    the next one. ``released``: (sequence, generation) of leases given back. ``wait_us``:
    microseconds spent waiting so far, in total.
    """

    subscription: int
    consumed: int
    waiting: bool
    wait_us: int
    released: list[tuple[int, int]]


@message(13)
class Unsubscribe(Message):
    """Give up a subscription.

    Leases of positions before ``consumed`` stay until they are released or the lifeline ends. Those
    from ``consumed`` on end with it: the trainer never looked at them, and throws away their
    handles.
    """

    subscription: int
    consumed: int


@message(14)
class AskStatus(Message):
    """Ask for the daemon's status."""

    request: int


@message(15)
class AskBad(Message):
    """Which samples of ``stream`` are bad, and why?"""

    request: int
    stream: str


@message(16)
class Greet(Message):
    """The first word on a TCP connection, in place of ``Hello`` and ``Open``. ``host`` tells machines apart; see ``host_id``."""

    version: int
    name: str
    pid: int
    host: str


@message(17)
class Mismatched(Message):
    """The rows of ``sequence`` do not match their checksums. The trainer gives the subscription up and claims the stream anew."""

    subscription: int
    sequence: int
    generation: int


@message(18)
class Join(Message):
    """The only message on a further TCP connection of the session that has this ``secret``."""

    secret: bytes


@message(19)
class AskReload(Message):
    """Read your configuration again. Only root and the daemon's own user may ask for it; the answer comes when it is done."""

    request: int


@message(40)
class Produce(Message):
    """The session will push samples into ``stream``, by name."""

    request: int
    stream: str


@message(41)
class AskPlace(Message):
    """Ask for a place for a sample. A producer that has one gets it again; a waiting one keeps its turn."""

    request: int
    stream: int


@message(42)
class WithdrawAsk(Message):
    """I want no place just now. One that I have, or that is on its way to me, I shall not write into."""

    stream: int


@message(43)
class Pushed(Message):
    """A whole sample is in ``place``, which I shall not write into again."""

    request: int
    stream: int
    place: int


# --- daemon to trainer, over ZeroMQ ----------------------------------------------------------------------------------


@message(20)
class Opened(Message):
    """The connection may be used. ``daemon`` is the daemon's version, for people."""

    daemon: str


@message(21)
class Subscribed(Message):
    """The claim is admitted.

    ``layout`` is a ``SlotLayout``; ``rounds`` is how many batches each rank gets in a whole epoch,
    ``first_rounds`` how many in the epoch where this subscription starts, at (``epoch``, ``step``):
    where it was asked to, but in a live stream, of which that may be gone. ``classes`` are the
    names of the labels; empty where the source has none, or more than a message holds.
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


@message(22)
class Handle(Message):
    """The lease of one slot with (``epoch``, ``step``); rows ``first`` to ``first + count`` of it are this trainer's."""

    subscription: int
    sequence: int
    epoch: int
    step: int
    slot: int
    generation: int
    first: int
    count: int


@message(23)
class Refused(Message):
    """``request`` could not be done, or (``request`` 0) ``subscription`` cannot go on. ``error`` is an ``ErrorCode``."""

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
    """The answer to ``AskBad``: (sample index, path, reason, times seen), the first of ``total``."""

    request: int
    total: int
    samples: list[tuple[int, str, str, int]]


@message(26)
class Greeted(Message):
    """The TCP connection is a session. ``daemon`` is the daemon's version, for people.

    ``ipc_address``: where a trainer on the daemon's own host finds it; empty for all others.
    ``secret`` (16 bytes) lets further connections join.
    """

    daemon: str
    ipc_address: str
    secret: bytes


@message(27)
class Parcel(Message):
    """A batch sent as bytes: rows ``first`` to ``first + count`` of (``epoch``, ``step``), in pieces that follow as frames.

    It comes in ``parts``, each with a ``Parcel`` of its own and on a connection of its own; this is
    number ``part``, from 0.
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


@message(28)
class Joined(Message):
    """The connection is one of the session's now."""


@message(29)
class Reloaded(Message):
    """The answer to ``AskReload``. ``text`` says what has changed, or everything that is wrong with the configuration.

    ``exit_code`` is 0 where the new configuration is in force; else the old one is, and a command
    ends with this number.
    """

    request: int
    exit_code: int
    text: str


@message(50)
class Producing(Message):
    """The session is a producer of ``stream``, by number. ``capacity``: how many places its mailbox has.

    ``layout`` is a ``PlaceLayout``: what a sample consists of, and how it lies in its place.
    """

    request: int
    stream: int
    capacity: int
    layout: object


@message(51)
class PlaceLent(Message):
    """Only this producer may write into ``place``. None: none is free, so the sample is dropped and counted."""

    request: int
    place: int | None


@message(52)
class PushTaken(Message):
    """The sample is in the queue. ``next_place`` is for the next one, if there is plenty of room; else it has to be asked for."""

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
    Produce,
    AskPlace,
    WithdrawAsk,
    Pushed,
)
TO_TRAINER = Vocabulary(
    Opened, Subscribed, Handle, Refused, Status, BadSamples, Reloaded, Producing, PlaceLent, PushTaken
)
TO_DAEMON_REMOTE = Vocabulary(Greet, Join, Subscribe, Pull, Mismatched, Unsubscribe, AskStatus, AskBad)
TO_TRAINER_REMOTE = Vocabulary(Greeted, Joined, Subscribed, Parcel, Refused, Status, BadSamples)
