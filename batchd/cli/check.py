"""``batchd check``: validate a configuration before any process starts. In the user's shell.

``daemon.config_checks`` has the checks. Only the start of a large source is scanned, so a check is
fast for any number of files; ``--explain`` scans all.

Invariant: a daemon starts with what passes here, except for what the last lines list.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import click

from batchd.cli.options import ConfigFile, Overrides, as_command, option
from batchd.cli.problems import echo_unknown_variables, plain_problems
from batchd.cli.tables import facts, own_console
from batchd.cli.text import aligned, escaped
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
    *,
    config_file: ConfigFile,
    overrides: Overrides,
    explain: Annotated[
        bool,
        option(
            "Scan the sources, too, and show for a few samples of each stream what is decoded of the image, and what is "
            "done to it; the kind of its cache, what all samples need in it, and which part has room; of a shuffle of "
            "blocks, what it mixes; of buckets and packed rows, the filling and what ranks of a step wait for."
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
    echo_unknown_variables()
    if output_format == "text":
        _check(config_file, overrides, explain=explain)
        return
    if explain:
        raise click.UsageError("--explain prints text; leave out --format json")
    try:
        with Storage(CHECK_LIMITS) as storage:
            checked(read_config(config_file, overrides), config_file, storage)
    except BatchdError as error:
        click.echo(json.dumps({"problems": plain_problems(error, str(config_file))}, indent=2))
        sys.exit(error.exit_code)
    click.echo(json.dumps({"problems": []}, indent=2))


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
        width = own_console().width if sys.stdout.isatty() else sys.maxsize  # a pipe: no limit
        workers = counted(config.daemon.worker_count(), "worker")
        click.echo(f"{config_file} is fine: {workers}, {_memory(config, rings)}\n")
        click.echo("\n".join(described(config, rings, width)))
        unused = [(name, stream.unused_by_cache) for name, stream in config.streams.items() if stream.unused_by_cache]
        for title, lines in (
            (f"Decoded on, with worker hosts at {config.daemon.worker_address}:", decoding_places(config, rings)),
            ("Keys of a cache that 'auto' does not use:", unused),
            ("Over the same source:", common_samples(config)),
            ("Notes on sources and steps:", found.notes),
            ("Not looked at, as only the daemon and its workers do:", found.unseen),
        ):
            if lines:
                click.echo("\n".join(("", title, *facts(lines, width))))
        if explain:
            _explain(config, rings, storage)


def _explain(config: Config, rings: dict[str, RingSize], storage: Storage) -> None:
    from batchd.cli.decoding_plans import explained  # noqa: PLC0415  it loads OpenCV, which the check itself needs not

    storage.limits = config.daemon.storage_limits()
    for name, stream in config.streams.items():
        click.echo()
        plan = plan_stream(name, stream, rings[name].columns, config.daemon.python_path or ())
        for line in explained(plan, config.daemon, storage):
            click.echo(escaped(line))


def _memory(config: Config, rings: dict[str, RingSize]) -> str:
    used = sum(ring.ring_bytes for ring in rings.values())
    caches = budgets_bytes(config)
    beside = f", and up to {round_bytes(caches)} for caches" if caches else ""
    return f"up to {round_bytes(used)} of {round_bytes(config.daemon.memory)} shared memory{beside}"


def described(config: Config, rings: dict[str, RingSize], width: int) -> list[str]:
    """The streams: a table, or, where that is wider than ``width``, a paragraph for each."""
    titles = ("stream", "source", "fields of a batch", "slot", "slots in the ring")
    rows = [titles]
    for name, stream in config.streams.items():
        layout, source = rings[name].layout, f"{stream.source.type} {stream.source.place}"
        fields = ", ".join(layout.field_texts)
        rows.append((name, source, fields, round_bytes(layout.slot_bytes), str(rings[name].slots_max)))
    lines = aligned(rows)
    if max(map(len, lines)) <= width:
        return lines
    paragraphs = [[row[0], *facts(list(zip(titles[1:], row[1:], strict=True)), width)] for row in rows[1:]]
    return [line for lines in paragraphs for line in lines]
