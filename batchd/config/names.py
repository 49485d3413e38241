"""Help with names that nobody has. Daemon, workers and CLI; standard library only."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

NAMES_MAX = 40
"""Names that a message lists."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of the ``known`` names that was probably meant; None where it is none of them."""
    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def suggestion(name: str, known: Sequence[str]) -> str:
    """Help with a name that is not among the ``known`` ones."""
    meant = nearest(name, known)
    return f"did you mean {meant}?" if meant is not None else known_here(known)


def known_here(known: Sequence[str]) -> str:
    """List the ``known`` names."""
    more = f" and {len(known) - NAMES_MAX} more" if len(known) > NAMES_MAX else ""
    return f"known here: {', '.join(known[:NAMES_MAX])}{more}"
