"""The table of all paths and the answers at them. OBSERVER process; threads of the server.

    /metrics            numbers for Prometheus;  /healthz, /readyz  for probes
    /status.json        what `batchd status --json` prints
    /                   page.html, with the first state as tables for browsers without scripts
    /page.css, .js      beside it in the package
    /overview.json      the present state, each second
    /history.json       the last ?seconds=, at most 15 minutes
    /bad.json           bad samples of a stream;  /sheet.png  contact sheet of its current batch
    /losses.json        the last reports about a stream: positions and means

Invariants: a path that is not ``is_private`` has numbers, and names of streams, trainers and worker
hosts, and nothing else. Names are text, whatever they contain: escaped here, and inserted as text
by the page's script.
"""

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from email.message import Message
from html import escape
from importlib.resources import files
from math import isfinite
from struct import iter_unpack
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl

from batchd.observe.columns import HOSTS, STREAMS, TRAINERS, USAGE, WORKERS, Cell, Row, StatusColumn, page_cells
from batchd.observe.diagnosis.overview import Overview, StreamView
from batchd.observe.diagnosis.pool import PoolView, summary
from batchd.observe.http.access import AccessRules, HostNames, is_forwarded
from batchd.observe.http.contact_sheets import ContactSheets, current_position
from batchd.observe.http.metrics import CONTENT_TYPE, SCRAPE_S, Exposition
from batchd.observe.http.status_client import POINTS, STEP_S, StatusClient, StatusRecorder
from batchd_wire.position import Position
from batchd_wire.reports import HEAD, VALUE_BYTES
from batchd_wire.status import DaemonStatus, ReportPage, StreamDescription

PLAIN = "text/plain; charset=utf-8"
JSON = "application/json"
ANSWER_S = 2.0
"""How long a request waits for the daemon, or for a contact sheet."""
STATE_MARK, TITLE = "<!-- state -->", "<title>batchd</title>"
HISTORY_S = int(STEP_S * POINTS)
SECONDS_DIGITS = 9
PUBLIC_PATHS = "/metrics, /healthz and /readyz are public"
NO_ANSWER = "the daemon has not answered yet"
_FILES = files("batchd.observe.http") / "page"
_FILE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_OWN_SITES = {"same-origin", "none"}
"""``Sec-Fetch-Site`` of requests by our page, and of addresses that a user typed."""

Query = Mapping[str, str]
"""The query's parameters; of a repeated one the last."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response. ``status``: of HTTP."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Route:
    """One path."""

    answer: Callable[[Query], Response]
    meaning: str
    is_private: bool = False
    """It is only for users who may connect to the daemon."""
    has_effect: bool = False
    """A request costs the daemon something, so other web pages may not cause one in a browser."""


def text_response(status: int, text: str) -> Response:
    """One line for a user."""
    return Response(status, PLAIN, f"{text}\n".encode())


def json_response(value: object) -> Response:
    """Data for programs. Raises ``ValueError`` for numbers that JSON does not have."""
    return Response(200, JSON, json.dumps(value, allow_nan=False).encode())


class Router:
    """The table of all paths, and who gets their answers. Use from any thread."""

    def __init__(
        self,
        client: StatusClient,
        recorder: StatusRecorder,
        sheets: ContactSheets,
        names: HostNames,
        access: AccessRules,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._sheets = sheets
        self._names = names
        self._access = access
        self._exposition = Exposition(client)
        self._html = _text("page.html")
        self.routes: Mapping[str, Route] = {
            "/metrics": Route(self._metrics, "numbers for Prometheus"),
            "/healthz": Route(self._health, "200 as long as the daemon's loop answers"),
            "/readyz": Route(self._readiness, "200 when trainers get batches"),
            "/status.json": Route(self._status, "what `batchd status --json` prints", is_private=True),
            "/": Route(self._page, "a page to look at", is_private=True),
            "/page.css": _fixed("page.css"),
            "/page.js": _fixed("page.js"),
            "/plots.js": _fixed("plots.js"),
            "/icon.svg": _fixed("icon.svg"),
            "/overview.json": Route(self._overview, "what the page shows", is_private=True),
            "/history.json": Route(self._history, "?seconds=: the last ones, of 15 minutes", is_private=True),
            "/bad.json": Route(self._bad, "?stream=NAME: its bad samples", is_private=True),
            "/losses.json": Route(self._losses, "?stream=NAME: its last reported losses", is_private=True),
            "/sheet.png": Route(self._sheet, "?stream=NAME: its current batch", is_private=True, has_effect=True),
        }

    def answer(self, target: str, headers: "Message[str, str]", connection: socket.socket) -> Response:
        """Answer a request for ``target``, which arrived over ``connection``."""
        host, *further = headers.get_all("Host", [None])
        if further:
            return text_response(400, "a request has one Host header")  # RFC 9112, 3.2
        if host is None:
            return text_response(400, "a request needs a Host header")
        if not self._names.match(host):
            text = f"the Host header names {host}, which is no name of this machine: use an address, or add it to http_names"
            return text_response(421, text)
        path, _mark, query = target.partition("?")
        route = self.routes.get(path)
        if route is None:
            known = "\n".join(f"{path:<16}{route.meaning}" for path, route in self.routes.items())
            return text_response(404, f"unknown path; known are\n{known}")
        if route.is_private and not self._access.may_see_details(connection, headers):
            return text_response(403, self._refusal(connection, headers))
        if route.has_effect and headers.get("Sec-Fetch-Site", "none") not in _OWN_SITES:
            return text_response(403, "this path is for batchd's own page, not for other web pages")
        return route.answer(dict(parse_qsl(query)))

    def _refusal(self, connection: socket.socket, headers: "Message[str, str]") -> str:
        port = connection.getsockname()[1]
        forwarded = "a proxy forwarded the request, so its user is unknown; " if is_forwarded(headers) else ""
        return forwarded + (
            "this path shows processes, users and paths, so it is for users of the daemon's machine who may connect to "
            f"the daemon, over loopback: ssh -L {port}:localhost:{port} SERVER (with an account in the runtime directory's "
            f"group), then http://localhost:{port}; or http_details = true in [daemon] shows it to every client. {PUBLIC_PATHS}"
        )

    def _metrics(self, _query: Query) -> Response:
        return Response(200, CONTENT_TYPE, self._exposition.text())

    def _health(self, _query: Query) -> Response:
        if self._client.is_answered:
            return text_response(200, "ok")
        return text_response(503, f"the daemon's loop has not answered for {self._client.silent_s():.0f} s")

    def _readiness(self, _query: Query) -> Response:
        answer = self._client.latest()
        if not self._client.is_answered:
            return self._health({})
        reason = NO_ANSWER if answer is None else why_not_ready(answer.status)
        return text_response(200, "ready") if reason is None else text_response(503, reason)

    def _status(self, _query: Query) -> Response:
        answer = self._client.fresh(SCRAPE_S)
        if answer is None:
            return text_response(503, NO_ANSWER)
        observer = {"age_s": monotonic() - answer.received_s, "up": self._client.is_answered}
        return json_response({**answer.plain, "observer": observer})

    def _await_first_answer(self) -> None:
        """Just after the start, give the daemon a moment: a page greets with numbers."""
        if self._client.latest() is None:
            self._client.fresh(SCRAPE_S)

    def _page(self, _query: Query) -> Response:
        self._await_first_answer()
        overview = self._recorder.overview()
        state = f"<p>{NO_ANSWER.capitalize()}.</p>" if overview is None else "\n".join(tables_of(overview))
        host = overview.host if overview is not None else ""
        page = self._html.replace(TITLE, f"<title>{escape(host)} · batchd</title>" if host else TITLE, 1)
        return Response(200, "text/html; charset=utf-8", page.replace(STATE_MARK, state, 1).encode())

    def _overview(self, _query: Query) -> Response:
        self._await_first_answer()
        overview, answer = self._recorder.overview(), self._client.latest()
        if overview is None or answer is None:
            return text_response(503, NO_ANSWER)
        observer = {
            "age_s": monotonic() - answer.received_s,
            "silent_s": self._client.silent_s(),
            "up": self._client.is_answered,
        }
        return json_response({**plain_overview(overview), "observer": observer})

    def _history(self, query: Query) -> Response:
        wanted = query.get("seconds", "")
        seconds = min(int(wanted[:SECONDS_DIGITS]), HISTORY_S) if wanted.isascii() and wanted.isdigit() else HISTORY_S
        return json_response(self._recorder.history(seconds))

    def _bad(self, query: Query) -> Response:
        stream = self._stream(query)
        if stream is None:
            return _no_stream(query)
        answer = self._client.bad(stream, ANSWER_S)
        if answer is None:
            return text_response(503, NO_ANSWER)
        return json_response(answer.to_plain())

    def _losses(self, query: Query) -> Response:
        stream = self._stream(query)
        if stream is None:
            return _no_stream(query)
        page = self._client.reports(stream, ANSWER_S)
        return json_response({"runs": _runs_of(page) if page is not None else []})

    def _sheet(self, query: Query) -> Response:
        stream = self._stream(query)
        if stream is None:
            return _no_stream(query)
        answer = self._client.latest()
        found = answer.status.stream(stream) if answer is not None else None
        position = current_position(found) if found is not None else Position(0, 0)
        sheet = self._sheets.sheet(stream, position, ANSWER_S)
        if sheet is None:
            return text_response(202, "the sheet is being drawn")
        return Response(200, "image/png", sheet.picture) if sheet.picture else text_response(200, sheet.text)

    def _stream(self, query: Query) -> str | None:
        """The requested stream; None if there is none, or if it is its owner's alone."""
        overview, answer = self._recorder.overview(), self._client.latest()
        known = {stream.name for stream in overview.streams} if overview is not None else set()
        if answer is not None:
            known -= {one.name for one in answer.status.streams if one.description and one.description.owner}
        return query["stream"] if query.get("stream") in known else None


def why_not_ready(status: DaemonStatus) -> str | None:
    """Reason why trainers would get no batches, or None if they get them."""
    if status.daemon.draining:
        return "the daemon is draining"
    if not any(worker.state == "ready" for worker in status.workers):
        return "no worker is ready"
    if all(stream.stopped is not None for stream in status.streams):
        return "all streams have stopped; `batchd status` shows the reasons"
    return None


def _runs_of(page: ReportPage) -> list[dict[str, object]]:
    """The reports of each run: [epoch, step, rank, mean or None if that is no number], in order."""
    names = dict(zip(page.run_numbers, page.runs, strict=False))
    runs: dict[int, list[list[float | None]]] = {}
    if len(page.heads) % HEAD.size or len(page.values) != VALUE_BYTES * (len(page.heads) // HEAD.size):
        return []
    values = (mean for (mean,) in iter_unpack("<f", page.values))
    for head, mean in zip(HEAD.iter_unpack(page.heads), values, strict=True):
        epoch, step, _number, _first, _rows, _values, run, rank, _world_size = head
        runs.setdefault(run, []).append([epoch, step, rank, mean if isfinite(mean) else None])
    return [
        {"run": names.get(run, ""), "reports": sorted(reports, key=lambda report: report[:3])}
        for run, reports in runs.items()
    ]


def _no_stream(query: Query) -> Response:
    return text_response(404, f"there is no stream {query.get('stream', '')!r}")


def _text(name: str) -> str:
    return (_FILES / name).read_text("utf-8")


def _fixed(name: str) -> Route:
    kind = _FILE_TYPES[name.rpartition(".")[2]]
    response = Response(200, f"{kind}; charset=utf-8", _text(name).encode())
    return Route(lambda _query: response, "part of the page")


# --- the overview as plain data -------------------------------------------------------------------

_FACTS = ("batch_size", "stopped", "away", "away_s", "slots_max", "bad_samples", "samples", "repeats", "steps")


def plain_overview(overview: Overview) -> dict[str, object]:
    """What the page shows: rows of tables as cells, and for plots the numbers of each row."""
    left_out = ("streams", "trainers", "claims", "workers", "pool", "warnings", "usage")
    return {
        **{field.name: getattr(overview, field.name) for field in fields(overview) if field.name not in left_out},
        "warnings": [asdict(line) for line in overview.warnings],
        "streams": [_stream(stream) for stream in overview.streams],
        "columns": {
            name: [(column.page, column.kind) for column in columns if column.page] for name, columns in _TABLES.items()
        },
        "trainers": [
            {
                "stream": view.stream,
                "name": view.name,
                "wait_share": view.wait_share,
                "rank": view.claim.rank,
                "world_size": view.claim.world_size,
                "cells": page_cells(TRAINERS, view),
            }
            for view in overview.trainers
        ],
        "workers": [{"cells": page_cells(WORKERS, worker)} for worker in overview.workers],
        "usage": [{"cells": page_cells(USAGE, one)} for one in overview.usage],
        "pool": _pool(overview.pool) if overview.pool is not None else None,
    }


_TABLES: dict[str, tuple[StatusColumn[Any], ...]] = {
    "trainers": TRAINERS,
    "workers": WORKERS,
    "usage": USAGE,
    "hosts": HOSTS,
}


def _stream(one: StreamView) -> dict[str, object]:
    now = one.now
    return {
        **{each.name: getattr(one, each.name) for each in fields(one) if each.name != "now"},
        **{name: getattr(now, name) for name in _FACTS},
        "is_live": now.live is not None,
        "partial_slots": now.partial_slots or 0,
        "reports": now.reports.received if now.reports is not None else 0,
        "description": asdict(now.description or StreamDescription()),
    }


def _pool(pool: PoolView) -> dict[str, object]:
    return {
        "workers": pool.workers,
        "summary": summary(pool),
        "notes": pool.notes,
        "hosts": [{"cells": page_cells(HOSTS, host)} for host in pool.hosts],
        "hosts_count": pool.hosts_count,
    }


# --- without JavaScript ---------------------------------------------------------------------------


def tables_of(overview: Overview) -> Iterable[str]:
    """The page's facts as HTML tables, for browsers without scripts."""
    host = f" on {escape(overview.host)}" if overview.host else ""
    yield f"<p>batchd {escape(overview.version)}{host}, up {overview.uptime_s:.0f} s</p>"
    yield _table("Trainers", TRAINERS, overview.trainers)
    yield _table("Streams", STREAMS, overview.streams)
    yield _table("Workers", WORKERS, overview.workers)
    if len(overview.usage) > 1:
        yield _table("Usage", USAGE, overview.usage)
    if overview.pool is not None:
        yield f"<p>{escape('; '.join([summary(overview.pool), *overview.pool.notes]))}</p>"
        yield _table("Worker hosts", HOSTS, overview.pool.hosts)


def _table(title: str, columns: tuple[StatusColumn[Row], ...], rows: Iterable[Row]) -> str:
    head = "".join(f'<th scope="col">{escape(column.page)}</th>' for column in columns if column.page)
    body = "".join(f"<tr>{''.join(map(_cell, page_cells(columns, row)))}</tr>" for row in rows)
    return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: Cell) -> str:
    notes = "".join(f"<small>{escape(note)}</small>" for note in cell.notes)
    return f"<td>{escape(cell.text)}{notes}</td>"
