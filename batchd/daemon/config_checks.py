"""Every problem of a configuration. ``batchd check``, and the daemon's reloads.

    the file by itself -> runtime directory, keys -> sources, functions, steps -> memory

If the file itself is wrong, the rest is checked as far as it can be read, except the memory.
``batchd check`` also calls ``preview``, which finds what the daemon would refuse at its start:

    streams   scanned on trial; then what a whole scan decides: a first batch, the cache, its file;
              and a few samples, made in a process of their own
    machine   memory, descriptors, addresses, the runtime directory; skipped if a daemon runs there,
              which has its own already

A stream with a problem hides nothing of the others: ``further_problems`` looks into their sources,
and into its own other parts.

Each refusal comes from the function that the daemon calls, so words and numbers are the same.

Invariant: the caller gets all problems, each with its line. Nothing is left changed, and whatever
was not checked is reported.
"""

import json
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from batchd.config.directories import choose_runtime_directory
from batchd.config.draft import daemon_draft, stream_drafts
from batchd.config.load import LoadedConfig
from batchd.config.schema import problem_at
from batchd.config.tree import Config, DaemonConfig, Mark, StreamConfig, keys_marked
from batchd.daemon.identity import named_in, unknown_names
from batchd.daemon.observer import open_http
from batchd.daemon.runtime import directory_problem, has_daemon
from batchd.data.pipeline.cache_split import decoded_files
from batchd.data.pipeline.call.options import Call
from batchd.data.pipeline.image.options import Decode, Follow
from batchd.data.pipeline.options import StepOptions, with_inner
from batchd.data.sources.composed.options import parts_of, sources_in
from batchd.data.sources.options import SourceOptions, source_to_plain
from batchd.data.sources.source_checks import SAMPLES_MAX, Trial, try_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import (
    BatchdError,
    ConfigInvalid,
    KeyPath,
    MemoryTooSmall,
    Problem,
    ProblemKind,
    SourceInvalid,
    path_text,
)
from batchd.runtime.addresses import tcp_endpoint
from batchd.runtime.available import available_bytes, shortage
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.sizes import format_bytes
from batchd.stream.access import sandbox_problems
from batchd.stream.cache_file import file_problem
from batchd.stream.cache_memory import cache_spec
from batchd.stream.grouping import MeasureOptions, bad_ones
from batchd.stream.plan import (
    StreamPlan,
    check_bucket,
    check_drawn,
    epoch_plan,
    look_at_stream,
    plan_stream,
    planned_index,
)
from batchd.stream.rings import (
    MEBIBYTE,
    SLOTS_MAX,
    SLOTS_MIN,
    RingSize,
    file_size_refusal,
    memory_problem,
    needed_bytes,
    plan_descriptors,
    plan_rings,
    ring_slots,
    ring_workers,
    slot_layout,
)
from batchd.stream.served import differing_classes
from batchd_wire.runtime import RuntimeDirectory, candidate_directories
from batchd_wire.wording import counted

TRIED_MAX = 8
"""Samples of a stream that `batchd check` makes."""
PIXELS_GAIN = "photographs of 500 x 375 took 0.36 of the CPU time"
"""Of two streams with a crop of 224 x 224, both with and without their pixels in memory."""


def check_reading(reading: LoadedConfig, config_file: Path, storage: Storage) -> tuple[Config, dict[str, RingSize]]:
    """Plan the rings. Raises ``ConfigInvalid`` or ``MemoryTooSmall`` with all problems."""
    kind: type[ConfigInvalid | MemoryTooSmall] = ConfigInvalid
    problems = list(reading.problems)
    rings: dict[str, RingSize] = {}
    if reading.config is None:
        problems += _problems_around(reading, storage)
    else:
        problems += _daemon_problems(reading.config.daemon, frozenset())
        try:
            rings = plan_rings(reading.config, storage, thoroughly=True)
        except (ConfigInvalid, MemoryTooSmall) as error:
            kind = ConfigInvalid if problems else type(error)
            problems += error.problems
        if reading.config.daemon.sandbox == "on":
            problems += sandbox_problems(reading.config)
    if reading.config is None or problems:
        raise kind(reading.located(problems), str(config_file))
    return reading.config, rings


def further_problems(reading: LoadedConfig, known: Sequence[Problem], storage: Storage) -> list[Problem]:
    """What a look into the sources finds beside ``known`` problems, which keep a daemon away.

    Streams without a problem are checked whole, of others each part of the source without one.
    """
    paths = [problem.path for problem in known]

    def is_right(*key: str | int) -> bool:
        text = path_text(key)
        return not any(path == text or path.startswith((f"{text}.", f"{text}[")) for path in paths)

    drafts = stream_drafts(reading.data)
    right = {name for name in drafts if is_right("streams", name)}
    config = reading.config if reading.config is not None else reading.part(right)
    problems: list[Problem] = []
    for name, draft in drafts.items():
        if config is not None and name in right:
            stream = config.streams[name]
            findings = look_at_stream(name, draft, config.daemon.python_path or (), storage, thoroughly=False)
            if findings.columns is not None and not findings.problems:
                layout = slot_layout(stream, findings.columns, has_checksums=stream.has_checksums)
                ring = RingSize(findings.columns, layout, SLOTS_MIN)
                problems += _stream(name, config, ring, storage, _trial(name, config, storage))[0]
            continue
        parts = [((*key, *inner), part) for key, whole in draft.sources for inner, part in sources_in(whole)]
        for key, part in parts:
            path = "streams", name, "source", *key
            if not parts_of(part) and is_right(*path):
                found = try_source(part, reading.python_path, storage).problems
                problems += [problem_at((*path, *one.key), ProblemKind.UNUSABLE_SOURCE, one.text) for one in found]
    return problems


def _problems_around(reading: LoadedConfig, storage: Storage) -> list[Problem]:
    """Find further problems of a file that is wrong by itself, except of memory."""
    daemon, wrong = daemon_draft(reading.data)
    problems = _daemon_problems(daemon, wrong)
    python_path = None if "python_path" in wrong else daemon.python_path or ()
    drafts = stream_drafts(reading.data)
    for name, draft in drafts.items():
        problems += look_at_stream(name, draft, python_path, storage).problems
    conflicts = [(("streams", name, *key), text) for name, draft in drafts.items() for key, text in draft.conflicts]
    known = {problem.path for problem in reading.problems}
    for path, text in conflicts:
        if path_text(path) not in known:
            problems.append(problem_at(path, ProblemKind.WRONG_VALUE, text, reading.data))
    return problems


def _daemon_problems(daemon: DaemonConfig, wrong: frozenset[str]) -> list[Problem]:
    """Check the directories and keys of the daemon, except keys that are ``wrong`` anyhow."""
    problems: list[Problem] = []
    if "runtime_dir" not in wrong:
        try:
            choose_runtime_directory(daemon.runtime_dir)
        except ConfigInvalid as error:
            problems += error.problems
    problems += [
        problem_at(("daemon", *key), ProblemKind.WRONG_VALUE, text)
        for key, text in unknown_names(daemon, None)
        if key[0] not in wrong
    ]
    addresses = [(key, text) for key, text in _addresses(daemon) if not wrong & {key, "keys_dir"}]
    if addresses:
        from batchd.runtime.keys import missing_keys, open_keys  # noqa: PLC0415  as below

        try:
            keys = open_keys(daemon.keys_dir)
        except ConfigInvalid as error:
            return [*problems, *error.problems]
        of_address = {"tcp": keys.trainers, "worker_address": keys.workers}
        for key, address in addresses:
            missing = missing_keys(address, of_address[key])
            if missing is not None:
                problems.append(problem_at(("daemon", key), ProblemKind.MISSING_KEYS, missing))
    return problems


def _unknown_keys(daemon: DaemonConfig) -> Iterable[tuple[KeyPath, str]]:
    """Names of keys that there are not (yet, or any more: that is no reason to refuse a reload)."""
    if not any(name.startswith("key:") for _key, name in named_in(daemon)):
        return ()
    from batchd.runtime.keys import open_keys  # noqa: PLC0415  most configurations need no TCP

    try:
        keys = {key.name for key in open_keys(daemon.keys_dir).trainers.accepted()}
    except BatchdError as error:
        return [(("keys_dir",), str(error))]
    return unknown_names(daemon, keys)


def _addresses(daemon: DaemonConfig) -> list[tuple[str, str]]:
    """The addresses for other hosts: the key of each, and its value."""
    both = ("tcp", daemon.tcp), ("worker_address", daemon.worker_address)
    return [(key, text) for key, text in both if text is not None]


class Preview(NamedTuple):
    """Findings of ``preview``. ``unseen``: parts that were not checked, each with its stream.

    ``notes``: what sources and steps leave out, and take for granted, each with its stream; and
    keys that there are not.
    """

    problems: list[Problem]
    shortage: Problem | None
    unseen: list[tuple[str, str]]
    notes: list[tuple[str, str]]


def preview_streams(config: Config, rings: dict[str, RingSize], storage: Storage) -> list[Problem]:
    """Check the streams alone, whatever directories and addresses of this machine a daemon has."""
    found = (_stream(name, config, rings[name], storage, _trial(name, config, storage)) for name in config.streams)
    return [problem for problems, _unseen in found for problem in problems]


def preview(config: Config, rings: dict[str, RingSize], storage: Storage) -> Preview:
    """Check everything that the daemon checks before its first trainer; ``rings`` are planned."""
    configured = config.daemon.runtime_dir
    known = map(RuntimeDirectory, candidate_directories())
    is_running = any(map(has_daemon, known if configured is None else [choose_runtime_directory(configured)]))
    problems, unseen, short = [], [], None
    if is_running:
        text = "memory, descriptors and addresses: the daemon that runs has its own, and `batchd reload` compares them"
        unseen.append(("[daemon]", text))
    else:
        problems += _machine_problems(config, rings)
        short = shortage(needed_bytes(config, rings), available_bytes())
    trials = {name: _trial(name, config, storage) for name in config.streams}
    for name, trial in trials.items():
        found, texts = _stream(name, config, rings[name], storage, trial, is_running=is_running)
        problems += found
        unseen += [(name, text) for text in texts]
    notes = [(name, text) for name, trial in trials.items() for text in trial.notes]
    notes += differing_classes({name: trial.whole.class_names for name, trial in trials.items() if trial.whole})
    notes += [(name, text) for name, stream in config.streams.items() for text in _kept_boxes(stream.pipeline)]
    notes += [(path_text(("daemon", *key)), text) for key, text in _unknown_keys(config.daemon)]
    return Preview(problems, memory_problem(config, short), unseen, notes)


def _kept_boxes(steps: Sequence[StepOptions]) -> list[str]:
    """What happens to boxes that vanish, where the configuration does not say it."""
    return [
        f"a box that vanishes from {step.field!r} becomes four zeros in {step.boxes!r}, and what belongs to it stays; "
        "labels = [...] of follow drops their rows together, and keep_empty = true says that this is meant"
        for step in steps
        if isinstance(step, Follow) and step.boxes is not None and not step.drops_rows and step.keep_empty is None
    ]


def _machine_problems(config: Config, rings: dict[str, RingSize]) -> list[Problem]:
    """Problems of the machine, except of memory."""
    found = [
        directory_problem(choose_runtime_directory(config.daemon.runtime_dir)),
        *address_problems(config.daemon),
        plan_descriptors(config, rings).refusal(len(rings)),
        file_size_refusal(rings, resource.getrlimit(resource.RLIMIT_FSIZE)[0]),
    ]
    problems = [problem for problem in found if problem is not None]
    if "http" in config.daemon.model_fields_set:
        try:
            open_http(config.daemon, is_embedded=False).close()
        except ConfigInvalid as error:
            problems += error.problems
    return problems


def address_problems(daemon: DaemonConfig) -> Iterator[Problem]:
    """Try whether ZeroMQ can listen: it accepts other addresses than the kernel does."""
    addresses = _addresses(daemon)
    if not addresses:
        return
    import zmq  # noqa: PLC0415  most configurations need it not

    from batchd.runtime.tcp.router import cannot_listen, check_context_threads  # noqa: PLC0415  the same

    try:
        check_context_threads()
    except BatchdError as error:
        yield problem_at(("daemon", addresses[0][0]), ProblemKind.UNUSABLE_ADDRESS, str(error))
        return
    with zmq.Context() as context, ExitStack() as stack:  # all stay bound: two may name one port
        endpoints = [(key, tcp_endpoint(text)) for key, text in addresses]
        if daemon.worker_address is not None:
            more = range(1, daemon.pool_gateways)
            endpoints += [("pool_gateways", tcp_endpoint(daemon.worker_address, number)) for number in more]
        for key, endpoint in endpoints:
            try:
                stack.enter_context(context.socket(zmq.ROUTER)).bind(endpoint)
            except zmq.ZMQError as error:
                yield problem_at(("daemon", key), ProblemKind.UNUSABLE_ADDRESS, cannot_listen(endpoint, error))


def decoding_places(config: Config, rings: dict[str, RingSize]) -> list[tuple[str, str]]:
    """The place where each stream is decoded, and why only there; [] without worker hosts."""
    if config.daemon.worker_address is None:
        return []
    return [
        (
            name,
            f"this host only: {stream.why_here}"
            if stream.why_here
            else _room_for_hosts(name, config.daemon, rings[name]),
        )
        for name, stream in config.streams.items()
    ]


def common_samples(config: Config) -> list[tuple[str, str]]:
    """Streams that read the same samples, and what they could share: (their names, advice)."""
    groups: dict[str, list[str]] = {}
    for name, stream in config.streams.items():
        if not stream.source.is_live:
            groups.setdefault(json.dumps(source_to_plain(stream.source), sort_keys=True, default=str), []).append(name)
    return [
        (", ".join(names), _to_share([config.streams[name] for name in names]))
        for names in groups.values()
        if len(names) > 1
    ]


def _to_share(streams: list[StreamConfig]) -> str:
    keys = ("pipeline", *keys_marked(Mark.DECIDES_BYTES, StreamConfig), *keys_marked(Mark.ORDERS, StreamConfig))
    if all(getattr(one, key) == getattr(streams[0], key) for one in streams for key in keys):
        return f"the same batches: one stream for all their trainers is decoded once, not {len(streams)} times"
    common, alone = "the same samples", "each stream decodes them itself"
    first = same_first_steps([one.pipeline for one in streams])
    if first and all(getattr(one, key) == getattr(streams[0], key) for one in streams for key in keys[1:]):
        common += f" in the same order, and the same first steps ({', '.join(step.op for step in first)})"
        if isinstance(first[0], Decode):
            alone = "what trainers read of them at the same pace is decoded once"
    kinds, budgets = {one.cache_kind for one in streams}, {(one.cache_dir, one.cache_bytes) for one in streams}
    decoded = {json.dumps(decoded_files(one.pipeline)) for one in streams}
    if kinds == {"pixels"} and len(decoded) > 1:
        return f"{common}: each has a cache of its own, as color, max_bytes or max_pixels of their decode steps differ"
    if kinds == {"pixels"} and len(budgets) == 1:
        return f"{common}: one cache of pixels keeps each image once for all of them"
    if kinds == {"decoded"} and len(budgets) == 1:
        return f'{common}: cache = "decoded" keeps each image once for all with the same first steps'
    if decoded == {"{}"} or len(decoded) > 1:
        return f"{common}: caches of them are shared, steps are not"
    is_default = all(one.cache == "auto" for one in streams) and "encoded" not in kinds
    how = "" if is_default else 'cache = "pixels" and '
    return (
        f"{common}: {alone}; with {how}the same "
        f"cache_memory in all of them each image is decoded once for all, as far as that is enough: from the second epoch on "
        f"{PIXELS_GAIN}; batchd check --explain says how much all images need"
    )


def same_first_steps(pipelines: Sequence[Sequence[StepOptions]]) -> list[StepOptions]:
    """The steps that all pipelines begin with."""
    same = takewhile(lambda steps: all(step == steps[0] for step in steps), zip(*pipelines, strict=False))
    return [steps[0] for steps in same]


def _room_for_hosts(name: str, daemon: DaemonConfig, ring: RingSize) -> str:
    """Whether a ring keeps the maximum number of remote workers busy."""
    rows, local = ring.layout.rows, daemon.worker_count()
    remote = max(0, ring_workers(ring.slots_max, rows, daemon.chunk_rows) - local)
    if not daemon.pool_max:
        return f"worker hosts, too; with one trainer its ring keeps {counted(remote, 'remote worker')} busy"
    wanted = counted(daemon.pool_max, "remote worker")
    if remote >= daemon.pool_max:
        return f"worker hosts, too; its ring is large enough for {wanted} (pool_max)"
    slots = ring_slots(local + daemon.pool_max, rows, daemon.chunk_rows)
    advice = (
        f'memory = "{format_bytes(-(-slots * ring.layout.slot_bytes // MEBIBYTE) * MEBIBYTE)}" in [streams.{name}] is enough'
        if slots <= SLOTS_MAX
        else f"a larger batch_size needs fewer slots, and a ring has {SLOTS_MAX} at most"
    )
    return f"worker hosts, too; its ring keeps {remote:,} of {wanted} (pool_max) busy: {advice}"


def _trial(name: str, config: Config, storage: Storage) -> Trial:
    """Scan the source of a stream on trial; a kept index is as good as a whole scan."""
    stream, python_path = config.streams[name], config.daemon.python_path or ()
    trial = try_source(stream.source, python_path, storage, max(SAMPLES_MAX, stream.batch_size))
    if trial.whole is not None or trial.problems:
        return trial
    cache = IndexCache(config.daemon.cache_dir or default_cache_dir())
    kept = cache.load(source_to_plain(stream.source), storage)
    return trial if kept is None else trial._replace(whole=kept, notes=kept.notes)


def _stream(  # noqa: PLR0913  each is one thing that is checked, or with which
    name: str, config: Config, ring: RingSize, storage: Storage, trial: Trial, *, is_running: bool = True
) -> tuple[list[Problem], list[str]]:
    """Problems of a stream, and the parts of it that were not checked."""
    stream = config.streams[name]
    steps = with_inner({(place,): step for place, step in enumerate(stream.pipeline)}).values()
    functions = [f"what {step.function} makes of it" for step in steps if isinstance(step, Call)]
    problems = [
        problem_at(("streams", name, "source", *one.key), ProblemKind.UNUSABLE_SOURCE, one.text)
        for one in trial.problems
    ]
    whole = trial.whole
    if whole is None or problems:
        return problems, [*trial.unseen, *functions]
    kind = ProblemKind.STEP_MISFIT
    try:
        check_bucket(name, stream, ring.columns)
        check_drawn(name, stream, ring.columns)
        kind = ProblemKind.UNUSABLE_SOURCE
        plan = plan_stream(name, stream, ring.columns, config.daemon)
        if plan.pack is None and stream.buckets is None:  # else all sizes decide
            kind = ProblemKind.NO_BATCH
            epoch_plan(plan, planned_index(plan, whole))
        kind = ProblemKind.UNUSABLE_SOURCE
        spec = cache_spec(plan, whole) if stream.cache_kind != "off" else None
        text = file_problem(spec) if spec is not None and spec.folder and not is_running else None
        if text is not None:
            problems.append(problem_at(("streams", name, "cache_dir"), ProblemKind.UNUSABLE_CACHE, text))
    except SourceInvalid as error:
        path, _colon, text = str(error).partition(": ")
        return [*problems, Problem(path, kind, text)], [*trial.unseen, *functions]
    if (stream.source.is_live and not stream.source.is_own_code) or any(
        one.reads_urls for _key, one in sources_in(stream.source)
    ):
        return problems, [*trial.unseen, *functions]
    reason = _no_sample(plan, config.daemon, whole, storage)
    if reason:
        problems.append(problem_at(("streams", name), ProblemKind.NO_SAMPLE, reason))
    tried = len(_tried(stream.source, whole))
    return problems, [f"{text}, except {tried}" for text in trial.unseen] if tried < len(whole) else []


def _tried(source: SourceOptions, index: SourceIndex) -> tuple[int, ...]:
    """The samples that are made on trial, evenly spread; one of a generator."""
    count = 1 if source.is_live else min(TRIED_MAX, len(index))
    return tuple(number * len(index) // count for number in range(count))


def _no_sample(plan: StreamPlan, daemon: DaemonConfig, index: SourceIndex, storage: Storage) -> str:
    """Why the stream would stop at its first batch, as all samples on trial are bad; else ""."""
    samples = _tried(plan.config.source, index)
    try:
        pass_ = MeasureOptions(1, daemon.sample_timeout_s, storage, lambda _made: None)
        bad, example = bad_ones(plan, index, pass_, samples)
    except SourceInvalid as error:
        return f"no sample can be made: {error}"
    if bad < len(samples) or plan.config.max_bad_fraction == 1:
        return ""
    return f"all of {counted(len(samples), 'sample')} that were tried are bad, for example {example}"
