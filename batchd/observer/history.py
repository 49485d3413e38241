"""The last 15 minutes for the page's plots. OBSERVER process.

Each series has one number for every ``STEP_S``.

    answers of the daemon --> StatusRecorder --> StatusWindow: the present
                                   +-----------> History: the past

Invariant: memory is bounded: there are at most ``STREAMS_MAX`` streams with ``PARTS_MAX`` parts
each and ``TRAINERS_MAX`` trainers at a time; further ones count as ``OTHER``. A series without a
remaining point is dropped.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from math import isnan, nan
from threading import Lock
from time import monotonic

from batchd.diagnosis.overview import Overview, StatusWindow
from batchd_wire.status import DaemonStatus

STEP_S = 5.0
POINTS = 180
SPACING_S = 0.9
"""Between two statuses that are kept; closer ones add nothing."""
STREAMS_MAX, PARTS_MAX, TRAINERS_MAX = 16, 12, 64
OTHER = "other"
STREAM_KINDS = ("decoded_per_s", "delivered_per_s", "leased_slots", "ready_slots", "filling_slots", "slots_max")
PART_KIND, WAIT_KIND = "part_ms", "wait_share"
DIGITS = 4

Key = tuple[str, ...]
"""Kind, then the stream; or the stream and the part; or the stream, the trainer and its rank."""


class StatusRecorder:
    """One thread adds answers of the daemon; any thread reads the rest."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._lock = Lock()
        self._window = StatusWindow()
        self._history = History()
        self._added_s = -STEP_S

    def add(self, status: DaemonStatus) -> None:
        """Add an answer of the daemon."""
        now_s = self._now()
        if now_s - self._added_s < SPACING_S:
            return
        self._added_s = now_s
        tick = int(now_s // STEP_S)
        with self._lock:
            self._window.add(status)
            overview = self._window.overview() if tick != self._history.tick else None
            if overview is not None:
                self._history.add(tick, overview)

    def overview(self) -> Overview | None:
        """The present state; None before the first answer."""
        with self._lock:
            return self._window.overview()

    def history(self) -> dict[str, object]:
        """All series up to now, as plain data."""
        with self._lock:
            return {
                "step_s": STEP_S,
                "points": POINTS,
                "series": [*self._history.plain(int(self._now() // STEP_S))],
            }


class History:
    """The series. A missing point is NaN."""

    def __init__(self) -> None:
        self.tick: int | None = None
        self._series: dict[Key, array[float]] = {}

    def add(self, tick: int, overview: Overview) -> None:
        """Record one moment. Those between it and the last one stay empty."""
        self._clear(tick)
        for key, value in _values(overview):
            admitted = key if key in self._series else self._admitted(key)
            series = self._series.setdefault(admitted, array("f", [nan]) * POINTS)
            known = series[tick % POINTS]
            series[tick % POINTS] = value if isnan(known) else _merge(key[0], known, value)
        self._series = {key: series for key, series in self._series.items() if not all(map(isnan, series))}
        self.tick = tick

    def plain(self, tick: int) -> Iterator[dict[str, object]]:
        """Every series, oldest point first.

        The last point is that of ``tick``, or of the tick before if ``tick`` has none yet.
        """
        last = self.tick if self.tick is not None and tick - self.tick <= 1 else tick
        kept_from = (self.tick if self.tick is not None else tick) - POINTS
        for key, series in self._series.items():
            points = (
                series[one % POINTS] if kept_from < one <= (self.tick or 0) else nan
                for one in range(last - POINTS + 1, last + 1)
            )
            yield {"kind": key[0], "of": list(key[1:]), "values": [_rounded(point) for point in points]}

    def _clear(self, tick: int) -> None:
        first = tick - POINTS + 1 if self.tick is None else max(self.tick + 1, tick - POINTS + 1)
        for series in self._series.values():
            for one in range(first, tick + 1):
                series[one % POINTS] = nan

    def _admitted(self, key: Key) -> Key:
        """The key itself if it fits the limits, else that of ``OTHER``."""
        kind, stream = key[0], key[1]
        if kind in STREAM_KINDS:
            return key if self._count(kind) < STREAMS_MAX else (kind, OTHER)
        if kind == WAIT_KIND:
            return key if self._count(kind) < TRAINERS_MAX else (kind, OTHER, OTHER, OTHER)
        if ("slots_max", stream) not in self._series:
            return (PART_KIND, OTHER, OTHER)
        return key if self._count(kind, stream) < PARTS_MAX else (kind, stream, OTHER)

    def _count(self, *beginning: str) -> int:
        return sum(key[: len(beginning)] == beginning for key in self._series)


def _values(overview: Overview) -> Iterable[tuple[Key, float]]:
    """The values to record. Streams first: parts are admitted if their stream is."""
    for stream in overview.streams:
        for kind in STREAM_KINDS:
            value = getattr(stream, kind)
            if value is not None:
                yield (kind, stream.name), float(value)
    for stream in overview.streams:
        for part, ms in stream.parts:
            yield (PART_KIND, stream.name, part), ms
    for trainer in overview.trainers:
        if trainer.wait_share is not None:
            yield (WAIT_KIND, trainer.stream, trainer.name, str(trainer.rank)), trainer.wait_share


def _merge(kind: str, one: float, other: float) -> float:
    """One value of two with the same key: the larger share of waiting, else the sum."""
    return max(one, other) if kind == WAIT_KIND else one + other


def _rounded(value: float) -> float | None:
    return None if isnan(value) else float(f"{value:.{DIGITS}g}")
