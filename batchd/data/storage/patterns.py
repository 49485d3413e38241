r"""Patterns of file names, as in shells: what they match, and where to search. Daemon and CLI.

    *        any run of characters in one name          photos/*.jpg
    ?        one character of a name                    scan-?.png
    [ab] [a-z] [!0-9]    one character out of some      cam[12]/*.jpg
    **       any folders, also none; a part by itself   photos/**/*.jpg
    {a,b}    one or the other                           **/*.{jpg,png}
    {000..123}           every number from the one to the other, with as many digits as the first

Standard library only. Names are bytes, as they need not be text, and are matched as Python reads
them. A name that starts with a dot is matched only by a part that starts with one, too.

Before a scan, and in ``batchd check``, ``absence_problems`` looks for the files on this machine:
each file that is named costs a ``stat``; of those that patterns match, any one is looked for.

Invariant: no file is opened, no more than ``FOLDERS_MAX`` folders are read, and where that does not
tell, nothing is reported.
"""

import os
import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

ALTERNATIVES_MAX = 4_096
"""Into how many plain ones the braces of a pattern may be resolved."""
ANY_FOLDERS = "**"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_WILD = re.compile(r"[*?\[]")


def resolve_braces(pattern: str) -> list[str]:
    """The patterns without braces, in order. Raises ``ValueError`` for braces that do not match."""
    parts = _BRACES.split(pattern)
    choices = [_choices(part) if place % 2 else [part] for place, part in enumerate(parts)]
    if any("{" in part or "}" in part for part in parts[::2]):
        raise ValueError(f"the braces of {pattern!r} do not match, or stand in each other")
    count = prod(map(len, choices))
    if count > ALTERNATIVES_MAX:
        raise ValueError(f"the braces of {pattern!r} stand for {count} patterns, more than {ALTERNATIVES_MAX}")
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(inside: str) -> Sequence[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    if int(last) < int(first):
        raise ValueError(f"{{{inside}}} goes down; write the smaller number first")
    if int(last) - int(first) >= ALTERNATIVES_MAX:
        raise ValueError(f"{{{inside}}} stands for more than {ALTERNATIVES_MAX} numbers")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]


class Pattern:
    """One pattern without braces, relative to the folder where the search begins."""

    def __init__(self, text: str) -> None:
        """Raises ``ValueError`` where it cannot be a pattern of relative paths."""
        self.text = text
        names = text.split("/")
        if not text or text.startswith("/") or "" in names or ".." in names or "." in names:
            raise ValueError(f"{text!r} is not a pattern of paths below the root, such as 'photos/**/*.jpg'")
        if any(ANY_FOLDERS in name and name != ANY_FOLDERS for name in names):
            raise ValueError(f"in {text!r} the ** has to be a part by itself, as in 'photos/**/*.jpg'")
        if names[-1] == ANY_FOLDERS:
            names.append("*")
        self._parts = [None if name == ANY_FOLDERS else _name_pattern(name) for name in names]

    @property
    def is_plain(self) -> bool:
        """True for the path of one file, which has to exist."""
        return _WILD.search(self.text) is None

    def matches(self, names: Sequence[bytes]) -> bool:
        """True if it matches this path, given as its names."""
        return len(self._parts) in self._places(names)

    def may_match_below(self, folders: Sequence[bytes]) -> bool:
        """True if it may match anything in this folder or below it."""
        return any(place < len(self._parts) for place in self._places(folders))

    def _places(self, names: Sequence[bytes]) -> set[int]:
        """How many of its parts may have been used up by these names."""
        places = self._past_folders({0})
        for name in names:
            after = set()
            for place in places:
                if place == len(self._parts):
                    continue
                part = self._parts[place]
                if part is None:
                    if not name.startswith(b"."):
                        after.add(place)
                elif part(name):
                    after.add(place + 1)
            places = self._past_folders(after)
        return places

    def _past_folders(self, places: set[int]) -> set[int]:
        """``**`` may stand for no folder at all."""
        found = set(places)
        for place in sorted(places):
            while place < len(self._parts) and self._parts[place] is None:
                place += 1  # noqa: PLW2901  on to the next part
                found.add(place)
        return found


class NameRule(NamedTuple):
    """Which names of a folder a scan takes, as plain data: an index is kept with it.

    ``endings``: of files, in any case. ``patterns``: of paths from a place of which this is the
    ``folder``. Without both, all names are taken. ``hidden``: also names that begin with a dot.
    """

    endings: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    folder: str = ""
    hidden: bool = False

    def takes(self) -> Callable[[bytes], bool]:
        """The function that says which names are those of files that are taken."""
        endings = tuple(map(os.fsencode, self.endings))
        if self.patterns:
            patterns, around = _resolved(self.patterns), self._around()
            return lambda name: any(pattern.matches([*around, name]) for pattern in patterns)
        return (lambda name: name.lower().endswith(endings)) if endings else lambda _name: True

    def enters(self) -> Callable[[bytes], bool]:
        """The function that says which names are those of folders that are searched, too."""
        patterns, around = _resolved(self.patterns), self._around()
        return lambda name: not patterns or any(pattern.may_match_below([*around, name]) for pattern in patterns)

    def _around(self) -> list[bytes]:
        return os.fsencode(self.folder).split(b"/") if self.folder else []


def rule_of(fields: Sequence[Any]) -> NameRule:
    """A rule from its fields, as JSON has them."""
    endings, patterns, folder, hidden = fields
    return NameRule(tuple(endings), tuple(patterns), folder, hidden)


@lru_cache(maxsize=16)
def _resolved(texts: tuple[str, ...]) -> list[Pattern]:
    return [Pattern(plain) for text in texts for plain in resolve_braces(text)]


def _name_pattern(name: str) -> Callable[[bytes], bool]:
    regular = re.compile(translate(name))
    hidden = name.startswith(".")

    def matches(raw: bytes) -> bool:
        return (hidden or not raw.startswith(b".")) and regular.match(os.fsdecode(raw)) is not None

    return matches


FOLDERS_MAX = 1_000
"""Folders in which a file is looked for that matches a pattern."""
SHOWN_MAX = 3
"""Files that a message names of those that are not there."""


class Match(NamedTuple):
    """A ``file`` that patterns match, or None: not ``for_sure`` if the search was given up."""

    file: Path | None
    for_sure: bool = True


def absence_problems(root: Path, patterns: Sequence[Pattern], texts: Sequence[str]) -> list[str]:
    """Problems of files below a folder; empty if all named ones exist and patterns match one."""
    named = [pattern for pattern in patterns if pattern.is_plain]
    absent = [pattern.text for pattern in named if not os.path.isfile(root / pattern.text)]  # noqa: PTH113  it never raises
    if absent:
        return [no_file(root, absent)]
    return [no_match(root, texts)] if not named and first_match(root, patterns) == Match(None) else []


def first_file(root: Path, patterns: Sequence[Pattern]) -> Path | None:
    """The first file that is named, or else one that a pattern matches; None if none is found."""
    named = next((pattern.text for pattern in patterns if pattern.is_plain), None)
    return first_match(root, patterns).file if named is None else root / named


def first_match(root: Path, patterns: Sequence[Pattern]) -> Match:
    """A file below a folder that one of the patterns matches."""
    waiting: list[list[bytes]] = [[]]
    for _ in range(FOLDERS_MAX):
        if not waiting:
            return Match(None)
        around = waiting.pop()
        try:
            with os.scandir(os.path.join(os.fsencode(root), *around)) as entries:  # noqa: PTH118  bytes
                for entry in entries:
                    names = [*around, entry.name]
                    if not entry.is_dir():
                        if any(pattern.matches(names) for pattern in patterns):
                            return Match(Path(os.fsdecode(entry.path)))
                    elif any(pattern.may_match_below(names) for pattern in patterns):
                        waiting.append(names)
        except OSError:
            return Match(None, for_sure=False)  # the scan says which folder it is
    return Match(None, for_sure=False)


def no_file(root: Path, absent: Sequence[str]) -> str:
    """The error for named files that do not exist."""
    shown = ", ".join(str(root / text) for text in absent[:SHOWN_MAX])
    more = f" and {len(absent) - SHOWN_MAX} more" if len(absent) > SHOWN_MAX else ""
    return f"there is no file {shown}{more}"


def no_match(root: Path, texts: Sequence[str]) -> str:
    """The error for patterns that match nothing."""
    return f"no file below {root} matches {', '.join(map(repr, texts))}"
