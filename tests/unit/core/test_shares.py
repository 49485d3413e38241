"""How samples are divided among worker hosts: shares, their hosts, and which samples move."""

from collections import Counter

import numpy as np
import pytest

from batchd.core import events as ev
from batchd.core.ring import ANY_SHARE, UNDIVIDED
from batchd.core.shares import SHARE_ROWS, SHARES_MIN, Shares, host_key
from support.core_invariants import CheckedWorld
from support.core_world import REMOTE, World, make_spec
from unit.core.test_pool_model import prove_one_other, remote_of

SAMPLES = np.arange(20_000)


def owners(names: dict[str, int], batch_rows: int = 256) -> list[str]:
    """The host of each sample, by the hosts' names and numbers of workers."""
    hosts = [(link, host_key(name, 0), workers) for link, (name, workers) in enumerate(names.items(), 1)]
    shares = Shares(hosts, batch_rows)
    name_of = {shares.of_link[link]: name for link, name in enumerate(names, 1)}
    owner = {row: name_of[share] for rows, share in shares.divide(SAMPLES, range(len(SAMPLES))) for row in rows}
    return [owner[row] for row in range(len(SAMPLES))]


def test_every_row_is_in_one_share_and_in_order() -> None:
    """This holds for rows with gaps, too, whose samples have other numbers."""
    shares = Shares([(1, 11, 4), (2, 12, 4), (3, 13, 4)], 256)
    rows = tuple(range(0, 512, 2))
    divided = shares.divide(np.arange(7000, 7256), rows)
    assert sorted(row for part, _share in divided for row in part) == list(rows)
    assert all(list(part) == sorted(part) for part, _share in divided)
    assert {share for _part, share in divided} == {11, 12, 13}


def test_hosts_share_the_samples_by_their_workers() -> None:
    """The shares match the numbers of workers within the chance of a hash."""
    found = Counter(owners({"a": 8, "b": 8, "c": 16, "d": 32}))
    for name, part in (("a", 0.125), ("b", 0.125), ("c", 0.25), ("d", 0.5)):
        assert found[name] / len(SAMPLES) == pytest.approx(part, rel=0.1)


def test_when_a_host_goes_only_its_share_moves() -> None:
    """All samples of the other hosts keep their host."""
    names = dict.fromkeys("abcde", 8)
    before = owners(names)
    after = owners({name: 8 for name in names if name != "c"})
    assert all(now == then for now, then in zip(after, before, strict=True) if then != "c")
    assert sum(now != then for now, then in zip(after, before, strict=True)) / len(SAMPLES) == pytest.approx(
        0.2, rel=0.1
    )
    assert {now for now, then in zip(after, before, strict=True) if then == "c"} == set("abde")


def test_a_host_that_connects_again_has_the_same_share() -> None:
    """Its link has another number, and the hosts connect in another order."""
    names = {"a": 8, "b": 4, "c": 8}
    assert owners(names) == owners(dict(reversed(names.items())))


def test_hosts_of_one_name_have_shares_of_their_own() -> None:
    """Two pods may have the same name."""
    assert host_key("pod", 0) != host_key("pod", 1)
    assert host_key("pod", 0) == host_key("pod", 0)


def test_many_hosts_have_shares_together() -> None:
    """Otherwise, an order would have only a row or two."""
    for batch_rows, shares_max in ((8, SHARES_MIN), (256, SHARES_MIN), (1024, 1024 // SHARE_ROWS)):
        hosts = [(link, host_key(f"pod-{link}", 0), 1) for link in range(1, 1001)]
        shares = Shares(hosts, batch_rows)
        assert len(set(shares.of_link.values())) == shares_max
        assert 0 not in shares.of_link.values()


# --- which rows are ordered from which host -------------------------------------------------------


def sharing_world(hosts: int = 2, workers: int = 2, **changes: object) -> tuple[World, list[int]]:
    """Hosts that share a shuffled stream with batches of 32; no worker has orders yet.

    The local worker's orders have one row.
    """
    values = {"samples": 640, "batch_size": 32, "slots_max": 8, "window": 4, "shuffle": True, "shares_caches": True}
    world = CheckedWorld([make_spec(1, **values | changes)], workers=1, chunk_rows_max=1)
    world.start_workers()
    links = []
    for number in range(hosts):
        link = world.host_joins(workers, f"pod-{number}")
        prove_one_other(world, link)
        links.append(link)
    world.subscribe(1)
    return world, links


def shares_of(world: World) -> Shares:
    """The shares of the stream."""
    spec = world.state.streams[1].spec
    shares = world.state.links.shares(spec.number, spec.plan.batch_size)
    assert shares is not None
    return shares


def foreign_rows(world: World) -> int:
    """The number of rows that hosts are filling and that are in the shares of other hosts."""
    stream = world.state.streams[1]
    shares = shares_of(world)
    found = 0
    for worker in world.state.fleet.workers.values():
        for order in worker.orders.values():
            if order.is_proof or not worker.link:
                continue
            samples = stream.spec.plan.indices_of(order.position, order.rows)
            owned = {row: share for rows, share in shares.divide(samples, order.rows) for row in rows}
            found += sum(share != shares.of_link[worker.link] for share in owned.values())
    return found


@pytest.mark.thorough
def test_hosts_fill_hardly_any_rows_of_other_shares() -> None:
    """A few rows are allowed, because shares of the batches ahead differ by chance."""
    world, links = sharing_world(samples=20_000)
    filled = Counter[int]()
    foreign = looks = 0
    world.pull(1)
    for _ in range(120):
        foreign += foreign_rows(world)
        looks += sum(len(worker.orders) for worker in world.workers.values() if worker.link)
        for link in links:
            for number in remote_of(world, link):
                if world.workers[number].orders:
                    filled[link] += len(world.workers[number].orders[0].rows)
                    world.remote_fill(number)
        world.fill_all_local()
        world.pull(1)
    assert min(filled.values()) > 120
    assert foreign < 0.01 * looks


def test_a_host_without_rows_of_its_own_fills_those_of_one_that_does_nothing() -> None:
    """No row waits for a host because of its share, nor for a host that has disconnected."""
    world, (busy, _silent) = sharing_world()
    world.pull(1)
    for _ in range(300):
        for number in remote_of(world, busy):
            while world.workers[number].orders:
                world.remote_fill(number)
        world.pull(1)
    assert not world.state.streams[1].delivery.ring.pending_anywhere, "rows wait for a host that does nothing"
    assert not any(world.workers[number].orders for number in remote_of(world, busy))


def test_rows_that_a_trainer_waits_for_are_ordered_although_each_host_has_rows_of_its_own() -> None:
    """One host hangs with its orders, and the other one has enough rows of its own for long."""
    world, (busy, _stuck) = sharing_world(window=40, slots_max=80, samples=20_000)
    world.pull(1)
    ring = world.state.streams[1].delivery.ring
    awaited = world.state.streams[1].delivery.subscriptions[1].claims[0].slot
    for _ in range(30):
        for number in remote_of(world, busy):
            world.remote_fill(number)
    assert awaited.number in ring.pending_anywhere, "the awaited batch needs rows in both shares"
    for _ in range(3):
        world.now += 0.5
        world.do(ev.Ticked())
    for _ in range(40):
        for number in remote_of(world, busy):
            world.remote_fill(number)
    assert awaited.number not in ring.pending_anywhere
    assert len(ring.pending_anywhere) > 20, "other batches must still have rows to fill"


def test_rows_that_were_divided_among_former_hosts_are_divided_again() -> None:
    """No rows are kept for a host that has disconnected."""
    world, links = sharing_world(hosts=3)
    ring = world.state.streams[1].delivery.ring
    world.host_dies(links[2])
    world.remote_fill(remote_of(world, links[0])[0])
    shares = set(world.state.links.shares(1, 32).of_link.values())
    assert {part.share for slot in ring.slots.values() if slot.fill for part in slot.fill.pending} <= {
        ANY_SHARE,
        UNDIVIDED,
        *shares,
    }


def test_an_idle_host_fills_any_rows_that_a_trainer_waits_for() -> None:
    """The host does so although rows of its own wait in later batches."""
    world, (first, second) = sharing_world(workers=0)
    world.joins(first)
    world.pull(1)  # its one worker has orders of the awaited batch
    other = world.joins(second)
    position = world.state.streams[1].delivery.subscriptions[1].claims[0].share.position
    assert {order.position for order in world.workers[other].orders} == {position}
    assert len(world.workers[other].orders) == REMOTE.orders_max


def test_without_sharing_orders_have_no_gaps() -> None:
    """Rows of an order follow each other."""
    world, _links = sharing_world(shares_caches=False)
    orders = [order for worker in world.workers.values() for order in worker.orders]
    assert orders
    assert all(isinstance(order.rows, range) for order in orders)


def test_rows_of_a_host_that_dies_are_filled_by_the_others_and_its_share_moves_to_them() -> None:
    world, (first, second, third) = sharing_world(hosts=3)
    before = dict(shares_of(world).of_link)
    world.pull(1)
    world.host_dies(second)
    after = dict(shares_of(world).of_link)
    assert after == {link: before[link] for link in (first, third)}
    for _ in range(60):
        for number in (*remote_of(world, first), *remote_of(world, third)):
            if world.workers[number].orders:
                world.remote_fill(number)
        world.fill_all_local()
        world.pull(1)
    assert world.trainers[1].granted > 4


def test_a_host_that_connects_again_while_others_stay_has_its_share_again() -> None:
    """Its link has another number, and another host of the same name may be connected."""
    world, (first, second) = sharing_world()
    shares = shares_of(world).of_link
    key = shares[second]
    world.host_dies(second)
    again = world.host_joins(2, "pod-1")
    twin = world.host_joins(2, "pod-1")
    for link in (again, twin):
        prove_one_other(world, link)
    now = shares_of(world).of_link
    assert now[again] == key
    assert len({now[first], now[again], now[twin]}) == 3
