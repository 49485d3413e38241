"""The columns of streams, trainers, workers and worker hosts, each declared once. Pure.

    Overview --cells of these columns--> `batchd status`, `batchd top`, the page, the page's JSON

A column says where it is: in a terminal from which width on, by command, and on the page under
which title. A cell is text with a look and, on the page, notes below it; each place draws these in
its own way. The order is that of every place.

Invariant: a cell is text from anybody, which the place that shows it escapes.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from batchd.observe.diagnosis.overview import GONE, StreamView, TrainerView, UsageView, WorkerView
from batchd.observe.diagnosis.pool import HostView
from batchd.observe.diagnosis.verdicts import Kind
from batchd.runtime.sizes import round_bytes
from batchd_wire.wording import duration

WIDE, MIDDLE = 118, 76
"""Width of a terminal with room for everything, and for most."""
NUMBER, NAME, STREAM, SHORT, VERDICT = "number", "name", "stream", "short", "verdict"
"""Kinds of columns: numbers are on the right, and foreign names may be cut."""
GOOD, BAD, PLAIN = "good", "bad", "plain"
"""Looks of a cell, beside ""."""

Row = TypeVar("Row")


class Cell(NamedTuple):
    """``notes``: lines below the text, on the page."""

    text: str
    look: str = ""
    notes: tuple[str, ...] = ()


class Bar(NamedTuple):
    """Amounts as parts of ``total``. A short one has half of the length in a wide terminal."""

    amounts: tuple[float, ...]
    total: float
    is_short: bool = False


class StatusColumn(NamedTuple, Generic[Row]):
    """``status`` and ``top``: the least width of a terminal that has it there; None: none has.

    ``page``: its title on the page; "": it is not there.
    """

    title: str
    cell: Callable[[Row], Cell | Bar | str]
    kind: str = NUMBER
    status: int | None = None
    top: int | None = None
    page: str = ""


def page_cells(columns: tuple[StatusColumn[Row], ...], row: Row) -> list[Cell]:
    """The cells of a row on the page."""
    cells = (column.cell(row) for column in columns if column.page)
    return [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells if not isinstance(cell, Bar)]


# --- the words of cells ---------------------------------------------------------------------------


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _megabytes(row: TrainerView) -> str:
    return "-" if row.trainer.sent_bytes_per_s is None else f"{row.trainer.sent_bytes_per_s / 1e6:.1f}"


def _who(row: TrainerView) -> Cell:
    pid = "" if row.trainer.pid is None else f"pid {row.trainer.pid}"
    rank = f"rank {row.claim.rank} of {row.claim.world_size}" if row.claim.world_size > 1 else ""
    return Cell(row.name, notes=(", ".join(filter(None, (pid, rank))),))


def _origin(row: TrainerView) -> str:
    """Where a trainer runs, which decides how it gets batches, and the name of its key."""
    if row.trainer.transport != "tcp":
        return row.trainer.transport
    several = f" x{row.trainer.connections}" if row.trainer.connections > 1 else ""
    return f"tcp {row.trainer.host}{several}" + (f" ({row.trainer.key})" if row.trainer.key else "")


def _host(row: TrainerView) -> Cell:
    rate = "" if row.trainer.sent_bytes_per_s is None else f"{_megabytes(row)} MB/s"
    return Cell(row.trainer.host or row.trainer.transport, notes=(rate,))


def _position(row: TrainerView, form: str) -> str:
    return "at its end" if row.claim.epoch is None else form.format(row.claim.epoch, row.claim.step)


def _verdict(row: TrainerView) -> Cell:
    """On the page with the proof and what helps, last."""
    verdict = row.verdict
    if row.is_still:
        text = f"{'waiting' if row.claim.waiting else 'stands still'} for {duration(row.still_s)}"
        kind = [] if verdict is None or verdict.kind == Kind.STANDS_STILL.value else [verdict.kind]
        return Cell(text, BAD, () if verdict is None else (*kind, verdict.proof, verdict.remedy))
    if verdict is None:
        return Cell("-" if row.claim.epoch is not None else "at its end", PLAIN)
    return Cell(verdict.kind, GOOD if verdict.is_healthy else BAD, (verdict.proof, verdict.remedy))


def _ring(row: StreamView) -> Bar:
    return Bar((row.leased_slots, row.ready_slots, row.filling_slots), row.now.slots_max)


def _host_state(row: HostView) -> Cell:
    return Cell(row.now.state, GOOD if row.now.state == "serving" and not row.note else BAD)


# --- the tables -----------------------------------------------------------------------------------

STREAMS: tuple[StatusColumn[StreamView], ...] = (
    StatusColumn("stream", lambda row: row.name, NAME, status=0, top=0, page="stream"),
    StatusColumn("samples", lambda row: "live" if row.now.live else f"{row.now.samples:,}", status=50),
    StatusColumn("batches", lambda row: f"{'' if row.now.live else f'{row.now.steps:,} '}x {row.now.batch_size}", status=60),
    StatusColumn("ring", _ring, SHORT, top=0),
    StatusColumn("leased", lambda row: str(row.leased_slots), status=MIDDLE, top=MIDDLE, page="slots leased"),
    StatusColumn("ready", lambda row: str(row.ready_slots), status=MIDDLE, top=MIDDLE, page="ready"),
    StatusColumn("filling", lambda row: str(row.filling_slots), top=WIDE, page="filling"),
    StatusColumn("slots", lambda row: str(row.now.slots), status=100),
    StatusColumn("max", lambda row: str(row.now.slots_max), status=MIDDLE),
    StatusColumn("of", lambda row: str(row.now.slots_max), top=MIDDLE, page="of"),
    StatusColumn("decoded", lambda row: f"{row.now.decoded_batches:,}", status=40),
    StatusColumn("delivered", lambda row: f"{row.now.delivered_batches:,}", status=0),
    StatusColumn("shared", lambda row: f"{row.now.shared_batches:,}", status=WIDE),
    StatusColumn("decoded/s", lambda row: _number(row.decoded_per_s), top=0, page="decoded/s"),
    StatusColumn("delivered/s", lambda row: _number(row.delivered_per_s), top=0, page="delivered/s"),
    StatusColumn("bad", lambda row: f"{row.now.bad_samples:,}", status=30, top=MIDDLE, page="bad samples"),
    StatusColumn("ms/sample", lambda row: f"{row.now.sample_s * 1000:.2f}", status=90),
)  # fmt: skip
"""The page shows a stream as a section; without scripts as a row."""

TRAINERS: tuple[StatusColumn[TrainerView], ...] = (
    StatusColumn("trainer", _who, NAME, status=0, top=0, page="trainer"),
    StatusColumn("pid", lambda row: "?" if row.trainer is GONE else str(row.trainer.pid or "-"), status=90),
    StatusColumn("from", _origin, status=110),
    StatusColumn("stream", lambda row: row.stream, STREAM, status=40, top=MIDDLE, page="stream"),
    StatusColumn("rank", lambda row: f"{row.claim.rank} of {row.claim.world_size}", status=MIDDLE, top=WIDE),
    StatusColumn("epoch:step", lambda row: _position(row, "{}:{:,}"), status=50, top=MIDDLE),
    StatusColumn("position", lambda row: _position(row, "epoch {:,}, step {:,}"), SHORT, page="position"),
    StatusColumn("held", lambda row: str(row.claim.held_slots), status=WIDE),
    StatusColumn("waits", lambda row: _share(row.wait_share), top=0, page="waits"),
    StatusColumn("ahead", lambda row: f"{row.ready_ahead} of {row.claim.window}", status=60, top=0, page="ready ahead"),
    StatusColumn("batches/s", lambda row: _number(row.batches_per_s, ",.1f"), page="batches/s"),
    StatusColumn("state", lambda row: "waiting" if row.claim.waiting else "busy", status=0),
    StatusColumn("waited", lambda row: duration(row.claim.wait_s), status=30),
    StatusColumn("from", _host, SHORT, top=WIDE, page="from"),
    StatusColumn("MB/s", _megabytes, status=WIDE, top=WIDE),
    StatusColumn("verdict", _verdict, VERDICT, top=0, page="verdict"),
)

WORKERS: tuple[StatusColumn[WorkerView], ...] = (
    StatusColumn("worker", lambda row: str(row.now.number), SHORT, status=0, top=0),
    StatusColumn("worker", lambda row: f"worker {row.now.number}", NAME, page="worker"),
    StatusColumn("pid", lambda row: str(row.now.pid or "-"), status=30, top=0, page="pid"),
    StatusColumn(
        "state", lambda row: Cell(row.now.state, "" if row.now.state == "ready" else BAD), SHORT, 0, 0, "state"
    ),
    StatusColumn("busy", lambda row: _share(row.busy_share), top=0, page="busy"),
    StatusColumn("", lambda row: Bar((row.busy_share or 0.0,), 1.0, is_short=True), SHORT, top=MIDDLE),
    StatusColumn("samples/s", lambda row: _number(row.samples_per_s), top=MIDDLE, page="samples/s"),
    StatusColumn("ms/sample", lambda row: _number(row.sample_ms, ",.2f"), top=0, page="ms/sample"),
    StatusColumn("orders", lambda row: str(row.now.orders), status=60, top=WIDE, page="orders"),
    StatusColumn("chunks", lambda row: f"{row.now.chunks:,}", status=50),
    StatusColumn("samples", lambda row: f"{row.now.samples:,}", status=40),
    StatusColumn("busy", lambda row: duration(row.now.busy_s), status=0),
    StatusColumn("replaced", lambda row: str(row.replaced), top=MIDDLE, page="replaced"),
)

USAGE: tuple[StatusColumn[UsageView], ...] = (
    StatusColumn("owner", lambda row: row.now.owner, NAME, status=0, page="owner"),
    StatusColumn("stream", lambda row: row.now.stream, STREAM, status=40, page="stream"),
    StatusColumn("share", lambda row: f"{row.now.tenant} x {row.now.weight:g}", SHORT, status=100, page="share"),
    StatusColumn("now", lambda row: _share(row.now_share), page="worker time now"),
    StatusColumn("of work", lambda row: _share(row.share), status=0, page="of all"),
    StatusColumn("CPU", lambda row: duration(row.now.cpu_s), status=30, page="CPU"),
    StatusColumn("made", lambda row: f"{row.now.made_samples:,}", status=60, page="samples made"),
    StatusColumn("read", lambda row: round_bytes(row.now.read_bytes), status=MIDDLE, page="read"),
    StatusColumn("delivered", lambda row: f"{row.now.delivered_samples:,}", status=50, page="samples delivered"),
    StatusColumn("bytes", lambda row: round_bytes(row.now.delivered_bytes), status=90, page="bytes"),
    StatusColumn("held", lambda row: round_bytes(row.now.held_bytes), status=MIDDLE, page="held"),
    StatusColumn("since", lambda row: duration(row.now.age_s), status=80, page="since"),
)

HOSTS: tuple[StatusColumn[HostView], ...] = (
    StatusColumn("worker host", lambda row: Cell(row.now.name, notes=(row.now.host,)), NAME, 0, 0, "worker host"),
    StatusColumn("from", lambda row: row.now.host, SHORT, status=90, top=WIDE),
    StatusColumn("key", lambda row: row.now.key or "-", status=110),
    StatusColumn("state", _host_state, SHORT, status=0, top=0, page="state"),
    StatusColumn("workers", lambda row: f"{row.now.workers:,}", status=0, top=0, page="workers"),
    StatusColumn("orders", lambda row: f"{row.now.orders:,}", status=100),
    StatusColumn("samples", lambda row: f"{row.now.samples:,}", status=40),
    StatusColumn("busy", lambda row: duration(row.now.busy_s), status=50),
    StatusColumn("GB", lambda row: f"{row.now.received_bytes / 1e9:.1f}", status=60),
    StatusColumn("busy", lambda row: _share(row.busy_share), top=MIDDLE, page="busy"),
    StatusColumn("samples/s", lambda row: _number(row.samples_per_s), top=0, page="samples/s"),
    StatusColumn("GB/s", lambda row: _number(row.bytes_per_s and row.bytes_per_s / 1e9, ".2f"), top=MIDDLE, page="GB/s"),
    StatusColumn("withdrawn", lambda row: f"{row.now.withdrawn:,}", status=MIDDLE, top=MIDDLE, page="withdrawn"),
    StatusColumn("late rows", lambda row: f"{row.now.late_rows:,}", status=WIDE, top=WIDE, page="late rows"),
    StatusColumn("disagreed", lambda row: f"{row.now.disagreements:,}", status=80, top=WIDE, page="disagreements"),
)  # fmt: skip
