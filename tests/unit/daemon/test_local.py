"""Local connections without a session: a limit per user, timeouts, and free descriptors."""

import errno
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from structlog.testing import capture_logs

from batchd.daemon.local import listener as local
from batchd.daemon.local.listener import Listener, PendingConnections, descriptors_left
from batchd.runtime.descriptors import PeerSockets
from batchd.runtime.limits import PENDING_TICKS, oldest_of_crowds
from batchd.runtime.poller import Poller
from batchd.stream.rings import SPARE_DESCRIPTORS
from support.kernel import descriptors_of


def test_the_owner_with_most_loses_its_oldest() -> None:
    """Connections are closed until this owner has no more than the others."""
    owners = {1: "few", 2: "many", 3: "many", 4: "few", 5: "many", 6: "many"}

    assert oldest_of_crowds(owners, 2) == [2, 3]
    assert sorted(oldest_of_crowds(owners, 4)) == [1, 2, 3, 5]
    assert len(oldest_of_crowds(owners, 99)) == 6
    assert oldest_of_crowds(owners, -1) == []


def test_strangers_are_told_by_their_time() -> None:
    """A connection that became a session is no longer counted as a stranger."""
    pending: PendingConnections[str] = PendingConnections()
    pending.add("silent", 0)
    pending.add("session", 0)
    assert not pending.blocking()
    overdue = [pending.tick() for _ in range(PENDING_TICKS)]
    pending.remove("session")
    pending.add("new", 0)

    assert overdue == [[]] * PENDING_TICKS
    assert pending.blocking() == pending.tick() == ["silent"]
    assert pending.excess(1) == ["silent"]


def test_descriptors_are_counted() -> None:
    """Both open descriptors and reserved descriptors count."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    assert abs(limit - descriptors_left() - SPARE_DESCRIPTORS - len(descriptors_of("self"))) <= 2


@pytest.fixture
def knock(tmp_path, monkeypatch) -> Iterator[Callable[[int], tuple[Listener, Poller, list[socket.socket]]]]:
    """Return a function that connects twice to a listener while so many descriptors are left.

    It returns the listener, its poller and the accepted connections.
    """
    with ExitStack() as stack:
        poller = stack.enter_context(closing(Poller()))
        came: list[socket.socket] = []

        def let_in(one: socket.socket) -> None:
            came.append(stack.enter_context(one))

        def knock(left: int) -> tuple[Listener, Poller, list[socket.socket]]:
            monkeypatch.setattr(local, "descriptors_left", lambda: left)
            door = stack.enter_context(closing(Listener(poller, socket.SOCK_STREAM, let_in, lambda: 2, PeerSockets())))
            door.open(tmp_path / "door")
            door.begin()
            for _ in range(2):
                stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / "door"))
            return door, poller, came

        yield knock


def test_who_comes_waits_while_too_few_descriptors_are_left(knock, monkeypatch) -> None:
    """One spare descriptor admits one connection; the next one is admitted when more are free."""
    door, poller, came = knock(2)
    with capture_logs() as log:
        poller.dispatch()
        poller.dispatch()
    assert (len(came), door.is_short) == (1, True)
    assert [line["event"] for line in log] == ["cannot accept a trainer"]

    monkeypatch.setattr(local, "descriptors_left", lambda: 9)
    door.tick()
    poller.dispatch()
    assert (len(came), door.is_short) == (2, False)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_who_cannot_be_accepted_waits(knock, monkeypatch, number) -> None:
    """The connection waits, whichever resource is missing."""
    door, poller, came = knock(9)

    def refuse(_self: socket.socket) -> None:
        raise OSError(number, "it is lacking")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", refuse)
        poller.dispatch()
    assert (came, door.is_short) == ([], True)
    door.tick()
    poller.dispatch()
    assert len(came) == 2


def test_one_that_cannot_be_watched_is_closed(knock, monkeypatch) -> None:
    """The kernel limits the number of descriptors that a user may watch (ENOSPC)."""
    door, poller, came = knock(9)

    def refuse(_one: socket.socket) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(door, "_admit", refuse)
    poller.dispatch()
    assert (came, door.is_short) == ([], True)


def test_a_door_that_cannot_be_watched_for_a_while_is_short(knock, monkeypatch) -> None:
    """The kernel has no room to watch it; the next tick retries, and the log has one line."""
    door, poller, came = knock(0)

    def refuse(_descriptor: int, _callback: Callable[[], None]) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch, capture_logs() as log:
        poller.dispatch()
        patch.setattr(poller, "watch", refuse)
        for _ in range(3):
            door.tick()
            assert door.is_short
    assert [line["event"] for line in log] == ["cannot accept a trainer"]

    monkeypatch.setattr(local, "descriptors_left", lambda: 9)
    door.tick()
    poller.dispatch()
    assert (len(came), door.is_short) == (2, False)


def test_a_door_that_cannot_be_watched_does_not_begin(tmp_path, monkeypatch) -> None:
    """The start fails with an error and leaves nothing behind."""
    with (
        closing(Poller()) as poller,
        closing(Listener(poller, socket.SOCK_STREAM, print, lambda: 1, PeerSockets())) as door,
    ):

        def refuse(_descriptor: int, _callback: Callable[[], None]) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        door.open(tmp_path / "door")
        monkeypatch.setattr(poller, "watch", refuse)
        with pytest.raises(OSError, match="no space left"):
            door.begin()
