"""Help with names that nobody has. Daemon, workers and CLI; standard library only."""

from collections.abc import Sequence
from difflib import get_close_matches

NAMES_MAX = 40
"""Names that a message lists."""


def suggestion(name: str, known: Sequence[str]) -> str:
    """Help with a name that is not among the ``known`` ones."""
    by_lower = {one.lower(): one for one in known}
    nearest = get_close_matches(name.lower(), by_lower, n=1)
    if nearest:
        return f"did you mean {by_lower[nearest[0]]}?"
    more = f" and {len(known) - NAMES_MAX} more" if len(known) > NAMES_MAX else ""
    return f"known here: {', '.join(known[:NAMES_MAX])}{more}"
