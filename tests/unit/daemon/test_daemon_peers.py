"""Which peers may connect, from the kernel, with real sockets and processes of other users."""

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
"""Connects as another user until its input ends; an abstract address has no mode."""


@contextmanager
def connected_as(user: int, group: int, *others: int) -> Iterator[tuple[socket.socket, PeerCredentials, int]]:
    """Our end of a connection from that user and its groups, the peer, and the process id."""
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
    """Whether the peer may connect."""
    return why_refused(lifeline, credentials, about) is None


def test_the_kernel_says_who_connected() -> None:
    """Process, user and group come from the kernel, not from the peer."""
    with connected_as(os.getuid(), os.getgid()) as (_lifeline, credentials, pid):
        assert credentials == PeerCredentials(pid, os.geteuid(), os.getegid())


def test_the_daemons_own_user_may_connect() -> None:
    """The group of the directory does not matter."""
    with connected_as(os.getuid(), os.getgid()) as (lifeline, credentials, _pid):
        assert may_connect(lifeline, credentials, OPEN)


def test_root_may_connect_to_any_users_daemon(monkeypatch) -> None:
    """Root can open the daemon's memory anyway, so a refusal would not protect anything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with ours, theirs:
        assert may_connect(ours, PeerCredentials(1, 0, 0), OPEN)


@as_root
def test_a_daemon_of_another_user_than_root_admits_its_own_user(monkeypatch) -> None:
    """The user's second process belongs to none of the directory's groups."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with connected_as(STRANGER, STRANGERS_GROUP) as (lifeline, credentials, _pid):
        assert may_connect(lifeline, credentials, OPEN)


@as_root
def test_a_stranger_may_not_connect() -> None:
    """It has no further groups, or only groups other than the directory's."""
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
    """The group may be any of the peer's groups."""
    with connected_as(STRANGER, *groups) as (lifeline, credentials, _pid):
        assert credentials.user == STRANGER
        assert may_connect(lifeline, credentials, OPEN)


@as_root
def test_for_a_peer_in_too_many_groups_the_primary_one_counts() -> None:
    """A number of groups beyond the limit gives an answer, and no error that ends the daemon."""
    many = range(60_000, 60_300)
    with connected_as(STRANGER, STRANGERS_GROUP, DIRECTORY_GROUP, *many) as (lifeline, credentials, _pid):
        assert not may_connect(lifeline, credentials, OPEN)
    with connected_as(STRANGER, DIRECTORY_GROUP, *many) as (lifeline, credentials, _pid):
        assert may_connect(lifeline, credentials, OPEN)


def test_the_peer_is_known_after_it_has_ended() -> None:
    """The kernel keeps the credentials with the connection; a reused pid changes nothing."""
    with connected_as(os.getuid(), os.getgid()) as (lifeline, credentials, _pid):
        lifeline.shutdown(socket.SHUT_RDWR)

        assert credentials_of(lifeline) == credentials


def test_a_peer_without_a_number_here_has_none() -> None:
    """The kernel reports 0 for a process outside of the daemon's container."""
    raw = struct.pack("iII", 0, 4_000_000_000, 4_000_000_001)

    credentials = credentials_of(cast("socket.socket", SimpleNamespace(getsockopt=lambda *_arguments: raw)))

    assert credentials == PeerCredentials(None, 4_000_000_000, 4_000_000_001)


@pytest.fixture
def all_users_unmapped(monkeypatch) -> None:
    """A daemon in a user namespace that maps only root."""
    monkeypatch.setattr(listener, "unmapped_id", lambda _kind: NOBODY)


@pytest.mark.usefixtures("all_users_unmapped")
@pytest.mark.parametrize(
    ("credentials", "group"),
    [
        (PeerCredentials(None, NOBODY, NOBODY), NOBODY),
        (PeerCredentials(None, NOBODY, STRANGERS_GROUP), DIRECTORY_GROUP),
        (PeerCredentials(None, STRANGER, NOBODY), NOBODY),
    ],
    ids=["both", "the user", "the group"],
)
def test_where_user_ids_are_unmapped_the_directorys_mode_decides(monkeypatch, credentials, group) -> None:
    """The kernel let the peer into a closed directory, so its user has the permission."""
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for mode in (0o755, 0o751, 0o757):
            assert not may_connect(ours, credentials, directory(group, mode))
        assert may_connect(ours, credentials, directory(group, 0o750))
        assert "chmod o-rwx" in (why_refused(ours, credentials, directory(group, 0o755)) or "")


@pytest.mark.usefixtures("all_users_unmapped")
def test_mapped_user_ids_are_enough() -> None:
    """Root of the daemon's namespace and a known group may connect; others get the reason."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert may_connect(ours, PeerCredentials(None, 0, 0), directory(NOBODY, 0o755))
        assert may_connect(ours, PeerCredentials(None, NOBODY, DIRECTORY_GROUP), OPEN)
        stranger = PeerCredentials(None, STRANGER, STRANGERS_GROUP)
        reason = f"user {STRANGER} is not in the group of the runtime directory"
        assert why_refused(ours, stranger, directory(DIRECTORY_GROUP, 0o750)) == reason


def test_only_root_and_the_daemons_own_user_control_it(monkeypatch) -> None:
    """A peer that may connect by its group may read data, but not change what is served."""
    monkeypatch.setattr("batchd.daemon.local.listener.unmapped_id", lambda _kind: 65534)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [is_ours(user) for user in (0, 1000, 1001, 65534)] == [True, True, False, False]
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert not is_ours(65534)
