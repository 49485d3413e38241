"""``batchd prepare``: a stream's samples, through its pipeline once, into shards.

Runs in the user's shell without a daemon: a process for each CPU writes shards of its own.
"""

import signal
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import click
from click.shell_completion import CompletionItem
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from batchd.cli import terminal
from batchd.cli.log_lines import set_up_logs
from batchd.cli.options import DEFAULT_CONFIG_FILE, ConfigFile, Overrides, argument, as_command, completions, option
from batchd.commands.prepare import SHORT_GROUPS, Output, Prepared, PrepareJob, prepare, source_table
from batchd.config.load import load_config, read_config
from batchd.data.storage.access import Storage
from batchd.data.storage.index_cache import IndexCache
from batchd.errors import ArgumentInvalid, BatchdError, Interrupted, SourceInvalid
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


ConfiguredStream = Annotated[str, argument(shell_complete=configured_streams)]


def refuse_seekable(_context: click.Context, _option: click.Parameter, value: object) -> None:
    """Say what replaces options of earlier versions. Raises ``click.UsageError``."""
    if value:
        raise ArgumentInvalid(
            "--seekable, with --short-side and --files, is no more: shards have access points, so --set "
            "'streams.STREAM.pipeline=[]' writes the source's own images for fast crops, and a pipeline of decode and resize "
            "smaller ones"
        )


@as_command("prepare")
@click.option("--seekable", "--files", is_flag=True, hidden=True, expose_value=False, callback=refuse_seekable)
@click.option("--short-side", hidden=True, expose_value=False, callback=refuse_seekable)
def command(
    *,
    stream: ConfiguredStream,
    folder: Annotated[Path, option("The folder of the shards.", "--to", metavar="DIR")],
    config_file: ConfigFile,
    overrides: Overrides,
    shard_samples: Annotated[int, option("Samples in a shard.", limits=(1, 10_000_000))] = 1000,
    image_format: Annotated[
        Literal["jpg", "png", "webp"],
        option("How pixels are encoded. Images that the pipeline does not decode stay as they are.", "--format"),
    ] = "jpg",
    quality: Annotated[int, option("Of jpg and webp.", limits=(1, 100))] = 90,
    short_groups: Annotated[
        int,
        option(
            "Encode videos so that each group of pictures has at most this many frames, such as 8; 0 leaves them.",
            limits=(0, 1000),
        ),
    ] = 0,
) -> None:
    """Run the pipeline of STREAM once over all its samples, and write the results as shards in DIR.

    For work that need not be done in every epoch: photographs resized to 400 pixels, say. The
    shards are in WebDataset format. Samples may have different sizes. Bad samples are left out and
    listed in DIR/bad.tsv. After an interruption or a kill, the same command resumes. At the end it
    prints the source that reads all of it again.

    Images that the pipeline does not decode keep their pixels: --set streams.STREAM.pipeline=[]
    writes the source's own files. JPEGs get access points, so crops of them decode in less time.

    --short-groups is for clips at random places of videos, which are decoded from the key frame
    before. A video with short groups stays as it is, or gets an index of its key frames without
    being decoded; others become H.264 (x264, CRF 18), with their sound, times and tags. DIR/
    short_groups.tsv says what was done to each, its sizes, and the loss: the PSNR of the luma.
    """
    set_up_logs("warning")
    config = load_config(config_file, overrides)
    if stream not in config.streams:
        raise SourceInvalid(f"{config_file} has no stream {stream!r}; {suggestion(stream, list(config.streams))}")
    storage = Storage(config.daemon.storage_limits(), encloses=config.daemon.encloses)
    storage.forks_scans = True
    work = PrepareJob(
        name=stream,
        config=config.streams[stream],
        daemon=config.daemon,
        cache=IndexCache(config.daemon.cache_dir or default_cache_dir()),
        storage=storage,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with terminal.progress(*columns, TextColumn("{task.fields[bad]}")) as bar:
            task = bar.add_task(stream, total=None, bad="")

            def show(samples: int, done: int, bad: int) -> None:
                bar.update(task, total=samples, completed=done, bad=f"{bad} bad" if bad else "")

            prepared = prepare(work, Output(folder, shard_samples, image_format, quality, short_groups), show)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command continues where it stopped") from None
    _summarise(folder, stream, prepared)


def _summarise(folder: Path, stream: str, prepared: Prepared) -> None:
    """Print what was written, and the source that serves it."""
    count, bad = len(prepared.shards), len(prepared.left_out)
    good = prepared.samples - bad
    made = f"{counted(good, 'sample')} in {counted(count, 'shard')} of {round_bytes(prepared.shard_bytes)}"
    terminal.say(made + (f"; {counted(bad, 'bad one')} left out, see {folder / 'bad.tsv'}" if bad else ""))
    if prepared.videos:
        terminal.say(_videos_text(prepared.videos))
    if prepared.empty:
        terminal.say(f"no sample is good in {', '.join(prepared.empty)}: remove what holds none")
    if prepared.columns and len(prepared.empty) < count:
        shards = f"{stream}-{{000000..{count - 1:06}}}.tar"
        terminal.say("serve them:")
        terminal.emit(f"  source = {source_table(folder.absolute(), shards, prepared.columns)}")


def _videos_text(videos: list[dict[str, object]]) -> str:
    """What was done to videos, and the loss."""
    done = Counter(str(facts["done"]) for facts in videos)
    before, after = (sum(int(str(facts[name])) for facts in videos) for name in ("bytes_before", "bytes"))
    losses = [float(str(facts["psnr"])) for facts in videos if "psnr" in facts]
    worst = min((float(str(facts["psnr_worst_frame"])) for facts in videos if "psnr" in facts), default=0)
    loss = f", PSNR {min(losses):.1f} to {max(losses):.1f} dB (worst frame {worst:.1f})" if losses else ""
    each = ", ".join(f"{count} {name}" for name, count in sorted(done.items()))
    return f"videos: {each}{loss}; {round_bytes(before)} before, {round_bytes(after)} now; see {SHORT_GROUPS}"
