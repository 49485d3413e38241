"""``batchd init``: look at data, write the configuration that serves it, and show a batch.

Runs in the user's shell. The kinds of sources recognise their files (``data.sources.recognise``),
the daemon's scan counts the samples and leaves its index in the cache, and an embedded daemon
decodes the batch.

Invariant: the written configuration passes ``batchd check``. An interrupt leaves no partial file.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import click

from batchd.cli import first_config
from batchd.cli.options import DEFAULT_CONFIG_FILE, UNREAD_FILE, argument, as_command, option
from batchd.cli.problems import echo_unknown_variables
from batchd.config.load import parse_config
from batchd.config.schema import toml_value
from batchd.config.tree import Config
from batchd.daemon.config_checks import preview_streams
from batchd.data.samples.location import Url, as_location
from batchd.data.sources.options import SourceOptions
from batchd.data.sources.recognise import FoundSource, recognise, recognise_files, without_blamed
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex, readable
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.survey import ReportProgress, Survey
from batchd.errors import BatchdError, ConfigInvalid, MemoryTooSmall, SourceInvalid
from batchd.runtime.available import available_bytes, shortage
from batchd.runtime.directories import default_cache_dir
from batchd.stream.rings import memory_problem, needed_bytes, plan_rings

STANDARD_OUTPUT = Path("-")
LEFT_OUT_MAX = 1000
"""Number of omitted files that the JSON names."""


class Draft(NamedTuple):
    """A configuration that passes ``batchd check``, and the facts that it was made from."""

    name: str
    table: dict[str, object]
    text: str
    config: Config
    finding: FoundSource
    facts: first_config.Facts


@as_command("init")
def command(
    *,
    path: Annotated[Path, argument(metavar="[PATH]", type=UNREAD_FILE)] = Path(),
    output: Annotated[
        Path,
        option(
            "The configuration to write; - prints it.",
            "-o",
            "--output",
            type=click.Path(path_type=Path, allow_dash=True),
        ),
    ] = DEFAULT_CONFIG_FILE,
    allow_outside_root: Annotated[bool, option("Follow links that lead out of the folder.")],
    force: Annotated[bool, option("Overwrite the file.")],
    dry_run: Annotated[bool, option("Print the configuration, and write nothing.", "-n", "--dry-run")],
    as_json: Annotated[bool, option("Print the result as a JSON object, for programs.", "--json")],
    sheet: Annotated[Path | None, option("Save the batch as a PNG file instead.")],
) -> None:
    """Look at the data at PATH, write batchd.toml for it, and show a batch.

    PATH is a folder or a file: images (with or without a folder for each class), tar shards,
    Parquet, TFRecords, CSV, JSON Lines, tokens, npy, npz, videos, LMDB; or a pattern such as
    'train-{000..123}.tar'; or a URL of these, such as s3://bucket/train. Default: the current
    folder. Comments in the file describe the data, and list the files that the stream leaves out.
    """
    prints = dry_run or output == STANDARD_OUTPUT
    if sheet is not None and (prints or as_json):
        raise click.UsageError("--sheet saves a batch, but --dry-run, -o - and --json make none; leave --sheet out")
    echo_unknown_variables()
    if not prints:
        _check_output(output, force=force)
    drafted = _draft(path, output, allow_outside_root=allow_outside_root)
    if not prints:
        _write(output, drafted.text)
    if as_json:
        click.echo(json.dumps(_found(drafted, None if prints else output), indent=2))
    elif prints:
        click.echo(drafted.text, nl=False)
    else:
        click.echo(f"{drafted.text}\n{output} is written; the first batch:")
        _show_batch(output, drafted.name, sheet)
        click.echo(_next_steps(output, drafted))


def _draft(path: Path, output: Path, *, allow_outside_root: bool) -> Draft:
    """Look at the data and configure a stream. Raises ``BatchdError``."""
    try:
        place = as_location("PATH", path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if not isinstance(place, Url):
        place = Path(os.path.abspath(path))  # noqa: PTH100  resolve() would follow links
    with Storage() as storage, _progress() as progress:
        finding, source, index = _scanned(place, storage, progress, allow_outside_root=allow_outside_root)
        facts = first_config.look_at(source, index, storage)
        name, batch_size = first_config.stream_name(str(place)), first_config.first_batch_size(len(index))
        comments = first_config.comments_on(finding, facts)
        while True:
            table = first_config.stream_table(source, facts, batch_size)
            text = first_config.config_text(name, table, comments)
            try:
                return Draft(name, table, text, _checked(text, output, storage), finding, facts)
            except MemoryTooSmall:
                if batch_size == 1:
                    raise
                batch_size //= 2


def _scanned(
    place: Path, storage: Storage, progress: Callable[[str], ReportProgress], *, allow_outside_root: bool
) -> tuple[FoundSource, SourceOptions, SourceIndex]:
    """Recognise the data and scan it, without files that cannot be read. Raises ``BatchdError``."""
    survey = Survey(progress("files"), storage=storage)
    count = progress("samples")
    finding = recognise(place, survey)
    while True:
        source = finding.recognised.source
        if allow_outside_root and hasattr(source, "allow_outside_root"):
            source = replace(source, allow_outside_root=True)
        try:
            return finding, source, scan_source(source, count, IndexCache(default_cache_dir()), storage)
        except SourceInvalid as error:
            files, is_other = without_blamed(finding.files, type(source), str(error))
            if not is_other:
                raise
            finding = recognise_files(place, files, survey)


def _checked(text: str, file: Path, storage: Storage) -> Config:
    """Parse a configuration and check its stream as ``batchd check`` does. Raises ``BatchdError``.

    Of this machine, only the memory counts: where the daemon will run is not known.
    """
    reading = parse_config(text, file)
    assert reading.config is not None, reading.problems
    try:
        rings = plan_rings(reading.config, storage, thoroughly=True)
    except (ConfigInvalid, MemoryTooSmall) as error:
        raise type(error)(reading.located(error.problems), str(file)) from None
    if problems := preview_streams(reading.config, rings, storage):
        raise ConfigInvalid(reading.located(problems), str(file))
    short = shortage(needed_bytes(reading.config, rings), available_bytes())
    if (problem := memory_problem(reading.config, short)) is not None:
        raise MemoryTooSmall(reading.located([problem]), str(file))
    return reading.config


@contextmanager
def _progress() -> Iterator[Callable[[str], ReportProgress]]:
    """Show the numbers of files and samples found so far, on a terminal."""
    from rich.console import Console  # noqa: PLC0415  it takes longer to load than the rest
    from rich.progress import Progress, SpinnerColumn, TextColumn  # noqa: PLC0415  the same

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} {task.description}"))
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def counter(noun: str) -> ReportProgress:
            task = bar.add_task(noun, total=None)
            return lambda found: bar.update(task, completed=found)

        yield counter


def _check_output(file: Path, *, force: bool) -> None:
    """Raise ``BatchdError`` if the file cannot be written; called before the data is read."""
    if file.exists() and not force:
        raise BatchdError(f"{file} exists; add --force to overwrite it, or -o FILE to write another file")
    if not file.parent.is_dir():
        raise BatchdError(f"{file} cannot be written: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise BatchdError(f"{file} cannot be written: this user may not write to {file.parent.absolute()}; use -o FILE")


def _write(file: Path, text: str) -> None:
    """Write the whole file or nothing. Raises ``BatchdError``."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise BatchdError(f"{file} cannot be written: {error.strerror}") from None


def _found(draft: Draft, written: Path | None) -> dict[str, object]:
    """The result as plain data, for programs."""
    finding, facts = draft.finding, draft.facts
    return {
        "stream": draft.name,
        "written": None if written is None else str(written.absolute()),
        "samples": facts.samples,
        "fields": {column.name: column.text for column in facts.columns},
        "classes": facts.classes,
        "images": {name: asdict(images) for name, images in facts.images.items()},
        "files": len(finding.files.names),
        "left_out": [readable(name) for name in finding.left_out[:LEFT_OUT_MAX]],
        "left_out_files": len(finding.left_out),
        "left_out_reasons": {why: len(names) for why, names in finding.left_out_by_reason().items()},
        "notes": [*finding.recognised.notes, *facts.notes],
        "unreadable": list(facts.unreadable),
        **draft.table,
        "toml": draft.text,
    }


def _show_batch(file: Path, stream: str, sheet: Path | None) -> None:
    """Make the first batch in an embedded daemon, and show it. Raises ``BatchdError``."""
    from batchd.cli.peek import peek, show  # noqa: PLC0415  numpy and the client take a while
    from batchd.cli.peeked import batch_table  # noqa: PLC0415  the same
    from batchd.embedded import serve  # noqa: PLC0415  the same

    with serve(file) as address:
        batch = peek(address, stream, 0, 0)
    if sheet is not None:
        show(batch, stream, sheet)
    else:
        click.echo("\n".join(batch_table(batch)))


def _next_steps(file: Path, draft: Draft) -> str:
    config = "" if file == DEFAULT_CONFIG_FILE else f" -c {file}"
    names = sorted((column.name for column in draft.facts.columns), key=lambda name: name not in ("image", "label"))
    shown = ", ".join(f"batch[{toml_value(name)}]" for name in names[:2])
    return "\n".join(
        [
            f"\nNext: batchd serve{config}",
            "and in a trainer:",
            "  import batchd_client",
            f"  for batch in batchd_client.connect().stream({toml_value(draft.name)}):",
            f"      {shown}  # arrays in shared memory",
        ]
    )
