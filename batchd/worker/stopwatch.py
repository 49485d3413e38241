"""What a worker says of its own work: where its time went, and which samples took much longer than the others. WORKER process.

Invariant: all times of a chunk are of the same rows, and what is reported was not reported before.
"""

from collections.abc import Mapping
from heapq import nlargest
from operator import itemgetter
from time import perf_counter_ns, thread_time_ns

from batchd.config.values import Value
from batchd.pipeline.laps import Laps
from batchd_wire.orders import SLOW_LISTED_MAX, Work

SLOW_FACTOR = 4
"""So many times as long as usual is slow."""
USUAL_STEP = 1.02
"""How far each sample moves what is usual, towards itself: so half of them are above it, which makes it the median."""


class Stopwatch:
    """Measures one sample after the other, of one stream. ``begin`` -> (``begin_sample`` -> ``end_sample``)* -> ``work``."""

    def __init__(self) -> None:
        self.laps = Laps()
        self._reading = self.laps.part("read")
        self._usual_ns = 0.0
        self.begin()

    def begin(self) -> None:
        """A chunk begins."""
        self._begun_ns, self._begun_cpu_ns = perf_counter_ns(), thread_time_ns()
        self._waited_ns = 0
        self._read_bytes = 0
        self._slow_rows = self._slow_ns = 0
        self._slow: list[tuple[int, str, int]] = []

    def waited(self) -> None:
        """All since the chunk began was waiting for a server of files: no work, and chunks are cut by how much work they are."""
        self._waited_ns = perf_counter_ns() - self._begun_ns

    def begin_sample(self) -> None:
        """A sample begins."""
        self._sample_cpu_ns = thread_time_ns()
        self._read_before_ns = self.laps.spent_ns(self._reading)
        self.laps.start()

    def is_read(self, values: Mapping[str, Value]) -> None:
        """The sample's values are there."""
        self._read_bytes += sum(value.nbytes for value in values.values() if isinstance(value, memoryview))
        self.laps.lap(self._reading)

    def end_sample(self) -> int | None:
        """A sample is done; says how many ns it took if that is much more than usual.

        What counts is its CPU time, and the time in which it was read: so nothing is slow because others had the core.
        """
        taken_ns = thread_time_ns() - self._sample_cpu_ns + self.laps.spent_ns(self._reading) - self._read_before_ns
        usual_ns = self._usual_ns or taken_ns
        self._usual_ns = usual_ns * USUAL_STEP if taken_ns > usual_ns else usual_ns / USUAL_STEP
        return taken_ns if taken_ns > SLOW_FACTOR * usual_ns else None

    def note_slow(self, sample: int, name: str, taken_ns: int) -> None:
        """Count a slow sample, and have it listed if it is among the slowest of its chunk."""
        self._slow_rows += 1
        self._slow_ns += taken_ns
        self._slow = nlargest(SLOW_LISTED_MAX, [*self._slow, (sample, name, taken_ns // 1000)], key=itemgetter(2))

    def work(self) -> Work:
        """Sum up the chunk, which ends here."""
        return Work(
            busy_us=(perf_counter_ns() - self._begun_ns - self._waited_ns) // 1000,
            waited_us=self._waited_ns // 1000,
            cpu_us=(thread_time_ns() - self._begun_cpu_ns) // 1000,
            parts_us=self.laps.take_us(),
            read_bytes=self._read_bytes,
            usual_us=int(self._usual_ns) // 1000,
            slow_rows=self._slow_rows,
            slow_us=self._slow_ns // 1000,
            slow=self._slow,
        )
