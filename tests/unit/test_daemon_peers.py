"""Who is let in, asked from the kernel with real sockets and processes of other users."""

import os
import secrets
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest

from batchd.daemon.local import listener
from batchd.daemon.local.listener import PeerCredentials, credentials_of, is_ours, why_refused
from support.waiting import PATIENCE_S

STRANGER = 54_321
STRANGERS_GROUP = 54_322
DIRECTORY_GROUP = 54_323
NOBODY = 65_534


def directory(group: int, mode: int) -> os.stat_result:
    """A runtime directory as the kernel describes it."""
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, 0, group, 0, 0, 0, 0))


OPEN = directory(DIRECTORY_GROUP, 0o755)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")

CONNECT = """
import os, socket, sys
address, user, group, *others = sys.argv[1:]
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if int(user) != os.getuid():
    os.setgroups([int(other) for other in others])
    os.setgid(int(group))
    os.setuid(int(user))
peer.connect(chr(0) + address)
sys.stdin.read()
"""
"""Connects as another user until its input ends; to an abstract address, which has no mode."""


@contextmanager
def connected_as(user: int, group: int, *others: int) -> Iterator[tuple[socket.socket, PeerCredentials, int]]:
    """Our end of a connection from that user and his groups, who it is, and the process id."""
    address = f"batchd-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(f"\0{address}")
        listener.listen()
        program = [sys.executable, "-I", "-S", "-c", CONNECT, address, *map(str, (user, group, *others))]
        with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
            lifeline, _address = listener.accept()
            with lifeline:
                yield lifeline, credentials_of(lifeline), process.pid
            process.communicate()


def may_connect(lifeline: socket.socket, credentials: PeerCredentials, about: os.stat_result) -> bool:
    """Whether the peer is let in."""
    return why_refused(lifeline, credentials, about) is None


def test_the_kernel_says_who_connected() -> None:
    """Process, user and group, whatever the peer would say of itself."""
    with connected_as(os.getuid(), os.getgid()) as (_lifeline, credentials, pid):
        assert credentials == PeerCredentials(pid, os.geteuid(), os.getegid())


def test_the_daemons_own_user_may_connect() -> None:
    """Whatever group the directory has."""
    with connected_as(os.getuid(), os.getgid()) as (lifeline, credentials, _pid):
        assert may_connect(lifeline, credentials, OPEN)


def test_root_may_connect_to_any_users_daemon(monkeypatch) -> None:
    """Root may do so anyway; refusing would only be in the way."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with ours, theirs:
        assert may_connect(ours, PeerCredentials(1, 0, 0), OPEN)


@as_root
def test_a_daemon_that_is_not_roots_lets_its_own_user_in(monkeypatch) -> None:
    """His second process belongs to none of the directory's groups."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with connected_as(STRANGER, STRANGERS_GROUP) as (lifeline, credentials, _pid):
        assert may_connect(lifeline, credentials, OPEN)


@as_root
def test_a_stranger_may_not_connect() -> None:
    """Neither without further groups nor with some that are not the directory's."""
    for others in ((), (STRANGERS_GROUP + 10, STRANGERS_GROUP + 11)):
        with connected_as(STRANGER, STRANGERS_GROUP, *others) as (lifeline, credentials, pid):
            assert credentials == PeerCredentials(pid, STRANGER, STRANGERS_GROUP)
            assert not may_connect(lifeline, credentials, OPEN)


@as_root
@pytest.mark.parametrize(
    "groups",
    [
        (DIRECTORY_GROUP,),
        (STRANGERS_GROUP, DIRECTORY_GROUP),
        (STRANGERS_GROUP, *range(60_000, 60_200), DIRECTORY_GROUP),
    ],
    ids=["as the primary one", "as the only other", "as one of two hundred"],
)
def test_members_of_the_directorys_group_may_connect(groups) -> None:
    """The group may be any of the peer's."""
    with connected_as(STRANGER, *groups) as (lifeline, credentials, _pid):
        assert credentials.user == STRANGER
        assert may_connect(lifeline, credentials, OPEN)


@as_root
def test_of_a_peer_in_too_many_groups_the_primary_one_counts() -> None:
    """Too many groups to ask for end in an answer, not in an error that ends the daemon."""
    many = range(60_000, 60_300)
    with connected_as(STRANGER, STRANGERS_GROUP, DIRECTORY_GROUP, *many) as (lifeline, credentials, _pid):
        assert not may_connect(lifeline, credentials, OPEN)
    with connected_as(STRANGER, DIRECTORY_GROUP, *many) as (lifeline, credentials, _pid):
        assert may_connect(lifeline, credentials, OPEN)


def test_who_connected_is_known_after_he_is_gone() -> None:
    """The kernel keeps the credentials with the connection; a reused pid changes nothing."""
    with connected_as(os.getuid(), os.getgid()) as (lifeline, credentials, _pid):
        lifeline.shutdown(socket.SHUT_RDWR)

        assert credentials_of(lifeline) == credentials


def test_a_peer_without_a_number_here_has_none() -> None:
    """The kernel says 0 for a process that is outside of the daemon's container."""
    raw = struct.pack("iII", 0, 4_000_000_000, 4_000_000_001)

    credentials = credentials_of(cast("socket.socket", SimpleNamespace(getsockopt=lambda *_arguments: raw)))

    assert credentials == PeerCredentials(None, 4_000_000_000, 4_000_000_001)


@pytest.fixture
def everybody_unmapped(monkeypatch) -> None:
    """A daemon in a user namespace that knows nobody but root."""
    monkeypatch.setattr(listener, "unmapped_id", lambda _kind: NOBODY)


@pytest.mark.usefixtures("everybody_unmapped")
@pytest.mark.parametrize(
    ("credentials", "group"),
    [
        (PeerCredentials(None, NOBODY, NOBODY), NOBODY),
        (PeerCredentials(None, NOBODY, STRANGERS_GROUP), DIRECTORY_GROUP),
        (PeerCredentials(None, STRANGER, NOBODY), NOBODY),
    ],
    ids=["both", "the user", "the group"],
)
def test_where_numbers_tell_nothing_the_directorys_mode_does(monkeypatch, credentials, group) -> None:
    """The kernel let it into a closed directory, so it is no stranger, whatever its numbers."""
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for mode in (0o755, 0o751, 0o757):
            assert not may_connect(ours, credentials, directory(group, mode))
        assert may_connect(ours, credentials, directory(group, 0o750))
        assert "chmod o-rwx" in (why_refused(ours, credentials, directory(group, 0o755)) or "")


@pytest.mark.usefixtures("everybody_unmapped")
def test_numbers_that_tell_who_somebody_is_are_enough() -> None:
    """Root of the daemon's user namespace, and a known group; strangers are told the reason."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert may_connect(ours, PeerCredentials(None, 0, 0), directory(NOBODY, 0o755))
        assert may_connect(ours, PeerCredentials(None, NOBODY, DIRECTORY_GROUP), OPEN)
        stranger = PeerCredentials(None, STRANGER, STRANGERS_GROUP)
        reason = f"user {STRANGER} is not in the group of the runtime directory"
        assert why_refused(ours, stranger, directory(DIRECTORY_GROUP, 0o750)) == reason


def test_root_and_the_daemons_own_user_alone_are_its_own(monkeypatch) -> None:
    """Who is let in by his group may read data, and say nothing of what is served."""
    monkeypatch.setattr("batchd.daemon.local.listener.unmapped_id", lambda _kind: 65534)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [is_ours(user) for user in (0, 1000, 1001, 65534)] == [True, True, False, False]
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert not is_ours(65534)
