"""The page at ``/`` and what it asks for. OBSERVER process; threads of the server.

    /                  page.html, with the first state as plain tables for browsers without JavaScript
    /page.css, .js     beside it in the package
    /overview.json     what is now, each second;  /history.json  what was
    /bad.json          the bad samples of a stream;  /sheet.png  a contact sheet of its current batch

Invariant: whatever names say, they are text: escaped here, and put in as text by the page's script.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from time import monotonic

from batchd.diagnosis.overview import Overview
from batchd.observer.contact_sheets import Sheets, current_position
from batchd.observer.history import Chronicle
from batchd.observer.inquiry import Inquiry
from batchd.observer.responses import Query, Response, Route, as_json, say
from batchd_wire.position import Position

ANSWER_S = 2.0
"""How long a visitor waits for what the daemon, or a child, has to say."""
STATE_MARK = "<!-- state -->"
_FILES = files("batchd.observer") / "page"
_FILE_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Pages:
    """Answers for the paths in ``routes``. Use from any thread."""

    def __init__(self, inquiry: Inquiry, chronicle: Chronicle, sheets: Sheets) -> None:
        self._inquiry = inquiry
        self._chronicle = chronicle
        self._sheets = sheets
        self._html = _text("page.html")
        self.routes: Mapping[str, Route] = {
            "/": Route(self._page, "a page to look at", is_private=True),
            "/page.css": _fixed("page.css"),
            "/page.js": _fixed("page.js"),
            "/plots.js": _fixed("plots.js"),
            "/icon.svg": _fixed("icon.svg"),
            "/overview.json": Route(self._overview, "what the page shows", is_private=True),
            "/history.json": Route(self._history, "the last 15 minutes", is_private=True),
            "/bad.json": Route(self._bad, "?stream=NAME: its bad samples", is_private=True),
            "/sheet.png": Route(self._sheet, "?stream=NAME: its current batch", is_private=True, has_effect=True),
        }

    def _page(self, _query: Query) -> Response:
        overview = self._chronicle.overview()
        state = "<p>The daemon has not answered yet.</p>" if overview is None else "\n".join(_tables(overview))
        return Response(200, "text/html; charset=utf-8", self._html.replace(STATE_MARK, state).encode())

    def _overview(self, _query: Query) -> Response:
        overview, answer = self._chronicle.overview(), self._inquiry.latest()
        if overview is None or answer is None:
            return say(503, "the daemon has not answered yet")
        observer = {
            "age_s": monotonic() - answer.came_s,
            "silent_s": self._inquiry.silent_s(),
            "up": self._inquiry.is_answered,
        }
        return as_json({**asdict(overview), "observer": observer})

    def _history(self, _query: Query) -> Response:
        return as_json(self._chronicle.history())

    def _bad(self, query: Query) -> Response:
        stream = self._stream(query)
        if stream is None:
            return _no_stream(query)
        answer = self._inquiry.bad(stream, ANSWER_S)
        if answer is None:
            return say(503, "the daemon has not answered yet")
        keys = ("sample", "path", "reason", "times")
        return as_json(
            {"total": answer.total, "samples": [dict(zip(keys, bad, strict=True)) for bad in answer.samples]}
        )

    def _sheet(self, query: Query) -> Response:
        stream = self._stream(query)
        if stream is None:
            return _no_stream(query)
        sheet = self._sheets.sheet(stream, self._position(stream), ANSWER_S)
        if sheet is None:
            return say(202, "it is being drawn")
        return Response(200, "image/png", sheet.picture) if sheet.picture else say(200, sheet.text)

    def _position(self, stream: str) -> Position:
        """Which batch is the current one."""
        answer = self._inquiry.latest()
        found = answer.status.stream(stream) if answer is not None else None
        return current_position(found) if found is not None else Position(0, 0)

    def _stream(self, query: Query) -> str | None:
        """The stream that is asked for, where there is one of that name."""
        overview = self._chronicle.overview()
        known = {stream.name for stream in overview.streams} if overview is not None else set()
        return query["stream"] if query.get("stream") in known else None


def _no_stream(query: Query) -> Response:
    return say(404, f"there is no stream {query.get('stream', '')!r}")


def _text(name: str) -> str:
    return (_FILES / name).read_text("utf-8")


def _fixed(name: str) -> Route:
    kind = _FILE_TYPES[name.rpartition(".")[2]]
    response = Response(200, f"{kind}; charset=utf-8", _text(name).encode())
    return Route(lambda _query: response, "part of the page")


# --- without JavaScript -----------------------------------------------------------------------------------------------


def _tables(overview: Overview) -> Iterable[str]:
    yield f"<p>batchd {escape(overview.version)}, up {overview.uptime_s:.0f} s</p>"
    yield _table(
        "Trainers",
        ("trainer", "stream", "waits", "ready ahead", "verdict", "proof", "what helps"),
        (
            (
                one.name,
                one.stream,
                _share(one.wait_share),
                f"{one.ready_ahead} of {one.window}",
                *((one.verdict.kind, one.verdict.proof, one.verdict.remedy) if one.verdict else ("", "", "")),
            )
            for one in overview.trainers
        ),
    )
    yield _table(
        "Streams",
        ("stream", "slots leased", "ready", "filling", "of", "decoded/s", "delivered/s", "bad samples"),
        (
            (
                one.name,
                *map(str, (one.leased_slots, one.ready_slots, one.filling_slots, one.slots_max)),
                _number(one.decoded_per_s),
                _number(one.delivered_per_s),
                str(one.bad_samples),
            )
            for one in overview.streams
        ),
    )
    yield _table(
        "Workers",
        ("worker", "pid", "state", "busy", "ms/sample"),
        (
            (str(one.place), str(one.pid or ""), one.state, _share(one.busy_share), _number(one.sample_ms, 2))
            for one in overview.workers
        ),
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"
