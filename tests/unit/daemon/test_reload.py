"""The daemon's side of a reload, with reload processes that fail in every way."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
import structlog

from batchd.daemon.reload import requests as reload
from batchd.daemon.reload.apply import Changes
from batchd.daemon.reload.messages import ConfigRead, ReloadDocument, ReloadRequest, ScanProgressed, StreamScanned
from batchd.daemon.reload.requests import Origin, Reloader
from batchd.errors import ExitCode
from batchd.runtime.child_log import ChildLogged
from batchd.runtime.children import Child
from batchd.runtime.poller import Poller
from batchd_wire.channel import send_message
from batchd_wire.messages import AskReload
from support.waiting import wait_until

FINE = {"exit_code": 0, "streams": {"photos": {}}}


class Switched:
    """A recorder of documents."""

    workers_wanted = 2

    def __init__(self):
        self.performed = []
        self.ends = []

    def request(self, *_facts):
        return ReloadRequest("0", "batchd.toml", {}, {}, {}, {}, 0, {})

    def changes(self, _document):
        return Changes({"added": ["more"]}, (2, 2), [], [], ["more: a line"], self.ends)

    def apply(self, document, descriptors):
        self.performed.append((document, set(descriptors)))


class FakeService:
    """A recorder of the messages to the service manager."""

    def __init__(self):
        self.progress = []
        self.told = []

    def reloading(self):
        pass

    def scanned(self, stream, found):
        self.progress.append((stream, found))

    def reloaded(self, workers, text):
        self.told.append((workers, text))


class Reader:
    """A process that does nothing, and the messages that the test sends in its name."""

    def __init__(self):
        self.child = Child(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], process_group=0))
        self.ours, self.channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message, *descriptors):
        send_message(self.channel, message, descriptors)

    def send_document(self, document):
        data = json.dumps(document).encode()
        memory = os.memfd_create("document")
        os.pwrite(memory, data, 0)
        self.send(ConfigRead(len(data)), memory)
        os.close(memory)

    def end(self):
        self.child.kill()
        self.channel.close()


class Reloading:
    """A reloader whose processes belong to the test."""

    def __init__(self, monkeypatch):
        self.poller = Poller()
        self.applier = Switched()
        self.readers = []
        self.answers = []
        self.service = FakeService()
        self.now_s = monotonic()
        monkeypatch.setattr(reload, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(reload, "start_linked", lambda *_arguments, **_options: self.new_reader())
        self.reloader = Reloader(
            self.poller,
            self.applier,
            Origin(Path("batchd.toml"), {}),
            lambda session, message: self.answers.append((session, message.exit_code, message.text)),
            self.service,
        )

    def new_reader(self):
        self.readers.append(Reader())
        return self.readers[-1].child, self.readers[-1].ours

    def begin(self):
        self.reloader.ask()
        return self.readers[-1]

    def read(self):
        """The process reads a document without a new stream, and ends."""
        reader = self.readers[-1]
        reader.send_document({"exit_code": 0})
        self.poller.dispatch()
        reader.end()
        self.dispatch_until(lambda: self.service.told, "it is over")
        self.service.told.clear()

    def dispatch_until(self, condition, what):
        wait_until(lambda: self.poller.dispatch() or condition(), what)

    def outcome(self):
        """Return the outcome of the only reload that has ended since the last call."""
        self.dispatch_until(lambda: self.service.told, "it is over")
        outcome = self.reloader.outcome
        assert self.service.told == [(2, outcome.text.partition("\n")[0])]
        self.service.told.clear()
        return outcome

    def close(self):
        self.reloader.close()
        self.poller.close()
        for reader in self.readers:
            reader.channel.close()
            reader.child.end()


@pytest.fixture
def it(monkeypatch):
    it = Reloading(monkeypatch)
    yield it
    it.close()


def test_a_message_that_cannot_be_read_spoils_what_follows(it):
    """One message is an index without descriptors; the complete document after it is ignored."""
    reader = it.begin()
    reader.channel.send(b"nonsense")
    reader.send_document(FINE)
    outcome = it.outcome()
    assert outcome.exit_code == ExitCode.FAILED
    assert "LimitNOFILE" in outcome.text
    assert not it.applier.performed
    assert reader.child.reap() < 0


def test_a_stream_without_its_index_is_not_put_into_force(it):
    """The daemon continues with the previous configuration."""
    reader = it.begin()
    reader.send_document(FINE)
    it.poller.dispatch()
    reader.end()
    outcome = it.outcome()
    assert (outcome.exit_code, outcome.text) == (
        1,
        "the new configuration cannot be loaded: no index of photos arrived",
    )
    assert not it.applier.performed


def test_a_document_with_everything_that_belongs_to_it_is_put_into_force(it):
    """The failed reloads before it share parts with it, and those parts are not the cause."""
    reader = it.begin()
    index = os.memfd_create("index")
    reader.send(StreamScanned("photos"), index)
    os.close(index)
    reader.send_document(FINE)
    it.poller.dispatch()
    reader.end()
    assert it.outcome().exit_code == ExitCode.FINE
    assert it.applier.performed == [(ReloadDocument(streams=FINE["streams"]), {"photos"})]


DRY, KEEPING, PLAIN = ({"is_dry": True}, {"keeps_trainers": True}, {})


@pytest.mark.parametrize(
    ("questions", "ends", "applied", "exit_code"),
    [
        ([DRY], [], False, 0),
        ([DRY], ["photos: ends a at 0:3"], False, 0),
        ([DRY, DRY | KEEPING], ["photos: ends a at 0:3"], False, 0),
        ([KEEPING], [], True, 0),
        ([KEEPING], ["photos: ends a at 0:3"], False, 1),
        ([KEEPING, PLAIN], ["photos: ends a at 0:3"], True, 0),
        ([DRY, PLAIN], ["photos: ends a at 0:3"], True, 0),
        ([None, DRY], ["photos: ends a at 0:3"], True, 0),
        ([None, KEEPING], ["photos: ends a at 0:3"], True, 0),
    ],
    ids=str,
)
def test_a_reload_happens_unless_nobody_wants_that(it, questions, ends, applied, exit_code):
    """Several requests are answered by one reading; None is a signal."""
    it.applier.ends = ends
    it.reloader.ask(1, AskReload(1))  # is being read when the others ask
    for session, question in enumerate(questions, 2):
        it.reloader.ask(session, None if question is None else AskReload(session, **question))
    it.read()
    before = it.reloader.outcome
    it.answers.clear()
    it.applier.performed.clear()

    it.read()

    assert bool(it.applier.performed) == applied
    asked = [session for session, question in enumerate(questions, 2) if question is not None]
    assert [(session, code) for session, code, _text in it.answers] == [(session, exit_code) for session in asked]
    assert all(ends == [] or ends[0] in text for _session, _code, text in it.answers)
    assert (it.reloader.outcome is before) == (not applied)


def test_progress_and_lines_of_the_log_are_passed_on(it):
    """A line of an unknown level is dropped, and so is a fact that is named event."""
    reader = it.begin()
    reader.send(ScanProgressed("photos", 7, 300))
    reader.send(ChildLogged("warning", "odd", {"file": "a", "event": "even"}))
    reader.send(ChildLogged("bind", "odd", {}))
    with structlog.testing.capture_logs() as lines:
        it.poller.dispatch()
    assert it.service.progress == [("photos", 7)]
    assert lines == [{"event": "odd", "file": "a", "log_level": "warning"}]


def test_a_reading_that_makes_no_progress_is_given_up_and_the_next_one_begins(it):
    """The waiting client gets the step at which the process stopped."""
    reader = it.begin()
    reader.send(ScanProgressed("photos", 7, 300))
    it.poller.dispatch()
    it.reloader.round_ended()
    assert it.reloader.is_reading
    it.reloader.ask()
    it.now_s += 1000.0
    it.reloader.round_ended()
    outcome = it.outcome()
    assert outcome.exit_code == ExitCode.FAILED
    assert "scanning stream 'photos' has made no progress" in outcome.text
    assert len(it.readers) == 2
    assert it.reloader.is_reading
    it.dispatch_until(lambda: reader.child.pidfd == -1, "it is buried")


def test_progress_is_what_keeps_a_reading_alive(it):
    """No total time ends it."""
    reader = it.begin()
    it.now_s += 1000.0
    reader.send(ScanProgressed("photos", 7, 300))
    it.poller.dispatch()
    it.reloader.round_ended()
    assert it.reloader.is_reading
    it.now_s += 1000.0
    it.reloader.round_ended()
    assert not it.reloader.is_reading


def test_a_reading_says_itself_how_long_it_may_be_silent(it):
    """The process knows the time that the user allows, for example an hour for one function."""
    reader = it.begin()
    reader.send(ScanProgressed("", 0, 7200))
    it.poller.dispatch()
    assert not it.service.progress
    it.now_s += 3600.0
    it.reloader.round_ended()
    assert it.reloader.is_reading
    it.now_s += 3700.0
    it.reloader.round_ended()
    assert "reading the configuration has made no progress" in it.outcome().text


def test_a_process_that_cannot_be_killed_holds_up_neither_the_loop_nor_the_end(it, monkeypatch):
    """This happens in a system call that never ends; here the test prevents the kill."""
    reader = it.begin()
    monkeypatch.setattr(Child, "kill", lambda _self: None)
    monkeypatch.setattr(reload, "KILL_TIMEOUT_S", 0.01)
    it.reloader.abandon()
    assert it.outcome().text == "the daemon is shutting down"
    with structlog.testing.capture_logs() as lines:
        it.reloader.close()
    assert lines[-1]["event"] == "reloading process cannot be killed"
    assert reader.child.pidfd == -1
    monkeypatch.undo()
    os.kill(reader.child.pid, signal.SIGKILL)
    assert reader.child.reap() == -signal.SIGKILL


def test_a_sandbox_without_priorities_does_not_refuse_the_reload(monkeypatch):
    """Services and containers may not set priorities, and the request is still answered."""

    def refuse(*_arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    applier = Switched()
    applier.request = lambda *_facts: ReloadRequest("0", "batchd.toml", {}, {}, {}, {}, 0, {})
    poller = Poller()
    reloader = Reloader(poller, applier, Origin(Path("batchd.toml"), {}), None, FakeService())
    reloader.ask()
    wait_until(lambda: poller.dispatch() or reloader.outcome, "it is over")
    reloader.close()
    poller.close()
    assert "the daemon that runs is 0: restart it" in reloader.outcome.text
