"""Numbers that everybody reads: ``batchd status``, metrics and tests see these frozen values. Totals count from the start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One worker. ``place`` is 0 to workers-1 and outlives it; ``state`` is starting, ready or ending."""

    number: int
    place: int
    state: str
    orders: int
    chunks: int
    samples: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class SubscriptionStatistics:
    """One trainer's claim. ``epoch`` and ``step``: the next batch it has not consumed (None past its end)."""

    number: int
    session: int
    rank: int
    world_size: int
    window: int
    epoch: int | None
    step: int | None
    consumed_batches: int
    delivered_samples: int
    held_slots: int
    ready_ahead: int
    waiting: bool
    wait_s: float


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """One stream and its ring.

    ``shared_batches``: decoded once, read by two or more. ``mismatched_batches``: came to a trainer other than they were written.
    """

    name: str
    fingerprint: str
    samples: int
    batch_size: int
    steps: int
    slots: int
    slots_max: int
    ready_slots: int
    leased_slots: int
    decoded_batches: int
    decoded_samples: int
    delivered_batches: int
    delivered_samples: int
    shared_batches: int
    mismatched_batches: int
    bad_rows: int
    bad_samples: int
    quarantined_samples: int
    sample_s: float
    stopped: str | None
    subscriptions: tuple[SubscriptionStatistics, ...]


@dataclass(frozen=True, slots=True)
class DaemonStatistics:
    """The whole daemon. ``worker_deaths``: workers that ended without being asked to."""

    workers: tuple[WorkerStatistics, ...]
    streams: tuple[StreamStatistics, ...]
    worker_deaths: int
    draining: bool
