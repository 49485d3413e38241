"""Admission over TCP with real sockets: which messages arrive, and the authenticator's answers."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

import batchd_client
from batchd.runtime.keys import KeyDirectory
from batchd.runtime.limits import SUBJECTS_MAX, HandshakeRate
from batchd.runtime.tcp.router import ANSWERS_MAX, ZAP_DOMAIN, ZAP_ENDPOINT, Authenticator
from batchd_client import opening
from batchd_client.errors import ConnectTimeout, DaemonNotFound
from batchd_client.lifeline import PUT_OFF_STATUS
from batchd_wire.codes import ErrorCode
from batchd_wire.keys import ConnectionKey, Role, connection_file_text
from batchd_wire.messages import TO_DAEMON_REMOTE, Greet, Greeted, Refused
from support.waiting import PATIENCE_S

PATIENCE_MS = int(PATIENCE_S * 1000)
DIAGNOSIS_S = 4.0
"""A busy machine's time for half a handshake: the test waits for it, as the rest never arrives."""
HANDSHAKE_ENDS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
FAILURES = {"HANDSHAKE_FAILED_AUTH", "HANDSHAKE_FAILED_PROTOCOL", "HANDSHAKE_FAILED_NO_DETAIL"}
"""The event depends on which side disconnects first."""
Request = list[bytes]


@pytest.fixture
def keys(tmp_path) -> KeyDirectory:
    return KeyDirectory(tmp_path / "keys")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """A ZeroMQ context without linger."""
    with zmq.Context() as context:
        context.linger = 0
        yield context


@pytest.fixture
def rate() -> HandshakeRate:
    return HandshakeRate()


@pytest.fixture
def authenticator(context, keys, rate, monkeypatch) -> Iterator[Authenticator]:
    monkeypatch.setattr("batchd.runtime.tcp.router.HandshakeRate", lambda: rate)
    authenticator = Authenticator(context, keys.trainers)
    yield authenticator
    authenticator.close()


class Server:
    """A ROUTER on loopback like the daemon's, with a monitor that reports the end of handshakes."""

    def __init__(self, context: zmq.Context, keys: KeyDirectory, authenticator: Authenticator | None) -> None:
        self._authenticator = authenticator
        self.router = context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_secretkey = keys.make_daemon_key()[1].encode()
        self.router.zap_domain = ZAP_DOMAIN
        self.router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self.monitor = self.router.get_monitor_socket(HANDSHAKE_ENDS)
        self.endpoint = f"tcp://127.0.0.1:{self.router.bind_to_random_port('tcp://127.0.0.1')}"

    def first_sign(self) -> bytes | str:
        """Answer ZeroMQ until a message arrived or a handshake failed; return which."""
        poller = zmq.Poller()
        for socket in (self.router, self.monitor, *([self._authenticator.socket] if self._authenticator else [])):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(PATIENCE_MS))
            assert ready, "no message arrived, and no handshake failed"
            if self.router in ready:
                return self.router.recv_multipart()[-1]
            if self.monitor in ready:
                return zmq.Event(recv_monitor_message(self.monitor)["event"]).name
            assert self._authenticator is not None
            self._authenticator.answer()

    def close(self) -> None:
        self.router.disable_monitor()
        self.monitor.close(0)
        self.router.close(0)


@contextmanager
def serving(context: zmq.Context, keys: KeyDirectory, authenticator: Authenticator | None) -> Iterator[Server]:
    server = Server(context, keys, authenticator)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def knocking(endpoint: str, key: ConnectionKey | None = None, **options: bytes) -> Iterator[zmq.Socket]:
    """Connect from a separate context and send one message."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if key is not None:
            dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
                text.encode() for text in (key.daemon, key.public, key.secret)
            )
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(endpoint)
        dealer.send(b"hello")
        yield dealer


def stranger(keys: KeyDirectory) -> ConnectionKey:
    """A client that knows the daemon's public key and has a key pair of its own."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return ConnectionKey("a", keys.make_daemon_key()[0], public, secret)


# --- connections ----------------------------------------------------------------------------------


def test_the_right_key_is_admitted_and_named(context, keys, authenticator) -> None:
    """The message's metadata names the sender; the client cannot choose another name."""
    key = keys.new("gpu-7", frozenset({"photos"}))
    with serving(context, keys, authenticator) as server, knocking(server.endpoint, key, routing_id=b"root"):
        authenticator_loop(server, authenticator)
        _routing_id, content = server.router.recv_multipart(copy=False)
        assert content.bytes == b"hello"
        assert content.get("User-Id") == key.public
    assert authenticator.refused == 0


def authenticator_loop(server: Server, authenticator: Authenticator) -> None:
    """Answer until the router has something to read."""
    poller = zmq.Poller()
    poller.register(server.router, zmq.POLLIN)
    poller.register(authenticator.socket, zmq.POLLIN)
    while server.router not in (ready := dict(poller.poll(PATIENCE_MS))):
        assert ready
        authenticator.answer()


def test_a_key_that_is_made_while_the_daemon_runs_is_admitted(context, keys, authenticator) -> None:
    """The daemon needs no restart."""
    with serving(context, keys, authenticator) as server:
        with knocking(server.endpoint, stranger(keys)):
            assert server.first_sign() == "HANDSHAKE_FAILED_AUTH"
        with knocking(server.endpoint, keys.new("a")):
            while (sign := server.first_sign()) != b"hello":
                assert sign in FAILURES


def test_a_revoked_key_is_refused(context, keys, authenticator) -> None:
    """The daemon admitted the key before it was revoked."""
    key = keys.new("a")
    with serving(context, keys, authenticator) as server:
        with knocking(server.endpoint, key):
            assert server.first_sign() == b"hello"
        keys.revoke("a")
        with knocking(server.endpoint, key):
            assert server.first_sign() == "HANDSHAKE_FAILED_AUTH"
        assert authenticator.refused >= 1
        assert server.router.poll(0) == 0


def test_a_stranger_with_the_name_of_a_key_is_refused(context, keys, authenticator) -> None:
    """The client knows the daemon's public key and claims the name of an admitted key."""
    keys.new("a")
    with serving(context, keys, authenticator) as server, knocking(server.endpoint, stranger(keys)):
        assert server.first_sign() == "HANDSHAKE_FAILED_AUTH"
        assert server.router.poll(0) == 0


def test_the_key_of_a_worker_host_is_refused_to_trainers(context, keys, authenticator) -> None:
    """The key is valid, but its role does not allow batches."""
    key = keys.new("pool", role=Role.WORKER)
    with serving(context, keys, authenticator) as server, knocking(server.endpoint, key):
        assert server.first_sign() == "HANDSHAKE_FAILED_AUTH"
        assert server.router.poll(0) == 0


def test_a_public_key_without_its_secret_is_refused(context, keys, authenticator) -> None:
    """Public keys are readable in the daemon's directory; they must be useless by themselves."""
    key, other = keys.new("a"), stranger(keys)
    thief = ConnectionKey("a", key.daemon, key.public, other.secret)
    with serving(context, keys, authenticator) as server, knocking(server.endpoint, thief):
        assert server.first_sign() in FAILURES
        assert server.router.poll(0) == 0


def test_a_client_without_the_daemons_key_is_refused(context, keys, authenticator) -> None:
    """Its handshake is for the key of another daemon."""
    key = keys.new("a")
    lost = ConnectionKey("a", stranger(keys).public, key.public, key.secret)
    with serving(context, keys, authenticator) as server, knocking(server.endpoint, lost):
        assert server.first_sign() in FAILURES
        assert server.router.poll(0) == 0


@pytest.mark.parametrize("options", [{}, {"plain_username": b"a", "plain_password": b"b"}], ids=["NULL", "PLAIN"])
def test_a_client_that_does_not_encrypt_is_refused(context, keys, authenticator, options) -> None:
    """The peers agree on the mechanism before the daemon sends any data."""
    keys.new("a")
    with serving(context, keys, authenticator) as server, knocking(server.endpoint, **options):
        assert server.first_sign() in FAILURES
        assert server.router.poll(0) == 0


def test_a_directory_that_cannot_be_read_admits_no_client(context, keys, authenticator) -> None:
    """The daemon keeps running and admits the keys again once the directory is readable."""
    key = keys.new("a")
    with serving(context, keys, authenticator) as server:
        keys.path.chmod(0o777)
        with capture_logs() as lines, knocking(server.endpoint, key):
            assert server.first_sign() == "HANDSHAKE_FAILED_AUTH"
        assert lines[0]["log_level"] == "error"
        assert "chmod 700" in lines[0]["reason"]
        keys.path.chmod(0o700)
        with knocking(server.endpoint, key):
            while (sign := server.first_sign()) != b"hello":
                assert sign in FAILURES


@pytest.mark.parametrize("when", ["never there", "gone"])
def test_without_an_authenticator_no_client_is_admitted(context, keys, when) -> None:
    """The socket requires an authenticator, so the right key does not help."""
    key = keys.new("a")
    if when == "gone":
        Authenticator(context, keys.trainers).close()
    with serving(context, keys, None) as server, knocking(server.endpoint, key):
        assert server.first_sign() in FAILURES
        assert server.router.poll(0) == 0


@pytest.mark.thorough(after_first=True)
@pytest.mark.parametrize("state", ["gone", "hung"])
def test_a_dead_authenticator_says_no_byte_and_is_not_taken_for_a_wrong_key(
    context, keys, tmp_path, state, monkeypatch
) -> None:
    """The key is right, so the client does not blame it, whether ZeroMQ disconnects or not."""
    monkeypatch.setattr(opening, "DIAGNOSIS_S", DIAGNOSIS_S)
    authenticator = Authenticator(context, keys.trainers)
    if state == "gone":
        authenticator.close()
    file = tmp_path / "a.key"
    file.touch(0o600)
    file.write_text(connection_file_text(keys.new("a")))
    with serving(context, keys, None) as server:
        with pytest.raises(DaemonNotFound, match="did not say whether it knows the key"):
            batchd_client.connect(server.endpoint, key=str(file), connect_timeout_s=0.5)
        assert server.router.poll(0) == 0
    authenticator.close()


def test_one_context_has_one_authenticator(context, keys, authenticator) -> None:
    """A second one raises at once; the first one keeps working."""
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        Authenticator(context, keys.trainers)
    assert ask(context, authenticator, request_with(stranger(keys).public))[2] == b"400"


# --- question and answer --------------------------------------------------------------------------


def request_with(public: str, **changes: bytes) -> Request:
    """A request in the form of RFC 27 for this key, with some frames changed."""
    frames = {
        "version": b"1.0",
        "number": b"7",
        "domain": ZAP_DOMAIN,
        "address": b"10.0.0.9",
        "identity": b"",
        "mechanism": b"CURVE",
        "credentials": z85.decode(public),
    }
    return list((frames | changes).values())


def ask(context: zmq.Context, authenticator: Authenticator, request: Request) -> list[bytes]:
    """Send a request as ZeroMQ does; return the answer without its empty first frame."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(ZAP_ENDPOINT)
        dealer.send_multipart([b"", *request])
        assert authenticator.socket.poll(PATIENCE_MS)
        authenticator.answer()
        assert dealer.poll(PATIENCE_MS)
        empty, *answer = dealer.recv_multipart()
    assert empty == b""
    return answer


def test_a_known_key_is_answered_with_itself(context, keys, authenticator) -> None:
    """The answer has version, request number, 200 and the key as user id, but no metadata."""
    key = keys.new("gpu-7")

    assert ask(context, authenticator, request_with(key.public)) == [
        b"1.0",
        b"7",
        b"200",
        b"OK",
        key.public.encode(),
        b"",
    ]
    assert authenticator.refused == 0


@pytest.mark.parametrize("role", Role)
def test_a_key_of_another_role_is_refused_and_the_log_says_what_helps(context, keys, role) -> None:
    """An unknown key gets the same answer, but the log differs; keys of the right role enter."""
    made = {one: keys.new(f"a-{one}", role=one) for one in Role}
    (other,) = (one for one in Role if one is not role)
    authenticator = Authenticator(context, keys.of(role))
    try:
        with capture_logs() as lines:
            answers = [ask(context, authenticator, request_with(made[one].public)) for one in (role, other, other)]
            ask(context, authenticator, request_with(stranger(keys).public))
    finally:
        authenticator.close()

    assert [answer[2] for answer in answers] == [b"200", b"400", b"400"]
    assert answers[1][4:] == [b"", b""]
    assert [(line["event"], line["log_level"]) for line in lines] == [("peer refused", "warning")] * 2
    assert lines[0]["reason"] == keys.of(role).other_role(made[other].public)
    assert f"the key 'a-{other}' is a {other.holder}'s" in lines[0]["reason"]
    assert f"`{role.command} --keys-dir {keys.path}` makes one" in lines[0]["reason"]
    assert lines[1]["reason"].startswith(f"no {role.holder} has the key ")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": b"1.1"},
        {"version": b""},
        {"domain": b""},
        {"domain": b"batchd2"},
        {"domain": b"BATCHD"},
        {"mechanism": b"PLAIN"},
        {"mechanism": b"NULL"},
        {"mechanism": b"curve"},
        {"mechanism": b"GSSAPI"},
        {"credentials": b""},
        {"credentials": bytes(31)},
        {"credentials": bytes(32)},
        {"credentials": bytes(33)},
        {"credentials": b"x" * 40},
    ],
)
def test_requests_with_any_wrong_frame_are_refused(context, keys, authenticator, changes) -> None:
    """The answer has the request's number, code 400 and no user id."""
    key = keys.new("a")

    answer = ask(context, authenticator, request_with(key.public, **changes))
    assert answer[:3] == [b"1.0", b"7", b"400"]
    assert answer[4:] == [b"", b""]
    assert authenticator.refused == 1


def test_a_request_with_too_few_or_too_many_frames_is_refused(context, keys, authenticator) -> None:
    """The test sends each length up to the right one, and one frame more."""
    right = request_with(keys.new("a").public)
    wrong = [right[:length] for length in range(len(right))] + [[*right, b""], [*right, right[-1]]]

    for request in wrong:
        assert ask(context, authenticator, request)[2] == b"400"
    assert authenticator.refused == len(wrong)
    assert ask(context, authenticator, right)[2] == b"200"


@given(
    request=st.lists(st.binary(max_size=40) | st.sampled_from([b"1.0", ZAP_DOMAIN, b"CURVE", bytes(32)]), max_size=9)
)
def test_no_request_without_a_key_is_admitted(tmp_path_factory, request) -> None:
    """No such request raises an error either."""
    keys = KeyDirectory(tmp_path_factory.getbasetemp() / "no-keys")
    with zmq.Context() as context:
        authenticator = Authenticator(context, keys.trainers)
        try:
            with capture_logs():
                assert ask(context, authenticator, request)[2] == b"400"
        finally:
            authenticator.close()


def test_frames_without_an_envelope_are_survived(context, keys, authenticator) -> None:
    """Only ZeroMQ itself uses this socket; messages of any other process are ignored."""
    key = keys.new("a")
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(ZAP_ENDPOINT)
        for frames in ([b""], [b"x"], request_with(key.public), [b"x", *request_with(key.public)[1:]]):
            dealer.send_multipart(frames)
            assert authenticator.socket.poll(PATIENCE_MS)
            authenticator.answer()
            assert dealer.poll(PATIENCE_MS)
            assert b"200" not in dealer.recv_multipart()


@pytest.mark.parametrize("rate", [HandshakeRate(burst=3, per_s=1)])
def test_a_host_that_connects_too_often_is_put_off_before_its_key_is_looked_up(
    context, keys, authenticator, monkeypatch
) -> None:
    """Code 500 allows a retry. Other hosts enter, and so does this one with new tokens."""
    now_s, asked = [1000.0], []
    monkeypatch.setattr("batchd.runtime.tcp.router.monotonic", lambda: now_s[0])
    monkeypatch.setattr("batchd.runtime.limits.monotonic", lambda: now_s[0])
    key = keys.new("a")
    find = keys.trainers.find
    monkeypatch.setattr(keys.trainers, "find", lambda public: asked.append(public) or find(public))

    def status(address: bytes) -> bytes:
        return ask(context, authenticator, request_with(key.public, address=address))[2]

    with capture_logs() as lines:
        assert [status(b"10.0.0.1") for _ in range(5)] == [b"200"] * 3 + [b"500"] * 2
        assert [status(b"::ffff:10.0.0.2"), status(b"10.0.0.1")] == [b"200", b"500"]
        assert len(asked) == 4
        now_s[0] += 1
        assert [status(b"10.0.0.1") for _ in range(2)] == [b"200", b"500"]
    assert [(line["log_level"], line["address"]) for line in lines] == [("warning", "10.0.0.1")]
    assert "10.0.0.1 connects more often than once a second" in lines[0]["reason"]
    assert authenticator.refused == 4


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(HandshakeRate(burst=0), PUT_OFF_STATUS), (HandshakeRate(), 400)],
    ids=["put off", "unknown key"],
)
def test_a_client_that_is_put_off_sees_that_trying_again_may_help(context, keys, authenticator, expected) -> None:
    """Its monitor reports a different number than for an unknown key."""
    key = keys.new("a") if expected == PUT_OFF_STATUS else stranger(keys)
    with (
        serving(context, keys, authenticator) as server,
        zmq.Context() as other,
        other.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
            text.encode() for text in (key.daemon, key.public, key.secret)
        )
        told = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        dealer.connect(server.endpoint)
        assert server.first_sign() == "HANDSHAKE_FAILED_AUTH"
        assert told.poll(PATIENCE_MS)
        assert recv_monitor_message(told)["value"] == expected
        dealer.disable_monitor()
        told.close(0)


@pytest.mark.parametrize("rate", [HandshakeRate(burst=0)])
def test_the_client_tries_again_while_it_is_put_off(context, keys, authenticator, tmp_path, let_pass) -> None:
    """It retries until its deadline, then raises the reason; the error does not blame its key."""
    file = tmp_path / "a.key"
    file.touch(0o600)
    file.write_text(connection_file_text(keys.new("a")))
    with serving(context, keys, authenticator) as server, ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(batchd_client.connect, server.endpoint, key=str(file), connect_timeout_s=PATIENCE_S)
        while not trainer.done():
            if authenticator.socket.poll(50):
                authenticator.answer()
            if authenticator.refused > 1:  # the client has read the first refusal
                let_pass(PATIENCE_S)
        with pytest.raises(ConnectTimeout, match="this host connects too often"):
            trainer.result()


@pytest.mark.parametrize(
    ("rate", "hint"),
    [
        (HandshakeRate(1, per_s=0.0), "this host connects too often"),
        (
            HandshakeRate(1000, per_s=0.0),
            "took the first of 2 connections, but not all others: the daemon says: who are you",
        ),
    ],
)
def test_a_further_connection_that_is_refused_is_no_wrong_key(
    context, keys, authenticator, tmp_path, let_pass, hint
) -> None:
    """After the rate limit or the end of its session refused it, the whole session is retried."""
    file = tmp_path / "a.key"
    file.touch(0o600)
    file.write_text(connection_file_text(keys.new("a")))
    greetings = 0
    with serving(context, keys, authenticator) as server, ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(
            batchd_client.connect, server.endpoint, key=str(file), connections=2, connect_timeout_s=PATIENCE_S
        )
        while not trainer.done():
            if authenticator.socket.poll(20):
                authenticator.answer()
            while server.router.poll(0):
                routing_id, words = server.router.recv_multipart()
                if isinstance(TO_DAEMON_REMOTE.decode(words), Greet):
                    greetings += 1
                    answer = Greeted("1", "", bytes(16))
                else:
                    answer = Refused(0, 0, ErrorCode.UNKNOWN_SESSION, "who are you?")
                server.router.send_multipart([routing_id, answer.encode()])
            if max(authenticator.refused, greetings) > 1:
                let_pass(PATIENCE_S)
        with pytest.raises(ConnectTimeout, match=hint):
            trainer.result()
    assert greetings == 1 if "too often" in hint else greetings > 1


@pytest.mark.parametrize("failure", ["a file in its place", "an error of the disk"])
def test_a_failing_directory_is_answered_with_500(context, keys, authenticator, monkeypatch, failure) -> None:
    """No peer is admitted, log and counters report it, and the answer names none of our files."""
    key = keys.new("a")
    if failure == "a file in its place":
        keys.path.rename(keys.path.with_suffix(".old"))
        keys.path.write_text("")
    else:
        monkeypatch.setattr(os, "listdir", lambda _folder: (_ for _ in ()).throw(OSError(5, "Input/output error")))

    with capture_logs() as lines:
        answer = ask(context, authenticator, request_with(key.public))
    assert answer[2:] == [b"500", b"the daemon cannot read its keys", b"", b""]
    assert [(line["event"], line["log_level"], line["address"]) for line in lines] == [
        ("cannot check a peer's key", "error", "10.0.0.9")
    ]
    assert authenticator.refused == 1


def test_one_call_answers_a_portion(context, keys, authenticator) -> None:
    """Many pending requests do not delay the sessions that are open."""
    key = keys.new("a")
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(ZAP_ENDPOINT)
        for _ in range(ANSWERS_MAX + 1):
            dealer.send_multipart([b"", *request_with(key.public)])
        answered = []
        while len(answered) <= ANSWERS_MAX:
            assert authenticator.socket.poll(PATIENCE_MS)
            authenticator.answer()
            here = 0
            while len(answered) + here <= ANSWERS_MAX and dealer.poll(0):
                assert dealer.recv_multipart()[3] == b"200"
                here += 1
            answered += [None] * here
            assert here <= ANSWERS_MAX
    authenticator.answer()


def test_refusals_are_counted_and_logged_once_a_minute_for_each_address(
    context, keys, authenticator, monkeypatch
) -> None:
    """A client that connects as fast as it can does not fill the disk."""
    now_s = [1000.0]
    monkeypatch.setattr("batchd.runtime.limits.monotonic", lambda: now_s[0])
    unknown = stranger(keys).public
    keys.new("a")

    with capture_logs() as lines:
        for address in (b"10.0.0.1", b"10.0.0.2", b"10.0.0.1", b"10.0.0.1"):
            ask(context, authenticator, request_with(unknown, address=address))
        now_s[0] += 61
        ask(context, authenticator, request_with(unknown, address=b"10.0.0.1"))
    assert [line["address"] for line in lines] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert all(line["reason"] == f"no trainer has the key {unknown}" for line in lines)
    assert authenticator.refused == 5


def test_a_network_of_addresses_is_logged_once_and_hides_no_other(context, keys, authenticator) -> None:
    """One IPv6 host has 2^64 addresses, so the log throttle drops its oldest entries."""
    unknown = stranger(keys).public
    crowd = [f"2001:db8::{number:x}".encode() for number in range(SUBJECTS_MAX + 1)]
    with capture_logs() as lines:
        for address in (b"10.0.0.1", *crowd, b"10.0.0.1", b"2001:db8:1::1"):
            ask(context, authenticator, request_with(unknown, address=address))
    assert [line["address"] for line in lines] == ["10.0.0.1", "2001:db8::0", "2001:db8:1::1"]


def test_the_log_shortens_and_escapes_odd_frames(context, keys, authenticator) -> None:
    """No frame can send control codes to a terminal."""
    public = stranger(keys).public
    with capture_logs() as lines:
        ask(context, authenticator, request_with(public, address=b"\x1b[2J\xff" + b"x" * 100, domain=b"\n"))

    assert lines[0]["address"] == "?[2J\ufffd" + "x" * 59
    assert lines[0]["reason"] == "the domain is ?"


def test_answering_leaves_no_thread_behind(context, keys) -> None:
    """The daemon's loop does all the work."""
    before = threading.active_count()
    authenticator = Authenticator(context, keys.trainers)
    ask(context, authenticator, request_with(stranger(keys).public))
    assert threading.active_count() == before
    authenticator.close()
    assert authenticator.socket.closed
