"""Who is let in, asked from the kernel with real sockets and processes of other users."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batchd.daemon.peers import Peer, may_connect, peer_of
from support.waiting import PATIENCE_S

STRANGER = 54_321
STRANGERS_GROUP = 54_322
DIRECTORY_GROUP = 54_323
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
"""Becomes somebody else and connects, until its input ends. An abstract address has no file, so no mode is in the way."""


@contextmanager
def connected_as(user: int, group: int, *others: int) -> Iterator[tuple[socket.socket, Peer, int]]:
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
                yield lifeline, peer_of(lifeline), process.pid
            process.communicate()


def test_the_kernel_says_who_connected() -> None:
    """Process, user and group, whatever the peer would say of itself."""
    with connected_as(os.getuid(), os.getgid()) as (_lifeline, peer, pid):
        assert peer == Peer(pid, os.geteuid(), os.getegid())


def test_the_daemons_own_user_may_connect() -> None:
    """Whatever group the directory has."""
    with connected_as(os.getuid(), os.getgid()) as (lifeline, peer, _pid):
        assert may_connect(lifeline, peer, DIRECTORY_GROUP)


def test_root_may_connect_to_any_users_daemon(monkeypatch) -> None:
    """Root may do so anyway; refusing would only be in the way."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with ours, theirs:
        assert may_connect(ours, Peer(1, 0, 0), DIRECTORY_GROUP)


@as_root
def test_a_daemon_that_is_not_roots_lets_its_own_user_in(monkeypatch) -> None:
    """His second process belongs to none of the directory's groups."""
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with connected_as(STRANGER, STRANGERS_GROUP) as (lifeline, peer, _pid):
        assert may_connect(lifeline, peer, DIRECTORY_GROUP)


@as_root
def test_a_stranger_may_not_connect() -> None:
    """Neither without further groups nor with some that are not the directory's."""
    for others in ((), (STRANGERS_GROUP + 10, STRANGERS_GROUP + 11)):
        with connected_as(STRANGER, STRANGERS_GROUP, *others) as (lifeline, peer, pid):
            assert peer == Peer(pid, STRANGER, STRANGERS_GROUP)
            assert not may_connect(lifeline, peer, DIRECTORY_GROUP)


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
    with connected_as(STRANGER, *groups) as (lifeline, peer, _pid):
        assert peer.user == STRANGER
        assert may_connect(lifeline, peer, DIRECTORY_GROUP)


@as_root
def test_of_a_peer_in_too_many_groups_the_primary_one_counts() -> None:
    """More than can be asked for end in an answer, not in an error that would take the daemon with it."""
    many = range(60_000, 60_300)
    with connected_as(STRANGER, STRANGERS_GROUP, DIRECTORY_GROUP, *many) as (lifeline, peer, _pid):
        assert not may_connect(lifeline, peer, DIRECTORY_GROUP)
    with connected_as(STRANGER, DIRECTORY_GROUP, *many) as (lifeline, peer, _pid):
        assert may_connect(lifeline, peer, DIRECTORY_GROUP)


def test_who_connected_is_known_after_he_is_gone() -> None:
    """The kernel keeps the credentials with the connection; a new process with the same number changes nothing."""
    with connected_as(os.getuid(), os.getgid()) as (lifeline, peer, _pid):
        lifeline.shutdown(socket.SHUT_RDWR)

        assert peer_of(lifeline) == peer
