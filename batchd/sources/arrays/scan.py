"""Arrays in numpy's files, and files of records that are all alike, become an index. Daemon.

    .npy    | header | sample 0 | sample 1 | ... |                          the size that the header says, to the byte
    .npz    | local header | x.npy | local header | y.npy | ... | central directory |     a zip archive of .npy files
    raw     | offset bytes | label, image | label, image | ... |            size = offset + samples * record

Only members of an archive that are stored as they are can be read at any place. Each has a checksum
(CRC-32) in the archive; the daemon compares it once, at the scan.

Invariant: all samples lie within members whose checksum was right, and within whole records: a wrong
record or offset is found before it does harm.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.arrays.index import (
    ArrayField,
    Run,
    SampleRuns,
    StoredArray,
    arrays_index,
    build_index,
    fingerprint,
    read_array,
    samples_of,
)
from batchd.sources.arrays.options import NpySource, NpzSource, RawSource, check_names
from batchd.sources.files.walk import files_of, files_problems
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
from batchd.storage.paths import size_of
from batchd.storage.survey import Survey, quick_look
from batchd.suggestions import suggestion

BLOCK_BYTES = 1 << 20
_SUFFIX = ".npy"
_LOCAL_HEADER_BYTES = 30
_LOCAL_MAGIC = b"PK\x03\x04"
_LENGTHS_BYTE = 26
_ENCRYPTED = 1
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, StructError, EOFError, RuntimeError)
"""What the standard library raises for an archive that is none."""


@contextmanager
def _opened_npy(path: Path, survey: Survey) -> Iterator[tuple[BinaryIO, StoredArray]]:
    """A file, open, and the array in it. Raises ``SourceInvalid``."""
    with survey.open(path) as stream:
        array = read_array(str(path), stream)
        size, need = size_of(stream), array.first + array.size
        if size != need:
            what = "is cut" if size < need else "has something behind its array"
            raise SourceInvalid(f"{path} {what}: it has {size} bytes, and its header says {need}")
        yield stream, array


def _npy_columns(source: NpySource, storage: Storage) -> tuple[Column, ...]:
    arrays = {}
    for name, path in source.paths().items():
        with _opened_npy(path, quick_look(storage)) as (_stream, array):
            arrays[name] = array
    samples_of(arrays)
    return tuple(array.column(name) for name, array in arrays.items())


def _npy_scan(source: NpySource, survey: Survey) -> SourceIndex:
    """Read the headers of all files. Raises ``SourceInvalid``."""
    arrays: dict[str, StoredArray] = {}
    contents: list[list[Any]] = []
    for name, path in source.paths().items():
        with _opened_npy(path, survey) as (stream, array):
            arrays[name] = array
            contents.append(fingerprint(stream, array.first + array.size))
    index = arrays_index(arrays, list(source.paths().values()), contents, survey)
    survey.progress(len(index))
    return index


def _npy_problems(source: NpySource, storage: Storage) -> list[str]:
    paths = source.paths().values()
    return [text for path in paths for text in storage.at(path).file_problems(path, "the array")]


def _npy_samples(source: NpySource, storage: Storage) -> int:
    with _opened_npy(next(iter(source.paths().values())), quick_look(storage)) as (_stream, array):
        return array.shape[0]


@contextmanager
def _members(source: NpzSource, survey: Survey) -> Iterator[tuple[BinaryIO, dict[str, zipfile.ZipInfo]]]:
    """The open archive, and the member of each field."""
    with survey.open(source.path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                found = archive.infolist()
        except _DAMAGED as error:
            raise SourceInvalid(f"{source.path} is no .npz file, or is cut or damaged: {error}") from None
        members = {member.filename.removesuffix(_SUFFIX): member for member in found}
        if len(members) != len(found):
            raise SourceInvalid(f"{source.path} holds two arrays of the same name")
        if not members:
            raise SourceInvalid(f"{source.path} holds no array")
        yield stream, _chosen(source, members)


def _chosen(source: NpzSource, members: dict[str, zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    if not source.arrays:
        try:
            check_names(members)
        except ValueError as error:
            raise SourceInvalid(
                f'{source.path}: {error}; arrays = {{ NAME = "ITS NAME IN THE FILE" }} renames it'
            ) from None
        return members
    for name in source.arrays.values():
        if name not in members:
            raise SourceInvalid(f"{source.path} has no array {name!r}; {suggestion(name, list(members))}")
    return {field: members[name] for field, name in source.arrays.items()}


def _member_array(source: NpzSource, stream: BinaryIO, member: zipfile.ZipInfo) -> StoredArray:
    """The array that a member is. Raises ``SourceInvalid``."""
    where = f"{source.path}: {member.filename}"
    if member.compress_type != zipfile.ZIP_STORED:
        raise SourceInvalid(
            f"{where} is compressed, so its samples cannot be read one by one; save the arrays with numpy.savez instead of "
            "numpy.savez_compressed"
        )
    if member.flag_bits & _ENCRYPTED:
        raise SourceInvalid(f"{where} is encrypted")
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(_LOCAL_MAGIC):
        raise SourceInvalid(
            f"{where} does not begin at byte {member.header_offset}, where the archive says; copy it again"
        )
    lengths = header[_LENGTHS_BYTE:_LOCAL_HEADER_BYTES]
    first = (
        member.header_offset
        + _LOCAL_HEADER_BYTES
        + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    )
    stream.seek(first)
    array = read_array(where, stream)
    need = array.first - first + array.size
    if need != member.file_size:
        raise SourceInvalid(f"{where} has {member.file_size} bytes, and its header says {need}")
    return array


def _check_member(source: NpzSource, stream: BinaryIO, member: zipfile.ZipInfo, end: int, survey: Survey) -> None:
    """Compare the checksum of a member that ends at byte ``end``. Raises ``SourceInvalid``."""
    checksum, left = 0, member.file_size
    stream.seek(end - left)
    while left and (block := stream.read(min(BLOCK_BYTES, left))):
        survey.looked()
        checksum = crc32(block, checksum)
        left -= len(block)
    if left:
        raise SourceInvalid(f"{source.path} is cut: {member.filename} lacks its last {left} bytes")
    if checksum != member.CRC:
        raise SourceInvalid(
            f"{source.path}: {member.filename} is damaged: its checksum is {checksum:08x} instead of {member.CRC:08x}"
        )


def _npz_columns(source: NpzSource, storage: Storage) -> tuple[Column, ...]:
    with _members(source, quick_look(storage)) as (stream, members):
        arrays = {name: _member_array(source, stream, member) for name, member in members.items()}
    samples_of(arrays)
    return tuple(array.column(name) for name, array in arrays.items())


def _npz_scan(source: NpzSource, survey: Survey) -> SourceIndex:
    """Find the arrays, and compare their checksums. Raises ``SourceInvalid``."""
    arrays: dict[str, StoredArray] = {}
    content: list[Any] = []
    with _members(source, survey) as (stream, members):
        for name, member in members.items():
            array = arrays[name] = _member_array(source, stream, member)
            _check_member(source, stream, member, array.first + array.size, survey)
            content.append([name, member.file_size, member.CRC])
    index = arrays_index(arrays, [source.path], [content], survey)
    survey.progress(len(index))
    return index


def _npz_samples(source: NpzSource, storage: Storage) -> int:
    with _members(source, quick_look(storage)) as (stream, members):
        return _member_array(source, stream, next(iter(members.values()))).shape[0]


def _raw_scan(source: RawSource, survey: Survey) -> SourceIndex:
    """Count the records of all files. Raises ``SourceInvalid``."""
    parts, contents, samples = [], [], 0
    files = files_of(source, survey)
    for number, path in enumerate(files):
        with survey.open(path) as stream:
            size = size_of(stream)
            count = _raw_records(source, path, size)
            contents.append(fingerprint(stream, size))
        parts.append(SampleRuns(count, (Run(number, source.offset, source.record_bytes, source.record_bytes),)))
        samples += count
        survey.progress(samples)
    return build_index(parts, _raw_fields(source), files, contents, survey)


def _raw_records(source: RawSource, path: Path, size: int) -> int:
    """How many records a file of so many bytes holds. Raises ``SourceInvalid`` where they are not whole ones."""
    count, rest = divmod(size - source.offset, source.record_bytes)
    if count <= 0:
        raise SourceInvalid(
            f"{path}: {size} bytes hold no record of {source.record_bytes} bytes behind the first {source.offset}"
        )
    if rest:
        raise SourceInvalid(
            f"{path}: {size} bytes are not {source.offset} and whole records of {source.record_bytes} bytes each; "
            f"{rest} are left"
        )
    return count


def _raw_fields(source: RawSource) -> list[ArrayField]:
    fields, offset = [], 0
    for column in source.parsed_record():
        dtype = np.dtype(column.dtype).newbyteorder("<" if source.byte_order == "little" else ">")
        fields.append(ArrayField(column.name, 0, offset, dtype.str, column.fixed_shape))
        offset += dtype.itemsize * prod(column.fixed_shape)
    return fields


def _raw_problems(source: RawSource, storage: Storage) -> list[str]:
    problems = files_problems(source.path, source.root, source.files, "the file", storage)
    if not problems and source.path is not None:
        size = storage.at(source.path).known_size(source.path)
        if size is not None:
            _raw_records(source, source.path, size)
    return problems


def _raw_samples(source: RawSource, storage: Storage) -> int | None:
    """Of one file of this machine; several would have to be looked for."""
    size = None if source.path is None else storage.at(source.path).known_size(source.path)
    return None if size is None else (size - source.offset) // source.record_bytes


KINDS = {
    NpySource: BuiltInKind(problems=_npy_problems, columns=_npy_columns, scan=_npy_scan, samples=_npy_samples),
    NpzSource: BuiltInKind(
        problems=lambda source, storage: storage.at(source.path).file_problems(source.path, "the archive"),
        columns=_npz_columns,
        scan=_npz_scan,
        samples=_npz_samples,
    ),
    RawSource: BuiltInKind(
        problems=_raw_problems,
        columns=lambda source, _storage: source.parsed_record(),
        scan=_raw_scan,
        samples=_raw_samples,
    ),
}
