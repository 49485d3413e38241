"""The pool's messages: worker host, gateway, daemon. Numbers are never reused.

Over ZeroMQ:

    worker host                                   gateway
       |  -- Register ------------------------------> |
       |  <----------- Admitted | Moved | Rejected -- |   the link begins, or where, or why not
       |  <------------------------------ HostServe - |   each stream that may be filled elsewhere
       |  -- AskIndex ------------------------------> |   ``INDEX_PARTS_AHEAD`` of each at a time
       |  <------------------ IndexPart + 1 frame --- |   unless the host has the index, by digest
       |  -- StreamOpened | StreamRefused ----------> |
       |  -- WorkerUp ------------------------------> |   a worker takes orders
       |  <------------------------------ FillRows -- |   ``ORDERS_MAX`` at a worker; those of
       |                                              |   one round of the gateway ``Together``
       |  -- OrderFilled + frames: the rows --------> |   or WorkerDown, if the worker died
       |  <------------------------- WithdrawOrder -- |   the rows of an order are not needed
       |  -- OrderFilled, without frames -----------> |   if it was withdrawn before it was begun
       |  <- HostQuarantine, HostForget ------------- |
       |  <- HostStorage, HostLimits ---------------- |
       |  -- HostLeaves ----------------------------> |   no further orders; it fills those it has
       |  <--------------------------- LinkClosed --- |   the end of the link, and the reason

A daemon may have several gateways. A worker host always registers with the first one, which may
send it to another (``Moved``). If it is not admitted there, it registers with the first one again,
and names the other one (``not_at``).

Every message names its link, so a side whose link the other one has ended learns it. A daemon never
uses a ``link`` number twice. The worker host numbers its workers.

The rows of an order travel as frames behind ``OrderFilled``, cut as ``batchd_wire.tcp.pieces`` cuts
rows of a slot: field after field, each in pieces of ``ROW_FRAME_BYTES``, as if the rows followed
each other.
ZeroMQ delivers a message when all of its frames are there, so each order is reported by itself:
otherwise rows would wait for those of another order.

Over a private socket pair:

    gateway                                       daemon
       |  -- GatewayReady | GatewayFailed ----------> |   it listens, or why it cannot
       |  <------------------------------ PoolRules - |   at the start, and after each change
       |  <--- ServeStream (+ fd: the index), ... --- |   as to a worker (``worker.messages``)
       |  <--------- UseSlot (+ fd, read and write) - |   once per slot, before its first order
       |  <--------------------------- GatewayLinks - |   to the first of several, after each change
       |  -- LinkBegun -----------------------------> |   from a ``Register``
       |  -- StreamOpened, StreamRefused, ----------> |   the worker host's own, as they are; rows
       |     WorkerUp, WorkerDown, OrderFilled,       |   are in the slot before ``OrderFilled``
       |     HostLeaves                               |
       |  <------------------------------ SlotOrder - |   a ``FillRows``, and the slot for it
       |  -- ReferenceCopied -----------------------> |   the rows to compare are copied
       |  -- OrderProved ---------------------------> |   instead of ``OrderFilled``: compared
       |  <-------------------------- WithdrawOrder - |
       |  -- OrderWithdrawn ------------------------> |   the fence: no row of it will be written
       |  <----------------------------- LinkClosed - |   the daemon has a link ended
       |  -- LinkClosed ----------------------------> |   it has ended, and its orders were removed
       |  -- LinkTraffic, ChildLogged --------------> |   every second; a line for the log
       |                 end of file, either way: the other side is gone

The core takes what worker hosts report as events (``core.events``). An order ends by exactly one of
``OrderFilled``, ``OrderProved``, ``OrderWithdrawn``, ``WorkerDown`` and ``LinkClosed``; after
``OrderWithdrawn``, ``OrderFilled`` says that the worker host has finished it, too. The orders of
one round of the daemon's loop travel ``Together``, and so do the ``OrderFilled`` of one round of
the gateway's.
"""

from collections.abc import Callable
from dataclasses import field

from batchd.core.actions import WithdrawOrder
from batchd.core.events import (
    HostLeaves,
    LinkBegun,
    LinkClosed,
    OrderFilled,
    OrderProved,
    OrderWithdrawn,
    ReferenceCopied,
    StreamOpened,
    StreamRefused,
    WorkerDown,
    WorkerUp,
)
from batchd.runtime.child_log import ChildLogged
from batchd.worker import messages as orders
from batchd_wire.channel import DATAGRAM_BYTES_MAX
from batchd_wire.codec import Message, Vocabulary, message

LINK_VERSION = 4
"""Version of these messages; both sides must have the same one."""
ORDERS_MAX = 4
"""Orders in flight at one remote worker."""
ROW_FRAME_BYTES = (1 << 20) + 512
"""Longest frame of rows.

Rows begin at a page. With frames of whole pages, the kernel would often copy to addresses that are
a few bytes behind a page, and that takes some AMD processors (Zen 4) five times as long.
"""
INDEX_PART_BYTES = 1 << 20
INDEX_PARTS_AHEAD = 4
TOGETHER_MAX = 64
"""Messages in one ``Together``."""
ITEM_BYTES = 5
"""Most bytes that ``Together`` adds to each of its messages,"""
HEAD_BYTES = 8
"""and to all of them."""


@message(61)
class Register(Message):
    """First message of a worker host.

    ``version`` is ``LINK_VERSION``, ``batchd`` the version of the program, ``content_version`` that
    of the pixels (``data.pipeline.options``). ``name`` and ``host`` are for people, ``machine`` is
    the processor's architecture. ``not_at``: gateways that it was sent to and that did not admit
    it.
    """

    version: int
    batchd: str
    content_version: int
    name: str
    host: str
    pid: int
    workers: int
    machine: str
    not_at: list[int] = field(default_factory=list)


@message(62)
class Admitted(Message):
    """The link begins. The worker host kills a worker whose sample takes ``sample_timeout_s``."""

    link: int
    sample_timeout_s: float


@message(63)
class Rejected(Message):
    """There is no link. ``error`` is an ``ErrorCode``; ``is_final``: a retry cannot help."""

    error: int
    text: str
    is_final: bool


@message(100)
class Moved(Message):
    """There is no link here. Register with ``gateway``: add this number to the address's port."""

    gateway: int


@message(64)
class HostServe(Message):
    """A stream for which the worker host may get orders.

    ``serve`` is a whole encoded ``worker.messages.ServeStream``. Its index has ``index_bytes``;
    ``digest`` is the SHA-256 of them, in 64 hexadecimal digits. ``quarantined``: samples to treat
    as bad without decoding them.
    """

    link: int
    serve: bytes
    digest: str
    index_bytes: int
    quarantined: list[int]


@message(65)
class AskIndex(Message):
    """Request ``INDEX_PART_BYTES`` of an index from byte ``offset``; the last part is shorter."""

    link: int
    digest: str
    offset: int


@message(66)
class IndexPart(Message):
    """A part of an index. Travels with one frame: its bytes."""

    link: int
    digest: str
    offset: int


@message(71)
class FillRows(Message):
    """Fill the rows of ``runs`` (``core.rows``) of position (``epoch``, ``step``) of ``stream``.

    Rows that are compared with a local worker's are ordered in the same way. ``bucket``: the number
    of the batch's layout.
    """

    link: int
    worker: int
    order: int
    stream: int
    epoch: int
    step: int
    runs: list[tuple[int, int]]
    bucket: int = 0


@message(74)
class HostQuarantine(Message):
    """These samples of ``stream`` killed workers: treat them as bad, without decoding them."""

    link: int
    stream: int
    samples: list[int]


@message(75)
class HostForget(Message):
    """No further order names ``stream``."""

    link: int
    stream: int


@message(76)
class HostStorage(Message):
    """Use these limits for file servers, in every stream; see ``worker.messages.UseStorage``."""

    link: int
    storage: tuple[int, int, int]


@message(99)
class HostLimits(Message):
    """Use this time limit from now on; see ``Admitted``."""

    link: int
    sample_timeout_s: float


@message(96)
class GatewayReady(Message):
    """The gateway listens on ``port``."""

    port: int


@message(97)
class GatewayFailed(Message):
    """The gateway cannot listen, for ``reason``, and ends."""

    reason: str


@message(79)
class PoolRules(Message):
    """The configuration for a gateway; ``links_max`` and ``links_per_key`` limit its links.

    Of several gateways (``gateways``), each gets its part of the limits.
    """

    sample_timeout_s: float
    links_max: int
    links_per_key: int
    gateways: int = 1


@message(101)
class GatewayLinks(Message):
    """The number of links of each gateway, by its number; None for a full or absent one."""

    links: list[int | None]


@message(86)
class SlotOrder(Message):
    """Have ``fill``, an encoded ``FillRows``, carried out for ``slot``.

    ``is_proof``: the slot has these rows of a local worker, and they are compared. A worker host
    must not be able to tell such an order, so it gets ``fill`` alone.
    """

    fill: bytes
    slot: int
    is_proof: bool


@message(95)
class LinkTraffic(Message):
    """The traffic of a link so far: bytes of rows, and rows that arrived after a withdrawal."""

    link: int
    bytes: int
    late_rows: int


@message(104)
class Together(Message):
    """Encoded messages, of the vocabulary to which this one belongs."""

    messages: list[bytes]


TO_GATEWAY_FROM_HOST = Vocabulary(
    Register, AskIndex, StreamOpened, StreamRefused, WorkerUp, WorkerDown, OrderFilled, HostLeaves
)
TO_HOST = Vocabulary(
    Admitted,
    Moved,
    Rejected,
    HostServe,
    IndexPart,
    FillRows,
    WithdrawOrder,
    HostQuarantine,
    HostForget,
    HostStorage,
    HostLimits,
    LinkClosed,
    Together,
)
FILL = Vocabulary(FillRows)
TO_GATEWAY = Vocabulary(
    PoolRules,
    orders.ServeStream,
    orders.ForgetStream,
    orders.Quarantine,
    orders.UseStorage,
    orders.UseSlot,
    orders.ForgetSlots,
    SlotOrder,
    WithdrawOrder,
    LinkClosed,
    GatewayLinks,
    Together,
)
TO_DAEMON_FROM_GATEWAY = Vocabulary(
    GatewayReady,
    GatewayFailed,
    LinkBegun,
    StreamOpened,
    StreamRefused,
    WorkerUp,
    WorkerDown,
    OrderFilled,
    OrderWithdrawn,
    ReferenceCopied,
    OrderProved,
    HostLeaves,
    LinkClosed,
    LinkTraffic,
    ChildLogged,
    Together,
)


def messages_in(received: Message, vocabulary: Vocabulary) -> list[Message]:
    """The messages in a ``Together``; any other message is the only one.

    Raises ``MalformedMessage``.
    """
    return [vocabulary.decode(one) for one in received.messages] if isinstance(received, Together) else [received]


class Outbox:
    """Messages that were not sent yet. ``send`` gets the encoded bytes of one message.

        add, add, ... -> flush: one ``Together``, or the message itself if it is the only one

    A loop adds the orders, or the results, of one round, and flushes at the end of the round.
    Before it sends any other message to the same side it flushes, too, so messages arrive in the
    order in which they were added or sent: a withdrawal never arrives before its order.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._unsent: list[bytes] = []
        self._bytes = HEAD_BYTES

    def add(self, message: Message) -> None:
        """Send a message with the next ``flush``, or earlier if there is no more room."""
        data = message.encode()
        if len(self._unsent) == TOGETHER_MAX or self._bytes + ITEM_BYTES + len(data) > DATAGRAM_BYTES_MAX:
            self.flush()
        self._unsent.append(data)
        self._bytes += ITEM_BYTES + len(data)

    def flush(self) -> None:
        """Send what was added."""
        unsent = self._unsent
        self.clear()
        if unsent:
            self._send(unsent[0] if len(unsent) == 1 else Together(unsent).encode())

    def clear(self) -> None:
        """Drop what was added: its receiver has ended."""
        self._unsent, self._bytes = [], HEAD_BYTES
