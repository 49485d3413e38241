"""The time of a sample, part by part: reading, decoding, each of the steps. Worker process.

    start --read--> lap --decode--> lap --resize--> lap ...

Each moment belongs to the part whose lap ends it. A lap is one look at the clock, some 0.1 us, so
all samples are measured.
"""

from time import perf_counter_ns


class Timings:
    """A stopwatch for one sample after the other; parts have names, and numbers in their order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._spent_ns: list[int] = []
        self._before_ns: list[int] = []
        self._begun_ns = self._last_ns = 0

    def part(self, name: str) -> int:
        """Add a part, and return its number; a step that is there twice has two of one name."""
        self.names.append(name)
        self._spent_ns.append(0)
        return len(self.names) - 1

    def start(self) -> None:
        """Begin here; what was before belongs to nothing."""
        self._begun_ns = self._last_ns = perf_counter_ns()
        self._before_ns = self._spent_ns.copy()

    def lap(self, part: int, now_ns: int | None = None) -> None:
        """Count all time since the last lap, or the start, for this part; ``now_ns``: its end."""
        now_ns = now_ns or perf_counter_ns()
        self._spent_ns[part] += now_ns - self._last_ns
        self._last_ns = now_ns

    def add(self, part: int, spent_ns: int) -> None:
        """Count time for this part that was measured elsewhere."""
        self._spent_ns[part] += spent_ns

    def since_start_ns(self, part: int) -> int:
        """Time spent on one part since the start."""
        return self._spent_ns[part] - self._before_ns[part]

    def take_back_ns(self) -> int:
        """All since the start belongs to no part after all; says how much that is."""
        self._spent_ns = self._before_ns
        return perf_counter_ns() - self._begun_ns

    def take_us(self) -> list[int]:
        """Time spent on each part, in us, in the order of their names. Counting restarts."""
        taken = [spent // 1000 for spent in self._spent_ns]
        self._spent_ns = [0] * len(self._spent_ns)
        return taken
