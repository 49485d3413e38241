"""The facts of a stream that the core needs. The daemon makes them from configuration and source.

Invariant: they never change; a stream with other facts is another stream.
"""

from batchd.core.mailbox import LiveSpec
from batchd.core.plan import Plan
from batchd_wire.position import Position
from batchd_wire.record import frozen


@frozen
class StreamSpec:
    """The facts of one stream. ``repeats``: slots serve all epochs, which have the same bytes.

    ``max_skew``: how many of its batches a trainer may be ahead of the slowest; None: each has
    its own pace. ``remote_window_max``: batches that may wait in the memory of a trainer on another
    host. ``kept_ahead``: the ring is not enlarged to keep a batch that its next reader reads after
    more others than these; None: it is. ``bgr_fields``: images in BGR order, for display.
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
    kept_ahead: int | None = None
    bgr_fields: tuple[str, ...] = ()
    live: LiveSpec | None = None
    """For a stream whose samples are pushed by producers."""
    decodes_here: bool = False
    """Whether only workers of this host may fill it."""
    shares_caches: bool = False
    """Whether worker hosts fill the rows whose samples their caches have; see ``shares``."""
    groups_neighbours: bool = False
    """Whether an order has rows whose samples are near each other in storage, for few requests."""
    own_source: bool = False
    """Whether its source is the user's own code."""
    report_memory: int = 0
    """Bytes for what trainers report of its batches."""
    source: str = ""
    """Digest of the samples and their places; "" of a live source."""
    has_digests: bool = False
    """Whether the rows that are delivered in each epoch have a digest."""
    has_buckets: bool = False
    """Whether the batches of each bucket have a layout of their own."""

    def bucket_of(self, position: Position) -> int:
        """Return the number of the layout of a batch."""
        return self.plan.bucket_of(position) if self.has_buckets else 0
