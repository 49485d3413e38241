"""Messages between a worker host and a gateway, over ZeroMQ. Numbers are never reused.

    worker host                                   gateway
       |  -- Register ------------------------------> |
       |  <----------- Admitted | Moved | Rejected -- |   the link begins, or where, or why not
       |  <------------------------------ HostServe - |   each stream that may be filled elsewhere
       |  -- AskIndex ------------------------------> |   ``INDEX_PARTS_AHEAD`` of each at a time
       |  <------------------ IndexPart + 1 frame --- |   unless the host has the index, by digest
       |  -- HostOpened | CannotOpen ---------------> |
       |  -- WorkerUp ------------------------------> |   a worker takes orders
       |  <------------------------------ HostFill -- |   ``ORDERS_MAX`` at a worker; those of
       |                                              |   one round of the gateway ``Together``
       |  -- HostFilled + frames: the rows ---------> |   or WorkerDown, if the worker died
       |  <-------------------------- HostWithdraw -- |   the rows of an order are not needed
       |  -- HostFilled, without frames ------------> |   if it was withdrawn before it was begun
       |  <- HostQuarantine, HostForget ------------- |
       |  <- HostStorage, HostLimits ---------------- |
       |  -- Leaving -------------------------------> |   no further orders; it fills those it has
       |  <--------------------------- LinkClosed --- |   the end of the link, and the reason

A daemon may have several gateways. A worker host always registers with the first one, which may
send it to another (``Moved``). If it is not admitted there, it registers with the first one again,
and names the other one (``not_at``).

Every message names its link, so a side whose link the other one has ended learns it. A daemon never
uses a ``link`` number twice. The worker host numbers its workers.

The rows of an order travel as frames behind ``HostFilled``, cut as ``batchd_wire.tcp.pieces`` cuts
rows of a slot: field after field, each in pieces of ``ROW_FRAME_BYTES``, as if the rows followed
each other.
ZeroMQ delivers a message when all of its frames are there, so each order is reported by itself:
otherwise rows would wait for those of another order.
"""

from dataclasses import field

from batchd.core.work import Work
from batchd.pool.together import Together
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
WORKERS_MAX = 1_024
"""Most workers of one worker host."""


@message(61)
class Register(Message):
    """First message of a worker host.

    ``version`` is ``LINK_VERSION``, ``batchd`` the version of the program, ``content_version`` that
    of the pixels (``data.pipeline.kinds``). ``name`` and ``host`` are for people, ``machine`` is
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


@message(67)
class HostOpened(Message):
    """The worker host takes orders for ``stream``."""

    link: int
    stream: int


@message(68)
class CannotOpen(Message):
    """The worker host cannot fill ``stream``, for ``reason``; other streams continue."""

    link: int
    stream: int
    reason: str


@message(69)
class WorkerUp(Message):
    """``worker`` takes orders. ``decoders``: names and versions, as ``worker.messages.Ready``."""

    link: int
    worker: int
    decoders: str


@message(70)
class WorkerDown(Message):
    """``worker`` is dead, with all its orders; ``how`` is for people: "signal 11 (SIGSEGV)"."""

    link: int
    worker: int
    how: str


@message(71)
class HostFill(Message):
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


@message(72)
class HostWithdraw(Message):
    """The rows of ``order`` are not needed any more. ``HostFilled`` still reports its end."""

    link: int
    worker: int
    order: int


@message(73)
class HostFilled(Message):
    """``order`` is over. Travels with its rows as frames; with none if it was withdrawn.

    ``work``, ``bad`` and ``hopeless`` are as in ``worker.messages.ChunksFilled``.
    """

    link: int
    worker: int
    order: int
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str


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


@message(77)
class Leaving(Message):
    """The worker host ends soon: it fills its orders, and then waits for ``LinkClosed``."""

    link: int


@message(78)
class LinkClosed(Message):
    """The link has ended, for ``reason``. ``is_final``: registering again cannot help."""

    link: int
    reason: str
    is_final: bool


TO_GATEWAY_FROM_HOST = Vocabulary(Register, AskIndex, HostOpened, CannotOpen, WorkerUp, WorkerDown, HostFilled, Leaving)
TO_HOST = Vocabulary(
    Admitted,
    Moved,
    Rejected,
    HostServe,
    IndexPart,
    HostFill,
    HostWithdraw,
    HostQuarantine,
    HostForget,
    HostStorage,
    HostLimits,
    LinkClosed,
    Together,
)
