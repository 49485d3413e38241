"""Choose a gateway for each worker host. GATEWAY process, the first of several; pure.

    Register at the first one -> choose: this one, or another -> Moved -> Register there

The daemon reports how many links each gateway has, but a new link only a moment after its host was
sent there, and a hundred hosts may register in that moment. So hosts that were sent count, too,
until the daemon has reported as many new links, or for ``ARRIVAL_S``.

Invariant: no host is sent to a gateway that rejected it, or that is full as far as the daemon
knows.
"""

from collections import defaultdict, deque
from collections.abc import Container, Sequence

HERE = 0
"""The number of the gateway that chooses."""
ARRIVAL_S = 5.0
"""How long a worker host counts as on its way."""


class GatewayChoice:
    """The links of all gateways. A single gateway gets no numbers, so it always chooses itself."""

    def __init__(self) -> None:
        self._links: Sequence[int | None] = ()
        self._moved: defaultdict[int, deque[float]] = defaultdict(deque)
        """By gateway: when worker hosts were sent there that have not registered yet."""

    def tell(self, links: Sequence[int | None]) -> None:
        """Take note of how many links each gateway has; None for one that can admit none now."""
        before = dict(enumerate(self._links))
        for gateway, number in enumerate(links):
            moved = self._moved[gateway]
            for _ in range(min(len(moved), (number or 0) - (before.get(gateway) or 0))):
                moved.popleft()
        self._links = links

    def choose(self, here: int | None, not_at: Container[int], now: float) -> int:
        """Return the gateway with the fewest links, and count the worker host as sent there.

        ``here``: the links of this gateway, None if it is full. ``not_at``: gateways that rejected
        this host. If no gateway is left, it is this one.
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
