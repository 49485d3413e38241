"""Records that follow each other in files, and the images that they name. Workers.

    a.csv   | header | record | record | ...      index    starts   first byte of each record
            0        12       57       103        facts    files    [[records, bytes, ...], ...]
                                                  place    files    their paths

A record ends where the next one begins, the last one with its file, so the index has eight bytes
for each.

Invariant: an image is below its root, unless the source allows images anywhere.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.location import is_url
from batchd.data.samples.values import Value
from batchd.data.sources.interface import PlainReader
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.paths import below_root, real_path
from batchd.data.storage.reader import BytesReader, Extent, RemoteBytes

_LINE_FEED = b"\n"[0]


class RecordPlace(NamedTuple):
    """The number of a file, that of a record in it, its first byte, and the one behind its last."""

    file: int
    number: int
    start: int
    end: int


class RecordsReader(PlainReader):
    """Base of the readers of records."""

    noun = "record"
    first_number = 1
    """Messages count the records of a file from here."""

    def __init__(self, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        files = index.facts["files"]
        self.files = [os.fsencode(path) for path in index.place["files"]]
        self.max_bytes = max_bytes
        self._index = index
        self._starts: NDArray[np.int64] = index.arrays["starts"]
        self._ends = [size for _records, size, *_digest in files]
        self._firsts = list(accumulate((records for records, *_rest in files), initial=0))
        self._bytes = BytesReader(RemoteBytes(storage, self.files[0], index.place), max_bytes, "file")
        self._to_close = [self._bytes]

    def close(self) -> None:
        """See ``interface.Reader``."""
        for reader in self._to_close:
            reader.close()

    def prefetch(self, samples: Sequence[int]) -> None:
        """Request all these records from servers at once."""
        records = map(self.record, samples)
        self._bytes.prefetch(Extent(self.files[one.file], one.start, one.end - one.start) for one in records)

    def name(self, sample: int) -> str:
        """See ``interface.Reader``."""
        file, number, start, _end = self.record(sample)
        return f"{readable(self.files[file])}: {self.noun} {number + self.first_number} (byte {start})"

    def record(self, sample: int) -> RecordPlace:
        """The place of a sample."""
        sample = self._index.checked(sample)
        file = bisect_right(self._firsts, sample) - 1
        is_last = sample + 1 == self._firsts[file + 1]
        end = self._ends[file] if is_last else int(self._starts[sample + 1])
        return RecordPlace(file, sample - self._firsts[file], int(self._starts[sample]), end)

    def read_bytes(self, record: RecordPlace) -> memoryview:
        """The bytes of a record, valid until the next call. Raises ``SampleUnreadable``."""
        return self._bytes.read_extent(self.files[record.file], record.start, record.end - record.start)

    def read_line(self, record: RecordPlace, too_long: str) -> memoryview:
        """As ``read_bytes``, of a record that ends with its line; ``too_long``: the remedy."""
        size = record.end - record.start
        check_bytes(size, self.max_bytes, remedy=f"; {too_long}")
        line = self.read_bytes(record)
        if record.end < self._ends[record.file] and line[-1] != _LINE_FEED:
            raise SampleUnreadable("does not end where it did; the file was changed after the daemon read it")
        return line


def image_folders(files: Sequence[bytes], root: str | None) -> list[bytes]:
    """The folder of the images of each file with records: the root, or the folder of the file."""
    return [os.path.dirname(file) if root is None else os.fsencode(root) for file in files]  # noqa: PTH120  bytes


class NamedFile(NamedTuple):
    """A file that a record names: the number of the record's file, the path, and its title."""

    file: int
    path: str
    title: str


class NamedFiles:
    """Reads the files that records name by paths or URLs: up to ``count`` of one record.

    ``folders``: what the paths in each file of records are relative to.
    """

    def __init__(
        self, folders: Sequence[bytes], max_bytes: int, storage: Storage, *, allow_outside_root: bool, count: int = 1
    ) -> None:
        self._roots = list(map(real_path, folders))
        self._allow_outside_root = allow_outside_root
        remote = RemoteBytes(storage, self._roots[0], {})
        self.readers = [BytesReader(remote, max_bytes) for _number in range(count)]

    def prefetch(self, paths: Iterable[tuple[int, str]]) -> None:
        """Request these images from servers at once: the numbers of files, and paths in them.

        A path that cannot be used fails when it is read.
        """
        self.readers[0].prefetch(Extent(place, 0, None) for place in map(self._place_or_none, paths) if place)

    def read(self, named: NamedFile, sample: int, kind: str = "encoded", number: int = 0) -> Value:
        """A file, valid until the next call with the same ``number``: of an image, its bytes.

        ``kind``: of its column. Raises ``SampleUnreadable``.
        """
        file, path, title = named
        if not path:
            raise SampleUnreadable(
                f"{title!r} is empty, and not the path of {'an image' if kind == 'encoded' else 'a file'}"
            )
        reader = self.readers[number]
        read = reader.read_file if kind == "encoded" else reader.open_file
        try:
            return read(self._place(file, path), sample)
        except ValueError as error:
            raise SampleUnreadable(f"{title!r} is {path!r}: {error}") from None

    def copied(self, named: NamedFile, sample: int, number: int = 0) -> memoryview:
        """The bytes of an image, which stay. Raises ``SampleUnreadable``."""
        return memoryview(bytes(self.read(named, sample, "encoded", number)))  # type: ignore[arg-type]  # a memoryview

    def _place_or_none(self, named: tuple[int, str]) -> bytes | None:
        try:
            return self._place(*named) if named[1] else None
        except ValueError:
            return None

    def _place(self, file: int, path: str) -> bytes:
        """The path or URL of an image. Raises ``ValueError``."""
        root, name = self._roots[file], path.encode()
        if is_url(name):
            around = root.rstrip(b"/") + b"/"
            if not name.startswith(around):
                raise ValueError(f"a URL that is not below {readable(root)}, the root of the images")
            name = name[len(around) :]
        return os.path.join(root, name) if self._allow_outside_root else below_root(root, name)  # noqa: PTH118
