"""``batchd check``: everything that is wrong with a configuration, before any process starts. Runs in the user's shell.

Six things are looked at: the file by itself, the runtime directory, whether there are keys for TCP beyond loopback, whether
sources are there, whether functions and steps fit, and whether the memory holds two slots of each stream. Where the file by
itself is wrong, the others are looked at as far as it can be read, but for the memory. Sources are not scanned, so a check is
fast for any number of files.

Invariant: what passes here starts, unless the machine has too little memory or hardly any descriptors, or a source turns out
empty or malformed.
"""

from collections.abc import Sequence
from pathlib import Path

import click

from batchd.cli.options import DEFAULT_CONFIG_FILE, set_option
from batchd.cli.table import aligned
from batchd.config.draft import daemon_draft, hidden_problems, stream_drafts
from batchd.config.load import Reading, read_config
from batchd.config.problems import path_text
from batchd.config.runtime import choose_runtime_directory
from batchd.config.schema import meaning_of
from batchd.config.sizes import round_bytes
from batchd.config.tree import Config, DaemonConfig
from batchd.daemon.credentials import open_keys
from batchd.daemon.findings import look_at_stream
from batchd.daemon.keys import check_tcp_keys
from batchd.daemon.rings import RingSize, plan_rings
from batchd.errors import ConfigInvalid, MemoryTooSmall, Problem
from batchd.sources import storage
from batchd.sources.storage import CHECK_LIMITS
from batchd_wire.fields import PlacedField, length_texts
from batchd_wire.wording import counted


@click.command("check")
@click.argument("config_file", metavar="[FILE]", type=click.Path(path_type=Path), default=DEFAULT_CONFIG_FILE)
@set_option
def command(config_file: Path, overrides: dict[str, str]) -> None:
    """Check FILE (batchd.toml) and print all that is wrong with it: where, what, and what the key is for.

    If nothing is, print what would be served. Exit code 2 if something must be corrected, 5 if only the memory is too small.
    """
    storage.use(CHECK_LIMITS)
    reading = read_config(config_file, overrides)
    config, rings = _check(reading, config_file)
    click.echo(f"{config_file} is fine: {counted(config.daemon.worker_count(), 'worker')}, {_memory(config, rings)}")
    click.echo()
    for line in _table(config, rings):
        click.echo(line)


def _check(reading: Reading, config_file: Path) -> tuple[Config, dict[str, RingSize]]:
    """Plan the rings. Raises ``ConfigInvalid`` or ``MemoryTooSmall`` with all problems and their lines."""
    kind: type[ConfigInvalid | MemoryTooSmall] = ConfigInvalid
    problems = list(reading.problems)
    rings: dict[str, RingSize] = {}
    if reading.config is None:
        problems += _problems_around(reading)
    else:
        problems += _daemon_problems(reading.config.daemon, frozenset())
        try:
            rings = plan_rings(reading.config, thoroughly=True)
        except (ConfigInvalid, MemoryTooSmall) as error:
            kind = ConfigInvalid if problems else type(error)
            problems += error.problems
    if reading.config is None or problems:
        raise kind(reading.located(problems), str(config_file))
    return reading.config, rings


def _problems_around(reading: Reading) -> list[Problem]:
    """What else is wrong where the file by itself is, as far as anybody can tell. Not the memory: that is divided among all."""
    daemon, wrong = daemon_draft(reading.data)
    problems = _daemon_problems(daemon, wrong)
    python_path = None if "python_path" in wrong else daemon.python_path or ()
    for name, draft in stream_drafts(reading.data).items():
        problems += look_at_stream(name, draft, python_path).problems
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


def _memory(config: Config, rings: dict[str, RingSize]) -> str:
    used = sum(ring.ring_bytes for ring in rings.values())
    return f"up to {round_bytes(used)} of {round_bytes(config.daemon.memory)} shared memory"


def _table(config: Config, rings: dict[str, RingSize]) -> list[str]:
    """One row for each stream, columns as wide as they need to be."""
    rows = [("stream", "source", "fields of a batch", "slot", "slots in the ring")]
    for name, stream in config.streams.items():
        layout = rings[name].layout
        rows.append(
            (
                name,
                f"{stream.source.type} {stream.source.place}",
                ", ".join(_field(field, layout.rows) for field in layout.sample_fields),
                round_bytes(layout.slot_bytes),
                str(rings[name].slots_max),
            )
        )
    return aligned(rows)


def _field(field: PlacedField, rows: int) -> str:
    kind = f" {field.varying.kind}" if field.varying else ""
    return f"{field.name} {field.dtype}[{', '.join([str(rows), *length_texts(field.shape, field.varying)])}]{kind}"
