"""The gateway process: worker hosts register and get orders; their rows arrive in the slots."""

import os
import re
import signal
from contextlib import ExitStack, suppress
from dataclasses import replace
from hashlib import sha256

import pytest

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
from batchd.core.work import HOST_WORKERS_MAX, NO_WORK
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool.messages import (
    INDEX_PART_BYTES,
    INDEX_PARTS_AHEAD,
    LINK_VERSION,
    ORDERS_MAX,
    TO_DAEMON_FROM_GATEWAY,
    Admitted,
    AskIndex,
    FillRows,
    GatewayFailed,
    HostForget,
    HostLimits,
    HostQuarantine,
    HostServe,
    HostStorage,
    IndexPart,
    PoolRules,
    Rejected,
)
from batchd.runtime.children import start_linked
from batchd.runtime.keys import KeyDirectory
from batchd.worker.messages import TO_WORKER, ForgetSlots, ForgetStream, Quarantine, UseStorage
from batchd_wire.channel import ChannelClosed, receive_message
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import Role
from batchd_wire.views import field_array
from support.gateways import (
    LAYOUT,
    RULES,
    GatewayProcess,
    Slot,
    WorkerHost,
    filled_slot,
    frames_of,
    random_rows,
    serve_message,
    serving_gateway,
    slot_order,
)
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_children")

SILENT_MS = 300


slot = pytest.fixture(filled_slot)
gateway = pytest.fixture(serving_gateway)


@pytest.fixture
def host(gateway) -> WorkerHost:
    """Connect a worker host with one worker, 0, that knows the stream."""
    host = gateway.linked()
    host.hear(HostServe)
    return host


@pytest.fixture
def keys(tmp_path) -> KeyDirectory:
    """Make an empty directory of keys."""
    return KeyDirectory(tmp_path / "keys")


# --- registration ---------------------------------------------------------------------------------


def test_a_worker_host_is_told_of_all_that_it_may_fill(gateway) -> None:
    """The host gets the link, then each stream with its quarantined samples, and the limits."""
    gateway.serve(serve_message(2, "other"), b"another index")
    gateway.send(Quarantine(2, [7, 8]))
    gateway.send(UseStorage((4, 5, 6)))
    host = gateway.host()

    admitted = host.register(name="po\x1bd", workers=9)

    assert admitted == Admitted(host.link, RULES.sample_timeout_s)
    assert gateway.hear(LinkBegun) == LinkBegun(host.link, "po?d", "node-1", "", 77, 9, "x86_64", "1.2.3")
    serves = {TO_WORKER.decode(serve.serve).name: serve for serve in (host.hear(HostServe), host.hear(HostServe))}
    now = replace(serve_message(), storage=(4, 5, 6)).encode()
    assert serves["photos"] == HostServe(host.link, now, sha256(b"an index").hexdigest(), 8, [])
    assert serves["other"].quarantined == [7, 8]


def test_a_worker_host_is_told_of_later_streams_samples_and_limits(gateway, host) -> None:
    """The host hears of a stream's end, too; the gateway ignores its later messages about it."""
    gateway.serve(serve_message(2, "other"), b"another index")
    assert host.hear(HostServe).digest == sha256(b"another index").hexdigest()
    gateway.send(Quarantine(2, [7]))
    gateway.send(UseStorage((4, 5, 6)))
    gateway.send(ForgetStream(2))
    assert host.hear(HostQuarantine) == HostQuarantine(host.link, 2, [7])
    assert host.hear(HostStorage) == HostStorage(host.link, [4, 5, 6])
    assert host.hear(HostForget) == HostForget(host.link, 2)

    for stream in (2, 1, 1):
        host.send(StreamOpened(host.link, stream))
    for stream in (1, 1):
        host.send(StreamRefused(host.link, stream, "/data is\nempty"))
        host.send(StreamOpened(host.link, stream))
    host.send(HostLeaves(host.link))
    assert gateway.hear(StreamOpened) == StreamOpened(host.link, 1)
    assert gateway.hear(StreamRefused) == StreamRefused(host.link, 1, "/data is?empty")
    assert gateway.hear(HostLeaves), "a worker host with changing answers floods the log"


@pytest.mark.parametrize(
    ("differently", "error", "text"),
    [
        (
            {"version": LINK_VERSION + 1},
            ErrorCode.UNSUPPORTED_VERSION,
            f"version {LINK_VERSION} of .* version {LINK_VERSION + 1}",
        ),
        (
            {"content_version": 999},
            ErrorCode.UNSUPPORTED_VERSION,
            f"pixels of version {CONTENT_VERSION}, .* of version 999",
        ),
        ({"workers": 0}, ErrorCode.NOT_ALLOWED, f"1 to {HOST_WORKERS_MAX} workers, not 0"),
        (
            {"workers": HOST_WORKERS_MAX + 1},
            ErrorCode.NOT_ALLOWED,
            f"1 to {HOST_WORKERS_MAX} workers, not {HOST_WORKERS_MAX + 1}",
        ),
    ],
    ids=["messages", "pixels", "no workers", "workers"],
)
def test_a_worker_host_that_does_not_fit_is_told_both_values(gateway, differently, error, text) -> None:
    """The answer says that a retry is useless. The connection may register with other values."""
    host = gateway.host()
    rejected = host.register(**differently)

    assert isinstance(rejected, Rejected)
    assert (rejected.error, rejected.is_final) == (error, True)
    assert re.search(text, rejected.text)
    assert isinstance(host.register(), Admitted)
    gateway.hear(LinkBegun)
    assert [line.event for line in gateway.logged] == ["worker host refused"]


def other_than(former, answer):
    """Return the next answer, if it is another one."""
    return answer if answer != former else None


def test_no_more_worker_hosts_are_admitted_than_the_rules_say() -> None:
    """Limits apply per key (without keys: per host) and in total. The rules may change."""
    with GatewayProcess(rules=PoolRules(30.0, 9, 2)) as gateway:
        hosts = [gateway.linked(workers=0) for _ in range(2)]
        third = gateway.host()
        of_one = third.register()
        gateway.send(PoolRules(30.0, 2, 9))
        of_all = wait_until(lambda: other_than(of_one, third.register()), "the new rules apply")
        hosts[0].close()
        gateway.hear(LinkClosed)

        assert of_one == Rejected(
            ErrorCode.NOT_ALLOWED, "127.0.0.1 has 2 worker hosts already, and there may be 2 of one key", is_final=False
        )
        assert of_all == Rejected(
            ErrorCode.NOT_ALLOWED, "2 worker hosts are connected already, the most that there may be", is_final=False
        )
        assert isinstance(third.register(), Admitted)


def test_link_numbers_differ_between_gateways_too() -> None:
    """A daemon starts one gateway after another, and several at once."""
    numbers = []
    for _ in range(2):
        with GatewayProcess() as gateway:
            numbers += [gateway.linked(workers=0).link for _ in range(2)]
    assert len(set(numbers)) == 4
    assert numbers[1] == numbers[0] + 1


def test_no_worker_host_is_admitted_before_the_rules_are_known() -> None:
    """A worker host that registers early waits; then the gateway applies the rules."""
    with GatewayProcess(rules=None) as gateway:
        early = gateway.host()
        assert not early.asks_to_register().socket.poll(300)
        gateway.send(RULES)
        assert early.hear(Admitted).sample_timeout_s == RULES.sample_timeout_s


# --- keys -----------------------------------------------------------------------------------------


def test_with_keys_rows_come_encrypted_from_holders_of_a_workers_key(keys, slot) -> None:
    """The daemon learns the name of the key."""
    key = keys.new("pool", None, Role.WORKER)
    with GatewayProcess(keys.path) as gateway:
        gateway.serve(serve_message())
        gateway.use(5, slot)
        host = gateway.host(key)
        assert isinstance(host.register(), Admitted)
        assert gateway.hear(LinkBegun).key == "pool"
        host.send(WorkerUp(host.link, 0, ""))
        gateway.hear(WorkerUp)
        gateway.fill(host, 9, 0, 16)
        rows = frames_of(random_rows(16), 0, 16)
        host.answer(9, *rows)
        gateway.hear(OrderFilled)
        assert slot.rows(0, 16) == rows


def test_a_key_of_a_trainer_fills_nothing(keys) -> None:
    """The trainer's connection ends in the handshake, before any message."""
    trainer, worker = keys.new("trainer"), keys.new("worker", None, Role.WORKER)
    with GatewayProcess(keys.path) as gateway:
        refused = gateway.host(trainer)
        refused.socket.send(b"")
        gateway.linked(worker, workers=0)
        gateway.hear_log("peer refused")
        assert not refused.socket.poll(0)


def test_a_key_for_some_streams_shows_no_other(keys) -> None:
    """The gateway sends neither their configuration nor their index, even by its digest."""
    key = keys.new("pool", frozenset({"other"}), Role.WORKER)
    with GatewayProcess(keys.path) as gateway:
        gateway.serve(serve_message(1, "photos"), b"secret")
        gateway.serve(serve_message(2, "other"), b"open")
        host = gateway.linked(key, workers=0)
        assert host.hear(HostServe).serve == serve_message(2, "other").encode()
        host.send(AskIndex(host.link, sha256(b"secret").hexdigest(), 0))
        host.send(StreamOpened(host.link, 1))
        host.send(AskIndex(host.link, sha256(b"open").hexdigest(), 0))
        host.send(StreamOpened(host.link, 2))

        assert host.hear_all() == (IndexPart(host.link, sha256(b"open").hexdigest(), 0), [b"open"])
        assert gateway.hear(StreamOpened) == StreamOpened(host.link, 2)


def test_the_link_of_a_revoked_key_ends(keys) -> None:
    """The message has the reason, and says that a retry is useless."""
    key, _other = keys.new("pool", None, Role.WORKER), keys.new("other", None, Role.WORKER)
    with GatewayProcess(keys.path) as gateway:
        host = gateway.linked(key, workers=0)
        keys.revoke("pool")
        assert gateway.hear(LinkClosed) == LinkClosed(host.link, "its key has been revoked", is_final=True)
        assert host.hear(LinkClosed) == LinkClosed(host.link, "its key has been revoked", is_final=True)
        answer = host.register()
        assert isinstance(answer, Rejected)
        assert (answer.error, answer.is_final) == (ErrorCode.KEY_REFUSED, True)


# --- orders ---------------------------------------------------------------------------------------


def test_rows_with_gaps_are_in_the_slot_and_no_byte_between_them(gateway, host, slot) -> None:
    """The worker host sends the rows without the gaps."""
    before, page = slot.read(), random_rows(16)
    gateway.send(slot_order(FillRows(host.link, 0, 9, 1, 0, 3, [(2, 2), (7, 1)])))
    assert host.hear(FillRows) == FillRows(host.link, 0, 9, 1, 0, 3, [[2, 2], [7, 1]])

    host.answer(9, *frames_of(page, 4, 3))

    gateway.hear(OrderFilled)
    assert slot.rows(2, 2) == frames_of(page, 4, 2)
    assert slot.rows(7, 1) == frames_of(page, 6, 1)
    for first, count in ((0, 2), (4, 3), (8, 8)):
        assert slot.rows(first, count) == frames_of(bytearray(before), first, count)


def test_the_rows_of_an_order_are_in_the_slot_when_the_daemon_hears_of_it(gateway, host, slot) -> None:
    """The slot has those rows, and no other byte has changed."""
    before, page = slot.read(), random_rows(16)
    gateway.fill(host, 9, 2, 7)
    assert host.hear(FillRows) == FillRows(host.link, 0, 9, 1, 0, 3, [[2, 7]])

    host.answer(9, *frames_of(page, 2, 7), work=NO_WORK._replace(busy_us=5), bad=[(4, "a.jpg", "cut")], hopeless="no")

    work = list(NO_WORK._replace(busy_us=5))
    assert gateway.hear(OrderFilled) == OrderFilled(host.link, 0, 9, work, [[4, "a.jpg", "cut"]], "no")
    assert slot.rows(2, 7) == frames_of(page, 2, 7)
    for first, count in ((0, 2), (9, 7)):
        assert slot.rows(first, count) == frames_of(bytearray(before), first, count)
    assert slot.read()[:4096] == before[:4096]
    traffic = gateway.hear_traffic()
    assert (traffic.link, traffic.bytes, traffic.late_rows) == (host.link, sum(map(len, frames_of(page, 2, 7))), 0)


def test_many_orders_of_many_workers_find_their_slots(gateway, slot) -> None:
    """Workers answer in another order than the daemon gave."""
    others = {number: Slot() for number in (6, 7)}
    with ExitStack() as stack:
        for number, other in others.items():
            stack.callback(os.close, other.descriptor)
            gateway.use(number, other)
        host = gateway.linked(workers=4)
        slots = {5: slot, **others}
        orders = [(100 + number, number % 4, 5 + number % 3, number) for number in range(12)]
        for order, worker, place, row in orders:
            gateway.fill(host, order, row, 1, place, worker)
        for order, worker, _place, row in reversed(orders):
            host.answer(order, *frames_of(random_rows(16, seed=order), row, 1), worker=worker)
        for order, worker, place, row in reversed(orders):
            filled = gateway.hear(OrderFilled)
            assert (filled.worker, filled.order) == (worker, order)
            assert slots[place].rows(row, 1) == frames_of(random_rows(16, seed=order), row, 1)


def test_no_row_of_a_withdrawn_order_is_written(gateway, host, slot) -> None:
    """The daemon hears at once, and again when the worker host is done; late rows are counted."""
    before = slot.read()
    gateway.fill(host, 9, 0, 4)
    gateway.fill(host, 10, 4, 4)
    for order in (9, 10, 9):
        gateway.send(WithdrawOrder(host.link, 0, order))
    assert [gateway.hear(OrderWithdrawn).order for _ in range(2)] == [9, 10]
    assert [type(host.hear_all()[0]) for _ in range(2)] == [FillRows] * 2
    assert [host.hear(WithdrawOrder).order for _ in range(2)] == [9, 10]

    host.answer(10)
    host.answer(9, *frames_of(random_rows(16), 0, 4))

    assert [gateway.hear(OrderFilled).order for _ in range(2)] == [10, 9]
    assert gateway.hear_traffic().late_rows == 4
    assert slot.read() == before
    gateway.fill(host, 11, 0, 4)
    host.answer(11, *frames_of(random_rows(16), 0, 4))
    gateway.hear(OrderFilled)


def together(host: WorkerHost, numbers: list[int], workers: int = 4) -> list[FillRows]:
    """Orders of one row each, in turn for the workers of a host."""
    return [FillRows(host.link, number % workers, number, 1, 0, 3, [(number, 1)]) for number in numbers]


def test_orders_of_one_round_travel_together_to_each_host(gateway, slot) -> None:
    """The daemon sends one message, each worker host gets one, and every row is in its place."""
    hosts = [gateway.linked(workers=4), gateway.linked(workers=4)]
    for host in hosts:
        host.hear(HostServe)
    page = random_rows(16)
    orders = [together(host, range(place, 16, 2)) for place, host in enumerate(hosts)]

    gateway.fill_together(*[order for pair in zip(*orders, strict=True) for order in pair])

    for place, host in enumerate(hosts):
        assert [host.hear(FillRows).order for _ in range(8)] == list(range(place, 16, 2))
        assert host.together == [8]
    for host, given in zip(hosts, orders, strict=True):
        for order in given:
            host.answer(order.order, *frames_of(page, order.order, 1), worker=order.worker)
    assert {gateway.hear(OrderFilled).order for _ in range(16)} == set(range(16))
    assert slot.rows(0, 16) == frames_of(page, 0, 16)


def test_orders_that_are_withdrawn_in_the_round_that_sends_them_are_fenced(gateway, slot) -> None:
    """The worker host gets the orders first, so it can drop them; their rows are not written."""
    host = gateway.linked(workers=4)
    host.hear(HostServe)
    before = slot.read()
    os.kill(gateway.child.pid, signal.SIGSTOP)
    gateway.fill_together(*together(host, range(8)))
    for order in (2, 5):
        gateway.send(WithdrawOrder(host.link, order % 4, order))
    os.kill(gateway.child.pid, signal.SIGCONT)

    assert [gateway.hear(OrderWithdrawn).order for _ in range(2)] == [2, 5]
    assert [host.hear(FillRows).order for _ in range(8)] == list(range(8))
    assert [host.hear(WithdrawOrder).order for _ in range(2)] == [2, 5]
    page = random_rows(16)
    for order in range(8):
        host.answer(order, *frames_of(page, order, 1), worker=order % 4)
    ends = [gateway.hear_any() for _ in range(8)]
    assert [one.order for one in ends if isinstance(one, OrderFilled)] == list(range(8))
    for row in range(8):
        kept = frames_of(bytearray(before), row, 1) if row in (2, 5) else frames_of(page, row, 1)
        assert slot.rows(row, 1) == kept


def test_a_link_that_ends_amid_the_orders_of_a_round_costs_the_others_nothing(gateway, slot) -> None:
    """Its orders are over with it; the orders of the other link in the same message are filled."""
    dead, host = gateway.linked(workers=4), gateway.linked(workers=4)
    host.hear(HostServe)
    before = slot.read()
    os.kill(gateway.child.pid, signal.SIGSTOP)
    gateway.send(LinkClosed(dead.link, "silence", is_final=False))
    gateway.fill_together(*together(dead, range(4)), *together(host, range(4, 8)), *together(dead, range(8, 12)))
    os.kill(gateway.child.pid, signal.SIGCONT)

    assert gateway.hear(LinkClosed).link == dead.link
    assert [host.hear(FillRows).order for _ in range(4)] == [4, 5, 6, 7]
    page = random_rows(16)
    for order in range(4):
        dead.claim(order, *frames_of(page, order, 1), worker=order)
    for order in range(4, 8):
        host.answer(order, *frames_of(page, order, 1), worker=order % 4)
    assert [gateway.hear(OrderFilled).order for _ in range(4)] == [4, 5, 6, 7]
    assert slot.rows(4, 4) == frames_of(page, 4, 4)
    assert slot.rows(0, 4) == frames_of(bytearray(before), 0, 4)


def test_a_withdrawal_that_crosses_its_rows_changes_nothing(gateway, host) -> None:
    """The order was complete, and the daemon knows that."""
    gateway.fill(host, 9, 0, 1)
    host.hear(FillRows)
    host.answer(9, *frames_of(random_rows(16), 0, 1))
    gateway.hear(OrderFilled)
    gateway.send(WithdrawOrder(host.link, 0, 9))
    gateway.fill(host, 10, 0, 1)
    host.hear(FillRows)
    host.answer(10, *frames_of(random_rows(16), 0, 1))
    assert gateway.hear(OrderFilled).order == 10


def test_the_orders_of_a_dead_worker_are_over_before_the_daemon_hears_of_it(gateway, host, slot) -> None:
    """An order that the daemon gave meanwhile is dropped; other workers of the host continue."""
    before = slot.read()
    host.send(WorkerUp(host.link, 1, "libjpeg 3"))
    gateway.hear(WorkerUp)
    gateway.fill(host, 9, 0, 4)
    host.hear(FillRows)
    host.send(WorkerDown(host.link, 0, "signal 9 (SIGKILL)"))
    assert gateway.hear(WorkerDown) == WorkerDown(host.link, 0, "signal 9 (SIGKILL)")
    gateway.fill(host, 10, 0, 4)
    gateway.prove(host, 11, 0, 4)
    gateway.send(WithdrawOrder(host.link, 0, 9))
    gateway.fill(host, 12, 0, 4, worker=1)
    assert host.hear(FillRows).order == 12
    assert slot.read() == before


def test_streams_and_slots_may_be_forgotten_while_withdrawn_orders_are_out(gateway, host, slot) -> None:
    """The rows of these orders arrive late, and complete them."""
    gateway.fill(host, 9, 0, 4)
    gateway.send(WithdrawOrder(host.link, 0, 9))
    gateway.hear(OrderWithdrawn)
    gateway.send(ForgetSlots([5]))
    gateway.send(ForgetStream(1))
    for _ in range(3):
        host.hear_all()
    before = slot.read()
    host.answer(9, *frames_of(random_rows(16), 0, 4))
    gateway.hear(OrderFilled)
    assert slot.read() == before


# --- conformance ----------------------------------------------------------------------------------


def test_equal_rows_are_proved_and_nothing_is_written(gateway, host, slot) -> None:
    """The daemon may reuse the slot before the worker host answers."""
    page = random_rows(16)
    slot.put(page)
    gateway.prove(host, 9, 3, 5)
    assert gateway.hear(ReferenceCopied) == ReferenceCopied(host.link, 0, 9)
    assert host.hear(FillRows) == FillRows(host.link, 0, 9, 1, 0, 3, [[3, 5]])
    later = random_rows(16, seed=5)
    slot.put(later)

    host.answer(9, *frames_of(page, 3, 5))

    assert gateway.hear(OrderProved) == OrderProved(host.link, 0, 9, "", 0, is_hopeless=False)
    assert slot.read() == bytes(later)


def test_other_rows_are_named_and_the_bad_samples_counted_that_explain_them(gateway, host, slot) -> None:
    """The differences are one pixel, and samples that the worker host cannot read."""
    page = random_rows(16)
    slot.put(page)
    gateway.prove(host, 9, 3, 5)
    gateway.hear(ReferenceCopied)
    rows = frames_of(page, 3, 5)
    rows[0] = bytes([rows[0][0] ^ 2]) + rows[0][1:]
    host.answer(9, *rows, bad=[(6, "cat/6.jpg", "cut"), (7, "cat/7.jpg", "permission\ndenied")])

    text = "field 'image': 1 of 1,800,000 values differ, by 2 at most, in row 3 first"
    last_bad = "cat/7.jpg: permission?denied"
    expected = OrderProved(host.link, 0, 9, text, 2, is_hopeless=False, last_bad=last_bad)
    assert gateway.hear(OrderProved) == expected


def test_a_proof_beyond_the_orders_of_a_worker_is_sent_when_one_has_ended(gateway, host, slot) -> None:
    """The wait hides proofs: the worker host cannot recognise one by its number."""
    page = random_rows(16)
    slot.put(page)
    for number in range(ORDERS_MAX):
        gateway.fill(host, number, 0, 1)
        host.hear(FillRows)
    gateway.prove(host, 8, 3, 5)
    gateway.prove(host, 9, 3, 5)
    for _ in range(2):
        gateway.hear(ReferenceCopied)
    gateway.send(WithdrawOrder(host.link, 0, 8))
    assert gateway.hear(OrderWithdrawn).order == gateway.hear(OrderFilled).order == 8
    assert not host.socket.poll(SILENT_MS)

    host.answer(2, *frames_of(page, 0, 1))

    assert gateway.hear(OrderFilled).order == 2
    assert host.hear(FillRows).order == 9
    host.answer(9, *frames_of(page, 3, 5))
    assert gateway.hear(OrderProved).difference == ""


def test_rows_of_a_proof_that_was_not_sent_are_no_rows(gateway, host) -> None:
    """The worker host guessed the number of the proof."""
    for number in range(ORDERS_MAX):
        gateway.fill(host, number, 0, 1)
        host.hear(FillRows)
    gateway.prove(host, 9, 3, 5)
    gateway.hear(ReferenceCopied)
    host.claim(9, *frames_of(random_rows(16), 3, 5))
    assert "6 too many" in gateway.hear(LinkClosed).reason


def test_a_worker_host_learns_of_another_time_limit(gateway, host) -> None:
    """The gateway sends it to connected worker hosts and to later ones."""
    gateway.send(PoolRules.filled_from(RULES, sample_timeout_s=7.0))
    assert host.hear(HostLimits) == HostLimits(host.link, 7.0)


def test_a_proof_can_be_withdrawn(gateway, host) -> None:
    """A proof can be withdrawn as any order."""
    gateway.prove(host, 9, 0, 1)
    gateway.hear(ReferenceCopied)
    gateway.send(WithdrawOrder(host.link, 0, 9))
    gateway.hear(OrderWithdrawn)
    host.answer(9, *frames_of(random_rows(16), 0, 1))
    gateway.hear(OrderFilled)


def test_a_proof_of_a_stream_that_is_forgotten_is_withdrawn(gateway, host) -> None:
    """The worker host sends no more rows of that stream, and the gateway does not blame it."""
    gateway.prove(host, 9, 0, 1)
    gateway.hear(ReferenceCopied)
    host.hear(FillRows)
    gateway.send(ForgetStream(1))
    assert gateway.hear(OrderWithdrawn) == OrderWithdrawn(host.link, 0, 9)
    assert host.hear(WithdrawOrder) == WithdrawOrder(host.link, 0, 9)
    assert host.hear(HostForget) == HostForget(host.link, 1)
    host.answer(9)
    assert gateway.hear(OrderFilled).order == 9


# --- indexes --------------------------------------------------------------------------------------


def test_an_index_comes_in_parts_a_few_at_a_time(gateway) -> None:
    """The parts contain all bytes of the index."""
    content = os.urandom(9 * INDEX_PART_BYTES + 77)
    gateway.serve(serve_message(2, "large"), content)
    host = gateway.linked(workers=0)
    serves = [host.hear(HostServe), host.hear(HostServe)]
    digest = next(serve.digest for serve in serves if serve.index_bytes == len(content))
    offsets = list(range(0, len(content), INDEX_PART_BYTES))
    received = b""
    for offset in offsets[:INDEX_PARTS_AHEAD]:
        host.send(AskIndex(host.link, digest, offset))
    for number in range(len(offsets)):
        part, (data,) = host.hear_all()
        assert part == IndexPart(host.link, digest, offsets[number])
        received += data
        if number + INDEX_PARTS_AHEAD < len(offsets):
            host.send(AskIndex(host.link, digest, offsets[number + INDEX_PARTS_AHEAD]))
    assert sha256(received).hexdigest() == digest
    assert received == content


# --- the end --------------------------------------------------------------------------------------


def test_a_leaving_worker_host_finishes_what_it_has(gateway, host, slot) -> None:
    """The daemon gets one message, so that it gives no further order."""
    gateway.fill(host, 9, 0, 1)
    host.send(HostLeaves(host.link))
    host.send(HostLeaves(host.link))
    host.answer(9, *frames_of(random_rows(16), 0, 1))
    host.send(WorkerDown(host.link, 0, "exit status 0"))
    messages = [gateway.hear_any() for _ in range(3)]
    assert HostLeaves(host.link) in messages
    assert [type(message) for message in messages if not isinstance(message, HostLeaves)] == [OrderFilled, WorkerDown]
    assert slot.rows(0, 1) == frames_of(random_rows(16), 0, 1)
    host.close()
    assert gateway.hear(LinkClosed) == LinkClosed(host.link, "its connection ended", is_final=False)


def test_a_link_ends_with_its_connection_and_all_its_orders(gateway, host) -> None:
    """The gateway does not reuse the number of the link."""
    gateway.fill(host, 9, 0, 1)
    host.hear(FillRows)
    host.close()
    assert gateway.hear(LinkClosed) == LinkClosed(host.link, "its connection ended", is_final=False)
    again = gateway.linked()
    assert again.link == host.link + 1


def test_the_daemon_ends_a_link_with_a_reason(gateway, host) -> None:
    """The worker host may register again, unless the end is final."""
    gateway.send(LinkClosed(host.link, "other pixels", is_final=True))
    assert gateway.hear(LinkClosed) == LinkClosed(host.link, "other pixels", is_final=True)
    assert host.hear(LinkClosed) == LinkClosed(host.link, "other pixels", is_final=True)
    gateway.send(LinkClosed(host.link, "other pixels", is_final=True))
    assert isinstance(host.register(), Admitted)


def test_a_worker_host_that_was_taken_for_dead_is_told_so(gateway, host, slot) -> None:
    """Late rows over any connection are dropped, and the new link stays."""
    before = slot.read()
    gateway.fill(host, 9, 0, 4)
    host.hear(FillRows)
    former = host.link
    gateway.send(LinkClosed(former, "silence", is_final=False))
    host.hear(LinkClosed)
    gateway.hear(LinkClosed)
    rows = frames_of(random_rows(16), 0, 4)
    host.answer(9, *rows)
    assert host.hear(LinkClosed).link == former
    assert isinstance(host.register(), Admitted)
    new, host.link = host.link, former
    gateway.hear(LinkBegun)
    host.hear(HostServe)
    host.answer(9, *rows)
    assert host.hear(LinkClosed).link == former
    host.link = new
    host.send(WorkerUp(new, 0, ""))
    assert gateway.hear(WorkerUp).link == new
    assert slot.read() == before


def test_a_gateway_ends_with_its_daemon(gateway, host) -> None:
    """The links of the gateway end with it."""
    assert host.link
    gateway.channel.close()
    assert gateway.child.has_ended(60)
    assert gateway.child.reap() == 0


def test_a_stopped_daemon_loses_nothing_that_the_gateway_has_to_say(gateway) -> None:
    """The gateway waits while the daemon does not read: the channel cannot hold these bytes."""
    hosts = [gateway.linked(workers=4) for _ in range(RULES.links_per_key)]
    places = [(host, worker) for host in hosts for worker in range(4)] * ORDERS_MAX
    for order, (host, worker) in enumerate(places):
        gateway.fill(host, order, 0, 1, worker=worker)
    for host, _worker in places:
        while not isinstance(host.hear_all()[0], FillRows):
            pass
    rows = frames_of(random_rows(16), 0, 1)
    for order, (host, worker) in enumerate(places):
        host.answer(order, *rows, worker=worker, bad=[(1, "p" * 250, "r" * 1500)] * 64)
    filled = [gateway.hear(OrderFilled) for _ in places]
    assert sorted(one.order for one in filled) == list(range(len(places)))
    assert all(len(one.bad) == 64 for one in filled)


STEPS = ["gateway.order.sent", "gateway.rows.received", "gateway.rows.begun", "gateway.rows.written"]


@pytest.mark.parametrize("step", STEPS)
def test_a_gateway_that_is_killed_at_any_step_has_filled_no_order(slot, step) -> None:
    """The daemon sees the end of the channel, and no message about the order.

    While rows are written, their sizes are invalid: the next worker clears the room of each.
    """
    page, expected = random_rows(16), bytearray(slot.read())
    if step == "gateway.rows.begun":
        sizes = next(field for field in LAYOUT.fields if field.name == "text_length")
        field_array(memoryview(expected), sizes, 16)[:] = -1
    elif step == "gateway.rows.written":
        expected = page
    with GatewayProcess(faults=f"{step}=kill") as gateway:
        gateway.serve(serve_message())
        gateway.use(5, slot)
        host = gateway.linked()
        gateway.fill(host, 9, 0, 16)
        if step != "gateway.order.sent":
            host.answer(9, *frames_of(page, 0, 16))
        with pytest.raises(ChannelClosed):
            gateway.hear_any()
        assert gateway.child.reap() == -signal.SIGKILL
    assert slot.rows(0, 16) == frames_of(expected, 0, 16)


def test_a_gateway_that_is_killed_amid_the_results_of_a_round_has_reported_whole_orders_alone(slot) -> None:
    """Each order that the daemon hears of has all its rows; it gives the others to others."""
    page = random_rows(16)
    with GatewayProcess(faults="gateway.rows.written=kill@5") as gateway:
        gateway.serve(serve_message())
        gateway.use(5, slot)
        host = gateway.linked(workers=4)
        host.hear(HostServe)
        gateway.fill_together(*together(host, range(8)))
        for _order in range(8):
            host.hear(FillRows)
        for order in range(8):
            host.answer(order, *frames_of(page, order, 1), worker=order % 4)
        filled = []
        with suppress(ChannelClosed):
            while True:
                filled.append(gateway.hear(OrderFilled).order)
        assert gateway.child.reap() == -signal.SIGKILL
    assert filled == list(range(len(filled)))
    assert len(filled) < 5
    assert slot.rows(0, len(filled)) == frames_of(page, 0, len(filled))


def test_a_gateway_that_cannot_listen_says_why(gateway) -> None:
    """The error names the configuration key."""
    child, channel = start_linked("batchd.pool.gateway", f"tcp://127.0.0.1:{gateway.port}", "daemon.pool_gateways", "")
    with child, channel:
        failed, _ = receive_message(channel, TO_DAEMON_FROM_GATEWAY)
        assert isinstance(failed, GatewayFailed)
        assert failed.reason.startswith(
            f"daemon.pool_gateways: tcp://127.0.0.1:{gateway.port} cannot be listened on: Address"
        )
        assert child.has_ended(60)
