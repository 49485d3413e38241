"""Read samples that producers push into a mailbox. Workers only.

A sample's number is its row in the stream, counted from the first batch. It does not tell its
place: each order names the places of the samples in its rows.

A producer can write into any place at any time, also while it is read. So a place is copied,
lengths first, before its content is checked. The worst result is a sample with wrong values.

Invariant: ``read`` returns memory of this process, with the types and shapes of ``columns``.
"""

import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from batchd.data.samples.errors import SampleUnreadable, check_bytes
from batchd.data.samples.values import Value
from batchd.data.sources.interface import PlainReader
from batchd.data.sources.push.options import PushSource
from batchd_wire.mailbox import MailColumn, ValueExtent
from batchd_wire.views import Array


class PushReader(PlainReader):
    """Reads samples of a mailbox. Call ``attach`` first, and ``expect`` before each order."""

    def __init__(self, source: PushSource, max_bytes: int) -> None:
        self._layout = source.layout
        self._capacity = source.capacity
        self._max_bytes = max_bytes
        self._descriptor = -1
        self._buffer = np.zeros(self._layout.place_bytes, np.uint8)
        self._first = 0
        self._places: tuple[int, ...] = ()

    def attach(self, descriptor: int) -> None:
        """Read from this mailbox; the reader owns the descriptor from now on."""
        self._descriptor = descriptor

    def expect(self, first: int, places: tuple[int, ...]) -> None:
        """Samples from number ``first`` on are in ``places``."""
        self._first, self._places = first, places

    def read(self, sample: int) -> Mapping[str, Value]:
        """See ``interface.Reader``."""
        place = self._places[sample - self._first]
        assert 0 <= place < self._capacity, f"place {place} of a mailbox with {self._capacity}"
        start = place * self._layout.place_bytes
        self._copy(start, 0, self._layout.values_start)
        try:
            extents = self._layout.extents(self._layout.unpack_lengths(self._buffer.data))
        except ValueError as error:
            raise SampleUnreadable(f"was pushed with lengths that cannot be: {error}") from None
        last = extents[-1]
        self._copy(start, self._layout.values_start, last.start + last.size)
        return {
            column.name: self._value(column, extent)
            for column, extent in zip(self._layout.columns, extents, strict=True)
        }

    def name(self, sample: int) -> str:
        """See ``interface.Reader``."""
        return f"pushed sample {sample}"

    def close(self) -> None:
        """Close the mailbox."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _copy(self, start: int, first: int, end: int) -> None:
        """Copy a part of a place into the same part of the buffer; the memory is sealed."""
        while first < end:
            first += os.preadv(self._descriptor, [self._buffer.data[first:end]], start + first)

    def _value(self, column: MailColumn, extent: ValueExtent) -> Value:
        value: Array = self._buffer[extent.start : extent.start + extent.size]
        if column.kind == "text":
            return _text(column.name, value)
        if column.kind == "image":
            check_bytes(extent.size, self._max_bytes)
            return memoryview(value.data)
        if column.kind == "bool":
            value = value != 0  # a byte that is neither 0 nor 1 is no bool
        typed: Array = value.view(np.dtype(column.kind))
        return typed.reshape(extent.shape)


def _text(name: str, value: npt.NDArray[np.uint8]) -> str:
    try:
        return value.tobytes().decode()
    except UnicodeDecodeError:
        raise SampleUnreadable(f"{name!r} is no UTF-8") from None


READERS = {PushSource: lambda source, _index, max_bytes, _storage: PushReader(source, max_bytes)}
