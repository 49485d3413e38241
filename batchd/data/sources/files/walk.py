"""List folders and files in an order that does not depend on the file system. Daemon.

Invariant: links are followed, but never in a circle; an unreadable folder is refused by name, not
left out.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from batchd.data.samples.location import Url
from batchd.data.sources.options import FilesOptions, PatternOptions, Patterns
from batchd.data.storage.access import FoundNames, Storage, WantedNames
from batchd.data.storage.index import readable
from batchd.data.storage.paths import bound_of, check_bound
from batchd.data.storage.patterns import (
    NameRule,
    Pattern,
    absence_problems,
    first_file,
    no_file,
    no_match,
    resolve_braces,
)
from batchd.data.storage.survey import Survey
from batchd.errors import SourceInvalid

ListFolder = Callable[[bytes], tuple[list[bytes], list[bytes]]]
"""The folders of a folder to enter, and its files to take, in order."""


def walk(
    top: bytes, start: bytes, list_folder: ListFolder, survey: Survey, bound: bytes | None
) -> list[tuple[bytes, list[bytes]]]:
    """Every folder from ``start`` down, by path, with the names of its files.

    Links are followed, because subsets are often built from them. A link back to a folder around it
    is refused, and one out of ``bound`` (a real path; None: no bound).
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
        folders, files = list_folder(folder)
        found.append((folder, files))
        waiting += [(below(folder, name), above) for name in folders]
    return sorted(found)


def below(folder: bytes, name: bytes) -> bytes:
    """The path of a name in a folder; "" is the folder in which the search begins."""
    return folder + b"/" + name if folder else name


def matching(wanted: Patterns, survey: Survey) -> list[tuple[bytes, list[bytes]]]:
    """The files below a folder that match patterns: folders with their names, all in order.

    Raises ``SourceInvalid`` for a pattern that makes no sense or matches nothing, for one that
    names an absent file, and for a link out of the root.
    """
    root = wanted.root
    patterns, top = _read_patterns(wanted.texts, wanted.key), os.fsencode(root)
    bound = bound_of(root, allow_outside_root=wanted.allow_outside_root)
    if isinstance(root, Url):
        if all(one.is_plain for one in patterns):
            return _named(root, patterns, survey)
        if problem := _wild_problem(root, patterns, wanted.key):
            raise SourceInvalid(problem)

    def list_folder(folder: bytes) -> FoundNames:
        rule = NameRule(patterns=tuple(wanted.texts), folder=os.fsdecode(folder), hidden=True)
        return survey.names_in(os.path.join(top, folder), WantedNames(rule, bound))  # noqa: PTH118  bytes

    found = [(folder, names) for folder, names in walk(top, b"", list_folder, survey, bound) if names]
    named = [one.text for one in patterns if one.is_plain]
    there = {below(folder, name) for folder, names in found for name in names} if named else set()
    absent = [text for text in named if os.fsencode(text) not in there]
    if absent:
        raise SourceInvalid(no_file(root, absent))
    if not found:
        raise SourceInvalid(no_match(root, wanted.texts))
    return found


def _named(root: Url, patterns: Sequence[Pattern], survey: Survey) -> list[tuple[bytes, list[bytes]]]:
    """Objects that are named one by one, as ``matching`` returns them: nothing has to be listed."""
    paths = sorted({os.fsencode(one.text) for one in patterns})
    survey.storage.remote.look_at_each([str(root / os.fsdecode(path)) for path in paths], survey)
    found: dict[bytes, list[bytes]] = {}
    for path in paths:
        folder, _, name = path.rpartition(b"/")
        found.setdefault(folder, []).append(name)
    return sorted((folder, sorted(names)) for folder, names in found.items())


def _wild_problem(root: Url, patterns: Sequence[Pattern], key: str) -> str:
    """The problem of a pattern below a root that cannot be listed; "" if there is none."""
    wild = next((one.text for one in patterns if not one.is_plain), "")
    if not wild or root.can_list:
        return ""
    return (
        f"{key}: {wild!r} cannot be expanded, as {root.scheme} servers cannot list files; name the "
        "files, as in 'train-{000..123}.tar', or in a list source"
    )


def shards_of(source: PatternOptions, survey: Survey) -> list[bytes]:
    """The files that match, below the root, by path. Raises ``SourceInvalid`` if there are none."""
    return [below(folder, name) for folder, names in matching(source.file_patterns, survey) for name in names]


def files_of(source: FilesOptions, survey: Survey) -> list[Path]:
    """The file at ``path``, or the matching ones below ``root``. Raises ``SourceInvalid``."""
    if source.path is not None:
        return [source.path.absolute()]
    return [source.file_patterns.root.absolute() / os.fsdecode(shard) for shard in shards_of(source, survey)]


def files_problems(source: FilesOptions, what: str, storage: Storage) -> list[str]:
    """Problems of such files, without a search; ``what`` names one in messages ("the table")."""
    if source.path is not None:
        return storage.at(source.path).file_problems(source.path, what)
    return shards_problems(source, storage)


def known_size(source: FilesOptions, storage: Storage) -> int | None:
    """The bytes of one local file; several would have to be searched."""
    return None if source.path is None else storage.at(source.path).known_size(source.path)


def shards_problems(source: PatternOptions, storage: Storage) -> list[str]:
    """Problems of files below a root, without a search for all that patterns match."""
    return patterns_problems(source.file_patterns, storage)


def patterns_problems(wanted: Patterns, storage: Storage) -> list[str]:
    """The same, of any patterns."""
    root, texts, key, _outside = wanted
    store = storage.at(root)
    try:
        patterns = _read_patterns(texts, key)
    except SourceInvalid as error:
        return [str(error), *store.folder_problems(root)]
    if not isinstance(root, Url):
        return store.folder_problems(root) or absence_problems(root, patterns, texts)
    if problem := _wild_problem(root, patterns, key):
        return [problem]
    first = patterns[0]
    return store.file_problems(root / first.text, key) if first.is_plain else store.folder_problems(root)


def file_to_look_at(source: PatternOptions) -> Path | None:
    """One of the files that patterns name, to look into; None if none is found.

    On a server it is the first one, if it is named: nothing is searched there.
    """
    root, texts, key, _outside = source.file_patterns
    patterns = _read_patterns(texts, key)
    if isinstance(root, Url):
        return root / patterns[0].text if patterns[0].is_plain else None
    return first_file(root, patterns)


def _read_patterns(texts: Sequence[str], key: str) -> list[Pattern]:
    """Parse the patterns under ``key``. Raises ``SourceInvalid``, which names the key."""
    try:
        return [Pattern(plain) for text in texts for plain in resolve_braces(text)]
    except ValueError as error:
        raise SourceInvalid(f"{key}: {error}") from None
