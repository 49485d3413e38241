"""``batchd check``: validate a configuration before any process starts. In the user's shell.

``daemon.config_checks`` has the checks. Only the start of a large source is scanned, so a check is
fast for any number of files; ``--explain`` scans all.

Invariant: a daemon starts with what passes here, except for what the last lines list.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import click

from batchd.cli import terminal
from batchd.cli.options import ConfigFile, Overrides, as_command, option, with_running_file
from batchd.cli.problems import plain_problems, warn_of_unknown_variables
from batchd.cli.tables import facts, fitted
from batchd.cli.text import escaped
from batchd.config.load import LoadedConfig, read_config
from batchd.config.tree import Config
from batchd.daemon.config_checks import (
    Preview,
    check_reading,
    common_samples,
    decoding_places,
    further_problems,
    preview,
)
from batchd.data.storage.access import Storage
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall
from batchd.runtime.sizes import round_bytes
from batchd.stream.plan import plan_stream
from batchd.stream.rings import RingSize, budgets_bytes
from batchd_wire.wording import counted


@as_command("check")
def command(
    context: click.Context,
    *,
    config_file: ConfigFile,
    overrides: Overrides,
    explain: Annotated[
        bool,
        option(
            "Scan the sources, too, and show the fields of a sample of each stream after each step; for a few samples what is "
            "decoded of the image, and what is done to it; the kind of its cache, what all samples need in it, and which "
            "part has room; of a shuffle of blocks, what it mixes; of buckets and packed rows, the filling and what ranks "
            "of a step wait for."
        ),
    ],
    output_format: Annotated[
        Literal["text", "json"],
        option(
            "json: for editors and CI, only the problems, each with path, line, column, key, name, problem, help and "
            "meaning.",
            "--format",
        ),
    ] = "text",
) -> None:
    """Validate CONFIG (batchd.toml) and print every problem with its line and its key's meaning.

    `batchd explain NAME` has the manual of a problem, by the name in brackets behind it.
    `batchd init PATH` writes a first one for your data.

    A few samples of each stream are made in a process of their own, with your functions, so that
    what would stop a stream at its first batch is found. Without problems, print a summary of the
    streams, and what was not checked: the rest of a large source, servers; and memory, descriptors
    and addresses, if a daemon runs already. Exit code 2 if something must be corrected, 5 if only
    the memory is too small.
    """
    warn_of_unknown_variables()
    if output_format == "text":
        _check(config_file, overrides, explain=explain)
        return
    if explain:
        raise click.UsageError("--explain prints text; leave out --format json")
    try:
        with Storage(CHECK_LIMITS) as storage:
            checked(read_config(config_file, overrides), config_file, storage)
    except BatchdError as failure:
        error = with_running_file(context, failure) if isinstance(failure, ConfigInvalid) else failure
        terminal.emit_json({"problems": plain_problems(error, str(config_file))})
        sys.exit(error.exit_code)
    terminal.emit_json({"problems": []})


def checked(reading: LoadedConfig, config_file: Path, storage: Storage) -> tuple[Config, dict[str, RingSize], Preview]:
    """Check a configuration. Raises ``ConfigInvalid`` or ``MemoryTooSmall`` with all problems."""
    try:
        config, rings = check_reading(reading, config_file, storage)
    except (ConfigInvalid, MemoryTooSmall) as error:
        further = further_problems(reading, error.problems, storage)
        kind = ConfigInvalid if further else type(error)
        problems = sorted([*error.problems, *reading.located(further)], key=lambda problem: problem.line or 0)
        raise kind(problems, str(config_file)) from None
    found = preview(config, rings, storage)
    problems = found.problems + ([found.shortage] if found.shortage is not None else [])
    if problems:
        kind = ConfigInvalid if found.problems else MemoryTooSmall
        raise kind(reading.located(problems), str(config_file))
    return config, rings, found


def _check(config_file: Path, overrides: dict[str, str], *, explain: bool) -> None:
    """Print a summary of a valid configuration."""
    with Storage(CHECK_LIMITS) as storage:
        config, rings, found = checked(read_config(config_file, overrides), config_file, storage)
        width = terminal.columns()
        workers = counted(config.daemon.worker_count(), "worker")
        terminal.say(f"{config_file} is fine: {workers}, {_memory(config, rings)}\n")
        terminal.say(*described(config, rings, width))
        unused = [(name, stream.unused_by_cache) for name, stream in config.streams.items() if stream.unused_by_cache]
        for title, lines in (
            (f"Decoded on, with worker hosts at {config.daemon.worker_address}:", decoding_places(config, rings)),
            ("Keys of a cache that 'auto' does not use:", unused),
            ("Over the same source:", common_samples(config)),
            ("Notes:", found.notes),
            ("Not looked at, as only the daemon and its workers do:", found.unseen),
        ):
            if lines:
                terminal.say("", title, *facts(lines, width))
        if explain:
            _explain(config, rings, storage)


def _explain(config: Config, rings: dict[str, RingSize], storage: Storage) -> None:
    from batchd.cli.decoding_plans import explained  # noqa: PLC0415  it loads OpenCV, which the check itself needs not

    storage.limits, storage.encloses = config.daemon.storage_limits(), config.daemon.encloses
    for name, stream in config.streams.items():
        terminal.say("")
        plan = plan_stream(name, stream, rings[name].columns, config.daemon)
        for line in explained(plan, config.daemon, storage):
            terminal.say(escaped(line))


def _memory(config: Config, rings: dict[str, RingSize]) -> str:
    used = sum(ring.ring_bytes for ring in rings.values())
    caches, derived = budgets_bytes(config), config.daemon.derived_bytes
    beside = f", and {round_bytes(derived)} for derived streams" if derived else ""
    beside += f", and up to {round_bytes(caches)} for caches" if caches else ""
    return f"up to {round_bytes(used)} of {round_bytes(config.daemon.memory)} shared memory{beside}"


def described(config: Config, rings: dict[str, RingSize], width: int) -> list[str]:
    """The streams: a table, or, where that is wider than ``width``, a paragraph for each."""
    rows = [("stream", "source", "fields of a batch", "slot", "slots in the ring")]
    for name, stream in config.streams.items():
        layout, source = rings[name].layout, f"{stream.source.type} {stream.source.place}"
        fields = ", ".join(layout.field_texts)
        rows.append((name, source, fields, round_bytes(layout.slot_bytes), str(rings[name].slots_max)))
    return fitted(rows, width)
