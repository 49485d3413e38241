"""What trainers report of their batches, kept for `batchd blame`, page and metrics. DAEMON process.

    Pull.reports --> checked against the plan --> the last ones of each stream --> pages
                                              +-> totals, for the status

A report replaces the earlier one of the same rows by the same run, and an equal one changes
nothing: a trainer sends its last reports again to each new session. A run is all sessions of one
name: the ranks of a job, before and after their reconnects.

Invariant: a stream's reports take at most its ``report_memory``, and are at most ``REPORTS_MAX``;
of another size, or about rows that its epochs do not have, none is kept.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from struct import Struct

import numpy as np

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
_KEY = Struct("<qqii")


class StreamReports:
    """See the module. ``memory_bytes``: the limit of one stream."""

    def __init__(self, plan: Plan, *, is_live: bool, memory_bytes: int) -> None:
        self._plan, self._is_live, self._memory_bytes = plan, is_live, memory_bytes
        self._kept: OrderedDict[int, tuple[bytes, bytes, bytes]] = OrderedDict()
        """By number, the oldest first: key, head and values."""
        self._numbers: dict[bytes, int] = {}
        """By key: rows and run."""
        self._runs: dict[str, int] = {}
        self._bytes = self._last = self._last_run = 0
        self._received = self._refused = self._not_finite = self._values = 0
        self._sum = 0.0
        self._buckets = np.zeros(len(REPORT_BOUNDS) + 1, np.int64)

    def add(self, run: str, rank: int, world_size: int, reports: Iterable[ReportedRows]) -> str:
        """Keep the reports of a message. Returns why some are refused; "" if none is."""
        reason = ""
        for epoch, step, first, rows, values in reports:
            problem = self._problem(Position(epoch, step), first, rows, len(values))
            if problem:
                self._refused += 1
                reason = reason or problem
            else:
                number = self._runs.get(run) or self._add_run(run)
                self._keep(_KEY.pack(epoch, step, first, number), (rows, number, rank, world_size), values)
        return reason

    def page(self, after: int) -> ReportPage:
        """The first reports with a number above ``after``, in the order of their numbers."""
        heads: list[bytes] = []
        values: list[bytes] = []
        left = PAGE_BYTES
        number = max(after, next(iter(self._kept), 1) - 1)
        while number < self._last and len(heads) < PAGE_REPORTS and left > 0:
            number += 1
            found = self._kept.get(number)
            if found is not None:
                heads.append(found[1])
                values.append(found[2])
                left -= len(found[2])
        return ReportPage(tuple(self._runs), tuple(self._runs.values()), b"".join(heads), b"".join(values), number)

    def last(self, count: int) -> ReportPage:
        """The last reports, at most ``PAGE_REPORTS``, each with the mean of its values alone."""
        kept = list(islice(reversed(self._kept.values()), min(count, PAGE_REPORTS)))[::-1]
        with np.errstate(invalid="ignore"):
            means = [np.frombuffer(values, "<f4").mean(dtype=np.float64) for _key, _head, values in kept]
        heads = b"".join(head for _key, head, _values in kept)
        names = tuple(self._runs), tuple(self._runs.values())
        return ReportPage(*names, heads, np.array(means, "<f4").tobytes(), self._last)

    def statistics(self) -> ReportStatistics | None:
        """The totals since the start; None before the first report."""
        if not self._received and not self._refused:
            return None
        buckets = tuple(self._buckets.tolist())
        return ReportStatistics(
            len(self._kept), self._received, self._refused, self._not_finite, self._values, self._sum, buckets
        )

    def _problem(self, position: Position, first: int, rows: int, value_bytes: int) -> str:
        if self._is_live:
            steps, there = EPOCHS_MAX, self._plan.batch_size
        else:
            steps = self._plan.steps
            there = self._plan.rows(position) if position.step < steps else 0
        if position.epoch >= EPOCHS_MAX or position.step >= steps or not 0 < rows <= there - first:
            return f"the stream has no rows {first} to {first + rows} at epoch {position.epoch}, step {position.step}"
        if value_bytes not in {VALUE_BYTES, VALUE_BYTES * rows}:
            return f"{value_bytes} bytes of values for {rows} rows"
        return ""

    def _add_run(self, run: str) -> int:
        """Number a run, in place of the oldest one if there are too many."""
        if len(self._runs) == RUNS_MAX:
            oldest = self._runs.pop(next(iter(self._runs)))
            for number in [
                number for number, (_key, head, _values) in self._kept.items() if HEAD.unpack(head)[6] == oldest
            ]:
                self._forget(number)
        self._last_run += 1
        self._runs[run] = self._last_run
        return self._last_run

    def _keep(self, key: bytes, of: tuple[int, int, int, int], values: bytes) -> None:
        before = self._numbers.get(key)
        if before is not None:
            if self._kept[before][2] == values:
                return
            self._forget(before)
        self._last += 1
        rows, run, rank, world_size = of
        epoch, step, first, _run = _KEY.unpack(key)
        count = len(values) // VALUE_BYTES
        head = HEAD.pack(epoch, step, self._last, first, rows, count, run, rank, world_size)
        self._kept[self._last] = key, head, values
        self._numbers[key] = self._last
        self._bytes += REPORT_BYTES + len(values)
        self._count(values)
        while len(self._kept) > REPORTS_MAX or self._bytes > self._memory_bytes:
            self._forget(next(iter(self._kept)))

    def _count(self, values: bytes) -> None:
        numbers = np.frombuffer(values, "<f4")
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        self._received += 1
        self._not_finite += numbers.size - finite.size
        self._values += finite.size
        self._sum += float(finite.sum())
        np.add.at(self._buckets, np.searchsorted(REPORT_BOUNDS, finite), 1)

    def _forget(self, number: int) -> None:
        key, _head, values = self._kept.pop(number)
        del self._numbers[key]
        self._bytes -= REPORT_BYTES + len(values)
