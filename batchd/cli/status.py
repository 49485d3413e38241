"""``batchd status``: the state of daemon, workers and trainers. In the user's shell."""

import json
import sys
from datetime import UTC, datetime
from time import monotonic

import click
from rich.console import Console
from rich.table import Table

from batchd.cli.asking import running_daemon
from batchd.cli.options import address_option
from batchd.cli.text import duration, escaped
from batchd.diagnosis.pool import HOSTS_MAX, pool_view, summary
from batchd.samples.sizes import round_bytes
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_wire.messages import AskStatus, Status
from batchd_wire.status import (
    CacheStatistics,
    DaemonStatus,
    LiveStatistics,
    PoolStatistics,
    StreamStatistics,
    TrainerStatistics,
    read_status,
)
from batchd_wire.wording import counted

_GONE = TrainerStatistics(session=0, name="?", pid=None, user=None, transport="?")
"""The end of a trainer's line that has only batches."""
PIPED_COLUMNS = 200
"""Width without a terminal: nothing is cut."""


@click.command("status")
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for programs.")
def command(address: str | None, as_json: bool) -> None:
    """Show the daemon, its workers, its streams and its trainers.

    Totals count from the daemon's start. Exit code 3 if no daemon answers.
    """
    with running_daemon(address) as session:
        plain = session.request(AskStatus, Status, monotonic() + ANSWER_TIMEOUT_S).status
    if as_json:
        click.echo(json.dumps(plain, indent=2))
        return
    status = read_status(plain)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    console.print(_headline(status), soft_wrap=True)
    if last := status.daemon.reload:
        when = datetime.fromtimestamp(last.time_s, UTC).astimezone().isoformat(" ", "seconds")
        how = "the last reload was refused" if last.failed else "last reload"
        console.print(f"{how}, {when}: {last.text}", soft_wrap=True)
    console.print(_streams(status))
    if any(stream.subscriptions for stream in status.streams):
        console.print(_trainers(status))
    console.print(_workers(status))
    if status.pool is not None:
        _print_pool(console, status.pool)
    for stream in status.streams:
        if stream.live:
            console.print(f"stream {stream.name}: {_mailbox(stream.live)}", soft_wrap=True)
        if stream.cache:
            console.print(f"stream {stream.name}: {_cache(stream, stream.cache)}", soft_wrap=True)
        if stream.mismatched_batches:
            text = f"{counted(stream.mismatched_batches, 'batch')} came to trainers other than they were written"
            console.print(f"stream {stream.name}: {text}", style="bold red", soft_wrap=True)
        if stream.stopped:
            console.print(f"stream {stream.name} has stopped: {stream.stopped}", style="bold red", soft_wrap=True)


def _headline(status: DaemonStatus) -> str:
    daemon = status.daemon
    deaths = f", {counted(daemon.worker_deaths, 'worker death')}" if daemon.worker_deaths else ""
    draining = ", draining" if daemon.draining else ""
    http = f", {daemon.http}" if daemon.http else ""
    ending = f", {counted(daemon.ending_slots, 'slot')} of streams that have ended" if daemon.ending_slots else ""
    reloading = ", reading its configuration" if daemon.reloading else ""
    return (
        f"batchd {daemon.version}, pid {daemon.pid}, up {duration(daemon.uptime_s)}, "
        f"{round_bytes(daemon.memory_bytes)} in slots, {daemon.decoders or 'no worker ready yet'}"
        f"{ending}{deaths}{reloading}{draining}{http}"
    )


def _streams(status: DaemonStatus) -> Table:
    table = _table("stream", "samples", "batches", "ring", "decoded", "delivered", "shared", "bad", "ms/sample")
    for stream in status.streams:
        table.add_row(
            stream.name,
            "live" if stream.live else f"{stream.samples:,}",
            f"x {stream.batch_size}" if stream.live else f"{stream.steps:,} x {stream.batch_size}",
            f"{stream.ready_slots} ready, {stream.leased_slots} leased of {stream.slots} (max {stream.slots_max})",
            f"{stream.decoded_batches:,}",
            f"{stream.delivered_batches:,}",
            f"{stream.shared_batches:,}",
            f"{stream.bad_samples:,}",
            f"{stream.sample_s * 1000:.2f}",
        )
    return table


def _mailbox(live: LiveStatistics) -> str:
    """Counts of the producers, and the fill of the mailbox."""
    waiting = f" ({live.waiting_producers} waiting)" if live.waiting_producers else ""
    facts = [
        f"{counted(live.producers, 'producer')}{waiting}",
        f"{counted(live.pushed_samples, 'sample')} pushed",
        f"{live.queued_samples + live.bound_samples:,} of {live.capacity:,} places taken",
        live.dropped_oldest and f"{live.dropped_oldest:,} dropped as the oldest",
        live.dropped_newest and f"{live.dropped_newest:,} dropped as they came",
        live.refused_pushes and f"{live.refused_pushes:,} refused",
        live.lost_batches and f"{counted(live.lost_batches, 'batch')} that not all trainers got",
    ]
    return ", ".join(str(fact) for fact in facts if fact)


_HELD = {"points": "access points", "pixels": "pixels or access points"}


def _cache(stream: StreamStatistics, cache: CacheStatistics) -> str:
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


def _trainers(status: DaemonStatus) -> Table:
    names = {trainer.session: trainer for trainer in status.trainers}
    table = _table(
        "trainer", "pid", "from", "stream", "rank", "next batch", "held", "ready ahead", "state", "waited", "MB/s"
    )
    for stream in status.streams:
        for one in stream.subscriptions:
            trainer = names.get(one.session, _GONE)
            table.add_row(
                trainer.name,
                "?" if trainer is _GONE else str(trainer.pid or "-"),
                _origin(trainer),
                stream.name,
                f"{one.rank} of {one.world_size}",
                "at its end" if one.epoch is None else f"epoch {one.epoch}, step {one.step}",
                str(one.held_slots),
                f"{one.ready_ahead} of {one.window}",
                "waiting" if one.waiting else "busy",
                duration(one.wait_s),
                "-" if trainer.sent_bytes_per_s is None else f"{trainer.sent_bytes_per_s / 1e6:.1f}",
            )
    return table


def _origin(trainer: TrainerStatistics) -> str:
    """Where a trainer runs, which decides how it gets batches, and the name of its key."""
    if trainer.transport != "tcp":
        return trainer.transport
    several = f" x{trainer.connections}" if trainer.connections > 1 else ""
    return f"tcp {trainer.host}{several}" + (f" ({trainer.key})" if trainer.key else "")


def _workers(status: DaemonStatus) -> Table:
    table = _table("worker", "pid", "state", "orders", "chunks", "samples", "busy")
    for worker in status.workers:
        table.add_row(
            str(worker.number),
            str(worker.pid or "-"),
            worker.state,
            str(worker.orders),
            f"{worker.chunks:,}",
            f"{worker.samples:,}",
            duration(worker.busy_s),
        )
    return table


def _print_pool(console: Console, pool: PoolStatistics) -> None:
    """The worker hosts, what is wanted of them, and what is wrong."""
    view = pool_view(pool, None)
    console.print(f"worker hosts come to {pool.address}: {summary(view)}", soft_wrap=True)
    if pool.links:
        amounts = "workers", "orders", "samples", "busy", "GB", "withdrawn", "late rows", "disagreed"
        table = _table("worker host", "from", "key", "state", *amounts)
        for link in sorted(pool.links, key=lambda one: (one.name, one.link))[:HOSTS_MAX]:
            table.add_row(
                escaped(link.name),
                escaped(link.host),
                link.key or "-",
                link.state,
                str(link.workers),
                f"{link.orders:,}",
                f"{link.samples:,}",
                duration(link.busy_s),
                f"{link.received_bytes / 1e9:.1f}",
                f"{link.withdrawn:,}",
                f"{link.late_rows:,}",
                f"{link.disagreements:,}",
            )
        console.print(table)
    if len(pool.links) > HOSTS_MAX:
        console.print(f"and {counted(len(pool.links) - HOSTS_MAX, 'worker host')} more: batchd status --json has all")
    for note in view.notes:
        console.print(f"worker hosts: {escaped(note)}", style="yellow", soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
