"""``batchd bench``: how fast a stream is on this machine, and what would help. In the user's shell.

It measures with daemons and trainers of its own (``batchd.commands.bench``), so a running daemon
loses only CPU time.

Invariant: it ends some seconds after ``--seconds``, and prints what it has if it is interrupted.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from time import monotonic
from typing import Annotated

from rich.progress import BarColumn, TextColumn
from rich.text import Text

from batchd.cli import terminal
from batchd.cli.options import ConfigFile, JsonObject, Overrides, argument, as_command, option, stream_unknown
from batchd.cli.problems import warn_of_unknown_variables
from batchd.cli.tables import TableColumn, table
from batchd.cli.text import escaped
from batchd.commands.bench import beside
from batchd.commands.bench.advice import BenchResult, disturbances, helps, part_times, verdict
from batchd.commands.bench.measure import Figures, Measurement, OneStream, Report, Task, measure
from batchd.config.load import read_config
from batchd.config.tree import Config
from batchd.daemon.config_checks import check_reading
from batchd.data.pipeline.cache_split import cropped_files
from batchd.data.pipeline.image.jpeg_box import IS_BUILT, PIXELS_MIN, found_points
from batchd.data.pipeline.image.probe import probe_image
from batchd.data.samples.errors import SampleUndecodable, SampleUnreadable
from batchd.data.samples.kept_files import has_points
from batchd.data.sources.interface import open_reader
from batchd.data.sources.scan import scan_source
from batchd.data.storage.access import Storage
from batchd.data.storage.index import SourceIndex
from batchd.data.storage.index_cache import IndexCache
from batchd.data.storage.values import CHECK_LIMITS
from batchd.errors import BatchdError, Interrupted
from batchd.observe.columns import MIDDLE
from batchd.runtime.cpus import available_cpus
from batchd.runtime.directories import default_cache_dir
from batchd_wire.wording import counted

SECONDS = 20.0
LATER_SHARE = 0.3
"""Part of a measurement's time that the first epoch of the measured samples takes."""
FILES_LOOKED_AT = 8
BAR_CELLS = 24
POWERS_MAX = 8
"""Measure with each power of two up to this number of workers, else with each power of four."""


@as_command("bench")
def command(
    *,
    stream: Annotated[str | None, argument()],
    config_file: ConfigFile,
    overrides: Overrides,
    seconds: Annotated[float, option("Time for all measurements.", limits=(1, 3600))] = SECONDS,
    workers: Annotated[
        int | None, option("Largest number of workers. [default: that of the configuration]", limits=(1, 1024))
    ],
    python: Annotated[
        str | None,
        option(
            "Interpreter of the DataLoader: where torch and torchvision are installed, or the folder of that "
            "environment. [default: batchd's own]",
            metavar="PATH",
        ),
    ],
    reads: Annotated[float | None, option("Samples/s that your training reads, to judge by.", limits=(0.001, 1e9))],
    as_json: JsonObject,
) -> None:
    """Measure STREAM on this machine, and say whether it is worth it and what would help.

    Prints samples/s with 1 worker and more, the CPU time of each step of a sample, and the same of
    a torch DataLoader in the environment that trains (--python), which needs nothing of batchd.
    Uses a daemon of its own. The first batches of each measurement do not count. If other programs
    use the CPUs, the report says so. Ctrl-C ends the measurement and prints the figures so far.
    Without a configuration, begin with `batchd init`.
    """
    warn_of_unknown_variables()
    interpreter = beside.find_interpreter(sys.executable if python is None else python)
    with Storage(CHECK_LIMITS) as storage, tempfile.TemporaryDirectory(prefix="batchd-bench-") as folder:
        reading = read_config(config_file, overrides)
        config, rings = check_reading(reading, config_file, storage)
        name = _one_of(config, stream)
        result, index = _looked_at(config, name, storage)
        result.reads = reads
        if python is not None:
            interpreter.require(result.config)
        elif not result.why_no_loader and (lacking := interpreter.lacking(result.config)):
            result.why_no_loader = (
                f"batchd's own environment has no {', '.join(lacking)}; name the one that trains: --python PATH"
            )
        served = OneStream(name, result.config, reading.data, rings[name].ring_bytes)
        bench = _Bench(result, served, Path(folder), workers or config.daemon.worker_count())
        try:
            bench.run(
                seconds,
                interpreter,
                lambda loaders: beside.write_job(Path(folder), result.config, index, storage, loaders),
            )
        except KeyboardInterrupt:
            result.is_interrupted = True
    if as_json:
        terminal.emit_json(_plain(result))
    else:
        _show(result)
    if result.is_interrupted:
        raise Interrupted("interrupted; the figures are those measured so far")
    if python is not None and bench.failure:
        raise BatchdError(f"the DataLoader of {interpreter.path} has no figures: {bench.failure}")


def _one_of(config: Config, stream: str | None) -> str:
    names = list(config.streams)
    if stream is None and len(names) > 1:
        raise BatchdError(f"name one of the streams: {', '.join(names)}")
    name = stream or names[0]
    if name not in names:
        raise stream_unknown(name, names)
    if config.streams[name].source.is_live:
        raise BatchdError(f"stream {name!r} is live: your own programs push its samples, so they set its speed")
    return name


def _looked_at(config: Config, name: str, storage: Storage) -> tuple[BenchResult, SourceIndex]:
    """Scan the source, and look for access points in a few samples. Raises ``BatchdError``."""
    stream = config.streams[name]
    storage.limits, storage.encloses = config.daemon.storage_limits(), config.daemon.encloses
    cache = IndexCache(config.daemon.cache_dir or default_cache_dir())
    index = scan_source(stream.source, lambda _found: None, cache, storage, config.daemon.python_path or ())
    result = BenchResult(name, stream, len(index), available_cpus())
    result.why_no_loader = beside.why_none(stream)
    if stream.cache_dir is not None:
        result.notes.append(f"the cache was in memory for this, not in {stream.cache_dir}")
    fields = cropped_files(stream.pipeline)
    if not fields or not IS_BUILT:
        return result, index
    missing = looked_at = 0
    count = min(FILES_LOOKED_AT, len(index))
    with closing(open_reader(stream.source, index, max(fields.values()), storage)) as reader:
        for number in range(count):
            try:
                values = reader.read(number * len(index) // count)
                for file in (values[field] for field in fields):
                    assert isinstance(file, memoryview), "it is decoded"
                    header = probe_image(file)
                    if header.format == "JPEG" and prod((header.height, header.width)) >= PIXELS_MIN:
                        looked_at += 1
                        missing += not has_points(found_points(file, header))
            except (SampleUnreadable, SampleUndecodable):
                continue  # the measurement counts it
    result.without_points = missing, looked_at
    return result, index


class _Bench:
    """All measurements of one command, one after the other."""

    def __init__(self, result: BenchResult, stream: OneStream, folder: Path, workers: int) -> None:
        self._result, self._stream, self._folder = result, stream, folder
        factor = 2 if workers <= POWERS_MAX else 4
        self._counts = sorted({workers, *(factor**power for power in range(10) if factor**power <= workers)})
        self._left = len(self._counts) + (result.config.cache_kind != "off") + (not result.why_no_loader)
        self._until_s = 0.0
        self.failure = ""
        """Why there are no figures of a DataLoader that was started."""

    def run(self, seconds: float, interpreter: beside.Interpreter, prepare: Callable[[int], Path]) -> None:
        """Fill in the result; ``prepare`` writes the DataLoader's job. Raises ``BatchdError``."""
        result, config = self._result, self._folder / "batchd.toml"
        self._stream.write(config)
        self._until_s = monotonic() + seconds
        with _progress(seconds) as progress:
            for number, workers in enumerate(self._counts):
                share, report = number / len(self._counts), progress(counted(workers, "worker"))
                result.sides.append(measure(Task(config, result.name, workers, share, self._next_until_s(), report)))
            if result.config.cache_kind != "off":
                self._measure_later(progress("later epochs"))
            if not result.why_no_loader:
                report, loaders = progress("a DataLoader"), self._counts[-1]
                report(0, 0.0)
                try:
                    job = prepare(loaders)
                    result.loader, result.loader_tools = beside.measure_loader(
                        interpreter, job, loaders, self._next_until_s(), report
                    )
                except beside.LoaderError as error:
                    self.failure = result.why_no_loader = str(error)

    def _next_until_s(self) -> float:
        """When the next measurement ends: all that are left have the same time."""
        now_s = monotonic()
        until_s = now_s + max(0.0, self._until_s - now_s) / max(1, self._left)
        self._left -= 1
        return until_s

    def _measure_later(self, report: Report) -> None:
        """Measure epochs that find a full cache: those of a part of the source, if it is large."""
        result, last = self._result, self._result.sides[-1]
        until_s = self._next_until_s()
        most = int(last.figures.samples_per_s * LATER_SHARE * (until_s - monotonic()))
        if last.epoch >= 1 or not most:
            return
        part = self._folder / "later.toml"
        self._stream.write(part, min(result.samples, max(result.config.batch_size, most)))
        found = measure(Task(part, result.name, last.figures.workers, 0.0, until_s, report, is_later=True))
        if found.epoch >= 1:
            result.later = found


@contextmanager
def _progress(seconds: float) -> Iterator[Callable[[str], Report]]:
    """Show on a terminal what is measured, and how fast that is so far."""
    with terminal.progress(TextColumn("{task.description}"), BarColumn(BAR_CELLS)) as bar:
        task, began_s = bar.add_task("", total=seconds), monotonic()

        def of(what: str) -> Report:
            def report(samples: int, spent_s: float) -> None:
                rate = f", {samples / spent_s:,.0f} samples/s so far" if samples and spent_s else ""
                bar.update(task, completed=min(seconds, monotonic() - began_s), description=f"measuring {what}{rate}")

            return report

        yield of


def _rows(result: BenchResult) -> list[tuple[str, Figures]]:
    rows = [(counted(one.figures.workers, "worker"), one.figures) for one in result.sides]
    if result.later is not None:
        rows.append((f"{counted(result.later.figures.workers, 'worker')}, 2nd epoch on", result.later.figures))
    if result.loader is not None:
        rows.append((f"DataLoader, {counted(result.loader.workers, 'worker')}", result.loader))
    return rows


def _show(result: BenchResult) -> None:
    width, source = terminal.console_of().width, result.config.source
    terminal.say(
        f"stream {result.name}: {source.type} {escaped(source.place)}, {counted(result.samples, 'sample')}, "
        f"batches of {result.config.batch_size:,}, {counted(result.cpus, 'CPU')}",
        "",
    )
    rows = _rows(result)
    if rows:
        most = max(figures.samples_per_s for _name, figures in rows) or 1.0
        speeds: list[TableColumn[tuple[str, Figures]]] = [
            TableColumn("", 0, lambda row: row[0], is_text=True),
            TableColumn("samples/s", 0, lambda row: f"{row[1].samples_per_s:,.0f}"),
            TableColumn("", MIDDLE, lambda row: _bar(row[1].samples_per_s / most), is_text=True),
            TableColumn("CPU of a sample", 0, lambda row: "-" if row[1].cpu_ms is None else f"{row[1].cpu_ms:.2f} ms"),
        ]
        terminal.draw([table(speeds, rows, width)])
    if result.loader is not None:
        terminal.say(f"the DataLoader: {result.loader_tools}")
    best = result.best
    if best is not None and (parts := part_times(best)):
        longest = max(ms for _name, ms in parts) or 1.0
        steps: list[TableColumn[tuple[str, float]]] = [
            TableColumn("step", 0, lambda part: part[0], is_text=True),
            TableColumn("CPU of a sample", 0, lambda part: f"{part[1]:.3f} ms"),
            TableColumn("", MIDDLE, lambda part: _bar(part[1] / longest), is_text=True),
        ]
        terminal.draw(["", table(steps, parts, width)])
    for title, lines in (
        ("Is it worth it?", verdict(result)),
        ("What would help", helps(result)),
        ("To know", disturbances(result)),
    ):
        if lines:
            terminal.draw([Text(f"\n{title}", "bold")])
            terminal.say(*(f"  {escaped(line)}" for line in lines))


def _bar(share: float) -> Text:
    eighths = round(8 * BAR_CELLS * share)
    return Text("█" * (eighths // 8) + ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8], "cyan")


def _plain(result: BenchResult) -> dict[str, object]:
    """All figures and sentences, for programs."""
    best = result.best
    return {
        "stream": result.name,
        "samples": result.samples,
        "batch_size": result.config.batch_size,
        "cpus": result.cpus,
        "measured": [_plain_side(one) for one in result.sides],
        "later_epochs": _plain_side(result.later) if result.later is not None else None,
        "dataloader": None if result.loader is None else _plain_figures(result.loader) | {"tools": result.loader_tools},
        "why_no_dataloader": result.why_no_loader,
        "cpu_ms": dict(part_times(best)) if best is not None else {},
        "reads": result.reads,
        "worth_it": verdict(result),
        "helps": helps(result),
        "to_know": disturbances(result),
        "bad_samples": best.bad if best is not None else 0,
        "interrupted": result.is_interrupted,
    }


def _plain_side(one: Measurement) -> dict[str, object]:
    return _plain_figures(one.figures) | {"first_epoch": one.epoch}


def _plain_figures(figures: Figures) -> dict[str, object]:
    rates = {"samples_per_s": figures.samples_per_s, "samples_per_s_range": figures.rates}
    costs = {"cpu_ms": figures.cpu_ms, "cpu_ms_range": figures.costs}
    return {name: value for name, value in asdict(figures).items() if name != "parts"} | rates | costs
