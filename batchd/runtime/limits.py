"""Limits for one peer: sessions, handshakes per second, connections, log lines. DAEMON process.

    a host's bucket: BURST tokens --each handshake takes one--> none left: try again later
                                  <--PER_S come back each second, up to BURST--

An IPv6 host is its network of 64 bits, since a host that has one address there has them all. A peer
that sends invalid messages, or connects and leaves, as fast as it can must not fill the disk with
log lines: ``OncePerMinute`` and ``LinesPerMinute`` bound these. Who a peer is may be its own choice
(a process, an address), so each kind of line has a limit over all peers, too.

Invariant: the table of buckets never has more than ``HOSTS_MAX`` hosts. A host that is forgotten
was among those that had taken the fewest tokens.
Invariant: in a minute there are at most ``together_max`` lines of a kind, from all peers.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
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
QUESTIONS_PER_TICK = 10
"""Questions of one session, such as for the status, in half a second: their answers are long.
Further ones over TCP are refused; those of this host wait."""
PENDING_TICKS = 20
"""Half seconds that a connection may be pending (ZeroMQ gives a handshake 5 s), in ticks of the
loop: while the machine is paused no peer can greet."""
PENDING_MIN = 256
"""Connections that may be pending, however few sessions are allowed: a whole job may start."""
PERIOD_S = 60.0
SUBJECTS_MAX = 256
LINES_TOGETHER = 480
ONCE_TOGETHER = 20
"""Log lines of one kind per minute about all peers: where each may have many, and one."""
SESSION_LINES_PER_MINUTE = 240
"""Log lines about the trainers of one user or host: hundreds may connect, but not repeatedly."""
_HOST_BITS = 64
_SITE_BITS = 48
"""Of the network that a provider gives to one customer: 65,536 times that of a host."""
_LOOPBACK = IPv4Network("127.0.0.0/8")

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


def peer_site(address: str) -> str:
    """Return what counts as one peer in the log, which needs less care than one that is kept out.

    That is the site of an IPv6 ``peer_network``, and this host with all its loopback addresses.
    """
    network = peer_network(address)
    try:
        parsed = ip_network(network)
    except ValueError:
        return network
    if isinstance(parsed, IPv6Network):
        return str(parsed.supernet(new_prefix=_SITE_BITS))
    return str(_LOOPBACK) if parsed.subnet_of(_LOOPBACK) else network


def printable(text: str, characters_max: int = SHOWN_CHARACTERS_MAX) -> str:
    """A peer's text, fit to be shown: short, and without anything that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in text[:characters_max])


class LinesPerMinute:
    """Limits log lines per minute: of a kind about one subject, and of a kind about all of them.

    A warning says what is left out, and another one how much that was, once its minute is over.
    ``warns``: also where one subject has had its lines.
    """

    def __init__(self, lines_max: int, together_max: int = LINES_TOGETHER, *, warns: bool = True) -> None:
        self._lines_max = lines_max
        self._together_max = together_max
        self._warns = warns
        self._by_subject: dict[tuple[str, str], tuple[float, int]] = {}
        """By kind and subject: when its minute began, and the lines since; the oldest is first."""
        self._together: dict[str, tuple[float, int]] = {}
        """By kind: the same, of all subjects."""

    def allows(self, kind: str, subject: str = "") -> bool:
        """True if another line of a kind may be logged in this minute. Kinds are few: our words."""
        began_s, lines = self._minute(self._by_subject.pop((kind, subject), None))
        if len(self._by_subject) >= SUBJECTS_MAX:
            del self._by_subject[next(iter(self._by_subject))]
        self._by_subject[kind, subject] = began_s, lines + 1
        if lines >= self._lines_max:
            if lines == self._lines_max and self._warns:
                self._warn(subject or kind, lines_per_minute=self._lines_max)
            return False
        before = self._together.get(kind)
        began_s, lines = self._minute(before)
        self._together[kind] = began_s, lines + 1
        if before is not None and before[0] != began_s and (more := before[1] - self._together_max) > 0:
            self._warn(f"{kind}, of all together", left_out=more)
        if lines == self._together_max:
            self._warn(f"{kind}, of all together", lines_per_minute=lines)
        return lines < self._together_max

    @staticmethod
    def _minute(before: tuple[float, int] | None) -> tuple[float, int]:
        now = monotonic()
        return before if before is not None and now - before[0] < PERIOD_S else (now, 0)

    @staticmethod
    def _warn(about: str, **number: int) -> None:
        _log.warning("log lines left out", about=about, **number)


class OncePerMinute(LinesPerMinute):
    """Limits lines of each kind to one a minute for each subject, and ``ONCE_TOGETHER`` for all."""

    def __init__(self) -> None:
        super().__init__(1, ONCE_TOGETHER, warns=False)


class CountedPerMinute(OncePerMinute):
    """The same, and each line has the number of those since the last one that were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._left_out = 0

    def more(self, kind: str, subject: str) -> dict[str, int] | None:
        """Return what the line says besides; None if it may not be logged in this minute."""
        if not self.allows(kind, subject):
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}
