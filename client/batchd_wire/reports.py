"""What a training loop reports of its batches, such as losses. Every process.

A report is (epoch, step, first, rows, values): of rows ``first`` to ``first + rows`` of the batch
at (``epoch``, ``step``). ``values`` are little-endian float32: one for all of these rows, or one
for each. A report of very many rows is sent as several.

A page of them, from the daemon's memory, is two sequences of bytes:

    heads    report 1 | report 2 | ...    a ``HEAD`` each, by growing ``number``
    values   report 1 | report 2 | ...    float32, as many as each head says

``run`` is a number for the name of the program that reported it, as ``rank`` of ``world_size``.
Invariant: the last report of the same rows by the same run counts, so a report that is sent again
changes nothing.
"""

from struct import Struct
from typing import TypeAlias

ReportedRows: TypeAlias = tuple[int, int, int, int, bytes]
"""(epoch, step, first, rows, values) in a ``Pull``."""

VALUE_BYTES = 4
HEAD = Struct("<qqqiiiiqq")
"""epoch, step, number, first, rows, values, run, rank, world_size."""
assert HEAD.size == 56  # noqa: PLR2004  no gaps
ROWS_AT_ONCE = 4096
"""Rows of one report on the wire."""
PULL_BYTES = 32 * 1024
"""Values in one ``Pull``, well below the daemon's limit on its length."""
PULL_REPORTS = 512
"""Reports in one ``Pull``."""
