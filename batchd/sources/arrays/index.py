"""Samples that lie in files at regular distances: where, as a few numbers. Daemon and workers.

    facts    parts    [[samples, run, run, ...], ...]     the samples of a part follow those of the part before it
             run      [file, first, stride, size, pieces, gap]
             fields   [[name, run, offset, dtype, shape, order], ...]
             files    [[bytes, fingerprint], ...]
    place    files    their paths

    run of a part, sample s:   | size |  ... gap ...  | size |  ...      as many pieces
                               ^ first + s * stride   ^ + gap

A run is what is read at once: one array's sample, or a record of several fields. Only the sample of
an array in Fortran order lies in more than one piece. An index has no array with something for each
sample, so it is as small for any number of them.

Only headers of .npy files are parsed, by numpy, and nothing of them is run; arrays of objects, which
need pickle, are refused.

Invariant: the runs of all samples lie within the bytes that the files had when they were scanned.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple
from warnings import catch_warnings

import numpy as np
from numpy.lib import format as npy_format

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.storage.index import SourceIndex
from batchd.storage.survey import Survey
from batchd_wire.fields import ITEM_BYTES

PROBES = 64
PROBE_BYTES = 1 << 20
"""A file of as many blocks, or a shorter one, is read whole."""
PIECES_MAX = 4096
"""Pieces that the sample of an array in Fortran order may lie in: each is a read of its own."""


_DAMAGED = (
    ValueError,
    TypeError,
    KeyError,
    SyntaxError,
    TokenError,
    OverflowError,
    MemoryError,
    RecursionError,
    StructError,
)
"""What numpy's parser raises for a header that is none."""
_PARSERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


class Run(NamedTuple):
    """Bytes that are read at once, for each sample of a part; see above."""

    file: int
    first: int
    stride: int
    size: int
    pieces: int = 1
    gap: int = 0


class ArrayField(NamedTuple):
    """A field, and where it begins in the bytes of its run. ``dtype`` is numpy's name, with the order of bytes in front."""

    name: str
    run: int
    offset: int
    dtype: str
    shape: Sequence[int]
    order: str = "C"


class SampleRuns(NamedTuple):
    """Samples that follow each other."""

    samples: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file: ``first`` is its first byte, ``shape`` is with the dimension that counts the samples."""

    first: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.dtype.itemsize * prod(self.shape)

    def run(self, file: int) -> Run:
        """Where its samples lie."""
        item, samples, items = self.dtype.itemsize, self.shape[0], prod(self.shape[1:])
        if self.fortran:
            return Run(file, self.first, item, item, items, item * samples)
        return Run(file, self.first, item * items, item * items)

    def field(self, name: str, run: int) -> ArrayField:
        """How a sample of it is read."""
        return ArrayField(name, run, 0, self.dtype.str, self.shape[1:], "F" if self.fortran else "C")

    def column(self, name: str) -> Column:
        """What a sample of it is."""
        return Column(name, dtype=self.dtype.newbyteorder("=").name, shape=self.shape[1:])


def check_dtype(where: str, dtype: "np.dtype[Any]") -> None:
    """Raise ``SourceInvalid`` for what a batch cannot hold; ``where`` is its file, or its place in one."""
    if dtype.fields is not None:
        raise SourceInvalid(
            f"{where} is a structured array ({', '.join(dtype.names or ())}); save each field by itself"
        )
    if dtype.hasobject:
        raise SourceInvalid(f"{where} holds Python objects, which are never loaded; save numbers")
    if dtype.newbyteorder("=").name not in ITEM_BYTES or dtype.subdtype is not None:
        raise SourceInvalid(f"{where} is of the type {dtype}, and a batch can hold {', '.join(ITEM_BYTES)}")


def checked_array(where: str, array: StoredArray) -> StoredArray:
    """An array, if samples can be read from it. Raises ``SourceInvalid``; ``where`` is its file, or its place there."""
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


def read_array(where: str, stream: BinaryIO) -> StoredArray:
    """The array of samples whose header begins where the stream stands. Raises ``SourceInvalid``, naming ``where``."""
    return checked_array(where, read_header(where, stream))


def read_header(where: str, stream: BinaryIO) -> StoredArray:
    """The array of numbers whose header begins where the stream stands. Raises ``SourceInvalid``, naming ``where``."""
    start = stream.read(npy_format.MAGIC_LEN)
    if not start.startswith(npy_format.MAGIC_PREFIX):
        what = "is empty" if not start else f"begins with {start[:6]!r}"
        raise SourceInvalid(f"{where} is no .npy file: it {what}; numpy.save writes one")
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


def samples_of(arrays: Mapping[str, StoredArray]) -> int:
    """How many samples arrays have. Raises ``SourceInvalid`` where their lengths differ."""
    lengths = {array.shape[0] for array in arrays.values()}
    if len(lengths) > 1:
        texts = ", ".join(f"{name} has {array.shape[0]}" for name, array in arrays.items())
        raise SourceInvalid(f"the arrays have not as many samples each: {texts}")
    return lengths.pop()


def arrays_index(
    arrays: Mapping[str, StoredArray], files: Sequence[Path], contents: Sequence[list[Any]], survey: Survey
) -> SourceIndex:
    """The index of arrays that are as many files, or lie in one file. Raises ``SourceInvalid`` where their lengths differ."""
    samples = samples_of(arrays)
    runs = tuple(array.run(min(number, len(files) - 1)) for number, array in enumerate(arrays.values()))
    fields = [array.field(name, number) for number, (name, array) in enumerate(arrays.items())]
    return build_index([SampleRuns(samples, runs)], fields, files, contents, survey)


def build_index(
    parts: Sequence[SampleRuns],
    fields: Sequence[ArrayField],
    files: Sequence[Path],
    contents: Sequence[list[Any]],
    survey: Survey,
) -> SourceIndex:
    """The index of samples that lie so. ``contents``: what tells each file from another of its length."""
    facts = {
        "parts": [[part.samples, *map(list, part.runs)] for part in parts],
        "fields": [list(field._replace(shape=list(field.shape))) for field in fields],
        "files": list(contents),
    }
    place = {"files": [str(path.absolute()) for path in files], **survey.place()}
    return SourceIndex.build(sum(part.samples for part in parts), facts, {}, place)


def fingerprint(stream: BinaryIO, size: int) -> list[Any]:
    """What tells a file from others of its length without reading all of it: a digest of its ends and of blocks between them."""
    digest = sha256()
    count = min(PROBES, -(-size // PROBE_BYTES))
    last = size - PROBE_BYTES
    for number in range(count):
        stream.seek(number * PROBE_BYTES if size <= PROBES * PROBE_BYTES else last * number // (count - 1))
        digest.update(stream.read(PROBE_BYTES))
    return [size, digest.hexdigest()]
