"""Help with unknown names and missing packages. Daemon, workers and CLI; standard library only."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

SLIPS_MAX, LETTERS_PER_SLIP = 2, 3
"""Limits for a name among very many."""
NAMES_MAX = 40
"""Names that a message lists."""
DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules whose package pip knows by another name."""


def pip_command(package: str) -> str:
    """The line for a shell that installs a package, or a module's, for this interpreter.

    The Debian package and the image have no pip, so another Python's pip is needed there.
    """
    here = [sys.executable, "-m", "pip"] if find_spec("pip") else ["python3", "-m", "pip", "--python", sys.executable]
    return shlex.join([*here, "install", DISTRIBUTIONS.get(package, package)])


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of the ``known`` names that was probably meant; None if it is none of them."""
    from difflib import get_close_matches  # noqa: PLC0415  only messages need it

    by_lower = {word.lower(): word for word in known}
    found = get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def nearly(name: str, known: Iterable[str]) -> str | None:
    """The one of very many ``known`` names with a typo or two behind the first letter."""
    slips = min(SLIPS_MAX, max(1, len(name) // LETTERS_PER_SLIP))
    near = {word: _slips(name.lower(), word.lower()) for word in known if word[:1].lower() == name[:1].lower()}
    return min((word for word in near if near[word] <= slips), key=lambda word: near[word], default=None)


def _slips(one: str, other: str) -> int:
    """Number of letters inserted, left out, replaced or swapped with the next."""
    if abs(len(one) - len(other)) > SLIPS_MAX:
        return SLIPS_MAX + 1
    rows = [list(range(len(other) + 1))]
    for place, letter in enumerate(one, 1):
        row, before = [place], rows[-1]
        for column, its in enumerate(other, 1):
            slips = min(before[column] + 1, row[-1] + 1, before[column - 1] + (letter != its))
            if one[place - 2 : place] == its + other[column - 2 : column - 1] and place > 1 and column > 1:
                slips = min(slips, rows[-2][column - 2] + 1)
            row.append(slips)
        rows.append(row)
    return rows[-1][-1]


def suggestion(name: str, known: Sequence[str]) -> str:
    """Help with an unknown name: the one that was probably meant, or all ``known`` ones."""
    meant = probably_meant(name, known)
    return f"did you mean {meant}?" if meant is not None else known_here(known)


def probably_meant(name: str, known: Sequence[str]) -> str | None:
    """A similar ``known`` name, or the only one that begins with it; None if there is none."""
    begun = [word for word in known if name and word.isidentifier() and word.lower().startswith(name.lower())]
    return nearest(name, known) or (begun[0] if len(begun) == 1 else None)


def known_here(known: Sequence[str]) -> str:
    """List the ``known`` names."""
    more = f" and {len(known) - NAMES_MAX} more" if len(known) > NAMES_MAX else ""
    return f"known here: {', '.join(known[:NAMES_MAX])}{more}"
