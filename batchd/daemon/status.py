"""What ``batchd status`` shows, as plain data: the core's statistics and what only the daemon knows. DAEMON process."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from time import monotonic

from batchd.core.statistics import DaemonStatistics
from batchd.daemon.register import RemoteSession
from batchd.daemon.sessions import Session

Plain = dict[str, object]


def plain_status(
    statistics: DaemonStatistics,
    daemon: Plain,
    trainers: Sequence[Session | RemoteSession],
    worker_pids: dict[int, int],
    caches: Mapping[int, Plain],
) -> Plain:
    """Join them: ``{"daemon": …, "workers": […], "trainers": […], "streams": […]}``; keys with units, as in the statistics.

    ``caches``: by the numbers of streams that have one.
    """
    return {
        "daemon": {
            **daemon,
            "worker_deaths": statistics.worker_deaths,
            "draining": statistics.draining,
            "ending_slots": statistics.ending_slots,
        },
        "workers": [{**asdict(worker), "pid": worker_pids.get(worker.number)} for worker in statistics.workers],
        "trainers": [_trainer(one) for one in trainers],
        "streams": [{**_plain(asdict(stream)), "cache": caches.get(stream.number)} for stream in statistics.streams],
    }


def _trainer(one: Session | RemoteSession) -> Plain:
    """Who it is, and which way it gets its batches."""
    facts: Plain = {"session": one.number, "name": one.name, "pid": one.pid}
    if isinstance(one, RemoteSession):
        return facts | {
            "user": None,
            "transport": "tcp",
            "host": one.host,
            "key": one.key.name if one.key is not None else None,
            "sent_bytes": one.sent_bytes,
            "sent_bytes_per_s": one.bytes_per_s(monotonic()),
            "connections": len(one.connections),
        }
    return facts | {
        "user": one.user,
        "transport": "shared memory",
        "host": None,
        "key": None,
        "sent_bytes": None,
        "sent_bytes_per_s": None,
        "connections": 1,
    }


def _plain(value: Plain) -> Plain:
    """Msgpack and JSON know lists, not tuples."""
    return {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
