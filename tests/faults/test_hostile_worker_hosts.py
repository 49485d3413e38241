"""Worker hosts that send invalid messages: disconnected with a reason, and refused for a while.

Whatever they send, no slot changes, and another worker host continues.
"""

import itertools
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from batchd.core.actions import WithdrawOrder
from batchd.core.events import (
    HostLeaves,
    LinkBegun,
    LinkClosed,
    OrderFilled,
    OrderProved,
    StreamOpened,
    StreamRefused,
    WorkerDown,
    WorkerUp,
)
from batchd.core.fleet import REMOTE_NUMBERS
from batchd.core.work import NO_WORK
from batchd.data.pipeline.options import CONTENT_VERSION
from batchd.pool.gateway.links import LINK_NUMBER_BITS
from batchd.pool.messages import (
    INDEX_PART_BYTES,
    INDEX_PARTS_AHEAD,
    LINK_VERSION,
    ROW_FRAME_BYTES,
    TO_GATEWAY_FROM_HOST,
    AskIndex,
    FillRows,
    HostServe,
    Register,
    Rejected,
)
from batchd.worker.messages import ForgetStream
from batchd_wire.channel import DATAGRAM_BYTES_MAX
from batchd_wire.codec import Message
from batchd_wire.codes import ErrorCode
from batchd_wire.views import field_array
from support.gateways import (
    LAYOUT,
    WorkerHost,
    filled_slot,
    frames_of,
    random_rows,
    serve_message,
    serving_gateway,
)
from support.good_trainers import descriptor_count, private_bytes
from support.hostile_messages import encode, hostile_messages, mutated
from support.hostile_streams import COMMAND, frame
from support.waiting import PATIENCE_S, wait_until

ROWS = frames_of(random_rows(16, seed=7), 0, 4)
"""The hostile host's task: rows 0 to 4, as order 9 of its worker 0."""
GROWTH_BYTES_MAX = 128 << 20
LOST_BYTES_MAX = 3 << 10
"""Memory that libzmq 4.3.5 leaks for a connection with a foreign routing id; see SECURITY.md."""
GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL").ljust(64, b"\0")
READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", COMMAND)
MORE, LONG = 1, 2
_hosts = (f"127.{number >> 8 & 127}.{number & 255}.{9 + (number >> 15)}" for number in itertools.count(512))


slot = pytest.fixture(filled_slot, scope="module")
gateway = pytest.fixture(serving_gateway, scope="module")  # one for all tests: no test ends it


@pytest.fixture
def good(gateway, slot) -> Iterator[None]:
    """Connect a correct worker host; at the end it fills its order, and no other byte changed."""
    before, page = slot.read(), random_rows(16)
    good = gateway.linked()
    gateway.fill(good, 1, 8, 8)
    yield
    good.answer(1, *frames_of(page, 8, 8))
    assert gateway.hear_of(good.link, OrderFilled).order == 1
    assert slot.rows(8, 8) == frames_of(page, 8, 8)
    assert slot.rows(0, 8) == frames_of(bytearray(before), 0, 8)
    good.close()
    gateway.hear_of(good.link, LinkClosed)


@pytest.fixture
def hostile(gateway, good) -> Iterator[WorkerHost]:  # noqa: ARG001  it is there first
    """Connect a worker host of another address, with an order of four rows."""
    host = gateway.linked(source=next(_hosts))
    host.hear(HostServe)
    gateway.fill(host, 9, 0, 4)
    host.hear(FillRows)
    yield host
    host.close()


def rows_with_size(size: int) -> list[bytes]:
    """Return rows with one size that exceeds its room."""
    page = random_rows(16)
    sizes = next(field for field in LAYOUT.fields if field.name == "text_length")
    field_array(memoryview(page), sizes, LAYOUT.rows)[2] = size
    return frames_of(page, 0, 4)


def filled(host: WorkerHost, order: int = 9, worker: int = 0, **said: Any) -> OrderFilled:
    return OrderFilled(host.link, worker, order, **{"work": NO_WORK, "bad": [], "hopeless": "", **said})


CUT_OFF: dict[str, tuple[Callable[[WorkerHost], list[bytes]], str]] = {
    "no rows": (lambda host: [filled(host).encode()], r"^0 frames of rows came instead of 6$"),
    "a frame too few": (lambda host: [filled(host).encode(), *ROWS[:-1]], r"^5 frames of rows came instead of 6$"),
    "a frame too many": (
        lambda host: [filled(host).encode(), *ROWS, b""],
        r"^7 frames came with OrderFilled, 1 too many$",
    ),
    "a short frame": (
        lambda host: [filled(host).encode(), *ROWS[:-1], ROWS[-1][:-1]],
        r"^frame 5 of the rows has 15 bytes",
    ),
    "a long frame": (
        lambda host: [filled(host).encode(), *ROWS[:-1], ROWS[-1] + b"!"],
        r"^frame 5 of the rows has 17 bytes",
    ),
    "frames swapped": (lambda host: [filled(host).encode(), *ROWS[::-1]], r"^frame 0 of the rows has 16 bytes"),
    "a size too large": (
        lambda host: [filled(host).encode(), *rows_with_size(41)],
        r"^field 'text': row 2 has the sizes \[41\]",
    ),
    "a negative size": (
        lambda host: [filled(host).encode(), *rows_with_size(-1)],
        r"^field 'text': row 2 has the sizes \[-1\]",
    ),
    "an order never given": (
        lambda host: [filled(host, 77).encode(), *ROWS],
        r"^6 frames came with OrderFilled, 6 too many",
    ),
    "an order never given, without rows": (
        lambda host: [filled(host, 77).encode()],
        r"^it sent rows of order 77 at worker 0",
    ),
    "another worker": (
        lambda host: [filled(host, worker=1).encode()],
        r"^it sent rows of order 9 at worker 1, which has none$",
    ),
    "endless work": (
        lambda host: [filled(host, work=NO_WORK._replace(busy_us=1 << 62)).encode(), *ROWS],
        r"^a worker says it worked for longer than",
    ),
    "a report too long for the daemon": (
        lambda host: [filled(host, bad=[(1, "", "x" * 16_000)] * 9).encode(), *ROWS],
        rf"^a message of \d+ bytes; {DATAGRAM_BYTES_MAX} are the most$",
    ),
    "nonsense": (lambda _host: [b"\x91\x7f"], "^message number 127 is not expected here$"),
    "nothing": (lambda _host: [b""], "^not msgpack"),
    "the gateway's words": (
        lambda host: [LinkClosed(host.link, "", is_final=True).encode()],
        "^message number 78 is not",
    ),
    "a gateway's report to the daemon": (
        lambda host: [OrderProved(host.link, 0, 9, "").encode()],
        "^message number 90 is not",
    ),
    "a second registration": (
        lambda _host: [Register(LINK_VERSION, "", CONTENT_VERSION, "", "", 1, 1, "").encode()],
        "^it registered twice over one connection$",
    ),
    "frames with other messages": (
        lambda host: [HostLeaves(host.link).encode(), b"x"],
        "^1 frames came with HostLeaves, 1 too many$",
    ),
    "a worker twice": (lambda host: [WorkerUp(host.link, 0, "").encode()], "^its worker 0 started twice"),
    "a number of another link": (
        lambda host: [WorkerUp(host.link, REMOTE_NUMBERS, "").encode()],
        f"^its worker has the number {REMOTE_NUMBERS}, which no worker has$",
    ),
}


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("name", CUT_OFF)
def test_a_worker_host_that_sends_what_no_correct_one_does_is_cut_off_with_the_reason(gateway, hostile, name) -> None:
    """Both sides get the reason; for a while the gateway refuses the host."""
    words, reason = CUT_OFF[name]
    hostile.socket.send_multipart(words(hostile))

    down = gateway.hear(LinkClosed)
    assert down.link == hostile.link
    assert re.search(reason, down.reason), down.reason
    assert hostile.hear(LinkClosed) == LinkClosed(hostile.link, down.reason, is_final=False)
    answer = hostile.register()
    assert isinstance(answer, Rejected)
    assert (answer.error, answer.is_final) == (ErrorCode.TOO_OFTEN, False)


def test_a_part_that_no_index_has_is_asked_for_once(gateway, hostile) -> None:
    """The digest is right, and the offset is wrong."""
    gateway.serve(serve_message(2, "other"), b"x" * 100)
    digest = hostile.hear(HostServe).digest
    hostile.send(AskIndex(hostile.link, digest, 1))
    assert gateway.hear(LinkClosed).reason == "an index of 100 bytes has no part at 1"
    gateway.send(ForgetStream(2))


def test_messages_of_foreign_links_change_nothing(gateway, hostile) -> None:
    """The host cannot guess another link's number, and the right number has no effect either."""
    others = [hostile.link - 1, hostile.link + 1, 0, 1 << LINK_NUMBER_BITS]
    for other in others:
        hostile.socket.send_multipart(
            [OrderFilled(other, 0, 1, NO_WORK, [], "").encode(), *frames_of(random_rows(16), 8, 1)]
        )
        hostile.send(WorkerUp(other, 5, ""))
        assert [hostile.hear(LinkClosed).link for _ in range(2)] == [other] * 2
    hostile.send(WorkerUp(hostile.link, 5, ""))
    assert gateway.hear(WorkerUp).link == hostile.link
    hostile.close()
    gateway.hear(LinkClosed)


def test_more_workers_than_registered_are_too_many(gateway, hostile) -> None:
    """The host registered with four."""
    for worker in (1, 2, 3, 4):
        hostile.send(WorkerUp(hostile.link, worker, ""))
    for _ in range(3):
        gateway.hear(WorkerUp)
    assert gateway.hear(LinkClosed).reason == "it has more workers than the 4 it registered with"


def test_a_worker_host_that_asks_for_an_index_and_reads_nothing_is_cut_off(gateway, hostile) -> None:
    """A few parts are on their way, a few more may wait; the rest exceeds the limit."""
    descriptor = os.memfd_create("test-index", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 64 << 20)
    gateway.send(serve_message(3, "large"), descriptor)
    os.close(descriptor)
    digest = hostile.hear(HostServe).digest
    for part in range(64):
        hostile.send(AskIndex(hostile.link, digest, part * INDEX_PART_BYTES))
    assert (
        gateway.hear(LinkClosed).reason == f"it asked for more than {INDEX_PARTS_AHEAD} parts of each index at a time"
    )
    gateway.send(ForgetStream(3))


def test_a_frame_longer_than_any_is_not_read(gateway, hostile) -> None:
    """ZeroMQ ends the connection, and the daemon gets a message about it."""
    hostile.socket.send_multipart([filled(hostile).encode(), bytes(ROW_FRAME_BYTES + 100)])
    assert gateway.hear(LinkClosed) == LinkClosed(hostile.link, "its connection ended", is_final=False)


def test_late_rows_of_any_length_are_dropped(gateway, hostile) -> None:
    """The rows belong to a withdrawn order: the link stays."""
    gateway.send(WithdrawOrder(hostile.link, 0, 9))
    gateway.hear_any()
    hostile.hear_all()
    hostile.socket.send_multipart([filled(hostile).encode(), b"x", b"yy"])
    assert gateway.hear(OrderFilled).order == 9
    hostile.close()
    gateway.hear(LinkClosed)


def connect(gateway, source) -> socket.socket:
    """Open a connection below ZeroMQ that can carry messages."""
    connection = socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S, (source, 0))
    connection.sendall(GREETING + READY)
    heard = b""
    while b"READY" not in heard:
        heard += connection.recv(1 << 10)
    return connection


FLOODS = {
    "nonsense": frame(b"\x91\x7f"),
    "news": b"",
    "a message of tiny frames that never ends": frame(b"x", MORE),
    "a message of long frames that never ends": frame(bytes(1 << 20), MORE | LONG),
}


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("is_linked", [True, False], ids=["registered", "a stranger"])
def test_a_flood_ends_and_its_memory_with_it(gateway, good, name, is_linked) -> None:  # noqa: ARG001  it goes on
    """The host has no order, so it may have nothing large unread."""
    before = private_bytes(gateway.child.pid)
    with connect(gateway, next(_hosts)) as connection:
        link = 0
        if is_linked:
            registered = Register(LINK_VERSION, "1", CONTENT_VERSION, "flood", "", 1, 1, "")
            connection.sendall(frame(registered.encode()))
            link = gateway.hear(LinkBegun).link
        words = FLOODS[name] or frame(StreamOpened(link, 1).encode())
        words *= max(1, (1 << 16) // len(words))
        flood(connection, words)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if is_linked:
        wait_until(lambda: isinstance(gateway.hear_any(), LinkClosed), "its link is down")
    wait_until(lambda: private_bytes(gateway.child.pid) - before < GROWTH_BYTES_MAX, "its memory is freed")


def flood(connection, words) -> None:
    """Send until the connection is closed, and discard the answers."""
    connection.setblocking(False)
    until_s = time.monotonic() + PATIENCE_S
    with suppress(ConnectionError):
        while True:
            readable, writable, _ = select.select([connection], [connection], [], PATIENCE_S)
            if readable and not connection.recv(1 << 20):
                return
            if writable:
                connection.send(words)
            assert time.monotonic() < until_s, "the gateway did not end the flood"


def what_a_host_says(host) -> list[Message]:
    """Return one correct message of each kind but ``Register``, and an incorrect one."""
    link = host.link
    return [
        AskIndex(link, sha256(b"an index").hexdigest(), 0),
        StreamOpened(link, 1),
        StreamRefused(link, 1, "no such folder"),
        WorkerUp(link, 1, "libjpeg 3"),
        WorkerDown(link, 0, "signal 9"),
        filled(host, bad=[(3, "a.jpg", "cut")]),
        filled(host, 77),
        HostLeaves(link),
    ]


def say_mutated(gateway, chance) -> None:
    """Send mutated messages of a worker host with an order, with random frames after them."""
    with with_an_order(gateway) as host:
        corpus = [message.encode() for message in what_a_host_says(host)]
        for _ in range(30):
            words = chance.choice(corpus) if chance.random() < 0.3 else mutated(corpus, chance)
            host.socket.send_multipart([words, *random_frames(chance)])


def say_hostile(gateway, chance) -> None:
    """Send messages whose fields are at their limits or of other types, with the host's numbers."""

    @seed(chance.getrandbits(64))
    @settings(max_examples=5, database=None, deadline=None, phases=[Phase.generate])
    @given(st.lists(hostile_messages(TO_GATEWAY_FROM_HOST), max_size=20))
    def say(messages):
        with with_an_order(gateway) as host:
            known = {"link": host.link, "worker": 0, "order": 9, "stream": 1}
            for message in messages:
                host.socket.send_multipart([encode(message, known), *random_frames(chance)])

    say()


def say_below_zeromq(gateway, chance) -> None:
    """Send damaged bytes of a good worker host."""
    good = [GREETING + READY, frame(Register(LINK_VERSION, "1", CONTENT_VERSION, "spoilt", "", 1, 1, "").encode())]
    words = [*good, frame(WorkerUp(1, 0, "").encode()), frame(b"x" * 300, MORE | LONG), frame(b"PING", COMMAND)]
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S, (next(_hosts), 0)) as connection:
        with suppress(ConnectionError):
            for part in good[: chance.randrange(len(good) + 1)]:
                connection.sendall(part)
            for _ in range(20):
                connection.sendall(mutated(words, chance))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def with_an_order(gateway) -> Iterator[WorkerHost]:
    """Connect a worker host of another address, with an order; at the end it disconnects."""
    host = gateway.linked(source=next(_hosts))
    host.hear(HostServe)
    gateway.fill(host, 9, 0, 4)
    host.hear(FillRows)
    yield host
    host.close()
    gateway.hear_of(host.link, LinkClosed)


def random_frames(chance) -> list[bytes]:
    """Return random frames that may follow a message."""
    return [chance.randbytes(chance.choice([0, 16, 40])) for _ in range(chance.choice([0, 0, 1, 6]))]


def attack(gateway, say, chance, seconds) -> None:
    """Attack once, and repeat until the time is over; the gateway is unchanged afterwards."""
    say(gateway, chance)
    descriptors, before = descriptor_count(gateway.child.pid), private_bytes(gateway.child.pid)
    until_s, turns = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        say(gateway, chance)
        gateway.hear_what_there_is()
        turns += 1
    wait_until(lambda: descriptor_count(gateway.child.pid) <= descriptors, "its connections are closed")
    may_be_lost = turns * LOST_BYTES_MAX if say is say_below_zeromq else 0
    assert private_bytes(gateway.child.pid) - before < GROWTH_BYTES_MAX + may_be_lost


SAYING = [say_mutated, say_hostile, say_below_zeromq]


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("say", SAYING)
@pytest.mark.parametrize("number", range(3))
def test_random_messages_end_no_gateway(gateway, good, say, number) -> None:  # noqa: ARG001  it goes on
    """The test sends a few of each kind."""
    attack(gateway, say, Random(number), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("say", SAYING)
def test_random_messages_end_no_gateway_for_long(gateway, good, say) -> None:  # noqa: ARG001  it goes on
    """The test sends each kind for five minutes."""
    attack(gateway, say, Random(0), 300)
