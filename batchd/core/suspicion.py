"""Bad samples of one stream, and which sample kills workers. Pure code.

The note of a crashed worker names the sample that it was decoding. That alone proves nothing,
since the machine may be at fault. So the sample is run again, alone in its order, and a worker that
survives acquits it. A second crash with nothing in between is proof: the sample is quarantined, and
no worker begins it again. Where the note is empty, the chunk is halved until one sample is left.

A worker that was killed from outside says little about its sample: such a death weighs a tenth of a
crash. It counts for something, since the killer may be a guard against processes that take too much
memory, and may strike again and again for the same sample.

A sample for which there is not enough memory, even alone, is a bad sample like any other:
``max_bad_fraction`` limits them. Crashes are faults of a decoder or of the machine, and a stream
with many of them stops.

Invariant: a sample that crashes every worker is begun by no third worker after two have died and
named it.
"""

from collections import deque
from dataclasses import dataclass
from math import sqrt

from batchd.core.rows import Rows
from batchd_wire.wording import counted

CRASH_WEIGHT = 10
KILL_WEIGHT = 1
PROOF_WEIGHT = 20
"""Two crashes, or enough kills from outside to rule out chance."""
CRASHES_MAX = 100
CRASHES_WINDOW_S = 60.0
REASON_BYTES_MAX = 200
LONG_REASONS_MAX = 100
"""Number of bad samples that may have a longer reason, such as a user function's traceback."""
LISTED_MAX = 10_000
"""Bad samples listed by name; further ones are counted, and reported once each."""
SURE_ROWS = 256
DEVIATIONS = 4
QUARANTINED_MIN = 10
QUARANTINED_FRACTION = 0.001


@dataclass(slots=True)
class ListedBadSample:
    """Why a sample is bad, and in how many rows it occurred."""

    path: str
    reason: str
    times: int = 0


class BadSampleList:
    """The bad samples of one stream, and when there are too many of them."""

    def __init__(self, samples: int, bad_fraction_max: float) -> None:
        self._samples = samples
        self._fraction_max = bad_fraction_max
        self.rows = 0
        self.bad_rows = 0
        self.listed: dict[int, ListedBadSample] = {}
        self.total = 0
        """Different bad samples; some of them are not listed."""
        self._one_reason: str | None = None
        """That of all bad samples so far; "" if they have several."""
        self._unlisted = bytearray()
        """A bit for each sample, from the first that is not listed on."""
        self._long_reasons = 0

    def record(self, sample: int, path: str, reason: str, *, is_row: bool = True) -> bool:
        """Count a bad row; return whether its sample is bad for the first time.

        ``is_row``: false for a sample that would have joined that of a row.
        """
        self.bad_rows += is_row
        self._one_reason = reason if self._one_reason in {None, reason} else ""
        known = self.listed.get(sample)
        if known is None and len(self.listed) >= LISTED_MAX:
            return self._count_unlisted(sample)
        if known is None:
            self.total += 1
            encoded = reason.encode()
            self._long_reasons += len(encoded) > REASON_BYTES_MAX
            if self._long_reasons > LONG_REASONS_MAX:
                reason = encoded[:REASON_BYTES_MAX].decode("utf-8", "ignore")
            known = self.listed[sample] = ListedBadSample(path, reason)
        known.times += 1
        return known.times == 1

    def _count_unlisted(self, sample: int) -> bool:
        byte, bit = sample >> 3, 1 << (sample & 7)
        if byte >= len(self._unlisted):
            self._unlisted.extend(bytes(byte + 1 - len(self._unlisted)))
        is_new = not self._unlisted[byte] & bit
        self._unlisted[byte] |= bit
        self.total += is_new
        return is_new

    def excess(self) -> str | None:
        """Return why the stream has too many bad samples; None where it has not.

        That is certain from the listed samples, or beyond chance from the rows seen. These are a
        random part of an epoch, so a plain limit would stop a stream that meets its few bad samples
        early: four standard deviations of a binomial are allowed on top.
        """
        expected = self._fraction_max * self.rows
        slack = DEVIATIONS * sqrt(expected * (1 - self._fraction_max))
        if self.total > self._fraction_max * self._samples:
            bad = f"{self.total} of {self._samples} samples"
        elif self.rows >= SURE_ROWS and self.bad_rows > expected + slack:
            bad = f"{self.bad_rows} of {self.rows} rows read so far"
        else:
            return None
        why = f", all for one reason: {self._one_reason}" if self._one_reason and self.bad_rows > 1 else ""
        return f"{bad} are bad, more than max_bad_fraction = {self._fraction_max:g}{why}"


class Suspects:
    """Samples that dead workers were decoding."""

    def __init__(self, samples: int) -> None:
        self._quarantined_max = max(QUARANTINED_MIN, int(samples * QUARANTINED_FRACTION))
        self.deaths: dict[int, list[int]] = {}
        """By sample under suspicion: the weights of the deaths that it may have caused."""
        self.crashed_s: deque[float] = deque(maxlen=CRASHES_MAX)
        """Times of crashes of this stream's workers, whatever they were decoding."""
        self.quarantined: dict[int, str] = {}
        self._too_large: set[int] = set()
        """The quarantined samples that needed too much memory."""

    def accuse(self, sample: int, how: str, *, from_outside: bool = False, out_of_memory: bool = False) -> bool:
        """Count a death; return whether it is the proof that quarantines the sample."""
        weights = self.deaths.setdefault(sample, [])
        weights.append(KILL_WEIGHT if from_outside else CRASH_WEIGHT)
        if sum(weights) < PROOF_WEIGHT or sample in self.quarantined:
            return False
        why = f"{how}, out of memory" if out_of_memory else how
        self.quarantined[sample] = f"quarantined: it ended {counted(len(weights), 'worker')}, the last by {why}"
        if out_of_memory:
            self._too_large.add(sample)
        del self.deaths[sample]
        return True

    def acquit(self, samples: list[int]) -> None:
        """Clear samples of suspicion: a worker decoded them and lives."""
        for sample in samples:
            self.deaths.pop(sample, None)

    def excess(self) -> str | None:
        """Return why the crashes are not the fault of single samples; None where they may be."""
        quarantined, limit = len(self.quarantined) - len(self._too_large), self._quarantined_max
        if quarantined > limit:
            what = f"{quarantined} samples ended their workers, more than the {limit} that may be odd files"
        elif len(self.crashed_s) == CRASHES_MAX and self.crashed_s[-1] - self.crashed_s[0] <= CRASHES_WINDOW_S:
            what = f"{CRASHES_MAX} workers crashed within {CRASHES_WINDOW_S:g} s"
        else:
            return None
        return f"{what}: something is wrong with the decoder or the machine"


def split(rows: Rows, row: int | None) -> list[Rows]:
    """Cut rows so that the suspected ``row`` is alone, else into halves."""
    if row is None or row not in rows:
        half = len(rows) // 2
        parts = [rows[:half], rows[half:]]
    else:
        at = rows.index(row)
        parts = [rows[:at], rows[at : at + 1], rows[at + 1 :]]
    return [part for part in parts if part]
