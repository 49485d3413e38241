"""Finds the samples of files that a user names, in the index of a source. The user's process.

    /data/cats/17.jpg      a path, or a URL
    cats/17.jpg            the end of a path; ./17.jpg is a path below the current folder
    cats/*.jpg, **/*.tar   a pattern as of sources: of whole paths, or of their ends

Invariant: no file is opened, so a file that is gone is found, too.
"""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from batchd.errors import SourceInvalid
from batchd.storage.index import SourceIndex
from batchd.storage.location import is_url
from batchd.storage.patterns import ANY_FOLDERS, Pattern, resolve_braces

Numbers = NDArray[np.int64]

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
        self._patterns = [] if self.is_plain else [Pattern(one) for one in resolve_braces("/".join(_names(text)))]

    def matches(self, path: bytes) -> bool:
        """True if it names this absolute path, or URL."""
        if self.is_plain:
            return path == self.path or (not self.is_whole and path.endswith(b"/" + self.path))
        names = [os.fsencode(name) for name in _names(os.fsdecode(path))]
        for pattern in self._patterns:
            parts = pattern.text.split("/")
            lengths = [len(names)] if self.is_whole else [len(parts)]
            if not self.is_whole and ANY_FOLDERS in parts:
                lengths = list(range(1, len(names) + 1))
            if any(0 < length <= len(names) and pattern.matches(names[-length:]) for length in lengths):
                return True
        return False

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
    """As ``find_in_runs``, for records of files, with an index as in ``sources.records``."""
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

    @cached_property
    def _bytes(self) -> bytes:
        return self._names.tobytes()

    def find(self, pattern: FilePattern) -> Numbers:
        """The samples whose paths match, ascending."""
        if not pattern.is_plain:
            samples = range(len(self._offsets) - 1)
            return np.array([sample for sample in samples if pattern.matches(self._path(sample))], np.int64)
        needle = pattern.path
        if pattern.is_whole and needle.startswith(self._before):
            needle = needle[len(self._before) :]
        elif not pattern.is_whole and not needle:
            return np.zeros(0, np.int64)
        found, place = set(), self._bytes.find(needle)
        while place >= 0:
            sample = int(np.searchsorted(self._offsets, place, "right")) - 1
            if self._offsets[sample + 1] == place + len(needle) and pattern.matches(self._path(sample)):
                found.add(sample)
            place = self._bytes.find(needle, place + 1)
        return np.array(sorted(found), np.int64)

    def _path(self, sample: int) -> bytes:
        name = self._bytes[self._offsets[sample] : self._offsets[sample + 1]]
        return name if name.startswith(b"/") else self._before + name
