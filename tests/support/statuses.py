"""Statuses of a daemon, for tests of their readers. Tests only.

The daemon is healthy: 2 workers are busy half of the time with 1,000 samples a second, and one
trainer never waits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass, replace
from typing import Any, get_args, get_type_hints

from batchd.observe.http.status_client import StatusClient
from batchd_wire.status import (
    DaemonFacts,
    DaemonStatus,
    LinkStatistics,
    LocalCounts,
    PartStatistics,
    PoolStatistics,
    SlowSample,
    StreamStatus,
    SubscriptionStatistics,
    TrainerStatistics,
    WaitStatistics,
    WorkerStatistics,
    WorkStatistics,
)

SECONDS = 10.0
"""Seconds between the two statuses of ``two_looks``."""

_WORK = WorkStatistics(10.0, 0.0, 10.0, 0.0, 0.0, 10**9, (), 0.001, 0, 0.0, ())
_SUBSCRIPTION = SubscriptionStatistics(
    number=1,
    session=1,
    rank=0,
    world_size=1,
    window=4,
    epoch=0,
    step=40,
    last_epoch=0,
    last_step=39,
    is_spectator=False,
    consumed_batches=40,
    delivered_samples=10_000,
    held_slots=1,
    ready_ahead=4,
    waiting=False,
    wait_s=0.0,
    waits=WaitStatistics(),
    short_of_memory_s=0.0,
)
_STREAM = StreamStatus(
    number=1,
    name="photos",
    own_source=False,
    fingerprint="f" * 32,
    samples=100_000,
    batch_size=250,
    steps=400,
    slots=8,
    slots_max=8,
    ready_slots=5,
    leased_slots=1,
    decoded_batches=40,
    decoded_samples=10_000,
    delivered_batches=40,
    delivered_samples=10_000,
    shared_batches=0,
    mismatched_batches=0,
    bad_rows=0,
    bad_samples=0,
    quarantined_samples=0,
    sample_s=0.001,
    work=_WORK,
    stopped=None,
    bgr_fields=(),
    live=None,
    subscriptions=(_SUBSCRIPTION,),
)


def two_looks(
    *,
    work: dict[str, Any] | None = None,
    parts: dict[str, float] | None = None,
    slowest: dict[str, float] | None = None,
    trainer: dict[str, Any] | None = None,
    waits: dict[str, float] | None = None,
    stream: dict[str, Any] | None = None,
    sent_bytes_per_s: float | None = None,
    workers: int = 2,
) -> tuple[DaemonStatus, DaemonStatus]:
    """Return a daemon's status now and ``SECONDS`` later.

    Changes apply to the second status; its counters count from zero.
    """
    begun = _status(
        replace(
            _STREAM, decoded_samples=0, subscriptions=(replace(_SUBSCRIPTION, consumed_batches=0),), work=_none_done()
        ),
        workers,
        sent_bytes_per_s,
    )
    done = replace(
        _WORK,
        parts=tuple(PartStatistics(name, spent_s) for name, spent_s in (parts or {"read": 0.5, "decode": 9.0}).items()),
        slowest=tuple(
            SlowSample(number, *one, slow_row=number + 1) for number, one in enumerate((slowest or {}).items())
        ),
        **(work or {}),
    )
    one = replace(_SUBSCRIPTION, waits=WaitStatistics(**(waits or {})), **(trainer or {}))
    ended = _status(replace(_STREAM, work=done, subscriptions=(one,), **(stream or {})), workers, sent_bytes_per_s)
    ended.daemon.uptime_s += SECONDS
    for worker in ended.workers:
        worker.chunks += 100
    if trainer and "ready_ahead" in trainer:
        begun.streams[0].subscriptions[0].ready_ahead = trainer["ready_ahead"]
    return deepcopy((begun, ended))  # some tests change their values


def link(number: int = 1, **changes: Any) -> LinkStatistics:
    """Make a worker host with eight workers, busy for 70 seconds with 1,000 rows of 100 kB."""
    found = LinkStatistics(
        link=number,
        name=f"node{number}",
        host=f"10.0.0.{number}",
        key="pool",
        pid=70 + number,
        machine="x86_64",
        version="1",
        decoders="",
        state="serving",
        since_s=100.0,
        workers=8,
        orders=50,
        samples=1_000,
        busy_s=70.0,
        received_bytes=10**8,
        late_rows=0,
        withdrawn=0,
        disagreements=0,
        streams=("photos",),
        refused=(),
    )
    return replace(found, **changes)


def with_pool(looks: tuple[DaemonStatus, DaemonStatus], *links: LinkStatistics, **changes: Any) -> None:
    """Add worker hosts, which did all their work between two statuses, and facts of the pool."""
    before, after = looks
    begun = tuple(replace(one, orders=0, samples=0, busy_s=0.0, received_bytes=0) for one in links)
    came_bytes = sum(one.received_bytes for one in links)
    facts = {"ended_links": 0, "last_end": "", "received_bytes": came_bytes} | changes
    after.pool = PoolStatistics("tcp://gpu1:7072", links, **facts)
    before.pool = replace(after.pool, links=begun, received_bytes=0)


def status_classes(kind: type) -> Iterator[type]:
    """Return a class of the status, and those of its fields."""
    yield kind
    for hint in get_type_hints(kind).values():
        for one in (hint, *get_args(hint)):
            if is_dataclass(one):
                assert isinstance(one, type)
                yield from status_classes(one)


def later(status: DaemonStatus, seconds: float = SECONDS) -> DaemonStatus:
    """Return the same status, so much later."""
    copy = deepcopy(status)
    copy.daemon.uptime_s += seconds
    return copy


def _none_done() -> WorkStatistics:
    return WorkStatistics(0.0, 0.0, 0.0, None, 0.0, 0, (), 0.0, 0, 0.0, ())


def _status(stream: StreamStatus, workers: int, sent_bytes_per_s: float | None) -> DaemonStatus:
    transport = "shared memory" if sent_bytes_per_s is None else "tcp"
    daemon = DaemonFacts(
        version="1",
        pid=5,
        uptime_s=100.0,
        memory_bytes=1 << 30,
        cpus=8,
        decoders="",
        reloading=False,
        reload=None,
        http=None,
        local=LocalCounts(1, 0, 0),
        tcp=None,
        worker_deaths=0,
        draining=False,
        ending_slots=0,
    )
    fleet = tuple(WorkerStatistics(number, number, "ready", 1, 10, 100, 1.0) for number in range(workers))
    trainer = TrainerStatistics(1, "train-01", 77, 1000, transport, sent_bytes_per_s=sent_bytes_per_s)
    return DaemonStatus(daemon, fleet, (trainer,), (stream,))


@contextmanager
def open_status_client() -> Iterator[StatusClient]:
    """Make the observer's client; the process in which it usually is ends with its descriptor."""
    client = StatusClient()
    yield client
    os.close(client._wake)
