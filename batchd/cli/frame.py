"""One frame of ``batchd top``: an overview, drawn for a terminal of a given size. Pure.

Runs in the user's shell. Bars show the parts of a ring and of a sample's time in shades and
colours, with the numbers beside them. A narrow terminal has only the important columns.

Invariant: foreign names are printed without anything that a terminal would obey.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from batchd.cli.tables import FILLING, FREE, LEASED, NAME_CHARACTERS_MAX, READY, bar, name, observed, paragraph
from batchd.cli.text import escaped
from batchd.observe.columns import HOSTS, STREAMS, TRAINERS, WIDE, WORKERS
from batchd.observe.diagnosis.overview import Overview, StreamView, TrainerView, WorkerView
from batchd.observe.diagnosis.pool import PoolView, summary
from batchd.runtime.sizes import round_bytes
from batchd_wire.wording import counted, duration

PARTS_CELLS = 40
PART_STYLES = ("bright_blue", "yellow", "cyan", "magenta", "green", "bright_black")
PART_SHADES = "█▓▒░"
MORE_PARTS = "  …"
FRAME_LINES = 11
"""Lines besides the rows: headline, headings, empty lines, keys."""
SORTS = ("", "name", "waits", "batches/s", "ahead")
"""Orders of the trainers: the daemon's, by name, most waiting, fastest, fewest batches ahead."""
KEY_LINE = "q quit  s sort  / filter  p pause"


class TopView(NamedTuple):
    """What of the overview is shown. ``is_typing``: keys go into ``text_filter``."""

    sort: str = ""
    text_filter: str = ""
    is_typing: bool = False
    is_paused: bool = False

    def streams(self, streams: Sequence[StreamView], trainers: Sequence[TrainerView]) -> list[StreamView]:
        """The streams that the filter names, and those of the ``trainers`` that it leaves."""
        read = {trainer.stream for trainer in trainers}
        return [stream for stream in streams if stream.name in read or self._names(stream.name)]

    def trainers(self, trainers: Sequence[TrainerView]) -> list[TrainerView]:
        """The trainers that the filter names, by their stream or host too, in the chosen order."""
        left = [row for row in trainers if self._names(row.name, row.stream, row.trainer.host or row.trainer.transport)]
        return sorted(left, key=_ORDERS[self.sort]) if self.sort else left

    def pressed(self, key: str) -> "TopView | None":
        """The view after a key; None to quit."""
        if self.is_typing and key.isprintable():
            return self._replace(text_filter=(self.text_filter + key)[:NAME_CHARACTERS_MAX])
        if self.is_typing and key in BACKSPACES:
            return self._replace(text_filter=self.text_filter[:-1])
        if key in QUIT_KEYS:
            return None
        if key == ESCAPE:
            return self._replace(text_filter="", is_typing=False)
        if self.is_typing:
            return self._replace(is_typing=key not in "\r\n")
        if key == "s":
            return self._replace(sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)])
        if key == "/":
            return self._replace(is_typing=True)
        return self._replace(is_paused=not self.is_paused) if key in "p " else self

    def line(self) -> Text:
        """The keys, and what they have chosen."""
        chosen = [
            f"sorted by {self.sort}" if self.sort else "",
            f"filter: {self.text_filter}{'_' if self.is_typing else ''}" if self.text_filter or self.is_typing else "",
            "paused" if self.is_paused else "",
        ]
        text = Text(KEY_LINE, "dim")
        for words in filter(None, chosen):
            text.append("  ").append(words, "not dim bold yellow")
        return text

    def _names(self, *names: str) -> bool:
        return any(self.text_filter.casefold() in name.casefold() for name in names)


EVERYTHING = TopView()
QUIT_KEYS = "qQ\x03\x04"
"""q, Ctrl-C as a character, and Ctrl-D."""
ESCAPE, BACKSPACES = "\x1b", "\x7f\x08"
_ORDERS: dict[str, Callable[[TrainerView], tuple[float, str, int]]] = {
    "name": lambda row: (0.0, row.name.casefold(), row.claim.rank),
    "waits": lambda row: (-(row.wait_share or 0.0), row.name, row.claim.rank),
    "batches/s": lambda row: (-(row.batches_per_s or 0.0), row.name, row.claim.rank),
    "ahead": lambda row: (row.ready_ahead / max(1, row.claim.window), row.name, row.claim.rank),
}


def frame(
    overview: Overview, width: int, height: int | None = None, *, notice: str = "", view: TopView = EVERYTHING
) -> RenderableType:
    """The whole frame, of what ``view`` chooses: ``notice`` first, and the keys last.

    Long lists are cut to ``height`` lines; None: all of them, and no keys.
    """
    trainers = view.trainers(overview.trainers)
    overview = replace(overview, streams=tuple(view.streams(overview.streams, trainers)), trainers=tuple(trainers))
    lines: list[RenderableType] = [Text(notice, "bold reverse yellow")] if notice else []
    lines += [headline(overview), Text(), *_streams(overview.streams, width)]
    room = None if height is None else max(4, height - FRAME_LINES - 2 * len(overview.streams) - bool(notice))
    pool = _pool(overview.pool, width, None if room is None else max(2, room // 4)) if overview.pool is not None else []
    if room is not None and overview.pool is not None:
        room = max(4, room - len(pool) - min(len(overview.pool.hosts), max(2, room // 4)) - 1)
    workers = len(overview.workers)
    rows = min(len(overview.trainers), 2) + min(workers, 2)
    remedies = _remedies(overview.trainers, width, None if room is None else room - rows)
    room = None if room is None else max(4, room - len(remedies))
    trainers_max = None if room is None else max(2, room - min(workers, room // 2))
    workers_max = None if room is None else max(2, room - min(len(overview.trainers), trainers_max or room))
    lines += [Text(), *_trainers(overview.trainers, width, trainers_max), *remedies]
    lines += [Text(), *_workers(overview.workers, width, workers_max)]
    lines += [Text(), *pool] if pool else []
    lines += [view.line()] if height is not None else []
    return Group(*lines)


def headline(overview: Overview) -> Text:
    """The daemon, and the share of its workers' time that is used."""
    busy = "" if overview.busy_share is None else f", {overview.busy_share:.0%} busy"
    remote = "" if overview.pool is None else f" and {overview.pool.workers:,} remote"
    host = f" on {escaped(overview.host)}" if overview.host else ""
    text = Text(f"batchd {overview.version}{host}", "bold")
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


# --- streams --------------------------------------------------------------------------------------


def _streams(streams: Sequence[StreamView], width: int) -> list[RenderableType]:
    legend = Text("  ring: ", "dim")
    for (character, style), meaning in ((LEASED, "leased"), (READY, "ready"), (FILLING, "filling"), (FREE, "free")):
        legend.append(character, f"not dim {style}").append(f" {meaning}  ")
    return [observed(STREAMS, "top", streams, width), legend, *(line for row in streams for line in _about(row, width))]


def _about(stream: StreamView, width: int) -> list[RenderableType]:
    """The parts of a sample's time, the largest ones for which the line has room."""
    if stream.now.stopped is not None:
        return [Text(f"  {name(stream.name)} has stopped: {escaped(stream.now.stopped)}", "bold red")]
    if stream.now.away is not None:
        return [Text(f"  {name(stream.name)} waits for its storage: {escaped(stream.now.away)}", "bold red")]
    if not stream.parts or stream.sample_ms is None:
        return []
    looks = [
        (ms, PART_SHADES[index % len(PART_SHADES)], PART_STYLES[index % len(PART_STYLES)])
        for index, (_part, ms) in enumerate(stream.parts)
    ]
    text = Text(f"  {name(stream.name)} {stream.sample_ms:.2f} ms/sample  ", overflow="ellipsis", no_wrap=True)
    cells = PARTS_CELLS if width >= WIDE else PARTS_CELLS // 3
    text.append_text(bar(looks, max(stream.sample_ms, sum(ms for ms, _, _ in looks)), cells))
    named = [
        Text.assemble((f"  {character}", style), f" {escaped(part)} {ms:.2f}")
        for (part, ms), (_, character, style) in zip(stream.parts, looks, strict=True)
    ]
    room = width - text.cell_len - len(MORE_PARTS)
    fitting = []
    for at in sorted(range(len(named)), key=lambda at: -stream.parts[at][1]):
        room -= named[at].cell_len
        if room < 0:
            break
        fitting.append(at)
    text.append_text(Text().join(named[at] for at in sorted(fitting)))
    return [text if len(fitting) == len(named) else text.append(MORE_PARTS)]


# --- trainers -------------------------------------------------------------------------------------


def _trainers(trainers: Sequence[TrainerView], width: int, rows_max: int | None) -> list[RenderableType]:
    if not trainers:
        return [Text("no trainer reads any stream", "dim")]
    shown = observed(TRAINERS, "top", trainers[:rows_max], width)
    return [shown, *_more(len(trainers), rows_max, "trainer")]


def _remedies(trainers: Sequence[TrainerView], width: int, lines_max: int | None) -> list[Text]:
    """Lines with the evidence and the remedy of each verdict; whole ones, within ``lines_max``."""
    texts = [
        f"{name(trainer.name)}: {trainer.verdict.kind}: {escaped('; '.join(filter(None, said)))}"
        for trainer in trainers
        if trainer.verdict is not None and not trainer.verdict.is_healthy
        for said in [(trainer.verdict.proof, trainer.verdict.remedy)]
    ]
    lines: list[Text] = []
    for at, text in enumerate(texts):
        added = paragraph(text, width).splitlines()
        is_last = at == len(texts) - 1
        if lines_max is not None and len(lines) + len(added) + (not is_last) > lines_max:
            return [*lines, Text(f"  and {counted(len(texts) - at, 'verdict')} more: batchd why", "dim")]
        lines += [Text(line, "yellow") for line in added]
    return lines


# --- workers --------------------------------------------------------------------------------------


def _workers(workers: Sequence[WorkerView], width: int, rows_max: int | None) -> list[RenderableType]:
    if not workers:
        return [Text("no worker runs", "bold red")]
    return [observed(WORKERS, "top", workers[:rows_max], width), *_more(len(workers), rows_max, "worker")]


# --- worker hosts ---------------------------------------------------------------------------------


def _pool(pool: PoolView, width: int, rows_max: int | None) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(summary(pool))]
    lines += [Text(f"  {escaped(note)}", "yellow") for note in pool.notes]
    if not pool.hosts:
        return lines
    shown = observed(HOSTS, "top", pool.hosts[:rows_max], width)
    return [*lines, shown, *_more(pool.hosts_count, rows_max, "worker host")]


def _more(count: int, rows_max: int | None, noun: str) -> list[RenderableType]:
    left_out = count - rows_max if rows_max is not None else 0
    return [Text(f"  and {counted(left_out, noun)} more", "dim")] if left_out > 0 else []
