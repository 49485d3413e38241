"""``batchd status``: the state of daemon, workers and trainers. In the user's shell."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic, time
from typing import Annotated

from rich.console import RenderableType
from rich.text import Text

from batchd.cli import terminal
from batchd.cli.asking import running_daemon, running_streams
from batchd.cli.options import Address, argument, as_command, option, stream_unknown
from batchd.cli.tables import facts, observed, paragraph
from batchd.cli.text import escaped
from batchd.observe.columns import HOSTS, STREAMS, TRAINERS, WORKERS
from batchd.observe.diagnosis.overview import overview_between, parts_of_sample
from batchd.observe.diagnosis.pool import PoolView, summary
from batchd.observe.diagnosis.readings import work_since_start
from batchd.runtime.sizes import round_bytes
from batchd_client.asking import ANSWER_TIMEOUT_S
from batchd_wire import status as wire
from batchd_wire.messages import AskStatus, Status
from batchd_wire.wording import counted, duration

DAY_S = 24 * 3600
SLOW_MAX = 5


@as_command("status")
def command(
    *,
    stream: Annotated[str | None, argument(shell_complete=running_streams)],
    address: Address,
    as_json: Annotated[bool, option("Print everything as JSON, for programs.", "--json")],
) -> None:
    """Show the daemon, its workers, its streams, its trainers, and its warnings.

    Warnings are those of the last 10 minutes that nothing has repaired since. With STREAM, that
    stream in detail. Totals count from the daemon's start. A narrow terminal has
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
        terminal.emit_json({**plain, "streams": streams})
        return
    width = terminal.console_of().width
    terminal.draw(whole(status, width) if found is None else detail(status, found, width))


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
    now = overview_between(status, status)
    yield observed(STREAMS, "status", now.streams, width)
    yield from _more(status.left_out.streams, "stream")
    if now.claims:
        yield observed(TRAINERS, "status", now.claims, width)
    yield from _more(sum(one.subscriptions_left_out for one in status.streams), "subscription")
    yield observed(WORKERS, "status", sorted(now.workers, key=lambda one: one.now.number), width)
    yield from _more(status.left_out.workers, "worker")
    if now.pool is not None:
        yield from _pool(now.pool, width, status.left_out.links)
    for stream in status.streams:
        for text, style in _remarks(stream):
            yield Text(f"stream {stream.name}{text}", style)
    yield from _warnings(status, width)


def detail(status: wire.DaemonStatus, stream: wire.StreamStatus, width: int) -> Iterator[RenderableType]:
    """One stream, for a terminal of ``width`` columns: what it is, and what became of it."""
    work, described = work_since_start(stream), stream.description
    parts = ", ".join(f"{escaped(part)} {ms:.2f}" for part, ms in parts_of_sample(work))
    times = f", each {stream.repeats} times," if stream.repeats > 1 else ""
    sizes = f"{stream.samples:,}{times} in {counted(stream.steps, 'batch')} of {stream.batch_size} an epoch"
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
        ("set", escaped(described.settings) if described is not None else ""),
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
        alone = replace(status, streams=(stream,))
        yield observed(TRAINERS, "status", overview_between(alone, alone).claims, width)
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
        f"{round_bytes(daemon.memory_bytes)} in slots{'' if daemon.decoders else ', no worker ready yet'}"
        f"{ending}{deaths}{reloading}{draining}{http}"
    )


def _pool(view: PoolView, width: int, left_out: int) -> Iterator[RenderableType]:
    """The worker hosts, what is wanted of them, and what is wrong."""
    yield f"worker hosts come to {view.address}: {summary(view)}"
    if view.hosts:
        yield observed(HOSTS, "status", view.hosts, width)
    if view.hosts_count > len(view.hosts):
        yield f"and {counted(view.hosts_count - len(view.hosts), 'worker host')} more: batchd status --json has all"
    yield from _more(left_out, "worker host")
    for note in view.notes:
        yield Text(f"worker hosts: {escaped(note)}", "yellow")


# --- lines below the tables -----------------------------------------------------------------------


def _remarks(stream: wire.StreamStatus) -> Iterator[tuple[str, str]]:
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
    if stream.away:
        yield f" waits for its storage, for {stream.away_s:.0f} s so far: {stream.away}", "bold red"


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


_HELD = {"points": "access points", "media": "what is known of files", "pixels": "pixels or access points"}


def _cache(stream: wire.StreamStatus, cache: wire.CacheStatistics) -> str:
    """Share of the source in the cache, and of reads that it served."""
    work = stream.work
    asked = work.cache_hits + work.cache_misses
    found = f", {work.cache_hits / asked:.0%} of {counted(asked, 'read')} found there" if asked else ""
    sharers = f", shared by {counted(cache.streams, 'stream')}" if cache.streams > 1 else ""
    place = f" on disk ({cache.folder})" if cache.folder else ""
    spoilt = f", {counted(cache.spoilt_samples, 'record')} damaged" if cache.spoilt_samples else ""
    all_samples = "" if cache.kind == "media" else f" of {stream.samples:,}"
    held = _HELD.get(cache.kind, f"{cache.kind} samples")
    return (
        f"cache of {held}{place} has {cache.held_samples:,}{all_samples} in "
        f"{round_bytes(cache.used_bytes)} of {round_bytes(cache.budget_bytes)}{found}{sharers}{spoilt}"
    )


def _warnings(status: wire.DaemonStatus, width: int) -> Iterator[RenderableType]:
    if status.warnings:
        yield Text("\nwarnings (`batchd logs` has whole lines):")
    ages = [f"{duration(max(0.0, time() - line.time_s))} ago" for line in status.warnings]
    for age, line in zip(ages, status.warnings, strict=True):
        text = f"  {age:>{max(map(len, ages))}}  {escaped(line.text)}"
        yield Text(text if len(text) <= width else f"{text[: width - 1]}…", LEVEL_STYLES.get(line.level, ""))


LEVEL_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red", "debug": "dim"}


def log_line(line: wire.LogLine, width: int) -> Text:
    """A line of the daemon's log, broken for a terminal of ``width`` columns: time, level, text."""
    when = datetime.fromtimestamp(line.time_s, UTC).astimezone()
    shown = when.strftime("%H:%M:%S" if abs(time() - line.time_s) < DAY_S else "%Y-%m-%d %H:%M:%S")
    first = f"{shown} {escaped(line.level):<7} "
    return Text(paragraph(escaped(line.text), width, first, indent=0), LEVEL_STYLES.get(line.level, ""))
