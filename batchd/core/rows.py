"""The rows of an order, as messages name them. Every process of the server.

    rows of a batch   0 1 2 3 4 5 6 7 8 9        runs   [(1, 2), (5, 1), (7, 3)]
    ordered             * *     *   * * *

Rows are row numbers of one batch, ascending: a ``range`` if they are consecutive, else a tuple. A
message has them as runs: (first row, number of rows) of each stretch without a gap.
"""

from collections.abc import Sequence
from itertools import chain

Rows = Sequence[int]
Runs = list[tuple[int, int]]


def runs_of(rows: Rows) -> Runs:
    """The runs of some rows."""
    if isinstance(rows, range):
        return [(rows.start, len(rows))]
    runs: Runs = []
    first = last = -1
    for row in rows:
        if row != last + 1 or first < 0:
            if first >= 0:
                runs.append((first, last + 1 - first))
            first = row
        last = row
    return [*runs, (first, last + 1 - first)]


def rows_of(runs: Sequence[tuple[int, int]]) -> Rows:
    """The rows of some runs."""
    if len(runs) == 1:
        first, count = runs[0]
        return range(first, first + count)
    return tuple(chain.from_iterable(range(first, first + count) for first, count in runs))


def ascending(rows: Rows) -> Rows:
    """The same rows in their order: a ``range`` if they are consecutive."""
    if isinstance(rows, range) or not rows:
        return rows
    ordered = tuple(sorted(rows))
    is_consecutive = len(ordered) == ordered[-1] + 1 - ordered[0]
    return range(ordered[0], ordered[-1] + 1) if is_consecutive else ordered


def are_runs(runs: Sequence[tuple[int, int]], rows_max: int) -> bool:
    """True if there is a row, none is named twice, and all are within a batch of ``rows_max``."""
    end = 0
    for first, count in runs:
        if first < end or count <= 0:
            return False
        end = first + count
    return 0 < end <= rows_max
