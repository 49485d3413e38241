"""What trainers report of their batches, kept for `batchd blame`, page and metrics. DAEMON process.

    Pull.reports --> checked against the plan --> the last ones of each stream --> pages
                                              +-> totals, for the status

A report replaces the earlier one of the same rows by the same run, and an equal one changes
nothing: a trainer sends its last reports again to each new session. A run is all sessions of one
name: the ranks of a job, before and after their reconnects.

Reports take the loop's time, so a trainer may report what its subscription was granted, or what
lies before its beginning, of a few epochs at a time: with a budget, the rows of a batch are known
only after a look at the order of its epoch.

Invariant: a stream's reports take at most its ``report_memory``, and are at most ``REPORTS_MAX``;
of another size, or about rows that its epochs do not have, none is kept.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import dropwhile, islice
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from batchd.core.course import Course
from batchd.core.plan import Plan
from batchd_wire.position import Position
from batchd_wire.reports import HEAD, VALUE_BYTES, ReportedRows
from batchd_wire.status import REPORT_BOUNDS, ReportPage, ReportStatistics

REPORTS_MAX = 100_000
REPORT_BYTES = 400
"""Memory of a report beside its values: two entries of dictionaries, and their keys."""
RUNS_MAX = 64
"""Names of runs with reports of one stream; a further one takes the place of the oldest."""
PAGE_REPORTS = 4_096
PAGE_BYTES = 512 * 1024
"""Of values; a message of the daemon has 1 MiB at most."""
EPOCHS_MAX = 1 << 40
EARLIER_EPOCHS_MAX = 8
"""Epochs before its beginning that a trainer may name in one call of ``granted_part``."""
FORGOTTEN_AT_ONCE = 1_000
"""Reports of a run whose name was taken by another one."""
_KEY = Struct("<qqii")


def granted_part(course: Course, granted: int, reports: Iterable[ReportedRows]) -> list[ReportedRows]:
    """Return the reports that a trainer may make which was ``granted`` batches of its course."""
    allowed, earlier = [], set()
    for report in reports:
        position = Position(*report[:2])
        if course.is_before(position):
            earlier.add(position.epoch)
            if len(earlier) > EARLIER_EPOCHS_MAX:
                earlier.discard(position.epoch)
                continue
        else:
            sequence = course.sequence_of(position)
            if sequence is None or sequence >= granted:
                continue
        allowed.append(report)
    return allowed


class StreamReports:
    """See the module. ``memory_bytes``: the limit of one stream."""

    def __init__(self, plan: Plan, *, is_live: bool, memory_bytes: int) -> None:
        self._plan, self._is_live, self._memory_bytes = plan, is_live, memory_bytes
        self._kept: OrderedDict[int, tuple[bytes, bytes, bytes, int]] = OrderedDict()
        """By number, the oldest first: key, head, values, and the number of the run."""
        self._numbers: dict[bytes, int] = {}
        """By key: rows and run."""
        self._runs: dict[str, int] = {}
        self._gone: dict[int, None] = {}
        """Numbers of reports whose run has no name any more, to be forgotten, the oldest first."""
        self._bytes = self._last = self._last_run = 0
        self._received = self._refused = self._not_finite = self._values = 0
        self._sum = 0.0
        self._buckets = np.zeros(len(REPORT_BOUNDS) + 1, np.int64)

    def add(self, run: str, rank: int, world_size: int, reports: Sequence[ReportedRows]) -> str:
        """Keep the reports of a message. Returns why some are refused; "" if none is."""
        for number in list(islice(self._gone, FORGOTTEN_AT_ONCE)):
            self._forget(number)
        reason, values_kept = "", []
        for (epoch, step, first, rows, values), there in zip(reports, self._rows(reports).tolist(), strict=True):
            problem = _problem(Position(epoch, step), first, rows, there, len(values))
            if problem:
                self.refuse(1)
                reason = reason or problem
                continue
            number = self._runs.get(run) or self._add_run(run)
            if self._keep(_KEY.pack(epoch, step, first, number), (rows, number, rank, world_size), values):
                values_kept.append(values)
        self._count(values_kept)
        return reason

    def refuse(self, count: int) -> None:
        """Count reports that were refused."""
        self._refused += count

    def page(self, after: int) -> ReportPage:
        """The first reports with a number above ``after``, in the order of their numbers."""
        heads: list[bytes] = []
        values: list[bytes] = []
        left = PAGE_BYTES
        number = after
        for number in dropwhile(after.__ge__, self._kept):
            _key, head, found, _run = self._kept[number]
            if number not in self._gone:
                heads.append(head)
                values.append(found)
                left -= len(found)
            if len(heads) == PAGE_REPORTS or left <= 0:
                break
        return ReportPage(tuple(self._runs), tuple(self._runs.values()), b"".join(heads), b"".join(values), number)

    def last(self, count: int) -> ReportPage:
        """The last reports, at most ``PAGE_REPORTS``, each with the mean of its values alone."""
        there = (kept for number, kept in reversed(self._kept.items()) if number not in self._gone)
        kept = list(islice(there, min(count, PAGE_REPORTS)))[::-1]
        with np.errstate(invalid="ignore"):
            means = [np.frombuffer(values, "<f4").mean(dtype=np.float64) for _key, _head, values, _run in kept]
        heads = b"".join(head for _key, head, _values, _run in kept)
        names = tuple(self._runs), tuple(self._runs.values())
        return ReportPage(*names, heads, np.array(means, "<f4").tobytes(), self._last)

    def statistics(self) -> ReportStatistics | None:
        """The totals since the start; None before the first report."""
        if not self._received and not self._refused:
            return None
        buckets = tuple(self._buckets.tolist())
        return ReportStatistics(
            len(self._kept) - len(self._gone),
            self._received,
            self._refused,
            self._not_finite,
            self._values,
            self._sum,
            buckets,
        )

    def _rows(self, reports: Sequence[ReportedRows]) -> NDArray[np.int64]:
        """The rows at the position of each report: int64 ``[reports]``; 0 if there is none."""
        epochs = np.array([report[0] for report in reports], np.int64)
        steps = np.array([report[1] for report in reports], np.int64)
        there = np.zeros(len(reports), np.int64)
        known = (epochs < EPOCHS_MAX) & (steps < (EPOCHS_MAX if self._is_live else self._plan.steps))
        there[known] = self._plan.batch_size if self._is_live else self._plan.rows_of(epochs[known], steps[known])
        return there

    def _add_run(self, run: str) -> int:
        """Number a run, in place of the oldest one if there are too many."""
        if len(self._runs) == RUNS_MAX:
            oldest = self._runs.pop(next(iter(self._runs)))
            self._gone.update((number, None) for number, kept in self._kept.items() if kept[3] == oldest)
        self._last_run += 1
        self._runs[run] = self._last_run
        return self._last_run

    def _keep(self, key: bytes, of: tuple[int, int, int, int], values: bytes) -> bool:
        """Keep a report in place of an earlier one; False if that was the same."""
        before = self._numbers.get(key)
        if before is not None:
            if self._kept[before][2] == values:
                return False
            self._forget(before)
        self._last += 1
        rows, run, rank, world_size = of
        epoch, step, first, _run = _KEY.unpack(key)
        count = len(values) // VALUE_BYTES
        head = HEAD.pack(epoch, step, self._last, first, rows, count, run, rank, world_size)
        self._kept[self._last] = key, head, values, run
        self._numbers[key] = self._last
        self._bytes += REPORT_BYTES + len(values)
        while len(self._kept) > REPORTS_MAX or self._bytes > self._memory_bytes:
            self._forget(next(iter(self._kept)))
        return True

    def _count(self, reports: list[bytes]) -> None:
        numbers = np.frombuffer(b"".join(reports), "<f4")
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        self._received += len(reports)
        self._not_finite += numbers.size - finite.size
        self._values += finite.size
        self._sum += float(finite.sum())
        np.add.at(self._buckets, np.searchsorted(REPORT_BOUNDS, finite), 1)

    def _forget(self, number: int) -> None:
        key, _head, values, _run = self._kept.pop(number)
        del self._numbers[key]
        self._gone.pop(number, None)
        self._bytes -= REPORT_BYTES + len(values)


def _problem(position: Position, first: int, rows: int, there: int, value_bytes: int) -> str:
    if not 0 < rows <= there - first:
        return f"the stream has no rows {first} to {first + rows} at epoch {position.epoch}, step {position.step}"
    if value_bytes not in {VALUE_BYTES, VALUE_BYTES * rows}:
        return f"{value_bytes} bytes of values for {rows} rows"
    return ""
