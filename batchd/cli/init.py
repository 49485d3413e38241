"""``batchd init``: write a batchd.toml for the data at a path. Runs in the user's shell.

    path --recognise--> options --> a file beside the target --a daemon serves a batch of it--> renamed

Invariant: what is written has been served; after Ctrl-C or an error nothing is there.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import batchd
from batchd.cli.options import DEFAULT_CONFIG_FILE
from batchd.cli.recognise import Found, recognise
from batchd.errors import BatchdError
from batchd_wire.wording import counted

BATCH_SIZE = 64
SAMPLES_SHOWN = 4
_PICTURES = (
    '{ op = "decode" }',
    '{ op = "random_resized_crop", size = [224, 224] }',
    '{ op = "random_flip" }',
)
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


@click.command("init")
@click.argument("place", metavar="PATH")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG_FILE,
    show_default=True,
    help="The file to write; - writes nothing, and prints it.",
)
@click.option("--name", help="The name of the stream. [default: the name of the folder or file]")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--sheet", type=click.Path(path_type=Path), help="Draw the first batch as a PNG, too.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found and written as JSON.")
def command(place: str, file: Path, name: str | None, sheet: Path | None, *, force: bool, as_json: bool) -> None:
    """Look at the data at PATH, serve a batch of it for a try, and write a configuration.

    PATH is a folder of images, with or without a folder for each class; tar shards, Parquet files,
    TFRecords, tables, arrays, videos, or a folder of these; or the URL of tar shards or an array.
    """
    is_written = str(file) != "-"
    if is_written and file.exists() and not force:
        raise BatchdError(f"{file} exists; `batchd init --force` replaces it, `-o OTHER.toml` writes another file")
    click.echo(f"looking at {place} ...", err=True)
    found = recognise(place)
    stream = name or _name_of(place)
    text = configuration(found, stream, place)
    click.echo("trying it ...", err=True)
    try:
        lines = _try(text, file if is_written else DEFAULT_CONFIG_FILE, stream, sheet, is_kept=is_written)
    except BatchdError as error:
        raise BatchdError(f"{error} ({'; '.join(found.facts)})") from None
    if as_json:
        click.echo(json.dumps({"file": str(file) if is_written else None, "stream": stream} | found._asdict()))
        return
    click.echo(
        "\n".join([text if not is_written else f"{file}: {'; '.join(found.facts)}", *_left_out(found), "", *lines])
    )
    if is_written:
        click.echo("\n".join(["", *_next_steps(file, stream)]))


def configuration(found: Found, stream: str, place: str) -> str:
    """The text of a batchd.toml with one stream."""
    lines = [f"# {place}: {'; '.join(found.facts)}"]
    lines += [f"# {line}" for line in _left_out(found)]
    lines += ["", f"[streams.{stream}]", f"source = {_toml(found.source)}", f"batch_size = {BATCH_SIZE}"]
    if found.decodes:
        lines += ["pipeline = [", *(f"    {step}," for step in _PICTURES), "]"]
    return "\n".join(["".join(letter if letter.isprintable() else "?" for letter in line) for line in lines]) + "\n"


def _left_out(found: Found) -> list[str]:
    return [f"left out: {one}" for one in found.left_out]


def _name_of(place: str) -> str:
    """A name of a stream, from the last part of a path."""
    last = place.rstrip("/").rpartition("/")[2] if "://" in place else Path(place).expanduser().resolve().name
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", last.partition(".")[0]).strip("-")[:64]
    return name or "data"


def _toml(value: Any) -> str:
    """A value in TOML, on one line. Strings are written as in JSON, which TOML reads."""
    if isinstance(value, Mapping):
        keys = ((key if _PLAIN_KEY.fullmatch(key) else json.dumps(key), one) for key, one in value.items())
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in keys)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _try(text: str, file: Path, stream: str, sheet: Path | None, *, is_kept: bool) -> list[str]:
    """Serve a batch of it, and keep the file if that works; lines about the batch."""
    from batchd.cli.contact_sheet import image_fields, write_sheet  # noqa: PLC0415  OpenCV takes long to load
    from batchd.cli.peek import batch_table, peek  # noqa: PLC0415  it loads the client

    trial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        trial.write_text(text)
    except OSError as error:
        raise BatchdError(f"{file} cannot be written: {error.strerror}") from None
    try:
        with batchd.serve(trial, overrides={"daemon.workers": "1"}) as address:
            batch = peek(address, stream, 0, 0)
            if sheet is not None and image_fields(batch):
                write_sheet(batch, sheet, image_fields(batch)[0], is_bgr=False)
        if is_kept:
            trial.replace(file)
    finally:
        trial.unlink(missing_ok=True)
    shown = batch_table(batch)[: 1 + 1 + SAMPLES_SHOWN]
    drawn = [f"{sheet}: a picture of it"] if sheet is not None and image_fields(batch) else []
    return [f"a batch of {counted(batch.rows, 'sample')}, the first of them:", *shown, *drawn]


def _next_steps(file: Path, stream: str) -> Iterator[str]:
    where = "" if file == DEFAULT_CONFIG_FILE else f" -c {file}"
    yield f"Next: batchd serve{where}"
    yield "and in your program:"
    yield "    import batchd_client"
    yield "    with batchd_client.connect() as daemon:"
    yield f'        for batch in daemon.stream("{stream}"): ...'
