"""Some of the samples of a source. Daemon and workers.

numbers   int64 [n]   the numbers within the source
"""

import math
from array import array
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.sources.arrays.npy import read_array
from batchd.sources.composed.options import NUMBER_MAX, SubsetSource, share_of
from batchd.sources.composed.parts import ComposedReader, PartReaders, join, places_in, scan_parts
from batchd.sources.csv.values import BYTE_ORDER_MARK
from batchd.sources.interface import BuiltInKind, kind_of
from batchd.sources.options import SourceOptions
from batchd.storage.access import Storage
from batchd.storage.index import NUMBER, SourceIndex, readable
from batchd.storage.survey import Survey, quick_look
from batchd_wire.wording import counted

INDICES_BYTES_MAX = 8 << 30
CHECKED_BYTES_MAX = 64 << 20
"""``batchd check`` reads a file of indices up to this size, which takes a second or two; the daemon reads any."""
DIGITS_MAX = 18
_NPY = b"\x93NUMPY"
_MIX_1, _MIX_2, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
"""The constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""


def _scan(source: SubsetSource, survey: Survey) -> SourceIndex:
    (part,) = scan_parts([source.of], survey)
    if source.indices is not None:
        numbers = _read_indices(source.indices, len(part), survey.part(0))
    else:
        numbers = _range(source, len(part))
    return join([part], len(numbers), {"order": "subset"}, {"numbers": numbers})


def _range(source: SubsetSource, samples: int) -> NDArray[np.int64]:
    start, stop = _bounds(source, samples)
    order = np.arange(samples, dtype=NUMBER) if source.shuffle_seed is None else shuffled(samples, source.shuffle_seed)
    return order[start:stop]


def _bounds(source: SubsetSource, samples: int) -> tuple[int, int]:
    """Where the range begins and ends. Raises ``SourceInvalid`` where it holds nothing."""
    start, stop = share_of(source.start, samples), share_of(source.stop, samples)
    assert start is not None, "its dataclass has read it"
    assert stop is not None, "the same"
    if not start < stop <= samples:
        raise SourceInvalid(
            f"the range from {source.start} to {source.stop} of {counted(samples, 'sample')} is from {start} to {stop}, "
            "which holds none"
            if stop <= samples
            else f"stop = {source.stop}, but the source has {counted(samples, 'sample')}"
        )
    return start, stop


def shuffled(samples: int, seed: int) -> NDArray[np.int64]:
    """The numbers 0 to ``samples`` - 1 in the order of their SplitMix64 under ``seed``: the same for ever, on every machine."""
    keys: NDArray[np.uint64] = (np.arange(samples, dtype=np.uint64) + np.uint64(1)) * _STEP
    for number in (np.uint64(seed), np.uint64(0)):
        keys = (keys ^ (keys >> np.uint64(30)) ^ number) * _MIX_1
        keys = (keys ^ (keys >> np.uint64(27))) * _MIX_2
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable").astype(NUMBER)


def _read_indices(file: Path, samples: int | None, survey: Survey) -> NDArray[np.int64]:
    """The numbers in a file. Raises ``SourceInvalid`` naming the line, or the place, of one that is no sample.

    Where nobody knows yet how many ``samples`` there are, any number may be one.
    """
    with survey.open(file) as stream:
        content = stream.read(INDICES_BYTES_MAX)
    numbers, places = _read_array(file, content) if content.startswith(_NPY) else _read_lines(file, content)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= (NUMBER_MAX if samples is None else samples)))
    if len(wrong):
        place = int(places[wrong[0]])
        known = "they are" if samples is None else f"there are {samples},"
        raise SourceInvalid(f"{file}:{place}: {numbers[wrong[0]]} is no sample; {known} counted from 0")
    if not len(numbers):
        raise SourceInvalid(f"{file} names no sample; each line is a number")
    return numbers.astype(NUMBER)


def _read_array(file: Path, content: bytes) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
    """The numbers of a .npy file, and where each stands in it."""
    stored = read_array(str(file), BytesIO(content))
    count = math.prod(stored.shape)
    if len(content) < stored.first + count * stored.dtype.itemsize:
        raise SourceInvalid(f"{file} is cut: it ends at byte {len(content)}, within its numbers; copy it again")
    found = np.frombuffer(content, stored.dtype, count, stored.first).reshape(stored.shape)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise SourceInvalid(f"{file} holds {found.dtype}{list(found.shape)}, not a list of whole numbers")
    return found, np.arange(len(found), dtype=NUMBER)


def _read_lines(file: Path, content: bytes) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
    """The numbers of a text, and the line of each."""
    numbers, lines = array("q"), array("q")
    for line_number, line in enumerate(BytesIO(content.removeprefix(BYTE_ORDER_MARK)), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        if not text.isdigit() or len(text) > DIGITS_MAX:
            raise SourceInvalid(f"{file}:{line_number}: not the number of a sample: {readable(text[:40])}")
        numbers.append(int(text))
        lines.append(line_number)
    return np.array(numbers, NUMBER), np.array(lines, NUMBER)


def _problems(source: SubsetSource, storage: Storage) -> list[str]:
    file = source.indices
    if file is not None and (problems := storage.at(file).file_problems(file, "the file of indices")):
        return problems
    try:
        _check(source, storage)
    except SourceInvalid as error:
        return [str(error)]
    return []


def _check(source: SubsetSource, storage: Storage) -> None:
    """Raise ``SourceInvalid`` where a scan would, as far as a quick look tells."""
    samples = _known_samples(source.of, storage)
    if source.indices is None:
        if samples is not None:
            _bounds(source, samples)
        return
    size = storage.at(source.indices).known_size(source.indices)
    if size is not None and size <= CHECKED_BYTES_MAX:
        _read_indices(source.indices, samples, quick_look(storage))


def _known_samples(source: SourceOptions, storage: Storage) -> int | None:
    """How many samples there are, where that is known without a scan; what is wrong with the source, others say."""
    try:
        return kind_of(source).samples(source, storage)
    except SourceInvalid:
        return None


def _samples(source: SubsetSource, storage: Storage) -> int | None:
    samples = _known_samples(source.of, storage)
    if samples is None or source.indices is not None:
        return None
    start, stop = _bounds(source, samples)
    return stop - start


def _open(source: SubsetSource, index: SourceIndex, max_bytes: int, storage: Storage) -> ComposedReader:
    return ComposedReader(PartReaders([source.of], index, max_bytes, storage), places_in(index))


KIND = BuiltInKind(
    problems=_problems,
    columns=lambda source, storage: kind_of(source.of).columns(source.of, storage),
    scan=_scan,
    open=_open,
    samples=_samples,
)
