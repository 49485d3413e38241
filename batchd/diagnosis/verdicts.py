"""The rules: from what happened to one verdict for each trainer, with the numbers that prove it and what helps. Pure.

    waits less than WAIT_SHARE_MIN?  ring full -> trainer-bound, else -> fed
    else what it waited for most:    network | other trainers | producers -> network-bound | lockstep | producer-bound
         workers or memory, and
             samples are bad                                       -> bad-data
             workers had time, and the ring or the window was full -> memory-bound
             files were waited for half of the workers' time,
             without a CPU                                         -> storage-bound
             few samples took much of it                           -> slow-samples
             workers had no CPU for much of it                     -> cpu-starved
             else                                                  -> decode-bound

The first that fits is the verdict: a rule further down would hold as well where one above does, and its remedy would not help.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import ceil
from pathlib import PurePath

from batchd.diagnosis.readings import Reading, TrainerReading, WorkReading
from batchd_wire.wording import counted

WAIT_SHARE_MIN = 0.05
"""A trainer that waits less is not slowed down by anything here."""
MAIN_SHARE = 0.5
"""What makes up so much of a time is what it is about."""
BAD_SHARE_MIN = 0.05
IDLE_SHARE_MIN = 0.3
"""Workers that idle for so long while somebody waits were not what it waited for."""
SLOW_SHARE_MIN = 0.3
SLOW_ROWS_SHARE_MAX = 0.25
"""Where more samples than that are slow, they are no class of their own."""
CPU_SHARE_MIN = 0.7
ENDLESS_SHARE = 0.9
"""A trainer that waits more than that takes batches as fast as they come: no number of cores is enough."""
SLOW_NAMED_MAX = 3
OWN_FUNCTION = "call"
"""The step that is somebody's own function."""


class Kind(Enum):
    """What a verdict says; see above. The last four are about streams and trainers of which there is nothing to measure."""

    TRAINER_BOUND = "trainer-bound"
    FED = "fed"
    NETWORK_BOUND = "network-bound"
    LOCKSTEP = "lockstep"
    PRODUCER_BOUND = "producer-bound"
    BAD_DATA = "bad-data"
    MEMORY_BOUND = "memory-bound"
    STORAGE_BOUND = "storage-bound"
    SLOW_SAMPLES = "slow-samples"
    CPU_STARVED = "cpu-starved"
    DECODE_BOUND = "decode-bound"
    STOPPED = "stopped"
    NO_WORKERS = "no-workers"
    AT_END = "at-end"
    STANDS_STILL = "stands-still"

    @property
    def is_healthy(self) -> bool:
        """Is nothing here to be mended?"""
        return self in (Kind.TRAINER_BOUND, Kind.FED, Kind.AT_END, Kind.STANDS_STILL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one trainer waits, or that it does not. ``proof``: the numbers; ``remedy``: what helps, empty where nothing need."""

    kind: Kind
    trainer: str
    stream: str
    rank: int
    world_size: int
    wait_share: float
    proof: str
    remedy: str

    def __str__(self) -> str:
        rank = f" rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.trainer} on {self.stream}{rank}: {self.kind.value}: {self.proof}{remedy}"


Finding = tuple[Kind, str, str]
"""Kind, proof and remedy."""


def judge(reading: Reading) -> list[Verdict]:
    """One verdict for each trainer, those who wait most first."""
    trainers = sorted(reading.trainers, key=lambda one: -one.wait_share)
    return [verdict_on(trainer, reading) for trainer in trainers]


def verdict_on(trainer: TrainerReading, reading: Reading) -> Verdict:
    """The verdict for one trainer; ``reading`` is what it is part of."""
    kind, proof, remedy = _finding(trainer, reading)
    return Verdict(
        kind,
        trainer.name,
        trainer.stream.name,
        trainer.rank,
        trainer.world_size,
        trainer.wait_share,
        proof,
        remedy,
    )


def _finding(trainer: TrainerReading, reading: Reading) -> Finding:
    stopped = trainer.stream.stopped
    if stopped is not None:
        return Kind.STOPPED, f"the stream has stopped: {stopped}", "mend that and restart or reload the daemon"
    if trainer.wait_share < WAIT_SHARE_MIN:
        return _not_waiting(trainer, reading)
    cause = max(trainer.waits_s, key=lambda name: trainer.waits_s[name])
    if cause in _OUTSIDE:
        return _OUTSIDE[cause](trainer, reading)
    if not reading.workers:
        remedy = "batchd status shows whether they start, and the daemon's log why they end"
        return Kind.NO_WORKERS, f"{_waits(trainer)}, and no worker takes orders", remedy
    return next(finding for rule in _INSIDE if (finding := rule(trainer, reading)) is not None)


def _not_waiting(trainer: TrainerReading, reading: Reading) -> Finding:
    if not trainer.batches:
        if trainer.is_at_end:
            return Kind.AT_END, "it has read all that it asked for", ""
        took = f"it took no batch for {trainer.seconds:.0f} s and asked for none"
        return Kind.STANDS_STILL, f"{took}: {counted(trainer.ready_ahead, 'batch')} ready for it", ""
    step_ms = 1000 * (trainer.seconds - trainer.wait_s) / trainer.batches
    waits = f"it waits {trainer.wait_share:.1%} of the time"
    most = min(trainer.window, trainer.stream.slots_max - 1)
    if trainer.ready_ahead < max(1, most - 1):  # the batch behind what was taken last is always being filled
        return Kind.FED, f"{waits}; {step_ms:.0f} ms of its own for each batch", ""
    idle = f"workers idle {1 - reading.utilisation:.0%}"
    ahead = f"{trainer.ready_ahead} of {counted(trainer.window, 'batch')} ready ahead"
    remedy = "data is not what it waits for: look at the training step"
    return Kind.TRAINER_BOUND, f"{waits}, {ahead}, {idle}; {step_ms:.0f} ms of its own for each batch", remedy


# --- what it waits for is not here ------------------------------------------------------------------------------------


def _network(trainer: TrainerReading, _reading: Reading) -> Finding:
    rate = f", {trainer.sent_bytes_per_s / 1e6:.0f} MB/s" if trainer.sent_bytes_per_s is not None else ""
    share = trainer.waits_s["network"] / trainer.wait_s
    proof = f"{_waits(trainer)}, {share:.0%} of that for batches on their way{rate}"
    return (
        Kind.NETWORK_BOUND,
        proof,
        "send less (uint8 instead of floats, smaller images), or try connect(connections=4)",
    )


def _lockstep(trainer: TrainerReading, reading: Reading) -> Finding:
    others = [one for one in reading.trainers if one.stream is trainer.stream and one is not trainer]
    slowest = min(others, key=lambda one: one.wait_share, default=None)
    who = f", of which {slowest.name} waits least ({slowest.wait_share:.0%})" if slowest else ""
    proof = f"{_waits(trainer)} for the other trainers of the stream{who}"
    return Kind.LOCKSTEP, proof, 'a larger max_skew, or lag = "independent", lets it run ahead'


def _producers(trainer: TrainerReading, _reading: Reading) -> Finding:
    samples = trainer.batches * trainer.stream.batch_size / trainer.seconds
    proof = f"{_waits(trainer)} for samples that nobody has pushed; {samples:.0f} samples/s came"
    return Kind.PRODUCER_BOUND, proof, "push faster, or from more programs"


_OUTSIDE: dict[str, Callable[[TrainerReading, Reading], Finding]] = {
    "network": _network,
    "trainers": _lockstep,
    "producers": _producers,
}

# --- it is: workers or memory -----------------------------------------------------------------------------------------


def _bad_data(trainer: TrainerReading, _reading: Reading) -> Finding | None:
    work = trainer.stream.work
    if not work.samples or work.bad_rows < BAD_SHARE_MIN * work.samples:
        return None
    share = work.bad_rows / work.samples
    proof = f"{_waits(trainer)}, and {share:.0%} of the samples are bad, {counted(work.bad_rows, 'row')}"
    return (
        Kind.BAD_DATA,
        proof,
        f"batchd bad {trainer.stream.name} lists them: mend them, or take them out of the source",
    )


def _memory(trainer: TrainerReading, reading: Reading) -> Finding | None:
    idle_share = 1 - reading.utilisation
    if idle_share < IDLE_SHARE_MIN:
        return None
    stream, proof = trainer.stream, f"{_waits(trainer)} while workers idle {idle_share:.0%}"
    is_short = trainer.short_of_memory_s >= MAIN_SHARE * trainer.seconds or stream.slots_max <= trainer.window
    if is_short or trainer.waits_s["memory"] >= MAIN_SHARE * trainer.wait_s:
        slots = f"a ring of {counted(stream.slots_max, 'slot')} for a window of {trainer.window}"
        held = f", {trainer.held_slots} of them held by it" if trainer.held_slots > 1 else ""
        return (
            Kind.MEMORY_BOUND,
            f"{proof}: {slots}{held}",
            f"give it more: memory = in [streams.{stream.name}], or in [daemon]",
        )
    proof += f": it takes batches in bursts, and {trainer.window} ahead do not bridge them"
    return Kind.MEMORY_BOUND, proof, f"a larger window = in [streams.{stream.name}], and memory = to match"


def _storage(trainer: TrainerReading, _reading: Reading) -> Finding | None:
    work = trainer.stream.work
    if not work.samples or work.storage_wait_s < MAIN_SHARE * work.total_s:
        return None
    rate = f"{work.read_bytes / trainer.seconds / 1e6:.1f} MB/s"
    share = f"workers wait for files {work.storage_wait_s / work.total_s:.0%} of their time"
    proof = f"{_waits(trainer)}; {share}, {_ms(work.storage_wait_s, work)} a sample, {rate}"
    return (
        Kind.STORAGE_BOUND,
        proof,
        "faster storage or a local copy; more workers wait for more files at once (workers =)",
    )


def _slow_samples(trainer: TrainerReading, _reading: Reading) -> Finding | None:
    work = trainer.stream.work
    spent_s = work.cpu_s + work.storage_s
    if (
        not work.slow_rows
        or work.slow_s < SLOW_SHARE_MIN * spent_s
        or work.slow_rows > SLOW_ROWS_SHARE_MAX * work.samples
    ):
        return None
    rows, times = work.slow_rows / work.samples, work.slow_s / work.slow_rows / (work.usual_sample_s or 1e-6)
    proof = f"{_waits(trainer)}; {rows:.1%} of the samples take {work.slow_s / spent_s:.0%} of the time, {times:.0f} x as usual"
    named = ", ".join(
        f"{PurePath(path).name} {1000 * taken_s:.0f} ms" for path, taken_s in work.slowest[:SLOW_NAMED_MAX]
    )
    return (
        Kind.SLOW_SAMPLES,
        f"{proof}: {named}",
        "make these smaller, or leave them out; batchd status --json has more of them",
    )


def _cpu_starved(trainer: TrainerReading, reading: Reading) -> Finding | None:
    work = trainer.stream.work
    computing_s = work.busy_s - work.storage_s + work.waited_s
    is_own = _slowest_part(work)[0] == OWN_FUNCTION  # which may wait for something itself
    if not work.samples or is_own or work.cpu_s >= CPU_SHARE_MIN * computing_s:
        return None
    proof = (
        f"{_waits(trainer)}; workers had a CPU for {work.cpu_s / computing_s:.0%} of the time in which they wanted one"
    )
    sharing = f"{counted(reading.workers, 'worker')} share what is left (batchd doctor)"
    remedy = f"free cores of other work, or raise the CPU quota: {sharing}"
    return Kind.CPU_STARVED, proof, remedy


def _decode(trainer: TrainerReading, reading: Reading) -> Finding:
    work = trainer.stream.work
    if not work.samples:
        proof = f"{_waits(trainer)} for workers that finished nothing in {trainer.seconds:.0f} s"
        return Kind.DECODE_BOUND, proof, "look for longer (--seconds 60): what is in hand is counted when it is done"
    name, spent_s = _slowest_part(work)
    proof = f"{_waits(trainer)}; {name} takes {_ms(spent_s, work)} of {_ms(work.busy_s, work)} a sample"
    return Kind.DECODE_BOUND, f"{proof}, workers busy {reading.utilisation:.0%}", _cores(trainer, reading, work)


_INSIDE: tuple[Callable[[TrainerReading, Reading], Finding | None], ...] = (
    _bad_data,
    _memory,
    _storage,
    _slow_samples,
    _cpu_starved,
    _decode,
)


def _slowest_part(work: WorkReading) -> tuple[str, float]:
    """The part that takes longest, and its seconds."""
    return max(work.parts, key=lambda part: part[1], default=("decode", work.busy_s))


def _cores(trainer: TrainerReading, reading: Reading, work: WorkReading) -> str:
    """How many more cores would end the waiting: so many as make the same work take the time that the trainer computes."""
    if trainer.wait_share > ENDLESS_SHARE:
        each = work.samples / work.busy_s
        return f"it takes batches as fast as they come: each core more is {each:.0f} samples/s more"
    used = work.total_s / reading.seconds
    more = max(1, ceil(used / (1 - trainer.wait_share) - used))
    return f"{counted(more, 'core')} more would end it (workers =)"


def _waits(trainer: TrainerReading) -> str:
    return f"waits {trainer.wait_share:.0%} of the time"


def _ms(seconds: float, work: WorkReading) -> str:
    """Time for each sample."""
    return f"{1000 * seconds / work.samples:.2f} ms"


def worst(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The first that says something is wrong, if any does."""
    return next((verdict for verdict in verdicts if not verdict.kind.is_healthy), None)
