"""Find windows and documents in files of tokens. Daemon.

    flat        a.bin   | offset | token | token | ...            little-endian
    megatron    a.bin   | token | token | ...
                a.idx   | magic, 9 bytes | version, 8 | dtype, 1 | sequences n, 8 | documents d, 8 |
                        | length of each sequence, int32 [n] |
                        | its first byte in a.bin, int64 [n] |
                        | first sequence of each document, and n, int64 [d] |

A window is found by arithmetic, so the index of windows has a few numbers for each file, and is
that of arrays (``arrays.index``). The index of documents has the first byte of each, as that of
records (``data.sources.records``). All numbers of an index file are read once, 20 bytes for a
document of one sequence.

Invariant: sequences and documents fill their file, in order and without gaps; another index is
refused with the place.
"""

from array import array
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchd.data.sources.arrays.index import Run
from batchd.data.sources.arrays.scan import find_parts, index_of_parts, neighbours_of_parts
from batchd.data.sources.files.walk import files_of, files_problems, known_size
from batchd.data.sources.finding import FilePattern, find_in_records
from batchd.data.sources.interface import BuiltInKind
from batchd.data.sources.neighbours import Neighbours, in_records
from batchd.data.sources.tokens.options import TokensSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, number_array
from batchd.data.storage.paths import size_of
from batchd.data.storage.survey import Survey
from batchd.data.storage.values import fingerprint
from batchd.errors import SourceInvalid
from batchd_wire.fields import ITEM_BYTES
from batchd_wire.views import Array
from batchd_wire.wording import counted

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEADER = Struct("<9sQBQQ")
assert HEADER.size == 34  # noqa: PLR2004  as drawn above
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""The types of tokens by their numbers in an index file."""
BLOCK_BYTES = 4 << 20


class TokenFile(NamedTuple):
    """A file of tokens: its path, bytes, fingerprint, and the first byte of each document."""

    path: Path
    size: int
    digest: str
    documents: NDArray[np.int64] | None
    """int64 ``[documents]``, without those that have no token; None if the file is flat."""


def index_file(path: Path) -> Path:
    """The index of a Megatron file."""
    return path.with_suffix(".idx")


def _token_files(source: TokensSource, survey: Survey) -> Iterator[TokenFile]:
    """The files, with the documents of their indexes. Raises ``SourceInvalid``."""
    for path in files_of(source, survey):
        with survey.open(path) as stream:
            size = size_of(stream)
            _tokens_in(source, path, size)
            _size, digest = fingerprint(stream, size)
        documents = None
        if source.format == "megatron":
            with survey.open(index_file(path)) as stream:
                documents = _documents(source, path, size, stream, survey)
        yield TokenFile(path, size, digest, documents)


def _scan(source: TokensSource, survey: Survey) -> SourceIndex:
    return _scan_documents(source, survey) if source.length is None else _scan_windows(source, survey, source.length)


def _scan_windows(source: TokensSource, survey: Survey, length: int) -> SourceIndex:
    item, step = ITEM_BYTES[source.dtype], length - source.overlap
    parts: list[tuple[int, Run]] = []
    files: list[Path] = []
    contents = []
    for number, file in enumerate(_token_files(source, survey)):
        count = _windows_in(source, file.path, file.size)
        parts.append((count, Run(number, source.offset, step * item, length * item)))
        files.append(file.path)
        contents.append([file.size, file.digest])
        survey.progress(sum(samples for samples, _run in parts))
    dtype = np.dtype(source.dtype).newbyteorder("<").str
    return index_of_parts(parts, [[source.field, 0, 0, dtype, [length], "C"]], files, contents, survey)


def _scan_documents(source: TokensSource, survey: Survey) -> SourceIndex:
    starts: array[int] = array("q")
    files: list[str] = []
    contents = []
    for file in _token_files(source, survey):
        assert file.documents is not None, "flat files have windows"
        if not len(file.documents):
            raise SourceInvalid(f"{index_file(file.path)} has no document with a token; leave the file out")
        starts.frombytes(file.documents.tobytes())
        files.append(str(file.path))
        contents.append([len(file.documents), file.size, file.digest])
        survey.progress(len(starts))
    facts = {"files": contents, "field": source.field, "dtype": source.dtype}
    return SourceIndex.build(len(starts), facts, {"starts": number_array(starts)}, {"files": files, **survey.place()})


def _tokens_in(source: TokensSource, path: Path, size: int) -> int:
    """The number of tokens in a file of ``size`` bytes. Raises ``SourceInvalid`` for a rest."""
    count, rest = divmod(size - source.offset, ITEM_BYTES[source.dtype])
    if count <= 0 or rest:
        what = "hold no token" if count <= 0 else f"are no whole number of {source.dtype}"
        behind = f" behind the first {source.offset}" if source.offset else ""
        raise SourceInvalid(f"{path}: {size} bytes{behind} {what}; is its dtype another one, or the file cut?")
    return count


def _windows_in(source: TokensSource, path: Path, size: int) -> int:
    """The number of windows in a file. Raises ``SourceInvalid`` if there is none."""
    tokens, length = _tokens_in(source, path, size), source.length or 1
    if tokens < length:
        raise SourceInvalid(f"{path} has {counted(tokens, 'token')}, and a sample has length = {length}; leave it out")
    return (tokens - source.overlap) // (length - source.overlap)


def _documents(source: TokensSource, path: Path, size: int, stream: BinaryIO, survey: Survey) -> NDArray[np.int64]:
    """The first byte of each document with a token, int64 ``[documents]``.

    ``stream``: the index of the file at ``path``, which has ``size`` bytes. Raises
    ``SourceInvalid`` unless the index is one of this file.
    """
    where, item = index_file(path), ITEM_BYTES[source.dtype]
    sequences, documents = _counts(source, where, stream)
    lengths = _numbers(where, stream, np.dtype("<i4"), sequences, survey)
    pointers = _numbers(where, stream, np.dtype("<i8"), sequences, survey)
    firsts = _numbers(where, stream, np.dtype("<i8"), documents, survey)
    edges = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=edges[1:])
    edges *= item
    wrong = np.flatnonzero((pointers != edges[:-1]) | (lengths < 0))
    if len(wrong):
        first = int(wrong[0])
        raise SourceInvalid(
            f"{where} is damaged: sequence {first} has {lengths[first]} tokens from byte {pointers[first]} on, and those "
            f"before it end at byte {edges[first]}"
        )
    if edges[-1] != size:
        raise SourceInvalid(
            f"{path} has {size} bytes, and the sequences in {where.name} have {edges[-1]}; copy both again"
        )
    is_within = documents > 0 and firsts.min() == firsts[0] == 0 and firsts.max() == firsts[-1] == sequences
    if not is_within or (np.diff(firsts) < 0).any():
        raise SourceInvalid(f"{where} is damaged: its documents do not go from sequence 0 to {sequences} in order")
    borders = edges[firsts]
    found: NDArray[np.int64] = borders[:-1][np.diff(borders) > 0]
    return found


def _counts(source: TokensSource, where: Path, stream: BinaryIO) -> tuple[int, int]:
    """The numbers of sequences and documents in an index's header. Raises ``SourceInvalid``."""
    size = size_of(stream)
    data = stream.read(HEADER.size)
    if not data.startswith(MAGIC) or len(data) < HEADER.size:
        what = "is empty" if not data else f"begins with {data[:9]!r}"
        raise SourceInvalid(f"{where} is no index of Megatron: it {what} instead of {MAGIC!r}")
    _magic, version, code, sequences, documents = HEADER.unpack(data)
    if version != VERSION:
        raise SourceInvalid(f"{where} is an index of version {version}, and batchd reads version {VERSION}")
    dtype = DTYPES.get(code, f"number {code}, which is unknown")
    if dtype != source.dtype:
        raise SourceInvalid(f"{where} says that a token is {dtype}, and dtype = {source.dtype!r}")
    need = HEADER.size + 12 * sequences + 8 * documents
    if size == need + sequences and sequences:
        raise SourceInvalid(f"{where} has modes of sequences, of several modalities, which batchd does not read")
    if size != need:
        raise SourceInvalid(f"{where} is cut or damaged: it has {size} bytes, and its counts need {need}")
    return sequences, documents


def _numbers(where: Path, stream: BinaryIO, dtype: np.dtype[np.generic], count: int, survey: Survey) -> Array:
    """The next numbers of an index. Raises ``SourceInvalid`` if the file ends before."""
    data, size = bytearray(), count * dtype.itemsize
    while len(data) < size:
        survey.looked()
        block = stream.read(min(BLOCK_BYTES, size - len(data)))
        if not block:
            raise SourceInvalid(f"{where} was cut while it was read; copy it again")
        data += block
    return np.frombuffer(data, dtype)


def _problems(source: TokensSource, storage: Storage) -> list[str]:
    problems = files_problems(source, "the file of tokens", storage)
    if not problems and source.path is not None:
        if source.format == "megatron":
            return storage.at(source.path).file_problems(index_file(source.path), "the index")
        if (size := known_size(source, storage)) is not None:
            _windows_in(source, source.path, size)
    return problems


def _samples(source: TokensSource, storage: Storage) -> int | None:
    size = known_size(source, storage)
    if source.path is None or source.length is None or size is None:
        return None
    return _windows_in(source, source.path, size)


def _neighbours(source: TokensSource, index: SourceIndex) -> Neighbours:
    return in_records(index) if source.length is None else neighbours_of_parts(source, index)


def _find(source: TokensSource, index: SourceIndex, pattern: FilePattern) -> NDArray[np.int64]:
    return find_in_records(pattern, index) if source.length is None else find_parts(source, index, pattern)


def _lengths(source: TokensSource, index: SourceIndex, _field: str) -> NDArray[np.int64]:
    if source.length is not None:
        return np.full(len(index), source.length, np.int64)
    starts = index.arrays["starts"]
    documents, sizes, _digests = zip(*index.facts["files"], strict=True)
    ends = np.append(starts[1:], 0)
    ends[np.cumsum(documents) - 1] = sizes
    lengths: NDArray[np.int64] = (ends - starts) // ITEM_BYTES[source.dtype]
    return lengths


KINDS = {
    TokensSource: BuiltInKind(
        problems=_problems, scan=_scan, samples=_samples, neighbours=_neighbours, lengths=_lengths, find=_find
    )
}
