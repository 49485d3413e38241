"""One interface to the files of this machine and the objects of servers. Daemon, workers and CLI.

    Storage.at(path)  ──  a path  ->  LocalFiles     os.open, os.scandir
                      └─  a URL   ->  RemoteFiles    range requests and listings, by
                                                     ``Storage.client``, which needs obstore

A process makes one ``Storage`` and passes it to all code that scans or reads: it has the limits,
the connections and the deadlines.

Invariants: without a URL no library is loaded, and there is no thread and no connection. A message
names a path or URL as the user wrote it, and what is wrong with it.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable
from contextlib import contextmanager
from hashlib import sha256
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, RawIOBase
from itertools import accumulate
from math import inf
from pathlib import Path
from time import monotonic, time_ns
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, Self

from batchd.data.samples.location import Url, is_url
from batchd.data.storage import values
from batchd.data.storage.ahead import RequestBudget, Requested
from batchd.data.storage.index import readable
from batchd.data.storage.paths import absent, check_bound, open_regular, status_of, unreachable, unreadable
from batchd.data.storage.patterns import NameRule, rule_of
from batchd.data.storage.values import ObjectUnreadable
from batchd.errors import SourceInvalid
from batchd.runtime.suggestions import pip_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _typeshed import WriteableBuffer

    from batchd.data.storage.objects import RemoteClient

FETCHED_BYTES_MAX = 32 << 20
"""Bytes that are read ahead for the orders of a worker."""
RULE_BYTES_MAX = 4096
"""A longer rule for names is not kept with each folder, so each change of a folder counts."""
BLOCKS_BYTES_MAX = 512 << 20
"""Bytes of the blocks of shuffles that a worker has open, or requests ahead."""


class Storage:
    """Files here and objects of servers, for one process. Belongs to one thread.

    ``limits`` may be replaced at any time; requests that begin later keep to the new ones.
    ``encloses``: whether another process that scans a source gives up all else, where it can.
    """

    def __init__(self, limits: values.StorageLimits = values.USUAL_LIMITS, *, encloses: bool = True) -> None:
        self.limits = limits
        self.encloses = encloses
        self.scans_here = False
        """Whether a damaged file may end this process, so that it scans every source itself."""
        self.forks_scans = False
        """Whether enclosed forks of this process, which may fork, scan what is on this machine."""
        self.local = LocalFiles()
        self.remote = RemoteFiles(self)
        self.as_of_ns = 0
        """When the source was scanned whose readers are made now, in ns since 1970: a file that is
        a sample and was written later is another one. 0 before a scan; other processes are told."""
        self._client: RemoteClient | None = None
        self.room = RequestBudget(FETCHED_BYTES_MAX)
        self.blocks_room = RequestBudget(BLOCKS_BYTES_MAX, is_sized=True)
        self.requested = Requested(self.room)
        """What is requested now belongs to this."""
        self._sample_until_s = inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def begin_scan(self) -> None:
        """From now on, readers are made for a source as it is at this moment."""
        self.as_of_ns = time_ns()

    def at(self, path: Path | bytes) -> LocalFiles | RemoteFiles:
        """The target of a path or a URL."""
        return self.remote if is_url(os.fsencode(path)) else self.local

    @property
    def client(self) -> RemoteClient:
        """The client of servers. Raises ``SourceInvalid`` if obstore is not installed."""
        if self._client is None:
            try:
                from batchd.data.storage.objects import RemoteClient  # noqa: PLC0415  only where there are URLs
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "obstore":
                    raise
                raise SourceInvalid(
                    f"a URL needs obstore, which is not installed: {pip_command('batchd[cloud]')}"
                ) from None
            self._client = RemoteClient(lambda: self.limits)
        return self._client

    def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def begin_reading_ahead(self) -> Requested:
        """From now on, all that readers request ahead is for one order, and belongs to the result.

        It may take as long as one sample, for all sources together.
        """
        self.requested = Requested(self.room, monotonic() + self.limits.deadline_s)
        return self.requested

    def begin_reading_block(self) -> Requested:
        """From now on, all that readers request ahead is for one block, and for several orders."""
        self.requested = Requested(self.blocks_room)
        return self.requested

    def begin_sample(self) -> None:
        """From now on, all requests are for one sample."""
        self._sample_until_s = monotonic() + self.limits.deadline_s

    @property
    def sample_s(self) -> float:
        """Seconds that reading this sample may still take."""
        return min(self.limits.deadline_s, self._sample_until_s - monotonic())


class Witnesses(Protocol):
    """Records what a scan opens and lists: see ``survey.Survey``."""

    looked: Callable[[], None]

    def add(self, seen: values.Witness) -> None:
        """Record what the scan looks at."""

    def reads(self, file: Path, seen: values.Witness, version: values.Version) -> None:
        """The scan reads this file, and readers of its samples have to find it as it was."""


class WantedNames(NamedTuple):
    """Filter for the names in a folder.

    ``bound``: a real path; a link to a wanted file must not lead out of it. None allows any place.
    """

    rule: NameRule
    bound: bytes | None = None


class FoundNames(NamedTuple):
    """The names of folders and files in a folder, sorted."""

    folders: list[bytes]
    files: list[bytes]

    def digest(self) -> str:
        """The digest of all of them."""
        return sha256(b"\0".join([*self.folders, b"", *self.files])).hexdigest()


class LocalFiles:
    """Files of this machine. ``survey``: of the scan that opens or lists them."""

    def file_problems(self, file: Path, what: str) -> list[str]:
        """Problems of a file, called ``what`` in messages ("the list"); empty if it can be read."""
        if (problem := unreachable(file)) is not None:
            return [problem]
        if not file.is_file():
            return [f"{file} is not a file" if file.exists() else absent("file", file)]
        if not os.access(file, os.R_OK):
            return [f"{what} {file} is not readable for this user"]
        return []

    def folder_problems(self, folder: Path, *, is_listed: bool = False) -> list[str]:
        """Problems of a folder of samples; empty if a scan can read and (``is_listed``) list it."""
        del is_listed  # any folder here can be listed
        if (problem := unreachable(folder)) is not None:
            return [problem]
        if not folder.is_dir():
            return [f"{folder} is not a folder" if folder.exists() else absent("folder", folder)]
        if not os.access(folder, os.R_OK | os.X_OK):
            return [f"the folder {folder} is not readable for this user"]
        return []

    def known_size(self, file: Path) -> int | None:
        """Bytes of a file; None where asking for it is a request. Raises ``SourceInvalid``."""
        return status_of(os.fsencode(file)).st_size

    @contextmanager
    def open(self, file: Path, survey: Witnesses) -> Iterator[BinaryIO]:
        """A file, to be read and sought in. Raises ``SourceInvalid`` where it cannot be read."""
        path = os.fsencode(file)
        try:
            with open(file, "rb", opener=open_regular) as stream:
                status = os.fstat(stream.fileno())
                survey.reads(file, values.witness(path, status), values.version_of(status))
                yield stream
        except OSError as error:
            raise unreadable(path, error) from None

    def look_at(self, folder: bytes, survey: Witnesses) -> tuple[int, int] | None:
        """The device and inode of a folder, behind all links. Raises ``SourceInvalid``."""
        survey.looked()
        status = status_of(folder)
        return status.st_dev, status.st_ino

    def names_in(self, folder: bytes, wanted: WantedNames, survey: Witnesses) -> FoundNames:
        """The names in a folder, sorted. Raises ``SourceInvalid``, also for links out of the bound.

        Every wanted name that is no folder counts as a file here: the reader checks its kind.
        """
        seen = values.witness(folder, status_of(folder))  # before it is listed
        found = self._list(folder, wanted, survey.looked)
        is_short = sum(map(len, wanted.rule.patterns)) <= RULE_BYTES_MAX
        survey.add(seen._replace(names=json.dumps([found.digest(), *wanted.rule])) if is_short else seen)
        return found

    def _list(self, folder: bytes, wanted: WantedNames, looked: Callable[[], None]) -> FoundNames:
        rule, is_wanted, enters = wanted.rule, wanted.rule.takes(), wanted.rule.enters()
        folders, files = [], []
        try:
            with os.scandir(folder) as found:
                for entry in found:
                    looked()
                    if entry.name.startswith(b".") and not rule.hidden:
                        continue
                    is_file = is_wanted(entry.name)
                    if _is_folder(entry, or_else=is_file or rule.hidden):
                        if enters(entry.name):
                            folders.append(entry.name)
                    elif is_file:
                        if entry.is_symlink():
                            check_bound(entry.path, wanted.bound)
                        files.append(entry.name)
        except OSError as error:
            raise unreadable(folder, error) from None
        return FoundNames(sorted(folders), sorted(files))

    def first_changed(self, witnesses: Sequence[values.Witness]) -> str:
        """The first path that has changed; "" if none has. Raises ``OSError``."""
        return next((witness.path for witness in witnesses if not self._is_unchanged(witness)), "")

    def _is_unchanged(self, seen: values.Witness) -> bool:
        """True if a file is as it was, or a folder has the same names that a scan would take."""
        path = os.fsencode(seen.path)
        if values.witness(path, os.stat(path)) == seen._replace(names=""):  # noqa: PTH116  bytes
            return True
        if not seen.names:
            return False
        digest, *rule = json.loads(seen.names)
        try:
            found = self._list(path, WantedNames(rule_of(rule)), lambda: None)
        except SourceInvalid:
            return False
        return bool(found.digest() == digest)


def _is_folder(entry: os.DirEntry[bytes], *, or_else: bool) -> bool:
    """A broken link is not a folder if ``or_else`` it counts as a file, else ``SourceInvalid``."""
    try:
        return entry.is_dir()
    except OSError as error:
        if or_else:
            return False
        raise SourceInvalid(f"{readable(entry.path)} cannot be read: {error.strerror}") from None


BUFFER_BYTES = 64 << 10


class RemoteFiles:
    """See ``LocalFiles``. ``storage`` has the client, which is made when the first URL is met."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def file_problems(self, file: Path, _what: str) -> list[str]:
        """See ``LocalFiles``; a quick check."""
        return _problems(file, lambda: self._storage.client.head(str(file), values.CHECK_LIMITS.deadline_s))

    def folder_problems(self, folder: Path, *, is_listed: bool = False) -> list[str]:
        """See ``LocalFiles``; a quick check."""

        def look() -> None:
            if is_listed:
                _refuse_listing(Url(folder))
            if Url(folder).can_list and not self._storage.client.holds_any(str(folder), values.CHECK_LIMITS.deadline_s):
                raise SourceInvalid(f"there is nothing in {folder}")

        return _problems(folder, look)

    def known_size(self, _file: Path) -> None:
        """See ``LocalFiles``: asking is a request."""

    @contextmanager
    def open(self, file: Path, survey: Witnesses) -> Iterator[BinaryIO]:
        """See ``LocalFiles``."""
        client, name = self._storage.client, str(file)
        try:
            version = client.head(name)
        except values.ObjectUnreadable as reason:
            raise _unreadable(name, reason) from None
        raw = ObjectStream(
            name, version.size, lambda start, size: client.read(values.Wanted(name, start, size, version))
        )
        survey.reads(file, values.object_witness(name, version), version)
        with BufferedReader(raw, BUFFER_BYTES) as stream:
            yield stream

    def look_at(self, _folder: bytes, _survey: Witnesses) -> None:
        """Nothing, without a request: a listing is its own witness, and no link leads here."""

    def names_in(self, folder: bytes, wanted: WantedNames, survey: Witnesses) -> FoundNames:
        """See ``LocalFiles``."""
        url = os.fsdecode(folder).rstrip("/")
        _refuse_listing(Url(url))
        try:
            found = self._storage.client.list_folder(url)
        except values.ObjectUnreadable as reason:
            raise _unreadable(url, reason) from None
        taken = _taken(found, wanted.rule)
        survey.add(_listed(url, taken, wanted.rule))
        files = [os.fsencode(name) for name, _version in taken.files]
        return FoundNames(sorted(map(os.fsencode, taken.folders)), sorted(files))

    def first_changed(self, witnesses: Sequence[values.Witness]) -> str:
        """See ``LocalFiles``."""
        objects = [witness for witness in witnesses if not witness.is_listing]
        versions = self._storage.client.heads([witness.path for witness in objects]) if witnesses else []
        for witness, version in zip(objects, versions, strict=True):
            if isinstance(version, values.ObjectUnreadable) or values.object_witness(witness.path, version) != witness:
                return witness.path
        return next(
            (witness.path for witness in witnesses if witness.is_listing and not self._is_same_listing(witness)), ""
        )

    def look_at_each(self, urls: Sequence[str], survey: Witnesses) -> None:
        """Check that objects exist. Raises ``SourceInvalid`` for the first that does not."""
        for url, version in zip(urls, self._storage.client.heads(urls), strict=True):
            if isinstance(version, values.ObjectUnreadable):
                raise _unreadable(url, version)
            survey.add(values.object_witness(url, version))

    def _is_same_listing(self, witness: values.Witness) -> bool:
        if not witness.names:
            return False
        url, rule = witness.path.removesuffix("/"), rule_of(json.loads(witness.names))
        try:
            return _listed(url, _taken(self._storage.client.list_folder(url), rule), rule) == witness
        except values.ObjectUnreadable:
            return False


def _problems(path: Path, look: Callable[[], object]) -> list[str]:
    try:
        look()
    except values.ObjectUnreadable as reason:
        return [str(_unreadable(str(path), reason))]
    except SourceInvalid as problem:
        return [str(problem)]
    return []


def _refuse_listing(url: Url) -> None:
    if not url.can_list:
        raise SourceInvalid(
            f"{url} cannot be listed: {url.scheme} servers cannot list files. Name its files, in a list source, "
            'or as shards = ["train-{000..123}.tar"]'
        )


def _unreadable(url: str, reason: values.ObjectUnreadable) -> SourceInvalid:
    return SourceInvalid(f"{readable(os.fsencode(url))} cannot be read: {reason}")


def _taken(found: values.Listing, rule: NameRule) -> values.Listing:
    """The folders and files of a bucket's folder that a scan takes."""
    is_wanted, enters = rule.takes(), rule.enters()

    def passes(name: str, test: Callable[[bytes], bool]) -> bool:
        return bool(name) and (rule.hidden or not name.startswith(".")) and test(os.fsencode(name))

    folders = [name for name in found.folders if passes(name, enters)]
    return values.Listing(folders, [file for file in found.files if passes(file[0], is_wanted)])


def _listed(url: str, found: values.Listing, rule: NameRule) -> values.Witness:
    files: list[tuple[str, values.Version]] = sorted(found.files, key=lambda file: file[0])
    digest = sha256()
    for entry in [*sorted(found.folders), None, *files]:
        digest.update(repr(entry).encode("utf-8", "backslashreplace") + b"\0")
    return values.listing_witness(url, digest.hexdigest(), json.dumps(rule))


FIRST_BYTES = 64 << 10
LENGTH_MAX = 32 << 20
GROWTH = 4
GAP_BYTES_MAX = 1 << 20
BLOCKS_MAX = 16

ReadRange = Callable[[int, int], memoryview]
"""Reads (start, size) of the object. Raises ``ObjectUnreadable``."""


class _Block(NamedTuple):
    """Bytes of the object from ``start`` to ``end``."""

    start: int
    data: memoryview

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        return self.start + len(self.data)


class ObjectStream(RawIOBase):
    """An object of ``size`` bytes, called ``name`` in messages, as a file that is read in blocks.

        here and there   blocks of 64 KiB: headers of a tar file, the directory of a zip archive
        on and on        blocks up to 32 MiB, in parts that are requested at once; a gap shorter
                         than 1 MiB is read, too: waiting for an answer takes longer

    Invariant: all bytes are of one version of the object. ``SourceInvalid`` reports an object that
    has changed or cannot be read.
    """

    def __init__(self, name: str, size: int, read: ReadRange) -> None:
        self._name = name
        self._size = size
        self._read = read
        self._place = 0
        self._blocks: list[_Block] = []
        """The blocks that were read last, the most recent first."""
        self._kept_bytes = 0
        self._until = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Go to a byte, also behind the end; nothing is read."""
        place = offset + {SEEK_SET: 0, SEEK_CUR: self._place, SEEK_END: self._size}[whence]
        if place < 0:
            raise OSError("before the first byte")
        self._place = place
        return place

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read the rest of the present block, or fetch another one. Raises ``SourceInvalid``."""
        room = memoryview(buffer).cast("B")
        if self._place >= self._size or not room:
            return 0
        block = next((block for block in self._blocks if block.start <= self._place < block.end), None)
        block = block or self._next_block(len(room))
        start = self._place - block.start
        count = min(len(room), len(block.data) - start)
        room[:count] = block.data[start : start + count]
        self._place += count
        return count

    def expect(self, until: int, kept_bytes: int) -> None:
        """Keep ``kept_bytes`` beside the last block: the bytes to ``until`` are read twice."""
        self._until, self._kept_bytes = until, kept_bytes

    def hold(self, start: int, data: memoryview) -> None:
        """Use these bytes, which the caller has read already, in the place of all blocks."""
        self._blocks = [_Block(start, data)]

    def _next_block(self, need: int) -> _Block:
        """Fetch the block that begins here, longer than the one that it continues."""
        before = next((block for block in self._blocks if 0 <= self._place - block.end <= GAP_BYTES_MAX), None)
        length = FIRST_BYTES if before is None else max(FIRST_BYTES, min(len(before.data) * GROWTH, LENGTH_MAX))
        end = self._until + FIRST_BYTES if self._place < self._until else self._size
        size = min(max(length, min(need, LENGTH_MAX)), min(end, self._size) - self._place)
        kept_bytes = [*accumulate(len(block.data) for block in self._blocks)]
        self._blocks = self._blocks[: min(BLOCKS_MAX - 1, bisect_right(kept_bytes, self._kept_bytes))]
        try:
            data = self._read(self._place, size)
        except ObjectUnreadable as reason:
            raise SourceInvalid(f"{self._name} cannot be read at byte {self._place}: {reason}") from None
        if len(data) != size:
            raise SourceInvalid(f"{self._name} ends at byte {self._place + len(data)} of {self._size}: it has changed")
        self._blocks.insert(0, _Block(self._place, data))
        return self._blocks[0]
