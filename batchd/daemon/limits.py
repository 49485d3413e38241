"""Limits for one peer: sessions, handshakes per second, connections, log lines. DAEMON process.

    a host's bucket: BURST tokens --each handshake takes one--> none left: try again later
                                  <--PER_S come back each second, up to BURST--

An IPv6 host is its network of 64 bits, since a host that has one address there has them all. A peer
that sends invalid messages, or connects and leaves, as fast as it can must not fill the disk with
log lines: ``OncePerMinute`` and ``LinesPerMinute`` bound these.

Invariant: the table of buckets never has more than ``HOSTS_MAX`` hosts. A host that is forgotten
was among those that had taken the fewest tokens.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network, ip_address
from time import monotonic
from typing import TypeVar

import structlog

from batchd_wire.record import frozen
from batchd_wire.wording import counted

BURST = 1_024
"""Handshakes of one host at once: a crowd of 256 trainers, several times over."""
PER_S = 32.0
HOSTS_MAX = 4_096
SHOWN_CHARACTERS_MAX = 64
MESSAGE_BYTES_MAX = 64 * 1024
"""Longest message from a trainer that is read."""
UNREAD_MAX = 4_096
"""Unread messages after which a local trainer is disconnected; a correct one stays far below."""
PENDING_TICKS = 20
"""Half seconds that a connection may be pending (ZeroMQ gives a handshake 5 s), in ticks of the
loop: while the machine is paused no peer can greet."""
PENDING_MIN = 256
"""Connections that may be pending, however few sessions are allowed: a whole job may start."""
PERIOD_S = 60.0
KINDS_MAX = 256
_HOST_BITS = 64

_log = structlog.get_logger()

K = TypeVar("K", bound=Hashable)


@frozen
class SessionLimits:
    """Sessions that one door admits: in total, and over TCP per key (per host without keys)."""

    sessions_max: int
    sessions_per_peer: int

    @property
    def pending_max(self) -> int:
        """Connections that are no sessions."""
        return max(PENDING_MIN, self.sessions_max)


def oldest_of_crowds(owners: Mapping[K, Hashable], count: int) -> list[K]:
    """Return ``count`` keys of ``owners``, which are ordered by age: of large crowds the oldest."""
    if count <= 0:
        return []
    crowds: dict[Hashable, deque[K]] = {}
    for one, owner in owners.items():
        crowds.setdefault(owner, deque()).append(one)
    return [max(crowds.values(), key=len).popleft() for _ in range(min(count, len(owners)))]


class HandshakeRate:
    """A bucket of tokens for each host. The caller has the clock."""

    def __init__(self, burst: int = BURST, per_s: float = PER_S) -> None:
        self.refused = 0
        self._burst = burst
        self._per_s = per_s
        self._left: dict[str, tuple[float, float]] = {}
        """By host: its tokens, and when they were counted. An absent host has all of them."""

    def __len__(self) -> int:
        return len(self._left)

    def admit(self, host: str, now: float) -> bool:
        """Take a token of the host; false, and counted, where it has none."""
        left = self._tokens(host, now)
        if left < 1:
            self.refused += 1
            return False
        if host not in self._left and len(self._left) >= HOSTS_MAX:
            self._forget_some(now)
        self._left[host] = (left - 1, now)
        return True

    def complaint(self, host: str) -> str:
        """Message for a host without tokens, and for the log."""
        often = "once" if self._per_s == 1 else f"{self._per_s:g} times"
        return (
            f"{host} connects more often than {often} a second, after {self._burst} at once; "
            f"{counted(self.refused, 'handshake')} put off until now"
        )

    def _tokens(self, host: str, now: float) -> float:
        left, counted = self._left.get(host, (float(self._burst), now))
        return min(float(self._burst), left + max(0.0, now - counted) * self._per_s)

    def _forget_some(self, now: float) -> None:
        """Forget hosts that have all their tokens, and the least active quarter of the table."""
        by_tokens = sorted(self._left, key=lambda host: self._tokens(host, now))
        kept = by_tokens[: HOSTS_MAX * 3 // 4]
        self._left = {host: self._left[host] for host in kept if self._tokens(host, now) < self._burst}


@lru_cache(maxsize=HOSTS_MAX)
def peer_network(address: str) -> str:
    """Return what counts as one peer: an IPv4 address, an IPv6 network, or other text, cut."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:SHOWN_CHARACTERS_MAX]
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Network((parsed, _HOST_BITS), strict=False))


def printable(text: str, characters_max: int = SHOWN_CHARACTERS_MAX) -> str:
    """A peer's text, fit to be shown: short, and without anything that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text[:characters_max])


class LinesPerMinute:
    """Limits log lines per minute about each peer or stream; a warning says if any are left out."""

    def __init__(self, lines_max: int, *, warns: bool = True) -> None:
        self._lines_max = lines_max
        self._warns = warns
        self._said: dict[str, tuple[float, int]] = {}
        """By subject: when its minute began, and how many lines it has had since."""

    def allows(self, about: str) -> bool:
        """True if another line about it may be logged in this minute."""
        now = monotonic()
        began_s, lines = self._said.get(about, (now, 0))
        if now - began_s >= PERIOD_S:
            began_s, lines = now, 0
        if about not in self._said and len(self._said) >= KINDS_MAX:
            self._said.clear()
        self._said[about] = (began_s, lines + 1)
        if lines == self._lines_max and self._warns:
            _log.warning("log lines left out", about=about, lines_per_minute=self._lines_max)
        return lines < self._lines_max


class OncePerMinute(LinesPerMinute):
    """Limits lines of each kind to one a minute; the others are left out in silence."""

    def __init__(self) -> None:
        super().__init__(1, warns=False)
