"""The address of a batch, and of a row. Every process; standard library only."""

from typing import NamedTuple

COPY_BIT, SIZE_BIT = 48, 56
"""First bits of what the upper part of an epoch has where numbers are drawn: the copy of a batch,
and the size that the batch has drawn. An epoch has fewer bits: ``admission.EPOCH_MAX``."""


class Position(NamedTuple):
    """A batch of a stream: ``step`` counts the batches of all ranks, from 0 in each epoch."""

    epoch: int
    step: int


class EpochRows(NamedTuple):
    """How an epoch of ``samples`` is cut into batches of ``batch_size``, each ``repeats`` times.

    step    0   1   2 | 3   4   5 | 6   7   8     ``repeats`` = 3: the same samples in the same
    rows    B   B   B | B   B   B | p   p   p     rows of 3 consecutive batches; p are left over
    """

    samples: int
    batch_size: int
    repeats: int

    def before(self, step: int) -> int:
        """The rows of the epoch before a step."""
        group, copy = divmod(step, self.repeats)
        first = min(group * self.batch_size, self.samples)
        return first * self.repeats + copy * min(self.batch_size, self.samples - first)

    def find(self, row: int) -> tuple[int, int]:
        """The step with a row of the epoch, and its number there; behind the last, a step more."""
        group, within = divmod(row, self.batch_size * self.repeats)
        rows = min(self.batch_size, self.samples - group * self.batch_size)
        copy, row = divmod(within, max(1, rows))
        return group * self.repeats + copy, row
