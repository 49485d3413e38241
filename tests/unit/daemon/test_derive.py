"""The daemon's side of derived streams, with processes that fail in every way."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from batchd.config.tree import DaemonConfig
from batchd.core.events import SubscriptionAsked
from batchd.daemon.derive import requests as derive
from batchd.daemon.derive.messages import TO_DERIVING, StreamDerived
from batchd.daemon.identity import Identity
from batchd.runtime.children import Child
from batchd.runtime.poller import Poller
from batchd_wire.channel import receive_message, send_message
from batchd_wire.codes import ErrorCode
from support.waiting import wait_until


def asked(session: int, settings: str = '{"seed":1}', stream: str = "photos") -> SubscriptionAsked:
    """Return a subscription with settings."""
    return SubscriptionAsked(session, 1, 7, stream, 0, 1, 0, 0, 0, None, None, is_spectator=False, settings=settings)


class Deriving:
    """A deriver whose processes belong to the test, and a daemon with one stream of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.poller, self.now_s = Poller(), 0.0
        self.sessions = {1, 2, 3}
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

    def request(self) -> None:
        """Take the request that the last process has."""
        _message, descriptors = receive_message(self.processes[-1][1], TO_DERIVING)
        assert len(descriptors) == 2
        for descriptor in descriptors:
            os.close(descriptor)

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


def test_one_process_works_out_one_request_after_the_other(it) -> None:
    """A session has one at a time; an answer without a stream is the trainer's."""
    for session in (1, 2):
        assert it.deriver.resolved(asked(session)) is None
    it.deriver.resolved(asked(2, '{"seed":2}'))
    assert [refusal[:2] for refusal in it.refused] == [(2, ErrorCode.TOO_OFTEN)]
    for session in (1, 2):
        it.request()
        send_message(it.processes[0][1], StreamDerived(f"wrong {session}"))
        it.poller.dispatch()
        assert it.refused[-1] == (session, ErrorCode.SETTINGS_REFUSED, f"wrong {session}")
    assert len(it.processes) == 1


@pytest.mark.parametrize("how", ["dies", "hangs", "talks nonsense"])
def test_a_process_that_fails_costs_the_request_that_it_has(it, how) -> None:
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
            it.now_s = derive.ANSWER_MAX_S + 1
            it.deriver.tick()
        it.poller.dispatch()
    assert [refusal[:2] for refusal in it.refused] == [(1, ErrorCode.SETTINGS_REFUSED)]
    assert len(it.processes) == tries + 1
    wait_until(lambda: it.poller.dispatch() or it.processes[0][0].pidfd < 0, "it is gone")
    it.request()
    send_message(it.processes[-1][1], StreamDerived("wrong"))
    it.poller.dispatch()
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
