"""The groups that samples belong to: classes, files of many samples, sources. Pure, from an index.

Nothing is read but the index, so a class is known where the index has labels, and a file where it
holds many samples: a shard, a table, a row group. Its name comes from the first of its samples that
is made again.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchd.data.sources.composed.options import ConcatSource, MixSource, parts_of
from batchd.data.sources.interface import kind_of, part_of
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.index import SourceIndex

Numbers = NDArray[np.int64]
SAMPLE, CLASS, FILE, SOURCE = "sample", "class", "file", "source"
NO_GROUP = -1


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Groups of one kind. ``of``: the group of each sample, or ``NO_GROUP``; int64 ``[samples]``.

    ``names``: by group. A file's is a range of samples, as the index does not name it.
    """

    kind: str
    of: Numbers
    names: tuple[str, ...]


def groupings_of(source: SourceOptions, index: SourceIndex, samples: Numbers) -> list[Grouping]:
    """The groups of some samples, int64 ``[samples]``; a kind with a single group is left out.

    Raises ``SourceInvalid`` if a library that the source needs is not installed.
    """
    return [one for one in _groupings(source, index, samples, 0) if len(one.names) > 1]


def _groupings(source: SourceOptions, index: SourceIndex, samples: Numbers, first: int) -> list[Grouping]:
    """As ``groupings_of``; ``first``: the number of sample 0 in the whole source, for names."""
    parts = [part for _key, part in parts_of(source)]
    if parts:
        return _of_parts(source, parts, index, samples)
    found = []
    labels = index.arrays.get("labels")
    if labels is not None and len(labels) == len(index):
        numbers, of = np.unique(labels[samples], return_inverse=True)
        names = dict(enumerate(index.class_names))
        found.append(Grouping(CLASS, of, tuple(names.get(label) or str(label) for label in numbers.tolist())))
    firsts = kind_of(source).neighbours(source, index).firsts
    if len(firsts) > 1:
        numbers, of = np.unique(np.searchsorted(firsts, samples, "right") - 1, return_inverse=True)
        ends = np.append(firsts[1:], len(index))
        ranges = zip((firsts[numbers] + first).tolist(), (ends[numbers] + first - 1).tolist(), strict=True)
        found.append(Grouping(FILE, of, tuple(f"samples {begin} to {last}" for begin, last in ranges)))
    return found


def _of_parts(
    source: SourceOptions, parts: list[SourceOptions], index: SourceIndex, samples: Numbers
) -> list[Grouping]:
    """The groups within each part, those of one name together, and the parts themselves."""
    starts = np.cumsum([0, *(count for count, _facts in index.facts["parts"])])
    own, part_numbers = index.arrays.get("numbers"), index.arrays.get("parts")
    if own is None:
        of_part = np.searchsorted(starts, samples, "right") - 1
        numbers = samples - starts[of_part]
    else:
        of_part = part_numbers[samples].astype(np.int64) if part_numbers is not None else np.zeros_like(samples)
        numbers = own[samples]
    groups: dict[str, tuple[Numbers, dict[str, int]]] = {}
    for number, part in enumerate(parts):
        here = np.flatnonzero(of_part == number)
        first = int(starts[number]) if own is None else 0
        for one in _groupings(part, part_of(index, number), numbers[here], first) if len(here) else ():
            of, names = groups.setdefault(one.kind, (np.full(len(samples), NO_GROUP), {}))
            mark = "" if own is None or len(parts) == 1 or one.kind != FILE else f" of sources[{number}]"
            merged = [names.setdefault(name + mark, len(names)) for name in one.names]
            of[here] = np.array(merged)[one.of]
    found = [Grouping(kind, of, tuple(names)) for kind, (of, names) in groups.items()]
    if isinstance(source, ConcatSource | MixSource):
        present, of = np.unique(of_part, return_inverse=True)
        texts = (f"sources[{number}]: {parts[number].type} {parts[number].place}" for number in present.tolist())
        return [Grouping(SOURCE, of, tuple(texts)), *(one for one in found if one.kind != SOURCE)]
    return found
