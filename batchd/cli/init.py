"""``batchd init``: look at data, write the configuration that serves it, and show a batch.

Runs in the user's shell. The kinds of sources recognise their files (``data.sources.recognise``),
the daemon's scan counts the samples and leaves its index in the cache, and an embedded daemon
decodes the batch. ``cli.config_file`` writes a new file, or adds the stream to a file in use.

Invariant: the written configuration passes ``batchd check``. An interrupt leaves no partial file.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, NamedTuple

import click

from batchd.cli import first_config, terminal
from batchd.cli.config_file import FileInUse, NewFile, served_as
from batchd.cli.options import (
    DEFAULT_CONFIG_FILE,
    UNREAD_FILE,
    argument,
    as_command,
    is_config_file,
    naming_running_file,
    option,
    running_file,
)
from batchd.cli.parts import DataPart, PartSearch, training_stream
from batchd.cli.problems import warn_of_unknown_variables
from batchd.cli.reload import ask_reload, reload
from batchd.config.problems import NAME_RULE
from batchd.config.schema import toml_value
from batchd.data.samples.location import Url, as_location
from batchd.data.sources.files.options import FolderSource
from batchd.data.storage.access import Storage
from batchd.data.storage.index import readable
from batchd.data.storage.survey import ReportProgress
from batchd.errors import ArgumentInvalid, BatchdError, ConfigInvalid, ExitCode, MemoryTooSmall
from batchd.runtime.suggestions import own_command
from batchd_wire.keys import STREAM_NAME_PATTERN

STANDARD_OUTPUT = Path("-")
LEFT_OUT_MAX = 1000
"""Number of omitted files that the JSON names."""


class DraftStream(NamedTuple):
    """A stream, and the data that it was made from."""

    name: str
    table: dict[str, object]
    part: DataPart


class Draft(NamedTuple):
    """Streams that pass ``batchd check``, the training part first, and their text."""

    streams: list[DraftStream]
    text: str


def _stream_name(text: str) -> str:
    if not re.fullmatch(STREAM_NAME_PATTERN, text, re.ASCII):
        raise click.BadParameter(f"{text!r}: {NAME_RULE}")
    return text


@as_command("init")
def command(
    *,
    path: Annotated[Path | None, argument(metavar="[PATH]", type=UNREAD_FILE)],
    add: Annotated[
        Path | None,
        option("Add a stream for the data at PATH to CONFIG, and keep the rest of that file.", metavar="PATH"),
    ],
    config: Annotated[
        Path | None,
        option("With --add: the configuration. CONFIG is the same. [default: batchd.toml]", "-c", "--config"),
    ],
    name: Annotated[
        str | None,
        option("The name of the stream. Default: that of the folder or file.", metavar="NAME", parse=_stream_name),
    ],
    output: Annotated[
        Path | None,
        option(
            "The configuration to write; - prints it. [default: batchd.toml]",
            "-o",
            "--output",
            type=click.Path(path_type=Path, allow_dash=True),
        ),
    ],
    allow_outside_root: Annotated[bool, option("Follow links that lead out of the folder.")],
    force: Annotated[bool, option("Overwrite the file.")],
    dry_run: Annotated[bool, option("Print what would be written, and write nothing.", "-n", "--dry-run")],
    as_json: Annotated[bool, option("Print the result as a JSON object, for programs.", "--json")],
    sheet: Annotated[Path | None, option("Save the batch as a PNG file instead.")],
) -> None:
    """Look at the data at PATH, write batchd.toml for it, and show a batch.

    PATH is a folder or a file: images (with or without a folder for each class), tar shards,
    Parquet, TFRecords, CSV, JSON Lines, tokens, npy, npz, videos, LMDB; or a pattern such as
    'train-{000..123}.tar'; or a URL of these, such as s3://bucket/train. Default: the current
    folder. Comments in the file describe the data, and list the files that the stream leaves out.
    If names show parts of a data set, such as train and val, each gets a stream, with the same
    classes; those beside the training part have no random steps and no shuffle.

    `batchd init --add PATH` adds a stream to the batchd.toml in the current folder, and
    `batchd init CONFIG --add PATH` to another one. Its text stays, and is followed by the stream;
    `batchd check` has to pass before the file is written. Then it offers to reload the daemon that
    uses the file.
    """
    if add is not None:
        _check_words(path, config, has_output=bool(output or force or sheet))
    elif config is not None:
        raise click.UsageError("-c goes with --add PATH; -o FILE names the configuration to write")
    prints = dry_run or output == STANDARD_OUTPUT
    if sheet is not None and (prints or as_json):
        raise click.UsageError("--sheet saves a batch, but --dry-run, -o - and --json make none; leave --sheet out")
    warn_of_unknown_variables()
    if add is not None:
        _add(
            add,
            config or path or DEFAULT_CONFIG_FILE,
            name,
            InitOutput(prints, as_json),
            allow_outside_root=allow_outside_root,
        )
        return
    file = NewFile(output or DEFAULT_CONFIG_FILE)
    if not prints:
        _check_output(file, force=force)
    drafted = _draft(path or Path(), file, name, allow_outside_root=allow_outside_root)
    if not prints:
        file.write(drafted.text)
    if as_json:
        terminal.emit_json(_found(drafted, None if prints else file.path))
    elif prints:
        terminal.emit(drafted.text)
    else:
        terminal.emit(drafted.text)
        terminal.say("", f"{file.path} is written; the first batch:")
        _show_batch(file.path, drafted.streams[0].name, sheet)
        serve = "" if file.path == DEFAULT_CONFIG_FILE else f" {file.path}"
        terminal.emit(f"\nNext: {own_command()} serve{serve}\n{_in_a_trainer(drafted)}")


class InitOutput(NamedTuple):
    """``prints``: print the stream, and write nothing. ``as_json``: for programs."""

    prints: bool
    as_json: bool


def _check_words(path: Path | None, config: Path | None, *, has_output: bool) -> None:
    """Raise ``click.UsageError`` for words that have no meaning beside --add."""
    if has_output:
        raise click.UsageError(
            "--output, --force and --sheet have no use beside --add, which keeps the file and shows no batch"
        )
    if path is not None and not is_config_file(str(path)):
        raise click.UsageError(f"{path} is no configuration, and --add takes one PATH: batchd init [CONFIG] --add PATH")
    if path is not None and config not in (None, path):
        raise click.UsageError(f"two configurations: {path} and --config {config}; name one of them")


def _add(path: Path, config: Path, name: str | None, output: InitOutput, *, allow_outside_root: bool) -> None:
    """Add a stream to a configuration in use. Raises ``BatchdError``, with the file as it was."""
    try:
        file = FileInUse(config)
    except ConfigInvalid as error:
        raise naming_running_file(error, ["batchd", "init"], ["--add", str(path)]) from None
    if name in file.streams:
        free = first_config.free_name(str(name), file.streams)
        raise BatchdError(f"{config} has a stream {name} already; choose another name, such as --name {free}")
    if not output.prints:
        file.check_folder()
    drafted = _draft(path, file, name, allow_outside_root=allow_outside_root)
    if not output.prints:
        file.write(drafted.text)
    if output.as_json:
        terminal.emit_json(_found(drafted, None if output.prints else config))
    elif output.prints:
        terminal.emit(drafted.text)
    else:
        terminal.emit(drafted.text)
        terminal.say("", f"added to {config} as {' and '.join(one.name for one in drafted.streams)}")
        _offer_reload(config)
        terminal.emit(_in_a_trainer(drafted))


def _offer_reload(config: Path) -> None:
    """Reload the daemon that uses the file, if the user says so, or say how."""
    running = running_file()
    file = "" if config == DEFAULT_CONFIG_FILE else f" {config}"
    if running is None or not os.path.samefile(running[1], config):  # noqa: PTH121  either may be a link
        terminal.emit(f"\nNext: {own_command()} serve{file}")
        return
    would = ask_reload(running[0], dry_run=True)
    if would.exit_code == ExitCode.NOT_ENOUGH_MEMORY:
        batchd = own_command()
        text = f"\nNext: {batchd} stop && {batchd} serve{file}"
        why = "(the daemon divides its memory among its streams when it starts; its trainers wait meanwhile)"
        terminal.say("", would.text)
        terminal.emit(text)
        terminal.say(why)
    elif (
        would.exit_code == ExitCode.FINE
        and terminal.can_ask()
        and terminal.confirm(f"Reload the daemon at {running[0]} now?")
    ):
        reload(running[0])
    else:
        terminal.emit(f"\nNext: {own_command()} reload")


def _check_output(file: NewFile, *, force: bool) -> None:
    """Raise ``BatchdError`` if the file cannot be written; called before the data is read."""
    if file.path.exists() and not force:
        remedy = "`batchd init --add PATH` adds a stream to it, --force overwrites it, -o FILE writes another file"
        raise BatchdError(f"{file.path} exists; {remedy}")
    file.check_folder()


def _draft(path: Path, file: NewFile, name: str | None, *, allow_outside_root: bool) -> Draft:
    """Look at the data and configure a stream. Raises ``BatchdError``."""
    try:
        place = as_location("PATH", path)
    except ValueError as error:
        raise ArgumentInvalid(str(error)) from None
    if not isinstance(place, Url):
        place = Path(os.path.abspath(path))  # noqa: PTH100  resolve() would follow links
    with Storage() as storage, _progress() as progress:
        parts = PartSearch(storage, progress, allow_outside_root=allow_outside_root).parts(place)
    served = [served_as(file.config, part.source) if name is None else None for part in parts]
    new = [part for part, stream in zip(parts, served, strict=True) if stream is None]
    if not new:
        raise BatchdError(
            f"{file.path} serves this data already, as stream {served[0]}; --name NAME adds it once more, for other steps"
        )
    training = served[0] or training_stream(parts[0].source, file.config)
    names = _names(new, name, first_config.stream_name(str(place)), file.streams)
    shapes = first_config.same_shapes(parts[0].facts, [part.facts for part in parts[1:]])
    batch_size = first_config.first_batch_size(parts[0].facts.samples)
    while True:
        drafted = _drafted(dict(zip(names, new, strict=True)), shapes, batch_size, training)
        try:
            file.check(drafted.text)
        except MemoryTooSmall:
            if batch_size == 1:
                raise
            batch_size //= 2
        else:
            return drafted


def _names(parts: Sequence[DataPart], wanted: str | None, of_place: str, taken: Collection[str]) -> list[str]:
    """A free name for the stream of each part."""
    ours = [first_config.stream_name(part.name) if part.name else of_place for part in parts]
    if len(parts) == 1:
        return [wanted or first_config.free_name(ours[0], taken)]
    if wanted is None and not set(ours) & set(taken):
        return ours
    first, *others = (first_config.free_name(f"{wanted or of_place}-{name}", taken) for name in ours)
    return [wanted or first, *others]


def _drafted(parts: Mapping[str, DataPart], shapes: first_config.Facts, batch_size: int, training: str | None) -> Draft:
    """The streams of parts, by their names, and their text. ``batch_size``: the largest.

    ``shapes``: facts that all parts get the same shapes from. ``training``: the stream of the
    training part, if the file has it already.
    """
    streams, texts = [], []
    of_training = training or next(iter(parts))
    for name, part in parts.items():
        is_training = name == of_training if training or len(parts) > 1 else None
        source = part.source
        if isinstance(source, FolderSource) and part.class_names and is_training is False and not source.classes:
            source = replace(source, classes=of_training)
        rows = min(batch_size, first_config.first_batch_size(part.facts.samples))
        facts = replace(shapes, samples=part.facts.samples)
        table = first_config.stream_table(source, facts, rows, is_training=is_training)
        streams.append(DraftStream(name, table, part))
        texts.append(first_config.config_text(name, table, first_config.comments_on(part.finding, part.facts)))
    return Draft(streams, "\n".join(texts))


@contextmanager
def _progress() -> Iterator[Callable[[str], ReportProgress]]:
    """Show the numbers of files and samples found so far, on a terminal."""
    from rich.progress import SpinnerColumn, TextColumn  # noqa: PLC0415  it takes longer to load than the rest

    with terminal.progress(SpinnerColumn(), TextColumn("{task.completed:,} {task.description}")) as bar:

        def counter(noun: str) -> ReportProgress:
            task = bar.add_task(noun, total=None)
            return lambda found: bar.update(task, completed=found)

        yield counter


def _found(draft: Draft, written: Path | None) -> dict[str, object]:
    """The result as plain data, for programs."""
    first, *others = map(_plain, draft.streams)
    written_to = None if written is None else str(written.absolute())
    return {**first, "written": written_to, "toml": draft.text, **({"parts": others} if others else {})}


def _plain(stream: DraftStream) -> dict[str, object]:
    finding, facts = stream.part.finding, stream.part.facts
    return {
        "stream": stream.name,
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
        **stream.table,
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
        terminal.say(*batch_table(batch, terminal.columns()))


def _in_a_trainer(draft: Draft) -> str:
    columns = draft.streams[0].part.facts.columns
    names = sorted((column.name for column in columns), key=lambda name: name not in ("image", "label"))
    shown = ", ".join(f"batch[{toml_value(name)}]" for name in names[:2])
    lines = ["and in a trainer:", "  import batchd_client"]
    daemon = "batchd_client.connect()"
    if len(draft.streams) > 1:
        lines.append(f"  daemon = {daemon}")
        daemon = "daemon"
    for stream in draft.streams:
        is_in_order = stream.table.get("shuffle") is False
        epochs = ", epochs=1" if is_in_order else ""
        lines.append(f"  for batch in {daemon}.stream({toml_value(stream.name)}{epochs}):")
        lines.append(f"      {shown}  # {'each sample once, in order' if is_in_order else 'arrays in shared memory'}")
    return "\n".join(lines)
