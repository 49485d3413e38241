"""The random numbers of one sample: a pure function of (seed, epoch, sample, view, attempt).

Worker process; needs numpy. One Philox generator is moved for every sample: Philox computes block
``i`` of its stream from a key and a counter, so the place of a sample is written straight into it:

    key      ( seed,  SALT )
    counter  ( 0,     view << 20 | attempt,  copy << 48 | epoch,  sample )
               ^ counts the blocks of four numbers that this sample draws

Where a sample is in several rows of an epoch (``repeats``), ``copy`` counts them from 0; what is
called ``epoch`` here and in the pipeline has it in its upper bits (``core.plan.Plan.draw_epoch``),
and above it the size that the batch has drawn for its images: this is no part of the counter.
``view`` is 0, or the number of a view of a field, by the name of the field: so the numbers of a
view do not depend on which others there are. What joins a sample is numbered like a view of it.

Invariant: the numbers do not depend on what was drawn before, on the process or on the machine; two
samples, copies, views, epochs, attempts or seeds never share a block, except that two fields have a
chance of 2**-36 to.
"""

from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator, Philox

from batchd_wire.position import SIZE_BIT

SALT = 0x6261746368640001
"""Separates augmentations from every other use of the same seed: "batchd" and a version."""
NUMBER_MAX = (1 << 63) - 1
EPOCH_BITS = 48
"""Of the epoch in what is called so here, below the copy."""
_ATTEMPT_BITS, _PLACE_BITS, _NAME_BITS = 20, 8, 36
_COPY_AND_EPOCH = (1 << SIZE_BIT) - 1
Mark: TypeAlias = Any
"""A place among the numbers of a sample, or of a view of it."""


def view_number(field: str, place: int) -> int:
    """The number of a view, ``place`` of those of one field, counted from 0."""
    assert 0 <= place < (1 << _PLACE_BITS) - 1, f"view {place}"
    name = int.from_bytes(sha256(field.encode()).digest()[:8], "big") >> 64 - _NAME_BITS
    return name << _PLACE_BITS | (place + 1)


class SampleRandom:
    """Random numbers that start over for each sample. ``seed`` is 0 to ``NUMBER_MAX``."""

    __slots__ = ("_attempt", "_bits", "_counter", "_state", "draws", "generator", "random", "sample", "size")

    def __init__(self, seed: int) -> None:
        assert 0 <= seed <= NUMBER_MAX, f"seed {seed}"
        self._bits = Philox(key=np.array([seed, SALT], np.uint64))
        # The state before the first number: nothing buffered, no half of a number kept. Setting it
        # copies it.
        self._state = self._bits.state
        self._counter = self._state["state"]["counter"]
        self.generator = Generator(self._bits)
        """For steps that need more than uniform numbers."""
        self.random = self.generator.random
        """Draw a number from [0, 1); bound once, as each sample calls it several times."""
        self._attempt = 0
        self.sample = 0
        """The sample whose numbers are drawn."""
        self.size = 0
        """The number of the size that the batch has drawn for its images."""
        self.draws: list[dict[str, object]] | None = None
        """Results of the random steps of a sample, in order, for ``batchd replay``; None: no one
        asks. To note them draws no number."""

    def start(self, epoch: int, sample: int, attempt: int) -> None:
        """Go to the numbers of a sample, in about 1 µs; ``attempt`` counts substitutions from 0."""
        self.sample = sample
        if self.draws is not None:
            self.draws.clear()
        assert attempt >> _ATTEMPT_BITS == 0, f"attempt {attempt}"
        self._attempt = attempt
        counter = self._counter
        counter[1] = attempt
        self.size = epoch >> SIZE_BIT
        counter[2] = epoch & _COPY_AND_EPOCH
        counter[3] = sample
        self._bits.state = self._state

    @property
    def place(self) -> tuple[int, int, int]:
        """What the numbers are those of: the epoch with its copy, the sample and the attempt."""
        return int(self._counter[2]), self.sample, self._attempt

    def start_view(self, view: int) -> None:
        """Go to the numbers of a view of the sample; ``view`` is a ``view_number``."""
        self._counter[1] = view << _ATTEMPT_BITS | self._attempt
        self._bits.state = self._state

    def mark(self) -> Mark:
        """Remember which number is next; takes about 5 µs."""
        return self._bits.state

    def return_to(self, mark: Mark) -> None:
        """Go on with the number that was next at a ``mark``."""
        self._bits.state = mark
