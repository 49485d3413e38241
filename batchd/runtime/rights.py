"""Whose rights decide which files this process may open. Workers, and who defines streams.

    become(reader)       for good: user, group and all groups
    reading_as(reader)   meanwhile: the effective ones; the way back is root's, or CAP_SETUID's
    own_rights()         meanwhile, within that: this process's own user

The kernel checks each file that is opened, so no link or rename behind a check matters.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from batchd.runtime.children import die_with_parent


def become(reader: Sequence[int]) -> None:
    """Give up this process's user for that of ``reader``: user, group, all groups.

    Raises ``PermissionError``.
    """
    user, group, *groups = reader
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
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
