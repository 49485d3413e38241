"""The index of samples at regular distances in files, as a few numbers. Daemon and workers.

    facts    parts    [[samples, run, run, ...], ...]     parts follow each other
             run      [file, first, stride, size, pieces, gap]
             fields   [[name, run, offset, dtype, shape, order], ...]   the dtype has a byte order,
                                                                        the order is "C" or "F"
             files    [[bytes, fingerprint], ...]
    place    files    their paths

    run of a part, sample s:   | size |  ... gap ...  | size |  ...      as many pieces
                               ^ first + s * stride   ^ + gap

A run is read at once: one array's sample, or a record of several fields. Only a sample of an array
in Fortran order has more than one piece. The index holds nothing for each sample, so its size does
not depend on their number.

Of .npy files only headers are parsed, by numpy, and nothing is executed; arrays of objects, which
need pickle, are refused.

Invariant: the runs of all samples are within the bytes that the files had at the scan.
"""

import os
from math import prod
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from tokenize import TokenError
from typing import BinaryIO, NamedTuple
from warnings import catch_warnings

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from batchd.data.samples.errors import SampleUnreadable
from batchd.errors import SourceInvalid
from batchd_wire.fields import ITEM_BYTES
from batchd_wire.record import frozen
from batchd_wire.views import Array

PIECES_MAX = 4096
"""Pieces of a sample of an array in Fortran order: each is a read of its own."""


_DAMAGED = (
    *(ValueError, TypeError, KeyError, SyntaxError, TokenError),
    *(OverflowError, MemoryError, RecursionError, StructError),
)
"""Errors of numpy's parser for a damaged header."""
_PARSERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


class Run(NamedTuple):
    """Bytes that are read at once, for each sample of a part; see above."""

    file: int
    first: int
    stride: int
    size: int
    pieces: int = 1
    gap: int = 0


@frozen
class StoredArray:
    """An array. ``first`` is its first byte. In a file, ``shape[0]`` counts the samples."""

    first: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.dtype.itemsize * prod(self.shape)

    def check_end(self, where: str, size: int) -> None:
        """Raise ``SourceInvalid`` unless the array ends with its file of ``size`` bytes."""
        need = self.first + self.size
        if size != need:
            what = "is cut" if size < need else "has something behind its array"
            raise SourceInvalid(f"{where} {what}: it has {size} bytes, and its header says {need}")

    def numbers(self, name: str, data: memoryview) -> Array:
        """The array in ``data``: of this ``shape``, and ``dtype`` in this machine's byte order.

        Raises ``SampleUnreadable``, with its name, for a bool that is neither 0 nor 1.
        """
        numbers = np.frombuffer(data, self.dtype, prod(self.shape), self.first)
        if self.dtype.kind == "b" and numbers.size and numbers.view(np.uint8).max() > 1:
            raise SampleUnreadable(f"{name} has a byte {numbers.view(np.uint8).max()}, which is not bool: 0 or 1")
        numbers = numbers.reshape(self.shape, order="F" if self.fortran else "C")
        return numbers if self.dtype.isnative else numbers.astype(self.dtype.newbyteorder("="))

    def rows(self, name: str, data: NDArray[np.uint8]) -> Array:
        """As ``numbers``, for several samples: ``[samples, *shape]``.

        ``data``: a row of bytes for each sample, uint8 ``[samples, bytes]``. Raises the same.
        """
        mine = np.ascontiguousarray(data[:, self.first : self.first + self.size])
        if self.dtype.kind == "b" and mine.size and mine.max() > 1:
            raise SampleUnreadable(f"{name} has a byte {mine.max()}, which is not bool: 0 or 1")
        return mine.view(self.dtype).reshape(len(data), *self.shape)


def check_dtype(where: str, dtype: "np.dtype[np.generic]") -> None:
    """Raise ``SourceInvalid`` for a type that a batch cannot hold; ``where`` names the array."""
    if dtype.fields is not None:
        raise SourceInvalid(
            f"{where} is a structured array ({', '.join(dtype.names or ())}); save each field by itself"
        )
    if dtype.hasobject:
        raise SourceInvalid(f"{where} holds Python objects, which are never loaded; save numbers")
    if dtype.newbyteorder("=").name not in ITEM_BYTES or dtype.subdtype is not None:
        raise SourceInvalid(f"{where} is of the type {dtype}, and a batch can hold {', '.join(ITEM_BYTES)}")


def read_array(where: str, stream: BinaryIO) -> StoredArray:
    """Read the header of an array of samples. Raises ``SourceInvalid``, naming ``where``."""
    array = read_header(where, stream)
    if not array.shape:
        raise SourceInvalid(f"{where} is one number; the first dimension of an array counts the samples")
    if not all(array.shape):
        raise SourceInvalid(f"{where} holds nothing: its shape is {list(array.shape)}")
    items = prod(array.shape[1:])
    if array.fortran and items > PIECES_MAX:
        raise SourceInvalid(
            f"{where} is in Fortran order, in which a sample's {items} numbers lie all over the file: save it with "
            "numpy.ascontiguousarray(array)"
        )
    return array


def read_header(where: str, stream: BinaryIO) -> StoredArray:
    """Read the header at the stream's position. Raises ``SourceInvalid``, naming ``where``."""
    start = stream.read(npy_format.MAGIC_LEN)
    if not start.startswith(npy_format.MAGIC_PREFIX):
        what = "is empty" if not start else f"begins with {start[:6]!r}"
        raise SourceInvalid(f"{where} is not a .npy file: it {what}; numpy.save writes one")
    stream.seek(-len(start), os.SEEK_CUR)
    try:
        version = npy_format.read_magic(stream)
        if version in _PARSERS:
            with catch_warnings(action="ignore"):  # that Python 2 wrote it
                shape, fortran, dtype = _PARSERS[version](stream)
        else:
            raise SourceInvalid(
                f"{where} is a .npy file of version {version[0]}.{version[1]}, which is for structured arrays"
            )
    except _DAMAGED:
        raise SourceInvalid(f"{where} has a damaged header; copy it again") from None
    if any(type(length) is not int or length < 0 for length in shape):
        raise SourceInvalid(f"{where} has a damaged header: its shape is {shape!r}")
    one_dimension = 1
    check_dtype(where, dtype)
    return StoredArray(stream.tell(), dtype, shape, fortran and len(shape) > one_dimension)
