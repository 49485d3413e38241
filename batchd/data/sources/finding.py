"""Finds the samples of files that a user names, in the index of a source. The user's process.

    /data/cats/17.jpg      a path, or a URL
    cats/17.jpg            the end of a path; ./17.jpg is a path below the current folder
    cats/*.jpg, **/*.tar   a pattern as of sources: of whole paths, or of their ends

Invariant: no file is opened, so a file that is gone is found, too.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from batchd.data.samples.location import is_url
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.patterns import ANY_FOLDERS, Pattern, resolve_braces
from batchd.errors import SourceInvalid

Numbers = NDArray[np.int64]

FEW = 64
"""Names that are compared one by one."""
_WILD = frozenset("*?[{")


class FilePattern:
    """The files that ``text`` names. See the module. Raises ``ValueError`` for a bad pattern.

    ``number``: of a record in each of them, counted from 0 or from 1, as kinds of files differ.
    """

    def __init__(self, text: str, number: int | None = None) -> None:
        self._number = number
        self.is_plain = _WILD.isdisjoint(text)
        if not is_url(os.fsencode(text)):
            text = os.path.normpath(Path.cwd() / text) if text.startswith(".") else os.path.normpath(text)
        self.path = os.fsencode(text)
        self.is_whole = text.startswith("/") or is_url(self.path)
        self._folders: dict[bytes, bool] = {}
        """Whether a file in a folder may match."""
        self._patterns = [] if self.is_plain else [Pattern(one) for one in resolve_braces("/".join(_names(text)))]

    def matches(self, path: bytes) -> bool:
        """True if it names this absolute path, or URL."""
        if self.is_plain:
            return path == self.path or (not self.is_whole and path.endswith(b"/" + self.path))
        folder, _slash, _name = path.rpartition(b"/")
        may_match = self._folders.get(folder)
        if may_match is None:
            may_match = self._folders[folder] = any(
                pattern.may_match_below(folders)
                for pattern in self._patterns
                for folders in self._ends(pattern, folder, 1)
            )
        return may_match and any(
            pattern.matches(names) for pattern in self._patterns for names in self._ends(pattern, path, 0)
        )

    def _ends(self, pattern: Pattern, path: bytes, names_less: int) -> list[list[bytes]]:
        """The names of a path to which a pattern may apply: of all of it, or of its ends."""
        names, parts = [os.fsencode(name) for name in _names(os.fsdecode(path))], pattern.text.split("/")
        if self.is_whole:
            return [names]
        if ANY_FOLDERS in parts:
            return [names[first:] for first in range(len(names) + names_less)]
        count = len(parts) - names_less
        return [names[len(names) - count :]] if count <= len(names) else []

    def chosen(self, first: int, end: int) -> Numbers:
        """The samples of a file that matches, which has those from ``first`` to ``end``.

        With ``number``, only those that it may mean.
        """
        if self._number is None:
            return np.arange(first, end)
        likely = first + self._number + np.array([-1, 0])
        return likely[(first <= likely) & (likely < end)]


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def has_no_files(_source: object, _index: SourceIndex, _pattern: FilePattern) -> NoReturn:
    """Refuse a source whose samples are in no files that its index names."""
    raise SourceInvalid("the index of the source names no files; name samples by their number: --index")


def find_in_runs(pattern: FilePattern, paths: Sequence[bytes], firsts: Numbers, samples: int) -> Numbers:
    """The samples of the files that match, ascending.

    ``firsts``: the first sample of each file, int64 ``[files]``, ascending.
    """
    ends = np.append(firsts[1:], samples).astype(np.int64)
    found = [pattern.chosen(firsts[file], ends[file]) for file, path in enumerate(paths) if pattern.matches(path)]
    return np.concatenate(found or [np.zeros(0, np.int64)])


def find_in_records(pattern: FilePattern, index: SourceIndex) -> Numbers:
    """As ``find_in_runs``, for records of files, with an index as in ``data.sources.records``."""
    firsts = np.cumsum([0, *(records for records, *_rest in index.facts["files"])])[:-1]
    return find_in_runs(pattern, list(map(os.fsencode, index.place["files"])), firsts, len(index))


def find_in_shards(pattern: FilePattern, index: SourceIndex, firsts: Numbers | None = None) -> Numbers:
    """As ``find_in_runs``, for shards below the root; the index has the first sample of each."""
    root = os.fsencode(index.place["root"])
    shards = [os.path.join(root, name) for name in index.names("shards")]  # noqa: PTH118  bytes
    firsts = index.arrays["firsts"] if firsts is None else firsts
    return find_in_runs(pattern, shards, firsts[: len(shards)], len(index))


class NamedSamples:
    """Samples with a name each, one right after the other in ``names``, uint8 ``[bytes]``.

    ``offsets``: int64 ``[samples + 1]``. ``before``: what stands before each name in its path,
    unless that is absolute.
    """

    def __init__(self, offsets: Numbers, names: NDArray[np.uint8], before: bytes) -> None:
        self._offsets, self._names, self._before = offsets, names, before

    def find(self, pattern: FilePattern) -> Numbers:
        """The samples whose paths match, ascending."""
        samples = np.arange(len(self._offsets) - 1)
        if pattern.is_plain:
            samples = self._likely(pattern)
        return np.array([sample for sample in samples.tolist() if pattern.matches(self._path(sample))], np.int64)

    def _likely(self, pattern: FilePattern) -> Numbers:
        """The samples whose names end as a path, from its suffix back, until few are left."""
        whole = pattern.path
        path = whole.removeprefix(self._before) if pattern.is_whole else whole
        lengths, ends = np.diff(self._offsets), self._offsets[1:]
        may_match = (lengths == len(path)) | (lengths == len(whole)) if pattern.is_whole else lengths >= len(path)
        samples = np.flatnonzero(may_match)
        for place in range(len(path) - len(os.path.splitext(path)[1]) - 1, -1, -1):  # noqa: PTH122  bytes
            if len(samples) <= FEW:
                break
            samples = samples[self._names[ends[samples] - len(path) + place] == path[place]]
        return samples

    def _path(self, sample: int) -> bytes:
        name = self._names[self._offsets[sample] : self._offsets[sample + 1]].tobytes()
        return name if name.startswith(b"/") else self._before + name
