"""One frame of ``batchd top``: an overview, drawn for a terminal of a given size. Pure.

Runs in the user's shell. Bars show the parts of a ring and of a sample's time in shades and
colours, with the numbers beside them. A narrow terminal has only the important columns.

Invariant: foreign names are printed without anything that a terminal would obey.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchd.cli.text import duration, escaped
from batchd.diagnosis.overview import Overview, StreamView, TrainerView, WorkerView
from batchd.diagnosis.pool import HostView, PoolView, summary
from batchd.samples.sizes import round_bytes
from batchd_wire.wording import counted

WIDE, MIDDLE = 118, 76
"""Width of a terminal with room for everything, and for most."""
RING_CELLS, PARTS_CELLS = 24, 40
LEASED, READY, FILLING, FREE = ("█", "bright_blue"), ("▓", "cyan"), ("░", "yellow"), ("·", "bright_black")
PART_STYLES = ("bright_blue", "yellow", "cyan", "magenta", "green", "bright_black")
PART_SHADES = "█▓▒░"
FRAME_LINES = 10
"""Lines besides the rows: headline, headings, empty lines."""
NAME_CHARACTERS_MAX = 24


_TEXT_COLUMNS = {"stream", "trainer", "worker", "worker host", "ring", "", "verdict", "state", "from"}
_Row = TypeVar("_Row")


class TableColumn(NamedTuple, Generic[_Row]):
    """A column of a table, omitted if the terminal is narrower than ``from_width``."""

    title: str
    from_width: int
    cell: Callable[[_Row], RenderableType]


def frame(overview: Overview, width: int, height: int | None = None, *, notice: str = "") -> RenderableType:
    """The whole frame: ``notice`` first; long lists are cut to ``height`` lines."""
    lines: list[RenderableType] = [Text(notice, "bold reverse yellow")] if notice else []
    lines += [headline(overview), Text(), *_streams(overview.streams, width)]
    room = None if height is None else max(4, height - FRAME_LINES - 2 * len(overview.streams) - bool(notice))
    pool = _pool(overview.pool, width, None if room is None else max(2, room // 4)) if overview.pool is not None else []
    if room is not None and overview.pool is not None:
        room = max(4, room - len(pool) - min(len(overview.pool.hosts), max(2, room // 4)) - 1)
    workers = len(overview.workers)
    trainers_max = None if room is None else max(2, room - min(workers, room // 2))
    workers_max = None if room is None else max(2, room - min(len(overview.trainers), trainers_max or room))
    lines += [Text(), *_trainers(overview.trainers, width, trainers_max)]
    lines += [Text(), *_workers(overview.workers, width, workers_max)]
    lines += [Text(), *pool] if pool else []
    return Group(*lines)


def headline(overview: Overview) -> Text:
    """The daemon, and the share of its workers' time that is used."""
    busy = "" if overview.busy_share is None else f", {overview.busy_share:.0%} busy"
    remote = "" if overview.pool is None else f" and {overview.pool.workers:,} remote"
    text = Text(f"batchd {overview.version}", "bold")
    text.append(
        f"  pid {overview.pid}  up {duration(overview.uptime_s)}  {round_bytes(overview.memory_bytes)} in slots  "
        f"{counted(len(overview.workers), 'worker')}{remote}{busy}",
        "not bold",
    )
    if overview.worker_deaths:
        text.append(f"  {counted(overview.worker_deaths, 'worker death')}", "yellow")
    if overview.draining:
        text.append("  draining", "bold yellow")
    return text


def bar(parts: Iterable[tuple[float, str, str]], total: float, cells: int) -> Text:
    """A bar of ``cells`` for ``total``; parts are (amount, character, style)."""
    text, drawn, passed = Text(no_wrap=True), 0, 0.0
    for amount, character, style in parts:
        if amount <= 0 or total <= 0:
            continue
        passed += amount
        end = min(cells, max(drawn + 1, round(cells * passed / total)))
        text.append(character * (end - drawn), style)
        drawn = end
    text.append(FREE[0] * (cells - drawn), FREE[1])
    return text


# --- streams --------------------------------------------------------------------------------------


def _streams(streams: Sequence[StreamView], width: int) -> list[RenderableType]:
    cells = RING_CELLS if width >= WIDE else RING_CELLS // 2 if width >= MIDDLE else RING_CELLS // 3

    def ring(one: StreamView) -> Text:
        slots = ((one.leased_slots, *LEASED), (one.ready_slots, *READY), (one.filling_slots, *FILLING))
        return bar(slots, one.slots_max, cells)

    columns: list[TableColumn[StreamView]] = [
        TableColumn("stream", 0, lambda one: Text(_name(one.name))),
        TableColumn("ring", 0, ring),
        TableColumn("leased", MIDDLE, lambda one: str(one.leased_slots)),
        TableColumn("ready", MIDDLE, lambda one: str(one.ready_slots)),
        TableColumn("filling", WIDE, lambda one: str(one.filling_slots)),
        TableColumn("of", MIDDLE, lambda one: str(one.slots_max)),
        TableColumn("decoded/s", 0, lambda one: _number(one.decoded_per_s)),
        TableColumn("delivered/s", 0, lambda one: _number(one.delivered_per_s)),
        TableColumn("bad", MIDDLE, lambda one: f"{one.bad_samples:,}"),
    ]
    table = _table(columns, streams, width)
    legend = Text("  ring: ", "dim")
    for (character, style), meaning in ((LEASED, "leased"), (READY, "ready"), (FILLING, "filling"), (FREE, "free")):
        legend.append(character, f"not dim {style}").append(f" {meaning}  ")
    return [table, legend, *(line for one in streams for line in _about(one, width))]


def _about(stream: StreamView, width: int) -> list[RenderableType]:
    """The parts of a sample's time, or that there are no new samples."""
    if stream.stopped is not None:
        return [Text(f"  {_name(stream.name)} has stopped: {escaped(stream.stopped)}", "bold red")]
    if not stream.parts or stream.sample_ms is None:
        return []
    looks = [
        (ms, PART_SHADES[index % len(PART_SHADES)], PART_STYLES[index % len(PART_STYLES)])
        for index, (_part, ms) in enumerate(stream.parts)
    ]
    text = Text(f"  {_name(stream.name)} {stream.sample_ms:.2f} ms/sample  ", overflow="ellipsis", no_wrap=True)
    cells = PARTS_CELLS if width >= WIDE else PARTS_CELLS // 3
    text.append_text(bar(looks, max(stream.sample_ms, sum(ms for ms, _, _ in looks)), cells))
    for (part, ms), (_, character, style) in zip(stream.parts, looks, strict=True):
        text.append(f"  {character}", style).append(f" {escaped(part)} {ms:.2f}")
    return [text]


# --- trainers -------------------------------------------------------------------------------------


def _trainers(trainers: Sequence[TrainerView], width: int, rows_max: int | None) -> list[RenderableType]:
    if not trainers:
        return [Text("no trainer reads any stream", "dim")]
    columns: list[TableColumn[TrainerView]] = [
        TableColumn("trainer", 0, lambda one: Text(_name(one.name))),
        TableColumn("stream", MIDDLE, lambda one: Text(_name(one.stream))),
        TableColumn("rank", WIDE, lambda one: f"{one.rank} of {one.world_size}"),
        TableColumn(
            "epoch:step", MIDDLE, lambda one: "at its end" if one.epoch is None else f"{one.epoch}:{one.step:,}"
        ),
        TableColumn("waits", 0, lambda one: _share(one.wait_share)),
        TableColumn("ahead", 0, lambda one: f"{one.ready_ahead} of {one.window}"),
        TableColumn("from", WIDE, lambda one: Text(escaped(one.host or one.transport))),
        TableColumn(
            "MB/s", WIDE, lambda one: "-" if one.sent_bytes_per_s is None else f"{one.sent_bytes_per_s / 1e6:.1f}"
        ),
        TableColumn("verdict", 0, _state),
    ]
    table = _table(columns, trainers[:rows_max], width)
    return [table, *_more(len(trainers), rows_max, "trainer"), *_remedies(trainers[:rows_max])]


def _state(one: TrainerView) -> Text:
    if one.is_still:
        return Text(f"{'waiting' if one.is_waiting else 'stands still'} for {duration(one.still_s)}", "bold yellow")
    if one.verdict is None:
        return Text("-" if one.epoch is not None else "at its end", "dim")
    return Text(one.verdict.kind, "green" if one.verdict.is_healthy else "bold yellow")


def _remedies(trainers: Sequence[TrainerView]) -> list[RenderableType]:
    return [
        Text(f"  {_name(one.name)}: {one.verdict.kind}: {escaped('; '.join(filter(None, said)))}", "yellow")
        for one in trainers
        if one.verdict is not None and not one.verdict.is_healthy
        for said in [(one.verdict.proof, one.verdict.remedy)]
    ]


# --- workers --------------------------------------------------------------------------------------


def _workers(workers: Sequence[WorkerView], width: int, rows_max: int | None) -> list[RenderableType]:
    if not workers:
        return [Text("no worker runs", "bold red")]
    columns: list[TableColumn[WorkerView]] = [
        TableColumn("worker", 0, lambda one: str(one.place)),
        TableColumn("pid", 0, lambda one: str(one.pid or "-")),
        TableColumn("state", 0, lambda one: Text(one.state, "" if one.state == "ready" else "yellow")),
        TableColumn("busy", 0, lambda one: _share(one.busy_share)),
        TableColumn("", MIDDLE, lambda one: bar([(one.busy_share or 0.0, *LEASED)], 1.0, RING_CELLS // 2)),
        TableColumn("samples/s", MIDDLE, lambda one: _number(one.samples_per_s)),
        TableColumn("ms/sample", 0, lambda one: _number(one.sample_ms, ".2f")),
        TableColumn("orders", WIDE, lambda one: str(one.orders)),
        TableColumn("replaced", MIDDLE, lambda one: str(one.replaced)),
    ]
    return [_table(columns, workers[:rows_max], width), *_more(len(workers), rows_max, "worker")]


# --- worker hosts ---------------------------------------------------------------------------------


def _pool(pool: PoolView, width: int, rows_max: int | None) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(summary(pool))]
    lines += [Text(f"  {escaped(note)}", "yellow") for note in pool.notes]
    if not pool.hosts:
        return lines
    columns: list[TableColumn[HostView]] = [
        TableColumn("worker host", 0, lambda one: Text(_name(one.name))),
        TableColumn("from", WIDE, lambda one: Text(escaped(one.host))),
        TableColumn("state", 0, lambda one: Text(one.state, "yellow" if one.note or one.state != "serving" else "")),
        TableColumn("workers", 0, lambda one: str(one.workers)),
        TableColumn("busy", MIDDLE, lambda one: _share(one.busy_share)),
        TableColumn("samples/s", 0, lambda one: _number(one.samples_per_s)),
        TableColumn("GB/s", MIDDLE, lambda one: "-" if one.bytes_per_s is None else f"{one.bytes_per_s / 1e9:.2f}"),
        TableColumn("withdrawn", MIDDLE, lambda one: f"{one.withdrawn:,}"),
        TableColumn("late rows", WIDE, lambda one: f"{one.late_rows:,}"),
        TableColumn("disagreed", WIDE, lambda one: f"{one.disagreements:,}"),
    ]
    return [*lines, _table(columns, pool.hosts[:rows_max], width), *_more(pool.hosts_count, rows_max, "worker host")]


# --- tables ---------------------------------------------------------------------------------------


def _table(columns: Sequence[TableColumn[_Row]], rows: Sequence[_Row], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    shown = [column for column in columns if width >= column.from_width]
    for column in shown:
        table.add_column(column.title, justify="left" if column.title in _TEXT_COLUMNS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in shown))
    return table


def _more(count: int, rows_max: int | None, noun: str) -> list[RenderableType]:
    left_out = count - rows_max if rows_max is not None else 0
    return [Text(f"  and {counted(left_out, noun)} more", "dim")] if left_out > 0 else []


def _name(text: str) -> str:
    plain = escaped(text)
    return plain if len(plain) <= NAME_CHARACTERS_MAX else plain[: NAME_CHARACTERS_MAX - 1] + "…"


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
