"""``test_fuzz`` for the daemon's TCP side: ZeroMQ's messages, their bytes, and below ZeroMQ.

A good trainer over TCP and one on this host read all the time, and the test compares their batches
byte for byte. At the end the daemon has its former descriptors, is not larger, and has a short log.
"""

import itertools
import select
import socket
import struct
import time
from collections import Counter
from contextlib import contextmanager, suppress
from random import Random
from typing import NamedTuple

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd.runtime.limits import BURST, PER_S
from batchd_wire.keys import connection_file_text, read_connection_key
from batchd_wire.messages import TO_DAEMON, TO_DAEMON_REMOTE, TO_TRAINER_REMOTE, Greet, Pull, Subscribe
from support.daemon_process import DaemonProcess
from support.fuzzer import Fuzzer
from support.good_trainers import descriptor_count, good_trainers, private_bytes
from support.hostile_messages import corpus, encode, good_message, hostile_messages, mutated
from support.hostile_streams import recorded, spoilt
from support.network import Proxy, free_port
from support.seen import see
from support.waiting import PATIENCE_S, wait_until

SPOILT_PER_SESSION = 40
CONNECTIONS_PER_LOOK = 25
GROWTH_BYTES_MAX = 2 << 20
HANDSHAKE_PARTS = 2
"""Greeting and first command: an error in these ends the connection before any answer."""
ANSWER_S = 0.004
"""How long the daemon is silent before a peer continues."""
HEARD_S = 0.02
"""And before it ends."""
ENDS_WITHIN_S = 10.0
"""A daemon disconnects a peer that does not finish its handshake within five seconds."""
SELDOM = ("remote message rejected", "remote handshake failed", "remote peer not understood", "peer refused")
SELDOM_S = 60.0
NAMES = itertools.count()


class Served(NamedTuple):
    """A daemon, and the connection file of its trainers if it has keys."""

    daemon: DaemonProcess
    key: object
    started_s: float


BEGUN = itertools.count()
"""Number of sessions so far."""


class RemoteFuzzer(Fuzzer):
    """A fuzzer over TCP; it reconnects, as a stranger, where the daemon disconnects it."""

    def __init__(self, context, address, key=None, name=None):
        super().__init__()
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.linger = 0
        if name is not None:
            self.dealer.routing_id = name + str(next(NAMES)).encode()
        if key is not None:
            one = read_connection_key(key)
            self.dealer.curve_serverkey = one.daemon.encode()
            self.dealer.curve_publickey, self.dealer.curve_secretkey = one.public.encode(), one.secret.encode()
        self.dealer.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.dealer.close()

    def tell(self, *frames):
        """See ``Fuzzer``."""
        with suppress(zmq.Again):
            self.dealer.send_multipart(frames, zmq.NOBLOCK)
        self.listen()

    def listen(self):
        """See ``Fuzzer``."""
        with suppress(zmq.Again):
            while True:
                self.learn(TO_TRAINER_REMOTE.decode(self.dealer.recv_multipart(zmq.NOBLOCK)[0]))

    def begin(self):
        """Open a session that gets a batch, as a good trainer does."""
        if next(BEGUN) > BURST / 2:
            time.sleep(1 / PER_S)  # the daemon admits no host more often for long
        wait_until(self._greets, "a good Greet is answered")
        self.tell_and_learn(Subscribe, "generation")
        return self

    def _greets(self):
        """Greet again after a host greeted too often, as a good client does."""
        before = len(self.refusals)
        self.tell(good_message(Greet, self.known))
        wait_until(
            lambda: self.listen() or "daemon" in self.known or len(self.refusals) > before, "a good Greet is answered"
        )
        if "daemon" not in self.known:
            assert "connects more often" in self.refusals[-1]
            time.sleep(0.1)
        return "daemon" in self.known


@pytest.fixture(scope="module")
def plain(start_shared_daemon):
    """Start a daemon of forty samples on a port of loopback, without keys."""
    return Served(start_shared_daemon(tcp=f"127.0.0.1:{free_port()}"), None, time.monotonic())


@pytest.fixture(scope="module")
def keyed(start_shared_daemon, tmp_path_factory):
    """Start the same daemon with CURVE."""
    folder = tmp_path_factory.mktemp("keyed")
    file = folder / "conn.key"
    file.touch(0o600)
    file.write_text(connection_file_text(KeyDirectory(folder / "keys").new("box")))
    tcp = f"127.0.0.1:{free_port()}"
    return Served(start_shared_daemon(tcp=tcp, keys_dir=str(folder / "keys")), file, time.monotonic())


@pytest.fixture(scope="module", params=["plain", "keyed"])
def served(request):
    """Return both daemons, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def context():
    """Make the ZeroMQ context of all fuzzing peers."""
    context = zmq.Context()
    context.socket(zmq.PAIR).close()  # the context's threads start with its first socket
    yield context
    context.destroy(linger=0)


@contextmanager
def good_ones(served):
    """Run good trainers; afterwards the daemon has no further descriptor, and a short log."""
    with good_trainers(served.daemon, served.key) as good:
        before = descriptor_count(served.daemon.pid)
        yield good
        wait_until(lambda: descriptor_count(served.daemon.pid) <= before, "the daemon has closed the others")
    minutes = 1 + int((time.monotonic() - served.started_s) / SELDOM_S)
    for event in SELDOM:
        said = Counter(line.get("host") for line in served.daemon.log_lines(event))
        assert all(times <= minutes for times in said.values()), (event, said)


def settle(served, context):
    """Wait until the daemon has read all connections so far: it answers a new one."""
    with RemoteFuzzer(context, served.daemon.tcp_address, served.key) as peer:
        peer.settle()


# --- messages that are well formed, more or less --------------------------------------------------

message = hostile_messages(TO_DAEMON_REMOTE) | hostile_messages(TO_DAEMON)
frames = st.lists(message | st.binary(max_size=40) | st.just(b""), min_size=2, max_size=6)
words = message.map(lambda one: [one]) | message.map(lambda one: [one]) | frames
conversations = st.tuples(
    st.booleans(), st.none() | st.binary(min_size=1, max_size=240), st.lists(words, min_size=1, max_size=12)
)
"""Whether the peer is a session that gets batches, its name, and its messages, in any order."""


def converse(served, context, examples):
    """Hold so many conversations; the good trainers read a batch after each."""
    with good_ones(served) as good:

        @settings(max_examples=examples)
        @given(conversations)
        def hold(conversation):
            is_session, name, said = conversation
            name = b"x" + name if name else None  # ZeroMQ reserves names that start with zero
            with RemoteFuzzer(context, served.daemon.tcp_address, served.key, name) as peer:
                if is_session:
                    peer.begin()
                for parts in said:
                    peer.tell(*(one if isinstance(one, bytes) else encode(one, peer.known) for one in parts))
                good.read()
                peer.settle()

        hold()


@pytest.mark.thorough(after_first=True)
def test_hostile_values_and_wrong_orders_change_nothing(served, context):
    """Sessions and peers without a greeting send them, in one frame and in several."""
    converse(served, context, 25)


@pytest.mark.slow
def test_hostile_values_and_wrong_orders_change_nothing_for_long(served, context):
    """The first test's conversations run for minutes."""
    converse(served, context, 10_000)


# --- damaged messages -----------------------------------------------------------------------------


def throw(served, context, chance, messages):
    """Send so many damaged messages in sessions, some of them in several frames."""
    for _ in range(0, messages, SPOILT_PER_SESSION):
        with RemoteFuzzer(context, served.daemon.tcp_address, served.key) as peer:
            peer.begin()
            good = corpus(TO_DAEMON_REMOTE, known=peer.known)
            for _ in range(SPOILT_PER_SESSION):
                peer.tell(*(mutated(good, chance) for _ in range(chance.choice([1, 1, 1, 1, 2, 5]))))
            peer.settle()


def throw_rounds(served, context, rounds, messages):
    """Send several rounds; the daemon is not larger after the last one than after the first few."""
    chance = Random(1)
    sizes = []
    with good_ones(served) as good:
        for _ in range(rounds):
            throw(served, context, chance, messages)
            good.wait_until_alone()
            good.read()
            sizes.append(private_bytes(served.daemon.pid))
    assert sizes[-1] - sizes[rounds // 3] < GROWTH_BYTES_MAX, sizes


def test_spoilt_messages_change_nothing_and_leave_nothing(served, context):
    """Bits flip, parts are cut, repeated and spliced; messages that stay valid act."""
    throw_rounds(served, context, 6, 200)


@pytest.mark.slow
def test_spoilt_messages_change_nothing_and_leave_nothing_for_long(served, context):
    """The first test's messages are sent for minutes."""
    throw_rounds(served, context, 60, 4000)


# --- below ZeroMQ ---------------------------------------------------------------------------------


def port_of(served):
    """Return the daemon's TCP port."""
    return int(served.daemon.tcp_address.rpartition(":")[2])


def record(served):
    """Record what a good trainer sends over TCP, from its greeting on, in parts."""
    said = bytearray()
    with Proxy(port_of(served)) as proxy:
        proxy.spoil = lambda data: said.extend(data) or data
        key = str(served.key) if served.key else None
        with batchd_client.connect(f"tcp://127.0.0.1:{proxy.port}", key=key) as daemon:
            see(daemon.stream("photos"), 3)
            daemon.status()
    return recorded(bytes(said))


def say_below(served, parts, *, resets, heard=lambda: None):
    """Send parts to the daemon; then disappear as a crashed host does, or end politely.

    The daemon drops what a closed connection has sent, so the end waits for ``heard``.
    """
    address = "127.0.0.1", port_of(served)
    with suppress(ConnectionError), socket.create_connection(address, timeout=ENDS_WITHIN_S) as connection:
        for number, part in enumerate(parts):
            connection.sendall(part)
            if number < HANDSHAKE_PARTS and hears_the_end(connection):
                return
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        heard()
        hears_the_end(connection, HEARD_S)
        with suppress(OSError):  # the daemon has already disconnected it
            connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def hears_the_end(connection, silent_s=ANSWER_S):
    """Receive until the daemon is silent; tell whether it has disconnected."""
    while select.select([connection], [], [], silent_s)[0]:
        if not connection.recv(1 << 16):
            return True
    return False


def say_rounds_below(served, context, rounds, connections):
    """Send rounds of damaged connections; the daemon must not grow after the first few."""
    chance = Random(2)
    parts = record(served)
    sizes = []
    with good_ones(served) as good:
        for _ in range(rounds):
            for number in range(connections):
                say_below(served, spoilt(parts, chance), resets=chance.random() < 1 / 4)
                if number % CONNECTIONS_PER_LOOK == 0:
                    good.read()
            settle(served, context)
            good.wait_until_alone()
            sizes.append(private_bytes(served.daemon.pid))
    assert sizes[-1] - sizes[rounds // 3] < GROWTH_BYTES_MAX, sizes


@pytest.mark.thorough(after_first=True)
def test_spoilt_connections_change_nothing_and_leave_nothing(served, context):
    """Greeting, handshake, frame lengths and contents of a good recording are damaged in turn."""
    say_rounds_below(served, context, 6, 25)


@pytest.mark.slow
def test_spoilt_connections_change_nothing_and_leave_nothing_for_long(served, context):
    """The first test's connections are made for minutes."""
    say_rounds_below(served, context, 60, 1000)


def spoil_on_the_way(served, context, connections):
    """Connect good peers through a proxy that changes bytes now and then, from the start on."""
    chance = Random(3)
    with good_ones(served) as good, Proxy(port_of(served)) as proxy:
        proxy.spoil = lambda said: b"".join(spoilt([said], chance)) if chance.random() < 1 / 3 else said
        for number in range(connections):
            with RemoteFuzzer(context, f"tcp://127.0.0.1:{proxy.port}", served.key) as peer:
                for kind in (Greet, Subscribe, Pull, Pull):
                    peer.tell(good_message(kind, peer.known))
                    peer.dealer.poll(20)
            if number % CONNECTIONS_PER_LOOK == 0:
                good.read()
        proxy.drop()
        settle(served, context)


def test_encrypted_connections_that_are_spoilt_on_the_way_change_nothing(keyed, context):
    """A replayed CURVE handshake fails; a handshake that is changed on the way gets farther."""
    spoil_on_the_way(keyed, context, 25)


@pytest.mark.slow
def test_encrypted_connections_that_are_spoilt_on_the_way_change_nothing_for_long(keyed, context):
    """The first test's connections are made for minutes."""
    spoil_on_the_way(keyed, context, 5_000)


def test_a_message_that_cannot_be_decrypted_ends_its_connection_at_once(keyed, context):
    """Otherwise ZeroMQ keeps it half alive, and aborts when it breaks while it is monitored."""
    with good_ones(keyed), Proxy(port_of(keyed)) as proxy:
        for _ in range(5):
            proxy.spoil = lambda said: said
            with RemoteFuzzer(context, f"tcp://127.0.0.1:{proxy.port}", keyed.key) as peer:
                peer.begin()
                gone = len(keyed.daemon.log_lines("remote trainer gone"))
                proxy.spoil = lambda said: said[:-1] + bytes([said[-1] ^ 1])
                peer.tell(good_message(Pull, peer.known))
                wait_until(
                    lambda gone=gone: len(keyed.daemon.log_lines("remote trainer gone")) > gone,
                    "its session has ended",
                    ENDS_WITHIN_S / 2,
                )


# --- the tools themselves -------------------------------------------------------------------------


def test_the_good_messages_of_a_fuzzer_are_obeyed(served, context):
    """Otherwise no damaged message would pass the first checks: the originals are valid."""
    with good_ones(served), RemoteFuzzer(context, served.daemon.tcp_address, served.key) as peer:
        peer.begin()
        first = peer.known["sequence"]
        for _ in range(3):
            peer.tell(good_message(Pull, peer.known))
        wait_until(lambda: peer.listen() or peer.known["sequence"] > first + 1, "the next batches arrive", PATIENCE_S)


def test_what_is_recorded_begins_a_session_when_it_is_played_again(plain):
    """The undamaged recording is valid, down to its last byte."""
    parts = record(plain)
    before = len(plain.daemon.log_lines("remote trainer"))
    with good_ones(plain):
        say_below(
            plain,
            parts,
            resets=False,
            heard=lambda: wait_until(
                lambda: len(plain.daemon.log_lines("remote trainer")) > before + 1, "it is a session"
            ),
        )
