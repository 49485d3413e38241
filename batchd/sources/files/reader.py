"""The columns of one sample that is a file or lies in one, or the reason why there are none. Workers only."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from batchd.samples.values import Value
from batchd.sources.files.index import FilesIndex
from batchd.sources.files.options import FolderSource, GlobSource, ListSource
from batchd.sources.webdataset.options import WebDatasetSource
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.paths import bound_of
from batchd.storage.reader import BytesReader, Extent, RemoteBytes


class SampleReader(BytesReader):
    """Reads samples that are files or lie in them."""

    def __init__(self, index: FilesIndex, max_bytes: int, storage: Storage, bound: bytes | None = None) -> None:
        super().__init__(RemoteBytes(storage, index.root, index.index.place), max_bytes, bound=bound)
        self._index = index

    def read(self, sample: int) -> memoryview:
        """Return the bytes of a sample's file, valid until the next call.

        Raises ``SampleUnreadable`` with the reason; ``IndexError`` where there is no such sample.
        """
        extent, file = self._index.extent(sample), self._index.file(sample)
        return self.read_file(file, sample) if extent is None else self.read_extent(file, *extent)

    def read_ahead(self, samples: Sequence[int]) -> None:
        """Ask servers for the bytes of all these samples at once."""
        self.prefetch(
            Extent(self._index.file(sample), *(self._index.extent(sample) or (0, None))) for sample in samples
        )


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
        cls,
        source: FolderSource | ListSource | GlobSource | WebDatasetSource,
        index: SourceIndex,
        max_bytes: int,
        storage: Storage,
    ) -> Self:
        """The reader of a source; see ``kinds``."""
        files = FilesIndex(index)
        bound = bound_of(files.root, allow_outside_root=source.allow_outside_root)
        return cls(files, SampleReader(files, max_bytes, storage, bound), source.path_bytes)

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


READERS = dict.fromkeys((FolderSource, ListSource, GlobSource), FilesReader.of)
