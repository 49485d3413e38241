"""Are the files there that patterns name? Daemon, before a scan, and ``batchd check``; files of this machine alone.

Each one that is named costs a look at its status. Of those that patterns match one is looked for,
in no order.

Invariant: no file is opened, no more than ``FOLDERS_MAX`` folders are read, and where that does not
tell, nothing is said.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchd.storage.patterns import Pattern

FOLDERS_MAX = 1_000
"""Folders in which a file is looked for that matches a pattern."""
SHOWN_MAX = 3
"""Files that a message names of those that are not there."""


class Match(NamedTuple):
    """A ``file`` that patterns match. None where there is none, or, not ``for_sure``, where it would take long to find."""

    file: Path | None
    for_sure: bool = True


def absence_problems(root: Path, patterns: Sequence[Pattern], texts: Sequence[str]) -> list[str]:
    """What is wrong with files below a folder that is there; empty where all that are named are there, and some at all."""
    named = [one for one in patterns if one.is_plain]
    absent = [one.text for one in named if not os.path.isfile(root / one.text)]  # noqa: PTH113  it never raises
    if absent:
        return [no_file(root, absent)]
    return [no_match(root, texts)] if not named and first_match(root, patterns) == Match(None) else []


def first_file(root: Path, patterns: Sequence[Pattern]) -> Path | None:
    """One of the files that patterns name or match, the first that is named if there is one; None where none is found."""
    named = next((one.text for one in patterns if one.is_plain), None)
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
                        if any(one.matches(names) for one in patterns):
                            return Match(Path(os.fsdecode(entry.path)))
                    elif any(one.may_match_below(names) for one in patterns):
                        waiting.append(names)
        except OSError:
            return Match(None, for_sure=False)  # the scan says which folder it is
    return Match(None, for_sure=False)


def no_file(root: Path, absent: Sequence[str]) -> str:
    """What is said of files that are named and not there."""
    shown = ", ".join(str(root / text) for text in absent[:SHOWN_MAX])
    more = f" and {len(absent) - SHOWN_MAX} more" if len(absent) > SHOWN_MAX else ""
    return f"there is no file {shown}{more}"


def no_match(root: Path, texts: Sequence[str]) -> str:
    """What is said of patterns that match nothing."""
    return f"no file below {root} matches {', '.join(map(repr, texts))}"
