"""The gateway that a worker host shall come to. GATEWAY process, the first of several; pure.

    Register at the first one -> choose: this one, or another -> Moved -> Register there

The daemon tells how many links each gateway has. It hears of a new link a moment after the host was
sent there, and a hundred hosts may register in that moment. So those on their way count, too, until
the daemon has told of as many new links, or for ``ARRIVAL_S``.

Invariant: no host is sent to a gateway that can admit none, as far as the daemon knows, or that did
not admit it.
"""

from collections import defaultdict, deque
from collections.abc import Container, Sequence

HERE = 0
"""The number of the gateway that chooses."""
ARRIVAL_S = 5.0
"""How long a worker host counts as on its way."""


class Placement:
    """The links of all gateways. A single gateway is told nothing, and sends nobody away."""

    def __init__(self) -> None:
        self._links: Sequence[int | None] = ()
        self._moved: defaultdict[int, deque[float]] = defaultdict(deque)
        """By gateway: when worker hosts were sent there that have not arrived."""

    def tell(self, links: Sequence[int | None]) -> None:
        """Take note of how many links each gateway has; None for one that can admit none now."""
        before = dict(enumerate(self._links))
        for gateway, number in enumerate(links):
            moved = self._moved[gateway]
            for _ in range(min(len(moved), (number or 0) - (before.get(gateway) or 0))):
                moved.popleft()
        self._links = links

    def choose(self, here: int | None, not_at: Container[int], now: float) -> int:
        """Send the next worker host somewhere; return the gateway with the fewest links.

        ``here``: the links of this gateway, None if it can admit no more. ``not_at``: gateways that
        did not admit this host. Without any other, it is this gateway.
        """
        expected = {} if here is None else {HERE: here}
        for gateway, number in enumerate(self._links):
            if gateway != HERE and number is not None and gateway not in not_at:
                expected[gateway] = number + self._on_their_way(gateway, now)
        chosen = min(expected, key=lambda gateway: (expected[gateway], gateway), default=HERE)
        if chosen != HERE:
            self._moved[chosen].append(now)
        return chosen

    def _on_their_way(self, gateway: int, now: float) -> int:
        moved = self._moved[gateway]
        while moved and now - moved[0] > ARRIVAL_S:
            moved.popleft()
        return len(moved)
