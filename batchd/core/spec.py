"""What the core must know of a stream. Nobody's process.

Plain facts, made by the daemon from the configuration and the source.

Invariant: they never change; a stream with other facts is another stream.
"""

from dataclasses import dataclass

from batchd.core.mailbox import LiveSpec
from batchd.core.plan import Plan


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What the core must know of a stream. ``repeats``: every epoch has the same bytes, so filled slots serve all epochs.

    ``max_skew`` is how many of its batches a trainer may be ahead of the slowest; None lets each go at its own pace.
    ``remote_window_max``: more than that shall not wait in the memory of a trainer on another host. ``bgr_fields``: images whose
    colours are blue first, for whoever looks at them.
    """

    number: int
    name: str
    fingerprint: str
    plan: Plan
    repeats: bool
    window: int
    remote_window_max: int
    max_skew: int | None
    slots_max: int
    on_error: str
    bad_fraction_max: float
    bgr_fields: tuple[str, ...] = ()
    live: LiveSpec | None = None
    """For a stream whose samples are pushed by producers."""
    own_source: bool = False
    """Is its source somebody's own code?"""
