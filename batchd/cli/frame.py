"""One frame of ``batchd top``: an overview, drawn for a terminal of a given size. Pure.

Runs in the user's shell. Bars show what a ring and a sample's time consist of; their parts differ
in shade and colour, with the numbers beside them. On a narrow terminal, less important columns are
omitted.

Invariant: foreign names are printed without anything that a terminal would obey.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchd.cli.text import duration, escaped
from batchd.diagnosis.overview import Overview, StreamView, TrainerView, WorkerView
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


class TableColumn(NamedTuple):
    """A column of a table, omitted if the terminal is narrower than ``from_width``."""

    title: str
    from_width: int = 0


Cell = tuple[int, str]
"""Number of cells, character and style of a part of a bar."""


def frame(overview: Overview, width: int, height: int | None = None, *, notice: str = "") -> RenderableType:
    """The whole frame: ``notice`` first; long lists are cut to ``height`` lines."""
    lines: list[RenderableType] = [Text(notice, "bold reverse yellow")] if notice else []
    lines += [headline(overview), Text(), *_streams(overview.streams, width)]
    room = None if height is None else max(4, height - FRAME_LINES - 2 * len(overview.streams) - bool(notice))
    workers = len(overview.workers)
    trainers_max = None if room is None else max(2, room - min(workers, room // 2))
    workers_max = None if room is None else max(2, room - min(len(overview.trainers), trainers_max or room))
    lines += [Text(), *_trainers(overview.trainers, width, trainers_max)]
    lines += [Text(), *_workers(overview.workers, width, workers_max)]
    return Group(*lines)


def headline(overview: Overview) -> Text:
    """The daemon, and the share of its workers' time that is used."""
    busy = "" if overview.busy_share is None else f", {overview.busy_share:.0%} busy"
    text = Text(f"batchd {overview.version}", "bold")
    text.append(
        f"  pid {overview.pid}  up {duration(overview.uptime_s)}  {round_bytes(overview.memory_bytes)} in slots  "
        f"{counted(len(overview.workers), 'worker')}{busy}",
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
    columns = (
        TableColumn("stream"),
        TableColumn("ring"),
        TableColumn("leased", MIDDLE),
        TableColumn("ready", MIDDLE),
        TableColumn("filling", WIDE),
        TableColumn("of", MIDDLE),
        TableColumn("decoded/s"),
        TableColumn("delivered/s"),
        TableColumn("bad", MIDDLE),
    )
    table = _table(columns, width)
    for one in streams:
        slots = (one.leased_slots, one.ready_slots, one.filling_slots)
        ring = bar(
            [(count, *look) for count, look in zip(slots, (LEASED, READY, FILLING), strict=True)], one.slots_max, cells
        )
        numbers = (*(str(count) for count in slots), str(one.slots_max))
        rates = (_number(one.decoded_per_s), _number(one.delivered_per_s))
        _row(table, columns, width, (Text(_name(one.name)), ring, *numbers, *rates, f"{one.bad_samples:,}"))
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
    columns = (
        TableColumn("trainer"),
        TableColumn("stream", MIDDLE),
        TableColumn("rank", WIDE),
        TableColumn("epoch:step", MIDDLE),
        TableColumn("waits"),
        TableColumn("ahead"),
        TableColumn("from", WIDE),
        TableColumn("MB/s", WIDE),
        TableColumn("verdict"),
    )
    table = _table(columns, width)
    for one in trainers[:rows_max]:
        cells = (
            Text(_name(one.name)),
            Text(_name(one.stream)),
            f"{one.rank} of {one.world_size}",
            "at its end" if one.epoch is None else f"{one.epoch}:{one.step:,}",
            _share(one.wait_share),
            f"{one.ready_ahead} of {one.window}",
            Text(escaped(one.host or one.transport)),
            "-" if one.sent_bytes_per_s is None else f"{one.sent_bytes_per_s / 1e6:.1f}",
            _state(one),
        )
        _row(table, columns, width, cells)
    return [table, *_more(len(trainers), rows_max, "trainer"), *_remedies(trainers[:rows_max])]


def _state(one: TrainerView) -> Text:
    if one.is_still:
        return Text(f"{'waiting' if one.is_waiting else 'stands still'} for {duration(one.still_s)}", "bold yellow")
    if one.verdict is None:
        return Text("-" if one.epoch is not None else "at its end", "dim")
    return Text(one.verdict.kind, "green" if one.verdict.is_healthy else "bold yellow")


def _remedies(trainers: Sequence[TrainerView]) -> list[RenderableType]:
    """Of waiting trainers: the cause, and the fix."""
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
    columns = (
        TableColumn("worker"),
        TableColumn("pid"),
        TableColumn("state"),
        TableColumn("busy"),
        TableColumn("", MIDDLE),
        TableColumn("samples/s", MIDDLE),
        TableColumn("ms/sample"),
        TableColumn("orders", WIDE),
        TableColumn("replaced", MIDDLE),
    )
    table = _table(columns, width)
    for one in workers[:rows_max]:
        busy = bar([(one.busy_share or 0.0, *LEASED)], 1.0, RING_CELLS // 2)
        cells = (
            str(one.place),
            str(one.pid or "-"),
            Text(one.state, "" if one.state == "ready" else "yellow"),
            _share(one.busy_share),
            busy,
            _number(one.samples_per_s),
            "-" if one.sample_ms is None else f"{one.sample_ms:.2f}",
            str(one.orders),
            str(one.replaced),
        )
        _row(table, columns, width, cells)
    return [table, *_more(len(workers), rows_max, "worker")]


# --- tables ---------------------------------------------------------------------------------------


def _table(columns: Sequence[TableColumn], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for index, column in enumerate(columns):
        if width >= column.from_width:
            is_text = index == 0 or column.title in {"ring", "", "verdict", "state", "stream", "from"}
            table.add_column(column.title, justify="left" if is_text else "right", no_wrap=True)
    return table


def _row(table: Table, columns: Sequence[TableColumn], width: int, cells: Sequence[RenderableType]) -> None:
    table.add_row(*(cell for cell, column in zip(cells, columns, strict=True) if width >= column.from_width))


def _more(count: int, rows_max: int | None, noun: str) -> list[RenderableType]:
    left_out = count - rows_max if rows_max is not None else 0
    return [Text(f"  and {counted(left_out, noun)} more", "dim")] if left_out > 0 else []


def _name(text: str) -> str:
    plain = escaped(text)
    return plain if len(plain) <= NAME_CHARACTERS_MAX else plain[: NAME_CHARACTERS_MAX - 1] + "…"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
