"""``batchd prepare``: a stream's samples, through its pipeline once, into shards. Runs in the user's shell.

Needs no daemon: a process for each CPU writes shards of its own.
"""

import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from batchd.cli.complete import configured_streams
from batchd.cli.logs import set_up_logs
from batchd.cli.options import config_options
from batchd.config.load import load_config
from batchd.config.names import suggestion
from batchd.config.runtime import default_cache_dir
from batchd.config.sizes import round_bytes
from batchd.errors import BatchdError, SourceInvalid
from batchd.prepare.run import Output, Prepared, Progress, Work, prepare
from batchd.prepare.source_table import source_table
from batchd.sources import storage
from batchd.sources.cache import IndexCache
from batchd.sources.storage import StorageLimits
from batchd_wire.wording import counted


@click.command("prepare")
@click.argument("stream", shell_complete=configured_streams)
@click.option(
    "--to", "folder", metavar="DIR", type=click.Path(path_type=Path), required=True, help="The folder of the shards."
)
@config_options
@click.option(
    "--shard-samples", type=click.IntRange(1, 10_000_000), default=1000, show_default=True, help="Samples in a shard."
)
@click.option(
    "--format",
    "image_format",
    type=click.Choice(["jpg", "png", "webp"]),
    default="jpg",
    show_default=True,
    help="How pixels are encoded. Images that the pipeline does not decode stay as they are.",
)
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True, help="Of jpg and webp.")
def command(
    *,
    stream: str,
    folder: Path,
    config_file: Path,
    overrides: dict[str, str],
    shard_samples: int,
    image_format: str,
    quality: int,
) -> None:
    """Run the pipeline of STREAM once over all its samples, and write what it makes into shards in DIR, in WebDataset format.

    For work that need not be done in every epoch: photographs resized to 400 pixels, say. Samples need not have one size. Bad
    samples are left out and listed in DIR/bad.tsv. Interrupted, or killed, the same command goes on where it was. At the end it
    prints the source that reads all of it again.
    """
    set_up_logs("warning")
    config = load_config(config_file, overrides)
    if stream not in config.streams:
        raise SourceInvalid(f"{config_file} has no stream {stream!r}; {suggestion(stream, list(config.streams))}")
    storage.use(StorageLimits(*config.daemon.storage_limits()))
    work = Work(
        name=stream,
        config=config.streams[stream],
        cache=IndexCache(config.daemon.cache_dir or default_cache_dir()),
        workers=config.daemon.worker_count(),
        sample_timeout_s=config.daemon.sample_timeout_s,
        python_path=config.daemon.python_path or (),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _bar() as bar:
            task = bar.add_task(stream, total=None, bad="")

            def show(progress: Progress) -> None:
                bad = f"{progress.bad} bad" if progress.bad else ""
                bar.update(task, total=progress.samples, completed=progress.done, bad=bad)

            prepared = prepare(work, Output(folder, shard_samples, image_format, quality), show)
    except KeyboardInterrupt:
        raise BatchdError("interrupted; the same command goes on where it was") from None
    _summarise(folder, stream, prepared)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]}"),
        console=Console(file=sys.stderr),
        transient=True,
    )


def _summarise(folder: Path, stream: str, prepared: Prepared) -> None:
    """What is there now, and how to serve it."""
    count = len(prepared.shards)
    bad = len(prepared.left_out)
    click.echo(
        f"{counted(prepared.samples - bad, 'sample')} in {counted(count, 'shard')} of {round_bytes(prepared.shard_bytes)}"
        + (f"; {counted(bad, 'bad one')} left out, see {folder / 'bad.tsv'}" if bad else "")
    )
    if prepared.empty:
        click.echo(f"no sample is good in {', '.join(prepared.empty)}: remove what holds none")
    if prepared.columns and len(prepared.empty) < count:
        shards = f"{stream}-{{000000..{count - 1:06}}}.tar"
        click.echo("serve them:")
        click.echo(f"  source = {source_table(folder.absolute(), shards, prepared.columns)}")
