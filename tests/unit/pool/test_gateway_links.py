"""Registration in the gateway, and links whose connections end at unexpected moments."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import zmq

from batchd.core.events import LinkClosed
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool.gateway.links import CONNECTION_ENDED, UNREAD_MAX, Link, WorkerHosts, mismatch
from batchd.pool.messages import LINK_VERSION, TO_HOST, Admitted, Moved, Register, Rejected
from batchd.runtime.limits import HandshakeRate
from batchd.runtime.poller import Poller
from batchd_wire.codec import Message
from batchd_wire.codes import ErrorCode
from support.gateways import RULES
from support.waiting import PATIENCE_S, wait_until

REGISTER = Register(LINK_VERSION, "1.2.3", CONTENT_VERSION, "pod-1", "node-1", 7, 4, "x86_64")


class Events:
    """The events that the loop gets."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, str]] = []

    def begun(self, link: Link) -> None:
        self.told.append(("begun", link.number, ""))

    def admitted(self, link: Link) -> None:
        self.told.append(("admitted", link.number, ""))

    def frames_due(self, _link: Link, _message: Message) -> int:
        return 0

    def heard(self, link: Link, message: Message, _rows: list[memoryview]) -> None:
        self.told.append(("heard", link.number, type(message).__name__))

    def ended(self, link: Link, closed: LinkClosed) -> None:
        self.told.append(("ended", link.number, closed.reason))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def hosts(events) -> Iterator[WorkerHosts]:
    """An address on loopback, without keys."""
    with closing(Poller()) as poller:
        hosts = WorkerHosts(poller, None, events)
        hosts.rules = RULES
        hosts.listen("tcp://127.0.0.1:0", "test")
        yield hosts
        hosts.close()


@pytest.fixture
def connect(hosts) -> Iterator[Any]:
    """Connect a worker host."""
    with zmq.Context() as context:
        opened = []

        def connect():
            host = context.socket(zmq.DEALER)
            host.linger = 0
            host.connect(hosts.router.getsockopt_string(zmq.LAST_ENDPOINT))
            opened.append(host)
            return host

        yield connect
        for one in opened:
            one.close()


def read(hosts) -> None:
    """Wait for a message, and read all available ones."""
    assert hosts.router.poll(int(PATIENCE_S * 1000))
    hosts.receive({hosts.router: zmq.POLLIN})


def answer(host) -> Message:
    assert host.poll(PATIENCE_S * 1000)
    return TO_HOST.decode(host.recv())


def register(hosts, host, **differently: Any) -> Message:
    host.send(replace(REGISTER, **differently).encode())
    read(hosts)
    return answer(host)


def late_registration(hosts, connect) -> list[zmq.Frame]:
    """An unread ``Register`` of a connection that has ended."""
    leaving = connect()
    leaving.send(REGISTER.encode())
    assert hosts.router.poll(int(PATIENCE_S * 1000))
    frames = hosts.router.recv_multipart(copy=False)
    leaving.close()
    wait_until(lambda: hosts.note_ends() or not len(hosts.guard), "the connection has ended")
    return frames


def test_a_link_that_begins_after_the_report_of_its_end_is_ended_all_the_same(hosts, connect, events) -> None:
    """It ends at once if ZeroMQ knows it, else after some ticks: no second report follows."""
    routing, head = late_registration(hosts, connect)

    hosts._register(routing.bytes, head, REGISTER)
    for _ in range(3):
        hosts.tick()

    assert sorted(what for what, _link, _why in events.told) == ["admitted", "begun", "ended"]
    assert {why for what, _link, why in events.told if what == "ended"} == {CONNECTION_ENDED}
    assert not hosts.links.by_number
    assert not hosts.links.by_routing
    assert not hosts.links.by_descriptor


def test_a_living_link_with_the_descriptor_of_a_dead_one_gets_its_own_end(hosts, connect, events) -> None:
    """A late ``Register`` of a dead connection has a number that another connection uses now."""
    living = connect()
    first = register(hosts, living)
    assert isinstance(first, Admitted)
    link = hosts.links.by_number[first.link]
    living.send(REGISTER.encode())
    assert hosts.router.poll(int(PATIENCE_S * 1000))
    _routing, head = hosts.router.recv_multipart(copy=False)

    hosts._register(b"ghost", head, REGISTER)

    assert ("ended", link.number, CONNECTION_ENDED) in events.told
    assert answer(living) == LinkClosed(link.number, CONNECTION_ENDED, is_final=False)
    again = register(hosts, living)
    assert isinstance(again, Admitted)
    assert list(hosts.links.by_number) == [again.link]


def test_a_worker_host_that_reads_nothing_is_disconnected(hosts, connect, events) -> None:
    """Its orders go to other hosts; ZeroMQ reports that its queue is full."""

    class Full:
        """A ROUTER whose queues are full."""

        def send_multipart(self, *_frames: object, **_options: object) -> None:
            raise zmq.Again

    first = register(hosts, connect())
    assert isinstance(first, Admitted)
    link, router = hosts.links.by_number[first.link], hosts.router
    hosts.router = cast("zmq.Socket[bytes]", Full())
    hosts.send(link, Admitted(1, 1.0))
    hosts.send(link, Admitted(1, 1.0))
    hosts.router = router

    assert events.told[2:] == [("ended", link.number, f"it left {UNREAD_MAX} messages unread")]


def test_two_connections_with_one_name_are_two_links(hosts, events) -> None:
    """ZeroMQ keeps the first; a name gives no permission."""
    with zmq.Context() as context:
        pair = [context.socket(zmq.DEALER) for _ in range(2)]
        for one in pair:
            one.linger = 0
            one.setsockopt(zmq.IDENTITY, b"same")
            one.connect(hosts.router.getsockopt_string(zmq.LAST_ENDPOINT))
            one.send(REGISTER.encode())
        read(hosts)
        wait_until(lambda: hosts.receive({}) or any(one.poll(10) for one in pair), "one of them is admitted")
        assert [what for what, _link, _why in events.told] == ["begun", "admitted"]
        for one in pair:
            one.close()


def test_a_host_that_registers_too_often_waits(hosts, connect) -> None:
    """This limit is for hosts without keys; with keys ZeroMQ's handshakes are limited."""
    hosts._rate = HandshakeRate(burst=1, per_s=0.0001)
    assert isinstance(register(hosts, connect()), Admitted)
    refused = register(hosts, connect())
    assert isinstance(refused, Rejected)
    assert (refused.error, refused.is_final) == (ErrorCode.TOO_OFTEN, False)


@pytest.mark.parametrize("field", ["version", "content_version"])
def test_versions_must_be_equal_and_the_error_names_both(field) -> None:
    """A newer version is as wrong as an older one; the program's version alone does not matter."""
    fields = {name: getattr(REGISTER, name) for name in REGISTER.field_names}
    assert mismatch(Register(**{**fields, "batchd": "9.9"})) == ""
    for other in (fields[field] - 1, fields[field] + 1):
        text = mismatch(Register(**{**fields, field: other, "batchd": "9\x1b.9"}))
        assert f"version {fields[field]}" in text
        assert f"version {other}" in text
        assert "(9?.9)" in text


def test_a_host_is_sent_to_the_gateway_with_fewer_links_and_admitted_here_if_it_returns(hosts, connect, events) -> None:
    """The host names the gateway that did not admit it."""
    assert isinstance(register(hosts, connect()), Admitted)
    hosts.placement.tell([1, 0])
    host = connect()

    assert register(hosts, host) == Moved(1)
    assert [what for what, _link, _why in events.told] == ["begun", "admitted"]
    assert isinstance(register(hosts, host, not_at=[1]), Admitted)


def test_a_gateway_with_its_share_of_the_hosts_of_a_key_sends_the_next_one_elsewhere(hosts, connect) -> None:
    """The host is refused if no other gateway admits it, with the limit of each."""
    hosts.rules = replace(RULES, links_per_key=1, gateways=2)
    hosts.placement.tell([0, 9])
    assert isinstance(register(hosts, connect()), Admitted)
    assert register(hosts, connect()) == Moved(1)
    refused = register(hosts, connect(), not_at=[1])
    assert isinstance(refused, Rejected)
    assert refused.text.endswith("has 1 worker host already, and there may be 1 of one key at each of 2 gateways")
    assert not refused.is_final


def test_a_host_of_another_version_is_refused_and_not_sent_elsewhere(hosts, connect) -> None:
    """Every gateway would refuse it."""
    hosts.placement.tell([0, 0])
    hosts.placement.tell([5, 0])
    refused = register(hosts, connect(), version=LINK_VERSION + 1)
    assert isinstance(refused, Rejected)
