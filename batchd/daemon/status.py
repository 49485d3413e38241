"""What ``batchd status`` shows, as plain data: the core's statistics and what only the daemon knows. DAEMON process."""

from dataclasses import asdict

from batchd.core.statistics import DaemonStatistics
from batchd.daemon.sessions import Session

Plain = dict[str, object]


def plain_status(
    statistics: DaemonStatistics, daemon: Plain, sessions: list[Session], worker_pids: dict[int, int]
) -> Plain:
    """Join them: ``{"daemon": …, "workers": […], "trainers": […], "streams": […]}``; keys with units, as in the statistics."""
    return {
        "daemon": {**daemon, "worker_deaths": statistics.worker_deaths, "draining": statistics.draining},
        "workers": [{**asdict(worker), "pid": worker_pids.get(worker.number)} for worker in statistics.workers],
        "trainers": [{"session": one.number, "name": one.name, "pid": one.pid, "user": one.user} for one in sessions],
        "streams": [_plain(asdict(stream)) for stream in statistics.streams],
    }


def _plain(value: Plain) -> Plain:
    """Msgpack and JSON know lists, not tuples."""
    return {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
