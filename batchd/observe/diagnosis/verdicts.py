"""The rules: from a reading to one verdict for each trainer, with the proof and the remedy. Pure.

    the stream has stopped -> stopped; waits for its storage -> storage-away
    waits less than WAIT_SHARE_MIN?  ring full -> trainer-bound, else -> fed
    else what it waited for most:    network -> network-bound | other trainers -> lockstep
                                     producers -> producer-bound
         workers that died meanwhile                               -> dying-workers
         workers or memory, and
             rows of worker hosts fill the network                 -> pool-network-bound
             no slot was free, or workers had time                 -> memory-bound
             bad samples took much of the workers' time            -> bad-data
             files, or the user's own source, took half of it      -> storage-bound
             few samples took much of it                           -> slow-samples
             workers were runnable without a CPU for much of it    -> cpu-starved
             all worker hosts are gone                             -> no-worker-hosts
             worker hosts are here and cannot fill the stream      -> unused-worker-hosts
             else                                                  -> decode-bound

The first rule that fits is the verdict. A later one may fit as well, but more cores do not help a
stream that is limited by memory or storage.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from pathlib import PurePath

from batchd.observe.diagnosis.demand import StreamLoad, needed_workers
from batchd.observe.diagnosis.pool import OPENING_S, gigabytes, start_command, trouble
from batchd.observe.diagnosis.readings import PoolReading, Reading, StreamReading, TrainerReading, WorkReading
from batchd.runtime.sizes import round_bytes
from batchd_wire.status import LinkStatistics
from batchd_wire.wording import counted

WAIT_SHARE_MIN = 0.05
"""A trainer that waits less is not slowed down by batchd."""
MAIN_SHARE = 0.5
"""A cause with this part of the time is the main one."""
BAD_TIME_MIN = 0.3
"""Part of the workers' time from which bad samples are the cause."""
BAD_SHARE_MIN = 0.05
"""Part of bad samples that is mentioned, whatever the cause."""
IDLE_SHARE_MIN = 0.3
"""If workers idle for this part while a trainer waits, they are not the cause."""
SLOW_SHARE_MIN = 0.3
SLOW_ROWS_SHARE_MAX = 0.25
"""If more samples than this are slow, they are not outliers."""
NO_CPU_MIN = 0.3
NETWORK_FULL = 0.8
"""If rows take this part of the network's speed, more worker hosts do not help."""
ENDLESS_SHARE = 0.9
"""A trainer that waits more takes any number of batches, so no number of cores is enough."""
AGAIN_SHARE_MIN = 0.05
"""Part of the samples that is mentioned if it is decoded again for a trainer that is behind."""
SLOW_NAMED_MAX = 3
OTHER_REMEDIES = "a cheaper pipeline, worker hosts (worker_address =), or a daemon on another host"
MORE_HOSTS = "start more worker hosts (batchd worker)"
HOSTS_NAMED_MAX = 3
OWNERS_NAMED_MAX = 4
CACHE_MARGIN = 1.05
"""Factor on the bytes of the samples, for a cache's index and the ends of extents."""
KEEP_PIXELS = {"pixels", "decoded"}
"""Caches of decoded images."""
FASTER_STORAGE = "faster storage or a local copy"


class Kind(Enum):
    """Kinds of verdicts, see above. With the last four there is nothing to measure."""

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
    POOL_NETWORK_BOUND = "pool-network-bound"
    NO_WORKER_HOSTS = "no-worker-hosts"
    UNUSED_WORKER_HOSTS = "unused-worker-hosts"
    DYING_WORKERS = "dying-workers"
    STOPPED = "stopped"
    STORAGE_AWAY = "storage-away"
    NO_WORKERS = "no-workers"
    AT_END = "at-end"
    STANDS_STILL = "stands-still"

    @property
    def is_healthy(self) -> bool:
        """True if nothing needs a remedy."""
        return self in (Kind.TRAINER_BOUND, Kind.FED, Kind.AT_END, Kind.STANDS_STILL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one trainer waits, or not. ``proof``: the numbers; ``remedy``: what helps, or ""."""

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
MORE_CORES = "more cores"
"""A remedy whose number depends on all trainers together, see ``_cores``."""
PIXEL_BYTES_PER_FILE_BYTE = 6
"""Of photographs as JPEGs, between 4 and 8; ``batchd check --explain`` looks at the user's."""


def judge(reading: Reading) -> list[Verdict]:
    """One verdict for each trainer, those that wait most first."""
    return [verdict for _trainer, verdict in judge_trainers(reading)]


def judge_trainers(reading: Reading) -> list[tuple[TrainerReading, Verdict]]:
    """The same, each with its trainer."""
    trainers = sorted(reading.trainers, key=lambda trainer: -trainer.wait_share)
    findings = [(trainer, *_finding(trainer, reading)) for trainer in trainers]
    short = [trainer for trainer, _, _, remedy in findings if remedy is MORE_CORES]
    judged = []
    for trainer, kind, proof, found in findings:
        remedy = _cores(trainer, short, reading) if found is MORE_CORES else found
        now, stream = trainer.now, trainer.stream.name
        verdict = Verdict(kind, trainer.name, stream, now.rank, now.world_size, trainer.wait_share, proof, remedy)
        judged.append((trainer, verdict))
    return judged


def _finding(trainer: TrainerReading, reading: Reading) -> Finding:
    stopped = trainer.stream.now.stopped
    if stopped is not None:
        return Kind.STOPPED, f"the stream has stopped: {stopped}", "remove the cause, then reload or restart the daemon"
    away = trainer.stream.now.away
    if away is not None:
        proof = f"the storage of the stream has been away for {trainer.stream.now.away_s:.0f} s: {away}"
        return Kind.STORAGE_AWAY, proof, "bring it back: the stream goes on by itself, at the same batches"
    if trainer.wait_share < WAIT_SHARE_MIN:
        return _not_waiting(trainer, reading)
    cause = max(trainer.waits_s, key=lambda name: trainer.waits_s[name])
    if cause in _OUTSIDE:
        return _OUTSIDE[cause](trainer, reading)
    if reading.deaths and cause == "workers":
        died = f"{counted(reading.deaths, 'worker')} died or {'was' if reading.deaths == 1 else 'were'} killed"
        remedy = f"the daemon's log shows why; batchd bad {trainer.stream.name} lists the samples that caused it"
        return Kind.DYING_WORKERS, f"{_waits(trainer)}, and {died} in {reading.seconds:.0f} s", remedy
    if not reading.workers:
        remedy = "batchd status shows whether they start, and the daemon's log why they end"
        return Kind.NO_WORKERS, f"{_waits(trainer)}, and no worker takes orders", remedy
    kind, proof, remedy = next(finding for rule in _INSIDE if (finding := rule(trainer, reading)) is not None)
    proof += _far_behind(trainer, reading) if kind in (Kind.DECODE_BOUND, Kind.MEMORY_BOUND) else ""
    return kind, proof if kind is Kind.BAD_DATA else proof + _bad_ones(trainer), remedy


def _far_behind(trainer: TrainerReading, reading: Reading) -> str:
    """What the slowest mirror trainer of a stream costs the others, or ""."""
    stream = trainer.stream
    mirrors = {
        mirror.now.epoch * stream.now.steps + (mirror.now.step or 0): mirror
        for mirror in reading.trainers
        if mirror.stream is stream
        and mirror.now.world_size == 1
        and not mirror.now.is_spectator
        and mirror.now.epoch is not None
    }
    if not mirrors or not stream.work.samples:
        return ""
    last, batches = mirrors[min(mirrors)], max(mirrors) - min(mirrors)
    if batches <= last.now.kept_slots + last.ready_ahead + last.now.window:
        return ""
    # what one trainer reads is decoded at least; where epochs repeat, the ring may have it all
    most = max(mirror.batches for mirror in mirrors.values())
    again = min(last.batches, stream.work.samples / stream.now.batch_size - most) * stream.now.batch_size
    costs = []
    if again >= AGAIN_SHARE_MIN * stream.work.samples:
        costs.append(f"what it reads is decoded again ({again / stream.work.samples:.0%} of the samples)")
    if last.now.kept_slots:
        slots = counted(last.now.kept_slots, "slot")
        costs.append(f"{slots} {'is' if last.now.kept_slots == 1 else 'are'} kept for it")
    who = "it" if last is trainer else last.name
    return f"; {who} is {counted(batches, 'batch')} behind: {', and '.join(costs)}" if costs else ""


def _bad_ones(trainer: TrainerReading) -> str:
    """Mention of bad samples that are not the cause, or ""."""
    work = trainer.stream.work
    if not work.samples or work.bad_rows < BAD_SHARE_MIN * work.samples:
        return ""
    return f", and {work.bad_rows / work.samples:.0%} of the samples are bad (batchd bad {trainer.stream.name})"


def _not_waiting(trainer: TrainerReading, reading: Reading) -> Finding:
    if not trainer.batches:
        if trainer.now.epoch is None:
            return Kind.AT_END, "it has read all that it asked for", ""
        took = f"it took no batch for {trainer.seconds:.0f} s and asked for none"
        return Kind.STANDS_STILL, f"{took}: {counted(trainer.ready_ahead, 'batch')} ready for it", ""
    step_ms = 1000 * (trainer.seconds - trainer.wait_s) / trainer.batches
    waits = f"it waits {trainer.wait_share:.1%} of the time"
    stream = trainer.stream
    readers = sum(other.stream is stream for other in reading.trainers)
    most = min(trainer.now.window, stream.now.slots_max - 1, stream.now.slots_max // readers)
    # the last one of the window is always being filled
    has_all = trainer.ready_ahead >= max(1, most - 1)
    could_have_more = trainer.ready_ahead >= 1 and 1 - reading.utilisation >= IDLE_SHARE_MIN
    if not has_all and not could_have_more:
        return Kind.FED, f"{waits}; {step_ms:.0f} ms of its own for each batch", ""
    idle = f"workers idle {1 - reading.utilisation:.0%}"
    ahead = f"{trainer.ready_ahead} of {counted(trainer.now.window, 'batch')} ready ahead"
    remedy = "it does not wait for data: look at the training step"
    return Kind.TRAINER_BOUND, f"{waits}, {ahead}, {idle}; {step_ms:.0f} ms of its own for each batch", remedy


# --- causes outside of the daemon -----------------------------------------------------------------


def _network(trainer: TrainerReading, _reading: Reading) -> Finding:
    rate = f", {trainer.who.sent_bytes_per_s / 1e6:.0f} MB/s" if trainer.who.sent_bytes_per_s is not None else ""
    share = trainer.waits_s["network"] / trainer.wait_s
    proof = f"{_waits(trainer)}, {share:.0%} of that for batches in transit{rate}"
    remedy = "send less (uint8 instead of floats, smaller images), or try connect(connections=4)"
    return Kind.NETWORK_BOUND, proof, remedy


def _lockstep(trainer: TrainerReading, reading: Reading) -> Finding:
    others = [other for other in reading.trainers if other.stream is trainer.stream and other is not trainer]
    slowest = min(others, key=lambda other: other.wait_share, default=None)
    who = f"; {slowest.name} waits least ({slowest.wait_share:.0%})" if slowest else ""
    proof = f"{_waits(trainer)} for the other trainers of the stream{who}"
    return Kind.LOCKSTEP, proof, 'a larger max_skew, or lag = "independent", lets it run ahead'


def _producers(trainer: TrainerReading, _reading: Reading) -> Finding:
    samples = trainer.batches * trainer.stream.now.batch_size / trainer.seconds
    proof = f"{_waits(trainer)} for producers; {samples:.0f} samples/s arrived"
    return Kind.PRODUCER_BOUND, proof, "push faster, or from more programs"


_OUTSIDE: dict[str, Callable[[TrainerReading, Reading], Finding]] = {
    "network": _network,
    "trainers": _lockstep,
    "producers": _producers,
}

# --- workers or memory ----------------------------------------------------------------------------


def _pool_network(trainer: TrainerReading, reading: Reading) -> Finding | None:
    pool = reading.pool
    if pool is None or pool.network_share is None or pool.network_share < NETWORK_FULL:
        return None
    speed = f"{gigabytes(pool.bytes_per_s)}, {pool.network_share:.0%} of what {pool.now.interface} can carry"
    proof = f"{_waits(trainer)}; worker hosts send {speed}: the NIC, not the cores"
    remedy = (
        "send less (uint8 instead of floats, smaller images), decode more on this host (workers =), or a faster NIC"
    )
    return Kind.POOL_NETWORK_BOUND, proof, remedy


def _memory(trainer: TrainerReading, reading: Reading) -> Finding | None:
    stream = trainer.stream
    of_wait = trainer.waits_s["memory"] / trainer.wait_s
    waits_for_slot = of_wait >= MAIN_SHARE
    idle_share = 1 - reading.utilisation
    if not waits_for_slot and idle_share < IDLE_SHARE_MIN:
        return None
    is_short = (
        trainer.change.short_of_memory_s >= MAIN_SHARE * trainer.seconds or stream.now.slots_max <= trainer.now.window
    )
    if waits_for_slot or is_short:
        why = f", {of_wait:.0%} of that for a free slot" if waits_for_slot else f" while workers idle {idle_share:.0%}"
        slots = f"a ring of {counted(stream.now.slots_max, 'slot')} for a window of {trainer.now.window}"
        held = f", {trainer.now.held_slots} of them held by it" if trainer.now.held_slots > 1 else ""
        remedy = f"raise memory = in [streams.{stream.name}], or in [daemon]"
        return Kind.MEMORY_BOUND, f"{_waits(trainer)}{why}: {slots}{held}", remedy
    proof = f"{_waits(trainer)} while workers idle {idle_share:.0%}"
    if reading.pool is not None and reading.pool.now.capped_by == "ring":
        remedy = f"raise memory = in [streams.{stream.name}], or in [daemon]"
        return Kind.MEMORY_BOUND, f"{proof}: {reading.pool.now.cap}", remedy
    proof += f": it takes batches in bursts, which a window of {trainer.now.window} does not bridge"
    return Kind.MEMORY_BOUND, proof, f"a larger window = in [streams.{stream.name}], and memory = to match"


def _bad_data(trainer: TrainerReading, _reading: Reading) -> Finding | None:
    work = trainer.stream.work
    if not work.samples or work.bad_s < BAD_TIME_MIN * work.total_s:
        return None
    bad = f"{work.bad_rows / work.samples:.0%} of the samples are bad, {counted(work.bad_rows, 'row')}"
    proof = f"{_waits(trainer)}; {bad}, and take {work.bad_s / work.total_s:.0%} of the workers' time"
    remedy = f"batchd bad {trainer.stream.name} lists them: repair them, or remove them from the source"
    return Kind.BAD_DATA, proof, remedy


def _storage(trainer: TrainerReading, _reading: Reading) -> Finding | None:
    work = trainer.stream.work
    if not work.samples or work.storage_wait_s < MAIN_SHARE * work.total_s:
        return None
    is_own = trainer.stream.now.own_source
    share = f"workers wait for {'your source' if is_own else 'files'} {work.storage_wait_s / work.total_s:.0%} of their time"
    rate = f", {work.counts.read_bytes / trainer.seconds / 1e6:.1f} MB/s" if work.counts.read_bytes else ""
    proof = f"{_waits(trainer)}; {share}, {_ms(work.storage_wait_s, work)} a sample{rate}"
    more = "more workers read more at once (workers =)"
    remedies = ["check what its code waits for" if is_own else FASTER_STORAGE, more, *_cache(trainer.stream)]
    return Kind.STORAGE_BOUND, proof, "; ".join(remedies)


def _cache(stream: StreamReading) -> Iterator[str]:
    """The effect of a cache on a stream that waits for its storage, or for decoding."""
    work, cache, samples = stream.work, stream.samples_cache, stream.now.samples
    read = work.samples - work.counts.cache_hits
    if stream.now.live is not None or not samples or read <= 0 or not work.counts.read_bytes:
        return
    need_bytes = ceil(CACHE_MARGIN * samples * work.counts.read_bytes / read)
    if cache is None:
        need = f"it needs some {round_bytes(need_bytes)} (cache_memory =, or on disk cache_size =)"
        yield f'{_named_cache(stream)}, and cache = "encoded" would read each sample once: {need}'
        return
    share = cache.held_samples / samples
    if cache.kind == "pixels":  # other records have access points alone
        share = work.counts.cache_hits / work.samples
    if cache.kind in KEEP_PIXELS:
        need_bytes = ceil(CACHE_MARGIN * cache.used_bytes / max(share, 1 / samples))
    if stream.cache_grows:
        yield f"{_named_cache(stream)} and fills: it has {share:.0%} of the samples so far"
    elif share < 1 and cache.budget_bytes < need_bytes:
        budget = "cache_size" if cache.folder is not None else "cache_memory"
        need = f"all of them need some {round_bytes(need_bytes)} ({budget} =)"
        yield f"{_named_cache(stream)} and full, and has {share:.0%} of the samples: {need}"


def _named_cache(stream: StreamReading) -> str:
    """The kind of a stream's cache; ``cache = "auto"`` may have chosen it."""
    return "it has no cache" if stream.now.cache is None else f'its cache is "{stream.now.cache.kind}"'


def _slow_samples(trainer: TrainerReading, _reading: Reading) -> Finding | None:
    work = trainer.stream.work
    spent_s = work.total_s - work.no_cpu_s  # a function that waits in all samples makes none slow
    is_main = work.counts.slow_rows > 0 and work.counts.slow_s >= SLOW_SHARE_MIN * spent_s
    if not is_main or work.counts.slow_rows > SLOW_ROWS_SHARE_MAX * work.samples:
        return None
    rows, times = (
        work.counts.slow_rows / work.samples,
        work.counts.slow_s / work.counts.slow_rows / (work.counts.usual_sample_s or 1e-6),
    )
    proof = f"{_waits(trainer)}; {rows:.1%} of the samples take {work.counts.slow_s / spent_s:.0%} of the time"
    proof += f", {times:.0f} x as long as usual"
    slowest = work.slowest[:SLOW_NAMED_MAX]
    named = ", ".join(f"{PurePath(path).name} {1000 * taken_s:.0f} ms" for path, taken_s in slowest)
    remedy = "make these smaller, or leave them out; batchd status --json names more"
    return Kind.SLOW_SAMPLES, f"{proof}: {named}" if named else proof, remedy


def _cpu_starved(trainer: TrainerReading, reading: Reading) -> Finding | None:
    work = trainer.stream.work
    if not work.samples or work.no_cpu_s < NO_CPU_MIN * work.total_s:
        return None
    proof = f"{_waits(trainer)}; workers were ready to run and had no CPU for {work.no_cpu_s / work.total_s:.0%} of their time"
    share = "share" if reading.local_workers != 1 else "shares"
    sharing = f"{counted(reading.local_workers, 'worker')} {share} the rest (batchd doctor)"
    return Kind.CPU_STARVED, proof, f"stop other programs, or raise the CPU quota: {sharing}"


def _no_hosts(trainer: TrainerReading, reading: Reading) -> Finding | None:
    pool = reading.pool
    if pool is None or pool.now.links or not pool.now.ended_links:
        return None
    here = f"{counted(reading.local_workers, 'worker')} of this host busy {reading.utilisation:.0%}"
    proof = f"{_waits(trainer)}; all worker hosts are gone, the last one: {pool.now.last_end}; {here}"
    wanted = f" ({counted(pool.now.wanted, 'remote worker')} wanted)" if pool.now.wanted else ""
    how = "it did not fail; for more speed start others" if pool.now.last_left else "start them again"
    return Kind.NO_WORKER_HOSTS, proof, f"{how}: {start_command(pool.now.address)}{wanted}"


def _unused_hosts(trainer: TrainerReading, reading: Reading) -> Finding | None:
    links = reading.pool.now.links if reading.pool is not None else ()
    name = trainer.stream.name
    if any(name in link.streams for link in links):
        return None
    reasons = [f"{link.name}: {why}" for link in links if (why := _why_unused(link, name))]
    if not reasons:
        return None
    more = f", and {len(reasons) - HOSTS_NAMED_MAX} more" if len(reasons) > HOSTS_NAMED_MAX else ""
    proof = f"{_waits(trainer)}; no worker host fills its stream: {'; '.join(reasons[:HOSTS_NAMED_MAX])}{more}"
    return Kind.UNUSED_WORKER_HOSTS, proof, "the logs of these hosts and of the daemon have the details"


def _why_unused(link: LinkStatistics, stream: str) -> str:
    """Why a worker host does not fill a stream, or "" if it is not known to be a problem."""
    refused = [reason.removeprefix(f"{stream}: ") for reason in link.refused if reason.startswith(f"{stream}: ")]
    if refused:
        return refused[0]
    if link.state == "proving" and link.since_s > OPENING_S:
        return f"is proving itself for {link.since_s:.0f} s"
    return trouble(link) if not link.refused else ""


def _decode(trainer: TrainerReading, reading: Reading) -> Finding:
    work = trainer.stream.work
    if not work.samples:
        proof = f"{_waits(trainer)} for workers that finished nothing in {trainer.seconds:.0f} s"
        return Kind.DECODE_BOUND, proof, "sample for longer (--seconds 60): work counts when it is done"
    name, spent_s = max(work.parts, key=lambda part: part[1], default=("decode", work.counts.busy_s))
    proof = f"{_waits(trainer)}; {name} takes {_ms(spent_s, work)} of {_ms(work.counts.busy_s, work)} a sample"
    proof += f", workers busy {reading.utilisation:.0%}{_decoded_cache(trainer.stream, name)}"
    proof += _decoded_by_others(trainer.stream, reading) + _taken_by(reading)
    return Kind.DECODE_BOUND, proof, MORE_CORES


def _decoded_cache(stream: StreamReading, slowest_part: str) -> str:
    """The stream's cache, and memory for one of pixels, if decoding takes most of the time."""
    now, work, cache = stream.now, stream.work, stream.samples_cache
    if now.live is not None or not now.samples or not slowest_part.startswith("decode"):
        return ""
    if cache is not None and cache.kind in KEEP_PIXELS:
        return f"; {next(_cache(stream), _named_cache(stream))}"
    if not work.counts.read_bytes:
        return ""
    read = max(1, work.samples - work.counts.cache_hits) if cache is not None else work.samples
    need_bytes = ceil(CACHE_MARGIN * now.samples * work.counts.read_bytes / read * PIXEL_BYTES_PER_FILE_BYTE)
    how = "cache_memory" if cache is None else 'cache = "pixels"'
    return (
        f"; {_named_cache(stream)}, and with {how} each image is decoded once, and batches keep their bytes: photographs "
        f"need some {round_bytes(need_bytes)} (batchd check --explain looks at yours)"
    )


def _taken_by(reading: Reading) -> str:
    """Who has the workers' time, if several owners do, or ""."""
    owners: dict[str, float] = {}
    for one in reading.change.usage:
        if one.work_s > 0:
            owners[one.owner] = owners.get(one.owner, 0.0) + one.work_s
    if len(owners) < 2:  # noqa: PLR2004  several
        return ""
    total_s = sum(owners.values())
    most = sorted(owners.items(), key=lambda one: -one[1])[:OWNERS_NAMED_MAX]
    named = [f"{owner} {work_s / total_s:.0%}" for owner, work_s in most]
    return f"; of the workers' time {', '.join(named)} (batchd usage)"


def _decoded_by_others(stream: StreamReading, reading: Reading) -> str:
    """Which streams make the same, and what one decoding for all would save, or ""."""
    source, content = stream.now.source, stream.now.fingerprint
    group = [other for other in reading.streams if other.now.source == source and other.work.samples]
    others = [other for other in group if other is not stream]
    if not source or not others:
        return ""
    same = [other for other in others if other.now.fingerprint == content]
    if same:
        work_s = stream.work.total_s + sum(other.work.total_s for other in same)
        names = f"{', '.join(other.name for other in same)} {'has' if len(same) == 1 else 'have'}"
        saved = 1 - max(stream.work.total_s, *(other.work.total_s for other in same)) / (work_s or 1.0)
        return (
            f"; {names} the same batches: one stream for all their trainers would save up to {saved:.0%} of this work"
        )
    decode_s = sum(spent_s for other in group for name, spent_s in other.work.parts if name.startswith("decode"))
    if any(other.samples_cache and other.samples_cache.kind in KEEP_PIXELS for other in group) or not decode_s:
        return ""
    names = ", ".join(other.name for other in others)
    return (
        f"; {names} {'reads' if len(others) == 1 else 'read'} the same samples: decoding them for each stream takes "
        f"{decode_s / (reading.work_s or 1.0):.0%} of the workers' time, which the same cache_memory in all of them "
        "takes once for all epochs"
    )


_INSIDE: tuple[Callable[[TrainerReading, Reading], Finding | None], ...] = (
    _pool_network,
    _memory,
    _bad_data,
    _storage,
    _slow_samples,
    _cpu_starved,
    _no_hosts,
    _unused_hosts,
    _decode,
)


# --- how many cores are missing, for all streams together -----------------------------------------


def _cores(trainer: TrainerReading, short: Sequence[TrainerReading], reading: Reading) -> str:
    """Number of cores with which no trainer of ``short`` would wait, and where to get them."""
    # of each stream the trainer that waits most
    streams = {waiter.stream.name: waiter for waiter in sorted(short, key=lambda waiter: waiter.wait_share)}
    greedy = [waiter for waiter in streams.values() if waiter.wait_share > ENDLESS_SHARE]
    if greedy:
        work = trainer.stream.work
        each = f"each further core adds {work.samples / work.total_s:.0f} samples/s"
        other = f"{greedy[-1].name} on {greedy[-1].stream.name} takes"
        who = "it takes" if trainer.wait_share > ENDLESS_SHARE else other
        among = f", shared by {len(streams)} streams" if len(streams) > 1 else ""
        return f"{who} batches as fast as workers make them: {each}{among}; {_where(None, reading)}"
    more = max(1, ceil(sum(map(needed_workers, _loads(reading))) - reading.workers))
    together = " for all streams together" if len(streams) > 1 else ""
    return f"{counted(more, 'core')} more would end the wait{together}; {_where(more, reading)}"


def _loads(reading: Reading) -> Iterator[StreamLoad]:
    """All streams, as ``needed_workers`` takes them."""
    for stream in reading.streams:
        trainers = [
            (reader.batches, min(1.0, reader.waits_s["workers"] / reader.seconds))
            for reader in reading.trainers
            if reader.stream is stream
        ]
        yield StreamLoad(stream.name, stream.work.total_s / reading.seconds, trainers)


def _where(more: int | None, reading: Reading) -> str:
    """Advice on where to get these cores; None: as many as there are."""
    free = reading.free_cpus
    if not free:
        return f"every CPU of this host has a worker: {_elsewhere(reading.pool)}"
    have = f"{counted(free, 'CPU')} {'is' if free == 1 else 'are'} unused"
    if more is not None and more > free:
        return f"set workers = {reading.local_workers + free} ({have}), beyond that {_elsewhere(reading.pool)}"
    return f"set workers = {reading.local_workers + (more or free)} ({have})"


def _elsewhere(pool: PoolReading | None) -> str:
    """Advice if all CPUs of this host have a worker."""
    if pool is None:
        return OTHER_REMEDIES
    have = sum(link.workers for link in pool.now.links)
    if pool.now.wanted > have:
        more = f"start worker hosts ({start_command(pool.now.address)}) with {pool.now.wanted - have} workers more"
        return f"{more}; limited by {pool.now.cap}" if pool.now.cap else more
    return f"more worker hosts would not help: limited by {pool.now.cap}" if pool.now.cap else MORE_HOSTS


def _waits(trainer: TrainerReading) -> str:
    return f"waits {trainer.wait_share:.0%} of the time"


def _ms(seconds: float, work: WorkReading) -> str:
    """Milliseconds for each sample, as text."""
    return f"{1000 * seconds / work.samples:.2f} ms"
