"""Help with unknown names and missing packages. Daemon, workers and CLI; standard library only."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

SLIPS_MAX, LETTERS_PER_SLIP = 2, 3
"""Limits of a typo; the first one for a name among very many."""
NAMES_MAX = 80
"""Names that a message lists."""
_SEPARATORS = re.compile(r"[-_. ]+")
DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules whose package pip knows by another name."""


def pip_command(*packages: str, python: str | None = None, has_pip: bool | None = None) -> str:
    """The line for a shell that installs packages, or modules' packages, for an interpreter.

    The default is this one. The Debian package and the image have no pip, so another Python's pip
    is needed there.
    """
    with_pip = find_spec("pip") is not None if has_pip is None else has_pip
    path = python or sys.executable
    here = [path, "-m", "pip"] if with_pip else ["python3", "-m", "pip", "--python", path]
    return shlex.join([*here, "install", *(DISTRIBUTIONS.get(package, package) for package in packages)])


def own_command() -> str:
    """How a shell here calls this program, for messages that name the next command.

    ``batchd``, if the shell finds this one by its name; else its path, such as ``.venv/bin/batchd``
    in a clone, or the interpreter with the module that it runs.
    """
    program, found = Path(sys.argv[0]).absolute(), shutil.which("batchd")
    if program.name == "__main__.py" and found is None:
        return f"{shlex.quote(sys.executable)} -m batchd"
    if program.name != "batchd" or (found is not None and program.exists() and program.samefile(found)):
        return "batchd"
    return shlex.quote(str(program.relative_to(Path.cwd()) if Path.cwd() in program.parents[1:] else program))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of the ``known`` names that was probably meant; None if it is none of them."""
    from difflib import get_close_matches  # noqa: PLC0415  only messages need it

    by_lower = {word.lower(): word for word in known}
    similar = get_close_matches(name.lower(), by_lower)
    return next((by_lower[word] for word in similar if _may_mean(name.lower(), word)), None)


def _may_mean(name: str, word: str) -> bool:
    """The floor of a suggestion: typos, a part, an abbreviation, or words in another order.

    So *coco* does not mean *concat*, though they have three letters in common.
    """
    name, word = (_SEPARATORS.sub("_", text) for text in (name, word))
    if name in word or word in name or sorted(name.split("_")) == sorted(word.split("_")):
        return True
    letters, others = name.replace("_", ""), word.replace("_", "")
    short, long = sorted((letters, others), key=len)
    if short[:1] == long[:1] and len(short) >= LETTERS_PER_SLIP and _abbreviates(short, long):
        return True
    return _slips(short, long) <= max(1, len(short) // LETTERS_PER_SLIP)


def _abbreviates(letters: str, word: str) -> bool:
    """True if all letters are in the word, in their order."""
    rest = iter(word)
    return all(letter in rest for letter in letters)


def nearly(name: str, known: Iterable[str]) -> str | None:
    """The one of very many ``known`` names with a typo or two behind the first letter."""
    slips = min(SLIPS_MAX, max(1, len(name) // LETTERS_PER_SLIP))
    similar = (word for word in known if word[:1].lower() == name[:1].lower() and abs(len(word) - len(name)) <= slips)
    near = {word: _slips(name.lower(), word.lower()) for word in similar}
    return min((word for word in near if near[word] <= slips), key=lambda word: near[word], default=None)


def _slips(one: str, other: str) -> int:
    """Number of letters inserted, left out, replaced or swapped with the next."""
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
