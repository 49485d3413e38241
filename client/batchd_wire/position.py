"""The address of a batch. Every process; standard library only."""

from typing import NamedTuple


class Position(NamedTuple):
    """A batch of a stream: ``step`` counts the batches of all ranks, from 0 in each epoch."""

    epoch: int
    step: int
