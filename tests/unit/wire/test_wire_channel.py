"""Messages and descriptors over a socket pair, and the names in a runtime directory."""

import fcntl
import os
import re
import socket
from itertools import count
from pathlib import Path

import pytest

from batchd.core.work import Work
from batchd.worker.messages import (
    CHUNK_ROWS_MAX,
    CHUNKS_AT_ONCE,
    HOPELESS_BYTES_MAX,
    LONG_REASON_BYTES_MAX,
    LONG_REASONS_MAX,
    PATH_BYTES_MAX,
    REASON_BYTES_MAX,
    SLOW_LISTED_MAX,
    TO_DAEMON_FROM_WORKER,
    TO_WORKER,
    Chunk,
    ChunksFilled,
    FillChunks,
    Quarantine,
)
from batchd_wire.channel import (
    DATAGRAM_BYTES_MAX,
    DESCRIPTORS_MAX,
    SEND_BUFFER_BYTES,
    ChannelClosed,
    receive_message,
    send_message,
)
from batchd_wire.codec import MalformedMessage
from batchd_wire.messages import TO_TRAINER_LIFELINE, Hello, Refused, SlotShared, Welcome
from batchd_wire.runtime import (
    SOCKET_PATH_BYTES_MAX,
    RuntimeDirectory,
    TcpAddress,
    candidate_directories,
    parse_address,
    runtime_directory,
    user_directory,
)

SHARED = SlotShared(slot=3, slot_bytes=4096)


@pytest.fixture
def pair():
    """Two non-blocking ends, so no test can wait for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def pipe():
    """A descriptor to pass, and the other end, which shows when its last copy is closed."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    os.close(reading)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough


def is_closed_everywhere(reading: int) -> bool:
    """The pipe is at end of file: no process holds the writing end."""
    try:
        return os.read(reading, 1) == b""
    except BlockingIOError:
        return False


def test_a_message_arrives_with_its_descriptor(pair, pipe) -> None:
    """The receiver gets and owns a new descriptor for the same file."""
    ours, theirs = pair
    reading, writing = pipe
    send_message(ours, SHARED, [writing])

    message, (received,) = receive_message(theirs, TO_TRAINER_LIFELINE)

    assert message == SHARED
    assert received != writing
    os.close(writing)
    os.write(received, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(received)
    assert is_closed_everywhere(reading)


def test_descriptors_arrive_close_on_exec(pair) -> None:
    """A program that the trainer starts later inherits no slot."""
    ours, theirs = pair
    inheritable = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    send_message(ours, SHARED, [inheritable] * DESCRIPTORS_MAX)

    _message, received = receive_message(theirs, TO_TRAINER_LIFELINE)

    assert len(received) == DESCRIPTORS_MAX
    assert all(fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for descriptor in received)
    for descriptor in (inheritable, *received):
        os.close(descriptor)


def test_messages_keep_their_order_and_their_borders(pair) -> None:
    """One datagram is one message, whatever follows it."""
    ours, theirs = pair
    sent = [Welcome(version=number, secret=bytes(number)) for number in range(20)]
    for message in sent:
        send_message(ours, message)

    assert [receive_message(theirs, TO_TRAINER_LIFELINE) for _ in sent] == [(message, []) for message in sent]


LONGEST = Welcome(1, bytes(DATAGRAM_BYTES_MAX - 8)).encode()
NO_MESSAGES = [b"\xff", b"\xc0", Hello(1, "x", 2).encode(), SHARED.encode() + b"\x00", SHARED.encode()[:-1]]


@pytest.mark.parametrize(
    ("data", "copies", "words"),
    [
        *((data, DESCRIPTORS_MAX, None) for data in NO_MESSAGES),
        (LONGEST + b"\xc0", 1, "too long"),
        (SHARED.encode(), DESCRIPTORS_MAX + 1, "too many descriptors"),
        (SHARED.encode(), 4 * DESCRIPTORS_MAX, "too many descriptors"),
    ],
    ids=[*"abcde", "truncated", "too many", "far too many"],
)
def test_what_is_no_message_is_refused_and_its_descriptors_are_closed(pair, pipe, data, copies, words) -> None:
    """Otherwise, a peer could fill the table of descriptors with nonsense.

    The beginning of a truncated datagram might be a message; it is not read as one.
    """
    ours, theirs = pair
    reading, writing = pipe
    before = open_descriptors()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    assert len(LONGEST) == DATAGRAM_BYTES_MAX
    socket.send_fds(ours, [data], [writing] * copies)

    with pytest.raises(MalformedMessage, match=words):
        receive_message(theirs, TO_TRAINER_LIFELINE)

    assert open_descriptors() == before
    os.close(writing)
    assert is_closed_everywhere(reading)


def test_a_bad_message_leaves_the_next_one_whole(pair) -> None:
    """The caller decides whether to keep the connection to such a peer."""
    ours, theirs = pair
    ours.send(b"\xc1" * 100)
    send_message(ours, SHARED)

    with pytest.raises(MalformedMessage):
        receive_message(theirs, TO_TRAINER_LIFELINE)
    assert receive_message(theirs, TO_TRAINER_LIFELINE) == (SHARED, [])


def test_the_longest_message_arrives(pair) -> None:
    """The limit is exact to the byte; sending a longer message is a bug of ours."""
    ours, theirs = pair
    longest = Welcome(1, bytes(DATAGRAM_BYTES_MAX - 8))
    send_message(ours, longest)

    assert receive_message(theirs, TO_TRAINER_LIFELINE) == (longest, [])
    with pytest.raises(AssertionError, match=r"a message of \d+ bytes"):
        send_message(ours, Welcome(1, bytes(DATAGRAM_BYTES_MAX - 7)))


def test_a_chunk_of_nothing_but_bad_samples_fits_into_a_message(pair) -> None:
    """Paths and reasons are as long as a worker sends them."""
    ours, theirs = pair
    reasons = [LONG_REASON_BYTES_MAX] * LONG_REASONS_MAX + [REASON_BYTES_MAX] * (CHUNK_ROWS_MAX - LONG_REASONS_MAX)
    bad = [(1 << 62, "p" * PATH_BYTES_MAX, "r" * reason_bytes) for reason_bytes in reasons]
    slow = [(1 << 62, "p" * PATH_BYTES_MAX, 1 << 62)] * SLOW_LISTED_MAX
    work = Work(*[1 << 62] * 5, [1 << 62] * 64, *[1 << 62] * 4, slow, *[1 << 62] * 3)
    send_message(ours, ChunksFilled([1 << 62] * CHUNKS_AT_ONCE, work, bad, "h" * HOPELESS_BYTES_MAX))

    message, _none = receive_message(theirs, TO_DAEMON_FROM_WORKER)

    assert len(message.bad) == CHUNK_ROWS_MAX


def test_as_many_chunks_as_are_ordered_at_once_fit_into_a_message(pair) -> None:
    """Their rows are scattered, and each row has a place in a mailbox."""
    ours, theirs = pair
    runs, places = [(1 << 20, 1)] * CHUNK_ROWS_MAX, [1 << 20] * CHUNK_ROWS_MAX
    chunk = Chunk(1 << 62, 1 << 62, 1 << 62, 1 << 62, runs, places)
    send_message(ours, FillChunks(1, [chunk] * CHUNKS_AT_ONCE, is_packed=False))

    message, _none = receive_message(theirs, TO_WORKER)

    assert [Chunk(*one)._replace(runs=runs, share=(0, 0)) for one in message.chunks] == [chunk] * CHUNKS_AT_ONCE


def test_end_of_file_is_channel_closed(pair) -> None:
    """Messages that were sent before the end are still read."""
    ours, theirs = pair
    send_message(ours, SHARED)
    ours.close()

    assert receive_message(theirs, TO_TRAINER_LIFELINE) == (SHARED, [])
    for _again in range(2):
        with pytest.raises(ChannelClosed):
            receive_message(theirs, TO_TRAINER_LIFELINE)


def test_a_peer_that_goes_without_reading_is_channel_closed(pair) -> None:
    """The kernel calls it a reset; here it means the same."""
    ours, theirs = pair
    send_message(theirs, SHARED)
    ours.close()

    with pytest.raises(ChannelClosed):
        receive_message(theirs, TO_TRAINER_LIFELINE)


@pytest.mark.parametrize("copies", [0, 1])
def test_sending_to_a_closed_end_is_channel_closed(pair, pipe, copies) -> None:
    """This holds with and without descriptors, which stay open at the sender."""
    ours, theirs = pair
    reading, writing = pipe
    theirs.close()

    with pytest.raises(ChannelClosed):
        send_message(ours, SHARED, [writing] * copies)
    os.close(writing)
    assert is_closed_everywhere(reading)


def test_descriptors_in_transit_to_a_closed_end_are_closed(pair, pipe) -> None:
    """The kernel closes them, without a garbage collector."""
    ours, theirs = pair
    reading, writing = pipe
    send_message(ours, SHARED, [writing])
    os.close(writing)

    theirs.close()

    assert is_closed_everywhere(reading)


def fill(channel: socket.socket) -> int:
    """Send until the channel is full; return the number of messages sent."""
    for sent in count():
        try:
            send_message(channel, Welcome(sent, bytes(1000)))
        except BlockingIOError:
            return sent
    raise AssertionError("numbers never end")


def test_a_full_channel_refuses_and_an_empty_one_too(pair) -> None:
    """Neither side ever waits on a channel that it made non-blocking.

    No part of the refused message is sent.
    """
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        receive_message(theirs, TO_TRAINER_LIFELINE)
    sent = fill(ours)
    assert sent > 0

    versions = [receive_message(theirs, TO_TRAINER_LIFELINE)[0].version for _ in range(sent)]

    assert versions == list(range(sent))
    with pytest.raises(BlockingIOError):
        receive_message(theirs, TO_TRAINER_LIFELINE)


def test_a_channel_with_a_deadline_times_out(pair) -> None:
    """The client waits for its welcome this way."""
    pair[1].settimeout(0.001)

    with pytest.raises(TimeoutError):
        receive_message(pair[1], TO_TRAINER_LIFELINE)


def test_orders_are_refused_on_a_lifeline(pair) -> None:
    """Each receiver names the vocabulary that it reads."""
    send_message(pair[0], Quarantine(1, [2]))

    with pytest.raises(MalformedMessage, match="number 36 is not expected here"):
        receive_message(pair[1], TO_TRAINER_LIFELINE)


def test_a_runtime_directory_has_the_names_that_are_drawn() -> None:
    """Operators see these names with ls."""
    names = runtime_directory(Path("/run/batchd"))

    assert names.lifeline_path == Path("/run/batchd/lifeline.sock")
    assert names.zmq_path == Path("/run/batchd/batchd.sock")
    assert names.zmq_endpoint == "ipc:///run/batchd/batchd.sock"
    assert names.lock_path == Path("/run/batchd/lock")
    assert names.address == "ipc:///run/batchd"


@pytest.mark.parametrize(
    "address", ["ipc:///run/batchd", "/run/batchd", "/run/batchd/", "/run/./batchd", "/run/x/../batchd"]
)
def test_an_address_is_a_directory_with_or_without_its_scheme(address) -> None:
    """Each notation names the same directory."""
    assert parse_address(address) == RuntimeDirectory(Path("/run/batchd"))
    assert parse_address(parse_address(address).address) == RuntimeDirectory(Path("/run/batchd"))


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("bigbox:7070", "bigbox", 7070), ("10.0.0.7:70", "10.0.0.7", 70), ("[fe80::1]:7070", "fe80::1", 7070)],
)
def test_a_host_and_a_port_need_no_scheme(address, host, port) -> None:
    """A user who writes both means no directory; a directory of such a name needs a slash."""
    assert parse_address(address) == parse_address(f"tcp://{address}") == TcpAddress(host, port)
    if "[" not in address:
        assert isinstance(parse_address(f"./{address}"), RuntimeDirectory)


def test_a_relative_address_is_made_absolute(monkeypatch, tmp_path) -> None:
    """The working directory may change later; the address does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()

    assert parse_address("run").path == parse_address("./run").path == tmp_path / "run"


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("::1:7070", "tcp://[::1]:7070"),
        ("fe80::1", "tcp://[fe80::1]:7070"),
        ("bigbox:", "tcp://bigbox:7070"),
        ("bigbox:port", "tcp://bigbox:7070"),
        ("bigbox", "tcp://bigbox:7070"),
        ("bigbox", "./bigbox"),
    ],
)
def test_a_name_without_a_slash_that_is_no_directory_is_refused_with_what_may_be_meant(
    address, meant, monkeypatch, tmp_path
) -> None:
    """A missing port or bracket must not make a user wait for a directory."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match=rf"{re.escape(meant)}(?!\w)"):
        parse_address(address)
    assert parse_address(f"./{address}").path == tmp_path / address


def test_a_link_in_the_address_stays_a_link(tmp_path) -> None:
    """/run/batchd may point elsewhere tomorrow, and a resolved path may be too long."""
    (tmp_path / "long-name").mkdir()
    (tmp_path / "link").symlink_to("long-name")

    assert runtime_directory(tmp_path / "link").path == tmp_path / "link"


@pytest.mark.parametrize(
    "address", ["tcp://host", "host:70700", "http://run", "IPC:///run/batchd", "ipc://", "", "://run"]
)
def test_another_address_is_refused_with_an_example(address) -> None:
    """The message shows how to write an address."""
    with pytest.raises(ValueError, match=r"ipc:///run/batchd"):
        parse_address(address)


def test_a_path_too_long_for_a_socket_is_refused_with_the_numbers(tmp_path) -> None:
    """The longest path that is accepted can really be bound."""
    room = SOCKET_PATH_BYTES_MAX - len(os.fsencode(tmp_path)) - len("//lifeline.sock")
    longest = tmp_path / ("d" * room)
    longest.mkdir()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(runtime_directory(longest).lifeline_path))
    with pytest.raises(
        ValueError, match=rf"{SOCKET_PATH_BYTES_MAX + 1} bytes.*{SOCKET_PATH_BYTES_MAX}; choose a shorter"
    ):
        runtime_directory(tmp_path / ("d" * (room + 1)))


def test_the_length_of_a_path_is_counted_in_bytes() -> None:
    """The kernel counts in bytes, too."""
    with pytest.raises(ValueError, match="choose a shorter"):
        runtime_directory(Path("/run") / ("ü" * 50))


def test_daemons_are_looked_for_in_the_systems_place_and_then_in_the_users(monkeypatch) -> None:
    """A session without $XDG_RUNTIME_DIR, or with an empty one, has only the first."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert candidate_directories() == [Path("/run/batchd"), Path("/run/user/1000/batchd")]
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    assert user_directory() is None
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert candidate_directories() == [Path("/run/batchd")]


def test_last_words_are_heard_even_if_ours_were_not():
    """The kernel resets a connection that is closed with something unread.

    The last message of the other side is still there.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        send_message(ours, Hello(1, "trainer", 1))
        send_message(theirs, Refused(0, 0, 101, "full"))
        theirs.close()
        assert receive_message(ours, TO_TRAINER_LIFELINE) == (Refused(0, 0, 101, "full"), [])
        with pytest.raises(ChannelClosed):
            receive_message(ours, TO_TRAINER_LIFELINE)
