"""The gaps of a chaos run: from a fault until trainers see that it is over.

No process; pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Gaps:
    """The lengths of one kind of gap, in seconds.

    Each waiting party has one gap at most; a new fault restarts or ends it.
    """

    name: str
    taken_s: list[float] = field(default_factory=list)
    _since: dict[int, float] = field(default_factory=dict)

    def begin(self, who: int, at: float) -> None:
        """Start the gap of ``who``."""
        self._since[who] = at

    def forget(self, who: int) -> None:
        """Drop its gap, which another event has made meaningless."""
        self._since.pop(who, None)

    def forget_all(self) -> None:
        """Drop all gaps."""
        self._since.clear()

    def end(self, who: int, at: float) -> None:
        """End its gap, if there is one."""
        since = self._since.get(who)
        if since is not None and at > since:
            del self._since[who]
            self.taken_s.append(at - since)

    def row(self) -> str:
        """Return a line of the report."""
        if not self.taken_s:
            return f"{self.name:48} {'-':>9} {'-':>9} {'-':>9} {0:>6}"
        values = [quantile(self.taken_s, share) for share in (0.5, 0.99, 1.0)]
        return f"{self.name:48} " + " ".join(f"{value:9.3f}" for value in values) + f" {len(self.taken_s):6}"
