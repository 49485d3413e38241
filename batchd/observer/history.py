"""The last quarter of an hour, for the page's plots: one number every ``STEP_S`` for each series. OBSERVER process.

    answers of the daemon --> Chronicle --> Looks: what is now
                                   +------> History: what was

Invariant: its memory is bounded, whatever comes and goes: there are ``STREAMS_MAX`` streams with
``PARTS_MAX`` parts each and ``TRAINERS_MAX`` trainers at a time; what more there are counts as
``OTHER``. A series of which nothing is left is forgotten.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from math import isnan, nan
from threading import Lock
from time import monotonic
from typing import Any

from batchd.diagnosis.overview import Looks, Overview
from batchd_wire.status import DaemonStatus

STEP_S = 5.0
POINTS = 180
LOOK_S = 0.9
"""Looks that follow each other closer tell nothing new: each is kept for some seconds."""
STREAMS_MAX, PARTS_MAX, TRAINERS_MAX = 16, 12, 64
OTHER = "other"
STREAM_KINDS = ("decoded_per_s", "delivered_per_s", "leased_slots", "ready_slots", "filling_slots", "slots_max")
PART_KIND, WAIT_KIND = "part_ms", "wait_share"
DIGITS = 4

Key = tuple[str, ...]
"""Kind, and what it is of: the stream; the stream and the part; the stream, the trainer and its rank."""


class Chronicle:
    """Takes in answers, in one thread, and tells any thread about them."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._lock = Lock()
        self._looks = Looks()
        self._history = History()
        self._looked_s = -STEP_S

    def add(self, status: DaemonStatus) -> None:
        """Take in an answer of the daemon."""
        now_s = self._now()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        tick = int(now_s // STEP_S)
        with self._lock:
            self._looks.add(status)
            overview = self._looks.overview() if tick != self._history.tick else None
            if overview is not None:
                self._history.add(tick, overview)

    def overview(self) -> Overview | None:
        """What there is to see now; None before the first answer."""
        with self._lock:
            return self._looks.overview()

    def history(self) -> dict[str, Any]:
        """All series up to now, as plain data."""
        with self._lock:
            return {
                "step_s": STEP_S,
                "points": POINTS,
                "series": [*self._history.plain(int(self._now() // STEP_S))],
            }


class History:
    """The series. A point that is missing is not a number."""

    def __init__(self) -> None:
        self.tick: int | None = None
        self._series: dict[Key, array[float]] = {}

    def add(self, tick: int, overview: Overview) -> None:
        """Put down a moment; the ones between it and the last have passed without a word."""
        self._clear(tick)
        for key, value in _values(overview):
            admitted = key if key in self._series else self._admitted(key)
            series = self._series.setdefault(admitted, array("f", [nan]) * POINTS)
            known = series[tick % POINTS]
            series[tick % POINTS] = value if isnan(known) else _merge(key[0], known, value)
        self._series = {key: series for key, series in self._series.items() if not all(map(isnan, series))}
        self.tick = tick

    def plain(self, tick: int) -> Iterator[dict[str, Any]]:
        """Every series, the oldest point first; the last is that of ``tick``, or the one before where that is yet to come."""
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
        """The key, where there is room for it, else that of the others."""
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
    """What there is to put down. Streams come first: parts have room where their stream has."""
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
    """Two with the same name, or two of the others: together, but of waiting the worst."""
    return max(one, other) if kind == WAIT_KIND else one + other


def _rounded(value: float) -> float | None:
    return None if isnan(value) else float(f"{value:.{DIGITS}g}")
