"""The daemon's side of its gateways: checks of their messages, and the end of a hung gateway."""

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

import pytest
from structlog.testing import capture_logs

from batchd.core import events as ev
from batchd.core.actions import EndLink, ReleaseLink, WithdrawOrder
from batchd.core.events import Event
from batchd.core.fleet import remote_number
from batchd.core.state import DaemonState
from batchd.core.work import NO_WORK
from batchd.errors import BatchdError
from batchd.pool.gateway_child import HANGS_TICKS, GatewayChild
from batchd.pool.messages import GatewayLinks, GatewayReady, PoolRules
from batchd.pool.remote import PATH_CHARACTERS_MAX, REMOTE, RemoteWorkers
from batchd.pool.wanted import WantedCount
from batchd.runtime.children import Child
from batchd.runtime.failpoints import VARIABLE
from batchd.runtime.limits import SESSION_LINES_PER_MINUTE
from batchd.runtime.poller import Poller
from batchd.runtime.slots import SlotPool
from batchd.worker.messages import UseStorage
from batchd_wire.codec import Message
from support.gateways import RULES
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_children")


class Pool:
    """Remote workers with real gateways, and the events that they send to the core."""

    def __init__(self, gateways: int = 1, rules: PoolRules = RULES) -> None:
        self.events: deque[Event] = deque()
        self.decoders = ""
        self.poller = Poller()
        endpoints = ["tcp://127.0.0.1:0"] * gateways
        wanted = WantedCount(0, ("", None))
        self.state = DaemonState([], 1, REMOTE, sample_timeout_s=rules.sample_timeout_s, chunk_rows_max=1)
        served = {}, SlotPool(), lambda: self.decoders
        self.remote = RemoteWorkers(self.poller, self.events.append, endpoints, None, rules, wanted, *served)

    def tick(self) -> None:
        """Half a second has passed."""
        self.remote.tick(self.state)

    def start(self) -> Self:
        """Start the processes. Without them, messages to them are lost."""
        self.remote.start()
        return self

    def child(self, gateway: int = 0) -> Child:
        """Return the current process of a gateway."""
        child = self.remote.gateways[gateway].child
        assert child is not None
        return child

    def hear(self, message: Message, gateway: int = 0) -> None:
        """Handle a message as if a gateway had sent it."""
        self.remote.gateways[gateway]._take(message)

    def link(self, number: int, workers: int = 0, gateway: int = 0) -> None:
        """Connect a worker host with so many workers."""
        self.hear(ev.LinkBegun(number, "pod", "node", "a key", 7, 4, "x86_64", "1.2.3"), gateway)
        for worker in range(workers):
            self.hear(ev.WorkerUp(number, worker, "libjpeg 3"), gateway)

    def sent(self, gateway: int) -> list[Message]:
        """Collect the daemon's messages to the gateway from now on."""
        return record(self.remote.gateways[gateway])

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Handle messages of the gateways until a condition holds."""
        wait_until(lambda: self.poller.dispatch() or condition(), what)


def record(gateway: GatewayChild) -> list[Message]:
    """Record the messages to a gateway in a list, and deliver them as well."""
    sent: list[Message] = []
    send = gateway.send

    def send_and_keep(message: Message, *descriptors: int) -> None:
        sent.append(message)
        send(message, *descriptors)

    gateway.send = send_and_keep  # type: ignore[method-assign]
    return sent


@pytest.fixture
def pool() -> Iterator[Pool]:
    yield from opened(Pool().start())


@pytest.fixture
def three() -> Iterator[Pool]:
    """Make a pool with three gateways."""
    yield from opened(Pool(3).start())


@pytest.fixture(params=[4])
def believed(request) -> Iterator[Pool]:
    """Make three gateways that count as listening, with limits that cannot be divided evenly."""
    pool = Pool(3, PoolRules(30.0, links_max=8, links_per_key=request.param))
    for gateway in pool.remote.gateways:
        gateway.listens = True
    yield from opened(pool)


def opened(pool: Pool) -> Iterator[Pool]:
    """Close the pool at the end."""
    yield pool
    pool.remote.close()
    pool.poller.close()


def test_a_gateway_that_answers_no_withdrawal_is_killed(pool) -> None:
    """It may be stopped or hung; without its answer no other worker may fill the rows."""
    pool.link(11, workers=1)
    os.kill(pool.child().pid, signal.SIGSTOP)
    pool.remote.withdraw(WithdrawOrder(11, 0, 5))
    for _ in range(HANGS_TICKS - 1):
        pool.tick()
    assert not pool.child().has_ended()
    pool.tick()

    pool.wait(lambda: not pool.remote.gateways[0].is_up, "the gateway is down")

    assert pool.events[-1] == ev.LinkClosed(11, "the gateway has ended", is_final=False)


def test_a_gateway_that_says_anything_after_a_withdrawal_lives(pool) -> None:
    """A gateway without a pending withdrawal may be silent."""
    pool.link(11, workers=1)
    pool.remote.withdraw(WithdrawOrder(11, 0, 5))
    pool.tick()
    pool.hear(ev.WorkerUp(11, 1, ""))
    for _ in range(2 * HANGS_TICKS):
        pool.tick()
    assert not pool.child().has_ended()


def test_paths_that_a_worker_host_names_are_short_and_plain(pool) -> None:
    """The paths are in the status, whose message has a limited size."""
    pool.link(11, workers=1)
    work = NO_WORK._replace(slow=[(3, "\x1b[2J" + "x" * 16_000, 5)])
    pool.hear(ev.OrderFilled(11, 0, 5, work, [], ""))
    done = pool.events[-1]
    assert isinstance(done, ev.OrderFilled)
    ((_sample, path, _us),) = done.work.slow
    assert path == "?[2J" + "x" * (PATH_CHARACTERS_MAX - 4)


def test_worker_hosts_that_come_and_go_do_not_fill_the_log(pool) -> None:
    with capture_logs() as lines:
        for number in range(SESSION_LINES_PER_MINUTE):
            pool.link(number)
            pool.hear(ev.LinkClosed(number, "its connection ended", is_final=False))
    shown = [line["event"] for line in lines if line["log_level"] != "debug"]
    assert len(shown) == SESSION_LINES_PER_MINUTE + 1, "one line must count those left out"
    assert shown.count("log lines left out") == 1


# --- several gateways -----------------------------------------------------------------------------


def test_each_gateway_admits_its_part_of_the_hosts(believed) -> None:
    """The sum stays within the limits, whichever ports the host connects to."""
    sent = [believed.sent(gateway) for gateway in range(3)]
    for gateway in range(3):
        believed.hear(GatewayReady(7072), gateway)

    rules = [message for messages in sent for message in messages if isinstance(message, PoolRules)]
    assert [one.links_max for one in rules] == [3, 3, 2]
    assert [one.links_per_key for one in rules] == [2, 1, 1]
    assert {one.gateways for one in rules} == {3}


def test_orders_and_withdrawals_go_to_the_gateway_of_the_link(believed) -> None:
    """Streams, storage limits and rules go to all gateways."""
    believed.link(11, workers=1, gateway=1)
    believed.link(12, workers=1, gateway=2)
    first = remote_number(11, 0)
    sent = [believed.sent(gateway) for gateway in range(3)]

    believed.remote.withdraw(WithdrawOrder(12, 0, 5))
    believed.remote.kill(first, "it is stuck")
    believed.remote.use_storage((1, 2, 3))

    storage = UseStorage((1, 2, 3))
    assert believed.remote.gateway_of(first) is believed.remote.gateways[1]
    assert sent == [
        [storage],
        [ev.LinkClosed(11, "it is stuck", is_final=True), storage],
        [WithdrawOrder(12, 0, 5), storage],
    ]


@pytest.mark.parametrize(
    ("decoders", "named"),
    [
        ("OpenCV 5", "it decodes with libjpeg 3, the daemon's host with OpenCV 5"),
        ("libjpeg 3", "both hosts decode with libjpeg 3"),
    ],
)
def test_a_host_that_makes_other_pixels_is_sent_away_with_the_decoders_of_both(believed, decoders, named) -> None:
    """The host, the log and the status have the same reason."""
    believed.link(11, workers=1)
    believed.decoders = decoders
    sent = believed.sent(0)

    with capture_logs() as lines:
        believed.remote.send_away(EndLink(11, "it makes other pixels"))

    reason = f"it makes other pixels; {named}"
    assert sent == [ev.LinkClosed(11, reason, is_final=True)]
    assert [(line["event"], line["reason"]) for line in lines] == [("worker host sent away", reason)]
    assert believed.remote.statistics(believed.state, 0.0).sent_away == (f"pod: {reason}",)


@pytest.mark.parametrize(
    ("leaves", "ends", "last_end"),
    [
        (True, "its orders are done", "pod: it was told to end; its orders are done"),
        (True, "its connection ended", "pod: it was told to end; its connection ended"),
        (False, "its connection ended", "pod: its connection ended"),
    ],
)
def test_the_end_of_a_host_that_left_does_not_read_like_a_failure(believed, leaves, ends, last_end) -> None:
    """The log and the status tell both apart; the last host counts."""
    believed.link(10)
    believed.hear(ev.HostLeaves(10))
    believed.hear(ev.LinkClosed(10, "its orders are done", is_final=False))
    believed.link(11)
    if leaves:
        believed.hear(ev.HostLeaves(11))

    with capture_logs() as lines:
        believed.hear(ev.LinkClosed(11, ends, is_final=False))

    pool = believed.remote.statistics(believed.state, 0.0)
    assert (pool.last_end, pool.last_left) == (last_end, leaves)
    assert [(line["event"], f"pod: {line['reason']}") for line in lines] == [("worker host disconnected", last_end)]


def test_a_released_host_is_no_host_that_was_sent_away(believed) -> None:
    """It may register again, and no warning names it."""
    believed.link(11)
    sent = believed.sent(0)

    with capture_logs() as lines:
        believed.remote.release(ReleaseLink(11))

    assert sent == [ev.LinkClosed(11, "its orders are done", is_final=False)]
    assert lines == []
    assert believed.remote.statistics(believed.state, 0.0).sent_away == ()


def test_the_first_gateway_knows_how_many_links_all_have(three) -> None:
    """It sends a new worker host to the gateway with the fewest links."""
    sent = three.sent(0)
    three.link(11, gateway=1)
    three.link(12, gateway=0)
    three.hear(ev.LinkClosed(11, "its connection ended", is_final=False), 1)
    three.child(2).kill()
    three.wait(lambda: not three.remote.gateways[2].is_up, "a gateway is down")

    assert [message.links for message in sent if isinstance(message, GatewayLinks)] == [
        [0, 1, 0],
        [1, 1, 0],
        [1, 0, 0],
        [1, 0, None],
    ]


@pytest.mark.parametrize("believed", [2], indirect=True)
def test_a_gateway_that_gets_no_part_of_a_small_limit_is_sent_no_host(believed) -> None:
    """That gateway would reject every host."""
    sent = believed.sent(0)
    believed.link(11)
    assert [message.links for message in sent if isinstance(message, GatewayLinks)] == [[1, 0, None]]


def test_a_gateway_that_ends_takes_its_own_links_alone(three) -> None:
    """The other links continue, and a new gateway starts."""
    for gateway in range(3):
        three.link(11 + gateway, workers=1, gateway=gateway)
    three.events.clear()

    three.child(1).kill()
    three.wait(lambda: bool(three.events), "the daemon knows")

    assert list(three.events) == [ev.LinkClosed(12, "the gateway has ended", is_final=False)]
    assert [gateway.is_up for gateway in three.remote.gateways] == [True, False, True]
    three.wait(lambda: three.tick() or three.remote.gateways[1].listens, "it listens again")


def test_a_gateway_that_hangs_is_killed_and_no_other(three) -> None:
    """Another gateway with a pending withdrawal has answered."""
    for gateway in (1, 2):
        three.link(11 + gateway, workers=1, gateway=gateway)
    for link in (12, 13):
        three.remote.withdraw(WithdrawOrder(link, 0, 5))
    three.hear(ev.WorkerUp(13, 1, ""), gateway=2)
    os.kill(three.child(1).pid, signal.SIGSTOP)
    for _ in range(HANGS_TICKS):
        three.tick()
    three.wait(lambda: not three.remote.gateways[1].is_up, "it is killed")
    assert not three.child(2).has_ended()


def test_hosts_move_to_a_gateway_that_listens_again_until_all_have_as_many(believed) -> None:
    """One host moves with each tick, so that few rows are ordered again at a time."""
    for number in range(7):
        believed.link(20 + number, gateway=number % 2)
    sent = [believed.sent(gateway) for gateway in range(3)]
    links = [4, 3, 0]
    believed.hear(GatewayReady(7074), gateway=2)

    for _ in range(8):
        believed.tick()
        for gateway, messages in enumerate(sent):
            for message in messages:
                if isinstance(message, ev.LinkClosed):
                    assert not message.is_final
                    links[gateway] -= 1
                    links[2] += 1
                    believed.hear(message, gateway)
                    believed.link(message.link + 100, gateway=2)
            messages.clear()

    assert sorted(links) == [2, 2, 3]


def test_hosts_stay_where_they_are_while_nothing_begins_to_listen(believed) -> None:
    """A host that cannot reach the other ports would be moved again and again."""
    for number in range(7):
        believed.link(20 + number)
    sent = believed.sent(0)
    for _ in range(8):
        believed.tick()
    assert not [message for message in sent if isinstance(message, ev.LinkClosed)]


def test_all_gateways_end_with_the_daemon(three) -> None:
    """The gateways end at the same time, without waiting for each other."""
    children = [three.child(gateway) for gateway in range(3)]
    three.remote.close()
    assert [child.pidfd for child in children] == [-1, -1, -1]


def test_a_port_that_is_taken_is_named_with_the_key_that_asks_for_it() -> None:
    """No process of the other gateways remains."""
    poller = Poller()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoints = ["tcp://127.0.0.1:0", f"tcp://127.0.0.1:{taken.getsockname()[1]}"]
        served = {}, SlotPool(), str
        remote = RemoteWorkers(poller, print, endpoints, None, RULES, WantedCount(0, ("", None)), *served)
        with pytest.raises(BatchdError, match=r"^daemon\.pool_gateways: tcp://127\.0\.0\.1:.* cannot be listened on"):
            remote.start()
    remote.close()
    poller.close()


def test_a_gateway_that_is_killed_while_the_daemon_starts_is_replaced(monkeypatch) -> None:
    """It is killed before it listens, so no worker host can know its port."""
    pool = Pool()
    with monkeypatch.context() as faulty:
        faulty.setenv(VARIABLE, "gateway.starting=kill")
        pool.remote.gateways[0].spawn()
    first = pool.child()
    try:
        pool.remote.gateways[0].wait_listening()
        assert pool.remote.port != 0
        assert pool.child().pid != first.pid
    finally:
        pool.remote.close()
        pool.poller.close()
