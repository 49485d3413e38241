"""The columns of streams, trainers, workers and worker hosts, each declared once. Pure.

    Overview --cells of these columns--> `batchd status`, `batchd top`, the page, the page's JSON

A column says where it is: in a terminal from which width on, by command, and on the page under
which title. A cell is text with a look and, on the page, notes below it; each place draws these in
its own way. The order is that of every place.

Invariant: a cell is text from anybody, which the place that shows it escapes.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from batchd.observe.diagnosis.overview import GONE, StreamView, TrainerView, WorkerView
from batchd.observe.diagnosis.pool import HostView
from batchd.observe.diagnosis.verdicts import Kind
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
    cells = (one.cell(row) for one in columns if one.page)
    return [one if isinstance(one, Cell) else Cell(one) for one in cells if not isinstance(one, Bar)]


# --- the words of cells ---------------------------------------------------------------------------


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _megabytes(one: TrainerView) -> str:
    return "-" if one.trainer.sent_bytes_per_s is None else f"{one.trainer.sent_bytes_per_s / 1e6:.1f}"


def _who(one: TrainerView) -> Cell:
    pid = "" if one.trainer.pid is None else f"pid {one.trainer.pid}"
    rank = f"rank {one.claim.rank} of {one.claim.world_size}" if one.claim.world_size > 1 else ""
    return Cell(one.name, notes=(", ".join(filter(None, (pid, rank))),))


def _origin(one: TrainerView) -> str:
    """Where a trainer runs, which decides how it gets batches, and the name of its key."""
    if one.trainer.transport != "tcp":
        return one.trainer.transport
    several = f" x{one.trainer.connections}" if one.trainer.connections > 1 else ""
    return f"tcp {one.trainer.host}{several}" + (f" ({one.trainer.key})" if one.trainer.key else "")


def _host(one: TrainerView) -> Cell:
    rate = "" if one.trainer.sent_bytes_per_s is None else f"{_megabytes(one)} MB/s"
    return Cell(one.trainer.host or one.trainer.transport, notes=(rate,))


def _position(one: TrainerView, form: str) -> str:
    return "at its end" if one.claim.epoch is None else form.format(one.claim.epoch, one.claim.step)


def _verdict(one: TrainerView) -> Cell:
    """On the page with the proof and what helps, last."""
    found = one.verdict
    if one.is_still:
        text = f"{'waiting' if one.claim.waiting else 'stands still'} for {duration(one.still_s)}"
        kind = [] if found is None or found.kind == Kind.STANDS_STILL.value else [found.kind]
        return Cell(text, BAD, () if found is None else (*kind, found.proof, found.remedy))
    if found is None:
        return Cell("-" if one.claim.epoch is not None else "at its end", PLAIN)
    return Cell(found.kind, GOOD if found.is_healthy else BAD, (found.proof, found.remedy))


def _ring(one: StreamView) -> Bar:
    return Bar((one.leased_slots, one.ready_slots, one.filling_slots), one.now.slots_max)


def _host_state(one: HostView) -> Cell:
    return Cell(one.now.state, GOOD if one.now.state == "serving" and not one.note else BAD)


# --- the tables -----------------------------------------------------------------------------------

STREAMS: tuple[StatusColumn[StreamView], ...] = (
    StatusColumn("stream", lambda one: one.name, NAME, status=0, top=0, page="stream"),
    StatusColumn("samples", lambda one: "live" if one.now.live else f"{one.now.samples:,}", status=50),
    StatusColumn("batches", lambda one: f"{'' if one.now.live else f'{one.now.steps:,} '}x {one.now.batch_size}", status=60),
    StatusColumn("ring", _ring, SHORT, top=0),
    StatusColumn("leased", lambda one: str(one.leased_slots), status=MIDDLE, top=MIDDLE, page="slots leased"),
    StatusColumn("ready", lambda one: str(one.ready_slots), status=MIDDLE, top=MIDDLE, page="ready"),
    StatusColumn("filling", lambda one: str(one.filling_slots), top=WIDE, page="filling"),
    StatusColumn("slots", lambda one: str(one.now.slots), status=100),
    StatusColumn("max", lambda one: str(one.now.slots_max), status=MIDDLE),
    StatusColumn("of", lambda one: str(one.now.slots_max), top=MIDDLE, page="of"),
    StatusColumn("decoded", lambda one: f"{one.now.decoded_batches:,}", status=40),
    StatusColumn("delivered", lambda one: f"{one.now.delivered_batches:,}", status=0),
    StatusColumn("shared", lambda one: f"{one.now.shared_batches:,}", status=WIDE),
    StatusColumn("decoded/s", lambda one: _number(one.decoded_per_s), top=0, page="decoded/s"),
    StatusColumn("delivered/s", lambda one: _number(one.delivered_per_s), top=0, page="delivered/s"),
    StatusColumn("bad", lambda one: f"{one.now.bad_samples:,}", status=30, top=MIDDLE, page="bad samples"),
    StatusColumn("ms/sample", lambda one: f"{one.now.sample_s * 1000:.2f}", status=90),
)  # fmt: skip
"""The page shows a stream as a section; without scripts as a row."""

TRAINERS: tuple[StatusColumn[TrainerView], ...] = (
    StatusColumn("trainer", _who, NAME, status=0, top=0, page="trainer"),
    StatusColumn("pid", lambda one: "?" if one.trainer is GONE else str(one.trainer.pid or "-"), status=90),
    StatusColumn("from", _origin, status=110),
    StatusColumn("stream", lambda one: one.stream, STREAM, status=40, top=MIDDLE, page="stream"),
    StatusColumn("rank", lambda one: f"{one.claim.rank} of {one.claim.world_size}", status=MIDDLE, top=WIDE),
    StatusColumn("epoch:step", lambda one: _position(one, "{}:{:,}"), status=50, top=MIDDLE),
    StatusColumn("position", lambda one: _position(one, "epoch {:,}, step {:,}"), SHORT, page="position"),
    StatusColumn("held", lambda one: str(one.claim.held_slots), status=WIDE),
    StatusColumn("waits", lambda one: _share(one.wait_share), top=0, page="waits"),
    StatusColumn("ahead", lambda one: f"{one.ready_ahead} of {one.claim.window}", status=60, top=0, page="ready ahead"),
    StatusColumn("batches/s", lambda one: _number(one.batches_per_s, ",.1f"), page="batches/s"),
    StatusColumn("state", lambda one: "waiting" if one.claim.waiting else "busy", status=0),
    StatusColumn("waited", lambda one: duration(one.claim.wait_s), status=30),
    StatusColumn("from", _host, SHORT, top=WIDE, page="from"),
    StatusColumn("MB/s", _megabytes, status=WIDE, top=WIDE),
    StatusColumn("verdict", _verdict, VERDICT, top=0, page="verdict"),
)

WORKERS: tuple[StatusColumn[WorkerView], ...] = (
    StatusColumn("worker", lambda one: str(one.now.number), SHORT, status=0),
    StatusColumn("worker", lambda one: str(one.now.place), SHORT, top=0),
    StatusColumn("worker", lambda one: f"worker {one.now.place}", NAME, page="worker"),
    StatusColumn("pid", lambda one: str(one.now.pid or "-"), status=30, top=0, page="pid"),
    StatusColumn(
        "state", lambda one: Cell(one.now.state, "" if one.now.state == "ready" else BAD), SHORT, 0, 0, "state"
    ),
    StatusColumn("busy", lambda one: _share(one.busy_share), top=0, page="busy"),
    StatusColumn("", lambda one: Bar((one.busy_share or 0.0,), 1.0, is_short=True), SHORT, top=MIDDLE),
    StatusColumn("samples/s", lambda one: _number(one.samples_per_s), top=MIDDLE, page="samples/s"),
    StatusColumn("ms/sample", lambda one: _number(one.sample_ms, ",.2f"), top=0, page="ms/sample"),
    StatusColumn("orders", lambda one: str(one.now.orders), status=60, top=WIDE, page="orders"),
    StatusColumn("chunks", lambda one: f"{one.now.chunks:,}", status=50),
    StatusColumn("samples", lambda one: f"{one.now.samples:,}", status=40),
    StatusColumn("busy", lambda one: duration(one.now.busy_s), status=0),
    StatusColumn("replaced", lambda one: str(one.replaced), top=MIDDLE, page="replaced"),
)

HOSTS: tuple[StatusColumn[HostView], ...] = (
    StatusColumn("worker host", lambda one: Cell(one.now.name, notes=(one.now.host,)), NAME, 0, 0, "worker host"),
    StatusColumn("from", lambda one: one.now.host, SHORT, status=90, top=WIDE),
    StatusColumn("key", lambda one: one.now.key or "-", status=110),
    StatusColumn("state", _host_state, SHORT, status=0, top=0, page="state"),
    StatusColumn("workers", lambda one: f"{one.now.workers:,}", status=0, top=0, page="workers"),
    StatusColumn("orders", lambda one: f"{one.now.orders:,}", status=100),
    StatusColumn("samples", lambda one: f"{one.now.samples:,}", status=40),
    StatusColumn("busy", lambda one: duration(one.now.busy_s), status=50),
    StatusColumn("GB", lambda one: f"{one.now.received_bytes / 1e9:.1f}", status=60),
    StatusColumn("busy", lambda one: _share(one.busy_share), top=MIDDLE, page="busy"),
    StatusColumn("samples/s", lambda one: _number(one.samples_per_s), top=0, page="samples/s"),
    StatusColumn("GB/s", lambda one: _number(one.bytes_per_s and one.bytes_per_s / 1e9, ".2f"), top=MIDDLE, page="GB/s"),
    StatusColumn("withdrawn", lambda one: f"{one.now.withdrawn:,}", status=MIDDLE, top=MIDDLE, page="withdrawn"),
    StatusColumn("late rows", lambda one: f"{one.now.late_rows:,}", status=WIDE, top=WIDE, page="late rows"),
    StatusColumn("disagreed", lambda one: f"{one.now.disagreements:,}", status=80, top=WIDE, page="disagreements"),
)  # fmt: skip
