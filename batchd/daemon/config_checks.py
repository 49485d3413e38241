"""Everything that is wrong with a configuration, before anything of it is served. ``batchd check``, and the daemon's reloads.

    the file by itself -> runtime directory, keys -> sources, functions, steps -> memory

Where the file by itself is wrong, the others are looked at as far as it can be read, but for the
memory.

Invariant: whoever asks gets all problems, each with its line.
"""

from collections.abc import Sequence
from pathlib import Path

from batchd.config.directories import choose_runtime_directory
from batchd.config.draft import daemon_draft, hidden_problems, stream_drafts
from batchd.config.load import LoadedConfig
from batchd.config.schema import meaning_of
from batchd.config.tree import Config, DaemonConfig
from batchd.daemon.memory.rings import RingSize, plan_rings
from batchd.daemon.stream_checks import look_at_stream
from batchd.daemon.tcp.credentials import open_keys
from batchd.daemon.tcp.keys import check_tcp_keys
from batchd.errors import ConfigInvalid, MemoryTooSmall, Problem, path_text
from batchd.storage.access import Storage


def check_reading(reading: LoadedConfig, config_file: Path, storage: Storage) -> tuple[Config, dict[str, RingSize]]:
    """Plan the rings. Raises ``ConfigInvalid`` or ``MemoryTooSmall`` with all problems and their lines."""
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
    """What else is wrong where the file by itself is, as far as anybody can tell. Not the memory: that is divided among all."""
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
    """What is wrong with the places that the daemon names; not with the keys that are ``wrong`` by themselves."""
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
