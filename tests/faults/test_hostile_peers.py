"""Hostile or broken peers: the daemon serves a good trainer exactly, and forgets the peers."""

import array
import os
import random
import socket
from contextlib import suppress

import msgpack
import pytest

import batchd_client
from batchd.daemon.local.zmtp import FRAMES_MAX
from batchd_wire import PROTOCOL_VERSION
from batchd_wire import messages as wire
from batchd_wire.channel import receive_message, send_message
from batchd_wire.codes import ErrorCode
from support.expected import Expected
from support.kernel import descriptors_of
from support.raw_peer import RawPeer
from support.seen import see
from support.waiting import wait_until

HUGE = (1 << 63) - 1


@pytest.fixture(scope="module")
def shared(start_shared_daemon):
    """Start a daemon of forty samples; return it and its expected batches."""
    daemon = start_shared_daemon(sessions_max=250)
    expected = Expected(daemon.config)
    yield daemon, expected
    expected.close()


@pytest.fixture
def daemon(shared):
    """Run a good trainer during the attack; afterwards the daemon has forgotten the peers."""
    daemon, expected = shared
    descriptors = len(descriptors_of(daemon.pid))
    with batchd_client.connect(daemon.address) as connection:
        stream = connection.stream("photos", epochs=2)
        seen = see(stream, 2)
        yield daemon
        seen += see(stream) + see(stream)
        assert seen == expected.epoch(0) + expected.epoch(1)
        wait_until(lambda: len(connection.status()["trainers"]) == 1, "the daemon has forgotten the others")
    wait_until(lambda: len(descriptors_of(daemon.pid)) <= descriptors + 2 * slots(daemon), "descriptors are closed")
    assert daemon.status()["daemon"]["worker_deaths"] == 0


def slots(daemon):
    """Return the number of slots; each has two descriptors, and stays."""
    return daemon.stream_status()["slots"]


@pytest.fixture
def peer(daemon):
    """Connect a peer that has sent no message."""
    with RawPeer(daemon.runtime_dir) as peer:
        yield peer


def subscribe(**changes):
    """Return a claim on the whole stream, with a test's changes."""
    claim = {
        "request": 1,
        "stream": "photos",
        "rank": 0,
        "world_size": 1,
        "window": 2,
        "epoch": 0,
        "step": 0,
        "end_epoch": 1,
        "fingerprint": None,
        "is_spectator": False,
    }
    return wire.Subscribe(**(claim | changes))


def assert_refused(answer, code):
    """Check that the answer is a refusal with this code and a text."""
    assert isinstance(answer, wire.Refused)
    assert ErrorCode(answer.error) is code
    assert answer.text


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_over_zeromq_change_nothing(peer, seed):
    """Every invalid message gets an error number, in an open session and without one."""
    chance = random.Random(seed)
    if seed:
        peer.open()
    for _ in range(100):
        peer.dealer.send(chance.randbytes(chance.choice([0, 1, 8, 100, 5000])))
        assert_refused(peer.hear(), ErrorCode.MALFORMED_MESSAGE)


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b""],
        [b"x"] * FRAMES_MAX,
        [msgpack.packb([1] * 5000)],
        [b"\x91" * 3000],
        [msgpack.packb([14, 2**64 - 1])],
        [msgpack.packb([14, float("nan")])],
        [msgpack.packb([14, True])],
        [msgpack.packb([msgpack.ExtType(5, b"payload")])],
        [msgpack.packb([999, 1])],
        [msgpack.packb([22, 1, 0, 0, 0, 0, 1, 0, 8])],
        [msgpack.packb({1: 2})],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xff"],
    ],
    ids=[
        "empty",
        "frames",
        "array",
        "nesting",
        "number",
        "nan",
        "bool",
        "ext",
        "unknown",
        "ours",
        "map",
        "long",
        "bin",
    ],
)
def test_malformed_messages_are_answered_as_such(peer, frames):
    """A session gets the error too, and its valid messages are obeyed afterwards."""
    peer.open()
    peer.dealer.send_multipart(frames)
    assert_refused(peer.hear(), ErrorCode.MALFORMED_MESSAGE)
    assert isinstance(peer.ask(wire.AskStatus(7)), wire.Status)


@pytest.mark.parametrize("seed", range(5))
def test_random_datagrams_on_the_lifeline_end_it(peer, seed):
    """The daemon disconnects the sender; no other trainer notices."""
    peer.lifeline.send(random.Random(seed).randbytes(1 + seed * 1000))
    assert peer.is_hung_up()


@pytest.mark.parametrize("when", ["before", "after"])
def test_no_descriptor_reaches_the_daemon(peer, daemon, when):
    """The kernel refuses it where it can; else the peer is disconnected, and nobody holds it."""
    if when == "after":
        peer.greet()
    reading, writing = os.pipe()
    fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [reading] * 50))]
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(daemon.runtime_dir / "batchd.sock"))
        for connection in (peer.lifeline, stream):
            with suppress(PermissionError):
                connection.sendmsg([wire.Hello(PROTOCOL_VERSION, "generous", 1).encode()], fds)
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        wait_until(lambda: os.write(writing, b"x" * 4096) is None, "no process has the other end")
    os.close(writing)


def test_hello_twice_is_once_too_often(peer):
    """The session ends."""
    peer.open()
    send_message(peer.lifeline, wire.Hello(PROTOCOL_VERSION, "again", 1))
    assert peer.is_hung_up()


def test_asking_for_writable_slots_out_of_turn_ends_the_session(daemon):
    """The request comes before Hello, twice, and after the session is open."""
    for greeted in (False, True):
        with RawPeer(daemon.runtime_dir) as peer:
            if greeted:
                peer.greet()
                send_message(peer.lifeline, wire.AskWritable())
            send_message(peer.lifeline, wire.AskWritable())
            assert peer.is_hung_up()
    with RawPeer(daemon.runtime_dir) as peer:
        peer.open()
        send_message(peer.lifeline, wire.AskWritable())
        assert peer.is_hung_up()


def test_a_wrong_version_is_told_which_one_is_spoken(peer):
    """Both the lifeline and ZeroMQ answer with a text that has the command that upgrades."""
    send_message(peer.lifeline, wire.Hello(PROTOCOL_VERSION + 1, "newer", 1))
    answer, _ = receive_message(peer.lifeline, wire.TO_TRAINER_LIFELINE)
    assert_refused(answer, ErrorCode.UNSUPPORTED_VERSION)
    assert "upgrade the daemon: `sudo make install`" in answer.text
    answer = peer.ask(wire.Open(PROTOCOL_VERSION + 1, b"0" * 16))
    assert_refused(answer, ErrorCode.UNSUPPORTED_VERSION)


@pytest.mark.parametrize("secret", [b"", b"0" * 16, b"\0" * 1000])
def test_a_wrong_secret_opens_nothing(peer, secret):
    """The rejection holds before and after the daemon has sent the right one."""
    assert_refused(peer.ask(wire.Open(PROTOCOL_VERSION, secret)), ErrorCode.UNKNOWN_SESSION)
    peer.greet()
    assert_refused(peer.ask(wire.Open(PROTOCOL_VERSION, secret)), ErrorCode.UNKNOWN_SESSION)
    assert_refused(peer.ask(subscribe()), ErrorCode.UNKNOWN_SESSION)
    assert isinstance(peer.ask(wire.Open(PROTOCOL_VERSION, peer.secret)), wire.Opened)


def test_a_secret_opens_one_connection(peer, daemon):
    """A later connection with the same secret is rejected."""
    peer.open()
    with RawPeer(daemon.runtime_dir) as thief:
        assert_refused(thief.ask(wire.Open(PROTOCOL_VERSION, peer.secret)), ErrorCode.UNKNOWN_SESSION)


@pytest.mark.parametrize(
    "message",
    [
        wire.Pull(1, HUGE, True, HUGE, [(0, 1), (HUGE, HUGE)]),
        wire.Unsubscribe(1, 0),
        wire.AskBad(1, "photos"),
        wire.AskStatus(1),
        subscribe(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_without_a_session_nothing_is_done(peer, message):
    """Every message gets the same answer."""
    assert_refused(peer.ask(message), ErrorCode.UNKNOWN_SESSION)


def test_another_session_s_subscription_is_out_of_reach(peer, daemon):
    """Pull, release and end have no effect on it, whatever number the peer guesses."""
    peer.open()
    with RawPeer(daemon.runtime_dir) as victim:
        victim.open()
        admitted = victim.ask(subscribe())
        assert isinstance(admitted, wire.Subscribed)
        handles = [victim.hear(), victim.hear()]
        assert all(isinstance(handle, wire.Handle) for handle in handles)
        before = claim_of(daemon, admitted.subscription)

        released = [(handle.sequence, handle.generation) for handle in handles]
        answer = peer.ask(wire.Pull(admitted.subscription, 2, False, 0, released))
        assert_refused(answer, ErrorCode.UNKNOWN_SUBSCRIPTION)
        peer.dealer.send(wire.Unsubscribe(admitted.subscription, 0).encode())
        assert isinstance(peer.ask(wire.AskStatus(1)), wire.Status)

        assert claim_of(daemon, admitted.subscription) == before


def claim_of(daemon, number):
    """Return the status of one subscription."""
    return next(one for one in daemon.stream_status()["subscriptions"] if one["number"] == number)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"stream": "nothing"}, ErrorCode.UNKNOWN_STREAM),
        ({"stream": "x" * 16_000}, ErrorCode.UNKNOWN_STREAM),
        ({"rank": 1}, ErrorCode.RANK_OUT_OF_RANGE),
        ({"world_size": 0}, ErrorCode.RANK_OUT_OF_RANGE),
        ({"world_size": HUGE}, ErrorCode.RANK_OUT_OF_RANGE),
        ({"window": 65}, ErrorCode.WINDOW_OUT_OF_RANGE),
        ({"epoch": HUGE, "end_epoch": None}, ErrorCode.POSITION_OUT_OF_RANGE),
        ({"step": HUGE}, ErrorCode.POSITION_OUT_OF_RANGE),
        ({"fingerprint": "0" * 32}, ErrorCode.FINGERPRINT_MISMATCH),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_claims_that_cannot_be_are_refused_by_number(peer, changes, code):
    """The session continues."""
    peer.open()
    assert_refused(peer.ask(subscribe(**changes)), code)
    assert isinstance(peer.ask(subscribe()), wire.Subscribed)


def test_pulls_that_make_no_sense_move_nothing_forward(peer, daemon):
    """Pulls consume more than granted, release without a lease, or are ahead, without effect."""
    peer.open()
    admitted = peer.ask(subscribe(window=2))
    first, second = peer.hear(), peer.hear()
    nonsense = [(0, HUGE), (HUGE, 1), (1, 0)] * 300
    peer.dealer.send(wire.Pull(admitted.subscription, 0, False, HUGE, nonsense).encode())
    assert isinstance(peer.ask(wire.AskStatus(1)), wire.Status)
    claim = claim_of(daemon, admitted.subscription)
    assert (claim["held_slots"], claim["consumed_batches"]) == (2, 0)

    peer.dealer.send(wire.Pull(admitted.subscription, HUGE, False, 0, [(first.sequence, first.generation)]).encode())
    third = peer.hear()
    assert (second.step, third.step) == (1, 2)


@pytest.mark.parametrize("kibibytes", [65, 1024])
def test_a_message_too_long_costs_the_connection(peer, daemon, kibibytes):
    """ZeroMQ ends it before it reads the message; its memory stays until the lifeline ends."""
    peer.open()
    peer.dealer.send(b"x" * (kibibytes * 1024))
    peer.dealer.send(wire.AskStatus(1).encode())
    with RawPeer(daemon.runtime_dir) as other:
        assert isinstance(other.open().ask(wire.AskStatus(1)), wire.Status)


def test_two_hundred_connections_opened_and_closed(daemon):
    """They open at once, each with a session; the daemon refuses and remembers no connection."""
    peers = []
    try:
        for _ in range(200):
            peers.append(RawPeer(daemon.runtime_dir))
            peers[-1].greet()
        assert len(daemon.status()["trainers"]) == 202
    finally:
        for peer in peers:
            peer.close()


def test_more_trainers_than_sessions_max_are_told_so(daemon):
    """Existing sessions stay; once they end, other trainers connect."""
    lifelines = []
    try:
        while len(lifelines) < 300:
            lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            lifelines.append(lifeline)
            lifeline.connect(str(daemon.runtime_dir / "lifeline.sock"))
            send_message(lifeline, wire.Hello(PROTOCOL_VERSION, "crowd", 1))
        answer, _ = receive_message(lifelines[-1], wire.TO_TRAINER_LIFELINE)
        assert_refused(answer, ErrorCode.TOO_MANY_SESSIONS)
        assert answer.text == "as many trainers are connected as may be (250); raise sessions_max in [daemon]"
        with pytest.raises(batchd_client.errors.DaemonFull, match="as may be \\(250\\)"):
            batchd_client.connect(daemon.address)
    finally:
        for lifeline in lifelines:
            lifeline.close()


@pytest.mark.parametrize(
    "words", [b"", b"\xff", b"\xff" + b"\0" * 8 + b"\x7f\x03\0NULL", b"GET / HTTP/1.1\r\n\r\n" * 50]
)
def test_raw_bytes_on_the_zeromq_socket_are_no_session(daemon, words):
    """The bytes are none, half a greeting, or another protocol."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(daemon.runtime_dir / "batchd.sock"))
        raw.send(words)
        assert len(daemon.status()["trainers"]) == 2


def test_complaints_about_nonsense_are_written_once_a_minute(peer, shared):
    """A peer that sends invalid messages at full speed does not fill the disk with log lines."""
    daemon, _ = shared
    for _ in range(200):
        peer.dealer.send(b"nonsense")
        peer.hear()
    assert len(daemon.log_lines("message rejected")) < 20


def test_a_process_that_is_cut_off_again_and_again_is_named_once_a_minute(daemon):
    """A process that reconnects to send one more invalid message does not fill the log either."""
    for _ in range(100):
        with RawPeer(daemon.runtime_dir) as peer:
            peer.lifeline.send(b"nonsense")
            assert peer.is_hung_up()
    assert 0 < len(daemon.log_lines("trainer disconnected")) < 20
