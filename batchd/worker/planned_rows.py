"""Which samples stand in the rows that a worker is ordered to fill. WORKER process.

To work out twenty of them costs as much as two hundred, since nearly all of it is the way into NumPy and back. So the rows
behind those of an order are worked out with it: the next order is mostly about them.
"""

import numpy as np
from numpy.typing import NDArray

from batchd.core.plan import Plan
from batchd_wire.position import Position

ROWS_AHEAD = 256


class PlannedRows:
    """Asks the plan, some rows ahead. Belongs to one stream of one worker."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._position = Position(-1, -1)
        self._first = 0
        self._samples: NDArray[np.int64] = np.empty(0, np.int64)

    def samples(self, position: Position, first: int, count: int) -> NDArray[np.int64]:
        """The sample indices of rows ``first`` to ``first + count`` of a position: int64 ``[count]``, not to be written to."""
        start = first - self._first
        if position != self._position or start < 0 or start + count > len(self._samples):
            rows = max(count, min(ROWS_AHEAD, self._plan.rows(position.step) - first))
            self._position, self._first, start = position, first, 0
            self._samples = self._plan.indices(position, first, rows)
        return self._samples[start : start + count]
