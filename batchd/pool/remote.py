"""The workers of worker hosts, and the gateways through which they come. DAEMON process.

    gateway 0, 1, ... <- GatewayChild -> heard -> the same, for the loop's queue
                                      -> ended -> its links are closed

A gateway gets each stream and each slot once; an order goes to the gateway of its link. Remote
workers come and go by themselves, and their worker host watches them.

The first gateway gets the number of links of each, and sends worker hosts to the smallest. If
a gateway has ended, its hosts come to others; when it listens again, some of them are moved to it,
one with each tick.

Invariant: a remote worker that is reported gone writes nothing more: the gateway, which alone
writes its rows, has dropped its orders before, or has ended.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import structlog

from batchd.core import events as ev
from batchd.core.actions import EndLink, OrderChunk, ProveChunk, ReleaseLink, ReportServing, WithdrawOrder
from batchd.core.events import Event, LinkClosed
from batchd.core.fleet import REMOTE_NUMBERS, WorkerKind
from batchd.core.rows import runs_of
from batchd.core.state import DaemonState
from batchd.core.work import Work
from batchd.pool.gateway_child import END_TIMEOUT_S, GatewayChild
from batchd.pool.messages import ORDERS_MAX, FillRows, GatewayLinks, GatewayReady, LinkTraffic, PoolRules, SlotOrder
from batchd.pool.wanted import WantedCount
from batchd.runtime.limits import SESSION_LINES_PER_MINUTE, LinesPerMinute, printable
from batchd.runtime.poller import Poller
from batchd.runtime.slots import SlotPool
from batchd.stream.served import ServedStream
from batchd.worker.interface import Performers
from batchd.worker.messages import ForgetSlots, ForgetStream, Quarantine, UseSlot, UseStorage, quarantines
from batchd_wire.codec import Message
from batchd_wire.status import LinkStatistics, PoolStatistics

_log = structlog.get_logger()

REMOTE = WorkerKind(orders_max=ORDERS_MAX, start_timeout_s=60.0, note_delay_s=0.0, is_remote=True)
MOVE_DIFFERENCE = 2
"""Links that a gateway must have more than another, so that moving one of them helps."""
TIME_MAX_US = 3_600_000_000
BYTES_MAX = 1 << 40
SENT_AWAY_KEPT = 8
"""Worker hosts that were sent away, and that the status still names."""
WORDS_MAX = 1 << 17
"""Characters of what all worker hosts say, decoders and refusals each: a status is one message."""
NUMBERS_MAX = 64
PATH_CHARACTERS_MAX = 256
"""Limits of what a worker host may report of its work: no number of it is trusted."""


@dataclass(slots=True, eq=False)
class _Host:
    """A link: what is known of it beside the core's counts."""

    facts: ev.LinkBegun
    gateway: GatewayChild
    since_s: float
    decoders: str = ""
    is_leaving: bool = False
    refused: dict[int, str] = field(default_factory=dict)
    """By stream: why the host cannot fill it."""
    received_bytes: int = 0
    late_rows: int = 0


class RemoteWorkers:
    """Runs the gateways, one at each of ``endpoints``, and speaks with them.

    ``rules``: what they need of the configuration; the limits are those of all together.
    ``wanted`` counts how many workers should come. ``streams`` has those of later reloads, too;
    ``decoders`` says with which the workers of this host decode.
    """

    def __init__(  # noqa: PLR0913, PLR0917  its parts
        self,
        poller: Poller,
        enqueue: Callable[[Event], None],
        endpoints: Sequence[str],
        keys_dir: Path | None,
        rules: PoolRules,
        wanted: WantedCount,
        streams: Mapping[int, ServedStream],
        memory: SlotPool,
        decoders: Callable[[], str],
    ) -> None:
        self.kind = REMOTE
        self.performers: Performers = {
            ProveChunk: self.prove,
            WithdrawOrder: self.withdraw,
            ReportServing: self.report_serving,
            EndLink: self.send_away,
            ReleaseLink: self.release,
        }
        self._streams = streams
        self._memory = memory
        self._decoders = decoders
        self._enqueue = enqueue
        self._rules = rules
        self._address = endpoints[0]
        keys = "" if keys_dir is None else os.fspath(keys_dir)
        self.gateways = tuple(
            GatewayChild(number, poller, (endpoint, f"daemon.{_key(number)}", keys), self)
            for number, endpoint in enumerate(endpoints)
        )
        self.wanted = wanted
        self._hosts: dict[int, _Host] = {}
        self._moves_left = 0
        """How many worker hosts may be moved to a gateway that has begun to listen."""
        self.ended_links = 0
        self.last_end = ""
        """Why the last link ended."""
        self.last_left = False
        """The last worker host that has gone had said that it leaves."""
        self._ended_bytes = 0
        self._sent_away: deque[str] = deque(maxlen=SENT_AWAY_KEPT)
        self._lines_per_minute = LinesPerMinute(SESSION_LINES_PER_MINUTE)

    def start(self) -> None:
        """Start the gateways, and wait until all listen. Raises ``BatchdError`` if one cannot.

        The first one listens last, so it knows the others when worker hosts come.
        """
        for gateway in self.gateways:
            gateway.spawn()
        for gateway in reversed(self.gateways):
            gateway.wait_listening()

    @property
    def port(self) -> int:
        """The port of ``worker_address``."""
        return self.gateways[0].port

    def tick(self, state: DaemonState) -> None:
        """Start gateways that are due, end those that hang, and tell all of them what is new."""
        for gateway in self.gateways:
            gateway.tick()
        if self._moves_left:
            self._move_one()
        self.wanted.tick(state, {number: one.layout.row_bytes for number, one in self._streams.items()})
        self._use_timeout(state.fleet.sample_timeout_s)
        for gateway in self.gateways:
            if gateway.is_up:
                self._announce(gateway, state.numbers.values())

    def _use_timeout(self, sample_timeout_s: float) -> None:
        """Tell the gateways for how long a sample may take, if a reload has changed that."""
        if sample_timeout_s != self._rules.sample_timeout_s:
            self._rules = PoolRules.filled_from(self._rules, sample_timeout_s=sample_timeout_s)
            for gateway in self.gateways:
                gateway.send(self._rules_of(gateway))

    def _announce(self, gateway: GatewayChild, numbers: Iterable[int]) -> None:
        """Tell a gateway the streams that it does not know, so that worker hosts can open them."""
        for number in numbers:
            stream = self._streams[number]
            if not stream.spec.decodes_here and gateway.known.enter_stream(number):
                gateway.send(stream.message, stream.index_descriptor)
                for part in quarantines(number, stream.quarantined):
                    gateway.send(part)

    # --- streams and slots ------------------------------------------------------------------------

    def quarantine(self, stream: int, samples: Sequence[int]) -> None:
        """See ``Workers``."""
        for gateway in self.gateways:
            if stream in gateway.known.streams:
                gateway.send(Quarantine(stream, list(samples)))

    def forget_stream(self, stream: int) -> None:
        """See ``Workers``."""
        for gateway in self.gateways:
            if gateway.known.drop_stream(stream):
                gateway.send(ForgetStream(stream))

    def forget_slots(self, slots: Sequence[int]) -> None:
        """See ``Workers``."""
        for gateway in self.gateways:
            if known := gateway.known.drop_slots(slots):
                gateway.send(ForgetSlots(known))

    def use_storage(self, storage: tuple[int, int, int]) -> None:
        """See ``Workers``."""
        for gateway in self.gateways:
            gateway.send(UseStorage(storage))

    def _share_slot(self, gateway: GatewayChild, slot: int) -> None:
        if gateway.known.enter_slot(slot):
            gateway.send(UseSlot(slot, self._memory.slot_bytes(slot)), self._memory.writable(slot))

    # --- orders -----------------------------------------------------------------------------------

    def gateway_of(self, worker: int) -> GatewayChild | None:
        """The gateway of a remote worker; None if its link is gone, and LinkClosed in the queue."""
        host = self._hosts.get(worker // REMOTE_NUMBERS)
        return host.gateway if host is not None else None

    def fill(self, order: OrderChunk) -> None:
        """See ``Workers``."""
        gateway = self.gateway_of(order.worker)
        if gateway is not None:
            self._share_slot(gateway, order.slot)
            gateway.fill(self._slot_order(order, is_proof=False))

    def flush(self) -> None:
        """See ``Workers``. Each gateway gets one message."""
        for gateway in self.gateways:
            gateway.flush()

    def prove(self, action: ProveChunk) -> None:
        """Have a remote worker fill rows to be compared."""
        gateway = self.gateway_of(action.worker)
        if gateway is not None:
            self._share_slot(gateway, action.slot)
            gateway.send(self._slot_order(action, is_proof=True))

    def withdraw(self, action: WithdrawOrder) -> None:
        """Have nothing more written for an order."""
        host = self._hosts.get(action.link)
        if host is not None:
            host.gateway.withdraw(action)

    def report_serving(self, action: ReportServing) -> None:
        """Log that a worker host fills a stream from now on, or cannot."""
        host, stream = self._hosts.get(action.link), self._streams[action.stream].name
        if host is not None and action.refusal:
            self._warn("worker host cannot fill a stream", host.facts, stream=stream, reason=action.refusal)
        elif host is not None:
            self._tell("worker host fills a stream", host.facts, stream=stream)

    def send_away(self, action: EndLink) -> None:
        """End a link whose rows differ from those of local workers."""
        host, ours = self._hosts.get(action.link), self._decoders()
        if host is not None:
            theirs = f"it decodes with {host.decoders or 'what it does not name'}, the daemon's host with {ours}"
            both = f"both hosts decode with {ours}"
            self._send_away(host, f"{action.reason}; {both if host.decoders == ours else theirs}")

    def release(self, action: ReleaseLink) -> None:
        """End the link of a leaving worker host, which waits for that and then ends."""
        host = self._hosts.get(action.link)
        if host is not None:
            host.gateway.send(LinkClosed(action.link, "its orders are done", is_final=False))

    def _send_away(self, host: _Host, reason: str) -> None:
        self._warn("worker host sent away", host.facts, reason=reason)
        self._sent_away.append(f"{host.facts.name}: {reason}")
        host.gateway.send(LinkClosed(host.facts.link, reason, is_final=True))

    def kill(self, number: int, reason: str) -> None:
        """End the link of a worker that breaks the rules."""
        host = self._hosts.get(number // REMOTE_NUMBERS)
        if host is not None:
            self._send_away(host, reason)

    def close(self) -> None:
        """End the gateways, and with them all links."""
        with ExitStack() as stack:
            for child in [gateway.let_go() for gateway in self.gateways]:
                if child is not None:
                    stack.callback(child.end, END_TIMEOUT_S)

    def statistics(self, state: DaemonState, now: float) -> PoolStatistics:
        """All worker hosts, with the core's counts of their links."""
        hosts, links = [], state.links.by_number
        names = {number: name for name, number in state.numbers.items()}
        words_max = WORDS_MAX // max(1, len(self._hosts))
        for number, host in self._hosts.items():
            link = links.get(number)
            if link is None:
                continue
            phase = "leaving" if link.is_leaving else "serving" if link.serves else "opening"
            hosts.append(
                LinkStatistics(
                    link=number,
                    name=host.facts.name,
                    host=host.facts.host,
                    key=host.facts.key,
                    pid=host.facts.pid,
                    machine=host.facts.machine,
                    version=host.facts.batchd,
                    decoders=host.decoders[:words_max],
                    state="closing" if link.is_closed else "proving" if link.proven and phase == "opening" else phase,
                    since_s=now - host.since_s,
                    workers=len(link.workers),
                    orders=link.orders,
                    samples=link.samples,
                    busy_s=link.busy_us / 1e6,
                    received_bytes=host.received_bytes,
                    late_rows=host.late_rows,
                    withdrawn=link.withdrawn,
                    disagreements=link.disagreements,
                    streams=tuple(names[stream] for stream in sorted(link.serves) if stream in names),
                    refused=_cut(
                        [f"{names[one]}: {why}" for one, why in host.refused.items() if one in names], words_max
                    ),
                    gateway=host.gateway.number,
                )
            )
        address = f"{self._address.rpartition(':')[0]}:{self.port}"
        wanted = self.wanted.now
        return PoolStatistics(
            address=address,
            links=tuple(hosts),
            ended_links=self.ended_links,
            last_end=self.last_end,
            last_left=self.last_left,
            wanted=wanted.workers,
            cap=wanted.cap,
            capped_by=wanted.capped_by,
            interface=self.wanted.interface,
            interface_bytes_per_s=self.wanted.interface_bytes_per_s,
            sent_away=tuple(self._sent_away),
            received_bytes=self._ended_bytes + sum(host.received_bytes for host in self._hosts.values()),
            gateways=len(self.gateways),
            gateways_down=tuple(one.number for one in self.gateways if not one.listens),
        )

    # --- the gateways -----------------------------------------------------------------------------

    def _slot_order(self, order: OrderChunk | ProveChunk, *, is_proof: bool) -> SlotOrder:
        link, worker = divmod(order.worker, REMOTE_NUMBERS)
        bucket = self._streams[order.stream].spec.bucket_of(order.position)
        fill = FillRows(link, worker, order.order, order.stream, *order.position, runs_of(order.rows), bucket)
        return SlotOrder(fill.encode(), order.slot, is_proof)

    def _rules_of(self, gateway: GatewayChild) -> PoolRules:
        """The rules for a gateway: all together admit no more than the limits allow."""
        number, rules = len(self.gateways), self._rules
        links, of_key = (
            (limit + number - 1 - gateway.number) // number for limit in (rules.links_max, rules.links_per_key)
        )
        return PoolRules.filled_from(rules, links_max=links, links_per_key=of_key, gateways=number)

    def _links_of(self, gateway: GatewayChild) -> list[int]:
        return [number for number, host in self._hosts.items() if host.gateway is gateway]

    def _tell_links(self) -> None:
        """Tell the first gateway how many links all have: it chooses one for each worker host."""
        if len(self.gateways) > 1 and self.gateways[0].listens:
            numbers = Counter(host.gateway.number for host in self._hosts.values())
            links = [numbers[one.number] if self._admits(one) else None for one in self.gateways]
            self.gateways[0].send(GatewayLinks(links))

    def _admits(self, gateway: GatewayChild) -> bool:
        """Whether worker hosts can register there. A small limit has no part for some gateways."""
        rules = self._rules_of(gateway)
        return gateway.listens and min(rules.links_max, rules.links_per_key) > 0

    def _move_one(self) -> None:
        """End a link of the gateway that has the most, so that its worker host comes to another."""
        listening = sorted(filter(self._admits, self.gateways), key=lambda one: len(self._links_of(one)))
        most = self._links_of(listening[-1]) if listening else []
        if not most or len(most) - len(self._links_of(listening[0])) < MOVE_DIFFERENCE:
            self._moves_left = 0
            return
        self._moves_left -= 1
        listening[-1].send(LinkClosed(most[-1], "another gateway has room for it", is_final=False))

    # --- what they report -------------------------------------------------------------------------

    def heard(self, gateway: GatewayChild, message: Message) -> None:
        """See ``GatewayEvents``."""
        host = self._hosts.get(getattr(message, "link", -1))
        if isinstance(message, GatewayReady):
            self._tell_links()
            gateway.send(self._rules_of(gateway))
            if gateway.number:  # hosts of the first one come to it by themselves
                self._moves_left = len(self._hosts) // len(self.gateways)
        elif isinstance(message, ev.LinkBegun):
            self._begin_link(gateway, message)
        elif isinstance(message, LinkTraffic) and host is not None:
            host.received_bytes, host.late_rows = message.bytes, message.late_rows
        elif isinstance(message, Event) and host is not None:
            self._take_event(host, message)

    def ended(self, gateway: GatewayChild) -> None:
        """See ``GatewayEvents``."""
        for link in self._links_of(gateway):
            self._end_link(LinkClosed(link, "the gateway has ended", is_final=False))
        self._tell_links()

    def _begin_link(self, gateway: GatewayChild, begun: ev.LinkBegun) -> None:
        self._hosts[begun.link] = _Host(begun, gateway, monotonic())
        where = {"gateway": gateway.number} if len(self.gateways) > 1 else {}
        self._tell("worker host connected", begun, key=begun.key, workers=begun.workers, **where)
        self._tell_links()
        self._enqueue(begun)

    def _take_event(self, host: _Host, event: Event) -> None:
        """Note what an event of a link says for people, and pass it on to the core."""
        match event:
            case ev.StreamOpened():
                host.refused.pop(event.stream, None)
            case ev.StreamRefused():
                host.refused[event.stream] = event.reason
            case ev.WorkerUp():
                host.decoders = event.decoders
            case ev.OrderFilled():
                event = _plausible(event)
            case ev.HostLeaves():
                host.is_leaving = True
                self._tell("worker host leaving", host.facts)
            case ev.LinkClosed():
                self._end_link(event)
                self._tell_links()
                return
        self._enqueue(event)

    def _end_link(self, closed: LinkClosed) -> None:
        host, reason = self._hosts.pop(closed.link), closed.reason
        self._ended_bytes += host.received_bytes
        self.ended_links += 1
        self.last_left = host.is_leaving
        if host.is_leaving:
            reason = f"it was told to end; {reason}"
        self.last_end = f"{host.facts.name}: {reason}"
        self._tell("worker host disconnected", host.facts, reason=reason)
        self._enqueue(closed)

    def _tell(self, event: str, host: ev.LinkBegun, **facts: object) -> None:
        """Log something of a worker host. Hundreds may come with one key, but not repeatedly."""
        write = _log.info if self._may_log(host) else _log.debug
        write(event, link=host.link, name=host.name, host=host.host, **facts)

    def _warn(self, event: str, host: ev.LinkBegun, **facts: object) -> None:
        write = _log.warning if self._may_log(host) else _log.debug
        write(event, link=host.link, name=host.name, host=host.host, **facts)

    def _may_log(self, host: ev.LinkBegun) -> bool:
        return self._lines_per_minute.allows("worker hosts", f"key {host.key!r}")


def _key(number: int) -> str:
    """The key of ``[daemon]`` that sets the address of a gateway."""
    return "pool_gateways" if number else "worker_address"


def _plausible(filled: ev.OrderFilled) -> ev.OrderFilled:
    """Limit what a worker host says of its work, so that no sum grows beyond all bounds."""
    work = Work(*filled.work)
    most = {"read_bytes": BYTES_MAX} | dict.fromkeys(("slow_rows", "cache_hits", "cache_misses", "shared"), 1 << 20)
    limited = {
        name: min(value, most.get(name, TIME_MAX_US))
        for name, value in work._asdict().items()
        if isinstance(value, int)
    }
    parts_us = [min(spent, TIME_MAX_US) for spent in work.parts_us[:NUMBERS_MAX]]
    slow = [
        (sample, printable(path, PATH_CHARACTERS_MAX), min(taken, TIME_MAX_US))
        for sample, path, taken in work.slow[:NUMBERS_MAX]
    ]
    bad = [
        (sample, printable(path, PATH_CHARACTERS_MAX), printable(reason, PATH_CHARACTERS_MAX))
        for sample, path, reason in filled.bad
    ]
    return replace(filled, work=work._replace(**limited, parts_us=parts_us, slow=slow), bad=bad)


def _cut(texts: Iterable[str], characters_max: int) -> tuple[str, ...]:
    """The texts, as far as they have so many characters together."""
    kept = []
    for text in texts:
        kept.append(text[:characters_max])
        characters_max -= len(kept[-1])
        if not characters_max:
            break
    return tuple(kept)
