"""Read windows and documents of tokens. Workers only.

Windows are read as rows of an array are, many at once; documents one by one.

Invariant: ``read`` returns the tokens of one window or document, in this machine's byte order.
"""

from collections.abc import Mapping

import numpy as np

from batchd.data.samples.values import Value
from batchd.data.sources.arrays.reader import ArrayReader
from batchd.data.sources.interface import Reader
from batchd.data.sources.records import RecordsReader
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex


class DocumentsReader(RecordsReader):
    """Reads any document. Documents are counted from 0, without those that have no token."""

    noun = "document"
    first_number = 0

    def __init__(self, source: TokensSource, index: SourceIndex, max_bytes: int, storage: Storage) -> None:
        super().__init__(index, max_bytes, storage)
        self._field = source.field
        self._stored = np.dtype(source.dtype).newbyteorder("<")

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        tokens = np.frombuffer(self.read_bytes(self.record(sample)), self._stored)
        return {self._field: tokens.astype(self._stored.newbyteorder("="), copy=False)}


def _open(source: TokensSource, index: SourceIndex, max_bytes: int, storage: Storage) -> Reader:
    return (DocumentsReader if source.length is None else ArrayReader)(source, index, max_bytes, storage)


READERS = {TokensSource: _open}
