"""A worker's measurements: where its time went, and which samples were slow. WORKER process.

Invariant: all times of a chunk are of the same rows, and each is reported once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from pathlib import Path
from time import perf_counter_ns, thread_time_ns

from batchd.core.work import Work
from batchd.data.pipeline.image.jpeg_box import FileMade
from batchd.data.pipeline.stages import Timings
from batchd.data.samples.kept_files import FilePart
from batchd.data.samples.values import Value
from batchd.worker.messages import SLOW_LISTED_MAX
from batchd_wire.wording import BAD_PART, READ_PART

REPORT_AFTER_S = 0.01
"""A worker reports what it has filled before it works longer than this on more."""
SLOW_FACTOR = 4
"""Multiple of the usual time from which a sample is slow."""
USUAL_STEP = 1.02
"""Factor by which each sample moves the usual time towards its own: so it is the median."""


SCHEDULED = Path("/proc/thread-self/schedstat")
"""ns on a CPU, ns ready without a CPU, how often it got one: of the thread that opened it."""
_SCHEDULED_BYTES_MAX = 128
_NOT_COUNTED = ["0", "0", "0"]
"""Content of the file if the kernel could count and does not."""


class RunQueue:
    """Time for which this thread was ready to run and had no CPU; a reading takes a microsecond.

    Only the kernel can tell that from sleeping and waiting for a file.
    """

    def __init__(self, place: Path = SCHEDULED) -> None:
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without CONFIG_SCHED_INFO
            return
        if os.pread(self._descriptor, _SCHEDULED_BYTES_MAX, 0).decode().split() == _NOT_COUNTED:
            self.close()

    def waited_ns(self) -> int | None:
        """Total ns since the thread began; None if the kernel does not count."""
        if self._descriptor is None:
            return None
        return int(os.pread(self._descriptor, _SCHEDULED_BYTES_MAX, 0).split()[1])

    def close(self) -> None:
        """Close the file; later readings are None."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Stopwatch:
    """Measures the samples of one stream, including bad ones and their substitutes.

        begin -> (begin_sample -> is_read -> end_sample, or waste_sample at any time)* -> work

    ``cpu_wait_ns`` returns how long this thread has been ready without a CPU; None if unknown.
    """

    def __init__(self, cpu_wait_ns: Callable[[], int | None] = lambda: None) -> None:
        self.timings = Timings()
        self._cpu_wait_ns = cpu_wait_ns
        self.reading = self.timings.part(READ_PART)
        self._usual_ns = 0.0
        self._planned_ns = 0
        self.begin()

    @property
    def parts(self) -> list[str]:
        """Names of the timed parts of samples."""
        return [*self.timings.names, BAD_PART]

    def begin(self) -> None:
        """A chunk begins, or the first of some."""
        self._begun_ns, self._begun_cpu_ns = perf_counter_ns(), thread_time_ns()
        self._begun_cpu_wait_ns = self._cpu_wait_ns()
        self._cpu_before_ns = self._begun_cpu_ns
        self._waited_ns = self._read_cpu_ns = self._bad_ns = 0
        self._read_bytes = self._cache_hits = self._cache_misses = self._shared = 0
        self._rows_at_once = self._rows_read_ns = 0
        self._slow_rows = self._slow_ns = 0
        self._slow: list[tuple[int, str, int]] = []

    def left_s(self, rows: int) -> float:
        """Seconds until a report is due, after so many more rows; negative if they are too many."""
        due_ns = self._begun_ns + REPORT_AFTER_S * 1e9
        return (due_ns - rows * self._usual_ns - perf_counter_ns()) / 1e9

    def waited(self, since_ns: int) -> None:
        """Count the time since then as waiting for a file server, which is no work."""
        self._waited_ns += perf_counter_ns() - since_ns
        self._cpu_before_ns = thread_time_ns()

    def begin_sample(self) -> None:
        """A sample begins."""
        self.timings.start()

    def is_read(self, values: Mapping[str, Value], *, from_cache: bool | None = None) -> None:
        """The sample's values are there. ``from_cache`` is None where there is no cache."""
        self._cache_hits += from_cache is True
        self._cache_misses += from_cache is False
        if not from_cache:
            several = (value if isinstance(value, list) else (value,) for value in values.values())
            self._read_bytes += sum(
                value.read_bytes if isinstance(value, FilePart) else value.nbytes
                for value in chain.from_iterable(several)
                if isinstance(value, memoryview | FilePart)
            )
        self.timings.lap(self.reading)
        cpu_ns = thread_time_ns()  # since the sample before this one: what is between two is little
        self._read_cpu_ns += min(cpu_ns - self._cpu_before_ns, self.timings.since_start_ns(self.reading))
        self._cpu_before_ns = cpu_ns

    def is_shared(self) -> None:
        """The sample's pixels were those that another stream had decoded."""
        self._shared += 1

    def rows_done(self, count: int, *, from_cache: bool = False) -> None:
        """So many samples were made at once, since ``begin_sample``; none of them is called slow.

        ``work`` reads their CPU time, since reading it takes as long as some samples.
        """
        self._rows_at_once += count
        self._cache_hits += count * from_cache
        self._rows_read_ns += self.timings.since_start_ns(self.reading)

    def rows_planned(self) -> None:
        """Some samples are planned, since the last one ended, and not begun yet."""
        self._cpu_before_ns, before_ns = thread_time_ns(), self._cpu_before_ns
        self._planned_ns = self._cpu_before_ns - before_ns

    def files_made(self, made: Sequence[FileMade]) -> list[tuple[int, int]]:
        """Count the samples of ``rows_planned``, made in one call; returns slow ones.

        These are (place, ns), as of ``end_sample``.
        """
        slow = []
        all_read_ns = 0
        planned_ns = self._planned_ns // len(made)
        for place, (is_made, file_bytes, read_ns, read_cpu_ns, decoded_ns, resampled_ns, cpu_ns) in enumerate(made):
            if not is_made:
                self._bad_ns += read_ns + decoded_ns + resampled_ns
                continue
            all_read_ns += read_ns
            self._read_cpu_ns += min(read_cpu_ns, read_ns)
            self._read_bytes += file_bytes
            taken_ns = planned_ns + read_ns + cpu_ns
            if self._is_slow(taken_ns):
                slow.append((place, taken_ns))
        self.timings.add(self.reading, all_read_ns)
        self._cpu_before_ns = thread_time_ns()
        return slow

    def end_sample(self) -> int | None:
        """A sample is done; says how many ns it took if that is much more than usual.

        Only CPU time counts once it is read: nothing is slow because others had the core.
        """
        cpu_ns = thread_time_ns()
        taken_ns = self.timings.since_start_ns(self.reading) + cpu_ns - self._cpu_before_ns
        self._cpu_before_ns = cpu_ns
        return taken_ns if self._is_slow(taken_ns) else None

    def _is_slow(self, taken_ns: int) -> bool:
        """True if a sample took much more than usual; it moves the usual time."""
        usual_ns = self._usual_ns or taken_ns
        self._usual_ns = usual_ns * USUAL_STEP if taken_ns > usual_ns else usual_ns / USUAL_STEP
        return taken_ns > SLOW_FACTOR * usual_ns

    def waste_sample(self) -> None:
        """End a bad sample: all of its time counts as that of bad samples."""
        self._bad_ns += self.timings.take_back_ns()
        self._cpu_before_ns = thread_time_ns()

    def note_slow(self, sample: int, name: str, taken_ns: int) -> None:
        """Count a slow sample, and have it listed if it is among the slowest of its chunk."""
        self._slow_rows += 1
        self._slow_ns += taken_ns
        self._slow = nlargest(SLOW_LISTED_MAX, [*self._slow, (sample, name, taken_ns // 1000)], key=itemgetter(2))

    def work(self) -> Work:
        """Sum up the chunks since ``begin``; the last one ends here."""
        cpu_wait_us, now_ns = None, self._cpu_wait_ns()
        if now_ns is not None and self._begun_cpu_wait_ns is not None:
            cpu_wait_us = (now_ns - self._begun_cpu_wait_ns) // 1000
        cpu_ns = thread_time_ns()
        if self._rows_at_once:
            rows_cpu_ns = cpu_ns - self._cpu_before_ns
            self._read_cpu_ns += min(rows_cpu_ns, self._rows_read_ns)
            self._usual_ns = rows_cpu_ns / self._rows_at_once
        return Work(
            busy_us=(perf_counter_ns() - self._begun_ns - self._waited_ns) // 1000,
            waited_us=self._waited_ns // 1000,
            cpu_us=(cpu_ns - self._begun_cpu_ns) // 1000,
            cpu_wait_us=cpu_wait_us,
            read_cpu_us=self._read_cpu_ns // 1000,
            parts_us=[*self.timings.take_us(), self._bad_ns // 1000],
            read_bytes=self._read_bytes,
            usual_us=int(self._usual_ns) // 1000,
            slow_rows=self._slow_rows,
            slow_us=self._slow_ns // 1000,
            slow=self._slow,
            cache_hits=self._cache_hits,
            cache_misses=self._cache_misses,
            shared=self._shared,
        )
