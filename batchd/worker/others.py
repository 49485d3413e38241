"""The samples that join one, such as those of a mosaic: which, and what if they are bad. WORKER.

    pick --plan--> sample --bad--> its substitutes by the plan, as in a row; the stream is told

Invariant: what joins a sample follows from the plan and from which samples are bad, so it is the
same in every worker.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from batchd.core.plan import Plan
from batchd.data.pipeline.execute import own
from batchd.data.pipeline.randomness import EPOCH_BITS
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import Value

SUBSTITUTES_MAX = 32
"""Tries for one row. With half of all samples bad, one row in four thousand million finds none."""
KEPT_BYTES_MAX = 128 << 20
"""Of the samples that a worker keeps for a stream."""
_Kept: TypeAlias = dict[str, Value]


class NearSamples:
    """What the steps before a join made of the last samples, for those that they join next.

    Invariant: values are those that the steps would make again, and read-only. So what is kept
    decides about time, and never about bytes.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_left = bytes_max
        self._kept: dict[int, tuple[_Kept, int]] = {}
        """By sample, the oldest first; with their bytes."""

    def __contains__(self, sample: int) -> bool:
        return sample in self._kept

    def find(self, sample: int) -> Mapping[str, Value] | None:
        """Return the values of a sample; None if they are not kept."""
        return self._kept.get(sample, (None,))[0]

    def keep(self, sample: int, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Return a copy of a sample's values, which is kept in the place of the oldest ones."""
        kept = dict(values)
        own(kept)
        parts: list[object] = []
        for value in kept.values():
            parts += value if isinstance(value, list) else [value]
        arrays = [one for one in parts if isinstance(one, np.ndarray)]
        for array in arrays:
            array.flags.writeable = False
        size = sum(array.nbytes for array in arrays) + sum(one.nbytes for one in parts if isinstance(one, memoryview))
        self._kept[sample] = kept, size
        self._bytes_left -= size
        while self._bytes_left < 0:
            _values, size = self._kept.pop(next(iter(self._kept)))
            self._bytes_left += size
        return kept


@dataclass(slots=True)
class Others:
    """Gives a pipeline what joins a sample: see ``execute.OtherSamples``.

    ``substitutes``: whether others stand in for bad ones. ``read``: gives the values of a sample of
    an epoch. ``keep``: has a cache keep the sample that was read last. ``check``: raises
    ``StorageAway`` for a sample that is not bad. ``shown_name``: of a sample, for users.
    """

    plan: Plan
    substitutes: bool
    read: Callable[[int, int], Mapping[str, Value]]
    keep: Callable[[], None]
    check: Callable[[int], None]
    shown_name: Callable[[int], str]
    begins: Callable[[int], bool] = field(default=lambda _sample: True)
    """Notes the sample that is made from here on; False if it is bad without a try."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Bad samples that would have joined the last one, and why."""
    is_good: bool = True
    """Whether the sample that was read last is not known to be bad."""
    stays: bool = False
    """Whether the values that were read last stay while others are read."""
    _whose: int = 0
    _neighbours: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """Of the last sample that others joined."""

    def begin(self, sample: int) -> None:
        """Begin the sample that others join."""
        self._whose, self.is_good = sample, True
        self.bad.clear()

    def others_of(self, epoch: int, whose: int, pick: int, near: int | None) -> Iterator[int]:
        """See ``OtherSamples``: by the plan, and by its rule for bad samples."""
        epoch %= 1 << EPOCH_BITS
        found = [] if near is None else self._neighbours_of(epoch, whose, near)
        first = found[pick % len(found)] if found else self.plan.other(epoch, pick)
        yield first
        for attempt in range(1, SUBSTITUTES_MAX + 1 if self.substitutes else 1):
            yield self.plan.substitute(epoch, first, attempt)

    def _neighbours_of(self, epoch: int, whose: int, near: int) -> list[int]:
        """See ``Plan.neighbours``, which takes as long as a small step on pixels."""
        key = epoch, whose, near
        if key not in self._neighbours:
            self._neighbours = {key: self.plan.neighbours(*key)}
        return self._neighbours[key]

    def read_other(self, epoch: int, sample: int) -> Mapping[str, Value]:
        """See ``OtherSamples``."""
        if self.is_good:
            self.keep()
        self.is_good = False
        if not self.begins(sample):
            raise SampleUnreadable("quarantined")
        values = self.read(epoch, sample)
        self.is_good = True
        return values

    def other_is_bad(self, sample: int, error: SampleUndecodable | SampleUnreadable) -> None:
        """See ``OtherSamples``. Raises ``StorageAway``."""
        self.is_good = False
        self.check(sample)
        self.bad.append((sample, str(error)))

    def values_stay(self) -> bool:
        """See ``OtherSamples``."""
        return self.stays

    def others_end(self) -> None:
        """See ``OtherSamples``."""
        self.begins(self._whose)
