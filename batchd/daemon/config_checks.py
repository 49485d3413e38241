"""Every problem of a configuration. ``batchd check``, and the daemon's reloads.

    the file by itself -> runtime directory, keys -> sources, functions, steps -> memory

If the file itself is wrong, the rest is checked as far as it can be read, except the memory.
``batchd check`` also calls ``preview``, which finds what the daemon would refuse at its start:

    streams   scanned on trial; then what a whole scan decides: a first batch, the cache, its file
    machine   memory, descriptors, addresses, the runtime directory; skipped if a daemon runs there,
              which has its own already

Each refusal comes from the function that the daemon calls, so words and numbers are the same.

Invariant: the caller gets all problems, each with its line. Nothing is left changed, and whatever
was not checked is reported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchd.config.addresses import tcp_endpoint
from batchd.config.directories import choose_runtime_directory
from batchd.config.draft import daemon_draft, hidden_problems, stream_drafts
from batchd.config.load import LoadedConfig
from batchd.config.schema import meaning_of
from batchd.config.tree import Config, DaemonConfig, StreamConfig
from batchd.daemon.memory.available import available_bytes, shortage
from batchd.daemon.memory.cache_file import file_problem
from batchd.daemon.memory.cache_memory import cache_spec, memory_problem, needed_bytes
from batchd.daemon.memory.held_descriptors import plan_descriptors
from batchd.daemon.memory.rings import RingSize, plan_rings
from batchd.daemon.runtime import directory_problem, has_daemon
from batchd.daemon.service.observer import open_http
from batchd.daemon.stream_checks import look_at_stream
from batchd.daemon.stream_plan import epoch_plan, plan_stream
from batchd.daemon.tcp.keys import check_tcp_keys, open_keys
from batchd.errors import BatchdError, ConfigInvalid, KeyPath, MemoryTooSmall, Problem, SourceInvalid, path_text
from batchd.pipeline.call.options import Call
from batchd.samples.columns import Column
from batchd.sources.source_checks import SAMPLES_MAX, try_source
from batchd.storage.access import Storage
from batchd_wire.runtime import RuntimeDirectory, candidate_directories


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
    if reading.config is None or problems:
        raise kind(reading.located(problems), str(config_file))
    return reading.config, rings


def _problems_around(reading: LoadedConfig, storage: Storage) -> list[Problem]:
    """Find further problems of a file that is wrong by itself, except of the memory."""
    daemon, wrong = daemon_draft(reading.data)
    problems = _daemon_problems(daemon, wrong)
    python_path = None if "python_path" in wrong else daemon.python_path or ()
    for name, draft in stream_drafts(reading.data).items():
        problems += look_at_stream(name, draft, python_path, storage).problems
    known = {problem.path for problem in reading.problems}
    for path, text in hidden_problems(reading.data):
        if path_text(path) not in known:
            problems.append(Problem(path_text(path), text, meaning_of(path, reading.data)))
    return problems


def _daemon_problems(daemon: DaemonConfig, wrong: frozenset[str]) -> list[Problem]:
    """Check the directories and keys of the daemon, except keys that are ``wrong`` anyhow."""
    problems: list[Problem] = []
    if "runtime_dir" not in wrong:
        try:
            choose_runtime_directory(daemon.runtime_dir)
        except ConfigInvalid as error:
            problems += error.problems
    if not wrong & {"tcp", "keys_dir"}:
        problems += _key_problems(daemon)
    return problems


def _key_problems(daemon: DaemonConfig) -> Sequence[Problem]:
    if daemon.tcp is None:
        return []
    try:
        problem = check_tcp_keys(daemon, open_keys(daemon.keys_dir))
    except ConfigInvalid as error:
        return error.problems
    return [problem] if problem else []


_RUNS = "memory, descriptors and addresses: the daemon that runs has its own, and `batchd reload` compares them"


class Preview(NamedTuple):
    """What ``preview`` has found.

    ``shortage``: of memory. ``unseen``: parts that were not checked, each with its stream.
    """

    problems: list[Problem]
    shortage: Problem | None
    unseen: list[tuple[str, str]]


def preview(config: Config, rings: dict[str, RingSize], storage: Storage) -> Preview:
    """Check everything that the daemon checks before its first trainer; ``rings`` are planned."""
    is_running = _is_running(config.daemon.runtime_dir)
    problems = [] if is_running else _machine_problems(config, rings)
    unseen = [("[daemon]", _RUNS)] if is_running else []
    for name, stream in config.streams.items():
        python_path = config.daemon.python_path or ()
        found, texts = _stream(name, stream, rings[name].columns, python_path, storage, is_running=is_running)
        problems += found
        unseen += [(name, text) for text in texts]
    short = None if is_running else shortage(needed_bytes(config, rings), available_bytes())
    return Preview(problems, memory_problem(config, short), unseen)


def _machine_problems(config: Config, rings: dict[str, RingSize]) -> list[Problem]:
    """Problems of the machine, except memory."""
    found = [
        directory_problem(choose_runtime_directory(config.daemon.runtime_dir)),
        _tcp_problem(config.daemon),
        plan_descriptors(config, rings).refusal(len(rings)),
    ]
    problems = [problem for problem in found if problem is not None]
    if "http" in config.daemon.model_fields_set:
        try:
            open_http(config.daemon, is_embedded=False).close()
        except ConfigInvalid as error:
            problems += error.problems
    return problems


def _tcp_problem(daemon: DaemonConfig) -> Problem | None:
    """Try whether ZeroMQ can listen: it accepts other addresses than the kernel does."""
    if daemon.tcp is None:
        return None
    import zmq  # noqa: PLC0415  most configurations need it not

    from batchd.daemon.tcp.router import cannot_listen, check_context_threads  # noqa: PLC0415  the same

    endpoint = tcp_endpoint(daemon.tcp)
    try:
        check_context_threads()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(endpoint)
    except BatchdError as error:
        text = str(error)
    except zmq.ZMQError as error:
        text = cannot_listen(endpoint, error)
    else:
        return None
    return Problem("daemon.tcp", text, meaning_of(("daemon", "tcp"), {}))


def _is_running(configured: Path | None) -> bool:
    """True if a daemon runs for this configuration, in any directory that it may use."""
    if configured is not None:
        return has_daemon(choose_runtime_directory(configured))
    return any(map(has_daemon, map(RuntimeDirectory, candidate_directories())))


def _stream(  # noqa: PLR0913  all of it is about one stream
    name: str,
    config: StreamConfig,
    columns: tuple[Column, ...],
    python_path: Sequence[Path],
    storage: Storage,
    *,
    is_running: bool,
) -> tuple[list[Problem], list[str]]:
    """Problems of a stream, and the parts of it that were not checked."""
    trial = try_source(config.source, python_path, storage, max(SAMPLES_MAX, config.batch_size))
    unseen = [
        *trial.unseen,
        *(f"what {step.function} makes of it" for step in config.pipeline if isinstance(step, Call)),
    ]
    problems = [_problem((name, "source", *one.key), one.text) for one in trial.problems]
    if trial.whole is None or problems:
        return problems, unseen
    try:
        epoch_plan(name, config, len(trial.whole))
        found = None
        if config.cache != "off":
            spec = cache_spec(plan_stream(name, config, columns, python_path), trial.whole)
            text = file_problem(spec) if spec is not None and spec.folder and not is_running else None
            found = _problem((name, "cache_dir"), text) if text is not None else None
    except SourceInvalid as error:
        path, _colon, text = str(error).partition(": ")
        found = Problem(path, text)
    return [found] if found is not None else [], unseen


def _problem(path: KeyPath, text: str) -> Problem:
    path = ("streams", *path)
    return Problem(path_text(path), text, meaning_of(path, {}))
