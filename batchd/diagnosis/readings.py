"""What happened between two looks at a daemon: differences of its totals. Pure; runs in whichever process asks.

A stream or a trainer that came in between is left out, also where a reload has put it in another's place: there is nothing yet to
compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Plain = Mapping[str, Any]
"""A status, or a part of it, as ``daemon.status`` makes it."""


@dataclass(frozen=True, slots=True)
class WorkReading:
    """The workers' time for one stream, in seconds. ``parts``: by name, in order. ``slowest``: (path, seconds), worst first."""

    samples: int
    busy_s: float
    waited_s: float
    cpu_s: float
    read_bytes: int
    parts: tuple[tuple[str, float], ...]
    usual_sample_s: float
    slow_rows: int
    slow_s: float
    slowest: tuple[tuple[str, float], ...]
    bad_rows: int

    @property
    def storage_s(self) -> float:
        """Waiting for files, or reading them, whatever that takes."""
        return self.waited_s + dict(self.parts).get("read", 0.0)

    @property
    def storage_wait_s(self) -> float:
        """What of it was waiting: sources that decode while they read, as of videos or compressed tables, have a CPU for it."""
        return min(self.storage_s, max(0.0, self.total_s - self.cpu_s))

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.busy_s + self.waited_s


@dataclass(frozen=True, slots=True)
class StreamReading:
    """One stream. Batches of ``batch_size`` samples; its ring has ``slots``, of at most ``slots_max``."""

    name: str
    batch_size: int
    slots: int
    slots_max: int
    stopped: str | None
    work: WorkReading


@dataclass(frozen=True, slots=True)
class TrainerReading:
    """One trainer's claim on a stream: what it got in the meantime, and how it stands.

    ``waits_s``: by cause, see ``core.measure``. ``ready_ahead``: the smaller of both looks. ``sent_bytes_per_s`` is None for one
    on this host. ``number`` is the subscription's.
    """

    number: int
    name: str
    rank: int
    world_size: int
    stream: StreamReading
    seconds: float
    waits_s: Mapping[str, float]
    short_of_memory_s: float
    batches: int
    window: int
    ready_ahead: int
    held_slots: int
    is_waiting: bool
    is_at_end: bool
    sent_bytes_per_s: float | None

    @property
    def wait_s(self) -> float:
        """How long it stood still."""
        return sum(self.waits_s.values())

    @property
    def wait_share(self) -> float:
        """The part of the time in which it stood still, 0 to 1."""
        return min(1.0, self.wait_s / self.seconds)


@dataclass(frozen=True, slots=True)
class Reading:
    """All of it. ``workers`` take orders; ``work_s`` is what they had to do in ``seconds``, all streams together.

    Work is counted when it is done; a worker that did nothing else than what it had in hand already was busy all the time.
    """

    seconds: float
    workers: int
    work_s: float
    streams: tuple[StreamReading, ...]
    trainers: tuple[TrainerReading, ...]

    @property
    def utilisation(self) -> float:
        """The part of the workers' time that they were busy, or waited for files, 0 to 1."""
        return min(1.0, self.work_s / (self.seconds * self.workers)) if self.workers else 0.0


def compare(before: Plain, after: Plain) -> Reading | None:
    """What happened between two statuses of the same daemon; None where the second is of another one, or no time passed."""
    seconds = after["daemon"]["uptime_s"] - before["daemon"]["uptime_s"]
    if seconds <= 0 or before["daemon"]["pid"] != after["daemon"]["pid"]:
        return None
    known = {stream["number"]: stream for stream in before["streams"]}
    trainers = {trainer["session"]: trainer for trainer in after["trainers"]}
    streams, found = [], []
    work_s = seconds * _stuck(before, after)
    for stream in after["streams"]:
        former = known.get(stream["number"])
        if former is None:
            work_s += stream["work"]["busy_s"] + stream["work"]["waited_s"]
            continue
        reading = _stream(former, stream)
        work_s += reading.work.total_s
        streams.append(reading)
        subscriptions = {one["number"]: one for one in former["subscriptions"]}
        found += [
            _trainer(subscriptions[one["number"]], one, trainers[one["session"]], reading, seconds)
            for one in stream["subscriptions"]
            if one["number"] in subscriptions and one["session"] in trainers
        ]
    workers = sum(worker["state"] == "ready" for worker in after["workers"])
    return Reading(seconds, workers, work_s, tuple(streams), tuple(found))


def _stuck(before: Plain, after: Plain) -> int:
    """How many workers had orders at both looks, and finished none in between."""
    former = {worker["number"]: worker for worker in before["workers"] if worker["orders"]}
    return sum(
        worker["orders"] > 0 and worker["number"] in former and former[worker["number"]]["chunks"] == worker["chunks"]
        for worker in after["workers"]
    )


def _stream(before: Plain, after: Plain) -> StreamReading:
    return StreamReading(
        name=after["name"],
        batch_size=after["batch_size"],
        slots=after["slots"],
        slots_max=after["slots_max"],
        stopped=after["stopped"],
        work=_work(before, after),
    )


def _work(before: Plain, after: Plain) -> WorkReading:
    former, work = before["work"], after["work"]
    spent = {part["name"]: 0.0 for part in work["parts"]}
    for sign, parts in ((1, work["parts"]), (-1, former["parts"])):
        for part in parts:
            spent[part["name"]] = spent.get(part["name"], 0.0) + sign * part["busy_s"]
    slowest = sorted(((one["path"], one["taken_s"]) for one in work["slowest"]), key=lambda one: -one[1])
    return WorkReading(
        samples=after["decoded_samples"] - before["decoded_samples"],
        busy_s=work["busy_s"] - former["busy_s"],
        waited_s=work["waited_s"] - former["waited_s"],
        cpu_s=work["cpu_s"] - former["cpu_s"],
        read_bytes=work["read_bytes"] - former["read_bytes"],
        parts=tuple(spent.items()),
        usual_sample_s=work["usual_sample_s"],
        slow_rows=work["slow_rows"] - former["slow_rows"],
        slow_s=work["slow_s"] - former["slow_s"],
        slowest=tuple(slowest),
        bad_rows=after["bad_rows"] - before["bad_rows"],
    )


def _trainer(before: Plain, after: Plain, who: Plain, stream: StreamReading, seconds: float) -> TrainerReading:
    waits = {
        cause.removesuffix("_s"): total - before["waits"].get(cause, 0.0) for cause, total in after["waits"].items()
    }
    return TrainerReading(
        number=after["number"],
        name=who["name"],
        rank=after["rank"],
        world_size=after["world_size"],
        stream=stream,
        seconds=seconds,
        waits_s=waits,
        short_of_memory_s=after["short_of_memory_s"] - before["short_of_memory_s"],
        batches=after["consumed_batches"] - before["consumed_batches"],
        window=after["window"],
        ready_ahead=min(before["ready_ahead"], after["ready_ahead"]),
        held_slots=after["held_slots"],
        is_waiting=after["waiting"],
        is_at_end=after["epoch"] is None,
        sent_bytes_per_s=who["sent_bytes_per_s"],
    )
