"""Thousands of almost valid messages: the daemon does not die, err, grow or slow down others.

``support.hostile_messages`` makes them from all message types; ``test_hostile_peers`` has the cases
that people thought of. A good trainer reads all the time, and the test compares its batches byte
for byte.
"""

import os
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from batchd_wire import messages as wire
from batchd_wire.channel import ChannelClosed, receive_message
from support.fuzzer import PLAIN, Fuzzer
from support.good_trainers import good_trainers, private_bytes
from support.hostile_messages import corpus, encode, good_message, hostile_messages, mutated
from support.raw_peer import RawPeer
from support.waiting import PATIENCE_S, wait_until

ZEROMQ, LIFELINE = "ZeroMQ", "lifeline"
SPOILT_PER_SESSION = 40
GROWTH_BYTES_MAX = 2 << 20


class LocalFuzzer(Fuzzer, RawPeer):
    """A fuzzer on the lifeline and ipc."""

    def __init__(self, runtime_dir: Path) -> None:
        Fuzzer.__init__(self)
        RawPeer.__init__(self, runtime_dir)
        self.lifeline.setblocking(False)

    def tell(self, words):
        """See ``Fuzzer``."""
        self.say(ZEROMQ, words)

    def say(self, over, words):
        """Send over either connection."""
        with suppress(ConnectionError, BlockingIOError, zmq.Again):
            if over == LIFELINE:
                self.lifeline.send(words)
            else:
                self.dealer.send(words, zmq.NOBLOCK)
        self.listen()

    def listen(self):
        """See ``Fuzzer``."""
        with suppress(zmq.Again):
            while True:
                self.learn(wire.TO_TRAINER.decode(self.dealer.recv(zmq.NOBLOCK)))
        with suppress(BlockingIOError, ChannelClosed, ConnectionResetError):
            while True:
                message, descriptors = receive_message(self.lifeline, wire.TO_TRAINER_LIFELINE)
                for descriptor in descriptors:
                    os.close(descriptor)
                self.learn(message)

    def begin(self):
        """Open a session that holds a batch, as a good trainer does."""
        self.say(LIFELINE, good_message(wire.Hello, self.known))
        self.wait_to_learn(wire.Hello, "secret")
        self.tell_and_learn(wire.Open, "daemon")
        self.tell_and_learn(wire.Subscribe, "generation")
        return self


@pytest.fixture(scope="module")
def daemon(start_shared_daemon):
    """Start a daemon of forty samples."""
    return start_shared_daemon()


# --- messages that are well formed, more or less --------------------------------------------------

words = st.tuples(st.just(ZEROMQ), hostile_messages(wire.TO_DAEMON)) | st.tuples(
    st.just(LIFELINE), hostile_messages(wire.TO_DAEMON_LIFELINE)
)
conversations = st.tuples(st.booleans(), st.lists(words, min_size=1, max_size=12))
"""Whether the peer is a session that holds a batch, and its messages, in any order."""


def converse(daemon, examples):
    """Hold so many conversations; the good trainer reads a batch after each."""
    with good_trainers(daemon) as good:

        @settings(max_examples=examples)
        @given(conversations)
        def hold(conversation):
            is_session, said = conversation
            with LocalFuzzer(daemon.runtime_dir) as peer:
                if is_session:
                    peer.begin()
                for over, parts in said:
                    peer.say(over, encode(parts, peer.known))
                good.read()
                peer.settle()

        hold()


@pytest.mark.thorough
def test_hostile_values_and_wrong_orders_change_nothing(daemon):
    """Peers with a session and peers without a greeting send them."""
    converse(daemon, 30)


@pytest.mark.slow
def test_hostile_values_and_wrong_orders_change_nothing_for_long(daemon):
    """The first test's conversations run for minutes."""
    converse(daemon, 10_000)


# --- damaged messages -----------------------------------------------------------------------------


def throw(daemon, chance, messages):
    """Send so many damaged messages, most of them from sessions, some on lifelines."""
    for _ in range(0, messages, SPOILT_PER_SESSION):
        with LocalFuzzer(daemon.runtime_dir) as session, LocalFuzzer(daemon.runtime_dir) as stranger:
            session.begin()
            over_zeromq, over_lifeline = (
                corpus(kinds, known=session.known) for kinds in (wire.TO_DAEMON, wire.TO_DAEMON_LIFELINE)
            )
            for _ in range(SPOILT_PER_SESSION - 3):
                session.say(ZEROMQ, mutated(over_zeromq, chance))
            session.settle()
            for peer in (session, stranger, stranger):
                peer.say(LIFELINE, mutated(over_lifeline, chance))
            session.settle()


def throw_rounds(daemon, rounds, messages):
    """Send several rounds; the daemon is not larger after the last one than after the first few."""
    chance = Random(1)
    sizes = []
    with good_trainers(daemon) as good:
        for _ in range(rounds):
            throw(daemon, chance, messages)
            good.wait_until_alone()
            good.read()
            sizes.append(private_bytes(daemon.pid))
    assert sizes[-1] - sizes[rounds // 3] < GROWTH_BYTES_MAX, sizes


def test_spoilt_messages_change_nothing_and_leave_nothing(daemon):
    """Bits flip, parts are cut, repeated and spliced, on ZeroMQ and lifelines; valid ones act."""
    throw_rounds(daemon, 6, 800)


@pytest.mark.slow
def test_spoilt_messages_change_nothing_and_leave_nothing_for_long(daemon):
    """The first test's messages are sent for minutes."""
    throw_rounds(daemon, 60, 4000)


# --- the tools themselves -------------------------------------------------------------------------


def test_the_good_messages_of_a_fuzzer_are_obeyed(daemon):
    """Otherwise no damaged message would pass the first checks: the originals are valid."""
    with good_trainers(daemon), LocalFuzzer(daemon.runtime_dir) as peer:
        peer.begin()
        first = peer.known["sequence"]
        for _ in range(3):
            peer.say(ZEROMQ, good_message(wire.Pull, peer.known))
        wait_until(lambda: peer.listen() or peer.known["sequence"] > first + 1, "the next batches arrive", PATIENCE_S)


def test_spoilt_messages_are_of_all_kinds():
    """Some bytes are no longer messages, others still are, and the whole corpus is valid."""
    chance = Random(1)
    whole = corpus(wire.TO_DAEMON, known=PLAIN)
    assert [wire.TO_DAEMON.decode(data) for data in whole]

    spoilt = [mutated(whole, chance) for _ in range(1000)]
    still_good = 0
    for data in spoilt:
        with suppress(ValueError):
            wire.TO_DAEMON.decode(data)
            still_good += 1

    assert 10 < still_good < 900
    assert len(set(spoilt)) > 500
    assert max(map(len, spoilt)) > 10 * max(map(len, whole))
