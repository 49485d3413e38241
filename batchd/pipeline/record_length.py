"""How long a record of a source may be. Daemon, workers and CLI; needs no decoder."""

from collections.abc import Sequence

from batchd.config.image_steps import Decode
from batchd.config.steps import Step

RECORD_BYTES_MAX = 64 << 20
"""Length of a record, in bytes, above which a sample is bad, where no ``decode`` step says."""


def record_bytes_max(steps: Sequence[Step]) -> int:
    """How long a record of the source may be, in bytes."""
    return max((step.max_bytes for step in steps if isinstance(step, Decode)), default=RECORD_BYTES_MAX)
