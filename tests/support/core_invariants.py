"""Invariants of the core after each event, from inside and outside. Tests only."""

from collections import Counter, defaultdict
from math import isclose
from typing import Any

from batchd.core.actions import Action
from batchd.core.delivery import Delivery
from batchd.core.events import Event
from batchd.core.fleet import SMALL_ORDERS_S, Worker, WorkerState
from batchd.core.ordering import FEW_ORDERS
from batchd.core.ring import ANY_SHARE, UNDIVIDED, Slot
from batchd.core.shares import Shares
from batchd.core.stream import Stream
from batchd.core.subscription import ENTITLEMENT_SLOTS, Blocked, Claim, Subscription
from support.core_eviction import check_choice
from support.core_world import World


class CheckedWorld(World):
    """A world that checks all invariants after each event, and the choice of each slot."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._looked_at: set[int] = set()
        self._check_new_choices()

    def _check_new_choices(self) -> None:
        for number in set(self.state.streams) - self._looked_at:
            self._looked_at.add(number)
            _check_choices(self.state.streams[number].delivery)

    def do(self, event: Event) -> list[Action]:
        """Handle one event, perform and check the actions, then check all invariants."""
        actions = super().do(event)
        check_invariants(self)
        self._check_new_choices()
        return actions


def _check_choices(delivery: Delivery) -> None:
    """Compare the ring's choices with a slow search of all slots."""
    choose = delivery.ring.choose

    def checked() -> Slot | None:
        chosen = choose()
        check_choice(delivery, chosen)
        return chosen

    delivery.ring.choose = checked  # type: ignore[method-assign]


def check_invariants(world: World) -> None:
    """Fail if any invariant does not hold."""
    _check_takers(world)
    _check_streams(world)
    for stream in world.state.streams.values():
        _check_promises(stream.delivery)
        _check_slots(stream, world)
        _check_fills(stream, world)
        _check_trainers(stream, world)
        if stream.delivery.stopped is None:
            _check_none_forgotten(stream.delivery)
    _check_workers(world)


def _check_streams(world: World) -> None:
    """The requested streams are served.

    A removed stream exists only while trainers still hold some of its slots.
    """
    assert sorted(world.state.numbers.values()) == sorted(world.serving)
    for number, stream in world.state.streams.items():
        assert (stream.delivery.retired is None) == (number in world.serving)
        if stream.delivery.retired is None:
            continue
        assert all(not slot.is_idle for slot in stream.delivery.ring.slots.values()), "memory is kept without a reader"
        assert (number in world.ended) == (not stream.delivery.ring.slots)
        producers = stream.delivery.supply.mailbox.producers
        assert stream.delivery.ring.slots or stream.delivery.subscriptions or producers, (
            "a stream is kept without a user"
        )
    assert {slot.stream for slot in world.slots.values()} <= set(world.state.streams)
    assert not world.ended & {slot.stream for slot in world.slots.values()}


def _check_takers(world: World) -> None:
    """The incremental set of workers that take orders equals the result of a full search."""
    fleet, links = world.state.fleet, world.state.links.by_number
    for count, takers in enumerate(fleet._takers):
        found = {
            number: frozenset(links[worker.link].may_fill) if worker.kind.is_remote else None
            for number, worker in fleet.workers.items()
            if _takes_one(worker) and len(worker.orders) + len(worker.unsettled) == count
        }
        kept: dict[int, frozenset[int] | None] = dict.fromkeys(takers.local)
        for streams, workers in takers.remote.items():
            assert workers, "an empty group is kept"
            kept |= dict.fromkeys(workers, streams)
        assert kept == found


def _check_promises(delivery: Delivery) -> None:
    """The ring can keep its promises, and its incremental sums equal those of a full search."""
    subscriptions = delivery.subscriptions.values()
    committed = sum(one.owed[0] for one in subscriptions)
    assert committed == delivery.claims.committed
    assert sum(one.owed[1] for one in subscriptions) == delivery.claims.promised
    for reason, blocked in delivery.claims.blocked.items():
        assert blocked == {one.number: one for one in subscriptions if reason in one.blocked}
    assert committed <= delivery.ring.slots_max or delivery.stopped is not None
    for one in subscriptions:
        assert not one.ended or (one.leases and not one.claims), "an ended subscription lingers"
        assert [claim.sequence for claim in one.claims] == list(range(one.granted, one.next_sequence))
        assert one.waits.cause is delivery.claims.cause(one), "its time is booked to a reason that has ended"


def _check_slots(stream: Stream, world: World) -> None:
    """Every slot is accounted for: by number, position, claims and leases."""
    ring, subscriptions = stream.delivery.ring, stream.delivery.subscriptions.values()
    assert ring.slots_max == world.slots_max[stream.spec.number]
    assert len(ring.slots) <= ring.slots_max or not ring.idle.slots, "a ring keeps slots that it may not have"
    made = {number for number, slot in ring.slots.items() if slot.is_made}
    assert made == {number for number, slot in world.slots.items() if slot.stream == stream.spec.number}
    assert all(slot.claims and slot.fill and not slot.fill.under_way for slot in ring.unmade), "a slot for no claim"
    if ring.unmade and stream.delivery.stopped is None:
        assert set(ring.slots) - made <= ring.pending, "rows are ordered into a slot without memory"
    assert ring.idle.slots == {slot.number for slot in ring.slots.values() if slot.is_idle}
    fills = {slot.number: slot.fill for slot in ring.slots.values() if slot.fill}
    assert ring.pending == {number for number, fill in fills.items() if fill.pending or fill.doubted}
    assert ring.pending_anywhere == {number for number, fill in fills.items() if fill.pending}
    shares = {number: {part.share for part in fill.pending} for number, fill in fills.items() if ring.is_shared}
    every = {share for found in shares.values() for share in found}
    assert ring.pending_in == {share: {number for number in shares if share in shares[number]} for share in every}
    for one in subscriptions:
        is_placed = all(claim.slot is not None for claim in one.claims)
        assert is_placed or Blocked.NO_SLOT in one.blocked, "a claim that is never tried again"
        exhausted = [claim.slot for claim in one.claims if claim.sequence < one.exhausted]
        assert all(slot is None or slot.number not in ring.pending for slot in exhausted), (
            "rows that no worker would find"
        )
    positions = [slot.position for slot in ring.slots.values() if slot.position is not None]
    assert len(positions) == len(set(positions)), "a position is in two slots"
    proofs = Counter(proof.slot for worker in world.workers.values() for proof in worker.proofs)
    leases = Counter(held for one in world.trainers.values() for held, _generation in one.leases.values())
    claims: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for one in subscriptions:
        for claim in one.claims:
            if claim.slot is not None:
                assert ring.slots.get(claim.slot.number) is claim.slot, "a claim of a slot that the ring lacks"
                claims[claim.slot.number][one.number] += 1
    for slot in ring.slots.values():
        assert slot.proofs == proofs[slot.number]
        assert slot.position is None or ring.find(slot.position) is slot
        assert slot.claims == claims[slot.number]
        if not slot.is_made:
            continue
        model = world.slots[slot.number]
        if _is_emptied(stream, slot, world):
            continue
        assert (slot.position is None) == (model.spoilt or model.is_ahead), (
            "a slot is unused, or damaged and still findable"
        )
        assert slot.generation == model.generation
        assert slot.is_ready == (model.committed is not None and not model.spoilt)
        assert not slot.is_ready or model.committed == slot.position
        assert slot.leases == leases[slot.number]


def _is_emptied(stream: Stream, slot: Slot, world: World) -> bool:
    """In a live stream, a filled slot may count as empty: no trainer wants or got its batch."""
    if stream.spec.live is None or slot.position is not None or slot.grants:
        return False
    holders = world.holders(slot.number)
    assert all(world.trainers[number].is_spectator for number in holders)
    assert slot.leases == len(holders)
    assert not slot.is_awaited
    assert slot.fill is None
    return True


def _check_fills(stream: Stream, world: World) -> None:
    """Each row of a fill waits for a worker, is at a worker, or is written."""
    ordered = {
        number: order for worker in world.state.fleet.workers.values() for number, order in worker.orders.items()
    }
    for slot in stream.delivery.ring.slots.values():
        if slot.fill is None:
            continue
        parts = [*(part.rows for part in slot.fill.pending), *(rows for rows, _link in slot.fill.doubted)]
        assert all(parts), "a part without rows is kept"
        pending = [row for part in parts for row in part]
        under_way = [row for part in slot.fill.under_way.values() for row in part]
        written = [row for _position, row in world.slots[slot.number].rows] if slot.is_made else []
        rows = sorted(pending + under_way + written)
        whole = len(rows) if slot.position is None else stream.spec.plan.rows(slot.position)
        assert rows == list(range(whole)), "a row is lost, or filled twice"
        assert all(ordered[number].slot is slot for number in slot.fill.under_way)
        mine = {number for number, order in ordered.items() if order.slot is slot and not order.is_proof}
        assert mine == set(slot.fill.under_way)


def _check_trainers(stream: Stream, world: World) -> None:
    """The core and the trainers agree on their positions and leases."""
    trainers = {one.number: one for one in world.trainers.values() if one.spec.number == stream.spec.number}
    assert set(trainers) == set(stream.delivery.subscriptions)
    for number, one in stream.delivery.subscriptions.items():
        trainer = trainers[number]
        assert {
            sequence: (lease.slot.number, lease.generation) for sequence, lease in one.leases.items()
        } == trainer.leases
        assert (one.granted, one.ended, one.waiting) == (trainer.granted, trainer.ended, trainer.waiting)
        assert one.ended or one.consumed == trainer.consumed


def _check_none_forgotten(delivery: Delivery) -> None:
    """Each trainer that could have a batch has it: none waits for an event that may never occur."""
    ring = delivery.ring
    tenants = Counter(reader.tenant for reader in delivery.subscriptions.values())
    assert tenants == delivery.claims.tenants
    weights = sum(tenant.weight for tenant in tenants)
    for one in delivery.subscriptions.values():
        if one.ended:
            continue
        for place, claim in enumerate(one.claims):
            if claim.slot is None:
                assert not any(slot.is_idle for slot in ring.slots.values()), "a claim waits although a slot is idle"
                assert len(ring.slots) >= ring.slots_max, "a claim waits although a slot could be made"
            else:
                kept = place or _is_kept_for_newcomers(delivery, one)
                assert kept or not claim.slot.is_ready, "a ready batch is not handed out"
        if not _wants_more(delivery, one):
            continue
        assert one.usage >= ENTITLEMENT_SLOTS, "a trainer does not get its two slots"
        fair_slots = int(ring.slots_max * one.tenant.weight / weights) // tenants[one.tenant]
        assert one.usage >= fair_slots or not delivery.claims.has_room(1), "a trainer does not get its fair share"
        others = sum(
            len(other.leases) if other.ended else ENTITLEMENT_SLOTS
            for other in delivery.subscriptions.values()
            if other is not one
        )
        hoards = not one.claims and not one.is_remote and len(one.leases) + others >= ring.slots_max
        assert not (one.waiting and hoards), "a trainer that holds its maximum waits for ever"


def _is_kept_for_newcomers(delivery: Delivery, one: Subscription) -> bool:
    """Whether it has its part of what is read ahead, or would leave new trainers too little.

    Remote trainers have at most two batches in transit, so the next one is kept for them.
    """
    if one.is_remote:
        return len(one.leases) >= ENTITLEMENT_SLOTS
    held = [(len(other.leases), other.ended) for other in delivery.subscriptions.values()]
    promised = sum(leases if ended else max(ENTITLEMENT_SLOTS, leases) for leases, ended in held)
    slots_max, leases = delivery.ring.slots_max, len(one.leases)
    to_come = max(1, slots_max * 2 // 5 - len(held))
    room = slots_max - promised - ENTITLEMENT_SLOTS * to_come
    part = (slots_max - ENTITLEMENT_SLOTS * (len(held) + to_come)) // len(held)
    has_its_share = leases >= ENTITLEMENT_SLOTS + min(part, one.consumed // 2)
    return not one.waiting and leases >= ENTITLEMENT_SLOTS and (room < 1 or has_its_share)


def _wants_more(delivery: Delivery, one: Subscription) -> bool:
    """Whether it has a next position in its window, not too far ahead of the slowest trainer."""
    share = one.course.at(one.next_sequence)
    if share is None or one.next_sequence >= one.consumed + one.window:
        return False
    if one.is_spectator and delivery.spec.live is not None:
        return False  # it gets nothing more
    return not is_too_far_ahead(delivery, one)


def is_too_far_ahead(delivery: Delivery, one: Subscription) -> bool:
    """Whether the next claim of ``one`` is too far from the slowest for lockstep or the ring."""
    share = one.course.at(one.next_sequence)
    trainers = [other for other in delivery.subscriptions.values() if not other.ended and not other.is_spectator]
    standing = [at for other in trainers if (at := other.course.at(other.consumed)) is not None]
    if share is None or delivery.spec.max_skew is None or not standing:
        return False
    steps = delivery.spec.plan.steps
    slowest = min(at.position.epoch * steps + at.position.step for at in standing)
    ahead = share.position.epoch * steps + share.position.step - slowest
    if delivery.spec.live is not None and ahead > 0:
        used = [slot.position for slot in delivery.ring.slots.values() if slot.leases or slot.claims]
        beside = sum(
            one is None or not 0 <= one.epoch * steps + one.step - slowest < delivery.ring.slots_max for one in used
        )
        if ahead + beside >= delivery.ring.slots_max:
            return True
    if one.is_spectator:
        return False
    skew = (share.position.epoch * steps + share.position.step - slowest) // one.course.world_size
    return skew > max(0, min(delivery.spec.max_skew, delivery.ring.slots_max - 3))


def _check_workers(world: World) -> None:
    """No worker is idle while rows that a trainer claimed wait for one.

    The core and the workers agree on the orders.
    """
    fleet = world.state.fleet
    assert len(fleet._places) == world.workers_wanted
    wanted = [worker for worker in fleet.workers.values() if not worker.is_surplus and not worker.link]
    assert len(wanted) <= world.workers_wanted
    assert len({worker.place for worker in wanted}) == len(wanted), "two workers have one place"
    assert set(fleet.workers) == set(world.workers)
    for number, worker in fleet.workers.items():
        assert len(worker.orders) <= max(worker.kind.orders_max + worker.kind.is_remote, worker.kind.small_orders_max)
        assert _is_sum(worker.expected_s, [order.expected_s for order in worker.orders.values()])
        fills = [order for order in worker.orders.values() if not order.is_proof]
        sent = [order.number for order in fills if not world.slots[order.slot.number].lost]
        model = world.workers[number]
        assert sent == [order.order for order in model.orders]
        assert [order.number for order in worker.orders.values() if order.is_proof] == [
            proof.order for proof in model.proofs
        ]
        assert worker.withdrawing == set(model.withdrawing)
        assert worker.unsettled == set(model.unsettled)
    for link in world.state.links.by_number.values():
        assert link.workers == {number for number, worker in world.workers.items() if worker.link == link.number}
        assert link.proofs == sum(len(world.workers[number].proofs) for number in link.workers)
    _check_windows(world)
    _check_none_idles(world)


def _is_sum(kept: float, parts: list[float]) -> bool:
    """Whether a sum that was kept up to date is that of these parts, apart from rounding."""
    return isclose(kept, sum(parts), rel_tol=1e-6, abs_tol=1e-12)


def _check_windows(world: World) -> None:
    """The incremental counts of orders, by link and in all, equal a full count."""
    fleet = world.state.fleet
    windows = fleet.windows
    assert set(windows.by_link) == {link.number for link in world.state.links.by_number.values() if link.workers}
    for number, window in windows.by_link.items():
        workers = [fleet.workers[one] for one in world.state.links.by_number[number].workers]
        assert set(window.workers) == {worker.number for worker in workers}
        assert all(worker.window is window for worker in workers)
        assert window.orders == sum(len(worker.orders) + len(worker.unsettled) for worker in workers)
        assert 0 < window.limit <= window.orders_max == sum(worker.kind.orders_max for worker in workers)
    assert windows.workers == sum(len(window.workers) for window in windows.by_link.values())
    assert windows.orders == sum(window.orders for window in windows.by_link.values())
    assert _is_sum(windows.limit, [window.limit for window in windows.by_link.values()])


def _check_none_idles(world: World) -> None:
    """No worker that takes orders is idle while there are rows that it may fill."""
    if world.state.draining:
        return
    have_time = [one for one in world.state.fleet.workers.values() if _takes_one(one)]
    local = [one for one in have_time if not one.link]
    for stream in world.state.streams.values():
        if stream.spec.number in world.away:
            continue
        links = world.state.links.by_number
        remote = [one for one in have_time if one.link and stream.spec.number in links[one.link].may_fill]
        if world.state.fleet.windows.orders >= world.state.fleet.windows.limit:
            remote = []
        shares = stream.shares
        for one in stream.delivery.subscriptions.values():
            for claim in one.claims:
                fill = claim.slot.fill if claim.slot is not None else None
                if fill is None:
                    continue
                found = {part.share for part in fill.pending}
                idle = [one for one in remote if found and (shares is None or _should_fill(one, shares, found))]
                takes_any = not stream.is_divided
                is_idle = stream.has_siblings and [one for one in local if not one.orders]
                own = is_idle or [one for one in local if takes_any or one.place + 1 in found or 0 in found]
                if idle or (own and fill.pending) or (local and fill.doubted):
                    assert not _has_samples(stream, one, claim), "a worker is idle although there are rows to fill"


def _takes_one(worker: Worker) -> bool:
    """Whether a worker takes one more order, by its kind and the window of its link."""
    orders, kind = len(worker.orders) + len(worker.unsettled), worker.kind
    has_little = sum(order.expected_s for order in worker.orders.values()) < SMALL_ORDERS_S
    takes = orders < kind.orders_max or (has_little and orders < kind.small_orders_max)
    has_window = worker.window is None or worker.window.orders < worker.window.limit
    return takes and has_window and worker.state is WorkerState.READY and not worker.is_late


def _should_fill(worker: Worker, shares: Shares, found: set[int]) -> bool:
    """Whether it owns rows of these shares, or has so little work that it fills those of others."""
    return (
        bool(found & {ANY_SHARE, UNDIVIDED, shares.of_link[worker.link]})
        or len(worker.orders) + len(worker.unsettled) < FEW_ORDERS
    )


def _has_samples(stream: Stream, one: Subscription, claim: Claim) -> bool:
    """Whether its rows can be filled.

    A live stream needs samples for waiting trainers first, then for earlier batches.
    """
    mailbox, position, plan = stream.delivery.supply.mailbox, claim.share.position, stream.spec.plan
    if stream.spec.live is None or mailbox.is_bound(position):
        return True
    trainers = [other for other in stream.delivery.subscriptions.values() if not other.ended and not other.is_spectator]
    waits = one.waiting and claim.sequence == one.granted and not (one.is_spectator and trainers)
    if not mailbox.may_bind(plan.rows(position), waits=waits):
        return False
    places = {
        share.position
        for other in trainers
        for sequence in range(other.granted, other.granted + plan.place_of(position) + 1)
        if (share := other.course.at(sequence)) is not None and share.position < position
    }
    whole = {slot.position for slot in stream.delivery.ring.slots.values() if slot.is_ready}
    bare = [place for place in places if place not in whole and not mailbox.is_bound(place)]
    return waits or mailbox.queued >= (len(bare) + 1) * plan.batch_size
