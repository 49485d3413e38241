"""The bytes of files, records in files, and objects, one after the other. Workers only.

A source is on a disk that batchd does not own: files vanish, are replaced by a FIFO, shrink while
they are read. Each of these is one ``SampleUnreadable`` with a short reason; what is wrong with
this process instead (no descriptors, no memory) stays an ``OSError``, so that a good sample is
never called bad.

A file may be reached through links, but must not be outside of its source's root. The kernel can
name the real path of an open file, which takes longer than to open it. So a folder that was found
within the root stays open, and files in it are opened by their names alone: from there only the
last link could lead elsewhere, and it is not followed.

Waiting for a server's answer takes longer than its bytes, so a reader gets the next extents,
and requests all of it at once:

    extents of one shard   | a | gap | b |        | c |      a, b: one request if the gap is short

A hint makes the kernel read ahead extents of a slow disk, of this host or on a network.

Invariants: what is returned is the whole of one regular file as it was in one piece, or of one
record, at most ``max_bytes`` long, within the bound, however links and folders change meanwhile. It
stays valid until the next call. What is fetched ahead has its room (``data.storage.ahead``), and is
kept until the order or the block that it is for is forgotten.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import groupby
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.location import is_url
from batchd.data.samples.values import MediaFile
from batchd.data.storage.access import Storage
from batchd.data.storage.ahead import Answer, Requested
from batchd.data.storage.paths import OPEN_FLAGS, OpenShards, blamed, blaming_the_sample, check_opened, open_within
from batchd.data.storage.rows import SLOW_NS, read_file
from batchd.data.storage.values import ObjectTooLong, ObjectUnreadable, Wanted, versions_in
from batchd.runtime import failpoints

KEPT_BYTES_MAX = 8 << 20
"""A longer buffer is not kept for the next sample, so one huge file costs no memory later."""
FIRST_BUFFER_BYTES = 1 << 20
"""Only the part that samples have reached takes memory."""
SLOW_CHUNKS = 4
"""After a slow read (``SLOW_NS``), so many chunks are announced to the kernel: 6 us a sample."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}
FOLDERS_MAX = 4096
"""Of a source with more of them, the first ones that are met stay open."""
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FOLDER = -1
"""In place of a folder's descriptor, where paths are absolute."""
_HAS_LINKS = -1
"""In place of a folder's descriptor, where files in it are links."""
WHOLE_BYTES_MAX = 4 << 20
"""Longer extents are read on demand, not ahead."""
WHOLE_RECORD_BYTES_MAX = 512 << 10
"""A longer record of sound or video on this machine is read in parts."""
JOINED_BYTES_MAX = 4 << 20
GAP_BYTES_MAX = 128 << 10
"""From a server that answers after 20 ms, 16 requests at a time, one more takes some 1.5 ms, in
which a link of 1 Gbit/s carries more bytes than these (`make bench ONLY=slow_storage`)."""


class Extent(NamedTuple):
    """Some bytes of a file, or of an object: all of them where ``size`` is None."""

    path: bytes
    start: int
    size: int | None


class _Request:
    """A request for the bytes ``around`` some extents. ``users``: see ``RemoteBytes.fetch``."""

    def __init__(self, around: Extent, extents: list[Extent]) -> None:
        self.around = around
        self.extents = extents
        self.users = 0
        self.answer: Answer = Future()


class RowsPart(NamedTuple):
    """Rows of a file, from each of ``starts`` (in bytes), that go to ``places`` of ``memory``.

    Both are int64 of the same length. ``memory``: contiguous rows.
    """

    starts: NDArray[np.int64]
    places: NDArray[np.int64]
    memory: memoryview


class RemoteBytes:
    """Reads objects for one reader, ahead if its ``root`` is a URL.

    ``place``: of the index, with the versions that objects must have.
    """

    def __init__(self, storage: Storage, root: bytes, place: Mapping[str, Any]) -> None:
        self.reads_ahead = is_url(root)
        self.versions = versions_in(place)
        self.as_of_ns = storage.as_of_ns
        self._storage = storage
        self._fetched: dict[Extent, _Request] = {}

    def read(self, extent: Extent, bytes_max: int) -> memoryview:
        """The bytes, fewer if the object ends; ``ObjectUnreadable`` also beyond ``bytes_max``."""
        request, found = self._fetched.get(extent), None
        if request is not None:
            with suppress(TimeoutError):
                found = request.answer.result(max(0, self._storage.sample_s / 2))
        if request is None or found is None or isinstance(found, ObjectTooLong):
            return self._read(extent, bytes_max)
        if isinstance(found, ObjectUnreadable):
            raise ObjectUnreadable(str(found))  # a new one: the frames that it passes hold this one
        first = extent.start - request.around.start
        return found[first : None if extent.size is None else first + extent.size]

    def fetch(self, extents: Iterable[Extent]) -> None:
        """Begin to read these extents, for ``Storage.requested``, until that is forgotten.

        What others have requested is not requested again, and kept until all of them forget it.
        """
        if not self.reads_ahead:
            return
        requested = self._storage.requested
        wanted = set(extents)
        short = [extent for extent in wanted if extent.size is None or extent.size <= WHOLE_BYTES_MAX]
        if len(short) < len(wanted):
            requested.refuse()
        used = {self._fetched[extent] for extent in short if extent in self._fetched}
        absent = (extent for extent in short if extent not in self._fetched)
        begun = [
            _Request(*extent) for extent in _joined(sorted(absent, key=lambda extent: (extent.path, extent.start)))
        ]
        begun = [request for request in begun if requested.take(request.around.size)]
        for request in (*used, *begun):
            request.users += 1
        requested.at_end(partial(self._release, (*used, *begun)))
        for request in begun:
            self._fetched.update(dict.fromkeys(request.extents, request))
            self._begin(request, requested)

    def _begin(self, request: _Request, requested: Requested) -> None:
        try:
            wanted = self._wanted(request.around, WHOLE_BYTES_MAX)
        except ObjectUnreadable as reason:
            request.answer.set_result(reason)
            return
        request.answer = self._storage.client.begin(wanted, requested.left_s, lambda: request.users > 0)
        requested.add(request.answer, request.around.size)

    def _release(self, requests: Iterable[_Request]) -> None:
        for request in requests:
            request.users -= 1
            if not request.users:
                for extent in request.extents:
                    del self._fetched[extent]

    def _read(self, extent: Extent, bytes_max: int) -> memoryview:
        deadline_s = self._storage.sample_s
        if deadline_s <= 0:
            raise ObjectUnreadable(f"it was not read within {self._storage.limits.deadline_s:g} s")
        return self._storage.client.read(self._wanted(extent, bytes_max), deadline_s)

    def _wanted(self, extent: Extent, bytes_max: int) -> Wanted:
        url = os.fsdecode(extent.path)
        if url.encode(errors="replace").decode() != url:
            raise ObjectUnreadable("its name is not UTF-8, so no server has it")
        return Wanted(url, extent.start, extent.size, self.versions.get(url), bytes_max, self.as_of_ns)


def _joined(extents: Iterable[Extent]) -> Iterator[tuple[Extent, list[Extent]]]:
    """The extents of each request, sorted, behind the extent around them."""
    for path, those in groupby(extents, key=lambda extent: extent.path):
        group: list[Extent] = []
        end = 0
        for extent in those:
            is_apart = extent.size is None or extent.start - end > GAP_BYTES_MAX
            if group and (is_apart or extent.start + (extent.size or 0) - group[0].start > JOINED_BYTES_MAX):
                yield Extent(path, group[0].start, end - group[0].start), group
                group = []
            if extent.size is None:
                yield extent, [extent]
                continue
            end = max(end, extent.start + extent.size) if group else extent.start + extent.size
            group.append(extent)
        if group:
            yield Extent(path, group[0].start, end - group[0].start), group


class BytesReader:
    """Reads whole files, and parts of files that stay open, one after the other into one buffer.

    Belongs to one worker and one stream. ``remote``: reads objects, for several readers together.
    ``holder``: the word in messages for a file with several records. ``bound``: see ``bound_of``.
    Methods raise ``SampleUnreadable`` with the reason; their bytes are valid until the next call.
    """

    takes_empty = False
    """Whether files without a byte are read, too."""

    def __init__(self, remote: RemoteBytes, max_bytes: int, holder: str = "shard", bound: bytes | None = None) -> None:
        self._remote = remote
        self.reads_ahead = remote.reads_ahead
        """True if ``prefetch`` does something: the root is a URL."""
        self._max_bytes = max_bytes
        self._holder = holder
        self._buffer = memoryview(bytearray())
        self._slow_chunks = 0
        """Chunks that are still announced to the kernel."""
        self._folders = Folders(bound)
        self._shards = OpenShards(bound, remote.versions)
        self._opened: int | None = None
        """The file of the last call of ``open_file``."""

    def close(self) -> None:
        """Close all files and folders."""
        self._close_file()
        self._shards.close()
        self._folders.close()

    def read_file(self, path: bytes, sample: int) -> memoryview:
        """Return all bytes of a file."""
        if is_url(path):
            return self._read_object(path, sample)
        length = read_file(*self._folders.place(path), self._buffer, self._max_bytes, self._remote.as_of_ns)
        if length:
            failpoints.passing("worker.sample.opened", sample)
            return self._buffer[:length]
        try:
            descriptor = self._folders.open(path)
            try:
                failpoints.passing("worker.sample.opened", sample)
                return self._read_whole(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise blamed(error) from None

    def open_file(self, path: bytes, sample: int) -> memoryview | MediaFile:
        """Open a file to be read in parts, however long it is.

        An object whose size the index does not tell is read whole.
        """
        self._close_file()
        if is_url(path):
            version = self._remote.versions.get(os.fsdecode(path))
            if version is None or version.size <= WHOLE_BYTES_MAX:
                return self._read_object(path, sample)
            return MediaFile(version.size, partial(self._read_some, path, 0, version.size), (path, *version))
        try:
            self._opened = self._folders.open(path)
            failpoints.passing("worker.sample.opened", sample)
            status = os.fstat(self._opened)
        except OSError as error:
            raise blamed(error) from None
        self._check_regular(status)
        if not status.st_size:
            raise SampleUnreadable("is empty")
        self._check_time(status)
        name = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        return MediaFile(status.st_size, partial(self._read_part, self._opened), name, self._opened)

    def open_extent(self, path: bytes, start: int, size: int) -> memoryview | MediaFile:
        """Open a record of a file to be read in parts, if it is long."""
        if size <= (WHOLE_BYTES_MAX if is_url(path) else WHOLE_RECORD_BYTES_MAX):
            return self.read_extent(path, start, size)
        if not is_url(path):
            with blaming_the_sample():
                self._shards.descriptor(path)
                self._shards.check(path)
        return MediaFile(size, partial(self._read_some, path, start, size), (path, start, size))

    def _read_some(self, path: bytes, start: int, size: int, first: int, count: int) -> bytes:
        """Bytes of a record, for ``MediaFile``."""
        return self.read_up_to(path, start + first, max(0, min(count, size - first)))

    @staticmethod
    def _read_part(descriptor: int, start: int, count: int) -> bytes:
        with blaming_the_sample():
            data = os.pread(descriptor, count, start)
            while len(data) < count and (more := os.pread(descriptor, count - len(data), start + len(data))):
                data += more
        return data

    def _close_file(self) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def place(self, path: bytes) -> tuple[int, bytes, int, int, int] | None:
        """The arguments to read a file of this host at once (``rows.read_file``).

        None for a URL.
        """
        return None if is_url(path) else (*self._folders.place(path), self._max_bytes, self._remote.as_of_ns)

    def memory(self) -> memoryview:
        """The buffer. Files that do not fit have to be read by ``read_file``, which enlarges it."""
        return self._buffer

    def read_extent(self, path: bytes, start: int, size: int) -> memoryview:
        """Return ``size`` bytes of a file."""
        if is_url(path):
            return self._read_range(path, start, size)
        try:
            data = self._read_extent(self._shards.descriptor(path), start, size)
        except OSError as error:
            self._shards.forget(path)  # of a mount that is another one by now
            raise blamed(error) from None
        with blaming_the_sample():
            self._shards.check(path)
        return data

    def read_rows(self, path: bytes, size: int, parts: Iterable[RowsPart]) -> None:
        """Read rows of ``size`` bytes of a file of this host, in parts."""
        with blaming_the_sample():
            file = self._shards.rows(path)
            for starts, places, rows in parts:
                self._check_size(size, int(starts[0]))
                if file.read(starts, places, rows, size) != len(starts):
                    raise SampleUnreadable(f"the {self._holder} ends before a sample does, or was read in part")
            self._shards.check(path)

    def prefetch(self, extents: Iterable[Extent]) -> None:
        """Request all of these extents at once, before they are read one by one.

        Of this host's shards the kernel reads them ahead, as long as reads have to wait: see
        ``SLOW_NS``. Where they do not, the list is not even made.
        """
        if not self.reads_ahead and self._slow_chunks:
            self._slow_chunks -= 1
            for extent in extents:
                self._announce(extent)
            return
        self._remote.fetch(
            extent
            for extent in extents
            if is_url(extent.path) and (extent.size is None or 0 < extent.size <= self._max_bytes)
        )

    def _announce(self, extent: Extent) -> None:
        if extent.size and not is_url(extent.path):
            with suppress(SampleUnreadable, OSError):  # it fails when it is read
                shard = self._shards.descriptor(extent.path)
                os.posix_fadvise(shard, extent.start, min(extent.size, self._max_bytes), os.POSIX_FADV_WILLNEED)

    def read_up_to(self, path: bytes, start: int, size: int) -> bytes:
        """``size`` bytes of a file, fewer if it ends before, which the caller checks."""
        if not is_url(path):
            with blaming_the_sample():
                return os.pread(self._shards.descriptor(path), size, start)
        try:
            return bytes(self._remote.read(Extent(path, start, size), self._max_bytes)) if size else b""
        except ObjectUnreadable as reason:
            raise SampleUnreadable(f"cannot be read: {reason}") from None

    def end_of(self, path: bytes, reached: int) -> int:
        """The byte at which a file ends that ended too soon, at byte ``reached``."""
        if is_url(path):
            return reached
        with blaming_the_sample():
            return os.fstat(self._shards.descriptor(path)).st_size

    def _read_object(self, url: bytes, sample: int) -> memoryview:
        try:
            data = self._remote.read(Extent(url, 0, None), self._max_bytes)
        except ObjectUnreadable as reason:
            raise SampleUnreadable(str(reason)) from None
        failpoints.passing("worker.sample.opened", sample)
        self._check_size(len(data))
        return data

    def _read_range(self, url: bytes, start: int, size: int) -> memoryview:
        self._check_size(size, start)
        try:
            data = self._remote.read(Extent(url, start, size), self._max_bytes)
        except ObjectUnreadable as reason:
            raise SampleUnreadable(f"cannot be read at byte {start} of its {self._holder}: {reason}") from None
        if len(data) != size:
            raise self._cut(start + len(data), size - len(data))
        return data

    def _check_size(self, size: int, start: int | None = None) -> None:
        if size == 0 and not self.takes_empty:
            raise SampleUnreadable("is empty" if start is None else f"is empty (at byte {start} of its {self._holder})")
        check_bytes(size, self._max_bytes)

    def _cut(self, end: int, missing: int) -> SampleUnreadable:
        return SampleUnreadable(f"the {self._holder} ends at byte {end}, {missing} bytes before the sample does")

    def _read_extent(self, shard: int, start: int, size: int) -> memoryview:
        self._check_size(size, start)
        room = self._room(size)
        filled = 0
        begun_ns = perf_counter_ns()
        while filled < size and (count := os.preadv(shard, [room[filled:]], start + filled)):
            filled += count
        if perf_counter_ns() - begun_ns > SLOW_NS + size:
            self._slow_chunks = SLOW_CHUNKS
        if filled != size:
            end = os.fstat(shard).st_size
            raise self._cut(end, start + size - end)
        return room

    def _read_whole(self, descriptor: int) -> memoryview:
        status = os.fstat(descriptor)
        self._check_regular(status)
        size = status.st_size
        self._check_size(size)
        room = self._room(size + 1)  # one more than the file has, to see whether it grew
        filled = 0
        while filled < size and (count := os.readv(descriptor, [room[filled:] if filled else room])):
            filled += count
        if filled != size:
            raise SampleUnreadable(
                f"changed while it was read: {filled} bytes{' or more' * (filled > size)}, not {size}"
            )
        self._check_time(os.fstat(descriptor))
        return room[:size]

    @staticmethod
    def _check_regular(status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something")
            raise SampleUnreadable(f"is {kind}, not a regular file")

    def _check_time(self, status: os.stat_result) -> None:
        """Refuse a file that was written after the scan.

        Both times: its mode or links may change later, and it may have been given a later time
        before. A file that is replaced by one with an earlier time cannot be told from those.
        """
        later_ns = min(status.st_mtime_ns, status.st_ctime_ns) - self._remote.as_of_ns
        if self._remote.as_of_ns and later_ns > 0:
            raise SampleUnreadable(
                f"was written {later_ns / 1e9:.1f} s after its source was scanned; restart the daemon, or the command"
            )

    def _room(self, size: int) -> memoryview:
        if size > KEPT_BYTES_MAX:
            return memoryview(bytearray(size))
        if size > len(self._buffer):
            self._buffer = np.empty(max(FIRST_BUFFER_BYTES, min(2 * size, KEPT_BYTES_MAX)), np.uint8).data
        return self._buffer[:size]


class Folders:
    """Opens files for one reader; ``bound``: see ``bound_of``."""

    def __init__(self, bound: bytes | None) -> None:
        self._bound = bound
        self._open: dict[bytes, int] = {}
        self._has_room = bound is not None

    def place(self, path: bytes) -> tuple[int, bytes, int]:
        """(folder, name, flags) to open a file; a name that opens nothing if it takes more."""
        if self._bound is None:
            return _NO_FOLDER, path, OPEN_FLAGS
        folder, _, name = path.rpartition(b"/")
        known = self._open.get(folder, _HAS_LINKS)
        return (known, name if known != _HAS_LINKS else b"", OPEN_FLAGS | os.O_NOFOLLOW)

    def open(self, path: bytes) -> int:
        """Open a file to read, as ``open_within`` does; the caller closes it."""
        folder, _, name = path.rpartition(b"/")
        known = self._open.get(folder)
        if known is not None and known != _HAS_LINKS:
            try:
                return os.open(name, OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=known)
            except OSError as error:  # a link, or there may be another folder by that name now
                os.close(self._open.pop(folder))
                if error.errno == errno.ELOOP:
                    self._open[folder] = known = _HAS_LINKS
        descriptor = open_within(path, self._bound)
        if known != _HAS_LINKS and self._has_room:
            self._keep(folder)
        return descriptor

    def close(self) -> None:
        """Close the folders."""
        while self._open:
            descriptor = self._open.popitem()[1]
            if descriptor != _HAS_LINKS:
                os.close(descriptor)

    def _keep(self, folder: bytes) -> None:
        """Keep a folder within the bound open, while there are descriptors."""
        try:
            descriptor = os.open(folder or b"/", _FOLDER_FLAGS)
        except OSError:
            self._has_room = False
            return
        try:
            check_opened(descriptor, self._bound)
        except (OSError, SampleUnreadable):
            os.close(descriptor)
            return
        self._open[folder] = descriptor
        self._has_room = len(self._open) < FOLDERS_MAX
