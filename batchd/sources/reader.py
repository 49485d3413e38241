"""The columns of one sample that is a file or lies in one, or the reason why there are none. Workers only.

A source is someone else's disk: files vanish, are replaced by a FIFO, shrink while they are read. Each of these is one
``SampleUnreadable`` with a short reason; what is wrong with this process instead (no descriptors, no memory) stays an
``OSError``, so that a good sample is never called bad.

Invariant: what ``read`` returns is the whole of one regular file as it was in one piece, or of one record of a shard, at most
``max_bytes`` long, and stays valid until the next ``read``.
"""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from batchd import failpoints
from batchd.config.columns import Column
from batchd.config.file_sources import FolderSource, GlobSource, ListSource, WebDatasetSource
from batchd.config.values import Value
from batchd.samples.errors import SampleUnreadable
from batchd.sources.files import FilesIndex
from batchd.storage.access import ObjectUnreadable, versions_in
from batchd.storage.index import SourceIndex
from batchd.storage.location import is_url
from batchd.storage.open_files import OpenShards, blamed, blaming_the_sample
from batchd.storage.open_folders import Folders
from batchd.storage.paths import bound_of
from batchd.storage.remote_reader import Extent, RemoteBytes

KEPT_BYTES_MAX = 8 << 20
"""A buffer up to this length is kept for the next sample; a longer one goes, so that one huge file does not cost for ever."""
FIRST_BUFFER_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


class BytesReader:
    """Reads whole files, and parts of files that stay open, one after the other into one buffer.

    Belongs to one worker and one stream. ``place`` is that of the index; ``holder`` is what people call a file that records lie
    in. ``bound``: a real path that links must not lead out of. ``remote``: who reads objects, for several readers together.
    """

    def __init__(
        self,
        max_bytes: int,
        place: Mapping[str, Any],
        holder: str = "shard",
        bound: bytes | None = None,
        remote: RemoteBytes | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._holder = holder
        self._buffer = bytearray(FIRST_BUFFER_BYTES)
        self._folders = Folders(bound)
        versions = versions_in(place)
        self._shards = OpenShards(bound, versions)
        self._remote = remote or RemoteBytes(versions)

    def close(self) -> None:
        """Close what is open."""
        self._shards.close()
        self._folders.close()

    def read_file(self, path: bytes, sample: int) -> memoryview:
        """Return all bytes of a file, valid until the next call. Raises ``SampleUnreadable`` with the reason."""
        if is_url(path):
            return self._read_object(path, sample)
        try:
            descriptor = self._folders.open(path)
            try:
                failpoints.passing("worker.sample.opened", sample)
                return self._read_whole(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise blamed(error) from None

    def read_extent(self, path: bytes, start: int, size: int) -> memoryview:
        """Return ``size`` bytes of a file, valid until the next call. Raises ``SampleUnreadable`` with the reason."""
        if is_url(path):
            return self._read_range(path, start, size)
        with blaming_the_sample():
            data = self._read_extent(self._shards.descriptor(path), start, size)
            self._shards.check(path)
            return data

    def prefetch(self, extents: Iterable[Extent]) -> None:
        """Ask servers for all of these at once, before they are read one by one; files are not read ahead."""
        self._remote.fetch(
            one for one in extents if is_url(one.path) and (one.size is None or 0 < one.size <= self._max_bytes)
        )

    def _read_object(self, url: bytes, sample: int) -> memoryview:
        try:
            data = self._remote.read(Extent(url, 0, None), self._max_bytes)
        except ObjectUnreadable as reason:
            raise SampleUnreadable(str(reason)) from None
        failpoints.passing("worker.sample.opened", sample)
        if not data:
            raise SampleUnreadable("is empty")
        if len(data) > self._max_bytes:
            raise SampleUnreadable(f"has {len(data)} bytes, more than max_bytes = {self._max_bytes}")
        return data

    def _read_range(self, url: bytes, start: int, size: int) -> memoryview:
        self._check_size(start, size)
        try:
            data = self._remote.read(Extent(url, start, size), self._max_bytes)
        except ObjectUnreadable as reason:
            raise SampleUnreadable(f"cannot be read at byte {start} of its {self._holder}: {reason}") from None
        if len(data) != size:
            raise self._cut(start + len(data), size - len(data))
        return data

    def _check_size(self, start: int, size: int) -> None:
        if size == 0:
            raise SampleUnreadable(f"is empty (at byte {start} of its {self._holder})")
        if size > self._max_bytes:
            raise SampleUnreadable(f"has {size} bytes, more than max_bytes = {self._max_bytes}")

    def _cut(self, end: int, missing: int) -> SampleUnreadable:
        return SampleUnreadable(f"the {self._holder} ends at byte {end}, {missing} bytes before the sample does")

    def _read_extent(self, shard: int, start: int, size: int) -> memoryview:
        self._check_size(start, size)
        room = self._room(size)
        filled = 0
        while filled < size and (count := os.preadv(shard, [room[filled:]], start + filled)):
            filled += count
        if filled != size:
            end = os.fstat(shard).st_size
            raise self._cut(end, start + size - end)
        return room

    def _read_whole(self, descriptor: int) -> memoryview:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something")
            raise SampleUnreadable(f"is {kind}, not a regular file")
        size = status.st_size
        if size == 0:
            raise SampleUnreadable("is empty")
        if size > self._max_bytes:
            raise SampleUnreadable(f"has {size} bytes, more than max_bytes = {self._max_bytes}")
        room = self._room(size + 1)  # one more than the file has, to see whether it grew
        filled = 0
        while filled < size and (count := os.readv(descriptor, [room[filled:] if filled else room])):
            filled += count
        if filled != size:
            raise SampleUnreadable(
                f"changed while it was read: {filled} bytes{' or more' * (filled > size)}, not {size}"
            )
        return room[:size]

    def _room(self, size: int) -> memoryview:
        """``size`` bytes to read into."""
        if size > KEPT_BYTES_MAX:
            return memoryview(bytearray(size))
        if size > len(self._buffer):
            self._buffer = bytearray(min(2 * size, KEPT_BYTES_MAX))
        return memoryview(self._buffer)[:size]


class SampleReader(BytesReader):
    """Reads samples that are files or lie in them."""

    def __init__(self, index: FilesIndex, max_bytes: int, bound: bytes | None = None) -> None:
        super().__init__(max_bytes, index.index.place, bound=bound)
        self._index = index

    def read(self, sample: int) -> memoryview:
        """Return the bytes of a sample's file, valid until the next call.

        Raises ``SampleUnreadable`` with the reason; ``IndexError`` where there is no such sample.
        """
        extent, file = self._index.extent(sample), self._index.file(sample)
        return self.read_file(file, sample) if extent is None else self.read_extent(file, *extent)

    def read_ahead(self, samples: Sequence[int]) -> None:
        """Ask servers for the bytes of all these samples at once."""
        if is_url(self._index.root):
            self.prefetch(
                Extent(self._index.file(sample), *(self._index.extent(sample) or (0, None))) for sample in samples
            )


def image_columns(path_bytes: int) -> tuple[Column, ...]:
    """What a sample consists of that is one image with a label; ``path`` comes where it is asked for, ``path_bytes`` long."""
    path = (Column("path", shape=(path_bytes,)),) if path_bytes else ()
    return Column("image", "encoded"), Column("label", dtype="int64"), *path


class FilesReader:
    """Samples of one image and one label each: ``image``, ``label`` and, where it is asked for, ``path``."""

    def __init__(self, index: FilesIndex, reader: SampleReader, path_bytes: int) -> None:
        self._index = index
        self._bytes = reader
        self._path_bytes = path_bytes
        self.name = index.path
        self.prefetch = self._bytes.read_ahead
        self.close = self._bytes.close

    @classmethod
    def of(
        cls, source: FolderSource | ListSource | GlobSource | WebDatasetSource, index: SourceIndex, max_bytes: int
    ) -> Self:
        """The reader of a source; see ``kinds``."""
        files = FilesIndex(index)
        outside = source.allow_outside_root or is_url(files.root)
        bound = bound_of(Path(os.fsdecode(files.root)), allow_outside_root=outside)
        return cls(files, SampleReader(files, max_bytes, bound), source.path_bytes)

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``kinds.Reader``."""
        return {"image": self._bytes.read(sample), **self.known(sample)}

    def known(self, sample: int) -> Mapping[str, Value]:
        """Label and path stand in the index."""
        known: dict[str, Value] = {"label": self._index.labels[sample]}
        if self._path_bytes:
            known["path"] = padded_text(self._index.name(sample), self._path_bytes)
        return known


def padded_text(text: bytes, length: int) -> npt.NDArray[np.uint8]:
    """A text as a field holds it: its bytes, which have to fit, and zeros behind them. uint8 [length]."""
    return np.frombuffer(text.ljust(length, b"\0"), np.uint8)
