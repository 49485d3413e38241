"""One scan of a source: who is told of its progress, and what it looked at. Daemon.

What it looked at are its witnesses: as long as each folder and file still is what it was, another scan would find the same.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time_ns
from typing import NamedTuple, TypeAlias

from batchd.storage.access import Version, version_of
from batchd.storage.location import is_url

ReportProgress: TypeAlias = Callable[[int], None]
"""Called now and then with the number of samples found so far."""


class Witness(NamedTuple):
    """A file or folder as it was. Whatever happens to the content of either changes ``changed_ns``, the time of the kernel.

    Of an object of a server, ``identity`` is its ETag, and of a folder in a bucket, whose path ends with a slash, a digest of
    what was in it.
    """

    path: str
    size: int
    modified_ns: int
    changed_ns: int
    identity: int | str
    """The inode of a file or folder."""

    @property
    def is_remote(self) -> bool:
        """Is it a server that can tell whether it has changed?"""
        return is_url(os.fsencode(self.path))

    @property
    def is_listing(self) -> bool:
        """Is it a folder of a bucket?"""
        return self.is_remote and self.path.endswith("/")

    def last_change_ns(self, now_ns: int) -> int:
        """When it last changed, as far as that counts: what has an ETag cannot change unseen, however fast."""
        if self.is_remote:
            return 0 if self.identity else self.modified_ns or now_ns
        return max(self.modified_ns, self.changed_ns)


class Survey:
    """What a scan reports. Without witnesses nobody can tell whether the source has changed, so it is scanned each time."""

    def __init__(
        self, progress: ReportProgress, python_path: Sequence[Path] = (), looked: Callable[[], None] = lambda: None
    ) -> None:
        self.progress = progress
        self.looked = looked
        """Called for each step of a scan that may take a while: an entry of a folder, a sample of a shard, a block of a file.
        What it raises ends the scan."""
        self.python_path = python_path
        """Where modules of people's own functions are looked for first."""
        self.started_ns = time_ns()
        self._seen: list[Witness] = []
        self._parts: list[Survey] = []
        self.versions: dict[str, Version] = {}
        """The files and the objects of servers that were read, which whoever reads samples of them has to find as they were."""

    def part(self, found_before: int) -> "Survey":
        """The survey of one of several sources, when those before it have so many samples."""
        part = Survey(lambda found: self.progress(found_before + found), self.python_path, self.looked)
        self._parts.append(part)
        return part

    @property
    def witnesses(self) -> list[Witness]:
        """Everything that was looked at, also for its parts."""
        return self._seen + [one for part in self._parts for one in part.witnesses]

    def is_settled(self, settled_ns: int) -> bool:
        """Would each witness look different if it changed from now on? False where there are none, too."""
        last_ns = max((one.last_change_ns(self.started_ns) for one in self._seen), default=None)
        is_settled = last_ns is None or last_ns < self.started_ns - settled_ns
        has_any = bool(self._seen or self._parts)
        return has_any and is_settled and all(part.is_settled(settled_ns) for part in self._parts)

    def saw(self, path: bytes, status: os.stat_result) -> None:
        """The scan looked into this folder, or read this file; ``status`` is from before it did."""
        self.add(witness(path, status))

    def read_file(self, file: Path, status: os.stat_result) -> None:
        """The scan reads this file; whoever reads samples of it has to find it as it was."""
        self.saw(os.fsencode(file), status)
        self.versions[str(file.absolute())] = version_of(status)

    def add(self, seen: Witness) -> None:
        """The scan looked at what this is the witness of."""
        self.looked()
        self._seen.append(seen)

    def saw_object(self, url: str, version: Version) -> None:
        """The scan found this object; ``version`` is what its server says of it."""
        self._seen.append(object_witness(url, version))

    def read_object(self, url: str, version: Version) -> None:
        """The scan reads this object, of this version."""
        self.saw_object(url, version)
        self.versions[url] = version

    def saw_listing(self, url: str, digest: str) -> None:
        """The scan looked into this folder of a bucket."""
        self._seen.append(listing_witness(url, digest))

    def place(self) -> dict[str, dict[str, list[object]]]:
        """What belongs to an index's place besides where files are: what they were."""
        versions: dict[str, list[object]] = {where: list(version) for where, version in self.versions.items()}
        return {"versions": versions} if versions else {}


def object_witness(url: str, version: Version) -> Witness:
    """An object as it is."""
    return Witness(url, version.size, version.modified_ns, 0, version.etag or "")


def listing_witness(url: str, digest: str) -> Witness:
    """A folder of a bucket, by a digest of what is in it."""
    return Witness(f"{url.rstrip('/')}/", 0, 0, 0, digest)


def witness(path: bytes, status: os.stat_result) -> Witness:
    """A file or folder as it is."""
    return Witness(os.fsdecode(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
