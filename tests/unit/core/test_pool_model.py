"""The core with random worker hosts, in addition to all that ``test_core_model`` does.

Hosts connect, prove themselves, report samples as bad, are late, make other pixels, die and
leave. At the end all trainers make progress, whatever the hosts do.
"""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from batchd.core import events as ev
from batchd.core.actions import EndLink, OrderChunk, ProveChunk, ReleaseLink, WithdrawOrder
from batchd.core.links import DISAGREEMENTS_MAX, PROOF_ROWS, PROOFS_MAX, LinkRules
from batchd_wire.position import Position
from support.core_invariants import CheckedWorld
from support.core_world import World, make_spec, pick
from unit.core.test_core_model import MANY_EXAMPLES, CoreMachine

HOSTS_MAX = 3


class PoolMachine(CoreMachine):
    """The same machine with worker hosts."""

    @precondition(lambda self: len(self.world.links) < HOSTS_MAX)
    @rule(workers=st.integers(0, 3), at_first=st.booleans())
    def host_joins(self, workers, at_first):
        """Connect a worker host, which may have to measure the speed of the network."""
        self.world.host_joins(workers, at_first=at_first)

    @precondition(lambda self: self.world.links)
    @rule(who=st.integers(0, 9), how=st.sampled_from(["dies", "leaves", "one more worker", "cannot open"]))
    def host_changes(self, who, how):
        """Make a host die, leave, add a worker, or find that files are missing."""
        number = list(self.world.links)[who % len(self.world.links)]
        link = self.world.links[number]
        if how == "dies":
            self.world.host_dies(number)
        elif how == "leaves" and not link.leaving:
            self.world.host_leaves(number)
        elif how == "one more worker":
            self.world.joins(number)
        elif how == "cannot open" and link.opened:
            stream = min(link.opened)
            link.opened.discard(stream)
            link.equal_rows[stream] = 0
            self.world.do(ev.StreamRefused(number, stream, "no such folder"))

    @precondition(lambda self: self._remote())
    @rule(moves=st.lists(st.integers(0, 1 << 12), min_size=5, max_size=30))
    def hosts_work(self, moves):
        """Let the gateway copy, compare and give back, in any order."""
        for move in moves:
            who, what = divmod(move, 8)
            remote = self._remote()
            if not remote:
                return
            number = remote[who % len(remote)]
            self._gateway_step(number, what, sample=who % 24)

    @precondition(lambda self: self._remote())
    @rule(ticks=st.sampled_from([1, 4, 22]))
    def hosts_are_late(self, ticks):
        """Let time pass while remote workers do nothing."""
        for _ in range(ticks):
            self.world.now += 0.5
            self.world.do(ev.Ticked())
            super()._replace_workers()

    def _remote(self) -> list[int]:
        return [number for number, worker in self.world.workers.items() if worker.link]

    def _at_work(self) -> list[int]:
        return [number for number in super()._at_work() if not self.world.workers[number].link]

    def _worker(self, who: int) -> int:
        local = [number for number, worker in self.world.workers.items() if not worker.link]
        return local[who % len(local)] if local else super()._worker(who)

    def _gateway_step(self, number: int, what: int, sample: int) -> None:
        world, worker = self.world, self.world.workers[number]
        if any(proof.slot for proof in worker.proofs):
            world.take_reference(number)
        elif what == 0 and worker.withdrawing:
            world.give_back(number)
        elif what == 1 and worker.unsettled:
            world.settle(number)
        elif what == 2 and worker.proofs:
            world.compare(number, "field image differs" if sample == 0 else "")
        elif what == 3 and worker.orders:
            world.remote_fill(number, bad=(sample,))
        elif what == 4 and worker.orders and sample == 0:
            world.remote_fill(number, hopeless=True)
        elif worker.proofs:
            world.compare(number)
        elif worker.orders:
            world.remote_fill(number)

    def _all_leave(self) -> None:
        for number in self._remote():
            if any(proof.slot for proof in self.world.workers[number].proofs):
                self.world.take_reference(number)
        super()._all_leave()

    def _replace_workers(self) -> None:
        super()._replace_workers()
        for number in self._remote():
            if any(proof.slot for proof in self.world.workers[number].proofs):
                self.world.take_reference(number)
            while self.world.workers[number].withdrawing:
                self.world.give_back(number)
        for number in [number for number, link in self.world.links.items() if link.closed or link.released]:
            self.world.host_dies(number)


class SharingMachine(PoolMachine):
    """A machine in which each host fills the rows whose samples its cache has, if possible."""

    stream_settings: ClassVar[dict[str, object]] = {"shares_caches": True}

    @precondition(lambda self: len(self.world.links) < HOSTS_MAX)
    @rule(workers=st.integers(0, 3), name=st.sampled_from(["a", "a", "b"]))
    def proven_host_joins(self, workers, name):
        """Connect a worker host that fills rows at once, so that there are often several."""
        link = self.world.host_joins(workers, name)
        for stream in list(self.world.serving):
            prove_one_other(self.world, link, stream)


TestPool = PoolMachine.TestCase
TestSharing = SharingMachine.TestCase


@pytest.mark.thorough
class TestPoolLong(TestPool):
    """The same with more examples."""

    settings = MANY_EXAMPLES


@pytest.mark.thorough
class TestSharingLong(TestSharing):
    """The same with more examples."""

    settings = MANY_EXAMPLES


# --- one event at a time -------------------------------------------------------------------------


def pool_world(workers: int = 1, **changes: object) -> World:
    """Make a stream of 64 samples in batches of 8, one local worker, and a waiting trainer."""
    values = {"samples": 64, "batch_size": 8, "slots_max": 16, "window": 8} | changes
    world = CheckedWorld([make_spec(1, **values)], workers=workers, chunk_rows_max=4)
    world.start_workers()
    world.subscribe(1)
    world.pull(1)
    return world


def prove(world: World, link: int) -> None:
    """Let the local workers and the link fill the same rows, until the link serves."""
    while world.links[link].equal_rows[1] < PROOF_ROWS:
        for number in [number for number, worker in world.workers.items() if worker.orders and not worker.link]:
            world.fill(number)
        for number, worker in list(world.workers.items()):
            while worker.proofs:
                if worker.proofs[0].slot:
                    world.take_reference(number)
                world.compare(number)
        world.pull(1)


def prove_one_other(world: World, link: int, stream: int = 1) -> None:
    """Let a link serve at once, as if it had proved itself."""
    world.links[link].equal_rows[stream] = PROOF_ROWS
    world.state.links.compared(world.state.links.by_number[link], stream, PROOF_ROWS, "", [])
    world.do(ev.Ticked())


def _rows(order: OrderChunk) -> set[tuple[Position, int]]:
    return {(order.position, row) for row in order.rows}


def remote_of(world: World, link: int) -> list[int]:
    """Return the workers of a worker host."""
    return [number for number, worker in world.workers.items() if worker.link == link]


def test_a_link_gets_no_order_before_it_has_filled_rows_like_a_local_worker() -> None:
    world = pool_world()
    link = world.host_joins(2)
    assert not any(world.workers[number].orders for number in remote_of(world, link))
    prove(world, link)
    assert any(world.workers[number].orders for number in remote_of(world, link))


def test_a_leaving_worker_host_is_released_when_its_orders_are_done() -> None:
    """The host ends then, and its rows are in the batches."""
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    while len(world.workers[remote].orders) > 1:
        world.remote_fill(remote)
    assert not pick(ReleaseLink, world.host_leaves(link))
    assert pick(ReleaseLink, world.remote_fill(remote)) == [ReleaseLink(link)]
    assert not pick(ReleaseLink, world.do(ev.Ticked()))


def test_a_leaving_worker_host_without_an_order_is_released_at_once() -> None:
    world = pool_world()
    link = world.host_joins(2)
    other = world.host_joins(0)
    assert pick(ReleaseLink, world.host_leaves(link)) == [ReleaseLink(link)]
    world.host_dies(link)
    assert pick(ReleaseLink, world.host_leaves(other)) == [ReleaseLink(other)]


def test_a_worker_host_that_dies_while_it_leaves_is_not_released() -> None:
    """Its orders go to others."""
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    assert not pick(ReleaseLink, world.host_leaves(link))
    world.host_dies(link)
    assert not pick(ReleaseLink, world.do(ev.Ticked()))


def test_a_link_that_makes_other_pixels_is_closed_with_the_difference() -> None:
    world = pool_world()
    link = world.host_joins(1)
    (remote,) = remote_of(world, link)
    world.fill(next(number for number, worker in world.workers.items() if worker.orders))
    world.take_reference(remote)
    (closed,) = pick(EndLink, world.compare(remote, "field image, row 3: 12 of 768 values differ"))
    assert closed.link == link
    assert "field image, row 3" in closed.reason


def test_rows_that_are_bad_here_prove_nothing() -> None:
    """The files on this host may be damaged, so a host that reads them well stays."""
    world = pool_world()
    link = world.host_joins(1)
    local = next(number for number, worker in world.workers.items() if worker.orders)
    sample = world.samples(world.workers[local].orders[0])[0]
    assert not pick(ProveChunk, world.fill(local, bad=(sample,)))
    assert pick(ProveChunk, world.fill(local))
    assert not world.links[link].closed


def test_idle_workers_that_may_not_fill_a_stream_do_not_shorten_its_orders() -> None:
    """Such workers cannot share the batch for which a trainer waits."""
    world = CheckedWorld([make_spec(1, samples=64, batch_size=8, decodes_here=True)], chunk_rows_max=4)
    world.host_joins(12)
    world.subscribe(1)
    world.pull(1)
    world.start_workers()
    (local,) = [worker for worker in world.workers.values() if not worker.link]
    assert len(local.orders[0].rows) == 4


def test_with_accept_any_a_link_need_not_prove_itself() -> None:
    world = pool_world()
    world.state.links.rules = LinkRules(audit=1.0, accepts_any=True)
    link = world.host_joins(0)
    world.links[link].equal_rows[1] = PROOF_ROWS  # the world expects a proof
    number = world.joins(link)
    assert world.workers[number].orders
    for _ in range(8):
        world.remote_fill(number)
        world.fill_all_local()
        world.pull(1)
        assert not world.workers[number].proofs


def test_a_stream_that_is_decoded_here_goes_nowhere_else() -> None:
    world = pool_world(decodes_here=True)
    link = world.host_joins(2)
    for _ in range(8):
        world.fill_all()
        world.pull(1)
    assert not any(world.workers[number].proofs for number in remote_of(world, link))


def test_what_a_worker_host_reports_bad_is_decided_by_a_local_worker() -> None:
    """The sample is bad locally, too, so the host was right and stays."""
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    order = world.workers[remote].orders[0]
    sample = world.samples(order)[1]
    world.remote_fill(remote, bad=(sample,))
    stream = world.state.streams[1]
    assert sample not in stream.bad.listed
    local = next(number for number, worker in world.workers.items() if not worker.link)
    for _ in range(20):
        if sample in stream.bad.listed:
            break
        world.fill(local, bad=(sample,))
        world.pull(1)
    assert sample in stream.bad.listed
    assert world.state.links.by_number[link].disagreements == 0


def test_a_bad_sample_that_is_of_no_row_has_all_of_them_decided_by_a_local_worker() -> None:
    """It would have joined one of them, and where it is good, the row has other bytes."""
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    order = world.workers[remote].orders[0]
    stream, other = world.state.streams[1], next(iter(set(range(24)) - set(world.samples(order))))
    before = stream.bad.rows
    world.remote_fill(remote, joining=(other,))
    assert stream.bad.rows == before
    local = next(number for number, worker in world.workers.items() if not worker.link)
    for _ in range(20):
        if other in stream.bad.listed:
            break
        world.fill(local, joining=(other,))
        world.pull(1)
    assert (stream.bad.listed[other].times, stream.bad.bad_rows) == (1, 0)
    assert world.state.links.by_number[link].disagreements == 0


@pytest.mark.parametrize("why", [{"from_outside": True}, {"out_of_memory": True}, {}], ids=str)
def test_rows_that_are_to_be_decided_here_stay_here_if_their_worker_dies(why) -> None:
    """No worker host gets them again, whatever ended the local worker that had them."""
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    order = world.workers[remote].orders[0]
    row, sample = (order.position, order.rows[1]), world.samples(order)[1]
    world.remote_fill(remote, bad=(sample,))
    decided = 0
    for _ in range(40):
        world.pull(1)
        world.now += 10.0
        world.start_workers()
        for number, worker in list(world.workers.items()):
            if worker.link:
                while worker.orders:
                    assert row not in _rows(worker.orders[0])
                    world.remote_fill(number)
            elif worker.orders and row in _rows(worker.orders[0]):
                decided += 1
                world.kill(number, **why) if decided == 1 else world.fill(number, bad=(sample,))
            elif worker.orders:
                world.fill(number)
    assert decided == 2
    assert sample in world.state.streams[1].bad.listed


def test_a_worker_host_that_finds_good_samples_bad_is_sent_away() -> None:
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    local = next(number for number, worker in world.workers.items() if not worker.link)
    closed: list[EndLink] = []
    for _ in range(40):
        if world.workers[remote].orders:
            order = world.workers[remote].orders[0]
            world.remote_fill(remote, bad=(world.samples(order)[0],))
        if world.workers[local].orders:
            closed += pick(EndLink, world.fill(local))
        if world.workers[remote].proofs:
            world.take_reference(remote)
            world.compare(remote)
        if closed:
            break
        world.pull(1)
    assert "reported 3 samples as bad" in closed[0].reason
    assert ".jpg: is no image" in closed[0].reason
    assert world.state.links.by_number[link].disagreements == DISAGREEMENTS_MAX


@pytest.fixture
def first_proof() -> tuple[World, int, int]:
    """Start a link's first comparison, and return the world, the link and its worker."""
    world = pool_world()
    link = world.host_joins(1)
    (remote,) = remote_of(world, link)
    while not world.workers[remote].proofs:
        world.fill_all_local()
        world.pull(1)
    world.take_reference(remote)
    return world, link, remote


def test_one_file_that_could_not_be_read_for_a_comparison_sends_no_host_away(first_proof) -> None:
    """Other rows replace the row with the file. The host is compared again, and serves."""
    world, link, remote = first_proof
    assert not pick(EndLink, world.compare(remote, "3 values differ", bad_rows=1))
    assert world.state.links.by_number[link].disagreements == 1
    prove(world, link)
    assert world.state.links.by_number[link].serves == {1}


def test_a_host_that_can_read_no_row_of_a_comparison_is_sent_away_with_a_sample_and_its_reason(first_proof) -> None:
    """Streams with masks have no substitutes, so their samples are never hopeless."""
    world, _link, remote = first_proof
    (closed,) = pick(EndLink, world.compare(remote, "all values differ", bad_rows=8))
    assert closed.reason == (
        "it reported 8 samples as bad that are good on the daemon's host, the last as 7.jpg: is no image: "
        "are its files the same, and may it read them?"
    )


def test_a_host_that_can_read_no_file_of_a_stream_is_asked_no_more(first_proof) -> None:
    """Orders of its other streams continue."""
    world, _link, remote = first_proof
    assert not pick(EndLink, world.compare(remote, "all values differ", bad_rows=1, is_hopeless=True))
    for _ in range(8):
        world.fill_all_local()
        world.pull(1)
    assert not world.workers[remote].proofs


def test_a_late_worker_keeps_no_other_of_its_host_from_a_comparison(first_proof) -> None:
    """The gateway still waits for the orders of the late worker."""
    world, _link, remote = first_proof
    while not world.workers[remote].withdrawing:
        world.now += 0.5
        world.do(ev.Ticked())
    world.give_back(remote)
    other = world.joins(world.workers[remote].link)
    while not world.workers[other].proofs:
        world.fill_all_local()
        world.pull(1)


@pytest.mark.thorough
def test_so_many_links_are_compared_at_a_time() -> None:
    """A thousand pods may start at once."""
    world = pool_world()
    links = [world.host_joins(1) for _ in range(2 * PROOFS_MAX)]
    for _ in range(8):
        world.fill_all_local()
        world.pull(1)
        assert sum(len(worker.proofs) for worker in world.workers.values()) <= PROOFS_MAX
    for _ in range(200):
        world.fill_all_local()
        for link in links:
            for number in remote_of(world, link):
                while world.workers[number].orders:
                    world.remote_fill(number)
                while world.workers[number].proofs:
                    world.take_reference(number)
                    world.compare(number)
        world.pull(1)
        if all(link.serves for link in world.state.links.by_number.values()):
            break
    else:
        pytest.fail("some links were never compared")


def test_what_a_host_says_of_its_time_does_not_change_the_size_of_orders(first_proof) -> None:
    """Local workers measure how long a sample takes."""
    world, link, remote = first_proof
    world.compare(remote)
    prove(world, link)
    before = world.state.streams[1].sample_s
    world.remote_fill(remote, busy_us=60_000_000)
    assert world.state.streams[1].sample_s == before


@pytest.mark.parametrize(("window", "pending", "rows"), [(8, 7, 100), (3, 2, 32), (2, 1, 20)])
def test_orders_of_remote_workers_are_longer_where_the_ring_has_rows_for_all_workers(window, pending, rows) -> None:
    """A sample takes 1 ms, and there are a local and a remote worker for batches of 32 rows."""
    spec = make_spec(samples=4096, batch_size=32, slots_max=16, window=window)
    world = CheckedWorld([spec], chunk_rows_max=256)
    world.start_workers()
    world.subscribe(1)
    (local,) = [number for number, worker in world.workers.items() if not worker.link]
    first = world.workers[local].orders[0]
    world.fill(local, busy_us=1000 * len(first.rows))
    stream = world.state.streams[1]
    assert stream.sample_s == pytest.approx(0.001)

    assert len(stream.delivery.ring.pending) == pending
    assert stream.chunk_rows(32, 2, 0, 1.0) == 20
    assert stream.chunk_rows(32, 2, 0, 1.0, may_be_long=True) == rows


def test_rows_that_a_trainer_waits_for_are_withdrawn_from_a_silent_host_after_a_second() -> None:
    world = pool_world()
    link = world.host_joins(2)
    prove(world, link)
    local = next(number for number, worker in world.workers.items() if not worker.link)
    withdrawn: list[WithdrawOrder] = []
    waits_s = 0.0
    while not withdrawn:
        for _ in range(3):
            while world.workers[local].orders:
                world.fill(local)
            world.pull(1)
        world.now += 0.5
        waits_s += 0.5
        withdrawn = pick(WithdrawOrder, world.do(ev.Ticked()))
        assert waits_s <= 3
    first = world.trainers[1].granted
    for number in remote_of(world, link):
        while world.workers[number].withdrawing:
            world.give_back(number)
    for _ in range(4):
        world.fill_all_local()
        world.pull(1)
    assert world.trainers[1].granted > first, "the trainer still waits for a host that does nothing"


def test_a_host_that_is_late_gets_no_more_orders_until_it_is_done_with_them() -> None:
    world = pool_world()
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    assert len(world.workers[remote].orders) == 4
    for _ in range(22):
        world.now += 0.5
        world.do(ev.Ticked())
    while world.workers[remote].withdrawing:
        world.give_back(remote)
    assert not world.workers[remote].orders
    actions = world.settle(remote)
    world.fill_all_local()
    actions += world.pull(1)
    orders = [order for order in pick(OrderChunk, actions) if order.worker == remote]
    assert len(orders) <= 1


def test_a_sample_that_ends_two_hosts_is_decoded_by_a_local_worker() -> None:
    """A third host never gets the rows on which two hosts died."""
    world = pool_world(window=2, slots_max=4)
    link = world.host_joins(1)
    prove(world, link)
    number = remote_of(world, link)[0]
    first = world.workers[number].orders[0]
    rows = {(first.position, row) for row in first.rows}
    world.host_dies(link)
    for turn in range(2):
        link = world.host_joins(1)
        prove_one_other(world, link)
        number = remote_of(world, link)[0]
        had = [order for order in world.workers[number].orders if _rows(order) & rows]
        if turn == 0:
            assert had, "the rows were not put back for the other workers"
            while world.workers[number].orders[0] not in had:
                world.remote_fill(number)
            world.host_dies(link)
        else:
            assert not had
    doubted = {
        (slot.position, row)
        for slot in world.state.streams[1].delivery.ring.slots.values()
        if slot.fill
        for part, _link in slot.fill.doubted
        for row in part
    }
    local = {
        row for worker in world.workers.values() if not worker.link for order in worker.orders for row in _rows(order)
    }
    assert rows & (doubted | local)


@pytest.mark.parametrize("audit", [0.5, 0.25])
def test_an_audit_compares_every_so_many_orders_again(audit: float) -> None:
    world = pool_world()
    world.state.links.rules = LinkRules(audit=audit)
    link = world.host_joins(1)
    prove(world, link)
    (remote,) = remote_of(world, link)
    local = next(number for number, worker in world.workers.items() if not worker.link)
    proofs = fills = 0
    for _ in range(200):
        if world.workers[remote].orders:
            world.remote_fill(remote)
            fills += 1
        if world.workers[local].orders:
            proofs += len(pick(ProveChunk, world.fill(local)))
        while world.workers[remote].proofs:
            world.take_reference(remote)
            world.compare(remote)
        world.pull(1)
    assert 0.5 * audit * fills <= proofs <= audit * fills + 1


def test_rows_that_were_withdrawn_twice_go_to_a_local_worker() -> None:
    """Otherwise a hanging sample, or a silent host, would hold a batch once per remote worker."""
    world = pool_world(window=1)
    link = world.host_joins(0)
    prove_one_other(world, link)
    local = next(number for number, worker in world.workers.items() if not worker.link)
    world.kill(local)  # its successor never starts, or is busy
    for _ in range(12):
        world.joins(link)
    withdrawn = Counter[tuple[Position, int]]()
    for _ in range(40):
        world.now += 0.5
        world.do(ev.Ticked())
        for number in remote_of(world, link):
            worker = world.workers[number]
            for order in [order for order in worker.orders if order.order in worker.withdrawing]:
                withdrawn.update(_rows(order))
            while worker.withdrawing:
                world.give_back(number)
    assert withdrawn, "nothing was withdrawn"
    assert max(withdrawn.values()) <= 2, "a trainer waits for one silent worker after the other"
