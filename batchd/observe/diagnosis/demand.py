"""How many workers the trainers need, and how many of them worker hosts should run. Pure.

    seconds of each stream --needed_workers--> workers --WantedWorkers--> remote workers, and a cap

A trainer that waits for workers the share w of its time would take 1 / (1 - w) as many batches, so
its stream needs so many times the workers that are busy with it. Waits for anything else do not
count: more workers would not end them.

The number is what is needed now. Programs that start and stop worker hosts follow it with delays of
their own: they at most double in 15 s, wait for hosts that are on their way, and stop hosts after
minutes (``batchd ray``, the ``behavior`` of a Kubernetes autoscaler).

Invariant: the number rises only while a trainer waits for workers more than ``WAIT_SHARE_MIN`` of
the time, and never beyond what the network, the rings and the configuration allow.
"""

from collections.abc import Iterable, Sequence
from math import ceil, inf

from batchd_wire.record import frozen

WINDOW_S = 10.0
"""The time over which rates and shares are measured."""
BUSY_SHARE = 0.85
"""How busy workers should be: with less to spare, a trainer waits for each slow sample."""
WAIT_SHARE_MIN = 0.02
"""A trainer that waits less for workers needs no further one."""
WAIT_SHARE_MAX = 0.9
"""A trainer that waits more takes any number of batches: count ten times what there is."""
NETWORK_SHARE = 0.9
"""The part of an interface's speed that rows can use."""
ORDERS_AT_ONCE = 2
"""The orders that keep a remote worker busy: one in progress, and one in transit."""
SLOTS_OF_A_TRAINER = 2
"""Slots of a ring that a trainer reads, or is about to read: no worker fills them."""


@frozen
class StreamLoad:
    """One stream over some seconds. ``trainers``: of each, its batches and its share of waiting.

    ``busy_workers``: the mean number of workers that were busy for it; ``row_bytes_per_busy_s``:
    what one of them makes in a second of work, 0 if that is not known. ``ring_workers``: for how
    many its ring has rows. ``stays_here``: worker hosts cannot fill it.
    """

    name: str
    busy_workers: float
    trainers: Sequence[tuple[int, float]]
    row_bytes_per_busy_s: float = 0.0
    ring_workers: float = inf
    stays_here: bool = False


@frozen
class PoolLimits:
    """The limits: local workers, the configured maximum (0: none), and the pool's interface.

    ``interface_bytes_per_s``: None if its speed is not known.
    """

    local_workers: int
    remote_workers: int
    max: int = 0
    interface: str = ""
    interface_bytes_per_s: float | None = None


@frozen
class WantedNumber:
    """The wanted number of remote workers. ``capped_by``: "", "max", "network" or "ring".

    ``cap``: the same for people.
    """

    workers: int = 0
    capped_by: str = ""
    cap: str = ""


def needed_workers(load: StreamLoad) -> float:
    """The workers with which no trainer of a stream would wait for them.

    Trainers count by their batches, so that the work for a batch, which they may share, is counted
    once.
    """
    if not load.trainers:
        return 0.0
    shares = [(batches + 1, min(share, WAIT_SHARE_MAX)) for batches, share in load.trainers]
    growth = sum(weight / (1 - share) for weight, share in shares) / sum(weight for weight, _share in shares)
    # work counts when it is done, and one sample may take longer than all these seconds
    busy = load.busy_workers or float(waits_for_workers(load))
    return busy * growth / BUSY_SHARE


def waits_for_workers(load: StreamLoad) -> bool:
    """Whether a trainer of the stream waits for workers so much that it needs more of them."""
    return any(share > WAIT_SHARE_MIN for _batches, share in load.trainers)


class WantedWorkers:
    """The wanted number of remote workers over time."""

    def __init__(self) -> None:
        self.now = WantedNumber()
        self._uncapped = 0

    def follow(self, loads: Iterable[StreamLoad], limits: PoolLimits) -> WantedNumber:
        """Take the last ``WINDOW_S`` into account."""
        loads = list(loads)
        mobile = [load for load in loads if not load.stays_here]
        local = max(0.0, limits.local_workers - sum(needed_workers(load) for load in loads if load.stays_here))
        needed = max(0, ceil(sum(map(needed_workers, mobile)) - local))
        if not any(map(waits_for_workers, mobile)):
            needed = min(needed, max(limits.remote_workers, self._uncapped))
        self._uncapped = needed
        self.now = _capped(needed, mobile, local, limits)
        return self.now


def _capped(needed: int, mobile: Sequence[StreamLoad], local: float, limits: PoolLimits) -> WantedNumber:
    """The number within all limits, with the tightest one."""
    wanted = WantedNumber(needed)
    by_ring = [min(needed_workers(load), load.ring_workers) for load in mobile]
    ring = max(0, ceil(sum(by_ring) - local))
    if ring < wanted.workers:
        small = max(mobile, key=lambda load: needed_workers(load) - load.ring_workers)
        text = f"the ring, not the cores: the slots of stream {small.name!r} have rows for {small.ring_workers:.0f} workers"
        wanted = WantedNumber(
            ring, "ring", f"{text}, and its trainers need {needed_workers(small):.0f}; raise its memory"
        )
    each = _bytes_per_worker(mobile)
    if limits.interface_bytes_per_s and each:
        most = int(limits.interface_bytes_per_s * NETWORK_SHARE / each)
        if most < wanted.workers:
            speed = f"{limits.interface} ({8 * limits.interface_bytes_per_s / 1e9:g} Gbit/s)"
            text = f"the NIC, not the cores: {speed} carries the rows of {most} remote workers"
            wanted = WantedNumber(most, "network", f"{text}, and the trainers need {needed}")
    if limits.max and limits.max < wanted.workers:
        wanted = WantedNumber(limits.max, "max", f"daemon.pool_max = {limits.max}, and the trainers need {needed}")
    return wanted


def _bytes_per_worker(loads: Sequence[StreamLoad]) -> float:
    """Bytes of rows that one worker makes in a second while it is busy; 0 if that is not known."""
    known = [(needed_workers(load), load.row_bytes_per_busy_s) for load in loads if load.row_bytes_per_busy_s]
    workers = sum(needed for needed, _each in known)
    return sum(needed * each for needed, each in known) / workers if workers else 0.0
