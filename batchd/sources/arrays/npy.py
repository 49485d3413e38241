"""Arrays in numpy's .npy files: their headers say where each sample lies. Daemon.

Invariant: only headers are parsed, by numpy, and nothing of them is run; arrays of objects, which
need pickle, are refused.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from tokenize import TokenError
from typing import Any, BinaryIO
from warnings import catch_warnings

from numpy.lib import format as npy_format

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.arrays.index import StoredArray, arrays_index, check_dtype, checked_array, fingerprint, samples_of
from batchd.sources.arrays.options import NpySource
from batchd.sources.arrays.reader import ArrayReader
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.paths import size_of
from batchd.storage.survey import Survey, quick_look

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


@contextmanager
def _opened(path: Path, survey: Survey) -> Iterator[tuple[BinaryIO, StoredArray]]:
    """A file, open, and the array in it. Raises ``SourceInvalid``."""
    with survey.open(path) as stream:
        array = read_array(str(path), stream)
        size, need = size_of(stream), array.first + array.size
        if size != need:
            what = "is cut" if size < need else "has something behind its array"
            raise SourceInvalid(f"{path} {what}: it has {size} bytes, and its header says {need}")
        yield stream, array


def _columns(source: NpySource, storage: Storage) -> tuple[Column, ...]:
    arrays = {}
    for name, path in source.paths().items():
        with _opened(path, quick_look(storage)) as (_stream, array):
            arrays[name] = array
    samples_of(arrays)
    return tuple(array.column(name) for name, array in arrays.items())


def _scan(source: NpySource, survey: Survey) -> SourceIndex:
    """Read the headers of all files. Raises ``SourceInvalid``."""
    arrays: dict[str, StoredArray] = {}
    contents: list[list[Any]] = []
    for name, path in source.paths().items():
        with _opened(path, survey) as (stream, array):
            arrays[name] = array
            contents.append(fingerprint(stream, array.first + array.size))
    index = arrays_index(arrays, list(source.paths().values()), contents, survey)
    survey.progress(len(index))
    return index


def _problems(source: NpySource, storage: Storage) -> list[str]:
    paths = source.paths().values()
    return [text for path in paths for text in storage.at(path).file_problems(path, "the array")]


def _samples(source: NpySource, storage: Storage) -> int:
    with _opened(next(iter(source.paths().values())), quick_look(storage)) as (_stream, array):
        return array.shape[0]


KIND = BuiltInKind(problems=_problems, columns=_columns, scan=_scan, open=ArrayReader, samples=_samples)
