"""Messages that travel together: in order, none lost, and never longer than a datagram."""

import socket

from hypothesis import given
from hypothesis import strategies as st

from batchd.core.events import OrderFilled, OrderWithdrawn
from batchd.core.work import NO_WORK
from batchd.pool.messages import (
    TO_DAEMON_FROM_GATEWAY,
    TO_GATEWAY,
    TOGETHER_MAX,
    FillRows,
    Outbox,
    SlotOrder,
    Together,
    messages_in,
)
from batchd.worker.messages import CHUNK_ROWS_MAX
from batchd_wire.channel import DATAGRAM_BYTES_MAX, receive_message, send_encoded
from batchd_wire.codec import NUMBER_MAX, Message


def results(number: int, reason_bytes: int = 0) -> OrderFilled:
    """Make a report about an order, as long as wanted."""
    return OrderFilled(11, 0, number, NO_WORK, [], "x" * reason_bytes)


def received(sent: list[bytes]) -> list[list[Message]]:
    """Decode what was sent: the messages of each datagram."""
    return [messages_in(TO_DAEMON_FROM_GATEWAY.decode(data), TO_DAEMON_FROM_GATEWAY) for data in sent]


def orders_in(sent: list[bytes]) -> list[list[int]]:
    """Return the order numbers of each datagram."""
    return [[message.order for message in datagram] for datagram in received(sent)]


def test_messages_of_a_round_are_one_message() -> None:
    """Nothing is sent before the end of the round, and nothing twice."""
    sent: list[bytes] = []
    outbox = Outbox(sent.append)
    for number in (1, 2, 3):
        outbox.add(results(number))
    assert sent == []
    outbox.flush()
    outbox.flush()
    assert orders_in(sent) == [[1, 2, 3]]
    assert isinstance(TO_DAEMON_FROM_GATEWAY.decode(sent[0]), Together)


def test_a_single_message_travels_as_it_is() -> None:
    """It costs no additional byte."""
    sent: list[bytes] = []
    outbox = Outbox(sent.append)
    outbox.add(results(1))
    outbox.flush()
    assert sent == [results(1).encode()]


def test_what_was_dropped_is_not_sent() -> None:
    """The process that it was for has ended; the next one gets none of its orders."""
    sent: list[bytes] = []
    outbox = Outbox(sent.append)
    outbox.add(results(1))
    outbox.clear()
    outbox.add(results(2))
    outbox.flush()
    assert orders_in(sent) == [[2]]


def test_the_longest_orders_of_a_round_fit_into_one_datagram() -> None:
    """An order of shared caches has every second row of a large batch, in as many runs."""
    runs = [(2 * row + (1 << 20), 1) for row in range(CHUNK_ROWS_MAX)]
    fill = FillRows(NUMBER_MAX, NUMBER_MAX, NUMBER_MAX, 1, 1 << 20, 1 << 20, runs)
    order = SlotOrder(fill.encode(), 1 << 20, is_proof=False)
    sent: list[bytes] = []
    outbox = Outbox(sent.append)
    for _ in range(TOGETHER_MAX + 1):
        outbox.add(order)
    outbox.flush()
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        counts = []
        for data in sent:
            send_encoded(one, data)
            counts.append(len(messages_in(receive_message(other, TO_GATEWAY)[0], TO_GATEWAY)))
    assert counts == [TOGETHER_MAX, 1]


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.integers(0, 16_000),
            st.just(DATAGRAM_BYTES_MAX),
        ),
        max_size=200,
    )
)
def test_any_messages_arrive_once_in_order_and_no_datagram_is_too_long(script) -> None:
    """None ends a round; a number is the length of a message's text, or its whole length."""
    sent: list[bytes] = []
    outbox = Outbox(sent.append)
    added: list[Message] = []
    for number, step in enumerate(script):
        if step is None:
            outbox.flush()
            assert received(sent) == [] or sum(map(len, received(sent))) == len(added)
        elif step == DATAGRAM_BYTES_MAX:
            added.append(_as_long_as_a_datagram(number))
            outbox.add(added[-1])
        else:
            added.append(results(number, step))
            outbox.add(added[-1])
    outbox.flush()

    datagrams = received(sent)
    assert [one for datagram in datagrams for one in datagram] == _plain(added)
    assert all(len(data) <= DATAGRAM_BYTES_MAX for data in sent)
    assert all(len(datagram) <= TOGETHER_MAX for datagram in datagrams)


def _as_long_as_a_datagram(number: int) -> Message:
    """Make the longest report that a channel carries."""
    bad = [(sample, "p" * 250, "r" * 1_500) for sample in range(74)]
    short = OrderFilled(11, 0, number, NO_WORK, bad, "x" * 256)
    return OrderFilled(11, 0, number, NO_WORK, bad, "x" * (256 + DATAGRAM_BYTES_MAX - len(short.encode())))


def _plain(messages: list[Message]) -> list[Message]:
    """The messages as a receiver gets them: their tuples are lists."""
    return [TO_DAEMON_FROM_GATEWAY.decode(message.encode()) for message in messages]


def test_other_messages_are_the_only_ones() -> None:
    """A side may send without an outbox."""
    assert messages_in(OrderWithdrawn(1, 2, 3), TO_DAEMON_FROM_GATEWAY) == [OrderWithdrawn(1, 2, 3)]
