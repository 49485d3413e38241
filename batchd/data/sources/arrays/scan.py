"""Find the samples of numpy's files, and of files of records that are all alike. Daemon.

    .npy    | header | sample 0 | sample 1 | ... |                  as long as the header says
    .npz    | local header | x.npy | ... | central directory |      a zip archive of .npy files
    raw     | offset bytes | label, image | label, image | ... |    size = offset + samples * record

Only members of an archive that are stored uncompressed can be read at any place. The scan compares
the checksum (CRC-32) of each.

Invariant: all samples are in members whose checksum was right, and in files of whole records, so a
wrong record type or offset is found before it does harm.
"""

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812  the standard library's name is lower case
from typing import BinaryIO
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column, check_field_names
from batchd.data.sources.arrays.index import Run, StoredArray, read_array
from batchd.data.sources.arrays.options import NpySource, NpzSource, RawSource
from batchd.data.sources.files.walk import files_of, files_problems, known_size
from batchd.data.sources.finding import FilePattern
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import Neighbours, in_files
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.paths import behind_the_end, size_of
from batchd.data.storage.survey import Survey, quick_look
from batchd.data.storage.values import fingerprint
from batchd.errors import SourceInvalid
from batchd.runtime.suggestions import suggestion

BLOCK_BYTES = 1 << 20
_SUFFIX = ".npy"
_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = Struct("<26xHH")
"""The lengths of a member's name and of its extra field, which are behind the header."""
_ENCRYPTED = 1
_END_MAGIC, _END_BYTES = b"PK\x05\x06", 22
_END_BYTES_MAX = _END_BYTES + (1 << 16) - 1
"""The record at the end of an archive, with its comment."""
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, StructError, EOFError, RuntimeError)
"""Errors of the standard library for a damaged archive."""


def _samples_of(arrays: Mapping[str, StoredArray]) -> int:
    """The number of samples of arrays. Raises ``SourceInvalid`` if their lengths differ."""
    lengths = {array.shape[0] for array in arrays.values()}
    if len(lengths) > 1:
        texts = ", ".join(f"{name} has {array.shape[0]}" for name, array in arrays.items())
        raise SourceInvalid(f"the arrays have not as many samples each: {texts}")
    return lengths.pop()


def _columns_of(arrays: Mapping[str, StoredArray]) -> tuple[Column, ...]:
    _samples_of(arrays)
    return tuple(
        Column(name, dtype=array.dtype.newbyteorder("=").name, shape=array.shape[1:]) for name, array in arrays.items()
    )


def _arrays_index(
    arrays: Mapping[str, StoredArray], files: Sequence[Path], contents: Sequence[object], survey: Survey
) -> SourceIndex:
    """The index of arrays, each in its own file or all in one. Raises as ``_samples_of`` does."""
    samples, runs, fields = _samples_of(arrays), [], []
    for number, (name, array) in enumerate(arrays.items()):
        item, items = array.dtype.itemsize, prod(array.shape[1:])
        file = min(number, len(files) - 1)
        if array.fortran:
            runs.append(Run(file, array.first, item, item, items, item * samples))
        else:
            runs.append(Run(file, array.first, item * items, item * items))
        order = "F" if array.fortran else "C"
        fields.append([name, number, 0, array.dtype.str, list(array.shape[1:]), order])
    survey.progress(samples)
    return index_of_parts([(samples, *runs)], fields, files, contents, survey)


def index_of_parts(
    parts: Sequence[tuple[int, *tuple[Run, ...]]],
    fields: Sequence[object],
    files: Sequence[Path],
    contents: Sequence[object],
    survey: Survey,
) -> SourceIndex:
    """The index of such parts: samples and their runs. ``contents``: the digests of the files."""
    facts = {"parts": [[samples, *map(list, runs)] for samples, *runs in parts], "fields": fields, "files": contents}
    place = {"files": [str(path.absolute()) for path in files], **survey.place()}
    return SourceIndex.build(sum(part[0] for part in parts), facts, {}, place)


def _npy_opened(source: NpySource, survey: Survey) -> Iterator[tuple[str, StoredArray, BinaryIO]]:
    """Each field, its array, and the file, open. Raises ``SourceInvalid``."""
    for name, path in source.paths().items():
        with survey.open(path) as stream:
            array = read_array(str(path), stream)
            array.check_end(str(path), size_of(stream))
            yield name, array, stream


def npy_arrays(source: NpySource, storage: Storage) -> dict[str, StoredArray]:
    """The arrays of a source by their fields; reads headers. Raises ``SourceInvalid``."""
    return {name: array for name, array, _stream in _npy_opened(source, quick_look(storage))}


def _npy_scan(source: NpySource, survey: Survey) -> SourceIndex:
    arrays: dict[str, StoredArray] = {}
    contents: list[object] = []
    for name, array, stream in _npy_opened(source, survey):
        arrays[name] = array
        contents.append(list(fingerprint(stream, array.first + array.size)))  # as JSON has it
    return _arrays_index(arrays, list(source.paths().values()), contents, survey)


def _npy_problems(source: NpySource, storage: Storage) -> list[str]:
    paths = source.paths().values()
    return [text for path in paths for text in storage.at(path).file_problems(path, "the array")]


def _npz_opened(source: NpzSource, survey: Survey) -> Iterator[tuple[str, StoredArray, BinaryIO, zipfile.ZipInfo]]:
    """Each field, its array, the archive, open, and the member. Raises ``SourceInvalid``."""
    with survey.open(source.path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                found = archive.infolist()
            problem = _bytes_around(stream, found)
        except _DAMAGED as error:
            raise SourceInvalid(f"{source.path} is not a .npz file, or is cut or damaged: {error}") from None
        if problem:
            raise SourceInvalid(f"{source.path} {problem}; write it again with numpy.savez")
        members = {member.filename.removesuffix(_SUFFIX): member for member in found}
        if len(members) != len(found):
            raise SourceInvalid(f"{source.path} holds two arrays of the same name")
        if not members:
            raise SourceInvalid(f"{source.path} holds no array")
        if not source.arrays:
            try:
                check_field_names(*members)
            except ValueError as error:
                raise SourceInvalid(
                    f'{source.path}: {error}; arrays = {{ NAME = "ITS NAME IN THE FILE" }} renames it'
                ) from None
        for name in source.arrays.values():
            if name not in members:
                raise SourceInvalid(f"{source.path} has no array {name!r}; {suggestion(name, list(members))}")
        for field, name in (source.arrays or {name: name for name in members}).items():
            yield field, _member_array(source, stream, members[name]), stream, members[name]


def _bytes_around(stream: BinaryIO, members: Sequence[zipfile.ZipInfo]) -> str:
    """What is wrong with the bytes around an archive, such as another one; "" if there are none."""
    size = size_of(stream)
    before = max(0, size - _END_BYTES_MAX)
    stream.seek(before)
    tail = stream.read(_END_BYTES_MAX)
    end = tail.rfind(_END_MAGIC)
    comment = int.from_bytes(tail[end + _END_BYTES - 2 : end + _END_BYTES], "little")
    if problem := behind_the_end(stream, min(size, before + end + _END_BYTES + comment)):
        return problem
    first = min((member.header_offset for member in members), default=0)
    return f"has {first} bytes in front of its first array, which no sample would have" if first else ""


def _member_array(source: NpzSource, stream: BinaryIO, member: zipfile.ZipInfo) -> StoredArray:
    where = f"{source.path}: {member.filename}"
    if member.compress_type != zipfile.ZIP_STORED:
        raise SourceInvalid(
            f"{where} is compressed, so its samples cannot be read one by one; save the arrays with numpy.savez instead of "
            "numpy.savez_compressed"
        )
    if member.flag_bits & _ENCRYPTED:
        raise SourceInvalid(f"{where} is encrypted")
    stream.seek(member.header_offset)
    header = stream.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MAGIC):
        raise SourceInvalid(
            f"{where} does not begin at byte {member.header_offset}, where the archive says; copy it again"
        )
    first = member.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
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


def npz_arrays(source: NpzSource, storage: Storage) -> dict[str, StoredArray]:
    """As ``npy_arrays``, of an archive."""
    return {name: array for name, array, _stream, _member in _npz_opened(source, quick_look(storage))}


def _npz_scan(source: NpzSource, survey: Survey) -> SourceIndex:
    """Find the arrays, and compare their checksums. Raises ``SourceInvalid``."""
    arrays: dict[str, StoredArray] = {}
    content: list[object] = []
    for name, array, stream, member in _npz_opened(source, survey):
        arrays[name] = array
        _check_member(source, stream, member, array.first + array.size, survey)
        content.append([name, member.file_size, member.CRC])
    return _arrays_index(arrays, [source.path], [content], survey)


def _raw_scan(source: RawSource, survey: Survey) -> SourceIndex:
    parts: list[tuple[int, Run]] = []
    contents, samples, files = [], 0, files_of(source, survey)
    for number, path in enumerate(files):
        with survey.open(path) as stream:
            size = size_of(stream)
            count = _raw_records(source, path, size)
            contents.append(list(fingerprint(stream, size)))
        parts.append((count, Run(number, source.offset, source.record_bytes, source.record_bytes)))
        samples += count
        survey.progress(samples)
    fields, offset = [], 0
    for column in source.columns:
        dtype = np.dtype(column.dtype).newbyteorder("<" if source.byte_order == "little" else ">")
        fields.append([column.name, 0, offset, dtype.str, list(column.fixed_shape), "C"])
        offset += dtype.itemsize * prod(column.fixed_shape)
    return index_of_parts(parts, fields, files, contents, survey)


def _raw_records(source: RawSource, path: Path, size: int) -> int:
    """The number of records in a file of ``size`` bytes. Raises ``SourceInvalid`` for a rest."""
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


def _raw_problems(source: RawSource, storage: Storage) -> list[str]:
    problems = files_problems(source, "the file", storage)
    if not problems and source.path is not None and (size := known_size(source, storage)) is not None:
        _raw_records(source, source.path, size)
    return problems


def _raw_samples(source: RawSource, storage: Storage) -> int | None:
    size = known_size(source, storage)
    return None if size is None else (size - source.offset) // source.record_bytes


def neighbours_of_parts(_source: object, index: SourceIndex) -> Neighbours:
    """Neighbours are samples of one part, and all of them have the same size."""
    parts = index.facts["parts"]
    firsts = np.cumsum([0, *(samples for samples, *_runs in parts)])[:-1]
    sizes = [sum(Run(*run).size * Run(*run).pieces for run in runs) for _samples, *runs in parts]
    return in_files(firsts, len(index), sample_bytes=np.array(sizes, np.float64))


def find_parts(_source: object, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    """The samples that have a run in a file that matches."""
    files = [pattern.matches(os.fsencode(path)) for path in index.place["files"]]
    found, first = [np.zeros(0, np.int64)], 0
    for samples, *runs in index.facts["parts"]:
        if any(files[Run(*run).file] for run in runs):
            found.append(pattern.chosen(first, first + samples))
        first += samples
    return np.concatenate(found)


KINDS = {
    NpySource: BuiltInKind(
        problems=_npy_problems,
        columns=lambda source, storage: _columns_of(npy_arrays(source, storage)),
        scan=_npy_scan,
        neighbours=neighbours_of_parts,
        find=find_parts,
        samples=lambda source, storage: _samples_of(npy_arrays(source, storage)),
    ),
    NpzSource: BuiltInKind(
        problems=lambda source, storage: storage.at(source.path).file_problems(source.path, "the archive"),
        columns=lambda source, storage: _columns_of(npz_arrays(source, storage)),
        scan=_npz_scan,
        neighbours=neighbours_of_parts,
        find=find_parts,
        samples=lambda source, storage: _samples_of(npz_arrays(source, storage)),
    ),
    RawSource: BuiltInKind(
        problems=_raw_problems,
        scan=_raw_scan,
        neighbours=neighbours_of_parts,
        find=find_parts,
        samples=_raw_samples,
    ),
}
