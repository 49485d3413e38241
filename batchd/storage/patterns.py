r"""Patterns of file names, as shells have them: what they match, and where it is worth looking. Daemon; standard library only.

    *        any run of characters in one name          photos/*.jpg
    ?        one character of a name                    scan-?.png
    [ab] [a-z] [!0-9]    one character out of some      cam[12]/*.jpg
    **       any folders, also none; a part by itself   photos/**/*.jpg
    {a,b}    one or the other                           **/*.{jpg,png}
    {000..123}           every number from the one to the other, with as many digits as the first

Names are bytes, as they need not be text, and are matched as Python reads them; one that starts
with a dot is matched only by a part that does too.
"""

import os
import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from itertools import product
from math import prod

ALTERNATIVES_MAX = 4_096
"""Into how many plain ones the braces of a pattern may be resolved."""
ANY_FOLDERS = "**"
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
_WILD = re.compile(r"[*?\[]")


def resolve_braces(pattern: str) -> list[str]:
    """The patterns without braces that ``pattern`` stands for, in order. Raises ``ValueError`` for braces that do not match."""
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
            raise ValueError(f"{text!r} is no pattern of paths below the root, such as 'photos/**/*.jpg'")
        if any(ANY_FOLDERS in name and name != ANY_FOLDERS for name in names):
            raise ValueError(f"in {text!r} the ** has to be a part by itself, as in 'photos/**/*.jpg'")
        if names[-1] == ANY_FOLDERS:
            names.append("*")
        self._parts = [None if name == ANY_FOLDERS else _name_pattern(name) for name in names]

    @property
    def is_plain(self) -> bool:
        """Is it the path of one file, which has to be there?"""
        return _WILD.search(self.text) is None

    def matches(self, names: Sequence[bytes]) -> bool:
        """Does it match this path, given as its names?"""
        return len(self._parts) in self._places(names)

    def may_match_below(self, folders: Sequence[bytes]) -> bool:
        """May it match anything in this folder or below it?"""
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


def _name_pattern(name: str) -> Callable[[bytes], bool]:
    regular = re.compile(translate(name))
    hidden = name.startswith(".")

    def matches(raw: bytes) -> bool:
        return (hidden or not raw.startswith(b".")) and regular.match(os.fsdecode(raw)) is not None

    return matches
