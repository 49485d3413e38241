"""``batchd prepare``: a stream's samples, through its pipeline once, into shards.

Runs in the user's shell without a daemon: a process for each CPU writes shards of its own.
"""

import signal
import sys
from pathlib import Path

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import DEFAULT_CONFIG_FILE, completions, config_options, path_option
from batchd.commands.prepare.members import files_table, source_table
from batchd.commands.prepare.run import FILE_SOURCES, Output, Prepared, PrepareJob, prepare
from batchd.config.load import load_config, read_config
from batchd.config.tree import StreamConfig
from batchd.data.pipeline.image import jpeg_box
from batchd.data.pipeline.image.options import Decode, Resize
from batchd.data.pipeline.options import SIDE_PIXELS_MAX, StepOptions
from batchd.data.sources.interface import kind_of
from batchd.data.sources.options import SourceOptions
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import BatchdError, SourceInvalid
from batchd.runtime.directories import default_cache_dir
from batchd.runtime.sizes import round_bytes
from batchd.runtime.suggestions import suggestion
from batchd_wire.wording import counted


def configured_streams(context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the configured streams after Tab, also if parts of the configuration are wrong."""
    try:
        streams = read_config(context.params.get("config_file") or DEFAULT_CONFIG_FILE).data.get("streams")
    except BatchdError:
        return []
    return completions(streams if isinstance(streams, dict) else (), incomplete)


@click.command("prepare")
@click.argument("stream", shell_complete=configured_streams)
@path_option("--to", "folder", metavar="DIR", required=True, help="The folder of the shards.")
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
@click.option(
    "--seekable",
    is_flag=True,
    help="Write the source's JPEGs again with restart markers, so that crops of them decode faster, and run no pipeline: the "
    "pixels stay the same, bit for bit.",
)
@click.option(
    "--short-side",
    type=click.IntRange(1, SIDE_PIXELS_MAX),
    metavar="PIXELS",
    help="With --seekable: resize images so that their shorter side has so many pixels, and encode them with --quality.",
)
@click.option(
    "--files",
    "as_files",
    is_flag=True,
    help="With --seekable: write files with the paths that they have below their source's root, instead of shards.",
)
def command(
    *,
    stream: str,
    folder: Path,
    config_file: Path,
    overrides: dict[str, str],
    shard_samples: int,
    image_format: str,
    quality: int,
    seekable: bool,
    short_side: int | None,
    as_files: bool,
) -> None:
    """Run the pipeline of STREAM once over all its samples, and write the results as shards in DIR.

    For work that need not be done in every epoch: photographs resized to 400 pixels, say. The
    shards are in WebDataset format. Samples may have different sizes. Bad samples are left out and
    listed in DIR/bad.tsv. After an interruption or a kill, the same command resumes. At the end it
    prints the source that reads all of it again.

    With --seekable, writes the source's own JPEGs, so that crops of them decode in less time.
    """
    set_up_logs("warning")
    config = load_config(config_file, overrides)
    if stream not in config.streams:
        raise SourceInvalid(f"{config_file} has no stream {stream!r}; {suggestion(stream, list(config.streams))}")
    stream_config, storage = config.streams[stream], Storage(config.daemon.storage_limits())
    if seekable:
        steps = _seekable_pipeline(stream_config, short_side, image_format, storage)
        stream_config = stream_config.model_copy(update={"pipeline": steps})
    elif short_side is not None or as_files:
        given = "--files" if as_files else "--short-side"
        raise click.UsageError(f"{given} is for --seekable: without it, the pipeline says what is done and made")
    work = PrepareJob(
        name=stream,
        config=stream_config,
        cache=IndexCache(config.daemon.cache_dir or default_cache_dir()),
        workers=config.daemon.worker_count(),
        sample_timeout_s=config.daemon.sample_timeout_s,
        storage=storage,
        python_path=config.daemon.python_path or (),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    try:
        with Bar(*columns, TextColumn("{task.fields[bad]}"), console=console, transient=True) as bar:
            task = bar.add_task(stream, total=None, bad="")

            def show(samples: int, done: int, bad: int) -> None:
                bar.update(task, total=samples, completed=done, bad=f"{bad} bad" if bad else "")

            output = Output(folder, shard_samples, image_format, quality, is_seekable=seekable, as_files=as_files)
            prepared = prepare(work, output, show)
    except KeyboardInterrupt:
        raise BatchdError("interrupted; the same command continues where it stopped") from None
    _summarise(folder, stream, stream_config.source, prepared)


def _seekable_pipeline(
    stream: StreamConfig, short_side: int | None, image_format: str, storage: Storage
) -> tuple[StepOptions, ...]:
    """The steps for ``--seekable``. Raises ``BatchdError`` or ``click.UsageError``."""
    if not jpeg_box.IS_BUILT:
        raise BatchdError(
            "--seekable needs the extension that decodes crops, which was not built: apt install gcc libjpeg62-turbo-dev, and "
            "install batchd again"
        )
    if short_side is None:
        return ()
    if image_format != "jpg":
        raise click.UsageError(f"--seekable makes JPEGs: --short-side cannot encode them with --format {image_format}")
    columns = kind_of(stream.source).columns(stream.source, storage)
    images = [column.name for column in columns if column.kind == "encoded"]
    if len(images) != 1:
        raise BatchdError(
            f"--short-side is for samples of one image, and these have {counted(len(images), 'image')}: give the stream a "
            "pipeline that resizes them, prepare it, and then what that made with --seekable"
        )
    return Decode(field=images[0]), Resize(field=images[0], shorter_side=short_side)


def _summarise(folder: Path, stream: str, source: SourceOptions, prepared: Prepared) -> None:
    """Print what was written, and the source that serves it."""
    count, bad = len(prepared.shards), len(prepared.left_out)
    good = prepared.samples - bad
    if prepared.files is not None:
        made = f"{counted(good, 'file')} of {round_bytes(prepared.files.total_bytes)}"
    else:
        made = f"{counted(good, 'sample')} in {counted(count, 'shard')} of {round_bytes(prepared.shard_bytes)}"
    click.echo(made + (f"; {counted(bad, 'bad one')} left out, see {folder / 'bad.tsv'}" if bad else ""))
    if good and prepared.files is not None:
        assert isinstance(source, FILE_SOURCES)
        click.echo("serve them:")
        click.echo(f"  source = {files_table(source, prepared.files)}")
        return
    if prepared.empty:
        click.echo(f"no sample is good in {', '.join(prepared.empty)}: remove what holds none")
    if prepared.columns and len(prepared.empty) < count:
        shards = f"{stream}-{{000000..{count - 1:06}}}.tar"
        click.echo("serve them:")
        click.echo(f"  source = {source_table(folder.absolute(), shards, prepared.columns)}")
