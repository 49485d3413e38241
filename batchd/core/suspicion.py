"""Bad samples of one stream, and which sample kills workers. Nobody's process.

A worker that crashes names, by its note, the sample it had in hand. That alone proves nothing (the machine may be at fault),
so the sample is run again, alone in its chunk, and a worker that lives acquits it. A second crash with nothing in between is
proof, and the sample is quarantined: no worker begins it again. Where a note says nothing, the chunk is halved until one
sample is left.

A worker that somebody killed from outside says next to nothing about its sample: such deaths weigh a tenth of a crash. They are
not worth nothing, since what killed it may have been a guard against processes that take too much memory, and that again and
again for the same sample.

A sample for which there is no memory, even where it runs alone, is a bad sample like any other: ``max_bad_fraction`` says how
many there may be. Crashes are mistakes of a decoder or of the machine, and a stream that has many of them stops.

Invariant: a sample that crashes whoever decodes it is begun by no third worker after two have died and named it.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

from batchd_wire.wording import counted

CRASH_WEIGHT = 10
KILL_WEIGHT = 1
PROOF_WEIGHT = 20
"""Two crashes, or so many deaths at somebody else's hand that chance is ruled out."""
CRASHES_MAX = 100
CRASHES_WINDOW_S = 60.0
REASON_BYTES_MAX = 200
LONG_REASONS_MAX = 100
"""Only the first bad samples that are listed may have a longer reason, such as the places where somebody's function failed."""
LISTED_MAX = 10_000
"""Bad samples that are remembered by name; further ones are only counted."""
SURE_ROWS = 256
DEVIATIONS = 4
QUARANTINED_MIN = 10
QUARANTINED_FRACTION = 0.001


@dataclass(slots=True)
class BadSample:
    """Why a sample is bad, and in how many rows it was met."""

    path: str
    reason: str
    times: int = 0


class BadSamples:
    """The bad samples of one stream, and when there are too many of them."""

    def __init__(self, samples: int, bad_fraction_max: float) -> None:
        self._samples = samples
        self._fraction_max = bad_fraction_max
        self.rows = 0
        self.bad_rows = 0
        self.listed: dict[int, BadSample] = {}
        self._long_reasons = 0

    def record(self, sample: int, path: str, reason: str) -> bool:
        """Count a bad row; true where the sample is listed for the first time."""
        self.bad_rows += 1
        known = self.listed.get(sample)
        if known is None and len(self.listed) >= LISTED_MAX:
            return False
        if known is None:
            known = self.listed[sample] = BadSample(path, self._bounded(reason))
        known.times += 1
        return known.times == 1

    def _bounded(self, reason: str) -> str:
        encoded = reason.encode()
        if len(encoded) <= REASON_BYTES_MAX:
            return reason
        self._long_reasons += 1
        return (
            reason if self._long_reasons <= LONG_REASONS_MAX else encoded[:REASON_BYTES_MAX].decode("utf-8", "ignore")
        )

    def excess(self) -> str | None:
        """Say that the stream is mostly broken: certain from the samples listed, or beyond chance from the rows seen.

        The rows seen are a random part of an epoch, so a limit on them alone would stop a stream that has just met its few
        bad samples early; four standard deviations of a binomial are allowed on top.
        """
        if len(self.listed) > self._fraction_max * self._samples:
            return self._text(len(self.listed), self._samples, "samples")
        expected = self._fraction_max * self.rows
        slack = DEVIATIONS * sqrt(expected * (1 - self._fraction_max))
        if self.rows >= SURE_ROWS and self.bad_rows > expected + slack:
            return self._text(self.bad_rows, self.rows, "rows read so far")
        return None

    def _text(self, bad: int, of: int, what: str) -> str:
        return f"{bad} of {of} {what} are bad, more than max_bad_fraction = {self._fraction_max:g}"


class Suspects:
    """Samples that were in a dead worker's hand."""

    def __init__(self, samples: int) -> None:
        self._quarantined_max = max(QUARANTINED_MIN, int(samples * QUARANTINED_FRACTION))
        self._deaths: dict[int, list[int]] = {}
        """The weight of each death that a sample was found with."""
        self._crashed_s: deque[float] = deque(maxlen=CRASHES_MAX)
        self.quarantined: dict[int, str] = {}
        self._too_large: set[int] = set()
        """Those of them for which there was not the memory."""

    def accuse(self, sample: int, how: str, *, from_outside: bool = False, out_of_memory: bool = False) -> bool:
        """Count a death; true where it proves the sample guilty, which is then quarantined."""
        weights = self._deaths.setdefault(sample, [])
        weights.append(KILL_WEIGHT if from_outside else CRASH_WEIGHT)
        if sum(weights) < PROOF_WEIGHT or sample in self.quarantined:
            return False
        why = f"{how}, out of memory" if out_of_memory else how
        self.quarantined[sample] = f"quarantined: it ended {counted(len(weights), 'worker')}, the last by {why}"
        if out_of_memory:
            self._too_large.add(sample)
        del self._deaths[sample]
        return True

    def acquit(self, samples: list[int]) -> None:
        """These samples were decoded and the worker lives."""
        for sample in samples:
            self._deaths.pop(sample, None)

    def count_crash(self, now: float) -> None:
        """A worker of this stream crashed, whatever it had in hand."""
        self._crashed_s.append(now)

    @property
    def has_open(self) -> bool:
        """Is anybody under suspicion?"""
        return bool(self._deaths)

    def excess(self) -> str | None:
        """Say that crashes are not a matter of single samples."""
        quarantined, limit = len(self.quarantined) - len(self._too_large), self._quarantined_max
        if quarantined > limit:
            what = f"{quarantined} samples ended their workers, more than the {limit} that may be odd files"
        elif len(self._crashed_s) == CRASHES_MAX and self._crashed_s[-1] - self._crashed_s[0] <= CRASHES_WINDOW_S:
            what = f"{CRASHES_MAX} workers crashed within {CRASHES_WINDOW_S:g} s"
        else:
            return None
        return f"{what}: something is wrong with the decoder or the machine"


def split(first: int, count: int, row: int | None) -> list[tuple[int, int]]:
    """Cut a dead worker's chunk so that the suspected row stands alone; into halves where none is."""
    if row is None or not first <= row < first + count:
        half = count // 2
        parts = [(first, half), (first + half, count - half)]
    else:
        parts = [(first, row - first), (row, 1), (row + 1, first + count - row - 1)]
    return [part for part in parts if part[1]]
