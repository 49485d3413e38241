"""What the daemon asks of the processes that measure samples: see ``worker.lengths``."""

from typing import Any, NamedTuple

UNKNOWN, IN_WORK = -1, -2
"""Of the lengths in shared memory: not measured yet, and being measured."""
BLOCK_SAMPLES = 256
"""Samples that are read ahead together. The processes take turns at such blocks."""

ASPECT_UNIT = 1_000_000
"""The size by aspect of an image that is as wide as it is high; and that of the value 1."""
VALUE_MAX = 10**12
"""Of a field whose value is the size."""

AFTER_STEPS = {"length", "value"}
"""The sizes that a field has after the steps; the others are those of a field of the source."""


class LengthsQuestion(NamedTuple):
    """The question, in JSON: the fields of ``SampleRecipe``, the limits of storage, and the field.

    ``by``: as ``config.tree.Bucket`` has it; "aspect" and "value" times ``ASPECT_UNIT``. A process
    measures the blocks ``part``, ``part + parts``, and so on.
    """

    recipe: list[Any]
    storage: tuple[int, int, int]
    field: str
    by: str
    part: int
    parts: int
    only: tuple[int, ...] = ()
    """Unless empty, samples that are made as rows of a batch: 1 for a good one, 0 for a bad one."""
    as_of_ns: int = 0
    """As in ``ServeStream``."""
