"""What the figures of ``batchd bench`` mean: CPU time of each step, verdict, what would help. Pure.

Invariant: each sentence has the numbers that it is made of.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from batchd.commands.bench.measure import Figures, Measurement
from batchd.commands.doctor.checks import cheaper_than_hosts
from batchd.config.tree import StreamConfig
from batchd.errors import path_text
from batchd.observe.diagnosis.verdicts import judge
from batchd_wire.wording import BAD_PART, READ_PART, counted

BUSY_SHARE = 0.1
"""Other programs are reported if they use more than this part of the CPUs."""
WORTH, AS_GOOD = 1.2, 0.9
"""batchd's figure divided by the DataLoader's: worth it from here on; as good from here on."""


@dataclass(slots=True)
class BenchResult:
    """All that was measured of one stream; None where it was not.

    ``sides``: with growing numbers of workers. ``later``: with as many as the last of them, from
    epoch 1 on. ``loader_tools``: the libraries of the DataLoader; ``why_no_loader``: the reason if
    there is none. ``reads``: the samples per second that the user's training reads.
    ``without_points``: of the JPEGs looked at, those whose crops need the whole file, and all.
    """

    name: str
    config: StreamConfig
    samples: int
    cpus: int
    sides: list[Measurement] = field(default_factory=list)
    later: Measurement | None = None
    loader: Figures | None = None
    loader_tools: str = ""
    why_no_loader: str = ""
    reads: float | None = None
    without_points: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def best(self) -> Measurement | None:
        """What training gets for most of its time: with all workers, in later epochs."""
        measured = [*self.sides, *([self.later] if self.later is not None else [])]
        return next((one for one in reversed(measured) if one.figures.samples), None)


def part_times(measurement: Measurement) -> list[tuple[str, float]]:
    """CPU time of each part of a sample in ms, in the order of the work.

    That of reading is measured; that of the steps is the rest of the workers', divided by the time
    that each takes. The last one is what the daemon and the trainer take.
    """
    work = measurement.stream.work
    if not work.samples:
        return []
    steps = [(name, spent_s) for name, spent_s in work.parts if name not in (READ_PART, BAD_PART)]
    spent_s = sum(each for _name, each in steps)
    rest_s = max(0.0, work.counts.cpu_s - work.counts.read_cpu_s)
    cpu_s = [(READ_PART, work.counts.read_cpu_s)]
    cpu_s += [(name, rest_s * each / spent_s if spent_s else 0.0) for name, each in steps]
    cpu_s.append(("daemon and trainer", max(0.0, measurement.figures.cpu_s - work.counts.cpu_s)))
    return [(name, 1000 * each / work.samples) for name, each in cpu_s]


def disturbances(result: BenchResult) -> list[str]:
    """What makes the figures worse than they could be, or is missing from them."""
    measured = [side.figures for side in [*result.sides, *([result.later] if result.later else [])]]
    measured += [result.loader] if result.loader is not None else []
    found = list(result.notes)
    others = max((one.others_cpus for one in measured), default=0.0)
    if others > BUSY_SHARE * result.cpus:
        found.append(
            f"other programs used up to {others:.1f} of {counted(result.cpus, 'CPU')} meanwhile, so samples/s are too low; "
            "CPU time changes little"
        )
    last = result.sides[-1] if result.sides else None
    if last is not None and not last.figures.samples:
        found.append("no sample was finished in the time of a measurement; raise --seconds")
    if last is not None and result.config.cache_kind != "off" and result.later is None and not last.epoch:
        found.append("these are the first epoch's figures: the cache was still empty, and later epochs are faster")
    if last is not None and last.bad:
        rows = last.stream.now.decoded_samples
        found.append(f"{last.bad:,} of the first {rows:,} samples made cannot be used: {'; '.join(last.bad_named)}")
    return found


def verdict(result: BenchResult) -> list[str]:
    """Whether batchd is worth it for this stream, in sentences; the first one is the answer."""
    best = result.best
    if best is None:
        return ["Not known: nothing was measured."]
    return [*_beside_loader(result, best.figures), _step_text(result, best.figures)]


def _beside_loader(result: BenchResult, mine: Figures) -> Iterator[str]:
    its = result.loader
    if its is None or not its.cpu_ms or not mine.cpu_ms:
        late = "Ctrl-C came before it was measured" if result.is_interrupted else "it made no sample in its time"
        why = result.why_no_loader or late
        yield f"Not known beside a DataLoader: {why}."
        return
    is_busy = max(mine.others_cpus, its.others_cpus) > BUSY_SHARE * result.cpus
    above, below = ((its.cpu_ms, *its.costs), (mine.cpu_ms, *mine.costs)) if is_busy else (_rates(mine), _rates(its))
    ratio, low, high = (_ratio(above[i], below[j]) for i, j in ((0, 0), (1, 2), (2, 1)))
    costs = f"{mine.cpu_ms:.2f} CPU seconds for 1,000 samples instead of {its.cpu_ms:.2f}"
    speeds = f"{mine.samples_per_s:,.0f} samples/s instead of {its.samples_per_s:,.0f}"
    than = f"a DataLoader with as many workers ({low:.1f} to {high:.1f})"
    found = f"{ratio:.1f} times as fast as {than}: {speeds}, {costs}"
    if is_busy:  # CPU time changes little
        found = f"{ratio:.1f} times the samples of {than} in the same CPU time: {costs}"
    if ratio < AS_GOOD:
        yield f"No, not for one trainer: {found}."
    elif ratio < WORTH:
        yield f"Not for the speed of one trainer: {found}."
    elif result.reads is None or result.reads > its.samples_per_s:
        yield f"{'Yes' if low >= 1 else 'Probably'}: {found}."
        if low < 1:
            yield "The range goes below 1, so measure longer (--seconds 60), or while the machine is idle."
    else:
        yield f"Not for the speed: your training reads {result.reads:,.0f} samples/s, and a DataLoader keeps up with that."
        yield f"For the CPUs: {found}."
    at = result.reads or its.samples_per_s
    cores, freed = at * its.cpu_ms / 1000, at * (its.cpu_ms - mine.cpu_ms) / 1000
    change = f"frees {freed:.1f} of" if freed > 0 else f"adds {-freed:.1f} to"
    yield f"It {change} the {cores:.1f} cores that a DataLoader takes for {at:,.0f} samples/s."
    if ratio >= WORTH and result.reads is None:
        yield f"If your training reads less than {at:,.0f} samples/s, a DataLoader keeps up: batchd then frees cores only."
    yield "Each further trainer of the same batches adds no decoding to batchd, and all of it to DataLoaders."


def _rates(figures: Figures) -> tuple[float, float, float]:
    return (figures.samples_per_s, *figures.rates)


def _ratio(above: float, below: float) -> float:
    return above / below if below else inf


def _step_text(result: BenchResult, mine: Figures) -> str:
    batch = result.config.batch_size
    step_ms = 1000 * batch / mine.samples_per_s
    workers = counted(mine.workers, "worker")
    return (
        f"With {workers}, a trainer waits for data if its step takes less than {step_ms:,.1f} ms for {batch:,} samples."
    )


def helps(result: BenchResult) -> list[str]:
    """What would make the stream faster, most important first."""
    best = result.best
    if best is None:
        return []
    found = [f"{one.kind.value}: {one.proof}{f'; {one.remedy}' if one.remedy else ''}" for one in judge(best.reading)]
    cheap = list(cheaper_than_hosts(best.figures.workers, result.cpus, result.config))
    if cheap:
        found.append(f"not done yet: {'; '.join(cheap)}")
    missing, looked_at = result.without_points
    if missing:
        found.append(
            f"{missing} of {counted(looked_at, 'JPEG')} looked at are progressive, so a crop needs the whole file: "
            f"write it so that it does not, once for all: batchd prepare {result.name} --to DIR --set "
            f"'{path_text(('streams', result.name, 'pipeline'))}=[]'"
        )
    return found + _scaling(result.sides)


def _scaling(sides: Sequence[Measurement]) -> list[str]:
    """How much more workers bring, where that is measured."""
    if len(sides) < 2 or not sides[0].figures.samples or not sides[-1].figures.samples:  # noqa: PLR2004  a comparison needs two
        return []
    first, last = sides[0].figures, sides[-1].figures
    gain, most = last.samples_per_s / first.samples_per_s, last.workers / first.workers
    return [
        f"{counted(last.workers, 'worker')} give {gain:.1f} times the samples of {first.workers}, of {most:.1f} at most"
    ]
