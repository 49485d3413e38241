"""The loop: the daemon's messages on one side, worker hosts on the other. GATEWAY process.

    daemon == SEQPACKET ==> streams, slots, SlotOrder --> HostServe, FillRows ==> worker hosts
           <== OrderFilled, ... <-- checked, rows copied <-- OrderFilled + rows <==

One thread. Each round reads the daemon's messages first, so a withdrawal waits behind one round of
rows at most. Sending to the daemon blocks while its buffer is full. The daemon never waits for a
gateway, so there is no deadlock.

Invariant: the fence of ``pool.gateway.orders``. Only this process writes the rows of remote
workers, and only in ``_filled``. Invariant: end of file on the channel ends the process at once.
"""

import mmap
import select
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NoReturn

from batchd.core import events as ev
from batchd.core.actions import WithdrawOrder
from batchd.core.fleet import REMOTE_NUMBERS
from batchd.core.rows import are_runs, rows_of
from batchd.core.work import NO_WORK
from batchd.pool import messages
from batchd.pool.gateway.links import REASON_CHARACTERS_MAX, Frames, Link, WorkerHosts
from batchd.pool.gateway.orders import OrderTable, RemoteOrder
from batchd.pool.gateway.rows import RowsInvalid, begin, check_report, check_rows, copy, difference, places_of, write
from batchd.pool.gateway.streams import HostStream, HostStreams, map_memory
from batchd.pool.messages import Outbox, messages_in
from batchd.runtime import failpoints
from batchd.runtime.keys import RoleKeys
from batchd.runtime.limits import printable
from batchd.runtime.poller import Poller
from batchd.runtime.tcp.sent_memory import SentMemory
from batchd.worker.messages import ForgetSlots, ForgetStream, Quarantine, ServeStream, UseSlot, UseStorage
from batchd_wire.channel import receive_message, send_encoded
from batchd_wire.codec import Message

TICK_S = 0.5
"""Interval between checks of keys and connections; the daemon's is the same."""
TRAFFIC_S = 1.0
DAEMON_MESSAGES_AT_ONCE = 256
RESTARTS_AT_ONCE = 1 << 10
RESTARTS_PER_S = 2.0
"""Limits of worker restarts in one link: each restart costs the daemon some work."""


class Gateway:
    """Owns ``channel`` to the daemon, which does not block, and the worker hosts."""

    def __init__(self, channel: socket.socket, keys: RoleKeys | None) -> None:
        self._channel = channel
        self.results = Outbox(self._send)
        """Of this round of the loop."""
        self._poller = Poller()
        self._sent_memory = SentMemory(self._poller)
        self.hosts = WorkerHosts(self._poller, keys, self)
        self.orders = OrderTable()
        self._streams = HostStreams()
        self._slots: dict[int, memoryview] = {}
        self._from_daemon: dict[type, Callable[..., None]] = {
            messages.PoolRules: self._use_rules,
            ServeStream: self._serve_stream,
            ForgetStream: self._forget_stream,
            Quarantine: self._quarantine,
            UseStorage: self._use_storage,
            UseSlot: self._use_slot,
            ForgetSlots: self._forget_slots,
            messages.SlotOrder: self._order,
            WithdrawOrder: self._withdraw,
            ev.LinkClosed: self._close_link,
            messages.GatewayLinks: lambda message: self.hosts.placement.tell(message.links),
        }
        self._from_hosts: dict[type, Callable[[Link, Any], None]] = {
            messages.AskIndex: self._ask_index,
            ev.StreamOpened: self._opened,
            ev.StreamRefused: self._refused,
            ev.WorkerUp: self._worker_up,
            ev.WorkerDown: self._worker_down,
            ev.HostLeaves: self._leaves,
        }

    def close(self) -> None:
        """End all links without a message: worker hosts see their connections end."""
        self.hosts.close()
        self._sent_memory.close()
        self._poller.close()

    def run(self) -> NoReturn:
        """Serve until the daemon is gone; then raise ``ChannelClosed``."""
        self._poller.watch(self._channel.fileno(), self.read_daemon)
        self._poller.every(TICK_S, self.hosts.tick)
        self._poller.every(TRAFFIC_S, self._tell_all_traffic)
        while True:
            self.hosts.flush()
            self.results.flush()
            ready = self._poller.wait(is_busy=self._streams.is_digesting)
            if self.hosts.rules is not None:
                self.hosts.receive(ready)
            self._digest_some()

    def tell(self, message: Message) -> None:
        """Send to the daemon, after the results of this round so far. Raises ``ChannelClosed``."""
        self.results.flush()
        self._send(message.encode())

    def _send(self, data: bytes) -> None:
        """Send to the daemon, and wait while its buffer is full. Raises ``ChannelClosed``."""
        while True:
            try:
                send_encoded(self._channel, data)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._channel, select.POLLOUT)
                poll.poll()
            else:
                return

    def read_daemon(self) -> None:
        """Handle the daemon's waiting messages, up to a number of them."""
        for _ in range(DAEMON_MESSAGES_AT_ONCE):
            try:
                message, descriptors = receive_message(self._channel, messages.TO_GATEWAY)
            except BlockingIOError:
                return
            for one in messages_in(message, messages.TO_GATEWAY):
                self._from_daemon[type(one)](one, *descriptors)

    def _tell_all_traffic(self) -> None:
        for link in self.hosts.links.by_number.values():
            self._tell_traffic(link)

    def _tell_traffic(self, link: Link) -> None:
        """Report the traffic of a link to the daemon if it has changed since the last report."""
        if link.traffic_told != (link.bytes, link.late_rows):
            link.traffic_told = link.bytes, link.late_rows
            self.tell(messages.LinkTraffic(link.number, link.bytes, link.late_rows))

    # --- the daemon: streams and slots ------------------------------------------------------------

    def _use_rules(self, message: messages.PoolRules) -> None:
        if self.hosts.rules is None:
            for one in self.hosts.sockets:
                self._poller.watch_socket(one)
        self.hosts.rules = message
        for link in list(self.hosts.links.by_number.values()):
            self.hosts.send(link, messages.HostLimits(link.number, message.sample_timeout_s))

    def _serve_stream(self, message: ServeStream, index: int) -> None:
        stream = self._streams.add(message, index)
        if stream is not None:
            self._offer(stream)

    def _digest_some(self) -> None:
        if self._streams.is_digesting:
            for stream in self._streams.digest_some():
                self._offer(stream)

    def _offer(self, stream: HostStream) -> None:
        for link in list(self.hosts.links.by_number.values()):
            self._serve_to(link, stream)

    def _serve_to(self, link: Link, stream: HostStream) -> None:
        if link.may_fill(stream.name):
            link.served.add(stream.number)
            for message in stream.messages(link.number):
                self.hosts.send(link, message)

    def _forget_stream(self, message: ForgetStream) -> None:
        """Forget a stream, and withdraw its remaining orders: those whose rows are compared.

        Orders keep its layout until they end. Worker hosts stop sending rows of it.
        """
        for order in list(self.orders):
            if order.stream.number == message.stream:
                self._withdraw(WithdrawOrder(order.link, order.worker, order.number))
        self._streams.forget(message.stream)
        for link in list(self.hosts.links.by_number.values()):
            if message.stream in link.served:
                link.served.remove(message.stream)
                link.opened.pop(message.stream, None)
                self.hosts.send(link, messages.HostForget(link.number, message.stream))

    def _quarantine(self, message: Quarantine) -> None:
        self._streams[message.stream].quarantined.extend(message.samples)
        for link in list(self.hosts.links.by_number.values()):
            if message.stream in link.served:
                self.hosts.send(link, messages.HostQuarantine(link.number, message.stream, message.samples))

    def _use_storage(self, message: UseStorage) -> None:
        self._streams.use_storage(message.storage)
        for link in list(self.hosts.links.by_number.values()):
            self.hosts.send(link, messages.HostStorage(link.number, message.storage))

    def _use_slot(self, message: UseSlot, descriptor: int) -> None:
        self._slots[message.slot] = map_memory(descriptor, message.slot_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def _forget_slots(self, message: ForgetSlots) -> None:
        """Unmap slots that no order names. The mapping ends with its last user."""
        for slot in message.slots:
            self._slots.pop(slot, None)

    # --- the daemon: orders -----------------------------------------------------------------------

    def _order(self, message: messages.SlotOrder) -> None:
        """Give an order to its worker, unless that is gone, as was reported to the daemon.

        Rows to compare are copied at once: after ``ReferenceCopied`` the daemon may reuse the slot.
        """
        fill = messages.FILL.decode(message.fill)
        assert isinstance(fill, messages.FillRows), "FILL has no other message"
        link = self.hosts.links.by_number.get(fill.link)
        if link is None or not self.orders.is_up(fill.link, fill.worker):
            return
        stream, slot = self._streams[fill.stream], self._slots[message.slot]
        layout = stream.layout.of(fill.bucket)
        assert are_runs(fill.runs, layout.rows), "an order is within its batch"
        places, key = places_of(layout, fill.runs), (fill.link, fill.worker, fill.order)
        reference = copy(slot, places) if message.is_proof else None
        if message.is_proof:
            self.tell(ev.ReferenceCopied(*key))
        memory = None if message.is_proof else slot
        self.orders.give(RemoteOrder(*key, stream, rows_of(fill.runs), places, fill, memory, reference))
        self._send_next(link, fill.worker)

    def _send_next(self, link: Link, worker: int) -> None:
        """Send the next order to a worker that has fewer than ``ORDERS_MAX``, with this round."""
        order = self.orders.next_to_send(link.number, worker)
        self.hosts.expect(link, self.orders.due_bytes(link.number))
        if order is not None:
            self.hosts.fill(link, order.message)

    def _withdraw(self, message: WithdrawOrder) -> None:
        key = message.link, message.worker, message.order
        order = self.orders.find(*key)
        if order is None or order.is_withdrawn:
            return
        self.orders.withdraw(order)
        self.tell(ev.OrderWithdrawn(*key))
        if order.is_sent:
            self.hosts.send(self.hosts.links.by_number[message.link], message)
        else:
            self.orders.end(order)
            self.tell(ev.OrderFilled(*key, NO_WORK, [], ""))

    def _close_link(self, message: ev.LinkClosed) -> None:
        link = self.hosts.links.by_number.get(message.link)
        if link is not None:
            self.hosts.end(link, message.reason, is_final=message.is_final)

    # --- worker hosts -----------------------------------------------------------------------------

    def begun(self, link: Link) -> None:
        """See ``LinkEvents``."""
        registered = link.registered
        self.tell(
            ev.LinkBegun(
                link.number,
                printable(registered.name),
                printable(registered.host),
                link.key.name if link.key is not None else "",
                registered.pid,
                registered.workers,
                printable(registered.machine),
                printable(registered.batchd),
            )
        )

    def admitted(self, link: Link) -> None:
        """See ``LinkEvents``: announce all streams to the worker host."""
        for stream in self._streams.ready():
            self._serve_to(link, stream)

    def ended(self, link: Link, closed: ev.LinkClosed) -> None:
        """See ``LinkEvents``: no row of it will be written from now on, so report its end."""
        self.orders.end_link(link.number)
        self._tell_traffic(link)
        self.tell(closed)

    def frames_due(self, link: Link, message: Message) -> int:
        """See ``LinkEvents``."""
        if not isinstance(message, ev.OrderFilled):
            return 0
        order = self.orders.find_sent(link.number, message.worker, message.order)
        return len(order.places) if order is not None else 0

    def heard(self, link: Link, message: Message, rows: Frames) -> None:
        """See ``LinkEvents``."""
        if isinstance(message, ev.OrderFilled):
            self._filled(link, message, rows)
        else:
            self._from_hosts[type(message)](link, message)

    def _filled(self, link: Link, message: ev.OrderFilled, rows: Frames) -> None:
        """Act on an order that a worker host has finished, or dropped after its withdrawal."""
        key = link.number, message.worker, message.order
        order = self.orders.find_sent(*key)
        if order is None:
            self.hosts.cut_off(
                link, f"it sent rows of order {message.order} at worker {message.worker}, which has none"
            )
            return
        rows_bytes = sum(map(len, rows))
        link.bytes += rows_bytes
        if order.is_withdrawn:
            link.late_rows += len(order.rows) if rows else 0
            self._end(link, order, ev.OrderFilled(*key, NO_WORK, [], ""))
            return
        try:
            check_rows(order.layout, len(order.rows), order.places, rows)
            check_report(message, len(order.rows), order.stream.record_bytes_max, monotonic() - order.given_s)
        except RowsInvalid as error:
            self.hosts.cut_off(link, str(error))
            return
        failpoints.passing("gateway.rows.received")
        if order.memory is not None:
            begin(order.memory, order.layout, len(order.rows), order.places)
            failpoints.passing("gateway.rows.begun")
            write(order.memory, order.places, rows)
            failpoints.passing("gateway.rows.written")
            self._end(link, order, message)
            # the next rows of this round may take as long
            if rows_bytes >= messages.ROW_FRAME_BYTES:
                self.results.flush()
        else:
            assert order.reference is not None, "an order fills or proves"
            found = difference(order.layout, order.rows, order.reference, rows)
            last_bad = "".join(f"{path}: {reason}" for _sample, path, reason in message.bad[-1:])
            last_bad = printable(last_bad, REASON_CHARACTERS_MAX)
            self._end(link, order, ev.OrderProved(*key, found, len(message.bad), bool(message.hopeless), last_bad))

    def _end(self, link: Link, order: RemoteOrder, message: ev.OrderFilled | ev.OrderProved) -> None:
        self.orders.end(order)
        if isinstance(message, ev.OrderFilled):
            self.results.add(message)
        else:
            self.tell(message)
        self._send_next(link, order.worker)

    def _worker_up(self, link: Link, message: ev.WorkerUp) -> None:
        restarts_max = RESTARTS_AT_ONCE + (monotonic() - link.begun_s) * RESTARTS_PER_S
        if message.worker in link.seen:
            # a repeated number could get an order of the worker that had the number before
            self.hosts.cut_off(link, f"its worker {message.worker} started twice")
        elif message.worker >= REMOTE_NUMBERS:
            self.hosts.cut_off(link, f"its worker has the number {message.worker}, which no worker has")
        elif len(link.seen) - link.registered.workers >= restarts_max:
            self.hosts.cut_off(link, f"it has started {len(link.seen)} workers, far more than are likely to die")
        elif len(self.orders.workers(link.number)) >= link.registered.workers:
            self.hosts.cut_off(link, f"it has more workers than the {link.registered.workers} it registered with")
        else:
            link.seen.add(message.worker)
            self.orders.add_worker(link.number, message.worker)
            self.tell(replace(message, decoders=printable(message.decoders, REASON_CHARACTERS_MAX)))

    def _worker_down(self, link: Link, message: ev.WorkerDown) -> None:
        if self.orders.is_up(link.number, message.worker):
            self.orders.end_worker(link.number, message.worker)
            self.hosts.expect(link, self.orders.due_bytes(link.number))
            self.tell(replace(message, how=printable(message.how)))

    def _opened(self, link: Link, message: ev.StreamOpened) -> None:
        if message.stream in link.served and message.stream not in link.opened:
            link.opened[message.stream] = True
            self.tell(message)

    def _refused(self, link: Link, message: ev.StreamRefused) -> None:
        if message.stream in link.served and link.opened.get(message.stream) is not False:
            link.opened[message.stream] = False
            reason = printable(message.reason, REASON_CHARACTERS_MAX) or "it gives no reason"
            self.tell(replace(message, reason=reason))

    def _leaves(self, link: Link, message: ev.HostLeaves) -> None:
        if not link.is_leaving:
            link.is_leaving = True
            self.tell(message)

    def _ask_index(self, link: Link, message: messages.AskIndex) -> None:
        ahead = messages.INDEX_PARTS_AHEAD
        if len(link.asked) >= ahead * max(1, len(link.served)):
            self.hosts.cut_off(link, f"it asked for more than {ahead} parts of each index at a time")
            return
        link.asked.append((message.digest, message.offset))
        self._send_parts(link)

    def _send_parts(self, link: Link) -> None:
        """Send requested index parts, without copying, while few are in flight."""
        while link.asked and link.parts_ahead < messages.INDEX_PARTS_AHEAD:
            digest, offset = link.asked.popleft()
            index = self._streams.index(digest)
            if index is None or not any(
                one in self._streams and self._streams[one].index is index for one in link.served
            ):
                continue  # its stream was forgotten meanwhile, or the key does not permit it
            try:
                part = index.part(offset)
            except ValueError as error:
                self.hosts.cut_off(link, str(error))
                return
            link.parts_ahead += 1
            frame = self._sent_memory.view(part, partial(self._part_sent, link))
            self.hosts.send(link, messages.IndexPart(link.number, digest, offset), frame)

    def _part_sent(self, link: Link) -> None:
        link.parts_ahead -= 1
        if link.number in self.hosts.links.by_number:
            self._send_parts(link)
