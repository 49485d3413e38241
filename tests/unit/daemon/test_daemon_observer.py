"""The observer from the daemon's side: its address and its restarts."""

import socket
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from batchd.config.tree import DaemonConfig
from batchd.daemon import observer
from batchd.daemon.observer import PAUSE_FIRST_S, PAUSE_MAX_S, HttpSocket, ObserverProcess, open_http
from batchd.errors import ConfigInvalid
from batchd.runtime.addresses import parse_http
from batchd.runtime.children import Linked
from batchd.runtime.poller import Poller
from batchd_wire.runtime import RuntimeDirectory
from support.kernel import watched_by
from support.stand_in_child import StandInChild


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    """The daemon does not wait for an address in use."""
    monkeypatch.setattr(observer, "BIND_PATIENCE_S", 0.0)


@pytest.fixture
def taken():
    """An address that another socket uses."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def by_default(http: str) -> DaemonConfig:
    """A configuration without ``http``, on a machine where that is the default."""
    return DaemonConfig.model_construct(_fields_set=set(), http=http)


def test_a_default_address_in_use_is_skipped_without_waiting(taken, monkeypatch):
    """Two daemons of two users on one machine both start; one log line names the remedy."""
    monkeypatch.setattr(observer, "sleep", lambda _seconds: pytest.fail("HTTP delays the daemon's own address"))
    with capture_logs() as lines:
        door = open_http(by_default(taken), is_embedded=False)

    assert door.address is None
    (line,) = lines
    assert line["log_level"] == "warning"
    assert line["reason"] == f"cannot listen on {taken}: address already in use"
    assert "http in [daemon]" in line["advice"]


def test_a_default_address_that_becomes_free_is_used(monkeypatch):
    """The daemon that had it ends: the other one then answers there, for its first visitor."""
    now = [1000.0]
    monkeypatch.setattr(observer, "monotonic", lambda: now[0])
    monkeypatch.setattr(ObserverProcess, "_start", lambda process: starts.append(process.address))
    starts: list[str | None] = []
    poller = Poller()
    with socket.create_server(("127.0.0.1", 0)) as holder, capture_logs() as lines:
        http = f"127.0.0.1:{holder.getsockname()[1]}"
        door = open_http(by_default(http), is_embedded=False)
        with ObserverProcess(poller, door, RuntimeDirectory(None)) as process:  # type: ignore[arg-type]
            process.start(lambda _lifeline, _pid: None)
            for _ in range(10):
                now[0] += PAUSE_MAX_S
                process.tick()
            assert process.address is None
            holder.close()
            now[0] += PAUSE_MAX_S
            process.tick()
            assert process.address == f"http://{http}"
            host, port = http.split(":")
            with socket.create_connection((host, int(port))):
                poller.dispatch()
            assert starts == [process.address]
    assert [line["event"] for line in lines] == ["HTTP disabled", "observing"]
    assert not watched_by(poller.fileno())
    poller.close()


def test_a_configured_address_in_use_is_an_error(taken):
    """Its user has a program that reads metrics there."""
    with pytest.raises(ConfigInvalid, match=r"daemon\.http: cannot listen on .*: address already in use; set http"):
        open_http(DaemonConfig(http=taken), is_embedded=False)
    with pytest.raises(ConfigInvalid, match=r"no-such-host\.invalid"):
        open_http(DaemonConfig(http="no-such-host.invalid:7071"), is_embedded=False)


def test_an_address_that_is_released_in_a_moment_is_waited_for(monkeypatch):
    """The previous daemon was killed, and its observer has not noticed yet."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        http = f"127.0.0.1:{holder.getsockname()[1]}"
        monkeypatch.setattr(observer, "BIND_PATIENCE_S", 60.0)
        monkeypatch.setattr(observer, "sleep", lambda _seconds: holder.close())
        door = open_http(DaemonConfig(http=http), is_embedded=False)
    try:
        assert door.address == f"http://{http}"
    finally:
        door.close()


def test_no_address_is_opened_if_it_is_switched_off():
    """The observer is off, or the daemon runs inside a script."""
    assert open_http(DaemonConfig(http="off"), is_embedded=False) == HttpSocket()
    assert open_http(by_default("127.0.0.1:0"), is_embedded=True) == HttpSocket()


@pytest.mark.parametrize(
    ("http", "start"),
    [
        ("127.0.0.1:0", "http://127.0.0.1:"),
        ("localhost:0", "http://"),
        ("[::1]:0", "http://[::1]:"),
        ("*:0", "http://"),
    ],
)
def test_a_free_port_is_chosen_and_named(http, start):
    """This helps tests and many daemons on one machine; an embedded daemon can ask for it."""
    door = open_http(DaemonConfig(http=http), is_embedded=True)
    try:
        assert door.address is not None
        assert door.address.startswith(start)
        assert not door.address.endswith(":0")
    finally:
        door.close()


@pytest.mark.parametrize("text", ["", "7071", "localhost", "127.0.0.1:70000", "http://localhost:7071", ":7071", "On"])
def test_an_invalid_address_is_refused_with_the_right_form(text):
    """The error has an example, and the word for no address."""
    with pytest.raises(ValueError, match=r'write for example "127\.0\.0\.1:7071", or "off"'):
        parse_http(text)


def test_an_observer_that_always_fails_is_restarted_less_and_less_often(monkeypatch, tmp_path):
    """After one has lived for a while, the next restart is soon again."""
    now = [1000.0]
    monkeypatch.setattr(observer, "monotonic", lambda: now[0])
    poller = Poller()
    starts, children = [], []

    def start(*_arguments: object, **_options: object) -> Linked:
        starts.append(now[0])
        if not children:
            raise OSError("no more processes")
        return Linked(children[0], lifeline)

    monkeypatch.setattr(observer, "start_linked", start)
    listener, lifeline = socket.socket(), socket.socket()
    with (
        capture_logs(),
        ObserverProcess(poller, HttpSocket(listener, is_asked_for=True), RuntimeDirectory(tmp_path)) as process,
    ):
        process.start(lambda lifeline, _pid: lifeline.close())

        def let_pass(ticks: int) -> None:
            for _ in range(ticks):
                now[0] += 0.1
                process.tick()

        let_pass(4000)
        pauses = [round(after - before) for before, after in pairwise(starts)]
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60][: len(pauses)]
        assert pauses[-1] == PAUSE_MAX_S
        children.append(StandInChild())
        let_pass(1200)
        lived_since = starts[-1]
        assert now[0] > lived_since + PAUSE_MAX_S
        children.pop().end_now()
        poller.dispatch()
        ended = now[0]
        let_pass(20)
        assert starts[starts.index(lived_since) + 1] == pytest.approx(ended + PAUSE_FIRST_S, abs=0.2)
    poller.close()


def test_at_the_default_address_the_first_visitor_starts_the_observer(monkeypatch):
    """The observer starts once; the connection waits for it."""
    starts = []

    def start(process: ObserverProcess) -> None:
        starts.append(process)

    monkeypatch.setattr(ObserverProcess, "_start", start)
    poller = Poller()
    door = open_http(by_default("127.0.0.1:0"), is_embedded=False)
    assert door.listener is not None
    with capture_logs() as lines, ObserverProcess(poller, door, RuntimeDirectory(None)) as process:  # type: ignore[arg-type]
        process.start(lambda _lifeline, _pid: None)
        poller.dispatch()
        assert (starts, [line["http"] for line in lines]) == ([], [door.address])
        with (
            socket.create_connection(door.listener.getsockname()),
            socket.create_connection(door.listener.getsockname()),
        ):
            poller.dispatch()
            poller.dispatch()
            assert starts == [process]
    assert not watched_by(poller.fileno())
    poller.close()


def test_a_daemon_that_ends_before_the_first_visitor_watches_nothing_any_more():
    poller = Poller()
    with (
        capture_logs(),
        ObserverProcess(
            poller,
            open_http(by_default("127.0.0.1:0"), is_embedded=False),
            RuntimeDirectory(None),  # type: ignore[arg-type]
        ) as process,
    ):
        process.start(lambda _lifeline, _pid: None)
        assert watched_by(poller.fileno())
    assert not watched_by(poller.fileno())
    poller.close()


def test_an_address_is_exclusive_from_the_first_moment() -> None:
    """Two daemons that start together do not both use it."""
    first = open_http(DaemonConfig(http="127.0.0.1:0"), is_embedded=False)
    assert first.address is not None
    same = first.address.removeprefix("http://")
    with pytest.raises(ConfigInvalid, match="cannot listen on"):
        open_http(DaemonConfig(http=same), is_embedded=False)
    first.close()
