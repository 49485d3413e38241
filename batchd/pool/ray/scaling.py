"""The number of worker hosts of a pool. Pure: no clock, no Ray.

    wanted workers, pending and leaving hosts, the time --follow--> number of worker hosts

The pool grows at once, but at most doubles in ``DOUBLING_S``, and not while a host is pending: then
the cluster has no room for it, so asking for more would not help. Hosts leave one at a time, after
``IDLE_S`` in which more than ``IDLE_SHARE`` of the workers were idle, because a new host has to
fetch indexes and fill its cache.

Invariant: ``min <= hosts <= max``, except for hosts beyond ``max`` that have not left yet.
"""

from dataclasses import dataclass
from math import ceil

DOUBLING_S = 15.0
IDLE_S = 300.0
IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """Minimum and maximum number of worker hosts, and the number of workers of each."""

    min: int
    max: int
    workers: int


class HostCount:
    """The number of worker hosts to have, at first ``hosts``."""

    def __init__(self, limits: Limits, hosts: int) -> None:
        self.hosts = hosts
        self._limits = limits
        self._grown_s: float | None = None
        self._idle_since_s: float | None = None

    def follow(self, wanted: int | None, pending: int, leaving: int, now_s: float) -> int:
        """Update ``hosts`` for the number of wanted workers, and return it.

        ``wanted``: None while the daemon is away. ``pending``: hosts without a running process.
        """
        limits = self._limits
        if wanted is None:
            wanted, self._idle_since_s = min(self.hosts, limits.max) * limits.workers, None
        needed = min(max(ceil(wanted / limits.workers), limits.min), limits.max)
        if needed > self.hosts and not pending:
            self._grow(needed, now_s)
        if self._is_spare(needed, wanted, now_s) and not leaving:
            self.hosts -= 1
        return self.hosts

    def _grow(self, needed: int, now_s: float) -> None:
        if self.hosts < self._limits.min:
            self.hosts = self._limits.min
        elif self._grown_s is None or now_s - self._grown_s >= DOUBLING_S:
            self.hosts = min(needed, max(1, 2 * self.hosts))
            self._grown_s = now_s

    def _is_spare(self, needed: int, wanted: int, now_s: float) -> bool:
        """True if one host may leave now."""
        if needed >= self.hosts or 1 - wanted / (self.hosts * self._limits.workers) <= IDLE_SHARE:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        is_idle = self._idle_since_s is not None and now_s - self._idle_since_s >= IDLE_S
        return is_idle or self.hosts > self._limits.max
