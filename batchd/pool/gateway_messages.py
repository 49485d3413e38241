"""Messages between the daemon and a gateway, over a private socket pair. Numbers are never reused.

    daemon                                        gateway
       |  <------- GatewayReady | GatewayFailed ---- |   it listens, or why it cannot
       |  -- PoolRules ----------------------------> |   at the start, and after each change
       |  -- ServeStream (+ fd: the index), ... ---> |   as to a worker (``worker.messages``)
       |  -- UseSlot (+ fd, read and write) -------> |   once per slot, before its first order
       |  <--------------------------------- LinkUp  |
       |  <-------------------- LinkOpened, ...      |
       |  <---------------------------- RemoteUp --- |   a remote worker takes orders
       |  -- RemoteFill ---------------------------> |
       |  <------------------------ RemoteFilled --- |   the rows are in the slot
       |  -- RemoteProve --------------------------> |   rows that a local worker has filled
       |  <---------------------- ReferenceTaken --- |   the slot is not read any more
       |  <------------------------ RemoteProved --- |   the remote worker's rows, compared
       |  -- RemoteWithdraw -----------------------> |
       |  <--------------------- RemoteWithdrawn --- |   the fence: no row of it will be written
       |  <----------------------- RemoteSettled --- |   the worker host has finished it, too
       |  <--------------- RemoteDown, LinkDown ---- |   after their orders were removed
       |  <----------------------- LinkLeaving ----- |   no further orders for this link
       |  -- CloseLink ----------------------------> |
       |  -- GatewayLinks -------------------------> |   to the first of several, after each change
       |  <------------- LinkTraffic, ChildLogged -- |   every second; a line for the log
       |                 end of file, either way: the other side is gone

A remote worker is named by its link and its number there. An order ends by exactly one of
``RemoteFilled``, ``RemoteProved``, ``RemoteWithdrawn``, ``RemoteDown`` and ``LinkDown``. The
``RemoteFill`` of one round of the daemon's loop travel ``Together``, and so do the ``RemoteFilled``
of one round of the gateway's.
"""

from batchd.core.work import Work
from batchd.pool.together import Together
from batchd.runtime.log_message import ChildLogged
from batchd.worker import messages as orders
from batchd_wire.codec import Message, Vocabulary, message


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


@message(80)
class LinkUp(Message):
    """A worker host has registered. ``key``: the name of its key, empty without keys."""

    link: int
    name: str
    host: str
    key: str
    pid: int
    workers: int
    machine: str
    batchd: str


@message(81)
class LinkOpened(Message):
    """The worker host of ``link`` takes orders for ``stream``; its rows are not yet compared."""

    link: int
    stream: int


@message(82)
class LinkRefuses(Message):
    """The worker host of ``link`` cannot fill ``stream``, for ``reason``."""

    link: int
    stream: int
    reason: str


@message(83)
class RemoteUp(Message):
    """A remote worker takes orders."""

    link: int
    worker: int
    decoders: str


@message(84)
class RemoteDown(Message):
    """A remote worker is gone; its orders are out of the gateway's table."""

    link: int
    worker: int
    how: str


@message(85)
class LinkDown(Message):
    """A link has ended with all its workers; no row of it will be written. See ``RemoteDown``."""

    link: int
    reason: str


@message(98)
class LinkLeaving(Message):
    """The worker host of ``link`` ends soon: it fills its orders, and waits for ``CloseLink``."""

    link: int


@message(86)
class RemoteFill(Message):
    """Have a remote worker fill rows into ``slot``. See ``worker.messages.Chunk``.

    ``bucket``: the number of the batch's layout.
    """

    link: int
    worker: int
    order: int
    stream: int
    slot: int
    epoch: int
    step: int
    runs: list[tuple[int, int]]
    bucket: int = 0


@message(87)
class RemoteFilled(Message):
    """The rows of ``order`` are in the slot. See ``worker.messages.ChunksFilled``."""

    link: int
    worker: int
    order: int
    work: Work
    bad: list[tuple[int, str, str]]
    hopeless: str


@message(88)
class RemoteProve(Message):
    """Have a remote worker fill rows again that a local worker filled in ``slot``; compare them."""

    link: int
    worker: int
    order: int
    stream: int
    slot: int
    epoch: int
    step: int
    runs: list[tuple[int, int]]
    bucket: int = 0


@message(89)
class ReferenceTaken(Message):
    """The gateway has copied the rows of a ``RemoteProve``: the slot may be used again."""

    link: int
    worker: int
    order: int


@message(90)
class RemoteProved(Message):
    """A ``RemoteProve`` is over. ``difference`` is empty, or says what differs, for people.

    ``bad_rows``: rows that the worker host could not fill. ``is_hopeless``: it cannot fill any row
    of the stream. ``last_bad``: the last of these rows' samples, and why it is bad there.
    """

    link: int
    worker: int
    order: int
    difference: str
    bad_rows: int
    is_hopeless: bool
    last_bad: str = ""


@message(91)
class RemoteWithdraw(Message):
    """Write no row of ``order``. Answered by ``RemoteWithdrawn`` unless the order is over."""

    link: int
    worker: int
    order: int


@message(92)
class RemoteWithdrawn(Message):
    """No row of ``order`` will be written: others may fill them."""

    link: int
    worker: int
    order: int


@message(93)
class RemoteSettled(Message):
    """The worker host has finished an order that was withdrawn; late rows were dropped."""

    link: int
    worker: int
    order: int


@message(94)
class CloseLink(Message):
    """End a link. ``is_final``: the worker host need not register again."""

    link: int
    reason: str
    is_final: bool


@message(95)
class LinkTraffic(Message):
    """The traffic of a link so far: bytes of rows, and rows that arrived after a withdrawal."""

    link: int
    bytes: int
    late_rows: int


TO_GATEWAY = Vocabulary(
    PoolRules,
    orders.ServeStream,
    orders.ForgetStream,
    orders.Quarantine,
    orders.UseStorage,
    orders.UseSlot,
    orders.ForgetSlots,
    RemoteFill,
    RemoteProve,
    RemoteWithdraw,
    CloseLink,
    GatewayLinks,
    Together,
)
TO_DAEMON_FROM_GATEWAY = Vocabulary(
    GatewayReady,
    GatewayFailed,
    LinkUp,
    LinkOpened,
    LinkRefuses,
    RemoteUp,
    RemoteDown,
    LinkDown,
    LinkLeaving,
    RemoteFilled,
    ReferenceTaken,
    RemoteProved,
    RemoteWithdrawn,
    RemoteSettled,
    LinkTraffic,
    ChildLogged,
    Together,
)
