"""The daemon's side of derived streams, with processes that fail in every way."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from batchd.config.tree import DaemonConfig
from batchd.core.events import SubscriptionAsked
from batchd.daemon.derive import requests as derive
from batchd.daemon.derive.messages import AT_ONCE_MAX, TO_DERIVING, StreamDerived
from batchd.daemon.identity import Identity
from batchd.runtime.children import Child
from batchd.runtime.poller import Poller
from batchd_wire.channel import receive_message, send_message
from batchd_wire.codes import ErrorCode
from support.waiting import wait_until


def asked(
    session: int, settings: str = '{"seed":1}', stream: str = "photos", owner: str = "", tenant: str = "default"
) -> SubscriptionAsked:
    """Return a subscription with settings."""
    ends = {"is_spectator": False, "settings": settings, "owner": owner or f"user:{session}", "tenant": tenant}
    return SubscriptionAsked(session, 1, 7, stream, 0, 1, 0, 0, 0, None, None, **ends)


class Deriving:
    """A deriver whose processes belong to the test, and a daemon with one stream of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.poller, self.now_s = Poller(), 0.0
        self.sessions = set(range(1, 20))
        self.events: list[Any] = []
        self.refused: list[tuple[int, int, str]] = []
        self.processes: list[tuple[Child, socket.socket]] = []
        card = SimpleNamespace(configuration=('{"streams": {"photos": {}}}',))
        self.index = os.memfd_create("index")
        base = SimpleNamespace(
            name="photos",
            facts=SimpleNamespace(card=card),
            cache=None,
            message=SimpleNamespace(recipe=SimpleNamespace(modules=[])),
            index_descriptor=self.index,
        )
        self.applier: Any = SimpleNamespace(
            state=SimpleNamespace(numbers={"photos": 1, "photos+1": 2}, draining=False, streams={}),
            streams={1: base},
            derived={2: 1},
            daemon=DaemonConfig(derive=True),
            numbers={},
            enqueue=self.events.append,
        )
        monkeypatch.setattr(derive, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(derive, "start_linked", lambda *_words, **_options: self._start())
        door = SimpleNamespace(identity=lambda _session: Identity())
        doors: Any = SimpleNamespace(
            of=lambda session: door if session in self.sessions else None,
            send=lambda session, message: self.refused.append((session, message.error, message.text)),
        )
        self.deriver = derive.Deriver(self.poller, self.applier, doors)

    def _start(self) -> tuple[Child, socket.socket]:
        child = Child(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], process_group=0))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.processes.append((child, theirs))
        return child, ours

    def request(self) -> int:
        """Take the next request that the last process has; its number."""
        message, descriptors = receive_message(self.processes[-1][1], TO_DERIVING)
        assert len(descriptors) == 2
        for descriptor in descriptors:
            os.close(descriptor)
        return message.request

    def requests(self) -> list[int]:
        """Take all of them."""
        channel, found = self.processes[-1][1], []
        channel.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                found.append(self.request())
        channel.setblocking(True)
        return found

    def answer(self, number: int) -> int:
        """Refuse a request; the session that is told so."""
        send_message(self.processes[-1][1], StreamDerived(number, "wrong"))
        self.poller.dispatch()
        return self.refused[-1][0]

    def close(self) -> None:
        self.deriver.close()
        self.poller.close()
        os.close(self.index)
        for _child, channel in self.processes:
            channel.close()


@pytest.fixture
def it(monkeypatch):
    it = Deriving(monkeypatch)
    yield it
    it.close()


def test_one_process_has_several_requests_and_answers_them_in_any_order(it) -> None:
    """A session has one at a time; an answer without a stream is the trainer's."""
    for session in (1, 2):
        assert it.deriver.resolved(asked(session, f'{{"seed":{session}}}')) is None
    it.deriver.resolved(asked(2, '{"seed":3}'))
    assert [refusal[:2] for refusal in it.refused] == [(2, ErrorCode.TOO_OFTEN)]
    first, second = it.requests()
    assert [it.answer(second), it.answer(first)] == [2, 1]
    assert it.refused[-1] == (1, ErrorCode.SETTINGS_REFUSED, "wrong")
    assert len(it.processes) == 1


def test_the_same_stream_is_worked_out_once_at_a_time(it) -> None:
    """The second who asks waits: what the first one gets is then there."""
    for session in (1, 2):
        it.deriver.resolved(asked(session))
    (first,) = it.requests()
    assert it.answer(first) == 1
    (second,) = it.requests()
    assert it.answer(second) == 2


def test_an_owner_has_half_of_the_places_and_tenants_take_turns_by_weight(it) -> None:
    """Who asks for many waits behind those who ask for few, who came later."""
    it.applier.daemon = DaemonConfig(derive=True, shares={"many": {"weight": 1}, "few": {"weight": 2}})
    one, two = {"owner": "key:one", "tenant": "many"}, {"owner": "key:two", "tenant": "many"}
    few = {"owner": "key:few", "tenant": "few"}
    for session, who in enumerate([one, one, one, two, two, two, few, few, few], 1):
        it.deriver.resolved(asked(session, f'{{"seed":{session}}}', **who))
    begun = it.requests()
    assert len(begun) == AT_ONCE_MAX
    turns = []
    while begun:
        turns.append(it.answer(begun.pop(0)))
        begun += it.requests()
    assert turns == [1, 2, 4, 5, 7, 8, 3, 6, 9]


@pytest.mark.parametrize("how", ["dies", "hangs", "talks nonsense"])
def test_a_process_that_fails_costs_the_requests_that_it_has(it, how) -> None:
    """Another one works out the next; one whose trainer has left meanwhile is forgotten.

    A process may have ended before it had the request, so that is tried once more.
    """
    for session in (1, 2, 3):
        it.deriver.resolved(asked(session))
    it.sessions.discard(2)
    tries = 1 if how == "hangs" else 2
    for _ in range(tries):
        assert not it.refused
        it.request()
        _child, channel = it.processes[-1]
        if how == "dies":
            channel.close()
        elif how == "talks nonsense":
            channel.send(b"\xc1")
        else:
            it.now_s = derive.SILENCE_MAX_S + 1
            it.deriver.tick()
        it.poller.dispatch()
    assert [refusal[:2] for refusal in it.refused] == [(1, ErrorCode.SETTINGS_REFUSED)]
    assert len(it.processes) == tries + 1
    wait_until(lambda: it.poller.dispatch() or it.processes[0][0].pidfd < 0, "it is gone")
    assert it.answer(it.request()) == 3
    assert [session for session, *_rest in it.refused] == [1, 3]


def test_the_process_is_started_ahead_where_streams_may_be_derived(it) -> None:
    """Once: if it cannot work, each tick would start another one."""
    it.applier.daemon = DaemonConfig()
    it.deriver.tick()
    assert not it.processes
    it.applier.daemon = DaemonConfig(derive=True)
    for _ in range(2):
        it.deriver.tick()
    assert len(it.processes) == 1


def test_what_is_no_matter_of_settings_goes_to_the_core(it) -> None:
    """It knows the words for streams that are not there; a derived one is none of the file."""
    for event in (asked(1, ""), asked(1, stream="other")):
        assert it.deriver.resolved(event) is event
    assert it.deriver.resolved(asked(1, stream="photos+1")) is None
    assert it.refused == [(1, *derive.OF_FILE)]
    it.applier.daemon = DaemonConfig()
    assert it.deriver.resolved(asked(1)) is None
    assert it.refused[-1] == (1, *derive.NOT_ALLOWED)
    it.applier.state.draining = True
    assert it.deriver.resolved(event := asked(1)) is event
