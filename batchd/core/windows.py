"""How many orders worker hosts may have at a time, so that rows do not queue on the network.

    rows are soon there after their worker was done --> one order more
    they are late, longer than ``LATE_S`` --> fewer

Where workers fill rows faster than the network carries them, rows wait in front of it. Without a
limit, each order would in time take longer than a trainer may wait, and be withdrawn; its rows
would be sent all the same, for nothing. So each link has a window: how many orders it may have
follows the delay of its rows, as for a connection of TCP. A window may be less than one order: then
the link may have one, but all links together have no more than the sum of all windows.

No clock of a worker host is compared with the daemon's: when a worker was done follows from when it
was given its orders, and from how long it says that it worked for each. Pure code.

Invariant: where no link has an order, each may be given one.
"""

from dataclasses import dataclass, field
from math import ceil

BEGIN_ORDERS = 0.25
"""For each new worker: a thousand may come at once, and nothing is known of the network."""
GROWTH_FIRST = 0.5
"""A window grows by that for each order whose rows came soon, until some came late;"""
GROWTH = 0.1
"""and by that afterwards."""
SHRINKING = 0.7
"""What is left of a window after rows that came late."""
LATE_S = 0.25
"""Rows are late that long after their worker was done. Trainers wait four times as long."""
LATE_TIMES = 2.0
"""But not before that many times the shortest way of as many rows: large ones take their time."""


@dataclass(slots=True, eq=False)
class Window:
    """How many orders the ``workers`` of one link may have. ``orders``: that they have."""

    limit: float = 0.0
    orders: int = 0
    orders_max: int = 0
    """As many as the workers can have by their kind."""
    workers: dict[int, None] = field(default_factory=dict)
    """By number; a dictionary keeps their order."""
    was_full: bool = True
    """Whether it was when its workers were last filed (``fleet``)."""
    growth: float = GROWTH_FIRST
    way_s: float = 0.0
    """How long the rows were on their way that came last."""
    least_row_s: float = float("inf")
    """The shortest way so far, for each row."""
    lowered_s: float = float("-inf")
    """When it shrank: orders from before that say nothing new."""

    @property
    def is_full(self) -> bool:
        """Whether the workers take no more orders."""
        return self.orders >= self.limit

    @property
    def is_wide(self) -> bool:
        """Whether the workers may have as many orders as they can: no row waits for the network."""
        return self.limit >= self.orders_max


class Windows:
    """The windows of all links, and their sums."""

    def __init__(self) -> None:
        self.by_link: dict[int, Window] = {}
        self.limit = 0.0
        self.orders = 0
        self.workers = 0

    @property
    def left(self) -> int:
        """How many orders all links together may still be given."""
        return max(0, ceil(self.limit) - self.orders)

    def join(self, link: int, worker: int, orders_max: int) -> Window:
        """Count a new worker, which can have ``orders_max``. Paired with ``leave``."""
        window = self.by_link.setdefault(link, Window())
        window.workers[worker] = None
        window.orders_max += orders_max
        self.workers += 1
        self.set_limit(window, window.limit + BEGIN_ORDERS)
        return window

    def leave(self, link: int, worker: int, orders_max: int, orders: int) -> None:
        """A worker is gone, with its ``orders``."""
        window = self.by_link[link]
        self.count(window, -orders)
        del window.workers[worker]
        window.orders_max -= orders_max
        self.workers -= 1
        self.set_limit(window, min(window.limit, window.orders_max))
        if not window.workers:
            del self.by_link[link]

    def count(self, window: Window, change: int) -> None:
        """Note that the workers of a link have more orders, or fewer."""
        window.orders += change
        self.orders += change

    def arrived(self, window: Window, rows: int, way_s: float, given_s: float, now_s: float) -> None:
        """Note how long the rows of an order were on their way; it is still counted."""
        window.way_s = way_s
        window.least_row_s = min(window.least_row_s, way_s / rows)
        if way_s > max(LATE_S, LATE_TIMES * window.least_row_s * rows):
            self.late(window, given_s, now_s)
        elif window.orders >= window.limit or self.orders >= self.limit:  # only if it is full
            self.set_limit(window, min(window.orders_max, window.limit + window.growth))

    def late(self, window: Window, given_s: float, now_s: float) -> None:
        """Note late rows of an order, which was given at ``given_s`` and is still counted."""
        if given_s >= window.lowered_s:
            window.lowered_s, window.growth = now_s, GROWTH
            self.set_limit(window, min(window.limit, window.orders) * SHRINKING)

    def set_limit(self, window: Window, limit: float) -> None:
        """Change a window. Its workers have to be filed again."""
        self.limit += limit - window.limit
        window.limit = limit
