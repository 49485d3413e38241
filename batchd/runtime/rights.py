"""Whose rights decide which files this process may open. Workers, and who defines streams.

    become(reader)       for good: user, group and all groups
    reading_as(reader)   meanwhile: the effective ones; the way back is root's, or CAP_SETUID's
    own_rights()         meanwhile, within that: this process's own user
    keep_capabilities()  for good: all others are given up

The kernel checks each file that is opened, so no link or rename behind a check matters.
"""

import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from batchd.runtime.children import die_with_parent

CAPABILITIES = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
"""What acting for other users takes, with their numbers: capabilities(7)."""
READING = (1, 2, 6, 7)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID: what a process keeps that reads
for others."""
_HEADER = struct.pack("=II", 0x20080522, 0)
"""Of capget(2) and capset(2): version 3, of this thread."""


def lacking() -> list[str]:
    """Those of ``CAPABILITIES`` that this process does not have."""
    effective, _permitted = _own_capabilities()
    return [name for name, number in CAPABILITIES.items() if not effective >> number & 1]


def keep_capabilities(kept: Sequence[int] = ()) -> None:
    """Give up all others for good. ``kept``: numbers below 32. Raises ``OSError``."""
    mask = sum(1 << number for number in kept)
    effective, permitted = (own & mask for own in _own_capabilities())
    # zeros: inheritable ones, and all from number 32 on
    if libc().capset(_HEADER, struct.pack("=6I", effective, permitted, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def _own_capabilities() -> tuple[int, int]:
    """Those in effect, and those permitted, as bits: the first 32."""
    sets = ctypes.create_string_buffer(24)
    if libc().capget(_HEADER, sets):
        raise OSError(ctypes.get_errno(), "capabilities cannot be read")
    effective, permitted, *_others = struct.unpack("=6I", sets.raw)
    return effective, permitted


@cache
def libc() -> ctypes.CDLL:
    """The C library, with errors in ``ctypes.get_errno``."""
    return ctypes.CDLL(None, use_errno=True)


def become(reader: Sequence[int]) -> None:
    """Give up this process's user for that of ``reader``, and all capabilities.

    ``reader``: user, group, all groups. Raises ``PermissionError``.
    """
    user, group, *groups = reader
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    keep_capabilities()  # the kernel gives them up itself for root alone
    die_with_parent()  # the kernel forgets that where the user changes


@contextmanager
def reading_as(reader: Sequence[int] | None) -> Iterator[None]:
    """Open files with the rights of ``reader`` meanwhile; None or nobody: with the own ones.

    Raises ``PermissionError``.
    """
    if not reader:
        yield
        return
    user, group, groups = os.geteuid(), os.getegid(), os.getgroups()
    os.setgroups(reader[2:])
    os.setegid(reader[1])
    os.seteuid(reader[0])
    try:
        yield
    finally:
        os.seteuid(user)
        os.setegid(group)
        os.setgroups(groups)
        die_with_parent()


@contextmanager
def own_rights() -> Iterator[None]:
    """Within ``reading_as``: open what is the daemon's own."""
    reader, own = os.geteuid(), os.getuid()
    if reader == own:
        yield
        return
    os.seteuid(own)
    try:
        yield
    finally:
        os.seteuid(reader)
