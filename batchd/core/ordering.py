"""Choose the rows that are filled next, and the worker that fills them. Pure code.

    most urgent of each stream -> of all streams -> rows cut for the worker with the fewest orders
         (of the tenant whose turn it is)

Local workers fill any rows. Remote workers fill rows of the streams that their links permit and, if
caches are shared, first the rows of their own share. Of a shuffle of blocks on a server, each local
worker fills the rows of its own blocks, so that it reads each of them once. Of another's it fills
rows that are long work and that their worker has no time for.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from batchd.core.actions import Action, OrderChunk
from batchd.core.claims import Want
from batchd.core.fleet import SMALL_ORDERS_S, Fleet, Order, Worker
from batchd.core.links import Links
from batchd.core.measure import Moment
from batchd.core.ring import ANY_SHARE, UNDIVIDED, Slot
from batchd.core.shares import Shares
from batchd.core.stream import Stream
from batchd.core.subscription import Subscription
from batchd.core.tenants import Tenants

FEW_ORDERS = 2
"""A remote worker with fewer orders is about to be idle: none waits after the current one."""


_Choice: TypeAlias = tuple[Want, Stream, Worker]
NEAR_S = 0.2
"""A trainer may have so much more worker time than another one because workers are on its node."""
LONG_WORK_S = 0.1
"""A worker takes rows of another's blocks if that one would need so long: more than requests do."""
CHOICE_S = 0.005
"""Orders that a worker gets without a choice between them take so long together at most."""


class Ordering:
    """See the module. ``streams``: a live view, by number."""

    def __init__(
        self, streams: Mapping[int, Stream], fleet: Fleet, links: Links, tenants: Tenants, moment: Moment
    ) -> None:
        self._streams = streams
        self._fleet = fleet
        self._links = links
        self._tenants = tenants
        self._moment = moment
        self._last_order = 0

    def next_number(self) -> int:
        """Return an order number that was never used."""
        self._last_order += 1
        return self._last_order

    def order_chunks(self, actions: list[Action]) -> None:
        """Give the most urgent rows to each worker that takes an order."""
        while True:
            wants = [
                (found[0], stream, found[1])
                for stream in self._streams.values()
                if (found := self._next_order(stream)) is not None
            ]
            if not wants:
                return
            first = min(wants, key=lambda one: (one[0].is_extra, one[0].need)) if len(wants) > 1 else wants[0]
            want, stream, worker = self._near(first, wants) if self._fleet.has_nodes else first
            (turn_s, distance, served_s), subscription, slot, _is_extra = want
            tenant = subscription.tenant
            self._tenants.least_s = tenant.turn_s = turn_s
            tenant.served_s = served_s
            idle = self._fleet.idle(stream.spec.number) if distance == 0 else 0
            order = self._order(stream, worker, subscription, slot, idle, actions)
            subscription.served_s = served_s + len(order.rows) * stream.sample_s
            may_order_more = not stream.is_divided and stream.delivery.supply.can_refill and stream.outage is None
            if may_order_more and not (worker.link or slot.has_pending):
                self._order_more(stream, worker, subscription, order.expected_s, actions)
            self._fleet.sort(worker)

    def _near(self, first: _Choice, wants: Sequence[_Choice]) -> _Choice:
        """The ``first`` filling by a worker of its trainer's memory node, if one is as free.

        Else one for a trainer of the worker's node, if it is as urgent: of the same tenant and
        distance, and of a trainer that has had little more worker time.
        """
        want, stream, worker = first
        if stream.is_divided or worker.link or want.is_extra:
            return first
        near = self._fleet.nearest(worker, want.subscription.node)
        if want.subscription.node in {None, near.node}:
            return want, stream, near
        turn_s, distance, served_s = want.need
        others = [
            other
            for other in wants
            if other[2] is worker
            and other[0].subscription.node == worker.node
            and other[0].need[:2] == (turn_s, distance)
            and other[0].need[2] <= served_s + NEAR_S
        ]
        return min(others, key=lambda one: one[0].need, default=first)

    def _order(  # noqa: PLR0913, PLR0917  what, from whom, for whom
        self,
        stream: Stream,
        worker: Worker,
        subscription: Subscription,
        slot: Slot,
        idle: int,
        actions: list[Action],
    ) -> Order:
        """Order rows from a worker, and charge the subscription's tenant with them.

        ``idle`` workers share them. Paired with ``Fleet.sort``.
        """
        fill, position = slot.fill, slot.position
        assert fill is not None
        assert position is not None
        number = self.next_number()
        claims, is_remote = stream.delivery.claims, worker.link > 0
        at_work, slowness = self._fleet.at_work, worker.slowness
        may_be_long = worker.window is not None and worker.window.is_wide
        rows_max = stream.chunk_rows(fill.pending_rows, at_work, idle, slowness, may_be_long=may_be_long)
        if stream.outage is not None:
            rows_max = 1
        shares = self._shares(stream) if is_remote else None
        share = shares.of_link[worker.link] if shares is not None else 0
        divided = (0, 0)
        if stream.is_divided and not is_remote:
            share, divided = worker.place + 1, (worker.place, self._fleet.places)
        claims.provide(slot, actions)
        rows, disputed_link, places = claims.cut(slot, number, rows_max, is_remote=is_remote, share=share)
        if stream.has_siblings and stream.sibling_place(position, rows[0], self._fleet.places) != worker.place:
            divided = (0, 0)  # its siblings' rows are another worker's
        expected_s = len(rows) * stream.sample_s or SMALL_ORDERS_S
        now_s, account = self._moment.now_s, subscription.account
        order = Order(number, stream.spec.number, slot, position, rows, account, now_s, expected_s, disputed_link)
        subscription.tenant.charge(expected_s)
        worker.give(order, now_s)
        if stream.outage is not None:
            stream.outage.begin(order, now_s)
        where = worker.number, number, order.stream, slot.number, position
        actions.append(OrderChunk(*where, rows, places, divided))
        return order

    def _order_more(
        self, stream: Stream, worker: Worker, subscription: Subscription, expected_s: float, actions: list[Action]
    ) -> None:
        """Give the worker its part of the trainer's next batches, if they are as short.

        ``expected_s``: how long the order before them will take.
        """
        pending, left_s = stream.delivery.ring.pending, CHOICE_S - expected_s
        for _sequence, slot in islice(subscription.unfilled(pending), len(pending) // self._fleet.at_work):
            left_s -= expected_s
            if left_s < 0 or not worker.takes_one:
                return
            order = self._order(stream, worker, subscription, slot, 0, actions)
            subscription.served_s += order.expected_s
            if slot.has_pending:
                return

    def _next_order(self, stream: Stream) -> tuple[Want, Worker] | None:
        """Return the most urgent filling of a stream and the worker for it."""
        claims = stream.delivery.claims
        if stream.outage is not None and not stream.outage.may_probe(self._moment.now_s):
            return None
        worker = self._fleet.free(stream.spec.number) if stream.outage is None else self._fleet.free_local()
        if worker is not None and worker.link:
            found = self._next_remote(stream, worker)
            if found is not None or not claims.ring.pending:
                return found
            worker = self._fleet.free_local()  # remote workers may not fill the remaining rows
        if worker is None:
            return None
        if stream.is_divided:
            found = self._next_divided(stream)
            if found is not None or stream.outage is not None or self._fleet.windows.left <= 0:
                return found
            remote = next(self._fleet.free_remote(stream.spec.number), None)
            return None if remote is None else self._next_remote(stream, remote)
        want = claims.wanted(self._tenants.least_s, claims.ring.pending)
        return None if want is None else (want, worker)

    def _next_divided(self, stream: Stream) -> tuple[Want, Worker] | None:
        """Return the most urgent filling with rows of a worker that takes an order.

        If there is none, the most urgent one with long work for a worker that has no time for it;
        of siblings with any work, if another one has none.
        """
        claims, pending, takers = stream.delivery.claims, set(stream.delivery.ring.pending), self._fleet.takers()
        free, ready, long_work = next(iter(takers.values())), self._fleet.ready_places, None
        has_siblings, is_idle = stream.has_siblings, not free.load
        while (want := claims.wanted(self._tenants.least_s, pending)) is not None:
            fill = want.slot.fill
            assert fill is not None, f"slot {want.slot.number} is not being filled"
            stream.divide_among(want.slot, self._fleet.places)
            if fill.doubted:
                return want, free
            for part in fill.pending:
                place = part.share - 1
                if place in takers or place not in ready:
                    return want, takers.get(place, free)
                if long_work is None:
                    is_long = is_idle if has_siblings else len(part.rows) * stream.sample_s >= LONG_WORK_S
                    long_work = want._replace(is_extra=has_siblings) if is_long else None
            pending.discard(want.slot.number)
        return None if long_work is None else (long_work, free)

    def _next_remote(self, stream: Stream, worker: Worker) -> tuple[Want, Worker] | None:
        """Return the most urgent filling for remote workers; ``worker`` has the fewest orders."""
        shares = self._shares(stream)
        if shares is not None:
            return self._next_shared(stream, shares, worker)
        want = stream.delivery.claims.wanted(self._tenants.least_s, stream.delivery.ring.pending_anywhere)
        return None if want is None else (want, worker)

    def _next_shared(self, stream: Stream, shares: Shares, worker: Worker) -> tuple[Want, Worker] | None:
        """Return the filling for a remote worker, from its own share if possible.

        ``worker`` has the fewest orders. It fills rows of another share only if it is about to be
        idle. If it is idle and a trainer waits for rows, it fills these first.
        """
        claims, ring = stream.delivery.claims, stream.delivery.ring
        if not ring.pending_anywhere:
            return None
        if not worker.load:
            awaited = claims.wanted(self._tenants.least_s, ring.pending_anywhere)
            if awaited is not None and not awaited.need[1]:
                return awaited, self._owner(stream, shares, awaited.slot) or worker
        tried = set()
        for one in self._fleet.free_remote(stream.spec.number):
            share = shares.of_link[one.link]
            if share not in tried:
                tried.add(share)
                if (want := self._wanted_of(stream, share)) is not None:
                    return want, one
        first = claims.wanted(self._tenants.least_s, ring.pending_anywhere) if worker.load < FEW_ORDERS else None
        return None if first is None else (first, worker)

    def _wanted_of(self, stream: Stream, share: int) -> Want | None:
        """Return the most urgent filling with rows of a share, or of none."""
        ring = stream.delivery.ring
        while True:
            own = {slot for one in (share, ANY_SHARE, UNDIVIDED) for slot in ring.pending_in.get(one, ())}
            want = stream.delivery.claims.wanted(self._tenants.least_s, own)
            if want is None or not stream.divide(want.slot):
                return want  # else the division may have left no row of the slot in this share

    def _owner(self, stream: Stream, shares: Shares, slot: Slot) -> Worker | None:
        """Return a worker with few orders whose share has rows of a slot; None if there is none."""
        stream.divide(slot)
        pending = stream.delivery.ring.shares_in(slot)
        for one in self._fleet.free_remote(stream.spec.number):
            if one.load >= FEW_ORDERS:
                return None
            if ANY_SHARE in pending or shares.of_link[one.link] in pending:
                return one
        return None

    def _shares(self, stream: Stream) -> Shares | None:
        """Return the present shares of worker hosts; None if each may fill any rows."""
        if stream.spec.shares_caches:
            stream.use_shares(self._links.shares(stream.spec.number, stream.spec.plan.batch_size))
        return stream.shares
