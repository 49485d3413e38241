"""Make the index of sources that are concatenated, mixed, or a part of another. Daemon.

    numbers   int64 [n]   of mix and subset: the number of each sample in its part
    parts     uint8 [n]   of mix: the part of each sample; a part that has ended begins again

A mix: sample m of a part with weight w has the time (m + 1/2) / w, and samples are ordered by time.
So in each stretch of the order every part has its share, to within one sample.

    weights [2, 1]   part 0: 0.25, 0.75, 1.25 ...   part 1: 0.5, 1.5 ...   order 0 1 0 | 0 1 0 ...

Invariant: all parts have the same columns, and those that name classes name the same ones.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.columns import Column
from batchd.data.sources.arrays.index import read_array
from batchd.data.sources.composed.options import NUMBER_MAX, ConcatSource, MixSource, SubsetSource, parts_of, share_of
from batchd.data.sources.csv.values import BYTE_ORDER_MARK
from batchd.data.sources.finding import FilePattern
from batchd.data.sources.interface import BuiltInKind, kind_of, part_of
from batchd.data.sources.neighbours import Neighbours, in_order, joined, selected
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.index import NUMBER, Arrays, SourceIndex, blob, number_array, readable
from batchd.data.storage.survey import Survey, quick_look
from batchd.errors import SourceInvalid
from batchd_wire.wording import counted

SAMPLES_MAX = 1 << 30
"""Maximum for an epoch of a mix; each costs nine bytes."""
INDICES_BYTES_MAX = 8 << 30
CHECKED_BYTES_MAX = 64 << 20
"""``batchd check`` reads indices up to this size, for a second or two; the daemon reads any."""
DIGITS_MAX = 18
_NPY = b"\x93NUMPY"
_MIX_1, _MIX_2, _STEP = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""


def agreed_columns(columns: Mapping[int, tuple[Column, ...]], source_field: str = "") -> tuple[Column, ...]:
    """The columns of all parts, with ``source_field``. Raises ``SourceInvalid`` if they differ."""
    (earliest, first), *others = columns.items()
    for number, other in others:
        if set(other) != set(first):
            there, here = (", ".join(f"{column.name}: {column.text}" for column in listed) for listed in (other, first))
            raise SourceInvalid(f"sources[{number}] has {there}, but sources[{earliest}] has {here}")
    if source_field in {column.name for column in first}:
        raise SourceInvalid(f"source_field = {source_field!r} is a field of the sources already")
    return (*first, Column(source_field, dtype="int64")) if source_field else first


def _columns(source: ConcatSource | MixSource, storage: Storage) -> tuple[Column, ...]:
    columns = {}
    for number, part in enumerate(source.sources):
        try:
            columns[number] = kind_of(part).columns(part, storage)
        except SourceInvalid as error:
            raise SourceInvalid(f"sources[{number}]: {error}") from None
    return agreed_columns(columns, source.source_field)


def _scan_parts(parts: Sequence[SourceOptions], survey: Survey) -> list[SourceIndex]:
    """Scan all parts. Raises ``SourceInvalid``, which names the part."""
    found: list[SourceIndex] = []
    for number, part in enumerate(parts):
        try:
            found.append(kind_of(part).scan(part, survey.part(sum(map(len, found)))))
        except SourceInvalid as error:
            raise SourceInvalid(f"sources[{number}]: {error}" if len(parts) > 1 else str(error)) from None
    return found


def _join(parts: Sequence[SourceIndex], samples: int, facts: Mapping[str, object], arrays: Arrays) -> SourceIndex:
    """One index of several; ``facts`` and ``arrays`` say which of their samples it has."""
    joined = {f"{number}/{name}": array for number, part in enumerate(parts) for name, array in part.arrays.items()}
    classes = _common_classes(parts)
    return SourceIndex.build(
        samples,
        {"parts": [[len(part), part.facts] for part in parts], **facts},
        {**arrays, **joined, **({"classes": blob(classes)} if classes else {})},
        {"parts": [part.place for part in parts]},
    )


def _common_classes(parts: Sequence[SourceIndex]) -> tuple[bytes, ...]:
    """The classes of the parts that name some. Raises ``SourceInvalid`` if they differ."""
    named = {number: names for number, part in enumerate(parts) if any(names := part.names("classes"))}
    if not named:
        return ()
    first, names = next(iter(named.items()))
    for number, others in named.items():
        for label, pair in enumerate(zip(names, others, strict=False)):
            if pair[0] != pair[1]:
                raise SourceInvalid(
                    f"label {label} is {readable(pair[0])} in sources[{first}], but {readable(pair[1])} in sources[{number}]: "
                    "set the same classes = [...] in each, or name the files in list sources"
                )
        if len(names) != len(others):
            raise SourceInvalid(
                f"sources[{first}] has {len(names)} classes, but sources[{number}] has {len(others)}: set the same "
                "classes = [...] in each, or name the files in list sources"
            )
    return names


def _scan_concat(source: ConcatSource, survey: Survey) -> SourceIndex:
    parts = _scan_parts(source.sources, survey)
    return _join(parts, sum(map(len, parts)), {"order": "concat"}, {})


def _concat_samples(source: ConcatSource, storage: Storage) -> int | None:
    counts = [kind_of(part).samples(part, storage) for part in source.sources]
    return None if None in counts else sum(filter(None, counts))


def _scan_mix(source: MixSource, survey: Survey) -> SourceIndex:
    parts = _scan_parts(source.sources, survey)
    samples, whole = [len(part) for part in parts], source.until == "all"
    if isinstance(source.weights, dict):  # ``core.mixtures`` mixes its rows
        return _join(parts, sum(samples), {"order": "concat"}, {})
    weights = source.weights or shares_of(samples, source.temperature)
    expected = mixed_counts(samples, weights, whole=whole)
    if sum(expected) > SAMPLES_MAX:
        raise SourceInvalid(
            f"weights = {[round(weight, 3) for weight in weights]} of sources with {', '.join(map(str, samples))} samples "
            f'make an epoch of {sum(expected)}, more than {SAMPLES_MAX}; choose other weights, or until = "first"'
        )
    order, numbers = mixed_order(samples, weights, whole=whole)
    return _join(parts, len(order), {"order": "mix"}, {"parts": order, "numbers": numbers})


def shares_of(samples: Sequence[int], temperature: float | None) -> tuple[float, ...]:
    """The share of each part: its samples to the power of 1 / temperature; None: all the same."""
    if temperature is None:
        return (1.0,) * len(samples)
    powers = [(count / max(samples)) ** (1 / temperature) for count in samples]
    return tuple(float(f"{power:.9g}") for power in powers)  # as many digits as any machine gives


def mixed_order(
    samples: list[int], weights: tuple[float, ...], *, whole: bool
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Part, uint8 ``[n]``, and number in it, int64 ``[n]``, of each place; see ``mixed_counts``."""
    counts = mixed_counts(samples, weights, whole=whole)
    moments = np.concatenate([(np.arange(count) + 0.5) / weight for count, weight in zip(counts, weights, strict=True)])
    parts = np.repeat(np.arange(len(samples), dtype=np.uint8), counts)
    numbers = np.concatenate(
        [np.arange(count, dtype=NUMBER) % size for count, size in zip(counts, samples, strict=True)]
    )
    order = np.argsort(moments, kind="stable")
    return parts[order], numbers[order]


def mixed_counts(samples: list[int], weights: tuple[float, ...], *, whole: bool) -> list[int]:
    """Samples of each part in an epoch. ``samples``: of each part, 1 or more.

    ``whole``: until every sample of every part is used; otherwise until a part has no further one.
    """
    rounds = [count / weight for count, weight in zip(samples, weights, strict=True)]
    end = max(rounds) if whole else min(rounds)
    return [math.ceil(weight * end - 0.5) for weight in weights]


def _scan_subset(source: SubsetSource, survey: Survey) -> SourceIndex:
    (part,) = _scan_parts([source.of], survey)
    if source.indices is not None:
        numbers = _read_indices(source.indices, len(part), survey.part(0))
    else:
        start, stop = _bounds(source, len(part))
        seed = source.shuffle_seed
        order = np.arange(len(part), dtype=NUMBER) if seed is None else shuffled(len(part), seed)
        numbers = order[start:stop]
    return _join([part], len(numbers), {"order": "subset"}, {"numbers": numbers})


def _bounds(source: SubsetSource, samples: int) -> tuple[int, int]:
    """(start, stop) of the range. Raises ``SourceInvalid`` if it is empty."""
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
    """0 to ``samples`` - 1, int64, by their SplitMix64 under ``seed``: the same for ever."""
    keys: NDArray[np.uint64] = (np.arange(samples, dtype=np.uint64) + np.uint64(1)) * _STEP
    for number in (np.uint64(seed), np.uint64(0)):
        keys = (keys ^ (keys >> np.uint64(30)) ^ number) * _MIX_1
        keys = (keys ^ (keys >> np.uint64(27))) * _MIX_2
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable").astype(NUMBER)


def _read_indices(file: Path, samples: int | None, survey: Survey) -> NDArray[np.int64]:
    """The numbers in a file, int64 ``[n]``; ``samples`` None: any may be a sample."""
    with survey.open(file) as stream:
        content = stream.read(INDICES_BYTES_MAX)
    numbers, places = _read_array(file, content) if content.startswith(_NPY) else _read_lines(file, content)
    wrong = np.flatnonzero((numbers < 0) | (numbers >= (NUMBER_MAX if samples is None else samples)))
    if len(wrong):
        place = int(places[wrong[0]])
        known = "they are" if samples is None else f"there are {samples},"
        raise SourceInvalid(f"{file}:{place}: {numbers[wrong[0]]} is not a sample; {known} counted from 0")
    if not len(numbers):
        raise SourceInvalid(f"{file} names no sample; each line is a number")
    return numbers.astype(NUMBER)


def _read_array(file: Path, content: bytes) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    stored = read_array(str(file), BytesIO(content))
    if len(content) < stored.first + stored.size:
        raise SourceInvalid(f"{file} is cut: it ends at byte {len(content)}, within its numbers; copy it again")
    if len(stored.shape) > 1 or not np.issubdtype(stored.dtype, np.integer):
        raise SourceInvalid(f"{file} holds {stored.dtype}{list(stored.shape)}, not a list of whole numbers")
    found = stored.numbers(str(file), memoryview(content))
    return found, np.arange(len(found), dtype=NUMBER)


def _read_lines(file: Path, content: bytes) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    numbers, lines = array("q"), array("q")
    for line_number, line in enumerate(BytesIO(content.removeprefix(BYTE_ORDER_MARK)), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        if not text.isdigit() or len(text) > DIGITS_MAX:
            raise SourceInvalid(f"{file}:{line_number}: not the number of a sample: {readable(text[:40])}")
        numbers.append(int(text))
        lines.append(line_number)
    return number_array(numbers), number_array(lines)


def _subset_problems(source: SubsetSource, storage: Storage) -> list[str]:
    """The problems that a quick look tells. Raises ``SourceInvalid`` as a scan would."""
    file, samples = source.indices, _known_samples(source.of, storage)
    if file is None:
        if samples is not None:
            _bounds(source, samples)
        return []
    if problems := storage.at(file).file_problems(file, "the file of indices"):
        return problems
    size = storage.at(file).known_size(file)
    if size is not None and size <= CHECKED_BYTES_MAX:
        _read_indices(file, samples, quick_look(storage))
    return []


def _known_samples(source: SourceOptions, storage: Storage) -> int | None:
    """The number of samples, if known without a scan. Problems are reported elsewhere."""
    try:
        return kind_of(source).samples(source, storage)
    except SourceInvalid:
        return None


def _subset_samples(source: SubsetSource, storage: Storage) -> int | None:
    samples = _known_samples(source.of, storage)
    if samples is None or source.indices is not None:
        return None
    start, stop = _bounds(source, samples)
    return stop - start


def _labels_of_parts(sources: Sequence[SourceOptions], index: SourceIndex) -> NDArray[np.int64] | None:
    """The label of each sample, int64 ``[samples]``; None if a part has none in its index."""
    found = [kind_of(source).labels(source, part_of(index, number)) for number, source in enumerate(sources)]
    labels = [of_part for of_part in found if of_part is not None]
    if len(labels) < len(found):
        return None
    numbers: NDArray[np.int64] | None = index.arrays.get("numbers")
    parts: Any = index.arrays.get("parts", np.uint8(0))
    if numbers is None:
        return np.concatenate(labels)
    starts = np.cumsum([0, *map(len, labels)])
    chosen: NDArray[np.int64] = np.concatenate(labels)[starts[parts] + numbers]
    return chosen


def _concat_neighbours(source: ConcatSource, index: SourceIndex) -> Neighbours:
    parts = [part_of(index, number) for number in range(len(source.sources))]
    return joined(
        [(len(part), kind_of(each).neighbours(each, part)) for each, part in zip(source.sources, parts, strict=True)]
    )


def _subset_neighbours(source: SubsetSource, index: SourceIndex) -> Neighbours:
    part = part_of(index, 0)
    return selected(kind_of(source.of).neighbours(source.of, part), len(part), index.arrays["numbers"])


def _find(
    source: ConcatSource | MixSource | SubsetSource, index: SourceIndex, pattern: FilePattern
) -> NDArray[np.int64]:
    """The samples whose parts find them; a part that names no files has none of them."""
    parts = [part for _key, part in parts_of(source)]
    found: list[NDArray[np.int64]] = []
    problem: SourceInvalid | None = None
    for number, part in enumerate(parts):
        try:
            found.append(_in_whole(index, number, kind_of(part).find(part, part_of(index, number), pattern)))
        except SourceInvalid as error:
            problem = error
    if not found and problem is not None:
        raise problem
    return np.sort(np.concatenate(found))


def _in_whole(index: SourceIndex, part: int, found: NDArray[np.int64]) -> NDArray[np.int64]:
    """The samples of the whole that are ``found`` in a part."""
    members, numbers = _members(index, part)
    is_found = np.zeros(index.facts["parts"][part][0], np.bool_)
    is_found[found] = True
    return members[is_found[numbers]]


def _members(index: SourceIndex, part: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples of the whole that are of a part, and their numbers in it: int64 ``[members]``."""
    counts = [samples for samples, _facts in index.facts["parts"]]
    if "numbers" not in index.arrays:
        return sum(counts[:part]) + np.arange(counts[part]), np.arange(counts[part])
    of_part = index.arrays.get("parts")
    members = np.arange(len(index)) if of_part is None else np.flatnonzero(of_part == part)
    return members, index.arrays["numbers"][members]


def _lengths(
    source: ConcatSource | MixSource | SubsetSource, index: SourceIndex, field: str
) -> NDArray[np.int64] | None:
    """Those of all parts, if their indexes tell; no field has the name of ``source_field``."""
    wholes = [source.of] if isinstance(source, SubsetSource) else source.sources
    parts = [part_of(index, number) for number in range(len(wholes))]
    found = [kind_of(whole).lengths(whole, part, field) for whole, part in zip(wholes, parts, strict=True)]
    known = [lengths for lengths in found if lengths is not None]
    if len(known) < len(found):
        return None
    of_all = np.concatenate(known)
    if "numbers" not in index.arrays:  # all of one part after the other
        return of_all
    which = index.arrays["parts"] if isinstance(source, MixSource) else 0
    firsts = np.cumsum([0, *map(len, known)])[which]
    chosen: NDArray[np.int64] = of_all[firsts + index.arrays["numbers"]]
    return chosen


KINDS = {
    ConcatSource: BuiltInKind(
        columns=_columns,
        scan=_scan_concat,
        samples=_concat_samples,
        neighbours=_concat_neighbours,
        find=_find,
        labels=lambda source, index: _labels_of_parts(source.sources, index),
        lengths=_lengths,
    ),
    MixSource: BuiltInKind(
        columns=_columns,
        scan=_scan_mix,
        neighbours=lambda _source, index: in_order(index, "a mix takes its samples from several sources in turn"),
        find=_find,
        labels=lambda source, index: _labels_of_parts(source.sources, index),
        lengths=_lengths,
    ),
    SubsetSource: BuiltInKind(
        problems=_subset_problems,
        columns=lambda source, storage: kind_of(source.of).columns(source.of, storage),
        scan=_scan_subset,
        samples=_subset_samples,
        neighbours=_subset_neighbours,
        find=_find,
        labels=lambda source, index: _labels_of_parts([source.of], index),
        lengths=_lengths,
    ),
}
