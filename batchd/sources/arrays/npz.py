"""Arrays in one of numpy's .npz files, which is a zip archive of .npy files: the archive says where each lies. Daemon.

    | local header | x.npy: header, numbers | local header | y.npy: header, numbers | ... | central directory |

Only members that are stored as they are can be read at any place. Each has a checksum (CRC-32) in
the archive; the daemon compares it once, at the scan.

Invariant: all samples lie within members whose checksum was right.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from typing import Any, BinaryIO
from zlib import crc32

from batchd.errors import SourceInvalid
from batchd.samples.columns import Column
from batchd.sources.arrays.index import StoredArray, arrays_index, samples_of
from batchd.sources.arrays.npy import read_array
from batchd.sources.arrays.options import NpzSource, check_names
from batchd.sources.arrays.reader import ArrayReader
from batchd.sources.interface import BuiltInKind
from batchd.storage.access import Storage
from batchd.storage.index import SourceIndex
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


def _array(source: NpzSource, stream: BinaryIO, member: zipfile.ZipInfo) -> StoredArray:
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


def _check(source: NpzSource, stream: BinaryIO, member: zipfile.ZipInfo, end: int, survey: Survey) -> None:
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


def _columns(source: NpzSource, storage: Storage) -> tuple[Column, ...]:
    with _members(source, quick_look(storage)) as (stream, members):
        arrays = {name: _array(source, stream, member) for name, member in members.items()}
    samples_of(arrays)
    return tuple(array.column(name) for name, array in arrays.items())


def _scan(source: NpzSource, survey: Survey) -> SourceIndex:
    """Find the arrays, and compare their checksums. Raises ``SourceInvalid``."""
    arrays: dict[str, StoredArray] = {}
    content: list[Any] = []
    with _members(source, survey) as (stream, members):
        for name, member in members.items():
            array = arrays[name] = _array(source, stream, member)
            _check(source, stream, member, array.first + array.size, survey)
            content.append([name, member.file_size, member.CRC])
    index = arrays_index(arrays, [source.path], [content], survey)
    survey.progress(len(index))
    return index


def _samples(source: NpzSource, storage: Storage) -> int:
    with _members(source, quick_look(storage)) as (stream, members):
        return _array(source, stream, next(iter(members.values()))).shape[0]


KIND = BuiltInKind(
    problems=lambda source, storage: storage.at(source.path).file_problems(source.path, "the archive"),
    columns=_columns,
    scan=_scan,
    open=ArrayReader,
    samples=_samples,
)
