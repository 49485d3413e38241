"""What is asked of servers that hold files: an object of theirs, and how long they may take. Daemon, workers and CLI.

    a path    os.open, os.preadv                           ``reader``, ``shards``
    a URL     ``client()``: range requests, asked again     ``remote``, which needs the library obstore

The library is loaded when the first URL is met, and one client with its connections belongs to the process.

Invariant: without a URL nothing is loaded, and no thread and no connection is there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from batchd.errors import SourceInvalid

if TYPE_CHECKING:
    from batchd.storage.objects import RemoteClient


class StorageLimits(NamedTuple):
    """How patient this process is with servers."""

    timeout_s: float = 5.0
    """How long a server may say nothing."""
    retries: int = 3
    """How often a request is made again."""
    deadline_s: float = 24.0
    """How long the bytes of one sample may take, with all requests that are made again."""

    def to_wire(self) -> tuple[int, int, int]:
        """As a message carries it, in milliseconds."""
        return round(self.timeout_s * 1000), self.retries, round(self.deadline_s * 1000)

    @classmethod
    def from_wire(cls, told: Sequence[int]) -> StorageLimits:
        """The way back."""
        timeout_ms, retries, deadline_ms = told
        return cls(timeout_ms / 1000, retries, deadline_ms / 1000)


CHECK_LIMITS = StorageLimits(timeout_s=3.0, retries=0, deadline_s=6.0)
"""For a quick look: is it there?"""


class Version(NamedTuple):
    """What an object was. Two of the same version have the same bytes, as far as its server tells."""

    size: int
    etag: str | None
    modified_ns: int
    """0 where the server does not say."""

    def differs_from(self, other: Version) -> str:
        """What tells the two apart; "" where nothing does."""
        if self.size != other.size:
            return f"it had {self.size} bytes, and has {other.size}"
        if self.etag is not None and other.etag is not None:
            return "its ETag is another" if self.etag != other.etag else ""
        return "it was modified" if self.modified_ns != other.modified_ns else ""


class ObjectUnreadable(Exception):  # noqa: N818  names what is wrong
    """An object, or a folder of them, cannot be read; the text is the reason, short, without its name."""


class Wanted(NamedTuple):
    """Bytes of an object: ``size`` of them from ``start``, or all where ``size`` is None, at most ``bytes_max``."""

    url: str
    start: int = 0
    size: int | None = None
    version: Version | None = None
    bytes_max: int = 1 << 62


class Listing(NamedTuple):
    """What is in a folder of a bucket."""

    folders: list[str]
    files: list[tuple[str, Version]]


class ObjectTooLong(ObjectUnreadable):
    """An object is longer than it may be."""


class _Process:
    """What belongs to the process."""

    limits = StorageLimits()
    client: RemoteClient | None = None
    ahead_until_s: float = inf
    sample_until_s: float = inf


def use(limits: StorageLimits) -> None:
    """Be as patient from now on."""
    _Process.limits = limits


def limits() -> StorageLimits:
    """How patient this process is."""
    return _Process.limits


def begin_reading_ahead() -> None:
    """From now on what is read ahead, of however many sources, may take as long as one sample."""
    _Process.ahead_until_s = monotonic() + _Process.limits.deadline_s


def ahead_s() -> float:
    """How long reading ahead may still take."""
    return min(_Process.limits.deadline_s, _Process.ahead_until_s - monotonic())


def begin_sample() -> None:
    """From now on what is read is of one sample, in however many requests."""
    _Process.sample_until_s = monotonic() + _Process.limits.deadline_s


def sample_s() -> float:
    """How long what is read of this sample may still take."""
    return min(_Process.limits.deadline_s, _Process.sample_until_s - monotonic())


def client() -> RemoteClient:
    """The client of this process. Raises ``SourceInvalid`` where its library is not installed."""
    if _Process.client is None:
        try:
            from batchd.storage.objects import RemoteClient  # noqa: PLC0415  only where there are URLs
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "obstore":
                raise
            raise SourceInvalid("a URL needs obstore, which is not installed: pip install 'batchd[cloud]'") from None
        _Process.client = RemoteClient()
    return _Process.client


def close() -> None:
    """Close all connections; the next that asks for something opens new ones."""
    client, _Process.client = _Process.client, None
    if client is not None:
        client.close()


def versions_in(place: Any) -> dict[str, Version]:
    """The versions that an index holds, of the files and objects that it was made of."""
    return {where: Version(*version) for where, version in place.get("versions", {}).items()}


def version_of(status: os.stat_result) -> Version:
    """What a file is."""
    return Version(status.st_size, None, status.st_mtime_ns)
