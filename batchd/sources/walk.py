"""Folders and what is in them, in an order that does not depend on the file system. Daemon.

Invariant: links are followed, but never in a circle; what cannot be looked into is refused by name, not left out.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from batchd.config.array_sources import RawSource
from batchd.config.table_sources import CsvSource
from batchd.errors import SourceInvalid
from batchd.sources.index import readable
from batchd.sources.patterns import Pattern, resolve_braces
from batchd.sources.places import bound_of, check_bound, file_problems, folder_problems, status_of, unreadable
from batchd.sources.survey import Survey

IMAGE_SUFFIXES = (b".bmp", b".gif", b".jpeg", b".jpg", b".png", b".webp")
"""Endings of the file names that a folder source takes, in any case."""

Look = Callable[[bytes], tuple[list[bytes], list[bytes]]]
"""Which folders of a folder to go into, and which of its files to take, in order."""


def walk(top: bytes, start: bytes, look: Look, survey: Survey, bound: bytes | None) -> list[tuple[bytes, list[bytes]]]:
    """Every folder from ``start`` down with the names of its files, folders in the order of their paths.

    Links are followed, as people build subsets of them; one that leads back to a folder around it, or out of ``bound`` (a real
    path; None for anywhere), is refused.
    """
    found = []
    waiting: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(start, frozenset())]
    while waiting:
        folder, around = waiting.pop()
        full = os.path.join(top, folder)  # noqa: PTH118  bytes
        status = status_of(full)
        survey.saw(full, status)
        check_bound(full, bound)
        identity = (status.st_dev, status.st_ino)
        if identity in around:
            raise SourceInvalid(f"{readable(full)} is a link to a folder that it lies in; remove it")
        folders, files = look(folder)
        found.append((folder, files))
        waiting += [(below(folder, name), around | {identity}) for name in folders]
    return sorted(found)


def below(folder: bytes, name: bytes) -> bytes:
    """The path of a name in a folder; "" is the folder where a search began."""
    return folder + b"/" + name if folder else name


def is_image(name: bytes) -> bool:
    """Does this name end like that of an image?"""
    return name.lower().endswith(IMAGE_SUFFIXES)


def entries(
    folder: bytes, bound: bytes | None, *, is_wanted: Callable[[bytes], bool] = is_image, hidden: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """The names of the folders and of the wanted files in a folder, sorted, without hidden ones where they are not asked for.

    Whatever is no folder and ends like an image is an image here; the reader looks at what it really is. A wanted file that is a
    link out of ``bound`` is refused.
    """
    folders, files = [], []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if entry.name.startswith(b".") and not hidden:
                    continue
                is_file = is_wanted(entry.name)
                if _is_folder(entry, or_else=is_file or hidden):
                    folders.append(entry.name)
                elif is_file:
                    if entry.is_symlink():
                        check_bound(entry.path, bound)
                    files.append(entry.name)
    except OSError as error:
        raise unreadable(folder, error) from None
    return sorted(folders), sorted(files)


def _is_folder(entry: os.DirEntry[bytes], *, or_else: bool) -> bool:
    """Tell a folder; a link that leads nowhere is none if ``or_else`` it is taken for an image, and is refused otherwise."""
    try:
        return entry.is_dir()
    except OSError as error:
        if or_else:
            return False
        raise SourceInvalid(f"{readable(entry.path)} cannot be read: {error.strerror}") from None


class Patterns(NamedTuple):
    """Patterns of the paths of files below ``root``, and the ``key`` that they stand under. ``allow_outside_root``: of links."""

    root: Path
    texts: Sequence[str]
    key: str
    allow_outside_root: bool


def matching(wanted: Patterns, survey: Survey) -> list[tuple[bytes, list[bytes]]]:
    """The files below a folder that match patterns: folders that hold some, in order, with their names, in order.

    Raises ``SourceInvalid`` where a pattern makes no sense, or names one file that is not there, and for a link out of the root.
    """
    root = wanted.root
    patterns, top = read_patterns(wanted.texts, wanted.key), os.fsencode(root)
    bound = bound_of(root, allow_outside_root=wanted.allow_outside_root)

    def look(folder: bytes) -> tuple[list[bytes], list[bytes]]:
        around = folder.split(b"/") if folder else []

        def is_wanted(name: bytes) -> bool:
            return any(one.matches([*around, name]) for one in patterns)

        folders, files = entries(os.path.join(top, folder), bound, is_wanted=is_wanted, hidden=True)  # noqa: PTH118  bytes
        return [name for name in folders if any(one.may_match_below([*around, name]) for one in patterns)], files

    found = [(folder, names) for folder, names in walk(top, b"", look, survey, bound) if names]
    there = (
        {below(folder, name) for folder, names in found for name in names}
        if any(one.is_plain for one in patterns)
        else set()
    )
    for one in patterns:
        if one.is_plain and os.fsencode(one.text) not in there:
            raise SourceInvalid(f"there is no file {root / one.text}")
    return found


def shards_of(wanted: Patterns, survey: Survey) -> list[bytes]:
    """The files that hold samples, below the root, in the order of their paths. Raises ``SourceInvalid`` where there are none."""
    found = [below(folder, name) for folder, names in matching(wanted, survey) for name in names]
    if not found:
        raise SourceInvalid(f"no file below {wanted.root} matches {', '.join(map(repr, wanted.texts))}")
    return found


def files_of(source: CsvSource | RawSource, survey: Survey) -> list[Path]:
    """The one file at ``path``, or those below ``root`` that match ``files``. Raises ``SourceInvalid`` where there are none."""
    if source.path is not None:
        return [source.path.absolute()]
    assert source.root is not None, "either a path or a root"
    wanted = Patterns(source.root, source.files, "files", source.allow_outside_root)
    return [source.root.absolute() / os.fsdecode(shard) for shard in shards_of(wanted, survey)]


def files_problems(path: Path | None, root: Path | None, texts: Sequence[str], what: str) -> list[str]:
    """What is wrong with such files, without looking for them; ``what`` is what people call one ("the table")."""
    if path is not None:
        return file_problems(path, what)
    assert root is not None, "either a path or a root"
    return pattern_problems(texts, "files") + folder_problems(root)


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
