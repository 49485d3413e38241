"""The samples that join one, such as those of a mosaic: which, and what if they are bad. WORKER.

    pick --plan--> sample --bad--> its substitutes by the plan, as in a row; the stream is told

Invariant: what joins a sample follows from the plan and from which samples are bad, so it is the
same in every worker.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from batchd.core.plan import Plan
from batchd.data.pipeline.randomness import EPOCH_BITS
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.values import Value

SUBSTITUTES_MAX = 32
"""Tries for one row. With half of all samples bad, one row in four thousand million finds none."""


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
    _whose: int = 0

    def begin(self, sample: int) -> None:
        """Begin the sample that others join."""
        self._whose, self.is_good = sample, True
        self.bad.clear()

    def others_of(self, epoch: int, pick: int) -> Iterator[int]:
        """See ``OtherSamples``: by the plan, and by its rule for bad samples."""
        epoch %= 1 << EPOCH_BITS
        first = self.plan.other(epoch, pick)
        yield first
        for attempt in range(1, SUBSTITUTES_MAX + 1 if self.substitutes else 1):
            yield self.plan.substitute(epoch, first, attempt)

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

    def others_end(self) -> None:
        """See ``OtherSamples``."""
        self.begins(self._whose)
