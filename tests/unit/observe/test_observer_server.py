"""The observer's server against hostile peers, and its access rules, with real sockets."""

import http.client
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest

from batchd.observe.http import __main__ as limits
from batchd.observe.http import access
from batchd.observe.http.__main__ import CONNECTIONS_MAX, HEAD_BYTES_MAX, PEER_CONNECTIONS_MAX, Server
from batchd.observe.http.access import AccessRules, HostNames, endpoint, user_by_question, user_by_table, user_of
from batchd.observe.http.contact_sheets import ContactSheets
from batchd.observe.http.routes import Router
from batchd.observe.http.status_client import StatusRecorder
from support.statuses import open_status_client
from support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def place(tmp_path):
    """Start a server that has never received a status, and return its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    sheets = ContactSheets(f"ipc://{tmp_path}")
    with open_status_client() as client:
        router = Router(client, StatusRecorder(), sheets, HostNames(["bigbox"]), AccessRules(tmp_path))
        server = Server(listener, router)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield listener.getsockname()
        server.shutdown()
        thread.join()
        server.server_close()
        wait_until(lambda: threading.active_count() == 1, "all connections are closed")


def say(place, words: bytes) -> bytes:
    """Send this text and return everything that the server answers."""
    with socket.create_connection(place, PATIENCE_S) as connection:
        connection.sendall(words)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def get(place, path="/healthz", source="127.0.0.1", **headers) -> int:
    """Return the status code of an answer."""
    connection = http.client.HTTPConnection(*place, timeout=PATIENCE_S, source_address=(source, 0))
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_before_the_daemon_has_answered_nothing_is_made_up(place):
    """The paths exist, and their answers say that there is no status yet."""
    assert get(place, "/healthz") == 200
    assert get(place, "/readyz") == 503
    assert get(place, "/status.json") == 503
    assert get(place, "/metrics") == 200


def test_a_slow_loris_is_ended(place, monkeypatch):
    """The deadline covers the whole request, so single bytes do not extend it."""
    monkeypatch.setattr(limits, "REQUEST_S", 0.2)
    with socket.create_connection(place, PATIENCE_S) as connection:

        def is_ended() -> bool:
            try:
                connection.send(b"X")
                connection.settimeout(0.01)
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_ended, "the connection is ended")


def test_who_does_not_read_is_ended(place, monkeypatch):
    """Connections that send nothing have the same deadline."""
    monkeypatch.setattr(limits, "REQUEST_S", 0.2)
    with socket.create_connection(place, PATIENCE_S) as connection:
        assert connection.recv(1) == b""


def test_a_huge_head_is_refused(place):
    """The server buffers no more than the maximum size of a request."""
    answer = say(place, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (4 * HEAD_BYTES_MAX))

    assert answer.startswith(b"HTTP/1.0 431 ")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: \r\n\r\n", 421),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nhost: localhost\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /healthz HTTP/9.9\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        (b"GET //evil.example/ HTTP/1.0\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.0\r\nHost: localhost\r\n\r\n", 404),
        (b"DELETE /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n", 405),
    ],
)
def test_what_is_no_request_of_ours_is_refused(place, words, status):
    """The answer has a status code, and the library writes nothing to batchd's log."""
    assert f" {status} ".encode() in say(place, words).partition(b"\r\n")[0]


def test_who_comes_when_there_is_no_thread_is_put_off(place, monkeypatch):
    """The connection is dropped; when there are threads again, the server answers every client."""

    def start(_self) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert [get(place) for _ in range(PEER_CONNECTIONS_MAX + 1)] == [503] * (PEER_CONNECTIONS_MAX + 1)
    assert get(place) == 200


def test_two_requests_on_one_connection_are_one(place):
    """Bytes behind the first request are ignored."""
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"

    assert say(place, request * 2).count(b"HTTP/1.0 ") == 1


@contextmanager
def crowd(place, count, addresses=1):
    """Open many loopback connections that send the start of a request and then nothing."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(place, PATIENCE_S, source_address=(f"127.0.0.{2 + number % addresses}", 0))
            )
            for number in range(count)
        ]


def begin(connections):
    """Send the start of a request on each connection."""
    for connection in connections:
        connection.sendall(b"GET ")


@pytest.mark.parametrize("addresses", [1, 8])
def test_a_crowd_is_bounded_and_blocks_no_other_client(place, addresses):
    """The oldest connections without a request are closed, so clients with one are answered."""
    bound = CONNECTIONS_MAX if addresses > 1 else PEER_CONNECTIONS_MAX
    with crowd(place, CONNECTIONS_MAX + 20, addresses) as connections:
        with suppress(OSError):
            begin(connections)
        wait_until(lambda: threading.active_count() == bound + 2, "each connection has its thread")
        for _ in range(5):
            assert get(place, source="127.0.0.2") == 200
        wait_until(lambda: threading.active_count() <= bound + 2, "the number of threads is within the bound")
        assert connections[0].recv(1) == b"", "the oldest connection is still open"

    wait_until(lambda: get(place) == 200, "a new client is answered")


def test_who_has_asked_is_not_ended_for_others(place, monkeypatch):
    """If all have a request, a new client of that address gets 503, and others are answered."""
    asked, go_on = threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(limits.failpoints, "passing", lambda _name: (asked.release(), go_on.wait(PATIENCE_S)))
    with crowd(place, PEER_CONNECTIONS_MAX) as connections:
        for connection in connections:
            connection.sendall(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        for _ in connections:
            assert asked.acquire(timeout=PATIENCE_S)
        with crowd(place, 1) as (newcomer,):
            assert newcomer.recv(100).startswith(b"HTTP/1.0 503 ")
        monkeypatch.setattr(limits.failpoints, "passing", lambda _name: None)
        assert get(place) == 200, "a client of another address is not answered"
        go_on.set()
        assert all(connection.recv(100).startswith(b"HTTP/1.0 200 ") for connection in connections)


def test_the_kernel_says_who_is_at_the_other_end():
    """An address of version 4 can be written in two ways, and both are recognised."""
    for family, host in (
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET6, "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::1"),
    ):
        with socket.socket(family) as peer, socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            peer.connect(listener.getsockname())
            connection, _address = listener.accept()
            with connection:
                theirs, ours = (endpoint(one) for one in (connection.getpeername(), connection.getsockname()))
                assert user_by_question(theirs, ours) == user_by_table(theirs, ours) == os.getuid()
                assert user_of(ours, theirs) == os.getuid(), "both ends are ours"
                assert user_by_question(ours, (theirs[0], 9)) is None, "a listener is no connection"
                peer.shutdown(socket.SHUT_RDWR)
                assert user_of(theirs, ours) is None, "a closing connection may belong to any user"


HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: 0100007F:{} 0100007F:1B9F {} 00000000:00000000 00:00000000 00000000  1000        0 {} 1 0 20 4 30 10 -1\n"
OURS, THEIRS = (ip_address("127.0.0.1"), 7071), (ip_address("127.0.0.1"), 40000)


@pytest.mark.parametrize(
    ("line", "user"),
    [
        (LINE.format("9C40", "01", "77"), 1000),
        (LINE.format("9C41", "01", "77"), None),
        (LINE.format("9C40", "06", "0"), None),
        (LINE.format("9C40", "01", "0"), None),
        ("", None),
    ],
)
def test_only_a_living_connection_with_both_its_ends_has_a_user(tmp_path: Path, line: str, user: int | None):
    """Other ports, closing connections and connections without a user do not count."""
    table = tmp_path / "tcp"
    table.write_text(HEADER + line)

    assert user_by_table(THEIRS, OURS, [tmp_path / "none", table]) == user


def test_where_the_kernel_answers_no_questions_its_table_is_read(monkeypatch):
    """This is the case in a sandbox without such sockets."""
    monkeypatch.setattr(access, "NETLINK_SOCK_DIAG", 77)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as peer:
        places = endpoint(peer.getsockname()), endpoint(peer.getpeername())

        assert user_by_question(*places) is None
        assert user_of(*places) == os.getuid()


def test_insiders_are_root_the_daemons_user_and_the_group(tmp_path, monkeypatch):
    """A user that the user namespace does not map is never an insider."""
    group = tmp_path.stat().st_gid
    here = AccessRules(tmp_path)
    monkeypatch.setattr(access, "groups_of", {1: frozenset({group}), 2: frozenset({group + 1})}.__getitem__)
    monkeypatch.setattr(access.os, "geteuid", lambda: 3)

    assert [here.is_insider(user) for user in (0, 1, 2, 3)] == [True, True, False, True]

    monkeypatch.setattr(access, "unmapped_id", lambda kind: {"uid": 3, "gid": group}[kind])
    assert [here.is_insider(user) for user in (0, 1, 3)] == [True, False, False]


def test_a_user_without_an_entry_is_in_no_group():
    """The system's databases do not contain every user."""
    assert access.groups_of(54_321) == frozenset()
    assert 0 in access.groups_of(0)


@pytest.mark.parametrize(
    ("header", "is_ours"),
    [
        ("localhost:7071", True),
        ("LOCALHOST.", True),
        ("bigbox", True),
        ("bigbox:7071", True),
        ("10.0.0.5:7071", True),
        ("[fe80::1]:7071", True),
        ("bigbox.evil.example", False),
        ("", False),
        ("[bigbox]", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_addresses_and_our_names_are_ours(header, is_ours):
    """Only a name can be changed to point to another machine."""
    assert HostNames(["bigbox"]).match(header) is is_ours


def test_the_whole_name_of_the_machine_is_one_of_its_names(monkeypatch):
    """The name is what the resolver returns, when it returns one.

    A resolver with an incomplete answer is asked again, and never by a request.
    """
    told = iter(["bigbox", "bigbox.example.org"])
    monkeypatch.setattr(access, "RETRY_S", 0.01)
    monkeypatch.setattr(access, "full_name", lambda: next(told))
    known = HostNames(["127.0.0.1"])
    assert not known.match("bigbox.example.org")

    known.start()

    wait_until(lambda: known.match("bigbox.example.org:7071"), "the name is known")
    assert known.match("BIGBOX.example.org.")
    assert not known.match("bigbox.evil.example")
    wait_until(lambda: threading.active_count() == 1, "the resolver's thread has ended")


def test_a_resolver_that_hangs_holds_up_no_request(place, monkeypatch):
    """Clients can invent any name, so a request never asks the resolver."""
    monkeypatch.setattr(access, "full_name", lambda: pytest.fail("a request asks the resolver"))

    assert [get(place, Host=f"host{number}.evil.example") for number in range(5)] == [421] * 5


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "x-forwarded-proto", "X-Forwarded-Anything", "X-Real-IP", "Via"]
)
def test_a_client_behind_a_proxy_has_no_user(place, header):
    """The kernel only knows the user of the proxy, here an insider."""
    assert get(place, "/status.json") == 503, "an insider gets 503 before the first status"
    assert get(place, "/status.json", **{header: "for=10.0.0.9"}) == 403
    assert get(place, "/healthz", **{header: "for=10.0.0.9"}) == 200


BROKEN = """
from batchd.observe.http.__main__ import answer
class Broken:
    def serve_forever(self):
        raise RuntimeError("accept no more")
import threading
threading.Thread(target=answer, args=(Broken(),), daemon=True).start()
threading.Event().wait()
"""


def test_an_observer_that_no_longer_answers_ends():
    """The daemon then starts another observer, whatever the cause was."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )

    assert done.returncode == 1
    assert "accept no more" in done.stderr


def test_an_enclosed_observer_ends_where_a_table_of_users_is_replaced(tmp_path, monkeypatch):
    """It could not read the new file, and would take members of the group for strangers."""
    ended = []
    monkeypatch.setattr(limits.os, "_exit", ended.append)
    table = tmp_path / "passwd"
    table.write_text("root:x:0:0::/root:/bin/sh")
    server = Server(socket.create_server(("127.0.0.1", 0)), None, [str(table)])
    server.service_actions()
    assert not ended
    (tmp_path / "passwd+").write_text("root:x:0:0::/root:/bin/bash")
    (tmp_path / "passwd+").rename(table)
    server.service_actions()
    assert ended == [0]
    server.server_close()
