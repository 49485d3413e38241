r"""Worker hosts over TCP: which are admitted, and their sessions (links). GATEWAY process.

    connection --Register--> Admitted: a link --> messages that name it --> its end
         ^                 \-> Rejected, Moved       |
         +------- LinkClosed, for other links -------+

A link is one connection. It ends when the connection ends, when its key is revoked, or when the
daemon closes it. It also ends after a message that no correct worker host sends; then the gateway
refuses the host for a while. Link numbers count up from a random number of 62 bits, so a restarted
gateway, or another one of the same daemon, never repeats a number, whatever the clock does.

Invariant: the gateway acts on a message only if it names the link of the connection that sent it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from secrets import randbits
from time import monotonic
from typing import NamedTuple, Protocol

import structlog
import zmq

from batchd.core.events import LinkClosed
from batchd.core.work import HOST_WORKERS_MAX
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool import messages
from batchd.pool.messages import Outbox, PoolRules
from batchd.runtime import failpoints
from batchd.runtime.keys import AcceptedKey, RoleKeys
from batchd.runtime.limits import PENDING_MIN, HandshakeRate, peer_network, peer_site, printable
from batchd.runtime.poller import Poller
from batchd.runtime.tcp.connection_guard import GuardLimits
from batchd.runtime.tcp.connections import Connection, host_of
from batchd.runtime.tcp.front import TcpFront
from batchd.runtime.tcp.router import RouterLimits
from batchd_wire.channel import DATAGRAM_BYTES_MAX
from batchd_wire.codec import MalformedMessage, Message
from batchd_wire.codes import ErrorCode
from batchd_wire.tcp import CURVE_BYTES
from batchd_wire.wording import counted

UNREAD_MAX = 4 * HOST_WORKERS_MAX * messages.ORDERS_MAX
"""Messages that a worker host may leave unread: orders for all workers, and withdrawals."""
HOSTS = RouterLimits(messages.ROW_FRAME_BYTES + CURVE_BYTES, UNREAD_MAX)
LINK_NUMBER_BITS = 62
MESSAGES_AT_ONCE = 16
BYTES_AT_ONCE = 32 << 20
"""Read between two looks at the daemon's messages: some 10 ms."""
REASON_CHARACTERS_MAX = 500
CONNECTION_ENDED = "its connection ended"
HERE = 0
"""The number of the gateway that chooses."""
ARRIVAL_S = 5.0
"""How long a worker host counts as on its way."""

_log = structlog.get_logger()

Frames = list[memoryview]


@dataclass(slots=True, eq=False)
class Link:
    """One worker host, from its ``Register`` to the end of its connection.

    ``served``: streams that were announced to it; ``opened``: whether it could open each. ``seen``:
    all its workers so far. ``asked``: index parts that it requested and that are not sent yet.
    """

    number: int
    connection: Connection
    address: str
    key: AcceptedKey | None
    registered: messages.Register
    served: set[int] = field(default_factory=set)
    opened: dict[int, bool] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    asked: deque[tuple[str, int]] = field(default_factory=deque)
    parts_ahead: int = 0
    is_leaving: bool = False
    bytes: int = 0
    late_rows: int = 0
    traffic_told: tuple[int, int] = (0, 0)
    ticks_adrift: int = 0
    begun_s: float = field(default_factory=monotonic)

    def may_fill(self, stream: str) -> bool:
        """True if the key of the worker host permits this stream."""
        return self.key is None or self.key.streams is None or stream in self.key.streams


class LinkTable:
    """All links. The dictionaries change only by ``add`` and ``remove``."""

    def __init__(self) -> None:
        self.by_number: dict[int, Link] = {}
        self.by_routing: dict[bytes, Link] = {}
        self.by_descriptor: dict[int, Link] = {}

    def add(self, link: Link) -> None:
        """Add a new link. Paired with ``remove``."""
        self.by_number[link.number] = link
        self.by_routing[link.connection.routing] = self.by_descriptor[link.connection.descriptor] = link

    def remove(self, link: Link) -> bool:
        """Remove a link; false if it was removed before."""
        if self.by_number.pop(link.number, None) is None:
            return False
        del self.by_routing[link.connection.routing]
        del self.by_descriptor[link.connection.descriptor]
        return True

    def limit_reached(self, key: AcceptedKey | None, address: str, rules: PoolRules) -> str:
        """Why the limits admit no further link of this key (without keys: of this host); or ""."""
        if len(self.by_number) >= rules.links_max:
            most = f"the most that there may be{_of_several(rules)}"
            return f"{counted(rules.links_max, 'worker host')} are connected already, {most}"
        if key is not None:
            owner = f"the key {key.name!r}"
            number = sum(one.key is not None and one.key.public == key.public for one in self.by_number.values())
        else:
            owner = peer_network(address)
            number = sum(peer_network(one.address) == owner for one in self.by_number.values())
        if number < rules.links_per_key:
            return ""
        most = f"there may be {rules.links_per_key} of one key{_of_several(rules)}"
        return f"{owner} has {counted(number, 'worker host')} already, and {most}"


def _of_several(rules: PoolRules) -> str:
    """Text that a limit holds for each of several gateways; "" if there is only one."""
    return f" at each of {rules.gateways} gateways" if rules.gateways > 1 else ""


def mismatch(registered: messages.Register) -> str:
    """Why a worker host with this program cannot fill rows here, with both sides' values; or ""."""
    if registered.version != messages.LINK_VERSION:
        return (
            f"the gateway speaks version {messages.LINK_VERSION} of the messages for worker hosts, and this worker host "
            f"({printable(registered.batchd)}) version {registered.version}: install the same batchd on both"
        )
    if registered.content_version != CONTENT_VERSION:
        return (
            f"the daemon makes pixels of version {CONTENT_VERSION}, and this worker host "
            f"({printable(registered.batchd)}) of version {registered.content_version}: install the same batchd on both"
        )
    return ""


class _Received(NamedTuple):
    """A message that was read. ``error``: why it cannot be decoded. ``surplus``: dropped frames."""

    head: zmq.Frame
    message: Message | None
    error: str
    rows: Frames
    surplus: int
    wire_bytes: int


class LinkEvents(Protocol):
    """The calls of ``WorkerHosts``."""

    def begun(self, link: Link) -> None:
        """A new link; nothing was sent over it yet."""

    def admitted(self, link: Link) -> None:
        """``Admitted`` was sent to the worker host."""

    def frames_due(self, link: Link, message: Message) -> int:
        """Most frames that may come with a message."""

    def heard(self, link: Link, message: Message, rows: Frames) -> None:
        """A message that names the link, with at most ``frames_due`` frames."""

    def ended(self, link: Link, closed: LinkClosed) -> None:
        """A link has ended."""


class WorkerHosts(TcpFront):
    """Owns the address for worker hosts."""

    def __init__(self, poller: Poller, keys: RoleKeys | None, loop: LinkEvents) -> None:
        self.links = LinkTable()
        super().__init__(poller, keys, HOSTS, self.links.by_descriptor, GuardLimits(PENDING_MIN))
        self.rules: PoolRules | None = None
        """None until the daemon has sent them; worker hosts cannot register before that."""
        self.placement = GatewayChoice()
        self._loop = loop
        self._fills: dict[int, Outbox] = {}
        """Orders of this round of the loop, by link."""
        self._rate = HandshakeRate()
        self._numbers = count(randbits(LINK_NUMBER_BITS))

    def tick(self) -> None:
        """Half a second has passed: end the links of revoked keys and of lost connections."""
        self.guard.tick()
        for link in list(self.links.by_number.values()):
            link.ticks_adrift = 0 if self._is_there(link.connection) else link.ticks_adrift + 1
            if link.ticks_adrift > 1:
                self.end(link, CONNECTION_ENDED)
            elif not self._is_valid(link.key):
                self.end(link, "its key has been revoked", is_final=True)

    # --- sending ----------------------------------------------------------------------------------

    def fill(self, link: Link, message: messages.FillRows) -> None:
        """Send an order, together with the others of this round for the same worker host."""
        if link.number not in self._fills:
            self._fills[link.number] = Outbox(partial(self._send, link))
        self._fills[link.number].add(message)

    def flush(self) -> None:
        """Send the orders of this round."""
        while self._fills:
            _link, fills = self._fills.popitem()
            fills.flush()
            failpoints.passing("gateway.order.sent")

    def send(self, link: Link, message: Message, *frames: memoryview) -> None:
        """Send to a worker host without waiting, after its orders of this round so far."""
        fills = self._fills.pop(link.number, None)
        if fills is not None:
            fills.flush()
        self._send(link, message.encode(), *frames)

    def _send(self, link: Link, data: bytes, *frames: memoryview) -> None:
        """Send without waiting; end the link of a worker host that does not read or is gone."""
        if link.number not in self.links.by_number:
            return
        try:
            self.router.send_multipart([link.connection.routing, data, *frames], zmq.NOBLOCK, copy=not frames)
        except zmq.Again:
            self.end(link, f"it left {UNREAD_MAX} messages unread")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.end(link, CONNECTION_ENDED)

    def end(self, link: Link, reason: str, *, is_final: bool = False) -> None:
        """End a link, and say why to the worker host.

        Its connection may still be alive: a ``Register`` of a dead connection that is read late has
        the same descriptor. Then the worker host registers again.
        """
        if self.links.remove(link):
            closed = LinkClosed(link.number, reason, is_final)
            self._reply_without_session(link.connection.routing, closed.encode())
            self.guard.close_soon(link.connection.descriptor)
            self._loop.ended(link, closed)

    def cut_off(self, link: Link, reason: str) -> None:
        """End the link of a worker host that breaks the protocol; keep its address out."""
        self.guard.ban(peer_network(link.address))
        self.end(link, reason)

    def expect(self, link: Link, due_bytes: int) -> None:
        """Permit a worker host to send as many bytes as were ordered from it."""
        self.guard.expect(link.connection.descriptor, due_bytes)

    # --- receiving --------------------------------------------------------------------------------

    def _read(self, is_over: Callable[[], bool]) -> bool:
        """Read a few messages, or a single long one; true if there may be more."""
        read_bytes = 0
        for _ in range(MESSAGES_AT_ONCE):
            try:
                routing = self.router.recv(zmq.NOBLOCK, copy=False).bytes
            except zmq.Again:
                return False
            received = self._receive(self.links.by_routing.get(routing))
            self._take(routing, received)
            read_bytes += received.wire_bytes
            if read_bytes >= BYTES_AT_ONCE or is_over():
                break
        return True

    def _receive(self, link: Link | None) -> _Received:
        """Read the frames after a routing id; ``link``: the link with this id, if there is one.

        Frames beyond those that the message can have are dropped: a million tiny frames would take
        much memory as objects.
        """
        head = last = self.router.recv(copy=False)
        message, error = None, ""
        try:
            if len(head.buffer) > DATAGRAM_BYTES_MAX:  # most of it is passed on to the daemon
                raise MalformedMessage(f"a message of {len(head.buffer)} bytes; {DATAGRAM_BYTES_MAX} are the most")
            message = messages.TO_GATEWAY_FROM_HOST.decode(head.buffer)
        except MalformedMessage as malformed:
            error = str(malformed)
        frames_max = self._loop.frames_due(link, message) if link is not None and message is not None else 0
        rows: Frames = []
        received_bytes, surplus = self._wire_bytes(head), 0
        while last.more:
            last = self.router.recv(copy=False)
            received_bytes += self._wire_bytes(last)
            if len(rows) < frames_max:
                rows.append(last.buffer)
            else:
                surplus += 1
        return _Received(head, message, error, rows, surplus, received_bytes)

    def _take(self, routing: bytes, received: _Received) -> None:
        """Act upon a message."""
        descriptor = self._descriptor_of(received.head, received.wire_bytes, 1 + received.surplus)
        if descriptor is None:
            return
        link, message = self.links.by_routing.get(routing), received.message
        if link is not None and link.connection.descriptor != descriptor:
            # another connection uses the same routing id: the first one is gone
            self.end(link, CONNECTION_ENDED)
            link = None
        if link is None:
            self._handle_unregistered(routing, received.head, message, received.error)
        elif message is None:
            self.cut_off(link, received.error)
        elif isinstance(message, messages.Register):
            self.cut_off(link, "it registered twice over one connection")
        elif _named(message) != link.number:
            self._send_link_closed(routing, _named(message))
        elif received.surplus:
            number = len(received.rows) + received.surplus
            self.cut_off(link, f"{number} frames came with {type(message).__name__}, {received.surplus} too many")
        else:
            self._loop.heard(link, message, received.rows)

    def _handle_unregistered(self, routing: bytes, head: zmq.Frame, message: Message | None, error: str) -> None:
        """Act upon a message over a connection without a link."""
        if message is None:
            self._reject(routing, head, ErrorCode.MALFORMED_MESSAGE, error)
        elif isinstance(message, messages.Register):
            self._register(routing, head, message)
        else:
            self._send_link_closed(routing, _named(message))

    def _send_link_closed(self, routing: bytes, number: int) -> None:
        """Tell a worker host that its link has ended: the gateway took its connection for dead."""
        text = "this link ended when its connection was lost; register again"
        self._reply_without_session(routing, LinkClosed(number, text, is_final=False).encode())

    def _register(self, routing: bytes, head: zmq.Frame, message: messages.Register) -> None:
        assert self.rules is not None, "nothing is read before"
        address = host_of(head)
        network = peer_network(address)
        key = self._key_of(head)
        workers = f"a worker host has 1 to {HOST_WORKERS_MAX} workers, not {message.workers}; lower --workers"
        if self._keys is None and not self._rate.admit(network, monotonic()):
            self._reject(routing, head, ErrorCode.TOO_OFTEN, self._rate.complaint(network))
        elif self.guard.is_banned(network):
            self._reject(routing, head, ErrorCode.TOO_OFTEN, f"{network} was disconnected recently; try again later")
        elif self._keys is not None and key is None:
            self._reject(routing, head, ErrorCode.KEY_REFUSED, "the key has been revoked", is_final=True)
        elif text := mismatch(message):
            self._reject(routing, head, ErrorCode.UNSUPPORTED_VERSION, text, is_final=True)
        elif not 0 < message.workers <= HOST_WORKERS_MAX:
            self._reject(routing, head, ErrorCode.NOT_ALLOWED, workers, is_final=True)
        else:
            limit_reached = self.links.limit_reached(key, address, self.rules)
            here = None if limit_reached else len(self.links.by_number)
            gateway = self.placement.choose(here, message.not_at, monotonic())
            if gateway != HERE:
                self._reply_without_session(routing, messages.Moved(gateway).encode())
            elif limit_reached:
                self._reject(routing, head, ErrorCode.NOT_ALLOWED, limit_reached)
            else:
                self._admit(routing, head, message, key)

    def _admit(self, routing: bytes, head: zmq.Frame, message: messages.Register, key: AcceptedKey | None) -> None:
        assert self.rules is not None, "nothing is read before"
        self._end_former(head)
        link = Link(next(self._numbers), self._connection(routing, head), host_of(head), key, message)
        self.links.add(link)
        self._loop.begun(link)
        self.send(link, messages.Admitted(link.number, self.rules.sample_timeout_s))
        self._loop.admitted(link)

    def _reject(self, routing: bytes, head: zmq.Frame, code: ErrorCode, text: str, *, is_final: bool = False) -> None:
        """Refuse a worker host, and log it at most once a minute."""
        address = host_of(head)
        self._reply_without_session(routing, messages.Rejected(code, text, is_final).encode())
        if self._once_per_minute.allows("worker hosts refused", peer_site(address)):
            _log.warning("worker host refused", error=int(code), reason=text, host=address)

    def _ended(self, descriptor: int) -> None:
        """A connection has ended."""
        link = self.links.by_descriptor.get(descriptor)
        if link is not None:
            self.end(link, CONNECTION_ENDED)


def _named(message: Message) -> int:
    """The number of the link that a message names; every message but ``Register`` names one."""
    link: int = getattr(message, "link")  # noqa: B009  no common base has it
    return link


class GatewayChoice:
    """Chooses a gateway for each worker host. Of the first gateway; pure.

        Register at the first one -> choose: this one, or another -> Moved -> Register there

    The daemon reports how many links each gateway has, but a new link only a moment after its host
    was sent there, and a hundred hosts may register in that moment. So hosts that were sent count,
    too, until the daemon has reported as many new links, or for ``ARRIVAL_S``. A single gateway
    gets no numbers, so it always chooses itself.

    Invariant: no host is sent to a gateway that rejected it, or that is full as far as the daemon
    knows.
    """

    def __init__(self) -> None:
        self._links: Sequence[int | None] = ()
        self._moved: defaultdict[int, deque[float]] = defaultdict(deque)
        """By gateway: when worker hosts were sent there that have not registered yet."""

    def tell(self, links: Sequence[int | None]) -> None:
        """Take note of how many links each gateway has; None for one that can admit none now."""
        before = dict(enumerate(self._links))
        for gateway, number in enumerate(links):
            moved = self._moved[gateway]
            for _ in range(min(len(moved), (number or 0) - (before.get(gateway) or 0))):
                moved.popleft()
        self._links = links

    def choose(self, here: int | None, not_at: Container[int], now: float) -> int:
        """Return the gateway with the fewest links, and count the worker host as sent there.

        ``here``: the links of this gateway, None if it is full. ``not_at``: gateways that rejected
        this host. If no gateway is left, it is this one.
        """
        expected = {} if here is None else {HERE: here}
        for gateway, number in enumerate(self._links):
            if gateway != HERE and number is not None and gateway not in not_at:
                expected[gateway] = number + self._on_their_way(gateway, now)
        chosen = min(expected, key=lambda gateway: (expected[gateway], gateway), default=HERE)
        if chosen != HERE:
            self._moved[chosen].append(now)
        return chosen

    def _on_their_way(self, gateway: int, now: float) -> int:
        moved = self._moved[gateway]
        while moved and now - moved[0] > ARRIVAL_S:
            moved.popleft()
        return len(moved)
