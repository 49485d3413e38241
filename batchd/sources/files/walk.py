"""Folders and what is in them, in an order that does not depend on the file system. Daemon.

Invariant: links are followed, but never in a circle; what cannot be looked into is refused by name,
not left out.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from batchd.errors import SourceInvalid
from batchd.sources.arrays.options import RawSource
from batchd.sources.csv.options import CsvSource
from batchd.storage.access import Storage, WantedNames
from batchd.storage.index import readable
from batchd.storage.location import Url
from batchd.storage.paths import bound_of, check_bound
from batchd.storage.patterns import Pattern, absence_problems, first_file, no_file, no_match, resolve_braces
from batchd.storage.survey import Survey

IMAGE_SUFFIXES = (b".bmp", b".gif", b".jpeg", b".jpg", b".png", b".webp")
"""Endings of the file names that a folder source takes, in any case."""

Look = Callable[[bytes], tuple[list[bytes], list[bytes]]]
"""Which folders of a folder to go into, and which of its files to take, in order."""


def walk(top: bytes, start: bytes, look: Look, survey: Survey, bound: bytes | None) -> list[tuple[bytes, list[bytes]]]:
    """Every folder from ``start`` down with the names of its files, folders in the order of their paths.

    Links are followed, as people build subsets of them; one that leads back to a folder around it,
    or out of ``bound`` (a real path; None for anywhere), is refused.
    """
    found = []
    waiting: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(start, frozenset())]
    while waiting:
        folder, around = waiting.pop()
        full = os.path.join(top, folder)  # noqa: PTH118  bytes
        identity = survey.storage.at(full).look_at(full, survey)
        check_bound(full, bound)
        if identity in around:
            raise SourceInvalid(f"{readable(full)} is a link to a folder that it lies in; remove it")
        above = around if identity is None else around | {identity}
        folders, files = look(folder)
        found.append((folder, files))
        waiting += [(below(folder, name), above) for name in folders]
    return sorted(found)


def below(folder: bytes, name: bytes) -> bytes:
    """The path of a name in a folder; "" is the folder where a search began."""
    return folder + b"/" + name if folder else name


def is_image(name: bytes) -> bool:
    """Does this name end like that of an image?"""
    return name.lower().endswith(IMAGE_SUFFIXES)


class Patterns(NamedTuple):
    """Patterns of the paths of files below ``root``, and the ``key`` that they stand under. ``allow_outside_root``: of links."""

    root: Path
    texts: Sequence[str]
    key: str
    allow_outside_root: bool


def matching(wanted: Patterns, survey: Survey) -> list[tuple[bytes, list[bytes]]]:
    """The files below a folder that match patterns: folders that hold some, in order, with their names, in order.

    Raises ``SourceInvalid`` where a pattern makes no sense, or names one file that is not there,
    and for a link out of the root.
    """
    root = wanted.root
    patterns, top = read_patterns(wanted.texts, wanted.key), os.fsencode(root)
    bound = bound_of(root, allow_outside_root=wanted.allow_outside_root)
    if isinstance(root, Url):
        if all(one.is_plain for one in patterns):
            return _named(root, patterns, survey)
        refuse_wild(root, patterns, wanted.key)

    def look(folder: bytes) -> tuple[list[bytes], list[bytes]]:
        around = folder.split(b"/") if folder else []

        def is_wanted(name: bytes) -> bool:
            return any(one.matches([*around, name]) for one in patterns)

        found = survey.names_in(os.path.join(top, folder), WantedNames(is_wanted, bound, hidden=True))  # noqa: PTH118
        into = [name for name in found.folders if any(one.may_match_below([*around, name]) for one in patterns)]
        return into, found.files

    found = [(folder, names) for folder, names in walk(top, b"", look, survey, bound) if names]
    there = (
        {below(folder, name) for folder, names in found for name in names}
        if any(one.is_plain for one in patterns)
        else set()
    )
    absent = [one.text for one in patterns if one.is_plain and os.fsencode(one.text) not in there]
    if absent:
        raise SourceInvalid(no_file(root, absent))
    return found


def _named(root: Url, patterns: Sequence[Pattern], survey: Survey) -> list[tuple[bytes, list[bytes]]]:
    """Objects that are named one by one, as ``matching`` has them: nothing has to be listed."""
    paths = sorted({os.fsencode(one.text) for one in patterns})
    survey.storage.remote.look_at_each([str(root / os.fsdecode(path)) for path in paths], survey)
    found: dict[bytes, list[bytes]] = {}
    for path in paths:
        folder, _, name = path.rpartition(b"/")
        found.setdefault(folder, []).append(name)
    return sorted((folder, sorted(names)) for folder, names in found.items())


def refuse_wild(root: Url, patterns: Sequence[Pattern], key: str) -> None:
    """Raise ``SourceInvalid`` for patterns of what cannot be listed."""
    wild = next((one.text for one in patterns if not one.is_plain), "")
    if wild and not root.can_list:
        raise SourceInvalid(
            f"{key}: {wild!r} cannot be looked for, as nobody can ask a server of {root.scheme} what it has; name the "
            "files, as in 'train-{000..123}.tar', or in a list source"
        )


def shards_of(wanted: Patterns, survey: Survey) -> list[bytes]:
    """The files that hold samples, below the root, in the order of their paths. Raises ``SourceInvalid`` where there are none."""
    found = [below(folder, name) for folder, names in matching(wanted, survey) for name in names]
    if not found:
        raise SourceInvalid(no_match(wanted.root, wanted.texts))
    return found


def files_of(source: CsvSource | RawSource, survey: Survey) -> list[Path]:
    """The one file at ``path``, or those below ``root`` that match ``files``. Raises ``SourceInvalid`` where there are none."""
    if source.path is not None:
        return [source.path.absolute()]
    assert source.root is not None, "either a path or a root"
    wanted = Patterns(source.root, source.files, "files", source.allow_outside_root)
    return [source.root.absolute() / os.fsdecode(shard) for shard in shards_of(wanted, survey)]


def files_problems(
    path: Path | None, root: Path | None, texts: Sequence[str], what: str, storage: Storage
) -> list[str]:
    """What is wrong with such files, without looking for them; ``what`` is what people call one ("the table")."""
    if path is not None:
        return storage.at(path).file_problems(path, what)
    assert root is not None, "either a path or a root"
    return shards_problems(root, texts, storage, "files")


def shards_problems(root: Path, texts: Sequence[str], storage: Storage, key: str = "shards") -> list[str]:
    """What is wrong with files below a root that patterns name, without looking for all that patterns match."""
    problems, store = pattern_problems(texts, key), storage.at(root)
    if problems or not isinstance(root, Url):
        problems += store.folder_problems(root)
        return problems or absence_problems(root, read_patterns(texts, key), texts)
    patterns = read_patterns(texts, key)
    try:
        refuse_wild(root, patterns, key)
    except SourceInvalid as problem:
        return [str(problem)]
    first = patterns[0]
    return store.file_problems(root / first.text, key) if first.is_plain else store.folder_problems(root)


def file_to_look_at(root: Path, texts: Sequence[str], key: str = "shards") -> Path | None:
    """One of the files that patterns name, to see whether it is what it should be; None where none is found.

    Of those on a server it is the first one, if it is named: nothing is looked for there.
    """
    patterns = read_patterns(texts, key)
    if isinstance(root, Url):
        return root / patterns[0].text if patterns[0].is_plain else None
    return first_file(root, patterns)


def read_patterns(texts: Sequence[str], key: str) -> list[Pattern]:
    """The patterns that the texts under ``key`` stand for. Raises ``SourceInvalid``, which names the key."""
    try:
        return [Pattern(plain) for text in texts for plain in resolve_braces(text)]
    except ValueError as error:
        raise SourceInvalid(f"{key}: {error}") from None


def pattern_problems(texts: Sequence[str], key: str) -> list[str]:
    """What is wrong with patterns; empty where they make sense."""
    try:
        read_patterns(texts, key)
    except SourceInvalid as error:
        return [str(error)]
    return []
