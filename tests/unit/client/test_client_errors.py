"""The errors that a trainer gets: first the facts, then the remedy."""

import os
import pickle
import re
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

import batchd_client
from batchd_client import connection, discovery, errors, reader
from batchd_client.errors import (
    AddressInvalid,
    BatchdClientError,
    BatchTimeout,
    ConnectTimeout,
    DaemonFull,
    DaemonNotFound,
    PermissionDenied,
    ProtocolError,
    RingBusy,
    StreamStopped,
    StreamUnknown,
    VersionMismatch,
    error_for_code,
)
from batchd_client.opening import open_session
from batchd_client.session import Session
from batchd_wire import runtime
from batchd_wire.channel import send_message
from batchd_wire.codec import Message
from batchd_wire.codes import ErrorCode
from batchd_wire.messages import Hello, Pull, Refused, Subscribe
from support.fake_daemon import FakeDaemon
from support.fake_stream import FakeSession
from support.waiting import PATIENCE_S

LEFT_S = 0.3
"""Time that a test leaves for a request without an answer."""


def refuse_hello(fake: FakeDaemon, error: ErrorCode, text: str) -> None:
    def answer(session, message) -> bool:
        if isinstance(message, Hello):
            send_message(session.lifeline, Refused(0, 0, error, text))
        return isinstance(message, Hello)

    fake.answer = answer


def test_an_error_from_another_process_has_its_remedy_once() -> None:
    """Pools pickle errors, and a DataLoader builds them again from their text."""
    error = errors.RingExhausted("this trainer holds 4 batches")

    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(errors.ForkedConnection(str(errors.ForkedConnection()))) == str(errors.ForkedConnection())
    assert str(error).count("Release batches") == 1


# --- no daemon ------------------------------------------------------------------------------------


def test_missing_directory_is_named_with_the_command_that_helps(tmp_path) -> None:
    """This is the most frequent error."""
    with pytest.raises(DaemonNotFound) as caught:
        batchd_client.connect(str(tmp_path / "nowhere"), connect_timeout_s=0.1)

    assert str(tmp_path / "nowhere") in str(caught.value)
    assert "no such directory" in str(caught.value)
    assert re.search(r"could be reached within \d+\.\d s", str(caught.value))
    assert "batchd serve" in str(caught.value)
    assert "BATCHD_ADDRESS" in str(caught.value)


def test_directory_without_a_daemon_has_its_own_error(tmp_path) -> None:
    """The directory exists, so the address is probably right and the daemon does not run."""
    with pytest.raises(DaemonNotFound, match=r"the directory exists, but has no lifeline\.sock"):
        batchd_client.connect(str(tmp_path), connect_timeout_s=0)


def test_socket_of_a_dead_daemon_has_its_own_error(fake) -> None:
    """A killed daemon leaves its socket's file behind."""
    fake.kill()

    with pytest.raises(DaemonNotFound, match="no process listens on it any more"):
        batchd_client.connect(fake.address, connect_timeout_s=0)


def test_every_candidate_is_named(tmp_path, monkeypatch) -> None:
    """Without an address, the error lists all places where the client looked."""
    monkeypatch.delenv("BATCHD_ADDRESS", raising=False)
    monkeypatch.setattr(runtime, "SYSTEM_DIRECTORY", tmp_path / "system")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))

    with pytest.raises(DaemonNotFound) as caught:
        batchd_client.connect()

    assert f"{tmp_path}/system: no such directory" in str(caught.value)
    assert f"{tmp_path}/user/batchd: no such directory" in str(caught.value)


def test_first_candidate_that_answers_is_taken(tmp_path, monkeypatch) -> None:
    """The system's daemon may be absent."""
    monkeypatch.delenv("BATCHD_ADDRESS", raising=False)
    monkeypatch.setattr(runtime, "SYSTEM_DIRECTORY", tmp_path / "system")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    with FakeDaemon(tmp_path / "batchd") as fake, batchd_client.connect() as daemon:
        assert daemon.address == fake.address


def test_environment_says_where_the_daemon_is(fake, monkeypatch) -> None:
    """The argument overrides the environment."""
    monkeypatch.setenv("BATCHD_ADDRESS", fake.address)
    batchd_client.connect().close()
    monkeypatch.setenv("BATCHD_ADDRESS", "ipc:///nowhere")
    batchd_client.connect(fake.address).close()

    with pytest.raises(DaemonNotFound, match="/nowhere"):
        batchd_client.connect(connect_timeout_s=0)


@pytest.mark.parametrize("address", ["tcp://host", "ipc://", "/x" * 60, "host:70700", "[::1]:0"])
def test_invalid_address_is_refused_with_its_origin(address: str, monkeypatch) -> None:
    """This finds a mistyped value in a job's environment."""
    with pytest.raises(AddressInvalid, match=r"connect\(\)"):
        batchd_client.connect(address)

    monkeypatch.setenv("BATCHD_ADDRESS", address)
    with pytest.raises(AddressInvalid, match="BATCHD_ADDRESS"):
        batchd_client.connect()


def test_closed_directory_is_an_error_of_its_own(tmp_path, monkeypatch) -> None:
    """The remedy is a group, so the error names the group that may connect."""

    def deny(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(discovery, "patiently_open", deny)  # because root is never denied
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 1)

    with pytest.raises(PermissionDenied, match=r"permission denied \(its group is '\w+', gid \d+\)[\s\S]*usermod"):
        batchd_client.connect(str(tmp_path))
    with pytest.raises(PermissionDenied, match=r"its group is root, which is no group for trainers: chgrp GROUP /\)"):
        batchd_client.connect("/")


def test_daemon_that_refuses_the_peer_says_why(fake) -> None:
    """The error has the daemon's own text."""
    refuse_hello(fake, ErrorCode.NOT_ALLOWED, "uid 1000 is not in the group 'ml'")

    with pytest.raises(PermissionDenied, match="uid 1000 is not in the group"):
        batchd_client.connect(fake.address)


def test_full_daemon_is_no_permission_error(fake) -> None:
    """Membership of a group would not help."""
    refuse_hello(fake, ErrorCode.TOO_MANY_SESSIONS, "as many trainers are connected as may be (256)")

    with pytest.raises(DaemonFull, match=r"\(256\)[\s\S]*sessions_max") as caught:
        batchd_client.connect(fake.address)
    assert "usermod" not in str(caught.value)


def test_trainer_whose_daemon_comes_back_full_waits_for_a_place(fake) -> None:
    """Other trainers may have connected earlier, and may leave again."""
    with batchd_client.connect(fake.address, reconnect_timeout_s=20) as daemon:
        refused = []

        def answer(session, message) -> bool:
            if not isinstance(message, Hello) or len(refused) == 3:
                return False
            refused.append(message)
            send_message(session.lifeline, Refused(0, 0, ErrorCode.TOO_MANY_SESSIONS, "full"))
            return True

        fake.kill()
        fake.answer = answer
        fake.start()

        assert daemon.status() == {"version": "fake"}
    assert len(refused) == 3


def test_daemon_of_another_version_says_which(fake) -> None:
    """The error says how to find the installed version."""
    refuse_hello(fake, ErrorCode.UNSUPPORTED_VERSION, "this daemon speaks version 2 of the protocol")

    with pytest.raises(VersionMismatch, match=r"version 2[\s\S]*pip show batchd-client"):
        batchd_client.connect(fake.address)


def test_draining_daemon_is_tried_until_the_deadline(fake, pausing) -> None:
    """Another daemon may replace it at any moment."""
    refuse_hello(fake, ErrorCode.DRAINING, "finishing 3 batches")

    with (
        pausing(connection, 0.0, 0.0, PATIENCE_S),
        pytest.raises(ConnectTimeout, match=rf"after {PATIENCE_S:g} s.*finishing 3 batches"),
    ):
        batchd_client.connect(fake.address, connect_timeout_s=PATIENCE_S)


def test_the_daemons_refusal_outranks_an_attempt_that_the_deadline_cut_off(fake, pausing) -> None:
    """The daemon refuses once and does not answer after that."""
    said = []

    def refuse_once(session, message) -> bool:
        if isinstance(message, Hello) and not said:
            said.append(message)
            send_message(session.lifeline, Refused(0, 0, ErrorCode.DRAINING, "finishing 3 batches"))
        return isinstance(message, Hello)

    fake.answer = refuse_once

    with (
        pausing(connection, PATIENCE_S - LEFT_S),
        pytest.raises(ConnectTimeout, match="finishing 3 batches"),
    ):
        batchd_client.connect(fake.address, connect_timeout_s=PATIENCE_S)
    assert said


def test_silent_daemon_is_given_up_at_the_deadline(fake) -> None:
    """The error names the stage of the connection."""
    fake.answer = lambda _session, message: isinstance(message, Hello)

    with pytest.raises(ConnectTimeout, match=r"lifeline\.sock took the connection, but .* did not say a word"):
        batchd_client.connect(fake.address, connect_timeout_s=0.2)


def test_daemon_without_its_other_socket_is_given_up_at_the_deadline(fake, monkeypatch, let_pass) -> None:
    """The lifeline answers, and ZeroMQ does not."""
    fake.runtime.zmq_path.unlink()
    monkeypatch.setattr(Session, "wait", lambda _self, seconds: let_pass(seconds))

    with pytest.raises(ConnectTimeout, match=r"batchd\.sock does not take the connection"):
        batchd_client.connect(fake.address, connect_timeout_s=PATIENCE_S)


def test_connect_waits_in_a_full_queue_of_trainers(tmp_path) -> None:
    """Two hundred trainers may start at once."""
    directory = runtime.runtime_directory(tmp_path)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
    ):
        listener.bind(str(directory.lifeline_path))
        listener.listen(0)
        other.connect(str(directory.lifeline_path))

        with pytest.raises(ConnectTimeout, match="more trainers waiting"):
            batchd_client.connect(directory.address, connect_timeout_s=0.1)


# --- a daemon that comes back ---------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing", "the directory", "the sockets"])
def test_connect_waits_for_a_daemon_that_restarts(tmp_path, left) -> None:
    """The client waits as over the network, for all leftovers of the old daemon."""
    fake = FakeDaemon(tmp_path / "run")
    if left == "the directory":
        (tmp_path / "run").mkdir()
    elif left == "the sockets":
        with fake:
            pass
    tries = []

    def note(target, *arguments):
        tries.append(target)
        if len(tries) == 2:
            fake.start()
        return open_session(target, *arguments)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(connection, "open_session", note)
        stack.callback(fake.kill)
        daemon = stack.enter_context(batchd_client.connect(fake.address))
        assert daemon.status() == {"version": "fake"}
    assert len(tries) >= 2


def test_errors_that_waiting_cannot_solve_are_raised_at_once(tmp_path) -> None:
    """A file is in the place of the socket."""
    (tmp_path / "lifeline.sock").touch()

    with pytest.raises(DaemonNotFound, match="it is no socket"):
        batchd_client.connect(str(tmp_path), connect_timeout_s=3600)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place for a moment")
def test_closed_directory_is_an_error_at_once(tmp_path) -> None:
    """Waiting does not open it; the test runs as a user without permission."""
    closed = tmp_path / "run"
    closed.mkdir(mode=0o700)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(61234, 61234, 61234)
        os.setresuid(61234, 61234, 61234)
        try:
            batchd_client.connect(str(closed), connect_timeout_s=3600)
        except PermissionDenied:
            os._exit(7)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# --- a stream that cannot be served ---------------------------------------------------------------


def test_unknown_stream_is_refused_with_the_known_ones(fake) -> None:
    """The error has the daemon's list."""
    with batchd_client.connect(fake.address) as daemon, pytest.raises(StreamUnknown, match="there are 'photos'"):
        daemon.stream("photo")


def refuse_while_busy(fake: FakeDaemon, times: int) -> None:
    """Make the daemon refuse a trainer for lack of memory this often."""
    left = iter(range(times))

    def answer(session, message) -> bool:
        if not isinstance(message, Subscribe) or next(left, None) is None:
            return False
        fake.send(session, Refused(message.request, 0, ErrorCode.RING_BUSY, "7 of the 8 slots are held"))
        return True

    fake.answer = answer


def test_subscribe_waits_for_memory_that_others_hold(fake) -> None:
    """The trainer asks again until it is admitted."""
    refuse_while_busy(fake, 3)
    with batchd_client.connect(fake.address) as daemon:
        assert next(iter(daemon.stream("photos"))).step == 0

    assert len(fake.heard_of(Subscribe)) == 4


def test_memory_that_others_never_return_is_an_error_at_the_deadline(fake, pausing) -> None:
    """The error says how much memory the others hold."""
    refuse_while_busy(fake, 1000)
    with (
        batchd_client.connect(fake.address, connect_timeout_s=PATIENCE_S) as daemon,
        pausing(reader, 0.0, 0.0, PATIENCE_S - reader.BUSY_PAUSE_S),
        pytest.raises(RingBusy, match="7 of the 8 slots"),
    ):
        daemon.stream("photos")


def test_memory_that_others_held_is_named_where_the_deadline_cut_the_last_request_off(fake, pausing) -> None:
    """The daemon refuses once and does not answer after that."""
    refuse_while_busy(fake, 1)
    refuse = fake.answer
    fake.answer = lambda session, message: refuse(session, message) or isinstance(message, Subscribe)
    with (
        batchd_client.connect(fake.address, connect_timeout_s=PATIENCE_S) as daemon,
        pausing(reader, PATIENCE_S - LEFT_S),
        pytest.raises(RingBusy, match="7 of the 8 slots"),
    ):
        daemon.stream("photos")


def test_stopped_stream_says_why_and_where_to_look(fake) -> None:
    """The error is the same after each further attempt."""
    fake.grants_at_most = 0
    fake.answer = lambda session, message: fake.refuses(
        session, message, ErrorCode.STREAM_STOPPED, "cat/7.jpg: empty file"
    )
    with batchd_client.connect(fake.address) as daemon:
        stream = daemon.stream("photos")
        for _ in range(2):
            with pytest.raises(StreamStopped, match=r"cat/7\.jpg[\s\S]*batchd bad"):
                next(iter(stream))


def late(let_pass: Callable[[float], None], pulls: int = 1) -> Callable[[FakeSession, Message], bool]:
    """For ``answer``: delay a batch until a trainer has reported so often that it waits."""
    left = iter(range(pulls - 1))

    def answer(_session: FakeSession, message: Message) -> bool:
        if isinstance(message, Pull) and message.waiting and next(left, None) is None:
            let_pass(PATIENCE_S)
        return False

    return answer


def test_late_batch_is_an_error_with_all_that_is_known(fake, let_pass) -> None:
    """The error names batch, place, duration, the daemon's last report and the held batches.

    The next call continues to wait.
    """
    fake.grants_at_most = 1
    with batchd_client.connect(fake.address, batch_timeout_s=PATIENCE_S) as daemon:
        batches = iter(daemon.stream("photos"))
        kept = next(batches)

        fake.answer = late(let_pass)
        with pytest.raises(BatchTimeout) as caught:
            next(batches)
        fake.answer = lambda _session, _message: False
        assert kept.step == 0
        assert re.search(
            rf"stream 'photos' at epoch 0, step 1 within {PATIENCE_S:g} s: .*ipc://.*/run is alive .* last word came \d+ s ago, "
            r"and this program holds 1 batch of the stream",
            str(caught.value),
        )
        assert "batchd status" in str(caught.value)

        fake.grant_up_to(9)
        assert next(batches).step == 1


def test_waiting_trainer_repeats_its_report(fake, monkeypatch, let_pass) -> None:
    """A daemon that lost track of the trainer must notice it."""
    monkeypatch.setattr("batchd_client.reader.ANNOUNCE_AGAIN_S", 0.01)
    fake.grants_at_most = 0
    fake.answer = late(let_pass, pulls=3)
    with batchd_client.connect(fake.address, batch_timeout_s=PATIENCE_S) as daemon, pytest.raises(BatchTimeout):
        next(iter(daemon.stream("photos")))

    assert sum(pull.waiting for pull in fake.heard_of(Pull)) >= 3


def test_refusal_of_an_earlier_wait_is_not_raised_again(fake) -> None:
    """Only answers to the present wait count."""
    fake.grants_at_most = 0
    answers = []

    def refuse_twice(session, message) -> bool:
        if not (isinstance(message, Pull) and message.waiting and not answers):
            return False
        answers.append(message)
        for _ in range(2):
            fake.refuses(session, message, ErrorCode.STREAM_STOPPED, "stopped")
        return True

    fake.answer = refuse_twice
    with batchd_client.connect(fake.address) as daemon:
        batches = iter(daemon.stream("photos"))
        with pytest.raises(StreamStopped):
            next(batches)
        fake.grant_up_to(9)

        assert next(batches).step == 0


# --- the tree of errors ---------------------------------------------------------------------------


def kinds() -> list[type[BatchdClientError]]:
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BatchdClientError) and not kind.__subclasses__()
    ]


@pytest.mark.parametrize("kind", kinds())
def test_every_error_has_facts_and_a_remedy(kind) -> None:
    """The docstring is the default message; facts replace its first paragraph only."""
    what, *remedy = str(kind()).split("\n")
    facts, *same = str(kind("17 of 4")).split("\n")

    assert what
    assert remedy
    assert facts == "17 of 4"
    assert same == remedy


def test_every_code_has_its_error() -> None:
    """The error has the daemon's text; an unknown code of a later version is shown as a number."""
    for code in ErrorCode:
        assert "seventeen" in str(error_for_code(code, "seventeen"))
    assert isinstance(error_for_code(999, "new"), ProtocolError)
    assert "999" in str(error_for_code(999, "new"))


def test_tree_in_the_docstring_is_the_tree() -> None:
    """The drawing names every leaf."""
    for kind in kinds():
        assert re.search(rf"\b{kind.__name__}\b", errors.__doc__), kind
