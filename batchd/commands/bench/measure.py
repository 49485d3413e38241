"""Measures how many samples a second a stream gives, with a daemon and a trainer of its own.

    start daemon, trainer | warm-up: not counted | status ... status | end both
                                                   `---- reading ----'

The trainer takes batches as fast as they come, so samples that workers finish are samples that
trainers get. They are counted by the daemon, in chunks of some 20 ms of work, so seconds are
enough. Each measurement begins at another place of the epoch: the files are not in the page cache
because of the measurement before it.

Foreign programs make wall-clock figures worse, and CPU time much less. So both are measured, and
how much of the CPUs others used, from ``/proc``.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from batchd.config.environment import DAEMON_VARIABLES
from batchd.config.schema import toml_key, toml_value
from batchd.config.tree import DaemonConfig, StreamConfig
from batchd.embedded import serve
from batchd.errors import BatchdError
from batchd.observe.diagnosis.readings import Reading, StreamReading, compare
from batchd.runtime.children import PIPE, STDOUT, Child, start
from batchd_client.asking import ANSWER_TIMEOUT_S, ask_status, asking
from batchd_client.errors import BatchdClientError
from batchd_client.session import Session
from batchd_wire.messages import AskBad, BadSamples
from batchd_wire.status import DaemonStatus, StreamStatus
from batchd_wire.wording import counted

WARM_UP_SHARE = 0.3
"""Part of a measurement's time, once its daemon is ready, that does not count."""
MEASURED_S_MIN = 1.0
PATIENCE_S = 20.0
"""A measurement without a sample is prolonged by at most this time."""
ANSWER_BYTES = 4096
TICK_S = 0.2
PARTS = 4
"""Of a measurement: how far they are apart is its spread."""
BAD_SHOWN = 3
CACHE_BYTES = 1 << 30
"""Limit of the cache in memory that replaces one on disk."""
_LEFT_OUT = {
    *("runtime_dir", "tcp", "worker_address", "http", "http_details", "http_names", "keys_dir", "workers", "memory"),
    *("writable_slots", "reserve"),
    *(name for name in DaemonConfig.model_fields if name.startswith("pool_")),
}
"""Keys of [daemon] that the daemon of a measurement does not get: it serves one local trainer."""
_REPLACED = {"memory", "cache_memory", "cache_dir", "cache_size"}
"""Keys of the stream to which a measurement gives other values."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Indexes among the fields behind the name in a process's ``stat``: proc_pid_stat(5)."""
_IDLE, _IO_WAIT, _GUEST = 3, 4, 8
"""Indexes among the numbers of a CPU in ``/proc/stat``; those from ``_GUEST`` on are in others."""

Report = Callable[[int, float], None]
"""Called as ``report(samples, seconds)`` with the counts so far, to show the progress."""


class CpuTimes(NamedTuple):
    """Seconds of CPU time so far: of all programs on the CPUs of this process, and of some."""

    machine_s: float
    tree_s: float


def cpu_times(root: int) -> CpuTimes:
    """CPU time of the machine, and of process ``root`` with all its descendants."""
    return CpuTimes(_machine_s(), tree_cpu_s(root))


def tree_cpu_s(root: int) -> float:
    """CPU time of a process and all its living descendants, in seconds."""
    children: dict[int, list[int]] = {}
    spent: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            facts = Path(f"/proc/{entry.name}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(entry.name)
        spent[pid] = int(facts[_USER]) + int(facts[_SYSTEM])
        children.setdefault(int(facts[_PARENT]), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return sum(spent.get(pid, 0) for pid in found) / _TICKS_PER_S


def _machine_s() -> float:
    """CPU time of all programs on the CPUs that this process may use, in seconds."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name in names:
            busy = [int(one) for place, one in enumerate(numbers[:_GUEST]) if place not in (_IDLE, _IO_WAIT)]
            ticks += sum(busy)
    return ticks / _TICKS_PER_S


class Look(NamedTuple):
    """Counters at one moment: samples made, time, CPU time of what is measured, and of all."""

    samples: int
    at_s: float
    own_s: float
    all: CpuTimes


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement. ``cpu_s``: CPU time of all processes of the measurement.

    ``others_cpus``: the CPUs that other programs used meanwhile, on average. ``parts``: samples,
    seconds and CPU seconds of each part of it.
    """

    workers: int
    samples: int
    seconds: float
    cpu_s: float
    others_cpus: float
    parts: tuple[tuple[int, float, float], ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def cpu_ms(self) -> float | None:
        """CPU time for each sample, in ms; None without samples."""
        return 1000 * self.cpu_s / self.samples if self.samples else None

    @property
    def rates(self) -> tuple[float, float]:
        """The samples per second of the slowest and of the fastest part."""
        found = [samples / seconds for samples, seconds, _cpu_s in self.parts if seconds] or [self.samples_per_s]
        return min(found), max(found)

    @property
    def costs(self) -> tuple[float, float]:
        """The CPU time for each sample in the cheapest and in the dearest part, in ms."""
        found = [1000 * cpu_s / samples for samples, _seconds, cpu_s in self.parts if samples] or [self.cpu_ms or 0.0]
        return min(found), max(found)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of the daemon, with what its counters say. ``epoch``: that at the beginning.

    ``bad``: bad samples so far, and some of them with the reason.
    """

    figures: Figures
    reading: Reading
    stream: StreamReading
    epoch: int
    bad: int
    bad_named: tuple[str, ...]


def figures_of(workers: int, looks: Sequence[Look]) -> Figures:
    """Figures of two or more looks: their differences."""
    first, last = looks[0], looks[-1]
    seconds = last.at_s - first.at_s
    machine_s, tree_s = (last.all[place] - first.all[place] for place in (0, 1))
    others = max(0.0, machine_s - tree_s) / seconds if seconds else 0.0
    parts = tuple(
        (after.samples - before.samples, after.at_s - before.at_s, max(0.0, after.own_s - before.own_s))
        for before, after in pairwise(looks)
    )
    return Figures(workers, last.samples - first.samples, seconds, max(0.0, last.own_s - first.own_s), others, parts)


def figures_until(
    until_s: float, workers: int, count: Callable[[], tuple[int, float]], spent_s: Callable[[], float], report: Report
) -> Figures:
    """Measure until ``monotonic`` is ``until_s``, and ``PATIENCE_S`` longer if no sample is made.

    ``count`` waits ``TICK_S`` and gives the samples made so far, and the time; ``spent_s`` gives
    the CPU time of the measured processes.
    """

    def look(samples: int, at_s: float) -> Look:
        return Look(samples, at_s, spent_s(), cpu_times(os.getpid()))

    looks = [look(*count())]
    began_s = monotonic()
    until_s = max(until_s, began_s + MEASURED_S_MIN)
    is_over = False
    while not is_over:
        samples, at_s = count()
        made = samples - looks[0].samples
        report(made, at_s - looks[0].at_s)
        is_over = monotonic() >= (until_s if made else until_s + PATIENCE_S)
        if is_over or monotonic() >= began_s + len(looks) * (until_s - began_s) / PARTS:
            looks.append(look(samples, at_s))
    return figures_of(workers, looks)


@dataclass(frozen=True, slots=True)
class OneStream:
    """One stream of a configuration. ``data``: all of that, with absolute paths.

    ``ring_bytes``: the memory that the stream has there.
    """

    name: str
    config: StreamConfig
    data: Mapping[str, object]
    ring_bytes: int

    def write(self, file: Path, samples: int | None = None) -> None:
        """Write a configuration of this stream alone; ``samples``: with so many of its source."""
        daemon, streams = self.data["daemon"], self.data["streams"]
        assert isinstance(daemon, Mapping)
        assert isinstance(streams, Mapping)
        lines = ["[daemon]", 'http = "off"', f"memory = {self.ring_bytes}"]
        lines += [f"{key} = {toml_value(value)}" for key, value in daemon.items() if key not in _LEFT_OUT]
        table = {key: value for key, value in streams[self.name].items() if key not in _REPLACED} | self._cache()
        if samples is not None:
            table["source"] = {"type": "subset", "of": table["source"], "stop": samples, "shuffle_seed": 0}
        lines += [f"[streams.{toml_key(self.name)}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _cache(self) -> dict[str, object]:
        """The keys of a cache in memory, also for one on disk: that file may belong to a daemon."""
        stream = self.config
        if stream.cache_kind in {"off", "points"} or stream.cache_bytes is None:
            return {"cache": stream.cache_kind}
        budget = stream.cache_bytes if stream.cache_dir is None else min(stream.cache_bytes, CACHE_BYTES)
        return {"cache": stream.cache_kind, "cache_memory": budget}


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: of the stream ``name`` of ``file``, until ``monotonic`` is ``until_s``.

    ``share``: of the epoch at which it begins. ``is_later``: it measures from epoch 1 on.
    """

    file: Path
    name: str
    workers: int
    share: float
    until_s: float
    report: Report
    is_later: bool = False


def measure(task: Task) -> Measurement:
    """Start a daemon, read, and end it. Raises ``BatchdError``."""
    with (
        _without_variables(),
        serve(task.file, overrides={"daemon.workers": str(task.workers)}) as address,
        start(
            "batchd.commands.bench.trainer", address, task.name, str(task.share), stdout=PIPE, stderr=STDOUT
        ) as trainer,
        asking(address) as session,
    ):
        try:
            return _measured(task, session, trainer)
        except BatchdClientError as error:
            raise BatchdError(f"the daemon of the measurement: {error}") from None


def _measured(task: Task, session: Session, trainer: Child) -> Measurement:
    began_s = monotonic()
    warm_s = began_s + WARM_UP_SHARE * (task.until_s - began_s)
    statuses = _statuses(session, trainer, task.name)
    for before, first in statuses:
        task.report(first.decoded_samples, before.daemon.uptime_s)
        is_there = _epoch(first) >= 1 if task.is_later else first.decoded_samples > 0
        if monotonic() >= (warm_s if is_there else task.until_s):
            break
    seen: list[DaemonStatus] = []

    def count() -> tuple[int, float]:
        status, stream = next(statuses)
        seen[1:] = [status]
        return stream.decoded_samples, status.daemon.uptime_s

    figures = figures_until(
        task.until_s,
        task.workers,
        count,
        lambda: tree_cpu_s(before.daemon.pid) + tree_cpu_s(trainer.pid),
        task.report,
    )
    reading = compare(seen[0], seen[-1])
    assert reading is not None, "one daemon, and time has passed"
    (of_stream,) = reading.streams
    bad, named = bad_samples(session, task.name)
    return Measurement(figures, reading, of_stream, _epoch(first), bad, named)


def _statuses(session: Session, trainer: Child, name: str) -> Iterator[tuple[DaemonStatus, StreamStatus]]:
    """The daemon's status, every ``TICK_S``.

    Raises ``BatchdError`` when the stream has stopped or the trainer has ended.
    """
    while True:
        has_ended = trainer.has_ended(TICK_S)  # before the status, which then says why
        status = ask_status(session)
        stream = status.stream(name)
        assert stream is not None, "it is served"
        if stream.stopped is not None:
            bad, named = bad_samples(session, name)
            such = f"; {counted(bad, 'sample')} so far: {'; '.join(named)}" if bad else ""
            raise BatchdError(f"stream {name} has stopped: {stream.stopped}{such}")
        if has_ended:
            said = trainer.read(ANSWER_TIMEOUT_S, ANSWER_BYTES).decode(errors="replace").strip()
            raise BatchdError(
                f"the trainer of the measurement ended: {said.splitlines()[-1] if said else 'no message'}"
            )
        yield status, stream


def _epoch(stream: StreamStatus) -> int:
    """The epoch of the last batch that the trainer has taken; -1 before it has one."""
    return max((one.last_epoch for one in stream.subscriptions if one.last_epoch is not None), default=-1)


def bad_samples(session: Session, name: str) -> tuple[int, tuple[str, ...]]:
    """The number of bad samples so far, and some of them: path and reason."""
    answer = session.request(lambda request: AskBad(request, name), BadSamples, monotonic() + ANSWER_TIMEOUT_S)
    named = (
        f"{path}: {(reason.splitlines() or [''])[0]}" for _sample, path, reason, _times in answer.samples[:BAD_SHOWN]
    )
    return answer.total, tuple(named)


@contextmanager
def _without_variables() -> Iterator[None]:
    """The variables of the keys of [daemon] are in the written configuration already."""
    kept = {name: os.environ.pop(name) for name in DAEMON_VARIABLES.values() if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
