"""Plain values of storage: limits, versions of files, requests. Daemon, workers and CLI.

    Version    what readers of samples compare: size, ETag, time     in an index's place
    Witness    what the index cache compares: also inode and ctime   in a file of the cache

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, BinaryIO, NamedTuple

from batchd.data.samples.location import is_url

PROBES = 64
PROBE_BYTES = 1 << 20
"""A file of at most ``PROBES`` blocks is read whole."""


class StorageLimits(NamedTuple):
    """How patient a process is with servers."""

    timeout_s: float = 5.0
    """Seconds without a byte from a server until a request has failed."""
    retries: int = 3
    """How often a request is sent again."""
    deadline_s: float = 24.0
    """Seconds that the bytes of one sample may take, with all retries."""

    def to_wire(self) -> tuple[int, int, int]:
        """As a message carries it, in milliseconds."""
        return round(self.timeout_s * 1000), self.retries, round(self.deadline_s * 1000)

    @classmethod
    def from_wire(cls, numbers: Sequence[int]) -> StorageLimits:
        """The way back."""
        timeout_ms, retries, deadline_ms = numbers
        return cls(timeout_ms / 1000, retries, deadline_ms / 1000)


USUAL_LIMITS = StorageLimits()
CHECK_LIMITS = StorageLimits(timeout_s=3.0, retries=0, deadline_s=6.0)
"""For a quick check that a file exists."""


class Version(NamedTuple):
    """Objects of the same version have the same bytes, as far as the server tells."""

    size: int
    etag: str | None
    modified_ns: int
    """0 if the server does not say."""

    def differs_from(self, other: Version) -> str:
        """The difference between two versions, for users; "" if there is none."""
        if self.size != other.size:
            return f"it had {self.size} bytes, and has {other.size}"
        if self.etag is not None and other.etag is not None:
            return "its ETag is another" if self.etag != other.etag else ""
        return "it was modified" if self.modified_ns != other.modified_ns else ""


class Witness(NamedTuple):
    """A file or folder as it was.

    Any change of the content changes ``changed_ns``, the kernel's own time. Of an object,
    ``identity`` is its ETag; of a folder in a bucket, whose path ends with a slash, a digest of its
    listing.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    identity: int | str
    """The inode of a file or folder."""
    names: str = ""
    """Of a folder, in JSON: a digest of the names that the scan took, and its rule for names. While
    these are the same, a change of the folder is one of other files."""

    @property
    def is_remote(self) -> bool:
        """True for an object or a folder of a server."""
        return is_url(os.fsencode(self.path))

    @property
    def is_listing(self) -> bool:
        """True for a folder of a bucket."""
        return self.is_remote and self.path.endswith("/")

    def last_change_ns(self, now_ns: int) -> int:
        """The last change; 0 for an object with an ETag, which cannot change unseen."""
        if self.is_remote:
            return 0 if self.identity else self.modified_ns or now_ns
        return max(self.modified_ns, self.changed_ns)


def versions_in(place: Mapping[str, Any]) -> dict[str, Version]:
    """The versions, in the place of an index, of the files and objects that it was made from."""
    return {where: Version(*version) for where, version in place.get("versions", {}).items()}


def version_of(status: os.stat_result) -> Version:
    """The version of a file: its size and the time of its last change."""
    return Version(status.st_size, None, status.st_mtime_ns)


def witness(path: bytes, status: os.stat_result) -> Witness:
    """A file or folder that exists."""
    return Witness(os.fsdecode(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def object_witness(url: str, version: Version) -> Witness:
    """An object that exists."""
    return Witness(url, version.size, version.modified_ns, 0, version.etag or "")


def listing_witness(url: str, digest: str, names: str) -> Witness:
    """The witness of a folder of a bucket; ``digest`` is of the objects that a scan took."""
    return Witness(f"{url.rstrip('/')}/", 0, 0, 0, digest, names)


class ObjectUnreadable(Exception):  # noqa: N818  names what is wrong
    """An object, or a folder of them, cannot be read, for a short reason without its name."""


class ObjectTooLong(ObjectUnreadable):
    """An object is longer than it may be."""


class Wanted(NamedTuple):
    """Bytes of an object: ``size`` (None: all) from ``start``, at most ``bytes_max``."""

    url: str
    start: int = 0
    size: int | None = None
    version: Version | None = None
    bytes_max: int = 1 << 62
    as_of_ns: int = 0
    """Without a version: an object of a bucket must not be newer than this; 0 is any time."""


class Listing(NamedTuple):
    """The content of a folder of a bucket."""

    folders: list[str]
    files: list[tuple[str, Version]]


def fingerprint(stream: BinaryIO, size: int, probes: int = PROBES, probe_bytes: int = PROBE_BYTES) -> tuple[int, str]:
    """The size, and a digest: of a long file, only of its ends and of blocks between them."""
    digest = sha256()
    count = min(probes, -(-size // probe_bytes))
    last = size - probe_bytes
    for number in range(count):
        stream.seek(number * probe_bytes if size <= probes * probe_bytes else last * number // (count - 1))
        digest.update(stream.read(probe_bytes))
    return size, digest.hexdigest()
