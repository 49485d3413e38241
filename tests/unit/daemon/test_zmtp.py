"""ZeroMQ's protocol on the local socket: libzmq is understood, all else ends the connection."""

import errno
import fcntl
import select
import socket
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from batchd.daemon.local.zmtp import (
    COMMANDS_MAX,
    FRAMES_MAX,
    GREETING,
    READ_BYTES,
    READY,
    UNSENT_BYTES_MAX,
    ProtocolViolation,
    ZmtpConnection,
)
from batchd.runtime.limits import MESSAGE_BYTES_MAX, UNREAD_MAX
from batchd.runtime.poller import Poller
from support.kernel import watched_by
from support.waiting import PATIENCE_S, wait_until

PATIENCE_MS = int(PATIENCE_S * 1000)
BEGINNING = GREETING + READY
"""The other side's beginning differs in the socket's type only, which our side ignores."""


class Pair:
    """A connection, and the raw socket at its other end.

    With ``wanted``, what is sent is kept back, and the connection is added to it.
    """

    def __init__(self, stack: ExitStack, wanted: list[ZmtpConnection] | None = None) -> None:
        self.poller = stack.enter_context(closing(Poller()))
        self.received = 0
        self.theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.enter_context(self.theirs)
        ours.setblocking(False)
        self.connection = ZmtpConnection(
            self.poller, ours, ZmtpConnection.read, None if wanted is None else wanted.append
        )
        stack.callback(self.connection.close)

    def hear(self) -> bytes:
        """Receive what is there, or wait for it."""
        data = self.theirs.recv(1 << 20)
        self.received += len(data)
        return data

    def unsent(self, sent_bytes: int) -> int:
        """Of so many bytes, those that the kernel has not taken."""
        unread = int.from_bytes(fcntl.ioctl(self.theirs, termios.FIONREAD, bytes(4)), sys.byteorder)
        return sent_bytes - self.received - unread

    def say(self, words: bytes) -> list[list[bytes]]:
        """Send these bytes to the connection, and return the messages that it received."""
        heard = []
        for start in range(0, len(words), READ_BYTES):
            self.theirs.sendall(words[start : start + READ_BYTES])
            self.poller.dispatch()
            while (frames := self.connection.take()) is not None:
                heard.append(frames)
        return heard


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A pair on which nothing was sent."""
    with ExitStack() as stack:
        yield Pair(stack)


def frame(body: bytes, flags: int = 0) -> bytes:
    """A frame as ZeroMQ writes it."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | 2,)) + len(body).to_bytes(8) + body


def no_room(*_arguments: object, **_named: object) -> None:
    """Fail as epoll does."""
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_messages_are_heard_however_they_are_cut(pair: Pair, size: int) -> None:
    """Messages are short and long, of one frame and of several."""
    long = bytes(MESSAGE_BYTES_MAX)
    words = BEGINNING + frame(b"one") + frame(b"", 1) + frame(long[:300], 1) + frame(b"three") + frame(long)
    heard = [message for start in range(0, len(words), size) for message in pair.say(words[start : start + size])]

    assert heard == [[b"one"], [b"", long[:300], b"three"], [long]]


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x01\x00",
        b"\xff" + bytes(8) + b"\x7f\x01",
        GREETING.replace(b"NULL\0", b"CURVE"),
        GREETING + frame(b"a message"),
        GREETING + frame(b"\x05ERROR", 4),
        BEGINNING + b"\x08\x00",
        BEGINNING + frame(b"", 5),
        BEGINNING + frame(bytes(MESSAGE_BYTES_MAX + 1)),
        BEGINNING + frame(b"x", 1) * MESSAGE_BYTES_MAX,
        BEGINNING + frame(b"", 1) * (FRAMES_MAX + 1),
        BEGINNING + frame(b"\x01x", 4) * (COMMANDS_MAX + 1),
        GREETING + READY * (COMMANDS_MAX + 1),
        BEGINNING + b"\x02" + b"\xff" * 8,
    ],
    ids=[
        "http",
        "zmtp1",
        "zmtp2",
        "curve",
        "early",
        "error",
        "flags",
        "more",
        "long",
        "frames",
        "empty",
        "commands",
        "readies",
        "huge",
    ],
)
def test_what_is_not_zmtp_3_is_a_violation(pair: Pair, words: bytes) -> None:
    """The connection ends before it keeps much of them."""
    with pytest.raises(ProtocolViolation):
        pair.say(words)
    assert len(pair.connection._received) <= READ_BYTES + MESSAGE_BYTES_MAX


@given(st.lists(st.binary(max_size=300) | st.sampled_from([GREETING, READY, frame(b"x"), b"\x02"]), max_size=8))
def test_no_bytes_meet_a_bug_of_ours(parts: list[bytes]) -> None:
    """Any bytes are messages, or are not understood."""
    with ExitStack() as stack:
        pair = Pair(stack)
        try:
            for part in parts:
                pair.say(part)
        except ProtocolViolation:
            return


def test_commands_and_frames_up_to_the_bounds_are_understood(pair: Pair) -> None:
    """The bounds are for commands in each portion that is read, and for frames in each message."""
    assert pair.say(BEGINNING) == []
    for _ in range(3):
        assert pair.say(frame(b"\x01x", 4) * COMMANDS_MAX) == []
        assert pair.say(frame(b"", 1) * (FRAMES_MAX - 1) + frame(b"")) == [[b""] * FRAMES_MAX]


def test_a_ping_is_answered(pair: Pair) -> None:
    """The answer has the context of the ping, by RFC 37."""
    pair.theirs.recv(1 << 10)
    pair.say(BEGINNING + frame(b"\x04PING\x00\x10context", 4))

    assert pair.theirs.recv(1 << 10) == frame(b"\x04PONGcontext", 4)


def test_what_the_kernel_does_not_take_is_sent_later_and_too_much_of_it_not_at_all(pair: Pair) -> None:
    """Messages that were accepted are neither lost nor cut."""
    message = bytes(range(250)) * 10
    sent = 0
    while pair.connection.send(message):
        sent += 1
    assert sent > UNREAD_MAX
    expected = len(BEGINNING) + sent * len(frame(message))
    received = bytearray()
    while len(received) < expected:
        received += pair.theirs.recv(1 << 20)
        pair.poller.dispatch()

    assert received == BEGINNING + frame(message) * sent
    assert pair.connection.send(message)


def test_long_messages_that_are_left_unread_are_bounded_by_their_bytes(pair: Pair) -> None:
    """A few such messages are accepted; when they are read, as many again."""
    message = bytes(1 << 20)
    sent_bytes = len(BEGINNING)
    for _ in range(2):
        while pair.connection.send(message):
            sent_bytes += len(frame(message))
            assert pair.unsent(sent_bytes) <= UNSENT_BYTES_MAX
        assert UNSENT_BYTES_MAX - len(frame(message)) < pair.unsent(sent_bytes)
        while pair.received < sent_bytes:
            pair.hear()
            pair.poller.dispatch()


def test_the_end_of_the_other_side_is_noticed(pair: Pair) -> None:
    """A connection notices it while it sends, too."""
    pair.theirs.close()
    assert pair.connection.send(b"too late")
    pair.poller.dispatch()

    assert pair.connection.is_over


def test_a_connection_that_cannot_wait_from_its_start_ends(monkeypatch) -> None:
    """The kernel has no memory for the greeting nor for its watch; the loop closes it as ended."""
    with ExitStack() as stack:
        poller = stack.enter_context(closing(Poller()))
        _theirs, ours = (stack.enter_context(one) for one in socket.socketpair())
        ours.setblocking(False)
        monkeypatch.setattr(ZmtpConnection, "write_some", lambda _self, _data: 0)
        monkeypatch.setattr(poller, "wait_to_write", no_room)
        connection = ZmtpConnection(poller, ours, ZmtpConnection.read)
        poller.dispatch()
        assert connection.is_over

        connection.close()
        assert not watched_by(poller.fileno())


def test_a_connection_that_cannot_be_watched_for_writing_ends(pair: Pair, monkeypatch) -> None:
    """The daemon continues; the other side sees the end after all that was sent before."""
    with monkeypatch.context() as patch:
        patch.setattr(pair.poller, "wait_to_write", no_room)
        for _ in range(3 * UNREAD_MAX):
            assert pair.connection.send(bytes(10_000))
    pair.poller.dispatch()

    assert pair.connection.is_over
    while pair.theirs.recv(1 << 20):
        pass


def test_a_watch_for_writing_that_cannot_end_ends_later(pair: Pair, monkeypatch) -> None:
    """The next event on the connection ends it, and the connection works meanwhile."""
    sent_bytes = len(BEGINNING)
    while not pair.unsent(sent_bytes):
        pair.connection.send(bytes(10_000))
        sent_bytes += len(frame(bytes(10_000)))
    while not select.select([pair.poller], [], [], 0)[0]:
        pair.hear()
    with monkeypatch.context() as patch:
        patch.setattr(pair.poller, "wait_to_write", no_room)
        pair.poller.dispatch()
    assert not pair.unsent(sent_bytes)
    pair.poller.dispatch()

    assert not select.select([pair.poller], [], [], 0)[0]
    assert not pair.connection.is_over


def test_libzmq_understands_us(tmp_path) -> None:
    """A DEALER sends messages and gets the answers, short or long."""
    with ExitStack() as stack:
        poller = stack.enter_context(closing(Poller()))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "z"))
        listener.listen()
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        dealer.heartbeat_ivl = 50
        dealer.connect(f"ipc://{tmp_path / 'z'}")
        accepted, _ = listener.accept()
        accepted.setblocking(False)
        connection = ZmtpConnection(poller, accepted, ZmtpConnection.read)
        stack.callback(connection.close)
        for size in (0, 255, 256, MESSAGE_BYTES_MAX):
            dealer.send(bytes(size))
            assert wait_until(lambda: poller.dispatch() or connection.take(), "it is heard") == [bytes(size)]
            connection.send(bytes(3 * size))
            wait_until(lambda: poller.dispatch() or dealer.poll(0), "it is answered")
            assert dealer.recv() == bytes(3 * size)


@pytest.fixture
def wanted() -> list[ZmtpConnection]:
    """Connections with something to send."""
    return []


@pytest.fixture
def keeping(wanted) -> Iterator[Pair]:
    """A pair that keeps back what it is to send, after its beginning."""
    with ExitStack() as stack:
        pair = Pair(stack, wanted)
        pair.connection.flush()
        wanted.clear()
        yield pair


def test_messages_that_are_kept_back_are_sent_together(keeping: Pair, wanted, monkeypatch) -> None:
    """One write sends them in order; what the kernel does not take follows later."""
    pair, written = keeping, []
    write = ZmtpConnection.write_some
    monkeypatch.setattr(
        ZmtpConnection,
        "write_some",
        lambda one, data: written.append(len(data)) or write(one, data[: -(-len(data) // 2)]),
    )
    messages = [bytes([number]) * 200 for number in range(5)]
    for message in messages:
        assert pair.connection.send(message)
    assert (wanted, written) == ([pair.connection] * 5, [])
    assert pair.hear() == BEGINNING
    pair.connection.flush()
    pair.poller.dispatch()

    expected = b"".join(map(frame, messages))
    assert written == [len(expected), len(expected) // 2]
    while pair.unsent(len(BEGINNING) + len(expected)):
        pair.poller.dispatch()
    assert pair.hear() == expected


def test_what_was_kept_back_is_sent_before_the_end(keeping: Pair) -> None:
    """A refusal must arrive although the connection ends in the same round."""
    keeping.connection.send(b"refused")
    keeping.connection.close()

    assert keeping.theirs.recv(1 << 20) == BEGINNING + frame(b"refused")
