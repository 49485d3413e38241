"""A stream whose storage is away: one row is tried again after each pause. Pure code.

    a worker says "away" --> pause 1 s --> probe --> away --> pause 2 s --> ... at most 30 s
                                             |                 over after storage_away_s: stop
                                             +--> filled: the stream goes on as before

Invariant: while a stream is away, no worker gets an order of it but the probe, which has one row.
"""

from batchd.core.fleet import Order

PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 30.0
PAUSE_GROWTH = 2.0


class Outage:
    """Begins at ``now_s`` for a worker's ``reason``; the stream stops ``patience_s`` later."""

    def __init__(self, reason: str, now_s: float, patience_s: float) -> None:
        self.reason = reason
        self.since_s = now_s
        self._patience_s = patience_s
        self._pause_s = PAUSE_FIRST_S
        self._next_s = self._after_pause(now_s)
        self._probe: Order | None = None

    def may_probe(self, now_s: float) -> bool:
        """Return whether an order may be tried now: the pause is over, and no other one is."""
        return now_s >= self._next_s and not self._is_probing

    def begin(self, probe: Order, now_s: float) -> None:
        """Note the order that is tried; if its worker dies, the next one follows after a pause."""
        self._probe = probe
        self._next_s = self._after_pause(now_s)

    def is_of(self, numbers: set[int]) -> bool:
        """Return whether the probe is one of these orders."""
        return self._probe is not None and self._probe.number in numbers

    def failed(self, reason: str, now_s: float) -> str | None:
        """Note that the probe found the storage away; return why the stream stops, if it does."""
        self.reason, self._probe = reason, None
        self._pause_s = min(PAUSE_GROWTH * self._pause_s, PAUSE_MAX_S)
        self._next_s = self._after_pause(now_s)
        if now_s < self.since_s + self._patience_s:
            return None
        return (
            f"{reason}; it was waited for during {now_s - self.since_s:.0f} s (storage_away_s = {self._patience_s:g}): "
            "when it is back, `batchd reload` starts the stream again"
        )

    @property
    def _is_probing(self) -> bool:
        """True while a worker has the probe: an order that was lost is not one of its slot."""
        return self._probe is not None and (
            self._probe.slot.fill is not None and self._probe.number in self._probe.slot.fill.under_way
        )

    def _after_pause(self, now_s: float) -> float:
        """The end of a pause that begins now: no later than the last try."""
        end_s = self.since_s + self._patience_s
        return min(now_s + self._pause_s, end_s) if now_s < end_s else now_s + self._pause_s
