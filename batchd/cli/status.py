"""``batchd status``: the state of daemon, workers and trainers. In the user's shell."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic, time
from typing import NamedTuple

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from batchd.cli.asking import running_daemon, running_streams
from batchd.cli.options import address_option, stream_unknown
from batchd.cli.tables import MIDDLE, WIDE, TableColumn, echo, facts, name, own_console, paragraph, table
from batchd.cli.text import duration, escaped
from batchd.observe.diagnosis.overview import parts_of_sample
from batchd.observe.diagnosis.pool import HOSTS_MAX, pool_view, summary
from batchd.observe.diagnosis.readings import work_since_start
from batchd.runtime.sizes import round_bytes
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_wire import status as wire
from batchd_wire.messages import AskStatus, Status
from batchd_wire.wording import counted

_GONE = wire.TrainerStatistics(session=0, name="?", pid=None, user=None, transport="?")
"""The end of a trainer's line that has only batches."""
DAY_S = 24 * 3600
SLOW_MAX = 5


@click.command("status")
@click.argument("stream", required=False, shell_complete=running_streams)
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for programs.")
def command(stream: str | None, address: str | None, as_json: bool) -> None:
    """Show the daemon, its workers, its streams, its trainers, and its last warnings.

    With STREAM, that stream in detail. Totals count from the daemon's start. A narrow terminal has
    only the important columns. Exit code 3 if no daemon answers.
    """
    with running_daemon(address) as session:
        plain = session.request(AskStatus, Status, monotonic() + ANSWER_TIMEOUT_S).status
    status = wire.read_status(plain)
    found = None if stream is None else status.stream(stream)
    if stream is not None and found is None:
        raise stream_unknown(stream, (one.name for one in status.streams))
    if as_json:
        streams = [one for one in _tables(plain["streams"]) if stream in (None, one["name"])]
        click.echo(json.dumps({**plain, "streams": streams}, indent=2))
        return
    console = own_console()
    echo(console, whole(status, console.width) if found is None else detail(status, found, console.width))


def _tables(plain: object) -> Sequence[dict[str, object]]:
    assert isinstance(plain, list | tuple), "a status has its streams in a list"
    return plain


def whole(status: wire.DaemonStatus, width: int) -> Iterator[RenderableType]:
    """The daemon, and all that it has, for a terminal of ``width`` columns."""
    yield _headline(status)
    if last := status.daemon.reload:
        when = datetime.fromtimestamp(last.time_s, UTC).astimezone().isoformat(" ", "seconds")
        how = "the last reload was refused" if last.failed else "last reload"
        yield f"{how}, {when}: {last.text}"
    yield _streams(status, width)
    yield from _more(status.left_out.streams, "stream")
    if any(stream.subscriptions for stream in status.streams):
        yield _trainers(status, width)
    yield from _more(sum(one.subscriptions_left_out for one in status.streams), "subscription")
    yield _workers(status, width)
    yield from _more(status.left_out.workers, "worker")
    if status.pool is not None:
        yield from _pool(status.pool, width, status.left_out.links)
    for stream in status.streams:
        for text, style in _remarks(stream):
            yield Text(f"stream {stream.name}{text}", style)
    yield from _warnings(status, width)


def detail(status: wire.DaemonStatus, stream: wire.StreamStatistics, width: int) -> Iterator[RenderableType]:
    """One stream, for a terminal of ``width`` columns: what it is, and what became of it."""
    work, described = work_since_start(stream), stream.description
    parts = ", ".join(f"{escaped(part)} {ms:.2f}" for part, ms in parts_of_sample(work))
    sizes = f"{stream.samples:,} in {counted(stream.steps, 'batch')} of {stream.batch_size} an epoch"
    slots = [
        f"{stream.leased_slots} leased",
        f"{max(0, stream.ready_slots - stream.leased_slots)} ready",
        f"{stream.filling_slots or 0} filling",
        f"{stream.partial_slots} partial" if stream.partial_slots else "",
    ]
    rows = [
        ("source", escaped(described.source) if described is not None else ""),
        ("samples", f"live, in batches of {stream.batch_size}" if stream.live else sizes),
        ("fields", escaped(", ".join(described.fields)) if described is not None else ""),
        ("pipeline", escaped(" → ".join(described.pipeline)) if described is not None else ""),
        ("ring", f"{', '.join(filter(None, slots))} of {stream.slots_max} slots"),
        ("decoded", f"{counted(stream.decoded_samples, 'sample')}, {counted(stream.decoded_batches, 'batch')}"),
        ("delivered", f"{counted(stream.delivered_samples, 'sample')}, {stream.shared_batches:,} batches shared"),
        ("a sample", f"{1000 * work.total_s / work.samples:.2f} ms: {parts}" if work.samples else "none decoded yet"),
        ("bad", f"{counted(stream.bad_samples, 'sample')} (batchd bad {stream.name})" if stream.bad_samples else ""),
        ("slow", ", ".join(f"{escaped(path)} {1000 * taken_s:.0f} ms" for path, taken_s in work.slowest[:SLOW_MAX])),
        ("fingerprint", stream.fingerprint),
    ]
    host = f" on {escaped(status.daemon.host)}" if status.daemon.host else ""
    yield Text(f"{escaped(stream.name)}{host}", "bold")
    yield from facts([row for row in rows if row[1]], width)
    for text, style in _remarks(stream):
        yield Text(paragraph(text.removeprefix(": ").strip(), width), style)
    yield ""
    if stream.subscriptions:
        yield _trainers(replace(status, streams=(stream,)), width)
        yield from _more(stream.subscriptions_left_out, "subscription")
    else:
        yield "no trainer reads it"


def _more(left_out: int, what: str) -> Iterator[str]:
    """Say what a list lacks, since the status would be too long with it."""
    if left_out:
        yield f"and {counted(left_out, what)} more, for which a status has no room"


def _headline(status: wire.DaemonStatus) -> str:
    daemon = status.daemon
    host = f" on {escaped(daemon.host)}" if daemon.host else ""
    deaths = f", {counted(daemon.worker_deaths, 'worker death')}" if daemon.worker_deaths else ""
    draining = ", draining" if daemon.draining else ""
    http = f", {daemon.http}" if daemon.http else ""
    ending = f", {counted(daemon.ending_slots, 'slot')} of streams that have ended" if daemon.ending_slots else ""
    reloading = ", reading its configuration" if daemon.reloading else ""
    return (
        f"batchd {daemon.version}{host}, pid {daemon.pid}, up {duration(daemon.uptime_s)}, "
        f"{round_bytes(daemon.memory_bytes)} in slots, {daemon.decoders or 'no worker ready yet'}"
        f"{ending}{deaths}{reloading}{draining}{http}"
    )


# --- tables ---------------------------------------------------------------------------------------


def _streams(status: wire.DaemonStatus, width: int) -> Table:
    columns: list[TableColumn[wire.StreamStatistics]] = [
        TableColumn("stream", 0, lambda one: name(one.name, width), is_text=True),
        TableColumn("samples", 50, lambda one: "live" if one.live else f"{one.samples:,}"),
        TableColumn("batches", 60, lambda one: f"{'' if one.live else f'{one.steps:,} '}x {one.batch_size}"),
        TableColumn("leased", MIDDLE, lambda one: f"{one.leased_slots}"),
        TableColumn("ready", MIDDLE, lambda one: f"{max(0, one.ready_slots - one.leased_slots)}"),
        TableColumn("slots", 100, lambda one: f"{one.slots}"),
        TableColumn("max", MIDDLE, lambda one: f"{one.slots_max}"),
        TableColumn("decoded", 40, lambda one: f"{one.decoded_batches:,}"),
        TableColumn("delivered", 0, lambda one: f"{one.delivered_batches:,}"),
        TableColumn("shared", WIDE, lambda one: f"{one.shared_batches:,}"),
        TableColumn("bad", 30, lambda one: f"{one.bad_samples:,}"),
        TableColumn("ms/sample", 90, lambda one: f"{one.sample_s * 1000:.2f}"),
    ]
    return table(columns, status.streams, width)


class _Claim(NamedTuple):
    trainer: wire.TrainerStatistics
    stream: str
    claim: wire.SubscriptionStatistics


def _trainers(status: wire.DaemonStatus, width: int) -> Table:
    trainers = {trainer.session: trainer for trainer in status.trainers}
    rows = [
        _Claim(trainers.get(one.session, _GONE), stream.name, one)
        for stream in status.streams
        for one in stream.subscriptions
    ]
    columns: list[TableColumn[_Claim]] = [
        TableColumn("trainer", 0, lambda one: name(one.trainer.name, width), is_text=True),
        TableColumn("pid", 90, lambda one: "?" if one.trainer is _GONE else str(one.trainer.pid or "-")),
        TableColumn("from", 110, lambda one: _origin(one.trainer)),
        TableColumn("stream", 40, lambda one: name(one.stream, width), is_text=True),
        TableColumn("rank", MIDDLE, lambda one: f"{one.claim.rank} of {one.claim.world_size}"),
        TableColumn("epoch:step", 50, lambda one: _position(one.claim)),
        TableColumn("held", WIDE, lambda one: str(one.claim.held_slots)),
        TableColumn("ahead", 60, lambda one: f"{one.claim.ready_ahead} of {one.claim.window}"),
        TableColumn("state", 0, lambda one: "waiting" if one.claim.waiting else "busy"),
        TableColumn("waited", 30, lambda one: duration(one.claim.wait_s)),
        TableColumn("MB/s", WIDE, lambda one: _megabytes(one.trainer)),
    ]
    return table(columns, rows, width)


def _position(claim: wire.SubscriptionStatistics) -> str:
    return "at its end" if claim.epoch is None else f"{claim.epoch}:{claim.step:,}"


def _megabytes(trainer: wire.TrainerStatistics) -> str:
    return "-" if trainer.sent_bytes_per_s is None else f"{trainer.sent_bytes_per_s / 1e6:.1f}"


def _origin(trainer: wire.TrainerStatistics) -> str:
    """Where a trainer runs, which decides how it gets batches, and the name of its key."""
    if trainer.transport != "tcp":
        return trainer.transport
    several = f" x{trainer.connections}" if trainer.connections > 1 else ""
    return f"tcp {trainer.host}{several}" + (f" ({trainer.key})" if trainer.key else "")


def _workers(status: wire.DaemonStatus, width: int) -> Table:
    columns: list[TableColumn[wire.WorkerStatistics]] = [
        TableColumn("worker", 0, lambda one: str(one.number), is_text=True),
        TableColumn("pid", 30, lambda one: str(one.pid or "-")),
        TableColumn("state", 0, lambda one: one.state),
        TableColumn("orders", 60, lambda one: str(one.orders)),
        TableColumn("chunks", 50, lambda one: f"{one.chunks:,}"),
        TableColumn("samples", 40, lambda one: f"{one.samples:,}"),
        TableColumn("busy", 0, lambda one: duration(one.busy_s)),
    ]
    return table(columns, status.workers, width)


def _pool(pool: wire.PoolStatistics, width: int, left_out: int) -> Iterator[RenderableType]:
    """The worker hosts, what is wanted of them, and what is wrong."""
    view = pool_view(pool, None)
    yield f"worker hosts come to {pool.address}: {summary(view)}"
    columns: list[TableColumn[wire.LinkStatistics]] = [
        TableColumn("worker host", 0, lambda one: name(one.name, width), is_text=True),
        TableColumn("from", 90, lambda one: escaped(one.host)),
        TableColumn("key", 110, lambda one: one.key or "-"),
        TableColumn("state", 0, lambda one: one.state),
        TableColumn("workers", 0, lambda one: str(one.workers)),
        TableColumn("orders", 100, lambda one: f"{one.orders:,}"),
        TableColumn("samples", 40, lambda one: f"{one.samples:,}"),
        TableColumn("busy", 50, lambda one: duration(one.busy_s)),
        TableColumn("GB", 60, lambda one: f"{one.received_bytes / 1e9:.1f}"),
        TableColumn("withdrawn", MIDDLE, lambda one: f"{one.withdrawn:,}"),
        TableColumn("late rows", WIDE, lambda one: f"{one.late_rows:,}"),
        TableColumn("disagreed", 80, lambda one: f"{one.disagreements:,}"),
    ]
    if pool.links:
        yield table(columns, sorted(pool.links, key=lambda one: (one.name, one.link))[:HOSTS_MAX], width)
    if len(pool.links) > HOSTS_MAX:
        yield f"and {counted(len(pool.links) - HOSTS_MAX, 'worker host')} more: batchd status --json has all"
    yield from _more(left_out, "worker host")
    for note in view.notes:
        yield Text(f"worker hosts: {escaped(note)}", "yellow")


# --- lines below the tables -----------------------------------------------------------------------


def _remarks(stream: wire.StreamStatistics) -> Iterator[tuple[str, str]]:
    """What is to be said of a stream, after its name, and the style."""
    if stream.live:
        yield f": {_mailbox(stream.live)}", ""
    if stream.cache:
        yield f": {_cache(stream, stream.cache)}", ""
    if stream.mismatched_batches:
        text = f"{counted(stream.mismatched_batches, 'batch')} came to trainers other than they were written"
        yield f": {text}", "bold red"
    if stream.stopped:
        yield f" has stopped: {stream.stopped}", "bold red"


def _mailbox(live: wire.LiveStatistics) -> str:
    """Counts of the producers, and the fill of the mailbox."""
    waiting = f" ({live.waiting_producers} waiting)" if live.waiting_producers else ""
    found = [
        f"{counted(live.producers, 'producer')}{waiting}",
        f"{counted(live.pushed_samples, 'sample')} pushed",
        f"{live.queued_samples + live.bound_samples:,} of {live.capacity:,} places taken",
        live.dropped_oldest and f"{live.dropped_oldest:,} dropped as the oldest",
        live.dropped_newest and f"{live.dropped_newest:,} dropped as they came",
        live.refused_pushes and f"{live.refused_pushes:,} refused",
        live.lost_batches and f"{counted(live.lost_batches, 'batch')} that not all trainers got",
    ]
    return ", ".join(str(fact) for fact in found if fact)


_HELD = {"points": "access points", "pixels": "pixels or access points"}


def _cache(stream: wire.StreamStatistics, cache: wire.CacheStatistics) -> str:
    """Share of the source in the cache, and of reads that it served."""
    work = stream.work
    asked = work.cache_hits + work.cache_misses
    found = f", {work.cache_hits / asked:.0%} of {counted(asked, 'read')} found there" if asked else ""
    sharers = f", shared by {counted(cache.streams, 'stream')}" if cache.streams > 1 else ""
    place = f" on disk ({cache.folder})" if cache.folder else ""
    spoilt = f", {counted(cache.spoilt_samples, 'record')} damaged" if cache.spoilt_samples else ""
    held = _HELD.get(cache.kind, f"{cache.kind} samples")
    return (
        f"cache of {held}{place} has {cache.held_samples:,} of {stream.samples:,} in "
        f"{round_bytes(cache.used_bytes)} of {round_bytes(cache.budget_bytes)}{found}{sharers}{spoilt}"
    )


def _warnings(status: wire.DaemonStatus, width: int) -> Iterator[RenderableType]:
    if status.warnings:
        yield Text("\nlast warnings (batchd logs has more lines):")
    for line in status.warnings:
        yield log_line(line, width)


LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}


def log_line(line: wire.LogLine, width: int) -> Text:
    """A line of the daemon's log, broken for a terminal of ``width`` columns: time, level, text."""
    when = datetime.fromtimestamp(line.time_s, UTC).astimezone()
    shown = when.strftime("%H:%M:%S" if abs(time() - line.time_s) < DAY_S else "%Y-%m-%d %H:%M:%S")
    first = f"{shown} {escaped(line.level):<7} "
    return Text(paragraph(escaped(line.text), width, first, indent=0), LEVEL_STYLES.get(line.level, ""))
