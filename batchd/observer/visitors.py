"""Who asks over HTTP, and what he may see. OBSERVER process.

    Host header     names this machine, or the request came from a web page that only says so (DNS rebinding)
    details         for root, the daemon's user and the runtime directory's group, over loopback: who may connect to the daemon

Over loopback the kernel says who made the other end. That is a proxy, where one passes requests on:
then nobody knows who asks. Invariant: in doubt a visitor is nobody.
"""

import os
import pwd
import socket
from collections.abc import Iterable
from pathlib import Path

from batchd.observer.ends import place_of, user_of
from batchd.observer.names import Names
from batchd_wire.runtime import unmapped_id

_PASSED_ON = {"forwarded", "via", "x-real-ip"}
_PASSED_ON_PREFIX = "x-forwarded-"


class Visitors:
    """``names`` are what we are called, ``directory`` the runtime directory, whose group may see details."""

    def __init__(self, directory: Path, names: Names, *, details_for_all: bool = False) -> None:
        self._directory = directory
        self._names = names
        self._details_for_all = details_for_all

    def knows_host(self, header: str) -> bool:
        """Does a Host header name us?"""
        return self._names.know(header)

    def may_see_details(self, connection: socket.socket, headers: Iterable[str]) -> bool:
        """May who is at the other end see process ids, users and paths? ``headers`` are the names of the request's."""
        if self._details_for_all:
            return True
        if is_passed_on(headers):
            return False
        try:
            theirs, ours = place_of(connection.getpeername()), place_of(connection.getsockname())
        except OSError:
            return False
        if not theirs[0].is_loopback:
            return False
        user = user_of(theirs, ours)
        return user is not None and self._is_insider(user)

    def _is_insider(self, user: int) -> bool:
        if user == unmapped_id("uid"):
            return False
        if user in {0, os.geteuid()}:
            return True
        group = self._directory.stat().st_gid
        return group != unmapped_id("gid") and group in groups_of(user)


def is_passed_on(headers: Iterable[str]) -> bool:
    """Does a request say that somebody asks for somebody else?"""
    names = {name.lower() for name in headers}
    return bool(names & _PASSED_ON) or any(name.startswith(_PASSED_ON_PREFIX) for name in names)


def groups_of(user: int) -> frozenset[int]:
    """All groups of a user, as the system's databases have them."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return frozenset()
    return frozenset({*os.getgrouplist(entry.pw_name, entry.pw_gid)})
